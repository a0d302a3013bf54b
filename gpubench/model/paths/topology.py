"""The topology of one node: link bandwidths, paths between devices, and peer access between GPUs."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, permutations, takewhile
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
from gpubench.model.paths.nvlink_matrix import gaps_in_hives, pairs_with_lost_links
from gpubench.model.terms.units import group_by
from gpubench.model.terms.verdict import Verdict

PCIE_GB_S_PER_LANE = {
    1: 2.5 * 8 / 10 / 8,
    2: 5.0 * 8 / 10 / 8,
    3: 8.0 * 128 / 130 / 8,
    4: 16.0 * 128 / 130 / 8,
    5: 32.0 * 128 / 130 / 8,
    6: 64.0 * 242 / 256 / 8,
}
"""Usable bandwidth per lane: transfer rate × encoding / 8 bits. Packet headers are included: copies reach 82 to 90 %.
The encodings are 8b/10b, 128b/130b, and FLITs with 242 of 256 bytes (PCI Express Base Specification).
"""

PCIE_GENERATION_OF_GT_S = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}

NVLINK_GB_S = {"1.0": 20.0, "2.0": 25.0, "2.2": 25.0, "4.0": 25.0, "5.0": 50.0}
"""Usable bandwidth per link and direction, by NVLink version.
Version 3 is missing, because it has 25 GB/s on A100 and 14.0625 GB/s on GA102. The line rate tells them apart.
"""

_USABLE_GB_S = (14.0625, 20.0, 25.0, 50.0)
_MOST_OVERHEAD = 0.07  # Line rates exceed usable bandwidths by up to 6.25 % (26.5625 for 25; 25.78125 on V100).
_ROUNDING = 0.0005  # The driver prints whole MB/s, for example 14.062 for GA102's 14.0625 GB/s.


def pcie_gb_s(generation: int | None, width: int | None) -> float | None:
    """Return the bandwidth of a PCIe link in GB/s per direction. None if unknown, or hidden by a virtual machine."""
    if generation not in PCIE_GB_S_PER_LANE or not width:
        return None
    return PCIE_GB_S_PER_LANE[generation] * width


def pcie_ceiling_gb_s(link: PcieLink) -> float | None:
    """Return a PCIe link's current bandwidth in GB/s per direction. Replace unknown values by their maximum."""
    return pcie_gb_s(link.generation or link.max_generation, link.width or link.max_width)


def may_save_power(gpu: GpuFacts) -> bool:
    """True if a GPU may have lowered its PCIe generation to save power. False if it is certainly busy."""
    if gpu.performance_state is not None:
        # A busy GPU is in P0 to P2. In P5 and P8 the driver lowers the link's generation, even while a desktop uses the
        # GPU.
        return gpu.performance_state > 2
    return gpu.idle is not False or gpu.pcie.generation == 1


def link_under_load(device: GpuFacts | NicFacts) -> PcieLink:
    """Return a device's PCIe link as it is under load. An idle GPU lowers only the generation of its link."""
    link = device.pcie
    rises = isinstance(device, GpuFacts) and may_save_power(device)
    return replace(link, generation=link.max_generation or link.generation) if rises else link


def describe_pcie(link: PcieLink, *, idle: bool | None = None) -> str | None:
    """Describe a PCIe link: '4 x16', '1 x16 (idle; 5 x16)', '5 x8 of 5 x16', 'at most 5 x16'."""
    now = generation_and_width(link.generation, link.width)
    if now is None:
        most = generation_and_width(link.max_generation, link.max_width)
        return most and f"at most {most}"
    most = generation_and_width(link.max_generation or link.generation, link.max_width or link.width)
    if now == most:
        return now
    rests = idle and link.width == (link.max_width or link.width)
    return f"{now} (idle; {most})" if rests else f"{now} of {most}"


def generation_and_width(generation: int | None, width: int | None) -> str | None:
    """Format a generation and a width: '5 x16'. None if either is unknown."""
    return None if generation is None or width is None else f"{generation} x{width}"


def active_links(gpu: GpuFacts) -> int | None:
    """Return the number of a GPU's active NVLinks. None if the state of any link is unknown."""
    if gpu.nvlinks is None or any(link.active is None for link in gpu.nvlinks):
        return None
    return sum(link.active is True for link in gpu.nvlinks)


