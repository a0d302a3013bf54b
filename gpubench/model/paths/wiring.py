"""The wiring between the GPUs of a run: which paths can be direct, and the limits of busbw.

docs/explanation/limits.md has the formulas.
"""

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
from gpubench.model.terms.units import group_by
from gpubench.model.terms.verdict import Verdict

NETWORK, MNNVL = "NET", "P2P/MNNVL"

_ACTIVE = "active"
_NOT_DESCRIBED = "there are no facts about these GPUs"


class GpuPlace(Struct, frozen=True):
    """The location of a GPU if one process uses several GPUs."""

    host: str
    node: int
    gpu_bus_id: str | None


GpuLocation = RankIdentity | GpuPlace  # A rank with its own GPU, or one GPU of a process that uses several


class Wiring(Struct, frozen=True, dict=True):
    """The GPUs of a run and the topology of the known nodes, by node number.

    All methods identify a GPU by its index in `gpus`. If each rank has one GPU, the index is the rank.
    """

    gpus: Sequence[GpuLocation]
    nodes: Mapping[int, topology.Topology]

    @cached_property
    def why_not_judged(self) -> str:
        """The reason why no limit applies to these ranks: they share GPUs, or NCCL splits their hosts. '' if limits
        apply.
        """
        return why_not_judged([gpu for gpu in self.gpus if isinstance(gpu, RankIdentity)])

    def share_node(self, pair: Pair) -> bool:
        return self.gpus[pair[0]].node == self.gpus[pair[1]].node

    def share_gpu(self, pair: Pair) -> bool:
        """True if both ranks use the same GPU, or MIG instances of the same GPU."""
        one, other = self.gpus[pair[0]], self.gpus[pair[1]]
        return one.node == other.node and one.gpu_bus_id is not None and one.gpu_bus_id == other.gpu_bus_id

    def domain(self, gpu: int) -> tuple[str, int | None] | None:
        """Return a GPU's NVLink domain if the domain has several nodes, else None."""
        return self._domains[gpu]

    def share_domain(self, pair: Pair) -> bool:
        """True if both GPUs are in the same NVLink domain of several nodes."""
        return self.domain(pair[0]) is not None and self.domain(pair[0]) == self.domain(pair[1])

    def host(self, gpu: int) -> str:
        """Return the host name of a GPU's node. If two nodes have the same host name, it has a unique suffix."""
        node = self.nodes.get(self.gpus[gpu].node)
        return self.gpus[gpu].host if node is None else node.snapshot.host

    def place(self, gpu: int) -> DevicePlace:
        known, located = self.gpu(gpu), self.gpus[gpu]
        if known is not None:
            return DevicePlace(self.host(gpu), known.device, known.bus_id)
        if isinstance(located, RankIdentity):
            return located.place
        return DevicePlace(self.host(gpu), bus_id=located.gpu_bus_id)

    def gpu(self, gpu: int) -> GpuFacts | None:
        return self._found[gpu]

    def path(self, pair: Pair) -> str:
        """Return the path class of a pair. For GPUs on different nodes it is P2P/MNNVL within one NVLink domain,
        else NET.
        """
        if not self.share_node(pair):
            return MNNVL if self.share_domain(pair) else NETWORK
        facts = self._facts(pair)
        return topology.UNKNOWN_PATH if facts is None else self._node(pair).path(*facts)

    def limit(self, pair: Pair) -> topology.Limit:
        """Return the bandwidth limit of a pair in GB/s per direction.

        For GPUs on different nodes, it is the limit of their NVLinks or of their nearest NICs.
        """
        if not self.share_node(pair):
            end_limit = self.nvlink_total if self.share_domain(pair) else self.network_limit
            return min(map(end_limit, pair), key=lambda limit: limit.gb_s or 0.0)
        if self.share_gpu(pair):
            return topology.Limit(None, RANKS_SHARE_A_GPU)
        facts = self._facts(pair)
        return topology.Limit(None, _NOT_DESCRIBED) if facts is None else self._node(pair).limit(*facts)

    def has_nvlinks(self, pair: Pair) -> bool:
        """True if NVLinks connect the two GPUs."""
        if not self.share_node(pair):
            return self.share_domain(pair)
        facts = None if self.share_gpu(pair) else self._facts(pair)
        return facts is not None and bool(self._node(pair).nvlinks(*facts))

    def nvlink_total(self, gpu: int) -> topology.Limit:
        """Return the total bandwidth of a GPU's NVLinks in GB/s per direction."""
        return self._nvlink_totals[gpu]

    def host_limit(self, gpu: int) -> topology.Limit:
        """Return the bandwidth limit between a GPU and host memory in GB/s per direction."""
        if gpu not in self._host_limits:
            facts, node = self._found[gpu], self.gpus[gpu].node
            self._host_limits[gpu] = (
                topology.Limit(None, _NOT_DESCRIBED) if facts is None else self.nodes[node].pcie_total(facts)
            )
        return self._host_limits[gpu]

    def staged_gb_s(self, pair: Pair) -> float | None:
        """Return the bandwidth limit of a pair through host memory in GB/s. None if either GPU's path to host
        memory is unknown.
        """
        known = [limit.gb_s for limit in map(self.host_limit, pair) if limit.gb_s is not None]
        return min(known) if len(known) == len(pair) else None

    def outruns_host(self, pair: Pair) -> bool:
        """True if any healthy direct copy is faster than every host-staged copy, so that bandwidth tells them apart."""
        limit, staged = self.limit(pair).gb_s, self.staged_gb_s(pair)
        return limit is not None and staged is not None and LIMIT_WARN_SHARE * limit > ABOVE_HOST * staged

    def peer_access(self, pair: Pair) -> topology.PeerAccess:
        """Return the peer access between two GPUs of one node, as CUDA and the driver report it."""
        if pair not in self._peer_access:
            facts = self._facts(pair)
            if self.share_gpu(pair):
                split = facts is not None and facts[0].mig is True
                what = "MIG instances of the same GPU" if split else "the same GPU"
                access = topology.PeerAccess(not split, None, f"both ranks use {what}")
            elif facts is None:
                access = topology.PeerAccess(None, None, _NOT_DESCRIBED)
            else:
                access = self._node(pair).peer_access(*facts)
            self._peer_access[pair] = access
        return self._peer_access[pair]

    def capability(self, pair: Pair) -> Evidence:
        """Return the evidence for whether the path of a pair can be direct."""
        if not self.share_node(pair) and self.share_domain(pair):
            return Evidence(State.PRESENT, "both GPUs are in one NVLink domain")
        if not self.share_node(pair):
            nodes = self.gpus[pair[0]].node, self.gpus[pair[1]].node
            if nodes not in self._node_pair_evidence:
                self._node_pair_evidence[nodes] = self._evidence_between_nodes(pair)
            return self._node_pair_evidence[nodes]
        access = self.peer_access(pair)
        if access.possible is None:
            return Evidence(seen=access.reason)
        seen = access.reason if self.share_gpu(pair) else f"{self.path(pair)}, peer access {access.reason}"
        return Evidence(State.PRESENT if access.possible else State.CONTRADICTING, seen)

    def refusal(self, pair: Pair) -> topology.Refusal | None:
        """Return the refusal of peer access between two GPUs of one node. None if access is not refused, or is
        unknown.
        """
        facts, access = self._facts(pair), self.peer_access(pair)
        if facts is None or access.possible is not False:
            return None
        return topology.find_refusal(self._node(pair), *facts, access)

    def why_refused(self, pair: Pair) -> str:
        """Return the reason if the hardware design rules out peer access, else ''."""
        refusal = self.refusal(pair)
        return refusal.reason if refusal is not None and refusal.is_by_design else ""

    def is_refusal_doubtful(self, pair: Pair) -> bool:
        """True if peer access is refused, but nothing proves that it should be possible."""
        refusal = self.refusal(pair)
        is_doubtful = refusal is not None and refusal.severity is Verdict.WARN
        return is_doubtful and not self.peer_access(pair).contradicts

    def why_staged(self, pair: Pair) -> str:
        """Return the reason if host memory is the expected path of a pair, so that there is nothing to repair. Else
        ''.
        """
        if not self.share_node(pair):
            bare = [] if self.share_domain(pair) else self._nodes_without_rdma(pair)
            return f"no RDMA NIC is active on {', '.join(bare)}" if bare else ""
        if self.peer_access(pair).possible is False:
            return self.why_refused(pair)
        return self.why_avoided(pair)

    def why_avoided(self, pair: Pair) -> str:
        """Return the reason if NCCL does not use peer access between two GPUs of one node by default, else ''."""
        facts = self._facts(pair)
        return "" if facts is None or self.share_gpu(pair) else topology.nccl_keeps_off(self._node(pair), *facts)

    def is_avoided(self, pair: Pair) -> bool:
        """True if NCCL does not use peer access for a pair by default, and the facts suffice to be certain."""
        facts, possible = self._facts(pair), self.peer_access(pair).possible
        if facts is None or possible is False or not self.why_avoided(pair):
            return False
        return possible is True or topology.is_policy_known(self._node(pair), *facts)

    def rdma_nics(self, gpu: int) -> list[NicFacts]:
        """Return the RDMA NICs of a GPU's node that are up, or whose state is unknown."""
        return self._nics.get(self.gpus[gpu].node, [])

    def near_nics(self, gpu: int) -> list[NicFacts]:
        """Return the NICs nearest to a GPU. Skip plain Ethernet if there are RDMA NICs. If all paths are unknown,
        return all NICs.
        """
        facts, number = self._found[gpu], self.gpus[gpu].node
        if facts is None:
            return []
        node = self.nodes[number]
        nics = self._nics[number] or [nic for nic in node.nics if nic.state == _ACTIVE and nic.rate_gbit_s]
        paths = {nic.name: node.pcie_path(facts, nic) for nic in nics}
        nearest = next((class_ for class_ in topology.PATH_CLASSES if class_ in paths.values()), None)
        return [nic for nic in nics if paths[nic.name] == nearest]

    def network_limit(self, gpu: int) -> topology.Limit:
        """Return the bandwidth limit between a GPU and other nodes, from its nearest NICs and the GPU's own path to
        them.
        """
        near, facts, node = self.near_nics(gpu), self._found[gpu], self.nodes.get(self.gpus[gpu].node)
        if not near or facts is None or node is None:
            return topology.Limit(None, "no NIC with a known rate is near the GPU")
        total, own = node.combined_nic_limit(near, {nic.name: facts for nic in near}), node.own_link_gb_s(facts)
        if total.gb_s is None:
            return total
        return topology.Limit(total.gb_s if own is None else min(total.gb_s, own), f"{self.host(gpu)}: {total.note}")

    @cached_property
    def networks(self) -> "tuple[NodeNetwork, NodeNetwork] | None":
        """The networks of two nodes (or NVLink domains), with the slowest and with the fastest NICs. None if
        unknown.
        """
        return _networks(self)

    @cached_property
    def _nics(self) -> dict[int, list[NicFacts]]:
        return {
            number: [nic for nic in node.nics if nic.rdma and nic.state in (_ACTIVE, None)]
            for number, node in self.nodes.items()
        }

    @cached_property
    def _node_pair_evidence(self) -> dict[tuple[int, int], Evidence]:
        """Cache by node numbers, because the evidence is the same for all GPUs of two nodes."""
        return {}

    @cached_property
    def _peer_access(self) -> dict[Pair, topology.PeerAccess]:
        """Cache, because a dozen conditions need the peer access of every pair."""
        return {}

    @cached_property
    def _host_limits(self) -> dict[int, topology.Limit]:
        """Cache by GPU, because the limit of every pair depends on the limits of both GPUs."""
        return {}

    def _evidence_between_nodes(self, pair: Pair) -> Evidence:
        if bare := self._nodes_without_rdma(pair):
            return Evidence(State.CONTRADICTING, f"no RDMA NIC is active on {', '.join(bare)}")
        answers = [
            [(self.nodes[self.gpus[gpu].node].gpudirect(nic), nic.name) for nic in self.rdma_nics(gpu)] for gpu in pair
        ]
        if not all(answers):
            return Evidence(seen="there are no facts about the NICs of both nodes")
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
        known = {
            number: {gpu.bus_id or normalize_bus_id(gpu.device): gpu for gpu in node.gpus}
            for number, node in self.nodes.items()
        }
        return [known.get(gpu.node, {}).get(normalize_bus_id(gpu.gpu_bus_id or "")) for gpu in self.gpus]

    @cached_property
    def _domains(self) -> list[tuple[str, int | None] | None]:
        return [None if gpu is None or gpu.fabric is None else gpu.fabric.domain for gpu in self._found]

    @cached_property
    def _nvlink_totals(self) -> list[topology.Limit]:
        """Cache by GPU, because the limit of every pair depends on the totals of both GPUs."""
        return [
            topology.Limit(None, _NOT_DESCRIBED) if gpu is None else self.nodes[place.node].nvlink_total(gpu)
            for place, gpu in zip(self.gpus, self._found, strict=True)
        ]

    def _node(self, pair: Pair) -> topology.Topology:
        return self.nodes[self.gpus[pair[0]].node]


