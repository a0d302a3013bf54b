"""PCIe on the way between GPUs, NICs and CPUs: links that trained low, redirection (ACS), translation, errors."""

from collections.abc import Callable, Iterator, Mapping

from gpubench.conditions.cause import Cause, Family, Sighting, Unread, joined
from gpubench.conditions.circumstances import Circumstances
from gpubench.conditions.sightings import sureness
from gpubench.model.facts.error_counts import FEW_MEANWHILE, pcie_errors
from gpubench.model.facts.pci_capabilities import PciKind
from gpubench.model.facts.snapshot import GpuFacts, NicKind, PciDevice, PcieLink
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.selection import Pair
from gpubench.model.paths.topology import Device, Topology
from gpubench.model.results.rows.causes import Effect

_REDIRECTS = ("request_redirect", "completion_redirect", "upstream_forwarding")
_DIRECT = "direct_translated"
_TRANSLATES = ("DMA", "DMA-FQ")
_BELOW_ONE_SWITCH = ("PIX", "PXB")


def _place(around: Circumstances, number: int, device: Device) -> frozenset[int]:
    """The positions that a device's trouble touches: of a GPU its own, of a NIC all of the node."""
    if isinstance(device, GpuFacts):
        found = [position for position, node, gpu in around.gpus() if gpu is device and node is around.nodes[number]]
        return frozenset(found)
    return around.gpus_of(number)


def _devices(node: Topology) -> Iterator[Device]:
    """The GPUs, and the NICs that carry GPUs' data: onboard Ethernet hangs on fewer lanes than its chip has."""
    yield from node.gpus
    yield from (nic for nic in node.nics if nic.kind is not NicKind.ETHERNET)


def _width(around: Circumstances) -> Iterator[Sighting | Unread]:
    for number, node in around.nodes.items():
        for device in _devices(node):
            link = device.pcie
            if link.width and link.max_width and link.width < link.max_width:
                yield Sighting(
                    subject=around.on(number, device.device),
                    seen=f"PCIe x{link.width} of x{link.max_width}",
                    confidence=Confidence.PROVEN,
                    gpus=_place(around, number, device),
                )


