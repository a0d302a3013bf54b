"""The ceiling of busbw on the links and NICs that an operation uses, derived from the bytes that have to pass them.

t is the time, S the size, f the factor between algbw and busbw, w(i) the GB/s that rank i's links carry one way to the
ranks that it sends to. The derivations stand in docs/limits.md.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Protocol

from gpubench.model.paths.selection import RING, Pair
from gpubench.model.paths.topology import Limit
from gpubench.model.paths.wiring import Wiring

if TYPE_CHECKING:
    from gpubench.model.facts.snapshot import NicFacts

TOTAL_BOUND = ("TREE", "PAT")
"""Algorithms that move at least as much in all as a ring does, in shares that differ between ranks."""

_SENT, _RECEIVED = 0, 1


class BusbwFactor(Protocol):
    """A collective, by its name and the factor between algbw and busbw."""

    @property
    def name(self) -> str:
        """'allreduce'."""

    @property
    def busbw_factor(self) -> Callable[[int], float]:
        """f(n)."""


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """Nodes, or NVLink domains, with equally many ranks, that NICs join.

    `node_gb_s` is what leaves one of them over all NICs that NCCL uses, `nic_gb_s` what leaves over one of them.
    Without `rdma` they are plain Ethernet, over which NCCL sends by sockets or a cloud's own protocol.
    """

    nodes: int
    ranks: int
    node_gb_s: float
    nic_gb_s: float
    rdma: bool = True

    @property
    def local(self) -> int:
        """Ranks of a node."""
        return max(1, self.ranks // self.nodes)

    def leaving(self, algorithm: str, collective: BusbwFactor, *, as_nccl: bool = False) -> float:
        """Bytes that leave the busiest node for a byte of the size.

        A ring crosses the border of a node once: f(n). An all-reduce by two trees of half the data each sends S from
        either of two nodes; with three the inner node of a tree passes on S and is the end of the other, 1.5 S; with
        more an inner node sends half of S up and to two children, and half of S up as a leaf, 2 S. `as_nccl` counts
        2 S for three nodes too, as NCCL does when it chooses (src/graph/tuning.cc). Reduction in the network's
        switches (CollNet) sends S once.
        """
        name = nccl_name(algorithm)
        if collective.name != "allreduce" or name not in (*_TREES, *_IN_SWITCHES):
            return collective.busbw_factor(self.ranks)
        if name in _IN_SWITCHES or self.nodes == 2:
            return 1.0
        return 1.5 if self.nodes == 3 and not as_nccl else 2.0

    def exchanged(self, collective: BusbwFactor) -> float | None:
        """The most algbw where data go straight from rank to rank, in GB/s; None for other collectives.

        In an all-to-all every rank of a node sends a block to all ranks elsewhere, over the NICs near it. Of a gather
        or scatter all blocks from elsewhere pass the NIC of the root; of sendrecv one rank of a node sends to the next.
        """
        elsewhere = (self.ranks - self.local) / self.ranks
        passing = {
            "alltoall": self.node_gb_s / (self.local * elsewhere),
            "gather": self.nic_gb_s / elsewhere,
            "scatter": self.nic_gb_s / elsewhere,
            "sendrecv": self.nic_gb_s,
        }
        return passing.get(collective.name)


_TREES = ("TREE", "NVLSTREE")
_IN_SWITCHES = ("COLLNETDIRECT", "COLLNETCHAIN", "NVLS")


def nccl_name(algorithm: str | None) -> str:
    """An algorithm as NCCL_ALGO names it, in capitals: 'NVLSTREE' of 'NVLS_TREE'; empty where it is not known."""
    return (algorithm or "").upper().replace("_", "")


def networks(wiring: Wiring) -> tuple[NodeNetwork, NodeNetwork] | None:
    """What joins the nodes of a run at its weakest and its strongest node; None where that is not known.

    Nodes of one NVLink domain count as one: of a single domain the network has one node. NCCL takes the NICs nearest to
    the ranks' GPUs. On all nodes alike they are what the machine has; one node with
    less is slower than its siblings, and what is expected is what the strongest would carry.
    """
    positions: dict[object, list[int]] = {}
    for position, gpu in enumerate(wiring.gpus):
        positions.setdefault(wiring.domain(position) or gpu.node, []).append(position)
    counts = {len(each) for each in positions.values()}
    if len({gpu.node for gpu in wiring.gpus}) < 2 or len(counts) > 1:
        return None
    carried = [_node_gb_s(wiring, each) for each in positions.values()]
    known = [each for each in carried if each is not None]
    rdma = all(nic.rdma for position in range(len(wiring.gpus)) for nic in wiring.near_nics(position))
    if len(positions) == 1:
        alone = NodeNetwork(1, len(wiring.gpus), 0.0, 0.0)
        return alone, alone
    if len(known) < len(carried):
        return None
    found = [NodeNetwork(len(positions), len(wiring.gpus), node, nic, rdma) for node, nic in known]
    return min(found, key=lambda each: each.node_gb_s), max(found, key=lambda each: each.node_gb_s)


def _node_gb_s(wiring: Wiring, positions: Sequence[int]) -> tuple[float, float] | None:
    """GB/s that leave a node over the NICs near its ranks' GPUs, and over the slowest of them."""
    nics: dict[int, dict[str, NicFacts]] = {}
    for position in positions:
        own = nics.setdefault(wiring.gpus[position].node, {})
        own.update((nic.name, nic) for nic in wiring.near_nics(position))
    together = [wiring.nodes[node].together(list(own.values())).gb_s for node, own in nics.items() if own]
    each = [wiring.nodes[node].nic_limit(nic).gb_s for node, own in nics.items() for nic in own.values()]
    rates, rate = [gb_s for gb_s in together if gb_s is not None], [gb_s for gb_s in each if gb_s is not None]
    to_host = [limit.gb_s for limit in map(wiring.to_host, positions) if limit.gb_s is not None]
    if not rates or len(rates) < len(together):
        return None
    most = sum(to_host) if len(to_host) == len(positions) else sum(rates)
    return min(sum(rates), most or sum(rates)), min(rate)