def leads_to_switches(gpus: Iterable[GpuFacts]) -> bool | None:
    """True if any of these GPUs has NVLinks to NVSwitches. False if all known NVLinks lead to GPUs. None if unknown."""
    peers = {link.peer for gpu in gpus for link in gpu.nvlinks or ()}
    return True if NvlinkPeer.SWITCH in peers else False if NvlinkPeer.GPU in peers else None


def nvlink_gb_s(link: NvLink) -> float | None:
    """Return the usable bandwidth of one NVLink in GB/s per direction, from its line rate or else its version."""
    for usable in _USABLE_GB_S:
        if -_ROUNDING < (link.raw_gb_s or 0.0) / usable - 1 < _MOST_OVERHEAD:
            return usable
    return link.raw_gb_s if link.version == XGMI_LINK else NVLINK_GB_S.get(link.version or "")


SELF = "X"
UNKNOWN_PATH = "?"
ACROSS_SOCKETS = "SYS"
PATH_CLASSES = ("PIX", "PXB", "PHB", "NODE", ACROSS_SOCKETS)  # Names as in `nvidia-smi topo -m`, nearest first
XGMI = "XGMI"  # Path class between two AMD GPUs that xGMI links join, as rocm-smi and amd-smi print it
PCIE = "PCIE"  # Path class between two AMD GPUs over PCIe inside a NUMA node, as both programs print it
XGMI_LINK = "xGMI"  # Version of an `NvLink` that is an AMD xGMI link
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
"""Meanings of the statuses that `nvidia-smi topo -p2p` prints."""

NOT_SAID = "U"
ROCM = "ROCm"  # In the reason of a `PeerAccess` between AMD GPUs
Device = GpuFacts | NicFacts


class Limit(Struct, frozen=True):
    """A bandwidth limit in GB/s per direction, None if unknown. `note` is the limiting link, or the reason for None."""

    gb_s: float | None
    note: str


class PeerAccess(Struct, frozen=True):
    """Whether one GPU can access another GPU's memory, according to CUDA (or ROCm) and NVML, and the reason."""

    cuda: bool | None
    nvml: str | None
    reason: str

    @property
    def contradicts(self) -> bool:
        return self.cuda is not None and self.nvml is not None and self.cuda != (self.nvml == "OK")

    @property
    def possible(self) -> bool | None:
        """False if CUDA or NVML refuses access. True if at least one of them allows it. None if neither of them
        answered.
        """
        answers = [self.cuda, None if self.nvml is None else self.nvml == "OK"]
        return False if False in answers else True if True in answers else None

    @property
    def label(self) -> str:
        """A short label for a matrix.

        It is NVML's status, followed by `!` if CUDA disagrees. Without a status it is `OK` or `no` from CUDA, or `?`.
        """
        if self.nvml is not None:
            return self.nvml + "!" * self.contradicts
        return {True: "OK", False: "no", None: UNKNOWN_PATH}[self.cuda]


_Answer = TypeVar("_Answer")
_Two = TypeVar("_Two", bound=Device)


def _cached(method: "Callable[[Topology, _Two, _Two], _Answer]") -> "Callable[[Topology, _Two, _Two], _Answer]":
    """Cache the results of a method with two devices. A matrix of copies calls such methods twenty times per pair."""

    def cached(self: "Topology", source: _Two, destination: _Two) -> _Answer:
        key = method, id(source), id(destination)
        known = self._cache.get(key)
        if known is None:
            # Keep references to the devices, so that their ids are not reused.
            known = self._cache[key] = method(self, source, destination), source, destination
        return cast("_Answer", known[0])

    return cached


