"""PCIe links that are degraded, report errors or are shared by pairs, and traffic that ACS or an IOMMU redirects to
the CPU.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.circumstances import VERIFIED_COPIES, Circumstances, Found, Sighting, Unread, joined
from gpubench.conditions.condition import Condition, Family, error_severity, single_node
from gpubench.conditions.subjects import (
    OF_THE_BOARD,
    gpudirect_nics,
    is_desktop,
    is_soldered,
    reaches_over_pcie,
    uses_pcie,
)
from gpubench.model.facts.health import pcie_errors
from gpubench.model.facts.snapshot import GpuFacts, PciDevice, PcieLink, PciKind, find_display_cards
from gpubench.model.paths.nics import port_roles
from gpubench.model.paths.topology import UNKNOWN_PATH, Device, Topology, may_save_power, pcie_ceiling_gb_s
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import format_bandwidth, percent
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict

_BELOW_ONE_SWITCH = ("PIX", "PXB")

_COLLAPSED = 2.0
"""If reads of the same pairs are this many times faster than writes, the links are not the bottleneck.

If the links are the bottleneck, reads and writes differ by at most a third (H200, over NVLink).
"""

_SEVERAL = 2


class _Lane(Struct, frozen=True):
    """A PCIe link that GPU traffic uses.

    - link: width and generation that the link has trained to, and what its device supports
    - most: width and generation that both ends support
    - ends_known: True if the port at the other end was read
    - alike: links of siblings, which are GPUs or NICs of the same model, or ports with the same kind of device below
    - fixed: True for a link without a slot, so that it cannot have been built with fewer lanes
    """

    device: Device | PciDevice
    link: PcieLink
    most: PcieLink
    ends_known: bool
    alike: tuple[PcieLink, ...] = ()
    fixed: bool = False

    @property
    def is_narrow(self) -> bool:
        """True if the link uses fewer lanes than its device supports."""
        return _less(self.link.width, self.link.max_width)

    @property
    def is_slow(self) -> bool:
        """True if the link runs at a lower generation than its device supports."""
        return _less(self.link.generation, self.link.max_generation)

    @property
    def percent(self) -> float | None:
        """Bandwidth of the link in percent of the bandwidth that its device supports."""
        most = PcieLink(generation=self.link.max_generation, width=self.link.max_width)
        return percent(pcie_ceiling_gb_s(self.link), pcie_ceiling_gb_s(most))

    def severity(self, value: str, fault: Verdict, *, desktop: bool) -> Verdict:
        """Return the severity of a low `width` or `generation`.

        A low value is a fault, unless the other end of the link or the siblings show that it is the board's limit.
        """
        own = getattr(self.link, value) or 0
        at_most = self.ends_known and not _less(own, getattr(self.most, value))
        others = [getattr(link, value) for link in self.alike]
        if any(_less(own, other) for other in others):
            if self.ends_known and not at_most:
                return fault
            return Verdict.SKIP if desktop else Verdict.WARN if at_most else fault
        if self.fixed and value == "width" and not at_most:
            return fault
        return Verdict.SKIP if at_most or others or not self.ends_known else Verdict.WARN


def _less(value: int | None, most: int | None) -> bool:
    return bool(value and most and value < most)


def _lower(one: int | None, other: int | None) -> int | None:
    return min(filter(None, (one, other)), default=None)


def _lanes(run: Circumstances, number: int, node: Topology) -> Iterator[_Lane]:
    """Yield the PCIe links of GPUs, and of NICs that carry GPU traffic."""
    devices = run.pci_devices[number]
    ports = port_roles(node).gpu_ports
    gpus = [gpu for gpu in node.gpus if gpu not in find_display_cards(node.gpus)]
    served: tuple[Device, ...] = (*gpus, *ports)
    for device in served:
        family: Sequence[Device] = node.gpus if isinstance(device, GpuFacts) else ports
        name = _model(device)
        alike = tuple(other.pcie for other in family if other is not device and _model(other) == name)
        above = devices.get(known.above or "") if (known := devices.get(device.bus_id or "")) else None
        fixed = isinstance(device, GpuFacts) and is_soldered(device)
        yield _lane(device, device.pcie, above, alike, fixed=fixed)


def _model(device: Device) -> str | None:
    return device.name if isinstance(device, GpuFacts) else device.model


def _lane(
    device: Device | PciDevice,
    link: PcieLink,
    above: PciDevice | None,
    alike: tuple[PcieLink, ...],
    *,
    fixed: bool = False,
) -> _Lane:
    other = PcieLink() if above is None else above.link
    most = replace(
        link,
        width=_lower(link.max_width, other.max_width),
        generation=_lower(link.max_generation, other.max_generation),
    )
    return _Lane(device, link, most, other.max_width is not None, alike, fixed)


def _limited(severity: Verdict) -> dict[str, Any]:
    return {"severity": severity} | ({"likely": OF_THE_BOARD} if severity is Verdict.SKIP else {})


@single_node
def _width(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        for lane in _lanes(run, number, node):
            if lane.is_narrow and not isinstance(lane.device, PciDevice):
                severity = lane.severity("width", Verdict.FAIL, desktop=is_desktop(node))
                seen = f"PCIe trained to {lane.link.width} of {lane.link.max_width} lanes"
                yield run.device_sighting(
                    number, lane.device, seen, **_limited(severity), expected_percent=lane.percent
                )


@single_node
def _generation(run: Circumstances) -> Found:
    """Find busy GPUs, and NICs, that run at a low PCIe generation. Idle GPUs lower it to save power."""
    for number, node in run.nodes.items():
        for lane in _lanes(run, number, node):
            device = lane.device
            if (
                not lane.is_slow
                or isinstance(device, PciDevice)
                or (isinstance(device, GpuFacts) and may_save_power(device))
            ):
                continue
            severity = lane.severity("generation", Verdict.WARN, desktop=is_desktop(node))
            seen = f"PCIe trained to generation {lane.link.generation} of {lane.link.max_generation}"
            more = {**_limited(severity), "expected_percent": lane.percent}
            yield run.device_sighting(number, device, seen, Confidence.LIKELY, **more)


@single_node
def _uplink(run: Circumstances) -> Found:
    """Find degraded links above GPUs and their NICs. The port at either end of a link may show this."""
    for number, node in run.nodes.items():
        uplinks = {switch.bus_id: switch.link for switch in node.snapshot.switches}
        ports = (device for device in node.snapshot.pci_devices if device.kind is PciKind.UPSTREAM_PORT)
        uplinks |= {port.bus_id: port.link for port in ports}
        above = {switch for gpu in node.gpus for switch in gpu.place.switches}
        known = {switch for switch, link in uplinks.items() if link.width and link.max_width}
        unread = sorted((above | uplinks.keys()) - known)
        if unread:
            yield Unread(run.subject(number), f"the uplink of switch {joined(unread)} was not read")
        for bus_id, lane, gpus in _lanes_above(run, number, uplinks):
            own_ends = "the uplink of switch" if bus_id in uplinks else "the link below port"
            narrow = lane.is_narrow
            if narrow or lane.is_slow:
                value, fault = ("width", Verdict.FAIL) if narrow else ("generation", Verdict.WARN)
                severity = lane.severity(value, fault, desktop=False)
                now = f"{lane.link.generation or '?'} x{lane.link.width or '?'}"
                most = f"{lane.link.max_generation or '?'} x{lane.link.max_width or '?'}"
                yield run.node_sighting(
                    number,
                    f"PCIe trained to generation {now} of {most}",
                    Confidence.PROVEN if narrow else Confidence.LIKELY,
                    f"{own_ends} {bus_id}",
                    places=(DevicePlace(run.nodes[number].snapshot.host, f"{own_ends.split()[-1]} {bus_id}", bus_id),),
                    gpus=gpus or run.node_gpus(number),
                    **_limited(severity),
                    expected_percent=lane.percent,
                )


def _lanes_above(
    run: Circumstances, number: int, uplinks: Mapping[str, PcieLink]
) -> Iterator[tuple[str, _Lane, frozenset[int]]]:
    """Yield uplinks of switches, and ports with fewer lanes than the device below them.

    Each comes with its bus id and the positions of the GPUs below it.
    """
    devices = run.pci_devices[number]
    for bus_id, link in uplinks.items():
        switch = devices.get(bus_id) or PciDevice(bus_id=bus_id, kind=PciKind.UPSTREAM_PORT)
        alike = tuple(other for other_id, other in uplinks.items() if other_id != bus_id)
        lane = _lane(switch, link, devices.get(switch.above or ""), alike, fixed=not alike)
        yield bus_id, lane, _gpus_below(run, number, bus_id)
    lower = [(device, port) for device in devices.values() if (port := devices.get(device.above or "")) is not None]
    for device, port in lower:
        gpus = _gpus_below(run, number, device.bus_id)
        if (gpus or device.bus_id in uplinks) and _less(port.link.width, device.link.width):
            alike = tuple(other.link for below, other in lower if below.kind is device.kind and other is not port)
            yield port.bus_id, _lane(port, port.link, device, alike, fixed=not alike), gpus


def _gpus_below(run: Circumstances, number: int, bus_id: str) -> frozenset[int]:
    """Return the position of the GPU with this bus id, or the positions of all GPUs below the switch with it."""
    known = ((position, run.wiring.gpu(position)) for position in run.node_gpus(number))
    return frozenset(
        position
        for position, gpu in known
        if gpu is not None and (gpu.bus_id == bus_id or bus_id in gpu.place.switches)
    )


@single_node
def _errors(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        gpus = {gpu.device: gpu for gpu in node.gpus}
        kinds = {device.bus_id: device.kind.replace("_", " ") for device in node.snapshot.pci_devices}
        for errors in pcie_errors(node.snapshot):
            gpu = gpus.get(errors.device)
            if gpu is not None:
                yield run.device_sighting(number, gpu, errors.seen, **error_severity(errors))
            else:
                judged = error_severity(errors)
                words = filter(None, (kinds.get(errors.device), errors.device))
                yield run.node_sighting(number, errors.seen, judged.pop("confidence"), *words, **judged)


def _shared_uplink(run: Circumstances) -> Found:
    for pair in run.staged or ():
        refusal = run.refusals.get(pair)
        if refusal is not None and refusal.is_by_design and run.wiring.path(pair) in _BELOW_ONE_SWITCH:
            yield run.pair_sighting(
                [pair],
                f"{run.wiring.path(pair)} pair through host memory: both directions share one uplink",
                Confidence.LIKELY,
            )


def _write_collapse(run: Circumstances) -> Found:
    """Find pairs whose simultaneous writes (copies by the sources) are much slower than reads (copies by the
    destinations).
    """
    for copies in run.together:
        pairs = _converging(run, copies.pairs)
        if pairs and copies.read_gb_s > _COLLAPSED * copies.write_gb_s:
            seen = (
                f"{copies.pattern}: writes reach {format_bandwidth(copies.write_gb_s, 3)} in total, reads "
                f"{format_bandwidth(copies.read_gb_s, 3)}"
            )
            yield run.pair_sighting(pairs, seen, Confidence.LIKELY)


def _converging(run: Circumstances, pairs: Sequence[Pair]) -> list[Pair]:
    by_switch: dict[tuple[int, str], list[Pair]] = {}
    for pair in pairs:
        source, destination = (run.wiring.gpu(gpu) for gpu in pair)
        if source is None or destination is None or run.wiring.has_nvlinks(pair):
            continue
        for switch in source.place.switches[:1]:
            if switch not in destination.place.switches and destination.place.host_bridge is not None:
                by_switch.setdefault((run.wiring.gpus[pair[0]].node, switch), []).append(pair)
    return [
        pair
        for members in by_switch.values()
        if len({source for source, _ in members}) >= _SEVERAL and len(_roots(run, members)) >= _SEVERAL
        for pair in members
    ]


def _roots(run: Circumstances, pairs: Sequence[Pair]) -> set[str]:
    found = (run.wiring.gpu(destination) for _, destination in pairs)
    return {gpu.place.host_bridge for gpu in found if gpu is not None and gpu.place.host_bridge is not None}


_link = partial(
    Condition,
    settles="`lspci -vv -s BUS_ID | grep -E 'LnkCap|LnkSta'` while `gpubench p2p` runs",
    check="pcie_link",
    expected="the width and generation that both ends of the link support",
    likely="a riser or slot with fewer lanes, a card that is not seated, a BIOS setting, or dirty contacts",
    command="lspci -vv -s BUS_ID | grep -E 'LnkCap|LnkSta'",
    comment="Reseat the card or riser. Check the slot's lanes and generation in the BIOS and in the board's manual.",
)


PCIE = Family.of(
    "pcie",
    "PCIe links",
    _link(
        id="pcie-width",
        title="A GPU or NIC uses fewer PCIe lanes than it supports (LnkSta: Width x8, downgraded)",
        look=_width,
        link="https://github.com/NVIDIA/nccl/issues/2397",
    ),
    _link(
        id="pcie-uplink",
        title="A PCIe link above GPUs (root port, switch) runs at a lower width or generation than it supports",
        look=_uplink,
        link="https://github.com/local-inference-lab/rtx6kpro/pull/88",
        aliases=("pcie-width", "pcie-generation"),
    ),
    _link(
        id="pcie-generation",
        title="A busy GPU or a NIC runs at a lower PCIe generation than it supports (LnkSta: Speed 8GT/s)",
        look=_generation,
        link="https://github.com/NVIDIA/NVSentinel/issues/890",
    ),
    Condition(
        id="pcie-errors",
        title="PCIe replays or AER errors (BadTLP, ACSViol, correctable errors) on a GPU's path",
        settles="`dmesg | grep AER` before and after `gpubench p2p` (new errors confirm it)",
        check="pcie_errors",
        likely="a riser or slot, dirty contacts, or a card that is not seated",
        command="dmesg | grep AER",
        comment="Reseat the card, riser or cable. If errors continue, set a lower PCIe generation in the BIOS.",
        link="https://github.com/NVIDIA/NVSentinel/issues/890",
        look=_errors,
    ),
    Condition(
        id="posted-write-collapse",
        title="P2P writes (but not reads) become slow when several GPUs under one PCIe switch write to several "
        "root complexes",
        settles="`gpubench p2p`, where all to all is slow for writes and fast for reads, and each pair alone is "
        "fast for both",
        command="NCCL_P2P_READ_ENABLE=1 gpubench alltoall",
        comment="Keep the setting if this run is faster and its data are right. Otherwise, spread the cards over "
        "several root complexes.",
        link="https://github.com/local-inference-lab/rtx6kpro",
        look=_write_collapse,
    ),
    Condition(
        id="staging-shares-uplink",
        title="Copies through host memory are slower if both GPUs are under the same PCIe switch",
        settles="`gpubench p2p`, where PIX pairs are slower than SYS pairs",
        comment="Nothing to repair: both directions share the switch's uplink. Spread ranks over several switches.",
        link="https://github.com/NVIDIA/nccl/issues/1086",
        look=_shared_uplink,
        by_design=True,
    ),
)

_REDIRECTS = ("request_redirect", "completion_redirect", "upstream_forwarding")
_DIRECT = "direct_translated"
_TRANSLATES = ("DMA", "DMA-FQ")
_MAYBE_BELOW_ONE_SWITCH = ("PIX", "PXB", UNKNOWN_PATH)


def _bare_metal_nodes(run: Circumstances) -> Iterator[tuple[int, Topology]]:
    """Yield nodes that are not virtual machines, since a guest cannot see its host's ACS and IOMMU settings."""
    found = run.nodes.items()
    return ((number, node) for number, node in found if not node.snapshot.machine.virtual_machine)


