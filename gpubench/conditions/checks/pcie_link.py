"""PCIe links that trained lower than they could."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.snapshot import GpuFacts, NicKind, PcieLink
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for lost lanes; a warning for a low generation, but not of an idle GPU, which lowers it to save power.

    Plain Ethernet is passed over: onboard ports hang on fewer lanes than their chip has, and carry no GPU's data.
    """
    for node in facts.nodes:
        links = [
            (facts.subject(node, device), device.pcie, isinstance(device, GpuFacts) and not _busy(device))
            for device in node.devices
            if isinstance(device, GpuFacts) or device.kind is not NicKind.ETHERNET
        ]
        host = f"{node.snapshot.host} " if len(facts.nodes) > 1 else ""
        links += [
            (f"{host}the uplink of switch {switch.bus_id}", switch.link, False) for switch in node.snapshot.switches
        ]
        for subject, link, may_be_slow in links:
            if link.width and link.max_width and link.width < link.max_width:
                yield _finding(subject, "pcie-width", Verdict.FAIL, f"{link.width} of {link.max_width} lanes")
            if _is_slow(link) and not may_be_slow:
                seen = f"generation {link.generation} of {link.max_generation}"
                yield _finding(subject, "pcie-generation", Verdict.WARN, seen)


def _busy(gpu: GpuFacts) -> bool:
    return gpu.idle is False


def _is_slow(link: PcieLink) -> bool:
    return bool(link.generation and link.max_generation and link.generation < link.max_generation)


def _finding(subject: str, name: str, severity: Verdict, seen: str) -> Finding:
    return Finding(
        id=name,
        severity=severity,
        subject=subject,
        seen=f"PCIe trained to {seen}",
        expected="what both ends of the link can do",
        cause="a riser or slot with fewer lanes, a card not seated, a BIOS setting, dirt on the contacts",
        next_command="lspci -vv -s BUS_ID | grep -E 'LnkCap|LnkSta'; reseat the card",
    )


PCIE_LINK = Check("pcie_link", "PCIe links run at full width, and at full speed under load", find)
