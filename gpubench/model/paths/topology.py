"""The topology of one node: bandwidth of links, paths between devices, and peer access between GPUs."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, permutations
from typing import TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.facts.snapshot import (
    SOFTWARE_RDMA,
    GpuFacts,
    NicFacts,
    NicKind,
    NvLink,
    NvlinkPeer,
    PairFacts,
    PcieLink,
    PciPlace,
    Snapshot,
    find_display_cards,
    is_virtual_gpu,
)
from gpubench.model.paths.nvlink_matrix import pairs_with_lost_links
from gpubench.model.terms.verdict import Verdict

PCIE_GB_S_PER_LANE = {
    1: 2.5 * 8 / 10 / 8,
    2: 5.0 * 8 / 10 / 8,
    3: 8.0 * 128 / 130 / 8,
    4: 16.0 * 128 / 130 / 8,
    5: 32.0 * 128 / 130 / 8,
    6: 64.0 * 242 / 256 / 8,
}
"""Transfer rate × encoding / 8 bits (PCI Express Base Specification: 8b/10b, 128b/130b, FLITs of 242 in 256 bytes).
Packet headers are included: copies reach 82 to 90 % of this.
"""

PCIE_GENERATION_OF_GT_S = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}

NVLINK_GB_S = {"1.0": 20.0, "2.0": 25.0, "2.2": 25.0, "4.0": 25.0, "5.0": 50.0}
"""Usable bandwidth per link and direction by NVLink version. 3.x is missing on purpose: it has 25 on A100 and
14.0625 on GA102, which only the line rate distinguishes.
"""

_USABLE_GB_S = (14.0625, 20.0, 25.0, 50.0)
_MOST_OVERHEAD = 0.07  # Line rates are up to 6.25 % above usable ones (26.5625 for 25; V100 25.78125)
_ROUNDING = 0.0005  # The driver cuts off after whole MB/s: it says 14.062 for GA102's 14.0625


def pcie_gb_s(generation: int | None, width: int | None) -> float | None:
    """Return GB/s per direction of a PCIe link. None if either is unknown or zero (hidden by a virtual machine)."""
    if generation not in PCIE_GB_S_PER_LANE or not width:
        return None
    return PCIE_GB_S_PER_LANE[generation] * width


def pcie_ceiling_gb_s(link: PcieLink) -> float | None:
    """Return GB/s per direction of a link as currently trained. Unknown parts count as their maximum."""
    return pcie_gb_s(link.generation or link.max_generation, link.width or link.max_width)


_STATES_AT_WORK = 2  # P0 to P2: at P5 and P8 the driver trains links down, also while a desktop uses the GPU
_LOWEST_GENERATION = 1


def may_save_power(gpu: GpuFacts) -> bool:
    """True if a GPU may have lowered its PCIe generation to save power, because nothing shows that it works."""
    if gpu.performance_state is not None:
        return gpu.performance_state > _STATES_AT_WORK
    return gpu.idle is not False or gpu.pcie.generation == _LOWEST_GENERATION


def link_under_load(device: GpuFacts | NicFacts) -> PcieLink:
    """Return a device's link as under load: an idle GPU lowers only its generation, and raises it again."""
    link = device.pcie
    rises = isinstance(device, GpuFacts) and may_save_power(device)
    return replace(link, generation=link.max_generation or link.generation) if rises else link


def describe_pcie(link: PcieLink, *, idle: bool | None = None) -> str | None:
    """Describe a link, and its maximum if it differs: '4 x16', '1 x16 (idle; 5 x16)', '5 x8 of 5 x16', 'at most 5
    x16'.
    """
    now = generation_and_width(link.generation, link.width)
    if now is None:
        most = generation_and_width(link.max_generation, link.max_width)
        return most and f"at most {most}"
    most = generation_and_width(link.max_generation or link.generation, link.max_width or link.width)
    if now == most:
        return now
    is_wide = link.width == (link.max_width or link.width)
    return f"{now} (idle; {most})" if is_wide and idle else f"{now} of {most}"