def network_limit(algorithm: str | None, collective: BusbwFactor, network: NodeNetwork) -> Limit:
    """The ceiling of busbw between nodes, in GB/s: what leaves the busiest node passes its NICs.

    Of an unknown algorithm it is that of the one which allows most, and the note says which.
    """
    factor = collective.busbw_factor(network.ranks)
    exchanged = network.exchanged(collective)
    if exchanged is not None:
        return Limit(factor * exchanged, f"{network.nic_gb_s:g} GB/s a NIC, {network.node_gb_s:g} a node")
    names = (nccl_name(algorithm),) if algorithm else (RING, "TREE")
    allowed = {name: network.node_gb_s * factor / network.leaving(name, collective) for name in names}
    name = max(allowed, key=allowed.__getitem__)
    assumed = "" if algorithm else f"; algorithm not known, {name.lower()} assumed"
    return Limit(allowed[name], f"{network.node_gb_s:g} GB/s of NICs a node{assumed}")


def assumed_limit(collective: BusbwFactor, wiring: Wiring) -> Limit:
    """The ceiling inside a node, or an NVLink domain, of a healthy machine whose algorithm and connections nobody told.

    Links to all peers may carry it, of sendrecv those to the next rank. Where NVSwitches can reduce (NVLS), an
    all-reduce may reach 2(n-1)/(n+1) of that (docs/formulas.md).
    """
    ranks = range(len(wiring.gpus))
    ring = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
    every = ring if collective.name == "sendrecv" else list(permutations(ranks, 2))
    if len(ranks) < 2:
        return Limit(None, "one rank: nothing passes a link")
    found = busbw_limit(RING, every, wiring)
    gpu, count = wiring.gpu(0), len(ranks)
    has_nvls = gpu is not None and gpu.fabric is not None and wiring.has_nvlinks(ring[0])
    if found.gb_s is None or collective.name != "allreduce" or not has_nvls:
        return found
    return Limit(found.gb_s * max(1.0, 2 * (count - 1) / (count + 1)), "algorithm not known, NVLS assumed")


class ReachedRow(Protocol):
    """A measured collective, with what it reached."""

    @property
    def collective(self) -> str:
        """'allreduce'."""

    @property
    def algbw_gb_s(self) -> float:
        """Size over time."""

    @property
    def reached_gb_s(self) -> float:
        """Bus bandwidth: algbw times the collective's factor."""


def joined_by_nics(wiring: Wiring, nodes: Collection[int], ranks: int) -> NodeNetwork | None:
    """What joins some nodes of a run without NVLinks between them, by the weakest; None where that is not known."""
    by_node = [[place for place, gpu in enumerate(wiring.gpus) if gpu.node == number] for number in nodes]
    carried = [found for each in by_node if (found := _node_gb_s(wiring, each)) is not None]
    if len(carried) < len(by_node) or not carried:
        return None
    return NodeNetwork(len(by_node), ranks, *min(carried))


