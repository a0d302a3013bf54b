"""The wiring between the GPUs of a run: whether a path could be direct, and the bandwidth it can carry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpubench.model.facts.snapshot import GpuFacts, NicFacts, bus_id
from gpubench.model.paths.evidence import Evidence, State
from gpubench.model.paths.p2p import ABOVE_HOST, LIMIT_WARN_SHARE
from gpubench.model.paths.peer_policy import Refusal, is_policy_known, nccl_keeps_off, refusal_of
from gpubench.model.paths.selection import Pair
from gpubench.model.paths.topology import PATH_CLASSES, UNKNOWN_PATH, Limit, PeerAccess, Topology
from gpubench.model.terms.rank_identity import RANKS_SHARE_A_GPU, RankIdentity, why_not_judged

NETWORK, MNNVL = "NET", "P2P/MNNVL"

_ACTIVE = "active"
_NOT_DESCRIBED = "nothing described these GPUs"
_SAME_GPU = "both ranks use the same GPU"
_INSTANCES = "both ranks use MIG instances of the same GPU"


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """A GPU of a process that has several, by host, number of the node, and PCI bus id, if any is known."""

    host: str
    node: int
    gpu_bus_id: str | None


Located = RankIdentity | GpuPlace
"""A GPU of a run by where it is: a rank with its GPU, or a GPU that is no rank's own."""


