"""Two levels of ranks: those of a node, and those with the same place in different nodes."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from gpubench.errors import UsageError
from gpubench.model.terms.operation import DataType, NumberKind, ReduceOp

OPTION = "--hierarchical"


@dataclass(frozen=True, slots=True)
class TwoLevels:
    """Of every rank the number of its node and its place in there; every node has as many ranks."""

    nodes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def node_count(self) -> int:
        """Nodes, at least two."""
        return max(self.nodes) + 1

    @property
    def ranks_a_node(self) -> int:
        """Ranks in each node, at least two."""
        return max(self.places) + 1

    @classmethod
    def of(cls, node_by_rank: Sequence[Hashable]) -> "TwoLevels":
        """From what names each rank's node.

        Raises UsageError for a single node, a single rank a node, or nodes with different numbers of ranks.
        """
        numbers = {node: number for number, node in enumerate(dict.fromkeys(node_by_rank))}
        nodes = tuple(numbers[node] for node in node_by_rank)
        members = [0] * len(numbers)
        places = []
        for node in nodes:
            places.append(members[node])
            members[node] += 1
        counts = sorted(set(members))
        if len(numbers) < 2:
            raise _cannot(f"all {len(nodes)} ranks are on one node", "a launcher that starts ranks on several hosts")
        if len(counts) > 1:
            seen = f"nodes have from {counts[0]} to {counts[-1]} ranks"
            raise _cannot(seen, f"as many ranks on every node, e.g. mpirun --map-by ppr:{counts[0]}:node")
        if counts[0] < 2:
            raise _cannot("every node has a single rank", "leave it out: flat and hierarchical are the same there")
        return cls(nodes, tuple(places))

    def check_averages(self, ops: Sequence[ReduceOp], dtypes: Sequence[DataType]) -> None:
        """Raise UsageError for averages of averages that are not the average of all.

        Integers lose a remainder in every node; floats are rounded twice, but for powers of two.
        """
        integers = [dtype for dtype in dtypes if dtype.kind is not NumberKind.FLOAT]
        inexact = any(count & (count - 1) for count in (self.node_count, self.ranks_a_node))
        if ReduceOp.AVG in ops and (integers or inexact):
            what = f"of {integers[0]}" if integers else f"over {self.node_count} nodes of {self.ranks_a_node} ranks"
            raise UsageError(
                f"{OPTION} with --op avg {what}",
                expected="floats, and powers of two: only there is an average of averages exact",
                next_step="--op sum",
            )


def _cannot(seen: str, next_step: str) -> UsageError:
    return UsageError(
        f"{OPTION}, but {seen}",
        expected="two nodes or more, with the same number of ranks, two or more",
        reason="it reduces inside nodes first, then between ranks with the same place in their nodes",
        next_step=next_step,
    )
