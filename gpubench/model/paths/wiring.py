"""The wiring between the GPUs of a run: whether a path could be direct, and its maximum busbw (docs/limits.md)."""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from typing import Protocol

from msgspec import Struct

from gpubench.model.facts.snapshot import GpuFacts, NicFacts, normalize_bus_id
from gpubench.model.paths import topology
from gpubench.model.paths.p2p import ABOVE_HOST, LIMIT_WARN_SHARE
from gpubench.model.paths.transport import RING, Evidence, Pair, State
from gpubench.model.terms.ranks import RANKS_SHARE_A_GPU, DevicePlace, RankIdentity, why_not_judged
from gpubench.model.terms.verdict import Verdict

NETWORK, MNNVL = "NET", "P2P/MNNVL"

_ACTIVE = "active"
_NOT_DESCRIBED = "nothing described these GPUs"
_SAME_GPU = "both ranks use the same GPU"
_INSTANCES = "both ranks use MIG instances of the same GPU"


class GpuPlace(Struct, frozen=True):
    """A GPU of a process with several, by host, node number, and PCI bus id if known."""

    host: str
    node: int
    gpu_bus_id: str | None


GpuLocation = (
    RankIdentity | GpuPlace
)  # A GPU of a run by where it is: a rank with its GPU, or a GPU that is no rank's own