def _generation(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Of busy GPUs and of NICs: an idle GPU lowers its generation to save power."""
    for number, node in around.nodes.items():
        for device in _devices(node):
            busy = not isinstance(device, GpuFacts) or device.idle is False
            if busy and _is_slow(device.pcie):
                yield Sighting(
                    subject=around.on(number, device.device),
                    seen=f"PCIe generation {device.pcie.generation} of {device.pcie.max_generation}",
                    confidence=Confidence.LIKELY,
                    gpus=_place(around, number, device),
                )


def _is_slow(link: PcieLink) -> bool:
    return bool(link.generation and link.max_generation and link.generation < link.max_generation)


def _uplink(around: Circumstances) -> Iterator[Sighting | Unread]:
    for number, node in around.nodes.items():
        links = {switch.bus_id: switch.link for switch in node.snapshot.switches}
        ports = (each for each in node.snapshot.pci_devices if each.kind is PciKind.UPSTREAM_PORT)
        links |= {each.bus_id: each.link for each in ports}
        for bus_id, link in links.items():
            narrow = bool(link.width and link.max_width and link.width < link.max_width)
            if narrow or _is_slow(link):
                below = [gpu.bus_id for gpu in node.gpus if bus_id in gpu.place.switches]
                gpus = [position for position, of, gpu in around.gpus() if of is node and gpu.bus_id in below]
                yield Sighting(
                    subject=around.on(number, f"uplink of switch {bus_id}"),
                    seen=f"PCIe {link.generation or '?'} x{link.width or '?'} of {link.max_generation or '?'} "
                    f"x{link.max_width or '?'}",
                    confidence=Confidence.PROVEN if narrow else Confidence.LIKELY,
                    gpus=frozenset(gpus) or around.gpus_of(number),
                )


def _errors(around: Circumstances) -> Iterator[Sighting | Unread]:
    for number, node in around.nodes.items():
        gpus = {gpu.device: gpu for gpu in node.gpus}
        kinds = {each.bus_id: each.kind.replace("_", " ") for each in node.snapshot.pci_devices}
        for errors in pcie_errors(node.snapshot):
            gpu, kind = gpus.get(errors.device), kinds.get(errors.device, "")
            yield Sighting(
                subject=around.on(number, *filter(None, (kind, errors.device))),
                seen=errors.seen,
                confidence=sureness(errors),
                gpus=around.gpus_of(number) if gpu is None else _place(around, number, gpu),
            )


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
    """Whether a bridge lets through what both devices had translated before, redirection or not."""
    control = bridge.access_control
    asked = all((device := devices.get(end or "")) is not None and device.address_translation for end in ends)
    return asked and control is not None and _DIRECT in control.enabled


def _redirected(
    around: Circumstances, number: int, one: Device, other: Device, gpus: frozenset[int], pair: Pair | None
) -> Iterator[Sighting | Unread]:
    """Bridges between two devices that send their traffic up to the root: by their registers, else by IOMMU groups."""
    devices = around.pci_devices[number]
    bridges = _between(devices, one.bus_id, other.bus_id)
    subject = around.on(number, f"{one.device} – {other.device}")
    pairs = None if pair is None else frozenset((pair, pair[::-1]))
    unread = {}
    for bridge in bridges:
        control = bridge.access_control
        if control is None:
            unread[bridge.bus_id] = bridge.unknown.get("access_control", "its access control was not read")
            continue
        found = [each for each in _REDIRECTS if each in control.enabled]
        if found and not _is_translated(devices, bridge, one.bus_id, other.bus_id):
            seen = f"ACS of {bridge.bus_id}: {joined(found).replace('_', ' ')}"
            cure = f"setpci -s {bridge.bus_id} ECAP_ACS+0x6.w=0000"
            yield Sighting(subject=subject, seen=seen, confidence=Confidence.PROVEN, gpus=gpus, pairs=pairs, cure=cure)
            return
    groups = [devices[each].iommu_group if each in devices else None for each in (one.bus_id or "", other.bus_id or "")]
    if unread and None not in groups and groups[0] != groups[1]:
        seen = f"two devices of one switch are in IOMMU groups {groups[0]} and {groups[1]}, which ACS splits"
        yield Sighting(subject=subject, seen=seen, confidence=Confidence.LIKELY, gpus=gpus, pairs=pairs)
    elif unread:
        yield Unread(subject, f"ACS of {joined(list(unread))}: {joined(list(unread.values()))}")


def _acs(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Between GPUs that reach each other over PCIe switches."""
    found = list(around.gpus())
    for place, (position, node, gpu) in enumerate(found):
        for other, of, peer in found[place + 1 :]:
            pair = (position, other)
            if of is node and node.path(gpu, peer) in _BELOW_ONE_SWITCH:
                number = around.wiring.gpus[position].node
                yield from _redirected(around, number, gpu, peer, frozenset(pair), pair)


def _acs_nic(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Between GPUs and the RDMA NICs beside them."""
    for position, node, gpu in around.gpus():
        number = around.wiring.gpus[position].node
        for nic in node.nics:
            if nic.rdma and node.path(gpu, nic) in _BELOW_ONE_SWITCH:
                yield from _redirected(around, number, gpu, nic, frozenset((position,)), None)


def _translating(around: Circumstances) -> Iterator[Sighting | Unread]:
    """GPUs behind a translating IOMMU that reach others over PCIe: NVLink's bytes do not pass it."""
    for position, node, gpu in around.gpus():
        kernel = node.snapshot.kernel
        device = around.pci_devices[around.wiring.gpus[position].node].get(gpu.bus_id or "")
        over_pcie = any(nic.rdma for nic in node.nics) or any(
            not node.nvlinks(gpu, other) and node.peer_access(gpu, other).possible
            for other in node.gpus
            if other is not gpu
        )
        if device is None or device.iommu_group is None or not over_pcie:
            continue
        kind = kernel.iommu.group_types.get(str(device.iommu_group))
        if kind in _TRANSLATES:
            yield Sighting(
                subject=around.name(position),
                seen=f"IOMMU group {device.iommu_group} has type {kind}: it translates",
                confidence=Confidence.LIKELY,
                gpus=frozenset((position,)),
            )
        elif kind is None:
            reason = kernel.iommu.unknown.get("group_types", "the type of its group was not read")
            yield Unread(around.name(position), reason)


_SLOW = (Effect.SLOW,)
_TROUBLESHOOTING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_ACS_CURE = (
    "for b in $(lspci -D | awk '/PCI bridge/{print $1}'); do setpci -s $b ECAP_ACS+0x6.w=0000; done as root on bare "
    "metal; better, ACS off in the BIOS. Not inside a VM"
)


def _link(id_: str, title: str, detection: str, look: Callable[..., Iterator[Sighting | Unread]], link: str) -> Cause:
    """What links that trained low have in common."""
    return Cause(
        id=id_,
        title=title,
        seen_as=("LnkSta: Speed 16GT/s (downgraded), Width x8 (downgraded)",),
        effects=_SLOW,
        detection=detection,
        settles="lspci -vv -s BUS_ID | grep -E 'LnkCap|LnkSta' while gpubench p2p runs",
        cure="reseat the card or riser, look for the slot's lanes and generation in the BIOS and the board's manual",
        link=link,
        look=look,
    )


PCIE = Family(
    "pcie",
    "PCIe",
    (
        Cause(
            id="acs-redirect",
            title="PCIe ACS redirects P2P between GPUs through the CPU's root port: half the bandwidth, or a hang",
            effects=(Effect.SLOW, Effect.WRONG),
            detection="request redirect, completion redirect or upstream forwarding in the ACS registers of the "
            "bridges between two GPUs (needs root); else two GPUs of one switch in different IOMMU groups",
            settles="sudo gpubench topo --causes; sudo lspci -vvv | grep ACSCtl",
            cure=_ACS_CURE,
            link=f"{_TROUBLESHOOTING}#pci-access-control-services-acs",
            look=_acs,
        ),
        Cause(
            id="acs-nic-redirect",
            title="PCIe ACS redirects GPUDirect RDMA between GPU and NIC: InfiniBand bandwidth halved",
            effects=_SLOW,
            detection="the ACS registers of the bridges between a GPU and an RDMA NIC below one switch (needs root), "
            "or their IOMMU groups",
            settles="ib_write_bw with and without --use_cuda; sudo lspci -vvv | grep ACSCtl",
            cure=f"{_ACS_CURE}: there, ATS on NIC and GPU",
            link="https://github.com/NVIDIA/nccl/issues/949",
            look=_acs_nic,
        ),
        Cause(
            id="iommu-translating",
            title="The IOMMU translates (not iommu=pt): P2P over PCIe slow, corrupt or hanging",
            seen_as=("AMD-Vi: Event logged [IO_PAGE_FAULT]", "DMAR: [DMA Write] Request device"),
            effects=(Effect.SLOW, Effect.WRONG),
            detection="/sys/kernel/iommu_groups/N/type of a GPU that reaches others over PCIe: DMA or DMA-FQ",
            settles="cat /proc/cmdline; dmesg | grep -i 'IO_PAGE_FAULT\\|DMAR'",
            cure="boot with iommu=pt (or off in the BIOS), then see that gpubench p2p verifies all data",
            link="https://github.com/NVIDIA/nccl/issues/606",
            look=_translating,
        ),
        _link(
            "pcie-width",
            "A GPU or NIC runs on fewer PCIe lanes than it has (LnkSta: Width x8, downgraded)",
            "current against maximal width, NVML and /sys current_link_width",
            _width,
            "https://github.com/NVIDIA/nccl/issues/2397",
        ),
        _link(
            "pcie-uplink",
            "The uplink of a PCIe switch runs at a lower width or generation than it could",
            "current against maximal width and generation of every upstream port above GPUs and NICs",
            _uplink,
            "https://github.com/local-inference-lab/rtx6kpro/pull/88",
        ),
        _link(
            "pcie-generation",
            "A GPU under load, or a NIC, runs at a lower PCIe generation than it could (LnkSta: Speed 8GT/s)",
            "current against maximal generation, of GPUs that are not idle",
            _generation,
            "https://github.com/NVIDIA/NVSentinel/issues/890",
        ),
        Cause(
            id="pcie-errors",
            title="PCIe replays or AER errors (BadTLP, ACSViol, correctable errors) on the way of a GPU",
            seen_as=("PCIe Bus Error: severity=Corrected", "Replays Since Reset"),
            effects=_SLOW,
            detection="aer_dev_* in /sys of every hop, and NVML's replay counter: more than "
            f"{FEW_MEANWHILE} that come while p2p or check runs, or any that cannot be corrected; weak where they were "
            "read once: totals far above those of siblings, or fatal ones",
            settles="the same again after gpubench p2p: do they grow? dmesg | grep AER",
            cure="reseat the card, riser or cable; a slower generation in the BIOS where errors go on",
            link="https://github.com/NVIDIA/NVSentinel/issues/890",
            look=_errors,
        ),
    ),
)