@dataclass(frozen=True)
class Wiring:
    """The GPUs of a run by position, which is the rank where each has one, and their nodes by number.

    Of nodes there are those of which something is known.
    """

    gpus: Sequence[Located]
    nodes: Mapping[int, Topology]

    @cached_property
    def why_not_judged(self) -> str:
        """The reason why no limit holds for these ranks, as they share GPUs or NCCL splits their hosts; else empty."""
        return why_not_judged([each for each in self.gpus if isinstance(each, RankIdentity)])

    def together(self, pair: Pair) -> bool:
        """True where both are on one node."""
        return self.gpus[pair[0]].node == self.gpus[pair[1]].node

    def one_gpu(self, pair: Pair) -> bool:
        """True where both drive the same GPU, or instances of it."""
        bus_ids = [each.gpu_bus_id for each in (self.gpus[pair[0]], self.gpus[pair[1]])]
        return self.together(pair) and None not in bus_ids and bus_ids[0] == bus_ids[1]

    def domain(self, gpu: int) -> tuple[str, int | None] | None:
        """The NVLink domain of several nodes that a GPU is in; None where it is in none."""
        return self._domains[gpu]

    def in_one_domain(self, pair: Pair) -> bool:
        """True where NVLinks join two GPUs, of one node or of several."""
        return self.domain(pair[0]) is not None and self.domain(pair[0]) == self.domain(pair[1])

    def host(self, gpu: int) -> str:
        """The name of a GPU's node: of two that call themselves alike, what the second was renamed to."""
        node = self.nodes.get(self.gpus[gpu].node)
        return self.gpus[gpu].host if node is None else node.snapshot.host

    def gpu(self, gpu: int) -> GpuFacts | None:
        """The facts of a GPU."""
        return self._found[gpu]

    def path(self, pair: Pair) -> str:
        """The path class; between nodes P2P/MNNVL in one NVLink domain, else NET."""
        if not self.together(pair):
            return MNNVL if self.in_one_domain(pair) else NETWORK
        facts = self._facts(pair)
        return UNKNOWN_PATH if facts is None else self._node(pair).path(*facts)

    def limit(self, pair: Pair) -> Limit:
        """The ceiling of a pair, in GB/s per direction; between nodes that of the NICs nearest to its GPUs."""
        if not self.together(pair) and self.in_one_domain(pair):
            return min((self.nvlink_total(gpu) for gpu in pair), key=lambda limit: limit.gb_s or 0.0)
        if not self.together(pair):
            return min((self.to_network(gpu) for gpu in pair), key=lambda limit: limit.gb_s or 0.0)
        if self.one_gpu(pair):
            return Limit(None, RANKS_SHARE_A_GPU)
        facts = self._facts(pair)
        return Limit(None, _NOT_DESCRIBED) if facts is None else self._node(pair).limit(*facts)

    def has_nvlinks(self, pair: Pair) -> bool:
        """True where NVLinks join a pair."""
        if not self.together(pair):
            return self.in_one_domain(pair)
        facts = self._facts(pair)
        if self.one_gpu(pair):
            return False
        return facts is not None and bool(self._node(pair).nvlinks(*facts))

    def nvlink_total(self, gpu: int) -> Limit:
        """GB/s per direction of all NVLinks of a GPU together."""
        return self._nvlink_totals[gpu]

    def to_host(self, gpu: int) -> Limit:
        """The ceiling between a GPU and host memory, in GB/s per direction."""
        facts = self._found[gpu]
        return Limit(None, _NOT_DESCRIBED) if facts is None else self.nodes[self.gpus[gpu].node].pcie_total(facts)

    def through_host_gb_s(self, pair: Pair) -> float | None:
        """GB/s of a pair through host memory at most: of the narrower of both GPUs' ways to it, if they are known."""
        known = [limit.gb_s for limit in map(self.to_host, pair) if limit.gb_s is not None]
        return min(known) if len(known) == len(pair) else None

    def outruns_host(self, pair: Pair) -> bool:
        """True if a healthy direct copy of a pair is faster than any copy through host memory.

        Only then do bandwidths alone tell the two apart: NVLinks are that much faster, PCIe is not.
        """
        limit, through_host = self.limit(pair).gb_s, self.through_host_gb_s(pair)
        if limit is None or through_host is None:
            return False
        return LIMIT_WARN_SHARE * limit > ABOVE_HOST * through_host

    def peer_access(self, pair: Pair) -> PeerAccess:
        """Peer access between a pair of one node, as CUDA and the driver report it."""
        facts = self._facts(pair)
        if self.one_gpu(pair):
            split = facts is not None and facts[0].mig is True
            return PeerAccess(not split, None, _INSTANCES if split else _SAME_GPU)
        return PeerAccess(None, None, _NOT_DESCRIBED) if facts is None else self._node(pair).peer_access(*facts)

    def capability(self, pair: Pair) -> Evidence:
        """The evidence that the path of a pair could be direct, or could not."""
        if not self.together(pair) and self.in_one_domain(pair):
            return Evidence(State.PRESENT, "both are in one NVLink domain")
        if not self.together(pair):
            nodes = self.gpus[pair[0]].node, self.gpus[pair[1]].node
            return self._between_nodes.get(nodes) or self._between_nodes.setdefault(nodes, self._of_nodes(pair))
        access = self.peer_access(pair)
        if access.possible is None:
            return Evidence(seen=access.reason)
        seen = access.reason if self.one_gpu(pair) else f"{self.path(pair)}, peer access {access.reason}"
        return Evidence(State.PRESENT if access.possible else State.CONTRADICTING, seen)

    def refusal(self, pair: Pair) -> Refusal | None:
        """The reason why a pair of one node has no peer access; None where it has, or where nobody knows."""
        facts, access = self._facts(pair), self.peer_access(pair)
        if facts is None or access.possible is not False:
            return None
        return refusal_of(self._node(pair), *facts, access)

    def refused_by_design(self, pair: Pair) -> str:
        """The reason why a pair of one node has no peer access, where that is no fault; else empty."""
        refusal = self.refusal(pair)
        return refusal.reason if refusal is not None and refusal.by_design else ""

    def by_design(self, pair: Pair) -> str:
        """The reason why NCCL takes a pair through host memory, where that is no fault; else empty."""
        if not self.together(pair):
            bare = [] if self.in_one_domain(pair) else self._nodes_without_rdma(pair)
            return f"no RDMA NIC is active on {', '.join(bare)}" if bare else ""
        if self.peer_access(pair).possible is False:
            return self.refused_by_design(pair)
        return self.kept_off(pair)

    def kept_off(self, pair: Pair) -> str:
        """The reason why NCCL, by default, does not use the peer access of a pair of one node; empty where it does."""
        facts = self._facts(pair)
        return "" if facts is None or self.one_gpu(pair) else nccl_keeps_off(self._node(pair), *facts)

    def stays_off(self, pair: Pair) -> bool:
        """True where NCCL, by default, does not use peer access of a pair, whether or not there is any."""
        facts, possible = self._facts(pair), self.peer_access(pair).possible
        if facts is None or possible is False or not self.kept_off(pair):
            return False
        return possible is True or is_policy_known(self._node(pair), *facts)

    def rdma_nics(self, gpu: int) -> list[NicFacts]:
        """The RDMA NICs of a GPU's node that are up."""
        return self._nics.get(self.gpus[gpu].node, [])

    def near_nics(self, gpu: int) -> list[NicFacts]:
        """The NICs of a node that are nearest to a GPU; RDMA ones if any is up.

        All of them where no path tells which are nearest.
        """
        facts, number = self._found[gpu], self.gpus[gpu].node
        if facts is None:
            return []
        node = self.nodes[number]
        nics = self._nics[number] or [nic for nic in node.nics if nic.state == _ACTIVE and nic.rate_gbit_s]
        paths = {nic.name: node.pcie_path(facts, nic) for nic in nics}
        nearest = next((each for each in PATH_CLASSES if each in paths.values()), None)
        return [nic for nic in nics if paths[nic.name] == nearest]

    def to_network(self, gpu: int) -> Limit:
        """The ceiling of a GPU towards other nodes: its nearest NICs, and its own way to them."""
        near = self.near_nics(gpu)
        if not near:
            return Limit(None, "no NIC of known rate is near the GPU")
        total, own = self.nodes[self.gpus[gpu].node].together(near), self.to_host(gpu).gb_s
        if total.gb_s is None:
            return total
        return Limit(total.gb_s if own is None else min(total.gb_s, own), f"{self.host(gpu)}: {total.note}")

    @cached_property
    def _nics(self) -> dict[int, list[NicFacts]]:
        return {
            number: [nic for nic in node.nics if nic.rdma and nic.state in (_ACTIVE, None)]
            for number, node in self.nodes.items()
        }

    @cached_property
    def _between_nodes(self) -> dict[tuple[int, int], Evidence]:
        """Evidence on pairs of nodes, which is the same for all their ranks, kept once found out."""
        return {}

    def _of_nodes(self, pair: Pair) -> Evidence:
        bare = self._nodes_without_rdma(pair)
        if bare:
            return Evidence(State.CONTRADICTING, f"no RDMA NIC is active on {', '.join(bare)}")
        answers = [
            [(self.nodes[self.gpus[gpu].node].gpudirect(nic), nic.name) for nic in self.rdma_nics(gpu)] for gpu in pair
        ]
        if not all(answers):
            return Evidence(seen="nothing described the NICs of both nodes")
        for each in answers:
            if not any(possible for (possible, _), _ in each):
                (possible, reason), name = each[0]
                state = State.CONTRADICTING if possible is False else State.ABSENT
                return Evidence(state, f"GPUDirect RDMA by {name}: {reason}")
        return Evidence(State.PRESENT, "GPUDirect RDMA is possible on both nodes")

    def _nodes_without_rdma(self, pair: Pair) -> list[str]:
        """Hosts of a pair that are described and have no RDMA NIC that is up."""
        bare = (gpu for gpu in pair if self.gpus[gpu].node in self.nodes and not self.rdma_nics(gpu))
        return list(dict.fromkeys(map(self.host, bare)))

    def _facts(self, pair: Pair) -> tuple[GpuFacts, GpuFacts] | None:
        source, destination = (self._found[gpu] for gpu in pair)
        return None if source is None or destination is None else (source, destination)

    @cached_property
    def _found(self) -> list[GpuFacts | None]:
        """The facts of each GPU, found by its bus id, else its name: indices differ between ranks, CUDA and NVML."""
        by_id = {
            number: {gpu.bus_id or bus_id(gpu.device): gpu for gpu in node.gpus} for number, node in self.nodes.items()
        }
        return [by_id.get(gpu.node, {}).get(bus_id(gpu.gpu_bus_id or "")) for gpu in self.gpus]

    @cached_property
    def _domains(self) -> list[tuple[str, int | None] | None]:
        return [None if gpu is None or gpu.fabric is None else gpu.fabric.domain for gpu in self._found]

    @cached_property
    def _nvlink_totals(self) -> list[Limit]:
        """Kept, as each GPU of a rack is asked for them once for each of the others."""
        return [
            Limit(None, _NOT_DESCRIBED) if gpu is None else self.nodes[place.node].nvlink_total(gpu)
            for place, gpu in zip(self.gpus, self._found, strict=True)
        ]

    def _node(self, pair: Pair) -> Topology:
        return self.nodes[self.gpus[pair[0]].node]