def _hidden(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        if node.snapshot.machine.virtual_machine and reaches_over_pcie(node):
            yield Unread(run.subject(number), "a virtual machine does not show its host's ACS and IOMMU settings")


def _above(devices: Mapping[str, PciDevice], bus_id: str | None) -> list[PciDevice]:
    found: list[PciDevice] = []
    device = devices.get(bus_id or "")
    while device is not None and device.above and len(found) < len(devices):
        device = devices.get(device.above)
        found += [device] if device is not None else []
    return found


def _between(devices: Mapping[str, PciDevice], one: str | None, other: str | None) -> list[PciDevice]:
    mine, theirs = _above(devices, one), _above(devices, other)
    shared = {device.bus_id for device in mine} & {their.bus_id for their in theirs}
    if not any(device.bus_id in shared and device.kind is not PciKind.ROOT_PORT for device in mine):
        return []
    return [device for device in (*mine, *theirs) if device.bus_id not in shared]


def _is_translated(devices: Mapping[str, PciDevice], bridge: PciDevice, *ends: str | None) -> bool:
    """True if both devices use address translation (ATS) and the bridge forwards translated requests directly."""
    control = bridge.access_control
    asked = all((device := devices.get(end or "")) is not None and device.address_translation for end in ends)
    return asked and control is not None and _DIRECT in control.enabled


def _redirected(run: Circumstances, number: int, couples: Iterable[tuple[Device, Device, tuple[int, ...]]]) -> Found:
    """Find devices below the same switch whose traffic is redirected through the root complex.

    Evidence is the ACS registers of the bridges between them. If they could not be read, it is the IOMMU groups.
    """
    devices = run.pci_devices[number]
    unseen: list[str] = []
    redirected, split, hidden = (dict[tuple[str, tuple[int, ...]], dict[str, str]]() for _ in range(3))
    for one, other, gpus in couples:
        bridges = _between(devices, one.bus_id, other.bus_id)
        found = {bridge.bus_id: joined(_redirects(devices, bridge, one, other)).replace("_", " ") for bridge in bridges}
        closed = {
            bridge.bus_id: bridge.unknown.get("access_control", _UNREAD)
            for bridge in bridges
            if not bridge.access_control
        }
        ends = (devices.get(end.bus_id or "") for end in (one, other))
        groups = {str(end.iommu_group) for end in ends if end is not None and end.iommu_group is not None}
        couple = run.subject(number, f"{one.device} – {other.device}"), gpus
        if not bridges:
            unseen.append(couple[0])
        if any(found.values()):
            redirected[couple] = {bridge: said for bridge, said in found.items() if said}
        elif closed:
            (split if len(groups) > 1 else hidden)[couple] = (
                dict.fromkeys(sorted(groups), "") if len(groups) > 1 else closed
            )
    if redirected:
        bridges_seen = dict(pair for bridges in redirected.values() for pair in bridges.items())
        seen = f"ACS redirects traffic ({joined(bridges_seen.values())}) at {joined(bridges_seen)}"
        switched = f"for bridge in {' '.join(bridges_seen)}; do setpci -s $bridge ECAP_ACS+0x6.w=0000; done"
        commands = _SHOW_ACS, f"{VERIFIED_COPIES} && {switched} && {VERIFIED_COPIES}"
        cure = Cure(commands, f"Run it as root. The second command switches ACS off until the next boot. {_ACS_OFF}")
        yield _couple_sighting(redirected, seen, Confidence.PROVEN, cure)
    if split:
        groups_seen = joined(group for groups in split.values() for group in groups)
        yield _couple_sighting(
            split, f"devices under the same switch are in different IOMMU groups: {groups_seen}", Confidence.LIKELY
        )
    if unseen:
        yield Unread(joined(unseen), "the bridges between them were not read")
    if hidden:
        reasons = dict(pair for closed in hidden.values() for pair in closed.items())
        yield Unread(joined(name for name, _ in hidden), f"ACS of {joined(reasons)}: {joined(reasons.values())}")


def _couple_sighting(
    couples: Collection[tuple[str, tuple[int, ...]]], seen: str, confidence: Confidence, cure: Cure = NO_CURE
) -> Sighting:
    """Return a sighting that affects pairs of devices. Each has a name and the positions of its GPUs.

    Two GPUs count as a pair in both directions.
    """
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
    return [redirect for redirect in _REDIRECTS if redirect in control.enabled]


@single_node
def _acs(run: Circumstances) -> Found:
    yield from _hidden(run)
    for number, node in _bare_metal_nodes(run):
        gpus = [
            (position, gpu)
            for position in sorted(run.node_gpus(number))
            if (gpu := run.wiring.gpu(position)) is not None
        ]
        couples = (
            (gpu, peer, (one, other))
            for place, (one, gpu) in enumerate(gpus)
            for other, peer in gpus[place + 1 :]
            if node.path(gpu, peer) in _MAYBE_BELOW_ONE_SWITCH
        )
        yield from _redirected(run, number, couples)


@single_node
def _acs_nic(run: Circumstances) -> Found:
    yield from _hidden(run)
    for number, node in _bare_metal_nodes(run):
        couples = (
            (gpu, nic, (position,))
            for position in sorted(run.node_gpus(number))
            if (gpu := run.wiring.gpu(position)) is not None
            for nic in gpudirect_nics(node, gpu)
        )
        yield from _redirected(run, number, couples)


@single_node
def _translating(run: Circumstances) -> Found:
    """Find GPUs behind a translating IOMMU that use PCIe to reach other devices. NVLink traffic bypasses the IOMMU."""
    yield from _hidden(run)
    metal = dict(_bare_metal_nodes(run))
    for position, node, gpu in run.gpus():
        number = run.wiring.gpus[position].node
        if number not in metal or not uses_pcie(node, gpu):
            continue
        device, iommu = run.pci_devices[number].get(gpu.bus_id or ""), node.snapshot.kernel.iommu
        if device is None:
            yield Unread(run.gpu_name(position), "its PCI device was not read")
        elif device.iommu_group is None:
            if iommu.units != ():
                yield Unread(run.gpu_name(position), "its IOMMU group was not read")
        elif (kind := iommu.group_types.get(str(device.iommu_group))) is None:
            yield Unread(run.gpu_name(position), iommu.unknown.get("group_types", "the type of its group was not read"))
        elif kind in _TRANSLATES:
            yield run.gpu_sighting(position, f"IOMMU group type {kind}: addresses are translated", Confidence.LIKELY)


_UNREAD = "its access control was not read"
_TROUBLESHOOTING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_SHOW_ACS = "sudo lspci -vvv | grep -i acsctl"
_ACS_OFF = (
    "Switch ACS off in the BIOS, but not on a host of virtual machines, because ACS isolates their devices. "
    "Before running any jobs, verify the data with `gpubench p2p`."
)
_ACS_LIKELY = "ACS switched on by the BIOS, or by a kernel that isolates devices"

REDIRECTION = Family.of(
    "redirection",
    "PCIe traffic redirected through the CPU",
    Condition(
        id="acs-redirect",
        title="PCIe ACS redirects P2P between GPUs through the CPU's root port: half the bandwidth, or a hang",
        settles="sudo gpubench topo --causes; sudo lspci -vvv | grep ACSCtl",
        check="redirection",
        expected="ACS redirection off at the switches between GPUs",
        likely=_ACS_LIKELY,
        aliases=("acs-redirects",),
        command=_SHOW_ACS,
        comment=_ACS_OFF,
        link=f"{_TROUBLESHOOTING}#pci-access-control-services-acs",
        look=_acs,
    ),
    Condition(
        id="acs-nic-redirect",
        title="PCIe ACS redirects GPUDirect RDMA between GPU and NIC: half the InfiniBand bandwidth",
        settles="`ib_write_bw` with and without `--use_cuda`, and `sudo lspci -vvv | grep ACSCtl`",
        check="redirection",
        expected="ACS redirection off at the switches between GPUs and NICs",
        likely=_ACS_LIKELY,
        aliases=("acs-redirects",),
        command=_SHOW_ACS,
        comment=f"{_ACS_OFF} In a virtual machine, switch on ATS for NIC and GPU.",
        link="https://github.com/NVIDIA/nccl/issues/949",
        look=_acs_nic,
    ),
    Condition(
        id="iommu-translating",
        title="IOMMU address translation is on (not iommu=pt): P2P over PCIe may be slow, corrupt data or hang",
        check="redirection",
        expected="identity mapping (iommu=pt), or no IOMMU",
        likely="the kernel's default (peer copies may be slow or corrupted)",
        aliases=("iommu-translates",),
        settles="cat /proc/cmdline; dmesg | grep -i 'IO_PAGE_FAULT\\|DMAR'",
        command=("gpubench p2p", "cat /proc/cmdline"),
        comment="If copies are slow or wrong, boot with iommu=pt or switch the IOMMU off in the BIOS. "
        "Before running any jobs, verify the data with `gpubench p2p` again.",
        link="https://github.com/NVIDIA/nccl/issues/606",
        look=_translating,
    ),
)