_SENT, _RECEIVED = 0, 1


class BusbwFactor(Protocol):
    """The name of a collective, and f(n), its factor between algbw and busbw for n ranks."""

    @property
    def name(self) -> str: ...

    @property
    def busbw_factor(self) -> Callable[[int], float]: ...


class NodeNetwork(Struct, frozen=True):
    """The network between nodes, or between NVLink domains, that all have the same number of ranks.

    - `node_gb_s`: bandwidth of all NICs of a node together
    - `nic_gb_s`: bandwidth of the slowest NIC
    - `rdma`: false if the NICs are plain Ethernet, where NCCL uses sockets or a cloud provider's protocol
    """

    nodes: int
    ranks: int
    node_gb_s: float
    nic_gb_s: float
    rdma: bool = True

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.ranks // self.nodes)

    def sent_per_byte(self, algorithm: str, collective: BusbwFactor, *, as_nccl: bool = False) -> float:
        """Return how many bytes leave the busiest node per byte of the operation's size S.

        A ring leaves each node once, which is f(n). Reduction in network switches (CollNet) sends S once.

        For an all-reduce with trees, each of two trees reduces half the data. Two nodes send S each. With three nodes,
        the inner node of one tree is a leaf of the other and sends 1.5 S. With more nodes, an inner node sends to its
        parent and to two children. It is also a leaf of the other tree, so it sends 2 S.

        `as_nccl` counts 2 S for three nodes too, like NCCL (src/graph/tuning.cc).
        """
        name = nccl_name(algorithm)
        if collective.name != "allreduce" or name not in (*_TREES, *_IN_SWITCHES):
            return collective.busbw_factor(self.ranks)
        if name in _IN_SWITCHES or self.nodes == 2:
            return 1.0
        return 1.5 if self.nodes == 3 and not as_nccl else 2.0

    def exchange_gb_s(self, collective: BusbwFactor) -> float | None:
        """Return the maximum algbw in GB/s of a collective in which ranks send directly to each other. None for
        other collectives.
        """
        remote = (self.ranks - self.ranks_per_node) / self.ranks
        limits = {
            "alltoall": self.node_gb_s / (self.ranks_per_node * remote),
            "gather": self.nic_gb_s / remote,
            "scatter": self.nic_gb_s / remote,
            "sendrecv": self.nic_gb_s,
        }
        return limits.get(collective.name)