class Wiring(Struct, frozen=True, dict=True):
    """The GPUs of a run by position (the rank, if each rank has one), and their known nodes by number."""

    gpus: Sequence[GpuLocation]
    nodes: Mapping[int, topology.Topology]

    @cached_property
    def why_not_judged(self) -> str:
        """The reason why no limit applies to these ranks (they share GPUs, or NCCL splits their hosts), or ''."""
        return why_not_judged([each for each in self.gpus if isinstance(each, RankIdentity)])

    def share_node(self, pair: Pair) -> bool:
        """True if both are on one node."""
        return self.gpus[pair[0]].node == self.gpus[pair[1]].node

    def share_gpu(self, pair: Pair) -> bool:
        """True if both use the same GPU, or MIG instances of it."""
        one, other = self.gpus[pair[0]], self.gpus[pair[1]]
        return one.node == other.node and one.gpu_bus_id is not None and one.gpu_bus_id == other.gpu_bus_id

    def domain(self, gpu: int) -> tuple[str, int | None] | None:
        """Return the NVLink domain of several nodes that a GPU is in, or None."""
        return self._domains[gpu]

    def share_domain(self, pair: Pair) -> bool:
        """True if NVLinks connect two GPUs, on one node or several."""
        return self.domain(pair[0]) is not None and self.domain(pair[0]) == self.domain(pair[1])

    def host(self, gpu: int) -> str:
        """Return the name of a GPU's node, renamed if another node has the same."""
        node = self.nodes.get(self.gpus[gpu].node)
        return self.gpus[gpu].host if node is None else node.snapshot.host

    def place(self, gpu: int) -> DevicePlace:
        """Return the node of a GPU with its name and bus id, as far as known."""
        known, located = self.gpu(gpu), self.gpus[gpu]
        if known is not None:
            return DevicePlace(self.host(gpu), known.device, known.bus_id)
        if isinstance(located, RankIdentity):
            return located.place
        return DevicePlace(self.host(gpu), bus_id=located.gpu_bus_id)

    def gpu(self, gpu: int) -> GpuFacts | None:
        return self._found[gpu]

    def path(self, pair: Pair) -> str:
        """Return the path class. Between nodes it is P2P/MNNVL in one NVLink domain, else NET."""
        if not self.share_node(pair):
            return MNNVL if self.share_domain(pair) else NETWORK
        facts = self._facts(pair)
        return topology.UNKNOWN_PATH if facts is None else self._node(pair).path(*facts)

    def limit(self, pair: Pair) -> topology.Limit:
        """Return the limit of a pair in GB/s per direction. Between nodes it is that of the NICs nearest to its
        GPUs.
        """
        if not self.share_node(pair) and self.share_domain(pair):
            return min((self.nvlink_total(gpu) for gpu in pair), key=lambda limit: limit.gb_s or 0.0)
        if not self.share_node(pair):
            return min((self.network_limit(gpu) for gpu in pair), key=lambda limit: limit.gb_s or 0.0)
        if self.share_gpu(pair):
            return topology.Limit(None, RANKS_SHARE_A_GPU)
        facts = self._facts(pair)
        return topology.Limit(None, _NOT_DESCRIBED) if facts is None else self._node(pair).limit(*facts)

    def has_nvlinks(self, pair: Pair) -> bool:
        """True if NVLinks connect a pair."""
        if not self.share_node(pair):
            return self.share_domain(pair)
        facts = self._facts(pair)
        if self.share_gpu(pair):
            return False
        return facts is not None and bool(self._node(pair).nvlinks(*facts))

    def nvlink_total(self, gpu: int) -> topology.Limit:
        """Return GB/s per direction of all NVLinks of a GPU."""
        return self._nvlink_totals[gpu]

    def host_limit(self, gpu: int) -> topology.Limit:
        """Return the limit between a GPU and host memory in GB/s per direction."""
        return self._host_limits.get(gpu) or self._host_limits.setdefault(gpu, self._find_host_limit(gpu))

    def staged_gb_s(self, pair: Pair) -> float | None:
        """Return the maximum GB/s of a pair through host memory, if both GPUs' paths to it are known."""
        known = [limit.gb_s for limit in map(self.host_limit, pair) if limit.gb_s is not None]
        return min(known) if len(known) == len(pair) else None

    def outruns_host(self, pair: Pair) -> bool:
        """True if a healthy direct copy is faster than any through host memory, so that bandwidths distinguish them."""
        limit, through_host = self.limit(pair).gb_s, self.staged_gb_s(pair)
        if limit is None or through_host is None:
            return False
        return LIMIT_WARN_SHARE * limit > ABOVE_HOST * through_host

    def peer_access(self, pair: Pair) -> topology.PeerAccess:
        """Return the peer access of a pair on one node, as CUDA and the driver report it."""
        known = self._peer_access.get(pair)
        return known or self._peer_access.setdefault(pair, self._access(pair))

    def capability(self, pair: Pair) -> Evidence:
        """Return the evidence that the path of a pair could be direct, or could not."""
        if not self.share_node(pair) and self.share_domain(pair):
            return Evidence(State.PRESENT, "both are in one NVLink domain")
        if not self.share_node(pair):
            nodes = self.gpus[pair[0]].node, self.gpus[pair[1]].node
            return self._node_pair_evidence.get(nodes) or self._node_pair_evidence.setdefault(
                nodes, self._evidence_between_nodes(pair)
            )
        access = self.peer_access(pair)
        if access.possible is None:
            return Evidence(seen=access.reason)
        seen = access.reason if self.share_gpu(pair) else f"{self.path(pair)}, peer access {access.reason}"
        return Evidence(State.PRESENT if access.possible else State.CONTRADICTING, seen)

    def refusal(self, pair: Pair) -> topology.Refusal | None:
        """Return why a pair on one node has no peer access. None if it has, or if unknown."""
        facts, access = self._facts(pair), self.peer_access(pair)
        if facts is None or access.possible is not False:
            return None
        return topology.find_refusal(self._node(pair), *facts, access)

    def why_refused(self, pair: Pair) -> str:
        """Return why a pair on one node has no peer access if that is no fault, or ''."""
        refusal = self.refusal(pair)
        return refusal.reason if refusal is not None and refusal.is_by_design else ""

    def is_refusal_doubtful(self, pair: Pair) -> bool:
        """True if CUDA and NVML agree that a pair has no peer access, and nothing proves that it could."""
        refusal = self.refusal(pair)
        in_doubt = refusal is not None and refusal.severity is Verdict.WARN
        return in_doubt and not self.peer_access(pair).contradicts

    def why_staged(self, pair: Pair) -> str:
        """Return why NCCL uses host memory for a pair if that is no fault, or ''."""
        if not self.share_node(pair):
            bare = [] if self.share_domain(pair) else self._nodes_without_rdma(pair)
            return f"no RDMA NIC is active on {', '.join(bare)}" if bare else ""
        if self.peer_access(pair).possible is False:
            return self.why_refused(pair)
        return self.why_avoided(pair)

    def why_avoided(self, pair: Pair) -> str:
        """Return why NCCL avoids the peer access of a pair on one node by default, or ''."""
        facts = self._facts(pair)
        return "" if facts is None or self.share_gpu(pair) else topology.nccl_keeps_off(self._node(pair), *facts)

    def is_avoided(self, pair: Pair) -> bool:
        """True if NCCL avoids peer access of a pair by default, whether or not there is any."""
        facts, possible = self._facts(pair), self.peer_access(pair).possible
        if facts is None or possible is False or not self.why_avoided(pair):
            return False
        return possible is True or topology.is_policy_known(self._node(pair), *facts)

    def rdma_nics(self, gpu: int) -> list[NicFacts]:
        """Return the RDMA NICs of a GPU's node that are up."""
        return self._nics.get(self.gpus[gpu].node, [])

    def near_nics(self, gpu: int) -> list[NicFacts]:
        """Return the NICs nearest to a GPU, RDMA ones if any is up, or all if no path is known."""
        facts, number = self._found[gpu], self.gpus[gpu].node
        if facts is None:
            return []
        node = self.nodes[number]
        nics = self._nics[number] or [nic for nic in node.nics if nic.state == _ACTIVE and nic.rate_gbit_s]
        paths = {nic.name: node.pcie_path(facts, nic) for nic in nics}
        nearest = next((class_ for class_ in topology.PATH_CLASSES if class_ in paths.values()), None)
        return [nic for nic in nics if paths[nic.name] == nearest]

    def network_limit(self, gpu: int) -> topology.Limit:
        """Return the limit of a GPU towards other nodes: its nearest NICs, and its own path to them."""
        near, facts, node = self.near_nics(gpu), self._found[gpu], self.nodes.get(self.gpus[gpu].node)
        if not near or facts is None or node is None:
            return topology.Limit(None, "no NIC of known rate is near the GPU")
        total, own = node.combined_nic_limit(near, {nic.name: facts for nic in near}), node.own_link_gb_s(facts)
        if total.gb_s is None:
            return total
        return topology.Limit(total.gb_s if own is None else min(total.gb_s, own), f"{self.host(gpu)}: {total.note}")

    @cached_property
    def networks(self) -> "tuple[NodeNetwork, NodeNetwork] | None":
        """Return the weakest and the strongest network between nodes, or NVLink domains. None if unknown."""
        return _networks(self)

    @cached_property
    def _nics(self) -> dict[int, list[NicFacts]]:
        return {
            number: [nic for nic in node.nics if nic.rdma and nic.state in (_ACTIVE, None)]
            for number, node in self.nodes.items()
        }

    @cached_property
    def _node_pair_evidence(self) -> dict[tuple[int, int], Evidence]:
        """Cache of the evidence on pairs of nodes, which is equal for all their ranks."""
        return {}

    @cached_property
    def _peer_access(self) -> dict[Pair, topology.PeerAccess]:
        """Cache: a dozen causes need the peer access of every pair."""
        return {}

    def _access(self, pair: Pair) -> topology.PeerAccess:
        facts = self._facts(pair)
        if self.share_gpu(pair):
            split = facts is not None and facts[0].mig is True
            return topology.PeerAccess(not split, None, _INSTANCES if split else _SAME_GPU)
        return (
            topology.PeerAccess(None, None, _NOT_DESCRIBED) if facts is None else self._node(pair).peer_access(*facts)
        )

    @cached_property
    def _host_limits(self) -> dict[int, topology.Limit]:
        """Cache of the limits to host memory by GPU, which every pair needs for its ends."""
        return {}

    def _find_host_limit(self, gpu: int) -> topology.Limit:
        facts = self._found[gpu]
        return (
            topology.Limit(None, _NOT_DESCRIBED) if facts is None else self.nodes[self.gpus[gpu].node].pcie_total(facts)
        )

    def _evidence_between_nodes(self, pair: Pair) -> Evidence:
        bare = self._nodes_without_rdma(pair)
        if bare:
            return Evidence(State.CONTRADICTING, f"no RDMA NIC is active on {', '.join(bare)}")
        answers = [
            [(self.nodes[self.gpus[gpu].node].gpudirect(nic), nic.name) for nic in self.rdma_nics(gpu)] for gpu in pair
        ]
        if not all(answers):
            return Evidence(seen="nothing described the NICs of both nodes")
        for answer in answers:
            if not any(possible for (possible, _), _ in answer):
                (possible, reason), name = answer[0]
                state = State.CONTRADICTING if possible is False else State.ABSENT
                return Evidence(state, f"GPUDirect RDMA by {name}: {reason}")
        return Evidence(State.PRESENT, "GPUDirect RDMA is possible on both nodes")

    def _nodes_without_rdma(self, pair: Pair) -> list[str]:
        bare = (gpu for gpu in pair if self.gpus[gpu].node in self.nodes and not self.rdma_nics(gpu))
        return list(dict.fromkeys(map(self.host, bare)))

    def _facts(self, pair: Pair) -> tuple[GpuFacts, GpuFacts] | None:
        source, destination = self._found[pair[0]], self._found[pair[1]]
        return None if source is None or destination is None else (source, destination)

    @cached_property
    def _found(self) -> list[GpuFacts | None]:
        by_id = {
            number: {gpu.bus_id or normalize_bus_id(gpu.device): gpu for gpu in node.gpus}
            for number, node in self.nodes.items()
        }
        return [by_id.get(gpu.node, {}).get(normalize_bus_id(gpu.gpu_bus_id or "")) for gpu in self.gpus]

    @cached_property
    def _domains(self) -> list[tuple[str, int | None] | None]:
        return [None if gpu is None or gpu.fabric is None else gpu.fabric.domain for gpu in self._found]

    @cached_property
    def _nvlink_totals(self) -> list[topology.Limit]:
        """Cache: each GPU of a rack is needed once for each of the others."""
        return [
            topology.Limit(None, _NOT_DESCRIBED) if gpu is None else self.nodes[place.node].nvlink_total(gpu)
            for place, gpu in zip(self.gpus, self._found, strict=True)
        ]

    def _node(self, pair: Pair) -> topology.Topology:
        return self.nodes[self.gpus[pair[0]].node]


