"""Redirection of traffic between PCIe peers up to the CPU: access control (ACS), and an IOMMU that translates."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import permutations

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Sighting,
    Unread,
    in_each_node,
    joined,
)
from gpubench.conditions.definition.sightings import of_gpu
from gpubench.conditions.definition.subjects import reaches_over_pcie, uses_pcie
from gpubench.model.facts.pci_capabilities import PciKind
from gpubench.model.facts.snapshot import PciDevice
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.topology import UNKNOWN_PATH, Device, Topology

_REDIRECTS = ("request_redirect", "completion_redirect", "upstream_forwarding")
_DIRECT = "direct_translated"
_TRANSLATES = ("DMA", "DMA-FQ")
_MAYBE_BELOW_ONE_SWITCH = ("PIX", "PXB", UNKNOWN_PATH)


def _on_metal(run: Circumstances) -> Iterator[tuple[int, Topology]]:
    """Nodes that are no virtual machines: a hypervisor needs redirection and translation, and shows neither truly."""
    found = run.nodes.items()
    return ((number, node) for number, node in found if not node.snapshot.machine.virtual_machine)


def _hidden(run: Circumstances) -> Found:
    """The virtual machines, of which nobody knows."""
    for number, node in run.nodes.items():
        if node.snapshot.machine.virtual_machine and reaches_over_pcie(node):
            yield Unread(run.on(number), "a virtual machine does not show what its host redirects")


def _above(devices: Mapping[str, PciDevice], bus_id: str | None) -> list[PciDevice]:
    """The bridges above a device, the nearest first."""
    found: list[PciDevice] = []
    device = devices.get(bus_id or "")
    while device is not None and device.above and len(found) < len(devices):
        device = devices.get(device.above)
        found += [device] if device is not None else []
    return found


def _between(devices: Mapping[str, PciDevice], one: str | None, other: str | None) -> list[PciDevice]:
    """The bridges that what two devices below a common switch send each other passes; none where they share none."""
    mine, theirs = _above(devices, one), _above(devices, other)
    shared = {each.bus_id for each in mine} & {each.bus_id for each in theirs}
    if not any(each.bus_id in shared and each.kind is not PciKind.ROOT_PORT for each in mine):
        return []
    return [each for each in (*mine, *theirs) if each.bus_id not in shared]


def _is_translated(devices: Mapping[str, PciDevice], bridge: PciDevice, *ends: str | None) -> bool:
    """True if a bridge lets through what both devices had translated before, redirection or not."""
    control = bridge.access_control
    asked = all((device := devices.get(end or "")) is not None and device.address_translation for end in ends)
    return asked and control is not None and _DIRECT in control.enabled


def _redirected(run: Circumstances, number: int, couples: Iterable[tuple[Device, Device, tuple[int, ...]]]) -> Found:
    """Couples below a switch whose traffic bridges send up to the root: by their registers, else by IOMMU groups."""
    devices = run.pci_devices[number]
    unseen: list[str] = []
    redirected, split, hidden = (dict[tuple[str, tuple[int, ...]], dict[str, str]]() for _ in range(3))
    for one, other, gpus in couples:
        bridges = _between(devices, one.bus_id, other.bus_id)
        found = {each.bus_id: joined(_redirects(devices, each, one, other)).replace("_", " ") for each in bridges}
        closed = {
            each.bus_id: each.unknown.get("access_control", _UNREAD) for each in bridges if not each.access_control
        }
        ends = (devices.get(each.bus_id or "") for each in (one, other))
        groups = {str(each.iommu_group) for each in ends if each is not None and each.iommu_group is not None}
        couple = run.on(number, f"{one.device} – {other.device}"), gpus
        if not bridges:
            unseen.append(couple[0])
        if any(found.values()):
            redirected[couple] = {bridge: said for bridge, said in found.items() if said}
        elif closed:
            (split if len(groups) > 1 else hidden)[couple] = (
                dict.fromkeys(sorted(groups), "") if len(groups) > 1 else closed
            )
    if redirected:
        bridges_seen = dict(pair for each in redirected.values() for pair in each.items())
        seen = f"ACS of {joined(bridges_seen)}: {joined(bridges_seen.values())}"
        cures = [f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in bridges_seen]
        yield _of_couples(redirected, seen, Confidence.PROVEN, "; ".join(cures) if len(cures) <= _MOST_CURED else "")
    if split:
        groups_seen = joined(group for each in split.values() for group in each)
        yield _of_couples(
            split, f"devices of one switch are in IOMMU groups {groups_seen}, which ACS splits", Confidence.LIKELY
        )
    if unseen:
        yield Unread(joined(unseen), "the bridges between them were not read")
    if hidden:
        reasons = dict(pair for each in hidden.values() for pair in each.items())
        yield Unread(joined(name for name, _ in hidden), f"ACS of {joined(reasons)}: {joined(reasons.values())}")


def _of_couples(
    couples: Collection[tuple[str, tuple[int, ...]]], seen: str, confidence: Confidence, cure: str = ""
) -> Sighting:
    """On couples of devices, by name and with the GPUs among them; two GPUs are a pair both ways."""
    names = tuple(name for name, _ in couples)
    return Sighting(
        subject=joined(names),
        seen=seen,
        confidence=confidence,
        gpus=frozenset(gpu for _, gpus in couples for gpu in gpus),
        pairs=frozenset(pair for _, gpus in couples for pair in permutations(gpus, 2)) or None,
        names=names,
        cure=cure,
    )


def _redirects(devices: Mapping[str, PciDevice], bridge: PciDevice, one: Device, other: Device) -> list[str]:
    control = bridge.access_control
    if control is None or _is_translated(devices, bridge, one.bus_id, other.bus_id):
        return []
    return [each for each in _REDIRECTS if each in control.enabled]


@in_each_node
def _acs(run: Circumstances) -> Found:
    """Between GPUs that reach each other over PCIe switches."""
    yield from _hidden(run)
    for number, node in _on_metal(run):
        gpus = [(each, gpu) for each in sorted(run.gpus_of(number)) if (gpu := run.wiring.gpu(each)) is not None]
        couples = (
            (gpu, peer, (one, other))
            for place, (one, gpu) in enumerate(gpus)
            for other, peer in gpus[place + 1 :]
            if node.path(gpu, peer) in _MAYBE_BELOW_ONE_SWITCH
        )
        yield from _redirected(run, number, couples)


@in_each_node
def _acs_nic(run: Circumstances) -> Found:
    """Between GPUs and the RDMA NICs beside them."""
    yield from _hidden(run)
    for number, node in _on_metal(run):
        couples = (
            (gpu, nic, (position,))
            for position in sorted(run.gpus_of(number))
            if (gpu := run.wiring.gpu(position)) is not None
            for nic in node.nics
            if nic.rdma and node.path(gpu, nic) in _MAYBE_BELOW_ONE_SWITCH
        )
        yield from _redirected(run, number, couples)


@in_each_node
def _translating(run: Circumstances) -> Found:
    """GPUs behind a translating IOMMU that reach others over PCIe: NVLink's bytes do not pass it."""
    yield from _hidden(run)
    metal = dict(_on_metal(run))
    for position, node, gpu in run.gpus():
        number = run.wiring.gpus[position].node
        if number not in metal or not uses_pcie(node, gpu):
            continue
        device, iommu = run.pci_devices[number].get(gpu.bus_id or ""), node.snapshot.kernel.iommu
        if device is None:
            yield Unread(run.name(position), "it is not among the PCI devices that were read")
        elif device.iommu_group is None:
            if iommu.units != ():
                yield Unread(run.name(position), "its IOMMU group was not read")
        elif (kind := iommu.group_types.get(str(device.iommu_group))) is None:
            yield Unread(run.name(position), iommu.unknown.get("group_types", "the type of its group was not read"))
        elif kind in _TRANSLATES:
            yield of_gpu(run, position, f"its IOMMU group has type {kind}: it translates", Confidence.LIKELY)


