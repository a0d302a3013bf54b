"""The time of a healthy collective between nodes, from what its NICs carry and what the ranks of one node reach.

One model for everything that expects or simulates such a time. Its form is that of NCCL's own cost model
(src/graph/tuning.cc of NCCL 2.30): latency + bytes / bandwidth for every algorithm and protocol, the fastest of which
is taken. docs/formulas.md has the formulas and the source of each constant.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpubench.collectives.curve import Curve, curve
from gpubench.collectives.record import Collective
from gpubench.model.paths.busbw_limit import NodeNetwork, nccl_name
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

NIC_EFFICIENCY = 0.92
"""Share of the NICs' rate that collectives reach across nodes: Together AI's bar, as NVIDIA's
cluster-readiness-engine quotes it (ADR-021). Published rings reach 0.83 to 0.98. Kind: derived."""

ETHERNET_EFFICIENCY = 0.5
"""Share of the NICs' rate over plain Ethernet: 50 to 54 of 100 GB/s with GPUDirect-TCPX on 2 × a3-high, 6 of 12.5 by
sockets on 2 × p3dn (NVIDIA/nccl#398). Kind: derived."""

NVLS_BETWEEN_NODES = 0.95
"""Of its rate inside one node, NVLS reaches in an NVLSTree: 260 of 274 GB/s algbw on 2 × 8 H100. Kind: derived."""

_RING, _TREE, _NVLS_TREE = "RING", "TREE", "NVLSTREE"
_LL, _LL128, _SIMPLE = "LL", "LL128", "SIMPLE"

_BASE_US = {
    _RING: {_LL: 6.6, _LL128: 14.0, _SIMPLE: 8.4},
    _TREE: {_LL: 6.8, _LL128: 14.0, _SIMPLE: 8.4},
}
_NVLINK_US = {_RING: {_LL: 0.6, _LL128: 1.9, _SIMPLE: 3.4}, _TREE: {_LL: 0.6, _LL128: 1.25, _SIMPLE: 4.0}}
_PCIE_US = {_RING: {_LL: 1.0, _LL128: 2.5, _SIMPLE: 5.7}, _TREE: {_LL: 1.0, _LL128: 1.9, _SIMPLE: 4.0}}
_NET_US = {_RING: {_LL: 2.7, _LL128: 4.0, _SIMPLE: 14.0}, _TREE: {_LL: 5.0, _LL128: 8.5, _SIMPLE: 14.0}}
"""NCCL's latencies in µs: of an operation, of a hop inside a node, of a hop between nodes."""

_POST_US = {_LL: 1.0, _LL128: 1.0, _SIMPLE: 3.0}
"""NCCL's network overhead of each step of a ring on several nodes, with Intel's processors."""

_NVLS_TREE_US, _NVLS_TREE_HOP_US = 25.0, 20.9

_LL_GB_S = {1: 39.0, 2: 22.5}
_LL_GB_S_OF_MORE = 19.0
"""NCCL's most busbw with protocol LL: of one node, of two, of more (AMD's processors, the slower)."""

_SHARES = {_RING: {_LL: 0.5, _LL128: 0.92, _SIMPLE: 1.0}, _TREE: {_LL: 1 / 3.8, _LL128: 0.9375, _SIMPLE: 1.0}}
"""NCCL's share of the bandwidth by protocol."""

_TREE_LL128_OF_MORE = 0.7
"""Of NCCL's bandwidth of a tree with LL128, on more than two nodes: 64 to 256 MiB on 4 × 8 B200. Kind: derived."""

_SLOWER_SMALL = 3.0
"""Times NCCL's latency that LL, LL128 and trees take: 46 to 70 µs for its 25 on two nodes. Kind: derived."""

_SLOWER_RING = 1.4 * 1.2
"""Times NCCL's latency that a ring with Simple takes: NCCL's own factor for medium sizes, and 1.2. Kind: derived."""

_NVLS_TREE_FILL_US = 250.0
"""Beyond NCCL's latency, to fill the pipeline of an NVLSTree: H100 and H20, two nodes. Kind: derived."""

_HOP_US = 5.0
"""One hop of a tree between nodes with protocol LL, of collectives without an algorithm of their own."""


class AlgorithmTime(NamedTuple):
    """Seconds of an operation, and the algorithm that takes them; None for sends and receives."""

    seconds: float
    algorithm: str | None


@dataclass(frozen=True, slots=True)
class Inside:
    """What the ranks of one node, or one NVLink domain, reach among themselves.

    `ring_gb_s` is the busbw of rings, infinite where a node has one rank; `nvls` are the times of NVLS, None where NCCL
    does not take it; `nvlink` is true where NVLinks join them. A faulty GPU leaves `share` of the bandwidth.
    """

    ring_gb_s: float = math.inf
    nvls: Curve | None = None
    nvlink: bool = True
    share: float = 1.0

    @classmethod
    def of(cls, profile: Profile, collective: Collective, ranks: int, share: float = 1.0) -> "Inside":
        """By a profile, for so many ranks of a node.

        Raises UsageError where the profile expects no time of the collective.
        """
        if ranks == 1:
            return cls(nvlink=profile.nvlink is not None)
        large = 2**33
        points = curve(profile, collective, ranks, ranks, nvls=False)
        ring = large * collective.busbw_factor(ranks) / points.at(large) / BYTES_PER_GB
        known = profile.find(f"{collective.name}.busbw_gb_s", gpus=ranks)
        known += profile.find(f"{collective.name}.time_us", gpus=ranks)
        nvls = curve(profile, collective, ranks, ranks) if any(each.nvls for each in known) else None
        return cls(ring, nvls, profile.nvlink is not None, share)


def expected_between(
    collective: Collective, size_bytes: int, network: NodeNetwork, inside: Inside, algorithm: str | None = None
) -> AlgorithmTime:
    """The time of an operation by the fastest of NCCL's algorithms, or the one that its log names."""
    exchanged = network.exchanged(collective)
    if exchanged is not None:
        seconds = size_bytes / (exchanged * efficiency(network) * BYTES_PER_GB)
        hops = 2 * math.ceil(math.log2(network.nodes)) * _HOP_US * _SLOWER_SMALL
        return AlgorithmTime(hops / MICROSECONDS_PER_SECOND + seconds, None)
    found = list(_times(collective, size_bytes, network, inside, named=algorithm is not None))
    of_that = [each for each in found if each.algorithm == nccl_name(algorithm)]
    return min(of_that or found)


def efficiency(network: NodeNetwork) -> float:
    """The share of the NICs' rate that collectives reach."""
    return NIC_EFFICIENCY if network.rdma else ETHERNET_EFFICIENCY


def _times(
    collective: Collective, size_bytes: int, network: NodeNetwork, inside: Inside, *, named: bool
) -> Iterator[AlgorithmTime]:
    """The time by each algorithm and protocol."""
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
        net_gb_s = network.node_gb_s * efficiency(network) / network.leaving(_NVLS_TREE, collective, as_nccl=not named)
        seconds = max(
            size_bytes / (net_gb_s * BYTES_PER_GB), inside.nvls.at(size_bytes) / inside.share / NVLS_BETWEEN_NODES
        )
        hops = 2 * int(math.log2(network.nodes))
        latency_us = _NVLS_TREE_US + hops * _NVLS_TREE_HOP_US + _NVLS_TREE_FILL_US
        yield AlgorithmTime(latency_us / MICROSECONDS_PER_SECOND + seconds, _NVLS_TREE)


def _algbw_gb_s(collective: Collective, algorithm: str, network: NodeNetwork, inside: Inside, *, named: bool) -> float:
    """The lesser of what NICs and the links inside a node allow; of a tree, every rank passes on S both ways."""
    across = network.node_gb_s * efficiency(network) / network.leaving(algorithm, collective, as_nccl=not named)
    ring = inside.ring_gb_s * inside.share
    if algorithm == _TREE:
        return min(across, ring / 2)
    local = network.local
    return min(across, ring * (local / (local - 1) if local > 1 else 1) / collective.busbw_factor(network.ranks))


def _latency_us(collective: Collective, algorithm: str, protocol: str, network: NodeNetwork, *, nvlink: bool) -> float:
    """NCCL's latency of an algorithm and protocol, and how much more it takes."""
    nodes, local = network.nodes, network.local
    near = (_NVLINK_US if nvlink else _PCIE_US)[algorithm][protocol]
    far = _NET_US[_TREE if local == 1 else algorithm][protocol]
    base = _BASE_US[algorithm][protocol]
    if algorithm == _TREE:
        return _SLOWER_SMALL * (base + 2 * ((local - 1) * near + int(math.log2(nodes)) * far))
    ways = 2 if collective.name == "allreduce" else 1
    across = ways * (nodes - 1)
    steps = ways * (network.ranks - 1) - across
    slower = _SLOWER_RING if protocol == _SIMPLE else _SLOWER_SMALL
    return slower * (base + steps * max(near, _POST_US[protocol]) + across * far)
