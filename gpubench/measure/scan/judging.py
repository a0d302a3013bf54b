"""Which cells are suspects, and which of them are confirmed: by thresholds in deviations of one figure.

The thresholds are those that benchmarks/scan_confusion.py shows: at 4,096 nodes of eight rails, fewer than one run in
ten names a healthy cell, and at a noise of 2 % more than nine of ten losses of 5 % are named.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from gpubench.measure.scan.scores import Yardstick, shares_of
from gpubench.model.results.scan_rounds import NodeRail, PairSample, ScanFabric, ScanPhase

DEVIATIONS: Mapping[ScanPhase, float] = {
    ScanPhase.SCREENING: 1.2,
    ScanPhase.SUSPECTS: 1.2,
    ScanPhase.CONFIRMATION: 1.5,
}
"""How many deviations of one figure a score has to be below 1."""

LEAST_LOSS: Mapping[ScanPhase, float] = {
    ScanPhase.SCREENING: 0.02,
    ScanPhase.SUSPECTS: 0.02,
    ScanPhase.CONFIRMATION: 0.03,
}
"""And at least this much, however quiet the figures are: cells that differ by less are no fault."""

LEAST_FIGURES = 3
"""Figures with known good partners without which nothing is confirmed."""

SURE_DEVIATIONS = 3.0
"""A loss of so many deviations of one figure is found 99 times of 100: benchmarks/scan_confusion.py."""


@dataclass(frozen=True, slots=True)
class CellScore:
    """The score of a cell in a phase: 1 is as the others are. `failures` are rounds without a figure."""

    score: float
    figures: int
    failures: int


def threshold(phase: ScanPhase, deviation: float) -> float:
    """The loss from which a cell is a suspect, or confirmed."""
    return max(DEVIATIONS[phase] * deviation, LEAST_LOSS[phase])


def smallest_sure_loss(deviation: float) -> float:
    """The loss that a scan with figures of that deviation finds 99 times of 100."""
    return max(SURE_DEVIATIONS * deviation, LEAST_LOSS[ScanPhase.CONFIRMATION] + 1.5 * deviation)


def scores(
    fabric: ScanFabric,
    yardstick: Yardstick,
    samples: Sequence[PairSample],
    good: Set[int] | None = None,
) -> dict[NodeRail, CellScore]:
    """The score of every cell; with `good`, of other nodes than these, by their figures with these."""
    if good is not None:
        samples = [each for each in samples if (each.first in good) != (each.second in good)]
    failures: dict[NodeRail, int] = {}
    for sample in samples:
        if sample.failure:
            for node in {sample.first, sample.second} if sample.culprit is None else {sample.culprit}:
                cell = NodeRail(node, sample.rail)
                failures[cell] = failures.get(cell, 0) + 1
    found = shares_of(fabric, yardstick, samples)
    return {
        cell: CellScore(yardstick.score(shares), len(shares), failures.get(cell, 0))
        for cell, shares in found.items()
        if good is None or cell.node not in good
    }


def falls_behind(phase: ScanPhase, deviation: float, scores_: Mapping[NodeRail, CellScore]) -> list[NodeRail]:
    """The cells below the threshold of a phase; of the first two also those that failed in any round."""
    least = 1 - threshold(phase, deviation)
    is_last = phase is ScanPhase.CONFIRMATION
    return [
        cell
        for cell, each in scores_.items()
        if (each.score < least and (not is_last or each.figures >= LEAST_FIGURES)) or (each.failures and not is_last)
    ]
