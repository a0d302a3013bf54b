"""The expected time of a collective on a healthy machine, from curves, NICs or link limits.

docs/internals/expected-speed.md has the formulas.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from gpubench.collectives.curve import Curve, curve
from gpubench.collectives.record import Collective
from gpubench.errors import UsageError
from gpubench.model.paths.wiring import NodeNetwork, internode_limit, nccl_name
from gpubench.model.profiles.profile import BUSBW, TIME, Expected, ExpectedKind, Profile
from gpubench.model.results import speed
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

NIC_EFFICIENCY = 0.92
"""Fraction of the NICs' rate that collectives reach between nodes. It is Together AI's threshold, as quoted in
NVIDIA's cluster-readiness-engine (ADR-021). Published rings reach 0.83 to 0.98. Derived.
"""

ETHERNET_EFFICIENCY = 0.52
"""Fraction of the NICs' rate that collectives reach over plain Ethernet. GPUDirect-TCPX reaches 50 to 54 of 100
GB/s on 2 × a3-high. Sockets reach 6 of 12.5 on 2 × p3dn (NVIDIA/nccl#398). Derived.
"""

NVLS_BETWEEN_NODES = 0.95  # NVLSTree's bandwidth relative to NVLS inside a node: 260 of 274 GB/s on 2 × 8 H100. Derived
_RING, _TREE, _NVLS_TREE = "RING", "TREE", "NVLSTREE"
_LL, _LL128, _SIMPLE = "LL", "LL128", "SIMPLE"

BASE_US = {
    _RING: {_LL: 6.6, _LL128: 14.0, _SIMPLE: 8.4},
    _TREE: {_LL: 6.8, _LL128: 14.0, _SIMPLE: 8.4},
}
NVLINK_US = {_RING: {_LL: 0.6, _LL128: 1.9, _SIMPLE: 3.4}, _TREE: {_LL: 0.6, _LL128: 1.25, _SIMPLE: 4.0}}
_PCIE_US = {_RING: {_LL: 1.0, _LL128: 2.5, _SIMPLE: 5.7}, _TREE: {_LL: 1.0, _LL128: 1.9, _SIMPLE: 4.0}}
_NET_US = {_RING: {_LL: 2.7, _LL128: 4.0, _SIMPLE: 14.0}, _TREE: {_LL: 5.0, _LL128: 8.5, _SIMPLE: 14.0}}
"""NCCL's latencies in µs (graph/tuning.cc): per operation, per hop inside a node (NVLink or PCIe), and per hop
between nodes.
"""

_POST_US = {_LL: 1.0, _LL128: 1.0, _SIMPLE: 3.0}  # NCCL's latency per ring step with several nodes, for Intel CPUs
_NVLS_TREE_US, _NVLS_TREE_HOP_US = 25.0, 20.9

_LL_GB_S = {1: 39.0, 2: 22.5}
# NCCL's highest busbw with LL on one node, two nodes and more nodes, for AMD CPUs, the slower ones
_LL_GB_S_OF_MORE = 19.0
_SHARES = {_RING: {_LL: 0.5, _LL128: 0.92, _SIMPLE: 1.0}, _TREE: {_LL: 1 / 3.8, _LL128: 0.9375, _SIMPLE: 1.0}}
"""Fraction of the bandwidth that NCCL expects from each protocol, by algorithm."""

# Factor on the bandwidth of a tree with LL128 on three or more nodes, from 4 × 8 B200. Derived
_TREE_LL128_OF_MORE = 0.7
_SLOWER_SMALL = 3.0  # Factor on NCCL's latency for LL, LL128 and trees: 46 to 70 µs instead of 25 on two nodes. Derived
# Factor on NCCL's latency for a ring with Simple: NCCL's own factor for medium sizes, times 1.2. Derived
_SLOWER_RING = 1.4 * 1.2
_NVLS_TREE_FILL_US = 250.0  # Time to fill NVLSTree's pipeline, from two nodes with H100 and with H20. Derived
_TREE_HOP_US = 5.0  # Latency per hop between nodes with LL, for sends and receives, which have no algorithm


class AlgorithmTime(NamedTuple):
    """The time of one operation in seconds, and its algorithm. Sends and receives have no algorithm."""

    seconds: float
    algorithm: str | None


class Inside(Struct, frozen=True):
    """Performance inside a node or NVLink domain: the busbw of rings, and the times with NVLS.

    A faulty GPU reduces both to the fraction `share`.
    """

    ring_gb_s: float = math.inf
    nvls: Curve | None = None
    nvlink: bool = True
    share: float = 1.0

    @classmethod
    def of(cls, profile: Profile, collective: Collective, ranks: int, share: float = 1.0) -> "Inside":
        """Return a profile's values for `ranks` ranks per node. Raise UsageError if it has none for the collective."""
        if ranks == 1:
            return cls(nvlink=profile.nvlink is not None)
        large = 2**33
        points = curve(profile, collective, ranks, ranks, nvls=False)
        ring = large * collective.busbw_factor(ranks) / points.at(large) / BYTES_PER_GB
        known = profile.find(f"{collective.name}.busbw_gb_s", gpus=ranks)
        known += profile.find(f"{collective.name}.time_us", gpus=ranks)
        nvls = curve(profile, collective, ranks, ranks) if any(point.nvls for point in known) else None
        return cls(ring, nvls, profile.nvlink is not None, share)


def expected_between(
    collective: Collective, size_bytes: int, network: NodeNetwork, inside: Inside, algorithm: str | None = None
) -> AlgorithmTime:
    """Return the time with the algorithm that NCCL's log names, or with the fastest one if `algorithm` is None."""
    exchanged = network.exchange_gb_s(collective)
    if exchanged is not None:
        seconds = size_bytes / (exchanged * efficiency(network) * BYTES_PER_GB)
        hops = 2 * math.ceil(math.log2(network.nodes)) * _TREE_HOP_US * _SLOWER_SMALL
        return AlgorithmTime(hops / MICROSECONDS_PER_SECOND + seconds, None)
    found = list(_times(collective, size_bytes, network, inside, named=algorithm is not None))
    return min([time for time in found if time.algorithm == nccl_name(algorithm)] or found)


def efficiency(network: NodeNetwork) -> float:
    return NIC_EFFICIENCY if network.rdma else ETHERNET_EFFICIENCY


def _times(
    collective: Collective, size_bytes: int, network: NodeNetwork, inside: Inside, *, named: bool
) -> Iterator[AlgorithmTime]:
    is_all_reduce = collective.name == "allreduce"
    for algorithm in (_RING, _TREE) if is_all_reduce else (_RING,):
        gb_s = _algbw_gb_s(collective, algorithm, network, inside, named=named)
        for protocol, share in _SHARES[algorithm].items():
            least = gb_s * share
            if protocol == _LL:
                most = _LL_GB_S.get(network.nodes, _LL_GB_S_OF_MORE)
                least = min(least, most / collective.busbw_factor(network.ranks) if algorithm == _RING else most / 2)
            elif protocol == _LL128 and algorithm == _TREE and network.nodes > 2:
                least *= _TREE_LL128_OF_MORE
            latency_us = _latency_us(collective, algorithm, protocol, network, nvlink=inside.nvlink)
            yield AlgorithmTime(latency_us / MICROSECONDS_PER_SECOND + size_bytes / (least * BYTES_PER_GB), algorithm)
    if is_all_reduce and inside.nvls is not None:
        net_gb_s = (
            network.node_gb_s * efficiency(network) / network.sent_per_byte(_NVLS_TREE, collective, as_nccl=not named)
        )
        seconds = max(
            size_bytes / (net_gb_s * BYTES_PER_GB), inside.nvls.at(size_bytes) / inside.share / NVLS_BETWEEN_NODES
        )
        hops = 2 * int(math.log2(network.nodes))
        latency_us = _NVLS_TREE_US + hops * _NVLS_TREE_HOP_US + _NVLS_TREE_FILL_US
        yield AlgorithmTime(latency_us / MICROSECONDS_PER_SECOND + seconds, _NVLS_TREE)


def _algbw_gb_s(collective: Collective, algorithm: str, network: NodeNetwork, inside: Inside, *, named: bool) -> float:
    """Return the algbw in GB/s that both the NICs and the links inside a node allow.

    In a tree, every rank sends its data twice.
    """
    across = network.node_gb_s * efficiency(network) / network.sent_per_byte(algorithm, collective, as_nccl=not named)
    ring = inside.ring_gb_s * inside.share
    if algorithm == _TREE:
        return min(across, ring / 2)
    local = network.ranks_per_node
    return min(across, ring * (local / (local - 1) if local > 1 else 1) / collective.busbw_factor(network.ranks))


def _latency_us(collective: Collective, algorithm: str, protocol: str, network: NodeNetwork, *, nvlink: bool) -> float:
    nodes, local = network.nodes, network.ranks_per_node
    near = (NVLINK_US if nvlink else _PCIE_US)[algorithm][protocol]
    far = _NET_US[_TREE if local == 1 else algorithm][protocol]
    base = BASE_US[algorithm][protocol]
    if algorithm == _TREE:
        return _SLOWER_SMALL * (base + 2 * ((local - 1) * near + int(math.log2(nodes)) * far))
    ways = 2 if collective.name == "allreduce" else 1
    across = ways * (nodes - 1)
    steps = ways * (network.ranks - 1) - across
    slower = _SLOWER_RING if protocol == _SIMPLE else _SLOWER_SMALL
    return slower * (base + steps * max(near, _POST_US[protocol]) + across * far)


_LEAST_SHARE, _LEAST_SHARE_OF_SENDS = 0.33, 0.15
"""Fraction of the limit that even a slow healthy machine reaches, without latency, and the same for sends and
receives.

Healthy machines reach at least 50 %. Sends and receives reach 18 %, because NCCL divides its channels among the peers.
With 64 MiB, they reach 262 of 450 GB/s on 2 H200s, 157 on 4 and 81 on 8.
"""

_MOST_LATENCY_US, _MOST_LATENCY_US_A_RANK = 10.0, 2.0
"""Highest latency inside a node. The smallest all-reduce takes 17 µs on 8 H200s with the slowest host, and 9 µs on
2 H200s.
"""

_NETWORK_HOP_US = 15.0  # Latency per hop: three times the 5 µs of InfiniBand, to allow for slow networks
_NVLS = "NVLS"


def time_from_profile(
    profile: Profile, collective: Collective, row: CollectiveRow, *, nccl: str | None, like_model: bool = False
) -> speed.ExpectedTime | None:
    """Return the time from the profile's curve for this collective, number of GPUs and algorithm. None without a
    curve.

    `nccl` is the NCCL version that measured the row. `like_model` is true for simulated rows. Only float32 sums have
    the tolerance of measured values. All other types and reductions have the wider tolerance of a model.
    """
    if profile.match.generic is not None or row.nodes > 1 or row.ranks < 2:
        return None
    nvls = like_model or (row.algorithm or "").upper().startswith(_NVLS)
    try:
        points = curve(profile, collective, row.ranks, row.ranks, nvls=nvls)
    except UsageError:
        return None
    time_us = points.at(row.size_bytes) * MICROSECONDS_PER_SECOND
    measured = [
        point
        for quantity in (TIME, BUSBW)
        for point in profile.find(f"{collective.name}.{quantity}", gpus=row.ranks)
        if point.size_bytes is not None and point.kind is ExpectedKind.MEASURED
        if point.nvls == nvls or like_model
    ]
    model = speed.MODELLED if row.size_bytes >= speed.MODELLED_SMALL_BYTES else speed.MODELLED_SMALL
    if collective.point_to_point and collective.busbw_factor(row.ranks) == 1.0:
        model = speed.MODELLED_SENDS
    is_usual = row.dtype == DataType.FLOAT32 and row.op in (None, ReduceOp.SUM)
    tolerance = _tolerance(points, measured, row.size_bytes, nccl, model) if is_usual else model
    kind = ", by a model" if tolerance is model else ""
    source = f"profile {profile.name}{kind}"
    if row.algorithm is None and not like_model:
        fastest_us = curve(profile, collective, row.ranks, row.ranks).at(row.size_bytes) * MICROSECONDS_PER_SECOND
        if fastest_us < time_us:
            return speed.ExpectedTime(
                fastest_us, f"{source}, NVLS assumed", tolerance.scale_to_faster(time_us / fastest_us)
            )
    return speed.ExpectedTime(time_us, source, tolerance)


def time_from_network(
    collective: Collective,
    row: CollectiveRow,
    network: NodeNetwork,
    profile: Profile | None,
    *,
    like_model: bool = False,
    nics_known: bool = True,
) -> speed.ExpectedTime | None:
    """Return the time between nodes, from their NICs and from the profile's performance inside a node.

    Use the algorithm that NCCL's log names. If the log names none, assume the one that NCCL's model chooses. A slow
    large row then only warns, unless `like_model` is true.

    If the NICs are unknown, accept the time of a healthy ring. The reason is EFA on 2 × 8 H100, which reaches 335 GB/s,
    while the model of NVLSTree expects 483. Return None inside a node, if RDMA is host-staged, or if the ranks do not
    fit the profile.
    """
    if row.nodes < 2 or profile is None or profile.match.generic is not None:
        return None
    if row.host_staged and network.rdma and not profile.gpu.shared_memory:
        return None
    local, rest = divmod(row.ranks, network.nodes)
    # For more than two NVLink domains, the only published table is 2 to 3 times slower than the model. For two domains,
    # a healthy table has half the bandwidth at one size. Fail only rows that are slower than these.
    size_bytes = row.size_bytes
    if profile.domain is not None and network.nodes > 1:
        size_bytes = 0 if network.nodes > 2 else min(size_bytes, speed.LARGE_BYTES)
    tolerance = speed.between_nodes(size_bytes) if network.rdma else speed.OVER_ETHERNET
    profile = profile.merge_nodes(max(1, row.nodes // network.nodes))
    if rest or local > profile.match.visible or network.ranks != row.ranks:
        return None
    try:
        if network.nodes == 1:
            seconds = curve(profile, collective, local, local).at(row.size_bytes)
            source = f"profile {profile.name}, {row.ranks} GPUs of one NVLink domain"
            return speed.ExpectedTime(seconds * MICROSECONDS_PER_SECOND, source, tolerance)
        inside = Inside.of(profile, collective, local)
        found = expected_between(collective, row.size_bytes, network, inside, row.algorithm)
    except UsageError:
        return None
    how = "" if row.algorithm or found.algorithm is None else f", {_NAMES[found.algorithm]} assumed"
    if how and not like_model and row.size_bytes >= speed.LARGE_BYTES:
        ring = expected_between(collective, row.size_bytes, network, inside, _RING).seconds / found.seconds
        tolerance = tolerance.allow_slower(ring) if nics_known else tolerance.allow_slower(ring).scale_to_faster(ring)
    one = "domain" if row.nodes > network.nodes else "node"
    nics = f"NICs of {network.node_gb_s:g} GB/s a {one}"
    source = f"{network.nodes} {one}s by a model: {nics}, profile {profile.name}{how}"
    return speed.ExpectedTime(found.seconds * MICROSECONDS_PER_SECOND, source, tolerance)


def time_from_links(collective: Collective, row: CollectiveRow, network: NodeNetwork) -> speed.ExpectedTime | None:
    """Return the time for CPU buffers over the links between nodes. None on one node, and for small buffers."""
    limit = internode_limit("RING", collective, network).gb_s
    if row.nodes < 2 or network.ranks != row.ranks or not limit or row.size_bytes < _OVER_LINKS_FROM_BYTES:
        return None
    hops_us = 2 * math.ceil(math.log2(network.nodes)) * _HOP_OF_MPI_US
    seconds = row.size_bytes * collective.busbw_factor(row.ranks) / (limit * efficiency(network) * BYTES_PER_GB)
    source = f"{network.nodes} nodes by their links: {network.node_gb_s:g} GB/s per node"
    return speed.ExpectedTime(hops_us + seconds * MICROSECONDS_PER_SECOND, source, speed.OVER_LINKS)


# Eight healthy hosts took 1.2 times the expected time for 8 MiB, and 2.4 times for 1 MiB
_OVER_LINKS_FROM_BYTES = 2**20
_HOP_OF_MPI_US = 50.0  # Latency of one MPI message over TCP between hosts
_NAMES = {"RING": "ring", "TREE": "tree", "NVLSTREE": "NVLSTree"}


def time_from_limit(collective: Collective, row: CollectiveRow) -> speed.ExpectedTime | None:
    """Return the longest time of a healthy machine with this row's limit. None if the limit is unknown or a path is
    host-staged.
    """
    factor = collective.busbw_factor(row.ranks)
    if not row.limit_gb_s or not factor or row.host_staged:
        return None
    hops = 2 * math.ceil(math.log2(row.nodes)) * _NETWORK_HOP_US
    latency_us = _MOST_LATENCY_US + _MOST_LATENCY_US_A_RANK * row.ranks / row.nodes + hops
    share = _LEAST_SHARE_OF_SENDS if collective.point_to_point else _LEAST_SHARE
    seconds = row.size_bytes * factor / (share * row.limit_gb_s * BYTES_PER_GB)
    source = f"{share:.0%} of the limit, which every healthy machine on record reaches"
    return speed.ExpectedTime(latency_us + seconds * MICROSECONDS_PER_SECOND, source, speed.LEAST_KNOWN)


def _tolerance(
    points: Curve, measured: Sequence[Expected], size_bytes: int, nccl: str | None, model: speed.Tolerance
) -> speed.Tolerance:
    """Return the tolerance for a size. It is narrow at measured sizes, and wider between them, up to that of a
    model.

    Between two measured sizes, NCCL may switch its protocol at any size. A larger size never takes less time, so a size
    may take as long as the next measured one.
    """
    own = [point for point in measured if nccl is not None and _release(point.nccl) == _release(nccl)]
    known, taken = (speed.MEASURED, own) if len(own) > 1 else (speed.OF_ANOTHER_NCCL, measured)
    sizes = [point.size_bytes or 0 for point in taken]
    larger = min((size for size in sizes if size >= size_bytes), default=None)
    if len(sizes) < 2 or (model is speed.MODELLED_SENDS and known is speed.OF_ANOTHER_NCCL):
        return model
    if size_bytes < min(sizes) and min(sizes) > _LATENCY_KNOWN_BYTES:
        return model
    if larger is None or larger == size_bytes or size_bytes <= min(sizes):
        return known
    fail = (1 + known.fail) * points.at(larger) / points.at(size_bytes) - 1
    return model if fail >= model.fail else speed.Tolerance(fail, microseconds=known.microseconds)


_LATENCY_KNOWN_BYTES = 2**20  # If the smallest measured size is larger than this, it does not predict smaller sizes


def _release(version: str | None) -> str:
    return ".".join((version or "").split(".")[:2])