class Topology:
    """The paths, limits and peer access of one node's devices. `like` is a node with equal facts, or itself."""

    def __init__(self, snapshot: Snapshot, like: "Topology | None" = None) -> None:
        self.snapshot = snapshot
        self.like = like or self
        self.gpus = snapshot.gpus
        self.nics = snapshot.nics
        self.devices: tuple[Device, ...] = (*snapshot.gpus, *snapshot.nics)
        self._cache: dict[Hashable, tuple[object, Device, Device]] = {}
        self._pairs = {(pair.source, pair.destination): pair for pair in snapshot.pairs}
        self._uplinks = {switch.bus_id: switch.link for switch in snapshot.switches}

    @_cached
    def path(self, source: Device, destination: Device) -> str:
        """Return the path class: NV#, XGMI, one of `PATH_CLASSES`, PCIE, or `?` if unknown."""
        return self._path(source, destination)

    def _path(self, source: Device, destination: Device) -> str:
        """Return the path class without caching, for matrices, which need each pair only once."""
        if source is destination:
            return SELF
        links = self.nvlinks(source, destination)
        if links:
            own = source.nvlinks if isinstance(source, GpuFacts) else None
            is_xgmi = any(link.version == XGMI_LINK for link in own or ())
            return XGMI if is_xgmi or self.pair_facts(source, destination).path == XGMI else f"NV{links}"
        return self.pcie_path(source, destination) or self.pair_facts(source, destination).path or UNKNOWN_PATH

    def nvlinks(self, source: Device, destination: Device) -> int | None:
        """Return the number of active NVLinks or xGMI links (1 if stated) between two GPUs. None if unknown."""
        if not isinstance(source, GpuFacts) or not isinstance(destination, GpuFacts):
            return 0
        stated = self.pair_facts(source, destination).path
        if stated is not None:
            return int(stated[2:]) if stated.startswith("NV") else int(stated == XGMI)
        own, others = self._links[source.index], self._links[destination.index]
        if own is None or others is None:
            return None
        direct = own.get(destination.bus_id, 0) if destination.bus_id else 0
        switched = min(own.get(NvlinkPeer.SWITCH, 0), others.get(NvlinkPeer.SWITCH, 0))
        one, other = source.fabric, destination.fabric
        # Assume that both GPUs are in one fabric unless their cliques are known and differ.
        if one is not None and other is not None and None not in (one.clique, other.clique):
            switched *= (one.cluster_uuid, one.clique) == (other.cluster_uuid, other.clique)
        return direct or switched

    def states_path(self, source: Device, destination: Device) -> bool:
        """True if the snapshot contains the path class of a pair, for example from `nvidia-smi topo -m`."""
        return self.pair_facts(source, destination).path is not None

    @cached_property
    def lost_links(self) -> Mapping[frozenset[str], int]:
        """Pairs with fewer links than similar pairs in a topology text, with the similar pairs' number of links."""
        models = dict[str | None, dict[frozenset[str], int]]()
        for one, other in permutations(self.gpus, 2):
            if one.name == other.name and self.states_path(one, other):
                links, pair = models.setdefault(one.name, {}), frozenset((one.device, other.device))
                links[pair] = max(links.get(pair, 0), self.nvlinks(one, other) or 0)
        find = gaps_in_hives if any(pair.path == XGMI for pair in self.snapshot.pairs) else pairs_with_lost_links
        return dict(chain.from_iterable(find(links).items() for links in models.values()))

    @cached_property
    def gpu_paths(self) -> frozenset[str]:
        return frozenset(self.path(*pair) for pair in permutations(self.gpus, 2))

    @cached_property
    def usual_active_links(self) -> Mapping[str | None, int]:
        """The most frequent number of active NVLinks, by GPU model. If two numbers are equally frequent, it is the
        larger one.
        """
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
        """Return the path class without NVLinks, as the snapshot states it or from the PCI tree."""
        facts = self.pair_facts(source, destination)
        if facts.pcie_path:
            return facts.pcie_path
        if facts.path in PATH_CLASSES:
            return facts.path
        if source.bus_id is not None and source.bus_id == destination.bus_id:
            return "PIX"
        return pcie_path_class(source.place, destination.place, len(self.snapshot.machine.numa_nodes))

    @_cached
    def peer_access(self, source: GpuFacts, destination: GpuFacts) -> PeerAccess:
        """Return the answers of CUDA and NVML about peer access. If either of NVML's statuses for reads and writes
        is a refusal, it counts.
        """
        facts = self.pair_facts(source, destination)
        said = [status for status in (facts.read, facts.write) if status not in (None, NOT_SAID)]
        nvml = next((status for status in said if status != "OK"), said[0] if said else None)
        silent = [f"NVML: {P2P_STATUS[NOT_SAID]}"] if not said and NOT_SAID in (facts.read, facts.write) else []
        if nvml is not None:
            access = PeerAccess(facts.cuda, nvml, P2P_STATUS.get(nvml, nvml))
            both = f"CUDA reports {'possible' if facts.cuda else 'refused'}, NVML reports {access.reason}"
            return replace(access, reason=both) if access.contradicts else access
        if facts.rocm is not None:
            return PeerAccess(facts.rocm, None, f"possible ({ROCM})" if facts.rocm else f"refused by {ROCM}")
        if facts.cuda is not None:
            answer = "possible" if facts.cuda else "refused by CUDA"
            return PeerAccess(facts.cuda, None, "; ".join([answer, *silent]))
        # These statuses do not show whether copies are direct.
        statuses = (("over PCIe", facts.pci), ("over NVLink", facts.nvlink), ("atomics", facts.atomics))
        others = [f"{what} {P2P_STATUS.get(word, word)} ({word})" for what, word in statuses if word is not None]
        others += ["nvidia-smi topo -p2p r and -p2p w show it"] if others else []
        reasons = dict.fromkeys([*silent, *facts.unknown.values()]) or others
        failed = [each for each in self.snapshot.failures if each.stage in ("nvml", "cuda")]
        why = (
            "; ".join(reasons)
            or source.lost
            or destination.lost
            or "; ".join(f"{failure.stage}: {failure.error}" for failure in failed)
            or self.snapshot.driver.absent
            or "nvidia-smi topo -p2p r shows it"
        )
        return PeerAccess(None, None, why)

    @cached_property
    def granted_over_pcie(self) -> frozenset[frozenset[str | None]]:
        """Pairs of GPU models that have peer access without NVLinks."""
        return frozenset(
            frozenset((one.name, other.name))
            for one, other in permutations(self.gpus, 2)
            if self.peer_access(one, other).possible and not self.nvlinks(one, other)
        )

    @_cached
    def limit(self, source: Device, destination: Device) -> Limit:
        """Return the bandwidth limit of a pair: that of the NVLinks between the devices, else of the slowest PCIe
        link or NIC port.
        """
        links = self.nvlinks(source, destination)
        if links is None:
            lost = [each.lost for each in (source, destination) if isinstance(each, GpuFacts) and each.lost]
            return Limit(None, lost[0] if lost else "it is unknown whether NVLinks connect them")
        if links:
            own = source.nvlinks if isinstance(source, GpuFacts) else None
            rate = next((nvlink_gb_s(link) for link in own or () if link.active), None)
            if rate is None:
                return Limit(None, f"{links} NVLinks with unknown speed")
            return Limit(links * rate, f"{links} NVLinks × {rate:g}")
        limits = [self._pcie_limit(source, destination)]
        limits += [_rate_limit(device) for device in (source, destination) if isinstance(device, NicFacts)]
        return min(limits, key=lambda limit: limit.gb_s or 0.0)

    def nvlink_total(self, gpu: GpuFacts) -> Limit:
        """Return the total bandwidth of a GPU's active NVLinks in GB/s per direction."""
        if gpu.nvlinks is None:
            return Limit(None, gpu.unknown.get("nvlinks", gpu.lost or "NVLinks are unknown"))
        if active_links(gpu) is None:
            return Limit(None, gpu.unknown.get("nvlinks.active", "the active NVLinks are unknown"))
        active = [link for link in gpu.nvlinks if link.active]
        if not active:
            return Limit(None, f"none of {len(gpu.nvlinks)} NVLinks is active" if gpu.nvlinks else "no NVLink")
        rates = [nvlink_gb_s(link) for link in active]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return Limit(None, "the speed of the NVLinks is unknown")
        return Limit(sum(known), f"{len(active)} NVLinks × {known[0]:g}")

    def pcie_total(self, device: Device) -> Limit:
        """Return the bandwidth of the slowest PCIe link between a device and the CPU, in GB/s per direction."""
        return self._narrowest({device.device: link_under_load(device)} | self._above(device.place, 0), device)

    def own_link_gb_s(self, gpu: GpuFacts) -> float | None:
        """Return the bandwidth from a GPU to the CPU, or to a NIC below the same switch, in GB/s per direction."""
        known = (self.pcie_total(gpu).gb_s, pcie_ceiling_gb_s(link_under_load(gpu)))
        return max((gb_s for gb_s in known if gb_s is not None), default=None)

    def nic_limit(self, nic: NicFacts, gpu: GpuFacts | None = None) -> Limit:
        """Return the bandwidth limit of a NIC in GB/s per direction. It is the slower of its port and its PCIe path."""
        port, slot = _rate_limit(nic), self.pcie_total(nic)
        if gpu is not None and (hops := self._pcie_limit(gpu, nic)).gb_s is not None:
            slot = hops
        return slot if port.gb_s is not None and slot.gb_s is not None and slot.gb_s < port.gb_s else port

    def combined_nic_limit(self, nics: Sequence[NicFacts], near: Mapping[str, GpuFacts]) -> Limit:
        """Return the combined bandwidth limit of several NICs. `near` has the GPU whose data each NIC sends, by NIC."""
        limits = {nic.name: self.nic_limit(nic, near.get(nic.name)) for nic in nics}
        unknown = next((limit for limit in limits.values() if limit.gb_s is None), None)
        if unknown is not None:
            return unknown
        ports = group_by(nics, lambda nic: nic.port or nic.name).values()
        total = sum(
            min(sum(limits[nic.name].gb_s or 0.0 for nic in own), max(_rate_limit(nic).gb_s or 0.0 for nic in own))
            for own in ports
        )
        return Limit(total, ", ".join(nic.name for nic in nics))

    def nearest_gpus(self, nic: NicFacts) -> tuple[GpuFacts, ...]:
        """Return the GPUs with the shortest PCIe path to a NIC."""
        paths = {gpu.index: self.pcie_path(gpu, nic) for gpu in self.gpus}
        nearest = next((class_ for class_ in PATH_CLASSES if class_ in paths.values()), None)
        return tuple(gpu for gpu in self.gpus if nearest is not None and paths[gpu.index] == nearest)

    def gpudirect(self, nic: NicFacts) -> tuple[bool | None, str]:
        """Return whether GPUDirect RDMA through a NIC is possible (None if unknown), and the reason."""
        facts, efa = self.snapshot.gpudirect, nic.kind is NicKind.EFA
        module, loaded = ("efa_nv_peermem", facts.efa_peermem) if efa else ("nvidia-peermem", facts.peermem)
        if not nic.rdma:
            software = "software RDMA, in which the CPU moves the data"
            return False, software if nic.model == SOFTWARE_RDMA else "no RDMA device, only plain Ethernet"
        if nic.gpudirect is not None:
            return nic.gpudirect, "according to NCCL"
        is_idle = not efa and facts.peermem_registered is False
        if loaded and not is_idle:
            return True, f"{module} is loaded"
        missing = f"{module} is not loaded" if loaded is False else f"{module} was not checked"
        missing = f"{module} is loaded but not registered with the RDMA core" if loaded else missing
        if facts.dma_buf:
            return True, f"dma-buf, if the NIC's driver supports it too ({missing})"
        if facts.dma_buf is None:
            return None, f"{missing}, and it is unknown whether the driver offers dma-buf"
        if efa:
            return None, f"{missing} (older EFA drivers do not need it), and the GPU driver offers no dma-buf"
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
        """Return a hash of models, links and wiring. Machines that differ only in ids or load have the same hash."""
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
        """Return the snapshot's facts about a pair, or an empty record."""
        return self._pairs.get((source.device, destination.device), _NO_FACTS)

    def _pcie_limit(self, source: Device, destination: Device) -> Limit:
        shared = _shared_switches(source.place, destination.place)
        hops = {source.device: link_under_load(source)} | self._above(source.place, shared)
        hops |= self._above(destination.place, shared) | {destination.device: link_under_load(destination)}
        return self._narrowest(hops, source, destination)

    def _above(self, place: PciPlace, shared: int) -> dict[str, PcieLink]:
        """Return the uplinks of the switches above a device. Skip the `shared` switches that are nearest to the CPU."""
        return {
            f"the uplink of switch {bus_id}": self._uplinks.get(bus_id, PcieLink())
            for bus_id in place.switches[shared:]
        }

    def _narrowest(self, hops: Mapping[str, PcieLink], *ends: Device) -> Limit:
        ceilings = {name: pcie_ceiling_gb_s(link) for name, link in hops.items()}
        for device in ends:
            if ceilings[device.device] is None:
                return Limit(None, device.unknown.get("pcie", f"the PCIe link of {device.device} is not known"))
        known = {name: gb_s for name, gb_s in ceilings.items() if gb_s is not None}
        name = min(known, key=known.__getitem__)
        link = hops[name]
        described = f"PCIe {link.generation or link.max_generation} x{link.width or link.max_width} at {name}"
        hidden = [name for name, gb_s in ceilings.items() if gb_s is None]
        return Limit(known[name], described + (f"; {', '.join(hidden)} is not known" if hidden else ""))