_TREES = ("TREE", "NVLSTREE")
_IN_SWITCHES = ("COLLNETDIRECT", "COLLNETCHAIN", "NVLS")


def nccl_name(algorithm: str | None) -> str:
    """Return an algorithm's name as NCCL_ALGO spells it, in capitals: 'NVLS_TREE' → 'NVLSTREE'. '' for None."""
    return (algorithm or "").upper().replace("_", "")


def _networks(wiring: Wiring) -> tuple[NodeNetwork, NodeNetwork] | None:
    groups = group_by(range(len(wiring.gpus)), lambda gpu: wiring.domain(gpu) or wiring.gpus[gpu].node)
    if len({gpu.node for gpu in wiring.gpus}) < 2 or len({len(gpus) for gpus in groups.values()}) > 1:
        return None
    if len(groups) == 1:
        single = NodeNetwork(1, len(wiring.gpus), 0.0, 0.0)
        return single, single
    different = {_equality_key(wiring, gpus): gpus for gpus in groups.values()}
    rates = [_node_gb_s(wiring, gpus) for gpus in different.values()]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    rdma = all(nic.rdma for gpus in different.values() for gpu in gpus for nic in wiring.near_nics(gpu))
    found = [NodeNetwork(len(groups), len(wiring.gpus), node, nic, rdma) for node, nic in known]
    return min(found, key=lambda network: network.node_gb_s), max(found, key=lambda network: network.node_gb_s)


