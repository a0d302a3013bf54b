"""Phase 4: one collective of all nodes beside what their cells predict, and where it falls short, which groups do."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpubench.measure.scan.rounds import ScanCourse

DEVIATIONS, LEAST_LOSS = 5.0, 0.1
"""A collective is looked into that is so many deviations of a figure, and at least this share, below what is predicted:
it is as slow as the slowest of many figures."""

_LEAST_NODES, _LEAST_SCORE = 4, 0.1


@dataclass(frozen=True, slots=True)
class CollectiveOfNodes:
    """A collective of some nodes: GB/s that pass a node on all rails, both ways, measured, and as its cells allow."""

    name: str
    nodes: tuple[int, ...]
    gb_s: float | None
    predicted_gb_s: float
    least_share: float
    failure: str = ""

    @property
    def share(self) -> float:
        """Measured over predicted; 0 where nothing was measured."""
        return (self.gb_s or 0.0) / self.predicted_gb_s if self.predicted_gb_s else 0.0

    @property
    def falls_short(self) -> bool:
        """True where it reaches less than its parts allow, or nothing."""
        return self.gb_s is None or self.share < self.least_share


MeasureCollective = Callable[[Sequence[int]], tuple[float | None, str]]
"""GB/s of a collective of these nodes, or why there is none."""


def predicted_gb_s(course: ScanCourse, nodes: Sequence[int]) -> float:
    """What a ring of these nodes over every rail reaches: on all rails what the slowest cell does.

    Every rail carries the same share of the bytes, and each ring is as slow as its slowest node: the figure is the
    smallest share of all cells times the sum of what is usual on the rails.
    """
    rails = course.fabric.rails
    usual = [gb_s for rail in range(rails) for gb_s in [_usual(course, rail)] if gb_s]
    taking_part = set(nodes)
    confirmed = [each.score for cell, each in course.confirmed.items() if cell.node in taking_part]
    slow_leaves = [
        level.across
        for level in course.slow_leaves
        if level.across is not None and any(course.fabric.leaves[node] == level.leaf for node in nodes)
    ]
    return sum(usual) * min([1.0, *confirmed, *slow_leaves])


def collectives(course: ScanCourse, seed: int, measure: MeasureCollective) -> Iterator[CollectiveOfNodes]:
    """All nodes that are well enough to take part; where they fall short, both halves and two mixed halves.

    Nodes that hang, and those with a rail that carries next to nothing, would stop all others.
    """
    left_out = {cell.node for cell in course.retired()}
    left_out |= {cell.node for cell, each in course.confirmed.items() if each.score < _LEAST_SCORE}
    nodes = [node for node in course.living() if node not in left_out]
    whole = _measured(course, "all", nodes, measure)
    yield whole
    if not whole.falls_short or len(nodes) < _LEAST_NODES:
        return
    half = len(nodes) // 2
    mixed = list(nodes)
    random.Random(f"{seed}/halves").shuffle(mixed)
    for name, members in (
        ("first half", nodes[:half]),
        ("second half", nodes[half:]),
        ("mixed half", sorted(mixed[:half])),
        ("other mixed half", sorted(mixed[half:])),
    ):
        yield _measured(course, name, members, measure)


def _measured(course: ScanCourse, name: str, nodes: Sequence[int], measure: MeasureCollective) -> CollectiveOfNodes:
    gb_s, failure = measure(nodes)
    least = 1 - max(DEVIATIONS * course.yardstick.deviation, LEAST_LOSS)
    return CollectiveOfNodes(name, tuple(nodes), gb_s, predicted_gb_s(course, nodes), least, failure)


def _usual(course: ScanCourse, rail: int) -> float | None:
    centres = course.yardstick.centres
    return centres.get((rail, False), centres.get((rail, True)))