_NO_FACTS = PairFacts(source="", destination="")


def pcie_path_class(one: PciPlace, other: PciPlace, numa_nodes: int) -> str | None:
    """Return the path class between two positions in the PCI tree, as `nvidia-smi topo -m` prints it. None if
    unknown.

    - PIX: at most one switch
    - PXB: several switches
    - PHB: one host bridge
    - NODE: two host bridges of one NUMA node
    - SYS: two NUMA nodes
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
    """Round a bandwidth to three decimals."""
    return None if gb_s is None else round(gb_s, 3)


def _shared_switches(one: PciPlace, other: PciPlace) -> int:
    if one.host_bridge != other.host_bridge:
        return 0
    pairs = zip(one.switches, other.switches, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _rate_limit(nic: NicFacts) -> Limit:
    if nic.rate_gbit_s is None:
        return Limit(None, nic.unknown.get("rate_gbit_s", f"the rate of {nic.name} is not known"))
    return Limit(nic.rate_gbit_s / BITS_PER_BYTE, f"{nic.name} at {nic.rate_gbit_s:g} Gb/s")


_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_LEVEL_NUMBERS = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
"""Path types by the numeric values of NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL."""

DEFAULT_LEVEL = "PXB"


def parse_level(setting: str) -> str | None:
    """Parse the value of NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL as a path type. None if it is invalid."""
    name = _LEVEL_NUMBERS.get(setting, setting.upper())
    return name if name in _LEVELS else None


def is_within(path: str, limit: str = DEFAULT_LEVEL) -> bool:
    """True if a path of this type is at most as long as one of type `limit`. False if the type is unknown."""
    return path in _LEVELS and _LEVELS.index(path) <= _LEVELS.index(limit)


def is_nvlink(path: str | None) -> bool:
    return path in ("NVL", "NVB", "C2C")


def is_gpu_link(path_class: str) -> bool:
    """True for the path classes of GPUs that NVLinks or xGMI links join: NV# and XGMI."""
    return path_class.startswith("NV") or path_class == XGMI