TOTAL_BOUND = ("TREE", "PAT")  # Algorithms that move as much as a ring, in unequal shares
_SENT, _RECEIVED = 0, 1


class BusbwFactor(Protocol):
    """A collective with its name and the factor between algbw and busbw."""

    @property
    def name(self) -> str:
        """'allreduce'."""

    @property
    def busbw_factor(self) -> Callable[[int], float]:
        """f(n)."""


class NodeNetwork(Struct, frozen=True):
    """Nodes, or NVLink domains, with equally many ranks, connected by NICs: GB/s of a node and of one NIC.

    Without `rdma` the NICs are plain Ethernet, over which NCCL uses sockets or a cloud's own protocol.
    """

    nodes: int
    ranks: int
    node_gb_s: float
    nic_gb_s: float
    rdma: bool = True

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node."""
        return max(1, self.ranks // self.nodes)

    def sent_per_byte(self, algorithm: str, collective: BusbwFactor, *, as_nccl: bool = False) -> float:
        """Return the bytes that leave the busiest node per byte of the size.

        A ring crosses the border of a node once: f(n). An all-reduce by two trees of half the data each sends S from
        either of two nodes. With three nodes the inner node of a tree passes on S and is the end of the other tree, 1.5
        S. With more, an inner node sends half of S up and to two children, and half of S up as a leaf, 2 S. `as_nccl`
        counts 2 S for three nodes too, as NCCL does when it chooses (src/graph/tuning.cc). Reduction in network
        switches (CollNet) sends S once.
        """
        name = nccl_name(algorithm)
        if collective.name != "allreduce" or name not in (*_TREES, *_IN_SWITCHES):
            return collective.busbw_factor(self.ranks)
        if name in _IN_SWITCHES or self.nodes == 2:
            return 1.0
        return 1.5 if self.nodes == 3 and not as_nccl else 2.0

    def exchange_gb_s(self, collective: BusbwFactor) -> float | None:
        """Return the maximum algbw in GB/s if data moves directly from rank to rank. None for other collectives."""
        elsewhere = (self.ranks - self.ranks_per_node) / self.ranks
        passing = {
            "alltoall": self.node_gb_s / (self.ranks_per_node * elsewhere),
            "gather": self.nic_gb_s / elsewhere,
            "scatter": self.nic_gb_s / elsewhere,
            "sendrecv": self.nic_gb_s,
        }
        return passing.get(collective.name)


_TREES = ("TREE", "NVLSTREE")
_IN_SWITCHES = ("COLLNETDIRECT", "COLLNETCHAIN", "NVLS")


def nccl_name(algorithm: str | None) -> str:
    """Return an algorithm as NCCL_ALGO names it, in capitals: 'NVLSTREE' for 'NVLS_TREE', '' if unknown."""
    return (algorithm or "").upper().replace("_", "")


def _networks(wiring: Wiring) -> tuple[NodeNetwork, NodeNetwork] | None:
    positions: dict[object, list[int]] = {}
    for position, gpu in enumerate(wiring.gpus):
        positions.setdefault(wiring.domain(position) or gpu.node, []).append(position)
    counts = {len(each) for each in positions.values()}
    if len({gpu.node for gpu in wiring.gpus}) < 2 or len(counts) > 1:
        return None
    if len(positions) == 1:
        single = NodeNetwork(1, len(wiring.gpus), 0.0, 0.0)
        return single, single
    unlike = {_facts_of(wiring, each): each for each in positions.values()}
    carried = [_node_gb_s(wiring, each) for each in unlike.values()]
    known = [each for each in carried if each is not None]
    rdma = all(nic.rdma for each in unlike.values() for position in each for nic in wiring.near_nics(position))
    if len(known) < len(carried):
        return None
    found = [NodeNetwork(len(positions), len(wiring.gpus), node, nic, rdma) for node, nic in known]
    return min(found, key=lambda each: each.node_gb_s), max(found, key=lambda each: each.node_gb_s)


def _facts_of(wiring: Wiring, positions: Sequence[int]) -> Hashable:
    """Return a key that GPUs share with those at the same positions of nodes with equal facts."""
    places = [wiring.gpus[position] for position in positions]
    numbers = list(dict.fromkeys(place.node for place in places))
    nodes = [(number, wiring.nodes.get(number)) for number in numbers]
    likes = [number if node is None else node.like for number, node in nodes]
    return (*likes, *((numbers.index(place.node), place.gpu_bus_id) for place in places))


def _node_gb_s(wiring: Wiring, positions: Sequence[int]) -> tuple[float, float] | None:
    nics: dict[int, dict[str, tuple[NicFacts, GpuFacts]]] = {}
    links: list[float] = []
    for position in positions:
        number, gpu = wiring.gpus[position].node, wiring.gpu(position)
        own = nics.setdefault(number, {})
        if gpu is not None:
            own.update((nic.name, (nic, gpu)) for nic in wiring.near_nics(position))
            links.append(wiring.nodes[number].own_link_gb_s(gpu) or math.inf)
    together = [
        wiring.nodes[node]
        .combined_nic_limit([nic for nic, _ in own.values()], {name: gpu for name, (_, gpu) in own.items()})
        .gb_s
        for node, own in nics.items()
        if own
    ]
    each = [wiring.nodes[node].nic_limit(nic, gpu).gb_s for node, own in nics.items() for nic, gpu in own.values()]
    rates, rate = [gb_s for gb_s in together if gb_s is not None], [gb_s for gb_s in each if gb_s is not None]
    if not rates or len(rates) < len(together):
        return None
    most = sum(links) if len(links) == len(positions) else sum(rates)
    return min(sum(rates), most), min(rate)


def network_limits(node: topology.Topology) -> tuple[list[topology.Limit], float | None]:
    """Return the limit of each GPU of a node over its nearest NICs, and GB/s that leave the node over all of them."""
    places = [GpuPlace(node.snapshot.host, 0, gpu.bus_id or gpu.device) for gpu in node.gpus]
    wiring = Wiring(places, {0: node})
    carried = _node_gb_s(wiring, range(len(places)))
    return [wiring.network_limit(position) for position in range(len(places))], None if carried is None else carried[0]


def internode_limit(algorithm: str | None, collective: BusbwFactor, network: NodeNetwork) -> topology.Limit:
    """Return the limit of busbw between nodes in GB/s, set by the busiest node's NICs. A note names the algorithm."""
    factor = collective.busbw_factor(network.ranks)
    exchanged = network.exchange_gb_s(collective)
    if exchanged is not None:
        return topology.Limit(factor * exchanged, f"{network.nic_gb_s:g} GB/s a NIC, {network.node_gb_s:g} a node")
    names = (nccl_name(algorithm),) if algorithm else (RING, "TREE")
    allowed = {name: network.node_gb_s * factor / network.sent_per_byte(name, collective) for name in names}
    name = max(allowed, key=allowed.__getitem__)
    assumed = "" if algorithm else f"; algorithm not known, {name.lower()} assumed"
    return topology.Limit(allowed[name], f"{network.node_gb_s:g} GB/s of NICs a node{assumed}")


