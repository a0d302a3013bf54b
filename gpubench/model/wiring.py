"""What the machines of a job allow between the GPUs of its ranks: could a path be direct, and what does it carry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpubench.model.evidence import Evidence, State
from gpubench.model.peer_policy import nccl_keeps_off, refusal_of
from gpubench.model.report import RankIdentity
from gpubench.model.selection import Pair
from gpubench.model.snapshot import GpuFacts, NicFacts, bus_id
from gpubench.model.topology import UNKNOWN_PATH, Limit, Topology

NETWORK = "NET"

_ACTIVE = "active"
_NOT_DESCRIBED = "nothing described these GPUs"


@dataclass(frozen=True)
class Wiring:
    """The ranks with their GPUs, and their nodes by number, those of which something is known."""

    ranks: Sequence[RankIdentity]
    nodes: Mapping[int, Topology]

    def together(self, pair: Pair) -> bool:
        """Whether both ranks run on one node."""
        return self.ranks[pair[0]].node == self.ranks[pair[1]].node

    def path(self, pair: Pair) -> str:
        """The path class; NET between nodes."""
        if not self.together(pair):
            return NETWORK
        gpus = self._gpus(pair)
        return UNKNOWN_PATH if gpus is None else self._node(pair).path(*gpus)

    def limit(self, pair: Pair) -> Limit:
        """The ceiling of a pair on one node, in GB/s per direction."""
        if not self.together(pair):
            return Limit(None, "between nodes it depends on which NICs NCCL takes")
        gpus = self._gpus(pair)
        return Limit(None, _NOT_DESCRIBED) if gpus is None else self._node(pair).limit(*gpus)

    def has_nvlinks(self, pair: Pair) -> bool:
        """Whether NVLinks join a pair."""
        gpus = self._gpus(pair) if self.together(pair) else None
        return gpus is not None and bool(self._node(pair).nvlinks(*gpus))

    def through_host_gb_s(self, pair: Pair) -> float | None:
        """What a pair carries at most through host memory: the narrower of both GPUs' ways to it, if they are known."""
        gpus = self._gpus(pair)
        if gpus is None:
            return None
        totals = [self._node(pair).pcie_total(gpu).gb_s for gpu in gpus]
        known = [total for total in totals if total is not None]
        return min(known) if len(known) == len(totals) else None

    def capability(self, pair: Pair) -> Evidence:
        """Whether the path of a pair could be direct."""
        if not self.together(pair):
            return self._capability_between_nodes(pair)
        gpus = self._gpus(pair)
        if gpus is None:
            return Evidence(seen=_NOT_DESCRIBED)
        access = self._node(pair).peer_access(*gpus)
        if access.possible is None:
            return Evidence(seen=access.reason)
        seen = f"{self.path(pair)}, peer access {access.reason}"
        return Evidence(State.PRESENT if access.possible else State.CONTRADICTING, seen)

    def by_design(self, pair: Pair) -> str:
        """Why a pair goes through host memory where that is no fault; empty where it would be one."""
        if not self.together(pair):
            bare = self._nodes_without_rdma(pair)
            return f"no RDMA NIC is active on {', '.join(bare)}" if bare else ""
        gpus = self._gpus(pair)
        if gpus is None:
            return ""
        node = self._node(pair)
        access = node.peer_access(*gpus)
        if access.possible is False:
            refusal = refusal_of(node, *gpus, access)
            return refusal.reason if refusal.by_design else ""
        return nccl_keeps_off(node, *gpus)

    def rdma_nics(self, rank: int) -> list[NicFacts]:
        """The RDMA NICs of a rank's node that are up."""
        return self._nics.get(self.ranks[rank].node, [])

    @cached_property
    def _nics(self) -> dict[int, list[NicFacts]]:
        return {
            number: [nic for nic in node.nics if nic.rdma and nic.state in (_ACTIVE, None)]
            for number, node in self.nodes.items()
        }

    @cached_property
    def _between_nodes(self) -> dict[tuple[int, int], Evidence]:
        """What was found out of pairs of nodes: it is the same for all their ranks."""
        return {}

    def _capability_between_nodes(self, pair: Pair) -> Evidence:
        nodes = self.ranks[pair[0]].node, self.ranks[pair[1]].node
        if nodes not in self._between_nodes:
            self._between_nodes[nodes] = self._capability_of_nodes(pair)
        return self._between_nodes[nodes]

    def _capability_of_nodes(self, pair: Pair) -> Evidence:
        bare = self._nodes_without_rdma(pair)
        if bare:
            return Evidence(State.CONTRADICTING, f"no RDMA NIC is active on {', '.join(bare)}")
        answers = [
            [(self.nodes[self.ranks[rank].node].gpudirect(nic), nic.name) for nic in self.rdma_nics(rank)]
            for rank in pair
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
        ranks = (self.ranks[rank] for rank in pair)
        return list(
            dict.fromkeys(each.host for each in ranks if each.node in self.nodes and not self.rdma_nics(each.rank))
        )

    def _gpus(self, pair: Pair) -> tuple[GpuFacts, GpuFacts] | None:
        source, destination = (self._found[rank] for rank in pair)
        return None if source is None or destination is None else (source, destination)

    @cached_property
    def _found(self) -> list[GpuFacts | None]:
        """What is known of each rank's GPU, by its bus id: CUDA's and the driver's indices differ between ranks."""
        gpus = {number: {gpu.bus_id: gpu for gpu in node.gpus} for number, node in self.nodes.items()}
        return [gpus.get(rank.node, {}).get(bus_id(rank.gpu_bus_id or "")) for rank in self.ranks]

    def _node(self, pair: Pair) -> Topology:
        return self.nodes[self.ranks[pair[0]].node]
