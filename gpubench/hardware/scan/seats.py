"""Which ranks are on which node, and where their rails sit in rings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpubench.hardware.scan.messages import Seat
from gpubench.model.results.scan_rounds import NodeRail


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks of every node, and the rails of every rank: all rails of a node on one rank, or one a rank."""

    ranks_by_node: tuple[tuple[int, ...], ...]
    rails_by_rank: tuple[tuple[int, ...], ...]

    @property
    def node_by_rank(self) -> dict[int, int]:
        """The node of every rank."""
        return {rank: node for node, ranks in enumerate(self.ranks_by_node) for rank in ranks}

    @property
    def rank_by_rail(self) -> dict[NodeRail, int]:
        """The rank that has a rail of a node."""
        return {
            NodeRail(node, rail): rank for rank, node in self.node_by_rank.items() for rail in self.rails_by_rank[rank]
        }


def seats(rings: Sequence[Sequence[NodeRail]], rank_by_rail: Mapping[NodeRail, int]) -> dict[int, tuple[Seat, ...]]:
    """The seats of every rank in these rings; a rail has one at most."""
    found: dict[int, tuple[Seat, ...]] = {}
    for ring in rings:
        for place, cell in enumerate(ring):
            before, after = ring[place - 1], ring[(place + 1) % len(ring)]
            seat = Seat(cell.rail, rank_by_rail[before], before.rail, rank_by_rail[after], after.rail, place, len(ring))
            rank = rank_by_rail[cell]
            found[rank] = (*found.get(rank, ()), seat)
    return found