NVLS_ASSUMED = "algorithm not known, limit of NVLS"


def assumed_limit(collective: BusbwFactor, wiring: Wiring) -> topology.Limit:
    """Return the limit inside a node or NVLink domain if algorithm and connections are unknown.

    With NVLS an all-reduce may reach 2(n-1)/(n+1) of the links' bandwidth (docs/formulas.md).
    """
    ranks = range(len(wiring.gpus))
    ring = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
    every = ring if collective.name == "sendrecv" else list(permutations(ranks, 2))
    if len(ranks) < 2:
        return topology.Limit(None, "one rank: nothing passes a link")
    found = busbw_limit(RING, every, wiring)
    gpu, count = wiring.gpu(0), len(ranks)
    has_nvls = gpu is not None and gpu.fabric is not None and wiring.has_nvlinks(ring[0])
    if found.gb_s is None or collective.name != "allreduce" or not has_nvls:
        return found
    return topology.Limit(found.gb_s * max(1.0, 2 * (count - 1) / (count + 1)), NVLS_ASSUMED)


class ReachedRow(Protocol):
    """A measured collective and its bandwidth."""

    @property
    def collective(self) -> str:
        """'allreduce'."""

    @property
    def algbw_gb_s(self) -> float:
        """Size over time."""

    @property
    def reached_gb_s(self) -> float:
        """Bus bandwidth: algbw times the collective's factor."""