def _equality_key(wiring: Wiring, positions: Sequence[int]) -> Hashable:
    """Return a key for a group of GPUs. Groups on nodes with equal facts have equal keys."""
    places = [wiring.gpus[position] for position in positions]
    numbers = list(dict.fromkeys(place.node for place in places))
    nodes = [(number, wiring.nodes.get(number)) for number in numbers]
    likes = [number if node is None else node.like for number, node in nodes]
    return (*likes, *((numbers.index(place.node), place.gpu_bus_id) for place in places))


def _node_gb_s(wiring: Wiring, positions: Sequence[int]) -> tuple[float, float] | None:
    """Return the total bandwidth of the NICs near these GPUs, and that of the slowest NIC, in GB/s. None if unknown."""
    nics: dict[int, dict[str, tuple[NicFacts, GpuFacts]]] = {}
    links: list[float] = []
    for position in positions:
        number, gpu = wiring.gpus[position].node, wiring.gpu(position)
        own = nics.setdefault(number, {})
        if gpu is not None:
            own.update((nic.name, (nic, gpu)) for nic in wiring.near_nics(position))
            links.append(wiring.nodes[number].own_link_gb_s(gpu) or math.inf)
    total, single = 0.0, list[float]()
    for number, own in nics.items():
        if not own:
            continue
        node, near = wiring.nodes[number], {name: gpu for name, (_, gpu) in own.items()}
        combined = node.combined_nic_limit([nic for nic, _ in own.values()], near).gb_s
        if combined is None:
            return None
        total += combined
        single += [rate for nic, gpu in own.values() if (rate := node.nic_limit(nic, gpu).gb_s) is not None]
    if not single:
        return None
    return min(total, sum(links)) if len(links) == len(positions) else total, min(single)


