"""A model of the links in simulated nodes: bandwidth with faults, copies, and managed memory.

A copy takes its latency plus bytes / bandwidth. Fractions of the bandwidth come from measurements with 64 MiB on two
H200s.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, product

from msgspec import Struct

from gpubench.model.facts.snapshot import NicKind, NvlinkPeer
from gpubench.model.paths.topology import BITS_PER_BYTE, Topology, is_gpu_link, pcie_gb_s
from gpubench.model.profiles.fault import HALVE_CLOCKS, Fault, Subject
from gpubench.model.profiles.profile import P2P_OK, NicKindOfMachine, NvlinkKind, Profile
from gpubench.model.terms.operation import Block, CopyGpu, DataPattern, Engine, HostMemory, ManagedSupport, Place
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND
from gpubench.ports.backend import Array, Memory, Region
from gpubench.ports.copies import HOST, CopyStream, LinkBytes
from gpubench.simulated.machine import SimulatedMachine, hidden_gpus, not_joined, snapshots, wrong_value
from gpubench.simulated.node import healthy_node

STAGING = ("p2p", "cuda_peer", "mig", "fabric", "staged")  # Keys of faults that make copies host-staged


class GpuLinks(Struct, frozen=True):
    """One GPU after faults. Each share is the fraction that remains of the healthy value.

    `share` is for its link bandwidth, `host_share` for its bandwidth to host memory, and `clock_share` for its clock.
    `ring_share` is the fraction of its NVLinks that NCCL's rings find active, if NVLinks connect GPU pairs directly.
    Copies to `staged_peers` are host-staged.
    """

    index: int
    share: float = 1.0
    ring_share: float = 1.0
    host_share: float = 1.0
    staged_peers: frozenset[int] = frozenset()
    clock_share: float = 1.0


Hop = tuple[int, int]  # Positions of two GPUs among those present


class NodeLinks(Struct, frozen=True):
    """A node's GPUs that are present, and the GB/s of each NIC that is up. Ethernet NICs count only if there is no
    RDMA NIC.

    `pair_shares` has the remaining fraction of bandwidth for GPU pairs with a fault of their own, by GPU index.
    `links_left` has the fraction of a pair's NVLinks that are active, if NVLinks connect GPU pairs directly.
    """

    gpus: tuple[GpuLinks, ...]
    nics_gb_s: tuple[float, ...]
    pair_shares: Mapping[frozenset[int], float]
    links_left: Mapping[frozenset[int], float]

    def share(self, one: int, other: int) -> float:
        """Return the fraction of healthy bandwidth that a direct copy between two GPUs, chosen by position, reaches."""
        ends = self.gpus[one], self.gpus[other]
        left = self.links_left.get(frozenset(end.index for end in ends), 1.0)
        return min(end.share for end in ends) * left * self.pair_share(one, other)

    def pair_share(self, one: int, other: int) -> float:
        """Return the fraction of bandwidth that remains after faults of this GPU pair, without faults of either GPU."""
        return self.pair_shares.get(frozenset((self.gpus[one].index, self.gpus[other].index)), 1.0)

    def slowest(self, ranks: int, hops: Iterable[Hop] = (), part: float = 1.0) -> tuple[int, float]:
        """Return the slowest of the first `ranks` GPUs in a collective, and the fraction of bandwidth that remains
        for it.

        The collective uses all links of each GPU. It uses the path of each hop for the fraction `part` of its time.
        """
        shares = [(gpu.share * gpu.ring_share, position) for position, gpu in enumerate(self.gpus[:ranks])]
        faulty = [hop for hop in hops if self.pair_share(*hop) < 1]
        shares += [(1 / (1 + part * (1 / self.share(*hop) - 1)), min(hop)) for hop in faulty]
        share, position = min(shares)
        return position, share

    def staged(self, ranks: int) -> int | None:
        """Return the position of the first GPU with a host-staged peer, among the first `ranks` GPUs. None if there
        is none.
        """
        indices = {gpu.index for gpu in self.gpus[:ranks]}
        return next((n for n, gpu in enumerate(self.gpus[:ranks]) if gpu.staged_peers & indices), None)

    def staged_hops(self, ranks: int) -> int:
        """Return the number of host-staged hops in a ring over the first `ranks` GPUs, at least 1."""
        ring = self.gpus[:ranks]
        return max(1, sum(ring[n - 1].index in gpu.staged_peers for n, gpu in enumerate(ring)))

    def is_staged(self, one: int, other: int) -> bool:
        """True if copies between two GPUs, chosen by position, are host-staged in either direction."""
        ends = self.gpus[one], self.gpus[other]
        return ends[1].index in ends[0].staged_peers or ends[0].index in ends[1].staged_peers

    def ring_order(self, ranks: int) -> list[int]:
        """Return the positions of the first `ranks` GPUs in the order of a job's ring.

        It is the order of GPUs, except that the first host-staged pair is always adjacent, as `staged_hops` assumes.
        """
        order = list(range(ranks))
        if (staged := self.staged(ranks)) is not None and not any(
            self.is_staged(one, (one + 1) % ranks) for one in order
        ):
            peer = next(other for other in order if self.is_staged(staged, other))
            order.remove(peer)
            order.insert(order.index(staged) + 1, peer)
        return order


def ring_hops(profile: Profile, links: NodeLinks, ranks: int) -> list[Hop]:
    """Return the pairs of neighbors in NCCL's rings over the first `ranks` GPUs of a node.

    NCCL does not measure paths, so it does not avoid slow ones. If all paths have the same type (NVSwitch, PCIe), all
    channels use one ring in GPU order. The logs of four H200s in tests/logs show this, and for eight GPUs it is
    assumed. If NVLinks connect GPU pairs directly, the rings use all NVLinks.
    """
    pairs = set() if profile.nvlink is None else {frozenset(pair[:2]) for pair in profile.nvlink.pairs}
    if not pairs:
        return [(one, (one + 1) % ranks) for one in range(ranks)] if ranks > 1 else []
    indices = [gpu.index for gpu in links.gpus[:ranks]]
    return [hop for hop in combinations(range(ranks), 2) if frozenset(indices[end] for end in hop) in pairs]


def node_links(profile: Profile, faults: Sequence[Fault]) -> NodeLinks:
    """Return the links of a node with these faults. Raise UsageError if the node does not have a faulty GPU or NIC."""
    gpu_faults = [fault for fault in faults if fault.subject in (Subject.GPU, Subject.LINK)]
    nic_faults = [fault for fault in faults if fault.subject is Subject.NIC]
    for fault in gpu_faults:
        for index in (fault.index, fault.second):
            _check_index(fault, index, profile.match.visible, "GPU")
    for fault in nic_faults:
        _check_index(fault, fault.index, len(profile.nic), "NIC")
    gone = {fault.index for fault in gpu_faults if fault.get("missing") or fault.get("lost")}
    left = _links_left(profile, gpu_faults)
    gpus = tuple(
        _gpu_links(profile, index, gpu_faults, left) for index in range(profile.match.visible) if index not in gone
    )
    return NodeLinks(gpus, _nics_gb_s(profile, nic_faults), _pair_shares(profile, gpu_faults), left)


def corrupted_pairs(faults: Iterable[Fault]) -> set[frozenset[int | None]]:
    """Return the GPU pairs, by index, for which a fault corrupts direct copies."""
    return {frozenset((fault.index, fault.second)) for fault in faults if fault.get("corrupts")}


def _links_left(profile: Profile, faults: Iterable[Fault]) -> dict[frozenset[int], float]:
    """Return the fraction of active NVLinks for each GPU pair. If only some of a GPU's links are active, they are
    its first ones.
    """
    left: dict[frozenset[int], float] = {}
    pairs = () if profile.nvlink is None else profile.nvlink.pairs
    for fault in faults:
        active = int(fault.get("nvlink") or 0)
        for pair in pairs if fault.subject is Subject.GPU and fault.get("nvlink") is not None else ():
            if fault.index in pair[:2]:
                ends = frozenset(pair[:2])
                left[ends] = min(left.get(ends, 1.0), min(active, pair[2]) / pair[2])
                active = max(0, active - pair[2])
    return left


def _pair_shares(profile: Profile, faults: Iterable[Fault]) -> dict[frozenset[int], float]:
    shares: dict[frozenset[int], float] = {}
    for fault in faults:
        if fault.index is not None and fault.second is not None:
            pair = frozenset((fault.index, fault.second))
            shares[pair] = shares.get(pair, 1.0) * (_share(profile, fault) or 1.0)
    return {pair: share for pair, share in shares.items() if share < 1}


def _check_index(fault: Fault, index: int | None, count: int, part: str) -> None:
    if index is not None and index >= count:
        raise wrong_value(fault, f"there is no {part} {index}", f"an index below {count}")


def _gpu_links(profile: Profile, index: int, faults: Sequence[Fault], left: Mapping[frozenset[int], float]) -> GpuLinks:
    share, ring_share, host_share = 1.0, 1.0, 1.0
    staged_peers = {end for pair, links in left.items() if index in pair and not links for end in pair - {index}}
    is_paired = profile.nvlink is not None and bool(profile.nvlink.pairs)
    others = set(range(profile.match.visible)) - {index}
    for fault in faults:
        if index not in (fault.index, fault.second):
            continue
        ends = {fault.index, fault.second} - {index, None}
        partners = {end for end in ends if end is not None} if fault.subject is Subject.LINK else others
        remaining = _share(profile, fault)
        if any(fault.get(key) for key in STAGING) or (remaining == 0 and not (is_paired and partners is others)):
            staged_peers |= partners
        if fault.subject is Subject.GPU:
            gpu_share = float(fault.get("speed") or 1.0) if is_paired else remaining or 1.0
            share *= gpu_share
            ring_share *= (remaining or 1.0) / gpu_share
            # Without NVLinks, `speed` also slows the link to host memory.
            host_share *= remaining if profile.nvlink is None else _pcie_share(profile, fault)
    throttled = any(fault.index == index and fault.get("throttle") in HALVE_CLOCKS for fault in faults)
    staged = frozenset(other for other in staged_peers if _have_peer_access(profile, frozenset((index, other))))
    return GpuLinks(index, share, ring_share, host_share, staged, 0.5 if throttled else 1.0)


def _have_peer_access(profile: Profile, pair: frozenset[int]) -> bool:
    """True if GPUs of this pair have peer access when healthy. Otherwise they are host-staged by design."""
    access, nvlink = profile.peer_access, profile.nvlink
    joined = nvlink is not None and (not nvlink.pairs or pair in {frozenset(ends[:2]) for ends in nvlink.pairs})
    return (access.status if joined or access.unlinked is None else access.unlinked) == P2P_OK


def _share(profile: Profile, fault: Fault) -> float:
    share = float(fault.get("speed") or 1)
    active, nvlink = fault.get("nvlink"), profile.nvlink
    if active is not None and nvlink is not None:
        share *= min(1.0, int(active) / _healthy_links(nvlink, fault))
    elif fault.subject is Subject.GPU and nvlink is None:
        share *= _pcie_share(profile, fault)
    return share


def _healthy_links(nvlink: NvlinkKind, fault: Fault) -> int:
    if fault.subject is Subject.GPU:
        return nvlink.links
    joined = {frozenset[int | None](pair[:2]): pair[2] for pair in nvlink.pairs}
    links = joined.get(frozenset((fault.index, fault.second)))
    if links is None:
        raise not_joined(fault)
    return links


def _pcie_share(profile: Profile, fault: Fault) -> float:
    left = pcie_gb_s(
        int(fault.get("generation") or profile.gpu.pcie_generation), int(fault.get("width") or profile.gpu.pcie_width)
    )
    return min(1.0, (left or 0.0) / profile.gpu.pcie_gb_s) if profile.gpu.pcie_gb_s else 1.0


def _nics_gb_s(profile: Profile, faults: Sequence[Fault]) -> tuple[float, ...]:
    """Return the GB/s of each NIC that is up. Devices that share a physical port share its bandwidth equally."""
    with_faults = [(nic, [fault for fault in faults if fault.index == n]) for n, nic in enumerate(profile.nic)]
    up = [(nic, nic_faults) for nic, nic_faults in with_faults if not is_nic_down(nic_faults)]
    sharing = Counter(nic.port for nic, _ in up if nic.port)
    rdma: list[float] = []
    ethernet: list[float] = []
    for nic, nic_faults in up:
        gb_s = nic_gb_s(nic, nic_faults, sharing[nic.port or ""] or 1)
        if gb_s is not None:
            (ethernet if nic.kind is NicKind.ETHERNET else rdma).append(gb_s)
    return tuple(rdma or ethernet)


def is_nic_down(faults: Iterable[Fault]) -> bool:
    """True if a fault removes the NIC or takes its port down."""
    return any(fault.get("missing") or fault.get("state") for fault in faults)


def nic_gb_s(nic: NicKindOfMachine, faults: Sequence[Fault], sharing: int = 1) -> float | None:
    """Return a NIC's bandwidth in GB/s: the lower of its PCIe slot's and its share of the port's. None if the rate
    is unknown.

    `sharing` is the number of devices that share the port.
    """
    rate, generation, width = nic.rate_gbit_s, nic.pcie_generation, nic.pcie_width
    for fault in faults:
        broken_rate = fault.get("rate")
        rate = rate if broken_rate is None else float(broken_rate)
        generation = int(fault.get("generation") or generation or 0)
        width = int(fault.get("width") or width or 0)
    if rate is None:
        return None
    slot = pcie_gb_s(generation, width)
    port = rate / BITS_PER_BYTE / sharing
    return min(port, slot) if slot else port


_SPREAD = 0.0005  # Relative standard deviation between samples. GPU pairs on four H200s differ by 0.1 %
# Fraction of a link's rate that copies reach, if the profile has no expected value. Copies reach 80 to 92 %. Kind:
# derived.
_ACHIEVED = 0.85
_LATENCY_US, _STAGED_LATENCY_US, _HOST_LATENCY_US = 2.0, 15.0, 10.0
"""Latency of one copy if the profile has no expected value, from four H200s. Kind: derived."""

_PAGEABLE_SHARE = 0.37  # Fraction of the pinned bandwidth: 21.6 of 55.6 and 18.9 of 55.4 GB/s on H200. Kind: derived.


class _NoMemory:
    """Memory without contents. `lost` returns whether data from a GPU is lost on the way to this memory."""

    def __init__(self, place: Place, size_bytes: int, lost: Callable[[int, Place], bool] | None) -> None:
        self.place = place
        self.size_bytes = size_bytes
        self._lost = lost

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        raise NotImplementedError("simulated memory contains no data")

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None: ...

    def fill_byte(self, size_bytes: int, value: int) -> None: ...

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:  # noqa: ARG002
        """Count lost elements as wrong, because the destination keeps its old contents."""
        lost = self._lost
        if lost is None:
            raise NotImplementedError("simulated memory contains no data")
        return sum(
            block.count * block.buffers for block, sender in blocks if sender is not None and lost(sender, self.place)
        )


class SimulatedCopies:
    """Simulate `ports.Copies` on one node of a simulated machine. `noise` is the relative standard deviation
    between samples.
    """

    def __init__(
        self, machine: SimulatedMachine, faults: Sequence[Fault], seed: int, *, noise: float = _SPREAD, node: int = 0
    ) -> None:
        self.snapshot = snapshots(machine, faults, seed, [node])[0]
        self._profile = machine.profile
        self._typical = cache(machine.profile.typical)
        self._spread = noise
        node_faults = [fault for fault in faults if fault.node_number == node]
        self._seed = f"{seed}/copies" + (f"/{node}" if node else "")
        self._noise: dict[tuple[object, ...], random.Random] = {}
        alive = [gpu for gpu in self.snapshot.gpus if not gpu.lost]
        self.gpus = tuple(
            CopyGpu(gpu.device, position, gpu.bus_id or "", gpu.uuid or "", gpu.name or "")
            for position, gpu in enumerate(alive)
        )
        self._links = node_links(machine.profile, [*node_faults, *hidden_gpus(machine, [node])])
        self._indices = [gpu.index for gpu in self._links.gpus]
        # An NVLink that is down makes a path slower, but does not change its type.
        healthy = Topology(healthy_node(machine.profile))
        pairs = product(healthy.gpus, repeat=2)
        self._paths = {(one.index, other.index): healthy.path(one, other) for one, other in pairs}
        self._access = {(pair.source, pair.destination): pair.cuda is True for pair in self.snapshot.pairs}
        self._enabled: set[tuple[int, int]] = set()
        self._known: tuple[Sequence[CopyStream], float, random.Random] = (), 0.0, random.Random()
        self._corrupted = corrupted_pairs(node_faults)

    @property
    def corrupts(self) -> bool:
        """True if a fault corrupts data, so that verifying data makes sense."""
        return bool(self._corrupted)

    def can_reach(self, source: int, destination: int) -> bool:
        """True if the simulated CUDA reports peer access between these GPUs."""
        return self._access.get((self.gpus[source].device, self.gpus[destination].device), False)

    def enable(self, source: int, destination: int) -> None:
        """Enable peer access, so that later copies from `source` to `destination` are direct."""
        self._enabled.add((source, destination))
        self._known = (), 0.0, random.Random()

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        """Return memory without contents. Its size is unlimited."""
        return _NoMemory(place, size_bytes, self.is_lost if self.corrupts else None)

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """Return the time of the busiest link in seconds. Copies that leave or enter a GPU by the same type of link
        share the link.
        """
        # compute this once per sample, because each sample calls this method many times
        if streams is not self._known[0]:
            self._known = streams, self._busiest(streams), self._noise_source(streams)
        return repeats * self._known[1] * (1 + abs(self._known[2].gauss(0.0, self._spread)))

    def _noise_source(self, streams: Sequence[CopyStream]) -> random.Random:
        """Return the random source for this set of streams.

        Each set has its own source, so that a fault of one GPU pair does not change the noise for other pairs.
        """
        kind: list[object] = []
        for stream in streams:
            places = (stream.by, _place(stream.source), _place(stream.destination))
            indices = (place if isinstance(place, HostMemory) else self._indices[place] for place in places)
            kind.append((*indices, stream.engine, stream.size_bytes))
        key = tuple(kind)
        if key not in self._noise:
            self._noise[key] = random.Random(f"{self._seed}/{key}")
        return self._noise[key]

    def _busiest(self, streams: Sequence[CopyStream]) -> float:
        busy: dict[tuple[object, ...], float] = defaultdict(float)
        kind = self._profile.nvlink
        # Without NVSwitches, each GPU pair has its own links
        has_own_links = kind is not None and kind.to is not NvlinkPeer.SWITCH
        for stream in streams:
            source, destination = _place(stream.source), _place(stream.destination)
            seconds, nvlink = self._seconds(stream, source, destination), self._is_nvlink(source, destination)
            if nvlink and has_own_links:
                busy[source, destination] += seconds
                continue
            for place, leaves in ((source, True), (destination, False)):
                busy[place, leaves, nvlink] += seconds
        return max(busy.values())

    def close(self) -> None: ...

    def _seconds(self, stream: CopyStream, source: Place, destination: Place) -> float:
        if isinstance(source, HostMemory) or isinstance(destination, HostMemory):
            gb_s, latency_us = self._host_gb_s(source, destination), _HOST_LATENCY_US
        elif self._is_direct(source, destination):
            gb_s = self._direct_gb_s(stream, source, destination) * self._links.share(source, destination)
            latency_us = self._typical("p2p.latency_us") or _LATENCY_US
        else:
            healthy = self._typical("p2p.staged_gb_s") or self._profile.gpu.host_gb_s * _ACHIEVED
            gb_s = healthy * min(self._links.gpus[end].host_share for end in (source, destination))
            if not self._can_be_direct(source, destination):
                gb_s *= self._links.pair_share(source, destination)
            latency_us = self._typical("p2p.staged_latency_us") or _STAGED_LATENCY_US
        return latency_us / MICROSECONDS_PER_SECOND + stream.size_bytes / gb_s / BYTES_PER_GB

    def is_lost(self, source: int, destination: Place) -> bool:
        """True if a fault corrupts direct copies from this GPU to this place."""
        if isinstance(destination, HostMemory) or source >= len(self._indices):
            return False
        ends = self._indices[source], self._indices[destination]
        return frozenset(ends) in self._corrupted and self._is_direct(source, destination)

    def _is_direct(self, source: int, destination: int) -> bool:
        return (source, destination) in self._enabled and self._can_be_direct(source, destination)

    def _can_be_direct(self, source: int, destination: int) -> bool:
        return self.can_reach(source, destination) and not self._links.is_staged(source, destination)

    def _is_nvlink(self, source: Place, destination: Place) -> bool:
        if isinstance(source, HostMemory) or isinstance(destination, HostMemory):
            return False
        path = self._paths[self._indices[source], self._indices[destination]] if source != destination else ""
        return is_gpu_link(path) and self._is_direct(source, destination)

    def _direct_gb_s(self, stream: CopyStream, source: int, destination: int) -> float:
        writes = stream.by == source
        path = self._paths[self._indices[source], self._indices[destination]]
        if stream.engine is Engine.SM:
            quantity = "p2p.sm_write_gb_s"
        else:
            quantity = "p2p.write_gb_s" if writes else "p2p.read_gb_s"
        typical = self._typical(quantity, path) or self._typical("p2p.write_gb_s", path)
        nvlink, links = self._profile.nvlink, path.removeprefix("NV")
        has_nvlinks = nvlink is not None and links.isdecimal()
        limit = int(links) * nvlink.link_gb_s if nvlink is not None and has_nvlinks else self._profile.gpu.pcie_gb_s
        return typical or limit * _ACHIEVED

    def _host_gb_s(self, source: Place, destination: Place) -> float:
        is_upload = isinstance(source, HostMemory)
        gpu = destination if is_upload else source
        share = 1.0 if isinstance(gpu, HostMemory) else self._links.gpus[gpu].host_share
        typical = self._typical("host_to_device_gb_s" if is_upload else "device_to_host_gb_s")
        pageable = HostMemory.PAGEABLE in (source, destination)
        healthy = typical or self._profile.gpu.host_gb_s * _ACHIEVED
        return healthy * share * (_PAGEABLE_SHARE if pageable else 1.0)


class NoCounters:
    """`ports.LinkCounters` for machines without byte counters."""

    def read(self, gpu: int) -> LinkBytes:  # noqa: ARG002
        return LinkBytes()


def _place(region: Region) -> Place:
    if not isinstance(region.memory, _NoMemory):
        raise TypeError("a simulated copy has simulated memory at both ends")
    return region.memory.place


_TO_GPU_SHARE, _TO_HOST_SHARE, _BETWEEN_SHARE = 0.84, 0.29, 0.36
"""Fraction of the copy engine's bandwidth that a prefetch reaches. To the GPU it is 46.5 of 55.3 GB/s, to the host
16 of 55.3, and between GPUs 139 of 388.
"""

_FAULTS_SHARE, _FAULTS_BETWEEN_SHARE = 0.205, 0.031
"""Fraction of the copy engine's bandwidth that page faults reach: 11.4 of 55.3 GB/s from the host, and 12.1 of 388
GB/s from another GPU.
"""

_LOCAL_GB_S = 1000.0  # Bandwidth of a kernel's copy within GPU memory. An H200 reaches 1080 GB/s. Derived


class SimulatedManaged:
    """Simulate `ports.copies.ManagedMemory` on one node."""

    def __init__(self, copies: SimulatedCopies) -> None:
        self._copies = copies
        self._location: Place = HOST
        self._stays = False

    def support(self) -> Sequence[ManagedSupport]:
        """Return the attributes that CUDA reports on Linux without HMM (heterogeneous memory management)."""
        return [
            ManagedSupport(device=gpu.device, managed=True, concurrent=True, pageable=False, host_page_tables=False)
            for gpu in self._copies.gpus
        ]

    def allocate(self, size_bytes: int) -> Memory:
        return self._copies.allocate(HostMemory.PINNED, size_bytes)

    def on(self, memory: Memory, place: Place) -> Memory:  # noqa: ARG002
        return memory

    def prefetch(self, memory: Memory, place: Place, by: int) -> float:
        """Return the time of a prefetch in seconds. It is the copy engine's time for the same copy, divided by a
        measured fraction.
        """
        source, self._location = self._location, place
        if source == place:
            return 0.0
        share = _BETWEEN_SHARE if HOST not in (source, place) else _TO_HOST_SHARE if place is HOST else _TO_GPU_SHARE
        return self._copy_seconds(source, place, by, memory.size_bytes) / share

    def advise(self, memory: Memory, place: Place, accessor: int, *, stays: bool) -> None:  # noqa: ARG002
        """Keep pages at their location from now on, or let them migrate to the GPU that uses them."""
        self._stays = stays

    def seconds(self, stream: CopyStream) -> float:
        """Return the time in seconds in which a kernel reads or writes all pages. The pages migrate to its GPU
        unless they stay.
        """
        source, by = self._location, stream.by
        if source == by:
            return stream.size_bytes / (_LOCAL_GB_S * BYTES_PER_GB)
        if self._stays:
            return self._copy_seconds(source, by, by, stream.size_bytes, Engine.SM)
        copy_seconds = self._copy_seconds(source, by, by, stream.size_bytes)
        self._location = by
        return copy_seconds / (_FAULTS_SHARE if source is HOST else _FAULTS_BETWEEN_SHARE)

    def _copy_seconds(
        self, source: Place, destination: Place, by: int, size_bytes: int, engine: Engine = Engine.CE
    ) -> float:
        one, other = (
            Region(self._copies.allocate(HostMemory.PINNED if place is HOST else place, size_bytes), 0)
            for place in (source, destination)
        )
        return self._copies.seconds([CopyStream(by, engine, one, other, size_bytes)], 1)