def find_network(wiring: Wiring, nodes: Collection[int], ranks: int) -> NodeNetwork | None:
    """Return the weakest network between some nodes of a run without NVLinks between them. None if unknown."""
    by_node = [[place for place, gpu in enumerate(wiring.gpus) if gpu.node == number] for number in nodes]
    carried = [found for each in by_node if (found := _node_gb_s(wiring, each)) is not None]
    if len(carried) < len(by_node) or not carried:
        return None
    return NodeNetwork(len(by_node), ranks, *min(carried))


def most_busbw_gb_s(row: ReachedRow, network: NodeNetwork) -> float:
    """Return the maximum busbw of a row over a network with any algorithm."""
    factor = row.reached_gb_s / row.algbw_gb_s if row.algbw_gb_s else 1.0
    tree = network.node_gb_s * factor / network.sent_per_byte("TREE", _Named(row.collective, lambda _ranks: factor))
    return max(network.node_gb_s, tree)


class _Named(Struct, frozen=True):
    name: str
    busbw_factor: Callable[[int], float]


class Work(Struct, frozen=True):
    """The work of an operation: f, and the minimum bytes that each rank sends and receives per byte of the size."""

    busbw_factor: float
    expected_bytes: Sequence[tuple[float, float]]


def busbw_limit(algorithm: str, pairs: Collection[Pair], wiring: Wiring) -> topology.Limit:
    """Return the maximum busbw of NCCL's algorithm over its connections: for RING the minimum w(i), for TREE and
    PAT the mean.
    """
    if pairs and algorithm != RING and algorithm not in TOTAL_BOUND:
        return topology.Limit(None, f"no ceiling is derived for {algorithm}")
    links = _links(pairs, wiring)
    unknown = _unknown(links.values())
    if unknown is not None or algorithm == RING:
        return unknown or _least(links.values())
    leaving = [limit.gb_s or 0.0 for (_, direction), limit in links.items() if direction == _SENT]
    return topology.Limit(sum(leaving) / len(leaving), f"mean of {len(leaving)} ranks' links")