def generation_and_width(generation: int | None, width: int | None) -> str | None:
    """Format '5 x16', or return None if either is unknown."""
    return None if generation is None or width is None else f"{generation} x{width}"


def active_links(gpu: GpuFacts) -> int | None:
    """Return the number of a GPU's active NVLinks. None if the state of any is unknown."""
    states = None if gpu.nvlinks is None else [link.active for link in gpu.nvlinks]
    return None if states is None or None in states else states.count(True)


def leads_to_switches(gpus: Iterable[GpuFacts]) -> bool | None:
    """True if NVLinks of these GPUs lead to NVSwitches, False if only to GPUs, None if unknown."""
    peers = {link.peer for gpu in gpus for link in gpu.nvlinks or ()}
    return True if NvlinkPeer.SWITCH in peers else False if NvlinkPeer.GPU in peers else None


def nvlink_gb_s(link: NvLink) -> float | None:
    """Return usable GB/s per direction of one NVLink, by its line rate if known, else by its version."""
    if link.raw_gb_s:
        fitting = [usable for usable in _USABLE_GB_S if -_ROUNDING < link.raw_gb_s / usable - 1 < _MOST_OVERHEAD]
        if fitting:
            return fitting[0]
    return NVLINK_GB_S.get(link.version or "")


SELF = "X"
UNKNOWN_PATH = "?"
ACROSS_SOCKETS = "SYS"
PATH_CLASSES = ("PIX", "PXB", "PHB", "NODE", ACROSS_SOCKETS)  # `nvidia-smi topo -m`, nearest first
BITS_PER_BYTE = 8

P2P_STATUS = {
    "OK": "possible",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "DR": "disabled by a driver registry key",
    "NS": "not supported",
    "U": "unknown to the driver",
}

_ASK_BOTH = "nvidia-smi topo -p2p r and -p2p w decide"


def _other_statuses(facts: PairFacts) -> list[tuple[str, str]]:
    """Return the statuses of a pair in `topo -p2p p`, `n` and `a`, which do not decide whether copies are direct."""
    said = (("over PCIe", facts.pci), ("over NVLink", facts.nvlink), ("atomics", facts.atomics))
    return [(what, status) for what, status in said if status is not None]


"""The words of `nvidia-smi topo -p2p`."""

NOT_SAID = "U"  # The word that is no answer, neither leave nor refusal
Device = GpuFacts | NicFacts


class Limit(Struct, frozen=True):
    """A physical limit in GB/s per direction. None if unknown. `note` has the reason, or what sets the limit."""

    gb_s: float | None
    note: str


class PeerAccess(Struct, frozen=True):
    """Peer access from one GPU to another's memory, as CUDA and NVML report it. `reason` describes both."""

    cuda: bool | None
    nvml: str | None
    reason: str

    @property
    def contradicts(self) -> bool:
        """True if CUDA and NVML disagree."""
        return self.cuda is not None and self.nvml is not None and self.cuda != (self.nvml == "OK")

    @property
    def possible(self) -> bool | None:
        """True if both agree that it is possible, False if either refuses it, None if unknown."""
        answers = [self.cuda, None if self.nvml is None else self.nvml == "OK"]
        if False in answers:
            return False
        return True if True in answers else None

    @property
    def label(self) -> str:
        """One word for a matrix: OK, the driver's refusal, `no` if only CUDA refuses, or `?`."""
        if self.contradicts:
            return f"{self.nvml}!"
        if self.nvml is not None:
            return self.nvml
        return {True: "OK", False: "no", None: UNKNOWN_PATH}[self.cuda]


_Answer = TypeVar("_Answer")
_Two = TypeVar("_Two", bound=Device)


def _asked_once(
    answer: "Callable[[Topology, _Two, _Two], _Answer]",
) -> "Callable[[Topology, _Two, _Two], _Answer]":
    """Cache the answer for two devices: a matrix of copies needs those of each pair twenty times."""

    def kept(self: "Topology", source: _Two, destination: _Two) -> _Answer:
        key = answer, id(source), id(destination)
        known = self._kept.get(key)
        if known is None:
            known = self._kept[key] = answer(self, source, destination), source, destination  # whose ids stay theirs
        return cast("_Answer", known[0])

    return kept


