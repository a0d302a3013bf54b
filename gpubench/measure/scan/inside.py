"""Phase 0 between the rails of a node: every pair of them, as many at once as there are, then an all-reduce of all.

All nodes measure at once, and each by itself: no network takes part.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from gpubench.measure.scan.schedule import circle_round
from gpubench.model.results.scan_rounds import LocalFigure, LocalQuantity, NodeRail, RingOutcome

FAILURES_THAT_RETIRE = 2
"""A rail that failed so often, with another one each time, takes part in nothing more: every time costs a deadline."""


class RingMeasurer(Protocol):
    """Measures rings of rails."""

    def rings(
        self, rings: Sequence[Sequence[NodeRail]], *, all_reduce: bool = False, told_later: bool = False
    ) -> list[RingOutcome]:
        """All of them at once, within a deadline; never raises for a worker that dies or hangs."""
        ...


class InsideNodes:
    """What the rails of nodes deliver among each other. A rail that failed, or whose worker died, is left out after."""

    def __init__(self, measurer: RingMeasurer, nodes: Sequence[int], rails: int) -> None:
        self._measurer, self._nodes, self._rails = measurer, nodes, rails
        self._out: set[NodeRail] = set()
        self._failed: dict[NodeRail, list[LocalFigure]] = {}

    def figures(self) -> list[LocalFigure]:
        """The figures of all nodes; of rails that failed before and are not tried again, those of then."""
        if self._rails < 2:
            return []
        found = [each for number in range(self._rails - 1 + self._rails % 2) for each in self._pairs(number)]
        found += self._all_reduce()
        known = {each.place for each in found}
        return [*found, *(each for each in self._given_up() if each.place not in known)]

    def _pairs(self, number: int) -> Iterator[LocalFigure]:
        """A matching of the rails of every node."""
        pairs = [
            (NodeRail(node, min(pair)), NodeRail(node, max(pair)))
            for node in self._nodes
            for pair in circle_round(number, range(self._rails))
        ]
        for pair, outcome in self._measured([pair for pair in pairs if self._out.isdisjoint(pair)], all_reduce=False):
            (node, one), (_, other) = pair
            failure = next(iter(outcome.failures.values())).seen if outcome.failures else ""
            figure = LocalFigure(node, one, LocalQuantity.PAIR, outcome.gb_s, other, failure)
            yield figure
            for cell in pair if failure else ():
                self._failed.setdefault(cell, []).append(figure)
                if len({each.place for each in self._failed[cell]}) >= FAILURES_THAT_RETIRE:
                    self._out.add(cell)

    def _all_reduce(self) -> Iterator[LocalFigure]:
        """Of all rails of every node of which none is left out."""
        rings = [[NodeRail(node, rail) for rail in range(self._rails)] for node in self._nodes]
        whole = [ring for ring in rings if self._out.isdisjoint(ring)]
        for ring, outcome in self._measured(whole, all_reduce=True):
            failure = next(iter(outcome.failures.values())).seen if outcome.failures else ""
            yield LocalFigure(ring[0].node, 0, LocalQuantity.ALL_REDUCE, outcome.gb_s, None, failure)

    def _measured(
        self, rings: Sequence[Sequence[NodeRail]], *, all_reduce: bool
    ) -> Iterator[tuple[Sequence[NodeRail], RingOutcome]]:
        """The outcomes that tell of links; that a worker died by itself is left to the first round."""
        if not rings:
            return
        for ring, outcome in zip(
            rings, self._measurer.rings(rings, all_reduce=all_reduce, told_later=True), strict=True
        ):
            own = {cell for cell, failure in outcome.failures.items() if failure.is_own}
            self._out |= own
            if not own:
                yield ring, outcome

    def _given_up(self) -> Iterator[LocalFigure]:
        return (each for cell in sorted(self._out & self._failed.keys()) for each in self._failed[cell])