_MOST_CURED = 4
_UNREAD = "its access control was not read"
_TROUBLESHOOTING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_ACS_CURE = (
    "for b in $(lspci -D | awk '/PCI bridge/{print $1}'); do setpci -s $b ECAP_ACS+0x6.w=0000; done as root on bare "
    "metal; better, ACS off in the BIOS. Not inside a VM"
)
_ACS_LIKELY = "the BIOS, or a kernel that isolates devices: peer traffic goes up to the root port and back"

REDIRECTION = Family.of(
    "redirection",
    "PCIe traffic by way of the CPU",
    Condition(
        id="acs-redirect",
        title="PCIe ACS redirects P2P between GPUs through the CPU's root port: half the bandwidth, or a hang",
        detection="request redirect, completion redirect or upstream forwarding in the ACS registers of the "
        "bridges between two GPUs (needs root); else two GPUs of one switch in different IOMMU groups",
        settles="sudo gpubench topo --causes; sudo lspci -vvv | grep ACSCtl",
        check="redirection",
        expected="off below the switches between GPUs",
        likely=_ACS_LIKELY,
        aliases=("acs-redirects",),
        cure=_ACS_CURE,
        link=f"{_TROUBLESHOOTING}#pci-access-control-services-acs",
        look=_acs,
    ),
    Condition(
        id="acs-nic-redirect",
        title="PCIe ACS redirects GPUDirect RDMA between GPU and NIC: InfiniBand bandwidth halved",
        detection="the ACS registers of the bridges between a GPU and an RDMA NIC below one switch (needs root), "
        "or their IOMMU groups",
        settles="ib_write_bw with and without --use_cuda; sudo lspci -vvv | grep ACSCtl",
        check="redirection",
        expected="off below the switches between GPUs and NICs",
        likely=_ACS_LIKELY,
        aliases=("acs-redirects",),
        cure=f"{_ACS_CURE}: there, ATS on NIC and GPU",
        link="https://github.com/NVIDIA/nccl/issues/949",
        look=_acs_nic,
    ),
    Condition(
        id="iommu-translating",
        title="The IOMMU translates (not iommu=pt): P2P over PCIe slow, corrupt or hanging",
        seen_as=("AMD-Vi: Event logged [IO_PAGE_FAULT]", "DMAR: [DMA Write] Request device"),
        detection="/sys/kernel/iommu_groups/N/type of a GPU that reaches others over PCIe: DMA or DMA-FQ",
        check="redirection",
        expected="identity: iommu=pt, or no IOMMU",
        likely="the kernel's default: peer copies may be slow, or arrive damaged",
        aliases=("iommu-translates",),
        settles="cat /proc/cmdline; dmesg | grep -i 'IO_PAGE_FAULT\\|DMAR'",
        cure="boot with iommu=pt (or off in the BIOS), then see that gpubench p2p verifies all data",
        link="https://github.com/NVIDIA/nccl/issues/606",
        look=_translating,
    ),
)