class Topology:
    """What a snapshot implies about its GPUs and NICs. `like` is a node with equal facts, or itself."""

    def __init__(self, snapshot: Snapshot, like: "Topology | None" = None) -> None:
        self.snapshot = snapshot
        self.like = like or self
        self.gpus = snapshot.gpus
        self.nics = snapshot.nics
        self.devices: tuple[Device, ...] = (*snapshot.gpus, *snapshot.nics)
        self._kept: dict[Hashable, tuple[object, Device, Device]] = {}
        self._pairs = {(pair.source, pair.destination): pair for pair in snapshot.pairs}
        self._uplinks = {switch.bus_id: switch.link for switch in snapshot.switches}

    @_asked_once
    def path(self, source: Device, destination: Device) -> str:
        """Return the path class: NV#, or one of `PATH_CLASSES`, or `?` if unknown."""
        return self._path(source, destination)

    def _path(self, source: Device, destination: Device) -> str:
        if source is destination:
            return SELF
        links = self.nvlinks(source, destination)
        if links:
            return f"NV{links}"
        return self.pcie_path(source, destination) or UNKNOWN_PATH

    def nvlinks(self, source: Device, destination: Device) -> int | None:
        """Return the number of active NVLinks from one GPU to another, directly or through NVSwitches. None if
        unknown.
        """
        if not isinstance(source, GpuFacts) or not isinstance(destination, GpuFacts):
            return 0
        stated = self.pair_facts(source, destination).path
        if stated is not None:
            return int(stated[2:]) if stated.startswith("NV") else 0
        own, others = self._links[source.index], self._links[destination.index]
        if own is None or others is None:
            return None
        direct = own.get(destination.bus_id, 0) if destination.bus_id else 0
        through_switch = min(own.get(NvlinkPeer.SWITCH, 0), others.get(NvlinkPeer.SWITCH, 0))
        return direct or (through_switch if _same_fabric(source, destination) else 0)

    def states_path(self, source: Device, destination: Device) -> bool:
        """True if the source states the path class of a pair, as `nvidia-smi topo -m` does."""
        return self.pair_facts(source, destination).path is not None

    @cached_property
    def lost_links(self) -> Mapping[frozenset[str], int]:
        """The pairs with fewer NVLinks than their siblings in `nvidia-smi topo -m`, with the siblings' number."""
        by_model = dict[str | None, dict[frozenset[str], int]]()
        for one, other in permutations(self.gpus, 2):
            if one.name == other.name and self.states_path(one, other):
                links, pair = by_model.setdefault(one.name, {}), frozenset((one.device, other.device))
                links[pair] = max(links.get(pair, 0), self.nvlinks(one, other) or 0)
        return dict(chain.from_iterable(pairs_with_lost_links(each).items() for each in by_model.values()))

    @cached_property
    def gpu_paths(self) -> frozenset[str]:
        return frozenset(self.path(*pair) for pair in permutations(self.gpus, 2))

    @cached_property
    def usual_active_links(self) -> Mapping[str | None, int]:
        """The most frequent number of active links by GPU model. Of equally frequent ones, the larger."""
        counts: dict[str | None, Counter[int]] = {}
        for gpu in self.gpus:
            active = active_links(gpu)
            counts.setdefault(gpu.name, Counter()).update(() if active is None else (active,))
        return {
            model: max(tally, key=lambda count: (tally[count], count), default=0) for model, tally in counts.items()
        }

    @cached_property
    def _links(self) -> dict[int, dict[str | None, int] | None]:
        counts: dict[int, dict[str | None, int] | None] = {}
        for gpu in self.gpus:
            if active_links(gpu) is None:
                counts[gpu.index] = None
                continue
            leads = counts[gpu.index] = dict[str | None, int]()
            for link in gpu.nvlinks or ():
                if link.active:
                    end = link.peer if link.peer is NvlinkPeer.SWITCH else link.peer_bus_id
                    leads[end] = leads.get(end, 0) + 1
        return counts

    def pcie_path(self, source: Device, destination: Device) -> str | None:
        """Return the path class without NVLink, as the source states it, else from both places in the PCI tree."""
        facts = self.pair_facts(source, destination)
        if facts.pcie_path:
            return facts.pcie_path
        if facts.path in PATH_CLASSES:
            return facts.path
        if source.bus_id is not None and source.bus_id == destination.bus_id:
            return "PIX"
        return pcie_path_class(source.place, destination.place, len(self.snapshot.machine.numa_nodes))

    @_asked_once
    def peer_access(self, source: GpuFacts, destination: GpuFacts) -> PeerAccess:
        facts = self.pair_facts(source, destination)
        said = [status for status in (facts.read, facts.write) if status not in (None, NOT_SAID)]
        nvml = next((status for status in said if status != "OK"), said[0] if said else None)
        silent = [f"NVML says {P2P_STATUS[NOT_SAID]}"] if not said and NOT_SAID in (facts.read, facts.write) else []
        if nvml is not None:
            access = PeerAccess(facts.cuda, nvml, P2P_STATUS.get(nvml, nvml))
            both = f"CUDA says {'possible' if facts.cuda else 'refused'}, NVML says {access.reason}"
            return replace(access, reason=both) if access.contradicts else access
        if facts.cuda is not None:
            answer = "possible" if facts.cuda else "refused by CUDA"
            return PeerAccess(facts.cuda, None, "; ".join([answer, *silent]))
        others = [f"{what} {P2P_STATUS.get(status, status)} ({status})" for what, status in _other_statuses(facts)]
        others += [_ASK_BOTH] if others else []
        reasons = dict.fromkeys([*silent, *facts.unknown.values()]) or others
        return PeerAccess(None, None, "; ".join(reasons) or source.lost or destination.lost or self._why_silent)

    @cached_property
    def granted_over_pcie(self) -> frozenset[frozenset[str | None]]:
        """The models of pairs that have peer access without NVLinks between them."""
        return frozenset(
            frozenset((one.name, other.name))
            for one, other in permutations(self.gpus, 2)
            if self.peer_access(one, other).possible and not self.nvlinks(one, other)
        )

    @property
    def _why_silent(self) -> str:
        stages = ("nvml", "cuda")
        failed = [f"{failure.stage}: {failure.error}" for failure in self.snapshot.failures if failure.stage in stages]
        return "; ".join(failed) or self.snapshot.driver.absent or "nvidia-smi topo -p2p r decides"

    @_asked_once
    def limit(self, source: Device, destination: Device) -> Limit:
        """Return the limit between two devices: the NVLinks between them, else the narrowest PCIe hop or NIC port."""
        links = self.nvlinks(source, destination)
        if links is None:
            lost = [each.lost for each in (source, destination) if isinstance(each, GpuFacts) and each.lost]
            return Limit(None, lost[0] if lost else "whether NVLinks join them is not known")
        if links:
            own = source.nvlinks if isinstance(source, GpuFacts) else None
            rate = next((nvlink_gb_s(link) for link in own or () if link.active), None)
            if rate is None:
                return Limit(None, f"{links} NVLinks, but their speed is not known")
            return Limit(links * rate, f"{links} NVLinks × {rate:g}")
        limits = [self._pcie_limit(source, destination)]
        limits += [_rate_limit(device) for device in (source, destination) if isinstance(device, NicFacts)]
        return min(limits, key=lambda limit: limit.gb_s or 0.0)

    def nvlink_total(self, gpu: GpuFacts) -> Limit:
        """Return GB/s per direction of all active NVLinks of a GPU."""
        if gpu.nvlinks is None:
            return Limit(None, gpu.unknown.get("nvlinks", gpu.lost or "NVLinks are not known"))
        if active_links(gpu) is None:
            return Limit(None, gpu.unknown.get("nvlinks.active", "which NVLinks are active is not known"))
        active = [link for link in gpu.nvlinks if link.active]
        if not active:
            return Limit(None, f"none of {len(gpu.nvlinks)} NVLinks is active" if gpu.nvlinks else "no NVLink")
        rates = [nvlink_gb_s(link) for link in active]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return Limit(None, "the speed of the NVLinks is not known")
        return Limit(sum(known), f"{len(active)} NVLinks × {known[0]:g}")

    def pcie_total(self, device: Device) -> Limit:
        """Return GB/s per direction of the narrowest link on a device's PCIe path to the CPU."""
        return self._narrowest({device.device: link_under_load(device)} | self._above(device.place, 0), device)

    def own_link_gb_s(self, gpu: GpuFacts) -> float | None:
        """Return GB/s per direction that leave a GPU towards the CPU, or towards a NIC behind the same switch."""
        known = (self.pcie_total(gpu).gb_s, pcie_ceiling_gb_s(link_under_load(gpu)))
        return max((gb_s for gb_s in known if gb_s is not None), default=None)

    def nic_limit(self, nic: NicFacts, gpu: GpuFacts | None = None) -> Limit:
        """Return the limit of a NIC in GB/s per direction: its port, or its slot if that is slower."""
        port, slot = _rate_limit(nic), self.pcie_total(nic)
        if gpu is not None and (hops := self._pcie_limit(gpu, nic)).gb_s is not None:
            slot = hops
        return slot if port.gb_s is not None and slot.gb_s is not None and slot.gb_s < port.gb_s else port

    def combined_nic_limit(self, nics: Sequence[NicFacts], near: Mapping[str, GpuFacts]) -> Limit:
        """Return the limit of several NICs for data of the GPU near each. NICs on one physical port share it."""
        by_port: dict[str, list[NicFacts]] = {}
        for nic in nics:
            by_port.setdefault(nic.port or nic.name, []).append(nic)
        carried = {nic.name: self.nic_limit(nic, near.get(nic.name)) for nic in nics}
        unknown = next((limit for limit in carried.values() if limit.gb_s is None), None)
        if unknown is not None:
            return unknown
        ports = (
            min(sum(carried[nic.name].gb_s or 0.0 for nic in own), max(_rate_limit(nic).gb_s or 0.0 for nic in own))
            for own in by_port.values()
        )
        return Limit(sum(ports), ", ".join(nic.name for nic in nics))

    def nearest_gpus(self, nic: NicFacts) -> tuple[GpuFacts, ...]:
        """Return the GPUs with the shortest PCIe path to a NIC, empty if unknown."""
        paths = {gpu.index: self.pcie_path(gpu, nic) for gpu in self.gpus}
        nearest = next((class_ for class_ in PATH_CLASSES if class_ in paths.values()), None)
        return tuple(gpu for gpu in self.gpus if nearest is not None and paths[gpu.index] == nearest)

    def gpudirect(self, nic: NicFacts) -> tuple[bool | None, str]:
        """Tell whether GPUDirect RDMA is possible through a NIC (None if unknown), with the module or the reason."""
        facts, efa = self.snapshot.gpudirect, nic.kind is NicKind.EFA
        module, loaded = ("efa_nv_peermem", facts.efa_peermem) if efa else ("nvidia-peermem", facts.peermem)
        if not nic.rdma:
            software = nic.model == SOFTWARE_RDMA
            return False, "software RDMA: the CPU moves the data" if software else "no RDMA device: plain Ethernet"
        if nic.gpudirect is not None:
            return nic.gpudirect, "NCCL said so"
        is_idle = not efa and facts.peermem_registered is False
        if loaded and not is_idle:
            return True, f"{module} is loaded"
        missing = f"{module} is not loaded" if loaded is False else f"{module} was not looked for"
        missing = f"{module} is loaded but not registered with the RDMA core" if loaded else missing
        if facts.dma_buf:
            return True, f"dma-buf, if the NIC's driver supports it too; {missing}"
        if facts.dma_buf is None:
            return None, f"{missing}, and nothing told whether the driver offers dma-buf"
        if efa:
            return None, f"{missing}, which older EFA drivers do without, and the GPU driver offers no dma-buf"
        return (None if loaded is None else False), f"{missing}, and the GPU driver offers no dma-buf"

    @cached_property
    def matrix(self) -> dict[str, dict[str, str]]:
        if self.like is not self:
            return self.like.matrix
        return {
            source.device: {destination.device: self._path(source, destination) for destination in self.devices}
            for source in self.devices
        }

    def fingerprint(self) -> str:
        """12 hexadecimal digits of the machine's models, links and wiring, without serial numbers or load."""
        return self._fingerprint if self.like is self else self.like.fingerprint()

    @cached_property
    def _fingerprint(self) -> str:
        described = {
            "gpus": [(gpu.name, gpu.memory_bytes, len(gpu.nvlinks or ())) for gpu in self.gpus],
            "nics": [(nic.name, nic.kind, nic.rate_gbit_s) for nic in self.nics],
            "matrix": self.matrix,
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]

    def pair_facts(self, source: Device, destination: Device) -> PairFacts:
        """Return the snapshot's facts about a pair, empty if it has none."""
        return self._pairs.get((source.device, destination.device), _NOTHING)

    def _pcie_limit(self, source: Device, destination: Device) -> Limit:
        shared = _shared_switches(source.place, destination.place)
        hops = {source.device: link_under_load(source)} | self._above(source.place, shared)
        hops |= self._above(destination.place, shared) | {destination.device: link_under_load(destination)}
        return self._narrowest(hops, source, destination)

    def _above(self, place: PciPlace, shared: int) -> dict[str, PcieLink]:
        """Return the uplinks above a device, without the `shared` outermost switches."""
        return {
            f"the uplink of switch {bus_id}": self._uplinks.get(bus_id, PcieLink())
            for bus_id in place.switches[shared:]
        }

    def _narrowest(self, hops: Mapping[str, PcieLink], *ends: Device) -> Limit:
        ceilings = {name: pcie_ceiling_gb_s(link) for name, link in hops.items()}
        for device in ends:
            if ceilings[device.device] is None:
                return Limit(None, device.unknown.get("pcie", f"the PCIe link of {device.device} is not known"))
        known = [(gb_s, name) for name, gb_s in ceilings.items() if gb_s is not None]
        lowest, name = min(known, key=lambda hop: hop[0])
        link = hops[name]
        described = f"PCIe {link.generation or link.max_generation} x{link.width or link.max_width} at {name}"
        hidden = [name for name, gb_s in ceilings.items() if gb_s is None]
        return Limit(lowest, described + (f"; {', '.join(hidden)} is not known" if hidden else ""))


