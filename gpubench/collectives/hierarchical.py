"""An all-reduce made of smaller ones: reduce-scatter in the node, all-reduce across nodes, all-gather in the node.

Only an L-th of the data crosses nodes per rank, of L ranks in a node, and between ranks with the same place: what
frameworks do by hand where the network is the narrow part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpubench.collectives.record import Call, per_rank_count
from gpubench.model.terms.operation import DataType
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch
from gpubench.ports.memory import Region


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One rank's part: the collectives among all ranks, in its node, and among the ranks with its place in theirs."""

    whole: CollectiveCalls
    node: CollectiveCalls
    across: CollectiveCalls
    place: int
    ranks_a_node: int
    in_order: Callable[[Sequence[Launch]], Launch]

    @staticmethod
    def fits(count: int, dtype: DataType, ranks_a_node: int) -> bool:
        """True where there is a block for every rank of a node; of less nothing would be hierarchical."""
        return per_rank_count(count, dtype, ranks_a_node) > 0

    def all_reduce(self, call: Call) -> Launch:
        """The operation, in place where the call is; it has to fit. What 16-byte blocks leave over is reduced flat."""
        block = per_rank_count(call.count, call.dtype, self.ranks_a_node)
        own = _from(call.receive, self.place * block, call.dtype)
        parts = [
            self.node.reduce_scatter(call.send, own, block, call.dtype, call.op),
            self.across.all_reduce(own, own, block, call.dtype, call.op),
            self.node.all_gather(own, call.receive, block, call.dtype),
        ]
        done = block * self.ranks_a_node
        if done < call.count:
            send, receive = (_from(region, done, call.dtype) for region in (call.send, call.receive))
            parts.append(self.whole.all_reduce(send, receive, call.count - done, call.dtype, call.op))
        return self.in_order(parts)


def _from(region: Region, elements: int, dtype: DataType) -> Region:
    return Region(region.memory, region.offset_bytes + elements * dtype.size_bytes)