def network_limits(node: topology.Topology) -> tuple[list[topology.Limit], float | None]:
    """Return the limit of each GPU over its nearest NICs, and the bandwidth of the whole node over all of them in
    GB/s.
    """
    gpus = range(len(node.gpus))
    places = [GpuPlace(node.snapshot.host, 0, gpu.bus_id or gpu.device) for gpu in node.gpus]
    wiring = Wiring(places, {0: node})
    rates = _node_gb_s(wiring, gpus)
    return list(map(wiring.network_limit, gpus)), None if rates is None else rates[0]


def internode_limit(algorithm: str | None, collective: BusbwFactor, network: NodeNetwork) -> topology.Limit:
    """Return the limit of busbw between nodes in GB/s. The NICs of the busiest node set it."""
    factor = collective.busbw_factor(network.ranks)
    exchanged = network.exchange_gb_s(collective)
    if exchanged is not None:
        return topology.Limit(factor * exchanged, f"{network.nic_gb_s:g} GB/s per NIC, {network.node_gb_s:g} per node")
    names = (nccl_name(algorithm),) if algorithm else (RING, "TREE")
    limits = {name: network.node_gb_s * factor / network.sent_per_byte(name, collective) for name in names}
    name = max(limits, key=limits.__getitem__)
    assumed = "" if algorithm else f"; algorithm unknown, {name.lower()} assumed"
    return topology.Limit(limits[name], f"{network.node_gb_s:g} GB/s of NICs per node{assumed}")


NVLS_LIMIT = "limit of NVLS"  # Results of earlier versions also contain these words
NVLS_ASSUMED = f"algorithm unknown, {NVLS_LIMIT}"


def assumed_limit(collective: BusbwFactor, wiring: Wiring) -> topology.Limit:
    """Return the limit of busbw inside a node or NVLink domain if the algorithm and the connections are unknown.

    With NVLS, an all-reduce may exceed the links' bandwidth by a factor of 2(n-1)/(n+1) (docs/explanation/limits.md).
    """
    ranks = range(len(wiring.gpus))
    ring = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
    every = ring if collective.name == "sendrecv" else list(permutations(ranks, 2))
    if len(ranks) < 2:
        return topology.Limit(None, "one rank: no data pass a link")
    found = busbw_limit(RING, every, wiring)
    gpu, count = wiring.gpu(0), len(ranks)
    has_nvls = gpu is not None and gpu.fabric is not None and wiring.has_nvlinks(ring[0])
    if found.gb_s is None or collective.name != "allreduce" or not has_nvls:
        return found
    return topology.Limit(found.gb_s * max(1.0, 2 * (count - 1) / (count + 1)), NVLS_ASSUMED)


class ReachedRow(Protocol):
    """A measured collective with its bandwidth. `reached_gb_s` is the busbw."""

    @property
    def collective(self) -> str: ...

    @property
    def algbw_gb_s(self) -> float: ...

    @property
    def reached_gb_s(self) -> float: ...


def find_network(wiring: Wiring, nodes: Collection[int], ranks: int) -> NodeNetwork | None:
    """Return the network between these nodes, with the bandwidth of the node with the slowest NICs. None if unknown."""
    gpus_by_node = group_by(range(len(wiring.gpus)), lambda gpu: wiring.gpus[gpu].node)
    rates = [_node_gb_s(wiring, gpus_by_node.get(number, [])) for number in nodes]
    known = [rate for rate in rates if rate is not None]
    return NodeNetwork(len(rates), ranks, *min(known)) if known and len(known) == len(rates) else None


