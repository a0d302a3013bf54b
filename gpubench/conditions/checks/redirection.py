"""Settings that send what GPUs and NICs exchange through the CPU: ACS and a translating IOMMU."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.pci_capabilities import PciKind
from gpubench.model.facts.snapshot import PciDevice
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.verdict import Finding, Verdict

_REDIRECTS = ("request_redirect", "completion_redirect", "upstream_forwarding")
_TRANSLATING = ("DMA", "DMA-FQ")


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for redirecting ports below switches on the way to a GPU, and for translated addresses.

    Not in virtual machines, where the hypervisor needs both and shows neither truly.
    """
    for node in facts.nodes:
        if node.snapshot.machine.virtual_machine or not node.gpus:
            continue
        ports = _redirecting(node)
        if ports:
            yield Finding(
                id="acs-redirects",
                severity=Verdict.WARN,
                subject=f"{facts.subject(node)} {len(ports)} PCIe ports",
                seen=f"access control redirects at {ports[0].bus_id}" + (" and others" if len(ports) > 1 else ""),
                expected="off below the switches between GPUs and NICs",
                cause="the BIOS, or a kernel that isolates devices: peer traffic goes up to the root port and back",
                next_command="setpci -s PORT ECAP_ACS+0x6.w=0000 as root, or ACS off in the BIOS; not in guests",
            )
        types = sorted({each for each in node.snapshot.kernel.iommu.group_types.values() if each in _TRANSLATING})
        if types:
            yield Finding(
                id="iommu-translates",
                severity=Verdict.WARN,
                subject=facts.subject(node),
                seen=f"the IOMMU translates the addresses of GPUs and NICs ({', '.join(types)})",
                expected="identity: iommu=pt, or no IOMMU",
                cause="the kernel's default: peer copies may be slow, or arrive damaged",
                next_command="iommu=pt on the kernel's command line; gpubench p2p verifies every copy",
            )


def _redirecting(node: Topology) -> list[PciDevice]:
    """Ports below a switch: at a root port there is nothing left to redirect."""
    return [
        device
        for device in node.snapshot.pci_devices
        if device.kind is PciKind.DOWNSTREAM_PORT
        and device.access_control is not None
        and any(each in _REDIRECTS for each in device.access_control.enabled)
    ]


REDIRECTION = Check("redirection", "neither ACS nor the IOMMU stands between GPUs and NICs", find)