_NOTHING = PairFacts(source="", destination="")


def pcie_path_class(one: PciPlace, other: PciPlace, numa_nodes: int) -> str | None:
    """Return the PCIe path class of two places (`nvidia-smi topo -m`). None if unknown.

    PIX: at most one switch. PXB: several. PHB: a host bridge. NODE: two host bridges of one NUMA node. SYS: two NUMA
    nodes.
    """
    if one.host_bridge is None or other.host_bridge is None:
        return None
    if one.host_bridge != other.host_bridge:
        if one.numa_node is None or other.numa_node is None:
            return "NODE" if numa_nodes == 1 else None
        return "NODE" if one.numa_node == other.numa_node else "SYS"
    shared = _shared_switches(one, other)
    same_port = one.root_port is not None and one.root_port == other.root_port
    if not shared and not same_port:
        return "PHB"
    return "PIX" if len(one.switches) == len(other.switches) == shared else "PXB"


def round_gb_s(gb_s: float | None) -> float | None:
    """Round to three decimals, because PCIe bandwidths are fractions of 130ths."""
    return None if gb_s is None else round(gb_s, 3)


def _shared_switches(one: PciPlace, other: PciPlace) -> int:
    if one.host_bridge != other.host_bridge:
        return 0
    shared = 0
    for mine, theirs in zip(one.switches, other.switches, strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared


def _same_fabric(one: GpuFacts, other: GpuFacts) -> bool:
    """True if two GPUs behind NVSwitches share them, or nothing shows that they do not."""
    mine, theirs = one.fabric, other.fabric
    if mine is None or theirs is None or mine.clique is None or theirs.clique is None:
        return True
    return (mine.cluster_uuid, mine.clique) == (theirs.cluster_uuid, theirs.clique)


def _rate_limit(nic: NicFacts) -> Limit:
    if nic.rate_gbit_s is None:
        return Limit(None, nic.unknown.get("rate_gbit_s", f"the rate of {nic.name} is not known"))
    return Limit(nic.rate_gbit_s / BITS_PER_BYTE, f"{nic.name} at {nic.rate_gbit_s:g} Gb/s")


_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_NUMBERED = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
"""The numeric values of NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL."""

DEFAULT_LEVEL = "PXB"
_MOST_GPUS_ON_AMD = 2


def parse_level(setting: str) -> str | None:
    """Return the path type in a value of NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL."""
    name = _NUMBERED.get(setting, setting.upper())
    return name if name in _LEVELS else None


def is_within(path: str, limit: str = DEFAULT_LEVEL) -> bool:
    """True if a path is no longer than a path type. A type that only NCCL knows counts as longer."""
    return path in _LEVELS and _LEVELS.index(path) <= _LEVELS.index(limit)


def is_nvlink(path: str | None) -> bool:
    """True if a path consists of NVLinks."""
    return path in ("NVL", "NVB", "C2C")


def nccl_path_type(path_class: str) -> str | None:
    """Return NCCL's type of a path class, or None. NCCL does not distinguish host bridges of one NUMA node."""
    if path_class.startswith("NV"):
        return "NVL"
    return {"NODE": "PHB"}.get(path_class, path_class if path_class in _LEVELS else None)


def level_allows(setting: str, path_class: str) -> bool:
    """True if this value of NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL allows a path class."""
    limit, path = parse_level(setting), nccl_path_type(path_class)
    return limit is not None and path is not None and is_within(path, limit)


def amd_takes_all(gpus: int) -> bool:
    """True if NCCL uses peer access over any path, as on AMD processors (ncclTopoCheckP2p in src/graph/paths.cc)."""
    return gpus <= _MOST_GPUS_ON_AMD


NCCL_POLICY = f"NCCL takes peer access up to path class {DEFAULT_LEVEL} (NCCL_P2P_LEVEL)"


class Refusal(Struct, frozen=True, kw_only=True):
    """A kind of refusal of peer access by the driver. `status` is NVML's word, '' if only CUDA refuses.

    `wired`: NVLinks connect the two GPUs. `mesh`: for TNS, NVLinks connect each to others. `mig`: MIG is on. `odd`: for
    GNS, equal models have access. `apart`: one is a vGPU or a display card.
    """

    status: str
    wired: bool
    mesh: bool
    mig: bool
    odd: bool = False
    apart: bool = False

    @property
    def is_by_design(self) -> bool:
        """True if there is nothing to repair."""
        return self.mig or self.apart or (not self.wired and (self.mesh or (self.status == "GNS" and not self.odd)))

    @property
    def severity(self) -> Verdict:
        """FAIL if other pairs show that it can do better, SKIP if it cannot. WARN if nothing proves either.

        CNS, NS, TNS and DR over PCIe are WARN: a slot, the BIOS, a driver or a hypervisor may be the reason.
        """
        if self.is_by_design:
            return Verdict.SKIP
        return Verdict.FAIL if self.wired or self.odd else Verdict.WARN

    @property
    def reason(self) -> str:
        if self.mig:
            return "MIG instances have no peer access"
        if self.apart:
            return "vGPUs and display cards have no peer access"
        if self.mesh and not self.wired:
            return "NVLinks join each of these GPUs to others"
        return P2P_STATUS.get(self.status, self.status) or "CUDA refuses peer access"


def find_refusal(node: Topology, source: GpuFacts, destination: GpuFacts, access: PeerAccess) -> Refusal:
    """Return the kind of refusal of a pair without peer access."""
    return Refusal(
        status=access.nvml or "",
        wired=bool(node.nvlinks(source, destination)),
        mesh=access.nvml == "TNS"
        and _has_peers(source)
        and _has_peers(destination)
        and not lost_links_between(node, source, destination),
        mig=bool(source.mig or destination.mig),
        odd=access.nvml == "GNS" and _is_granted_alike(node, source, destination),
        apart=any(is_virtual_gpu(gpu) or gpu in find_display_cards(node.gpus) for gpu in (source, destination)),
    )


def _is_granted_alike(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    models = frozenset((source.name, destination.name))
    return None not in models and models in node.granted_over_pcie


def _has_peers(gpu: GpuFacts) -> bool:
    return any(link.active and link.peer is NvlinkPeer.GPU for link in gpu.nvlinks or ())


def is_beyond_policy(node: Topology, path_class: str) -> bool:
    """True if NCCL avoids peer access over a path class by default (ncclTopoCheckP2p in src/graph/paths.cc)."""
    path = nccl_path_type(path_class)
    on_amd = "AMD" in (node.snapshot.machine.cpu or "")
    return path is not None and not is_within(path) and not (on_amd and amd_takes_all(len(node.gpus)))


def nccl_keeps_off(node: Topology, source: GpuFacts, destination: GpuFacts) -> str:
    """Return why NCCL avoids a pair's peer access by default, or '' if it uses it or NVLinks are lost."""
    path = node.path(source, destination)
    if not is_beyond_policy(node, path) or any(lost_switch_links(node, gpu) for gpu in (source, destination)):
        return ""
    if lost_links_between(node, source, destination):
        return ""
    return f"{NCCL_POLICY}, and this is {path}"


def is_policy_known(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    """True if the driver stated the path, the processor is known (for two GPUs), and no pair of the node is nearer.

    NVLinks or a PCIe switch between other GPUs show that the machine may do better. Topology files may lack NVLinks.
    """
    on_known = node.snapshot.machine.cpu is not None or not amd_takes_all(len(node.gpus))
    is_far = not any(kind is not None and is_within(kind) for kind in map(nccl_path_type, node.gpu_paths))
    return on_known and is_far and node.states_path(source, destination)


def lost_switch_links(node: Topology, gpu: GpuFacts) -> bool:
    """True if a GPU has NVLinks to NVSwitches but none is active, unless it is the only GPU of its node."""
    has_others = len(node.gpus) > 1 or (gpu.fabric is not None and gpu.fabric.spans_nodes)
    return has_others and is_switched(node, gpu) and bool(gpu.nvlinks) and active_links(gpu) == 0


def lost_links_between(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    """True if no NVLink connects two GPUs although their siblings have some, or there are some in the other
    direction.
    """
    is_odd = frozenset((source.device, destination.device)) in node.lost_links
    is_odd = is_odd or bool(node.nvlinks(destination, source))
    lost = is_odd or all(lost_some_links(node, gpu) for gpu in (source, destination))
    return node.nvlinks(source, destination) == 0 and lost


def lost_some_links(node: Topology, gpu: GpuFacts) -> bool:
    """True if a GPU without NVSwitches has fewer active NVLinks than its siblings, but has some."""
    return 0 < (active_links(gpu) or 0) < node.usual_active_links[gpu.name] and not is_switched(node, gpu)


def is_switched(node: Topology, gpu: GpuFacts) -> bool:
    """True if a GPU's NVLinks lead to NVSwitches: it sees one, they show one, or its fabric was ready."""
    registered = gpu.fabric is not None and gpu.fabric.state == "completed"
    leads = any(link.peer is NvlinkPeer.SWITCH for link in gpu.nvlinks or ())
    return bool(node.snapshot.nvswitches) or leads or registered