def nccl_path_type(path_class: str) -> str | None:
    """Return NCCL's path type for a path class. NODE becomes PHB. None if NCCL has no such type."""
    if is_gpu_link(path_class):
        return "NVL"
    return {"NODE": "PHB"}.get(path_class, path_class if path_class in _LEVELS else None)


def level_allows(setting: str, path_class: str) -> bool:
    """True if this value of NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL allows paths of this class."""
    limit, path = parse_level(setting), nccl_path_type(path_class)
    return limit is not None and path is not None and is_within(path, limit)


def amd_takes_all(gpus: int) -> bool:
    """True if NCCL uses peer access over every path on AMD processors (ncclTopoCheckP2p in src/graph/paths.cc)."""
    return gpus <= 2


NCCL_POLICY = f"NCCL uses peer access only up to path class {DEFAULT_LEVEL} (NCCL_P2P_LEVEL)"


class Refusal(Struct, frozen=True, kw_only=True):
    """A refusal of peer access between two GPUs.

    - `status`: NVML's status; '' if only CUDA refuses
    - `wired`: NVLinks connect the two GPUs
    - `mesh`: the status is TNS, and NVLinks connect each of the two GPUs to other GPUs
    - `mig`: MIG is enabled on one of them
    - `odd`: the status is GNS, although another pair of the same models has access
    - `apart`: one of them is a vGPU or a display card
    """

    status: str
    wired: bool
    mesh: bool
    mig: bool
    odd: bool = False
    apart: bool = False

    @property
    def is_by_design(self) -> bool:
        """True if the hardware or configuration rules out peer access, so that there is nothing to repair."""
        return self.mig or self.apart or (not self.wired and (self.mesh or (self.status == "GNS" and not self.odd)))

    @property
    def severity(self) -> Verdict:
        """SKIP if the refusal is by design, FAIL if NVLinks or other pairs prove that access is possible, else
        WARN.

        CNS, NS, TNS and DR over PCIe are WARN, because the reason may be a slot, the BIOS, a driver or a hypervisor.
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
            return "NVLinks connect each of these GPUs to other GPUs"
        return P2P_STATUS.get(self.status, self.status) or "CUDA refuses peer access"


def find_refusal(node: Topology, source: GpuFacts, destination: GpuFacts, access: PeerAccess) -> Refusal:
    """Classify the refusal of peer access between two GPUs."""
    models = frozenset((source.name, destination.name))
    gpus = (source, destination)
    in_mesh = all(any(link.active and link.peer is NvlinkPeer.GPU for link in gpu.nvlinks or ()) for gpu in gpus)
    return Refusal(
        status=access.nvml or "",
        wired=bool(node.nvlinks(source, destination)),
        mesh=access.nvml == "TNS" and in_mesh and not lost_links_between(node, source, destination),
        mig=bool(source.mig or destination.mig),
        odd=access.nvml == "GNS" and None not in models and models in node.granted_over_pcie,
        apart=any(is_virtual_gpu(gpu) or gpu in find_display_cards(node.gpus) for gpu in gpus),
    )


def is_beyond_policy(node: Topology, path_class: str) -> bool:
    """True if NCCL does not use peer access over this path class by default (ncclTopoCheckP2p in graph/paths.cc)."""
    path = nccl_path_type(path_class)
    is_amd = "AMD" in (node.snapshot.machine.cpu or "")
    return path is not None and not is_within(path) and not (is_amd and amd_takes_all(len(node.gpus)))


def nccl_keeps_off(node: Topology, source: GpuFacts, destination: GpuFacts) -> str:
    """Return the reason if NCCL does not use a pair's peer access by default. '' if it does, or if NVLinks are lost."""
    path = node.path(source, destination)
    lost = lost_links_between(node, source, destination)
    lost = lost or any(lost_switch_links(node, gpu) for gpu in (source, destination))
    # RCCL uses peer access over every path, unless the processors are from Intel.
    lost = lost or node.pair_facts(source, destination).rocm is not None
    return f"{NCCL_POLICY}, and this is {path}" if is_beyond_policy(node, path) and not lost else ""