def most_busbw_gb_s(row: ReachedRow, network: NodeNetwork) -> float:
    """The most busbw that a row could have reached over a network, by whichever algorithm."""
    factor = row.reached_gb_s / row.algbw_gb_s if row.algbw_gb_s else 1.0
    tree = network.node_gb_s * factor / network.leaving("TREE", _Named(row.collective, lambda _ranks: factor))
    return max(network.node_gb_s, tree)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    busbw_factor: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an operation: f, and for a byte of the size the bytes that each rank sends and receives, at least."""

    busbw_factor: float
    expected_bytes: Sequence[tuple[float, float]]


def busbw_limit(algorithm: str, pairs: Collection[Pair], wiring: Wiring) -> Limit:
    """The ceiling of an algorithm of NCCL's over the connections that it uses, in GB/s.

    RING: every rank passes on f·S, so busbw = f·S/t ≤ the least w(i). TREE and PAT: all ranks together move n·f·S or
    more, so busbw ≤ the mean w(i).
    """
    if pairs and algorithm != RING and algorithm not in TOTAL_BOUND:
        return Limit(None, f"no ceiling is derived for {algorithm}")
    links = _links(pairs, wiring)
    unknown = _unknown(links.values())
    if unknown is not None or algorithm == RING:
        return unknown or _least(links.values())
    leaving = [limit.gb_s or 0.0 for (_, direction), limit in links.items() if direction == _SENT]
    return Limit(sum(leaving) / len(leaving), f"mean of {len(leaving)} ranks' links")


def exchange_limit(work: Work, pairs: Collection[Pair], wiring: Wiring) -> Limit:
    """The ceiling where data go straight from rank to rank, in GB/s: a rank that has to send s·S needs t ≥ s·S/w(i)."""
    links = _links(pairs, wiring)
    return _unknown(links.values()) or _least(
        [
            Limit(limit.gb_s * work.busbw_factor / work.expected_bytes[rank][direction], limit.note)
            for (rank, direction), limit in links.items()
            if limit.gb_s is not None and work.expected_bytes[rank][direction]
        ]
    )


def _links(pairs: Collection[Pair], wiring: Wiring) -> dict[tuple[int, int], Limit]:
    """The GB/s of each rank's links by direction: to the ranks it sends to, from those it receives from."""
    peers: dict[tuple[int, int], set[Pair]] = {}
    for pair in pairs:
        peers.setdefault((pair[0], _SENT), set()).add(pair)
        peers.setdefault((pair[1], _RECEIVED), set()).add(pair)
    return {(rank, direction): _carried(rank, its, wiring) for (rank, direction), its in peers.items()}


def _carried(rank: int, pairs: Collection[Pair], wiring: Wiring) -> Limit:
    """The GB/s of several pairs of a rank at once: their sum, and no more than all its links of that kind carry."""
    limits = {pair: wiring.limit(pair) for pair in sorted(pairs)}
    unknown = _unknown(limits.values())
    if unknown is not None:
        return unknown
    nvlink = [limit.gb_s or 0.0 for pair, limit in limits.items() if wiring.has_nvlinks(pair)]
    network = [
        limit.gb_s or 0.0
        for pair, limit in limits.items()
        if not wiring.together(pair) and not wiring.has_nvlinks(pair)
    ]
    pcie = [
        limit.gb_s or 0.0 for pair, limit in limits.items() if wiring.together(pair) and not wiring.has_nvlinks(pair)
    ]
    carried = _capped(nvlink, wiring.nvlink_total(rank)) + _capped(pcie, wiring.to_host(rank))
    carried += _capped(network, wiring.to_network(rank)) if network else 0.0
    return Limit(carried, f"links of rank {rank}")


def _capped(each_gb_s: Sequence[float], total: Limit) -> float:
    """The sum, in GB/s, or the total of all links where that is known and less."""
    return sum(each_gb_s) if total.gb_s is None else min(sum(each_gb_s), total.gb_s)


def _unknown(limits: Collection[Limit]) -> Limit | None:
    """The first limit that is not known; also of no limits at all."""
    if not limits:
        return Limit(None, "who is connected to whom is not known")
    return next((limit for limit in limits if limit.gb_s is None), None)


def _least(limits: Collection[Limit]) -> Limit:
    return min(limits, key=lambda limit: limit.gb_s or 0.0)