def exchange_limit(work: Work, pairs: Collection[Pair], wiring: Wiring) -> topology.Limit:
    """Return the limit in GB/s if data moves directly from rank to rank: a rank that sends s·S needs t ≥ s·S/w(i)."""
    links = _links(pairs, wiring)
    return _unknown(links.values()) or _least(
        [
            topology.Limit(limit.gb_s * work.busbw_factor / work.expected_bytes[rank][direction], limit.note)
            for (rank, direction), limit in links.items()
            if limit.gb_s is not None and work.expected_bytes[rank][direction]
        ]
    )


def _links(pairs: Collection[Pair], wiring: Wiring) -> dict[tuple[int, int], topology.Limit]:
    peers: dict[tuple[int, int], set[Pair]] = {}
    for pair in pairs:
        peers.setdefault((pair[0], _SENT), set()).add(pair)
        peers.setdefault((pair[1], _RECEIVED), set()).add(pair)
    return {(rank, direction): _carried(rank, its, wiring) for (rank, direction), its in peers.items()}


def _carried(rank: int, pairs: Collection[Pair], wiring: Wiring) -> topology.Limit:
    """Return the GB/s of several pairs of a rank at once: their sum, limited by all its links of that kind."""
    limits = {pair: wiring.limit(pair) for pair in sorted(pairs)}
    unknown = _unknown(limits.values())
    if unknown is not None:
        return unknown
    nvlink, pcie, network = list[float](), list[float](), list[float]()
    for pair, limit in limits.items():
        kind = nvlink if wiring.has_nvlinks(pair) else pcie if wiring.share_node(pair) else network
        kind.append(limit.gb_s or 0.0)
    carried = _capped(nvlink, wiring.nvlink_total(rank)) + _capped(pcie, wiring.host_limit(rank))
    carried += _capped(network, wiring.network_limit(rank)) if network else 0.0
    return topology.Limit(carried, f"links of rank {rank}")


def _capped(each_gb_s: Sequence[float], total: topology.Limit) -> float:
    return sum(each_gb_s) if total.gb_s is None else min(sum(each_gb_s), total.gb_s)


def _unknown(limits: Collection[topology.Limit]) -> topology.Limit | None:
    if not limits:
        return topology.Limit(None, "who is connected to whom is not known")
    return next((limit for limit in limits if limit.gb_s is None), None)


def _least(limits: Collection[topology.Limit]) -> topology.Limit:
    return min(limits, key=lambda limit: limit.gb_s or 0.0)