def most_busbw_gb_s(row: ReachedRow, network: NodeNetwork) -> float:
    """Return the maximum busbw of a row over a network, for the fastest possible algorithm."""
    factor = row.reached_gb_s / row.algbw_gb_s if row.algbw_gb_s else 1.0
    tree = network.node_gb_s * factor / network.sent_per_byte("TREE", _Named(row.collective, lambda _ranks: factor))
    return max(network.node_gb_s, tree)


class _Named(Struct, frozen=True):
    name: str
    busbw_factor: Callable[[int], float]


class Work(Struct, frozen=True):
    """The work of a collective: f(n), and the bytes that each rank must send and receive per byte of the size."""

    busbw_factor: float
    expected_bytes: Sequence[tuple[float, float]]


def busbw_limit(algorithm: str, pairs: Collection[Pair], wiring: Wiring) -> topology.Limit:
    """Return the maximum busbw of an NCCL algorithm over its connections.

    For RING it is the bandwidth of the slowest rank. TREE and PAT move the same number of bytes in unequal shares, so
    their limit is the mean over ranks.
    """
    if pairs and algorithm not in (RING, "TREE", "PAT"):
        return topology.Limit(None, f"no limit is known for {algorithm}")
    links = _links(pairs, wiring)
    unknown = _unknown(links.values())
    if unknown is not None or algorithm == RING:
        return unknown or _least(links.values())
    sent = [limit.gb_s or 0.0 for (_, direction), limit in links.items() if direction == _SENT]
    return topology.Limit(sum(sent) / len(sent), f"mean of {len(sent)} ranks' links")


def exchange_limit(work: Work, pairs: Collection[Pair], wiring: Wiring) -> topology.Limit:
    """Return the limit of busbw, set by the slowest rank, for collectives in which ranks send directly to each
    other.
    """
    links = _links(pairs, wiring)
    return _unknown(links.values()) or _least(
        [
            topology.Limit(limit.gb_s * work.busbw_factor / work.expected_bytes[rank][direction], limit.note)
            for (rank, direction), limit in links.items()
            if limit.gb_s is not None and work.expected_bytes[rank][direction]
        ]
    )


def _links(pairs: Collection[Pair], wiring: Wiring) -> dict[tuple[int, int], topology.Limit]:
    """Return the bandwidth limit of each rank and direction."""
    peers: dict[tuple[int, int], set[Pair]] = {}
    for pair in pairs:
        peers.setdefault((pair[0], _SENT), set()).add(pair)
        peers.setdefault((pair[1], _RECEIVED), set()).add(pair)
    return {(rank, direction): _rank_limit(rank, its, wiring) for (rank, direction), its in peers.items()}


def _rank_limit(rank: int, pairs: Collection[Pair], wiring: Wiring) -> topology.Limit:
    """Return the limit for several simultaneous pairs of one rank.

    It is the sum over its pairs, capped by the total bandwidth of the rank's NVLinks, PCIe link and NICs.
    """
    limits = {pair: wiring.limit(pair) for pair in sorted(pairs)}
    unknown = _unknown(limits.values())
    if unknown is not None:
        return unknown
    nvlink, pcie, network = list[float](), list[float](), list[float]()
    for pair, limit in limits.items():
        kind = nvlink if wiring.has_nvlinks(pair) else pcie if wiring.share_node(pair) else network
        kind.append(limit.gb_s or 0.0)
    total = _capped(nvlink, wiring.nvlink_total(rank)) + _capped(pcie, wiring.host_limit(rank))
    total += _capped(network, wiring.network_limit(rank)) if network else 0.0
    return topology.Limit(total, f"links of rank {rank}")


def _capped(rates: Sequence[float], total: topology.Limit) -> float:
    return sum(rates) if total.gb_s is None else min(sum(rates), total.gb_s)


def _unknown(limits: Collection[topology.Limit]) -> topology.Limit | None:
    if not limits:
        return topology.Limit(None, "the connections between ranks are unknown")
    return next((limit for limit in limits if limit.gb_s is None), None)


def _least(limits: Collection[topology.Limit]) -> topology.Limit:
    return min(limits, key=lambda limit: limit.gb_s or 0.0)