def is_policy_known(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    """True if the known facts are sufficient to predict whether NCCL uses peer access between two GPUs.

    The driver must have stated the path. The processor must be known if it matters. NVLinks or a PCIe switch between
    other GPUs show that this pair may also have a shorter path. Topology files may lack NVLinks.
    """
    is_cpu_known = node.snapshot.machine.cpu is not None or not amd_takes_all(len(node.gpus))
    is_far = not any(kind is not None and is_within(kind) for kind in map(nccl_path_type, node.gpu_paths))
    return is_cpu_known and is_far and node.states_path(source, destination)


def lost_switch_links(node: Topology, gpu: GpuFacts) -> bool:
    """True if all of a GPU's NVLinks to NVSwitches are inactive. False if there is no other GPU."""
    has_others = len(node.gpus) > 1 or (gpu.fabric is not None and gpu.fabric.spans_nodes)
    return has_others and is_switched(node, gpu) and bool(gpu.nvlinks) and active_links(gpu) == 0


def lost_links_between(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    """True if two GPUs without a common active NVLink should have one.

    Either similar pairs or the opposite direction have NVLinks, or both GPUs have lost some.
    """
    if node.nvlinks(source, destination) != 0:
        return False
    is_odd = frozenset((source.device, destination.device)) in node.lost_links or node.nvlinks(destination, source)
    return bool(is_odd) or all(lost_some_links(node, gpu) for gpu in (source, destination))


def lost_some_links(node: Topology, gpu: GpuFacts) -> bool:
    """True if a GPU without NVSwitches has some active NVLinks, but fewer than usual for its model."""
    return 0 < (active_links(gpu) or 0) < node.usual_active_links[gpu.name] and not is_switched(node, gpu)


def is_switched(node: Topology, gpu: GpuFacts) -> bool:
    """True if the node lists NVSwitches, a NVLink leads to one, or the GPU's fabric registration is completed."""
    registered = gpu.fabric is not None and gpu.fabric.state == "completed"
    leads = any(link.peer is NvlinkPeer.SWITCH for link in gpu.nvlinks or ())
    return bool(node.snapshot.nvswitches) or leads or registered
