"""Scores of cells: what a rail of a node delivers with several partners, as a share of what all others do.

A pair is as slow as its slower end, and a transient dip makes it slower still: what disturbs a figure only ever lowers
it. So the score is the mean of the upper half of a cell's figures, which one bad partner or dip of three, or two of
five, does not move, and which is sharper than their median: benchmarks/scan_confusion.py has both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import NormalDist, fmean, median

from gpubench.model.results.scan_rounds import NodeRail, PairSample, ScanFabric

LEAST_CELLS = 16
"""Fewer have no level of their own inside leaves and across: both are taken together."""

_GAP_OF_THREE, _NEAREST_OF_THREE = 0.6895, 0.3606
"""The median distance of the two highest, and of the two nearest, of three normal values in standard deviations; by
simulation."""

_DEVIATION_OF_THREE = 0.6244
"""The standard deviation of the mean of the two highest of three normal values; by simulation."""

_UPPER_QUARTILE = 0.6745

_FEW_FIGURES, _FEW_NODES = 10, 9
"""Few cells tell little of the noise, and few nodes little of what is usual: see `_caution`."""


def upper_mean(values: Sequence[float]) -> float:
    """The mean of the upper half of some values, of an odd number the larger half."""
    ordered = sorted(values)
    return fmean(ordered[len(ordered) // 2 :])


@cache
def upper_excess(count: int) -> float:
    """By how many standard deviations the upper mean of so many normal values is above their mean (Blom, 1958)."""
    places = range(count // 2 + 1, count + 1)
    return fmean(NormalDist().inv_cdf((place - 0.375) / (count + 0.25)) for place in places)


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What healthy cells deliver: GB/s by rail and whether both ends hang on one leaf, and the deviation of a figure.

    `deviation` is that of one figure, as a share of it. `slow_leaves` is what is left of it by leaf, rail and whether
    both ends hang on that leaf, where a whole leaf is slow: a cell is then held against the others of its leaf.
    """

    centres: Mapping[tuple[int, bool], float]
    deviation: float
    slow_leaves: Mapping[tuple[str, int, bool], float] = field(default_factory=dict)

    def share(self, fabric: ScanFabric, sample: PairSample) -> float:
        """A figure as a share of what is usual; 0 where there is none."""
        first, second, rail, gb_s = sample[:4]
        inside = fabric.inside(first, second)
        usual = self.centres.get((rail, inside), 0.0)
        if self.slow_leaves:
            usual *= min(
                self.slow_leaves.get((leaf, rail, inside), 1.0)
                for leaf in (fabric.leaves[first] or "", fabric.leaves[second] or "")
            )
        return gb_s / usual if usual > 0 else 0.0

    def score(self, shares: Sequence[float]) -> float:
        """The score of a cell with these shares: 1 is as the others are."""
        return upper_mean(shares) / (1 + upper_excess(len(shares)) * self.deviation)


Shares = dict[NodeRail, list[float]]


def shares_of(fabric: ScanFabric, yardstick: Yardstick, samples: Iterable[PairSample]) -> Shares:
    """The shares of every cell; a failure counts as nothing, for the node that it is known to be of, else for both."""
    found: Shares = {}
    for sample in samples:
        share = yardstick.share(fabric, sample)
        for node in (sample.first, sample.second):
            if not sample.failure or sample.culprit in (None, node):
                found.setdefault(NodeRail(node, sample.rail), []).append(share)
    return found


def screening_yardstick(fabric: ScanFabric, samples: Sequence[PairSample]) -> Yardstick:
    """What is usual, from a screening of which most cells are healthy, though half of all pairs may not be."""
    measured = [each for each in samples if not each.failure]
    by_class: dict[tuple[int, bool], Shares] = {}
    for sample in measured:
        key = sample.rail, fabric.inside(sample.first, sample.second)
        for node in (sample.first, sample.second):
            by_class.setdefault(key, {}).setdefault(NodeRail(node, sample.rail), []).append(sample.gb_s)
    centres = {key: _level(_merged(by_class, key), 0.0) for key in by_class}
    rough = Yardstick(centres, 0.0)
    deviation = _within(shares_of(fabric, rough, measured)) * _caution(measured)
    centres = {key: _level(_merged(by_class, key), deviation) for key in by_class}
    found = Yardstick(centres, deviation)
    return replace(found, deviation=max(deviation, _between(found, shares_of(fabric, found, measured))))


def _caution(samples: Sequence[PairSample]) -> float:
    """How many times the noise that is seen counts: of four nodes of one rail 4, of 64 of four rails 1.04.

    With that about one scan in a hundred of 3 to 16 healthy nodes names any.
    """
    nodes = len({node for each in samples for node in each[:2]})
    return (1 + _FEW_FIGURES / max(1, len(samples))) * (1 + _FEW_NODES / max(1, nodes) ** 2)


def round_yardstick(
    fabric: ScanFabric, samples: Sequence[PairSample], good: frozenset[int], usual: Yardstick
) -> Yardstick:
    """The same from pairs of good nodes, where these are many; else as in the screening."""
    by_class: dict[tuple[int, bool], list[float]] = {}
    for sample in samples:
        if sample.first in good and sample.second in good and not sample.failure:
            key = sample.rail, fabric.inside(sample.first, sample.second)
            by_class.setdefault(key, []).append(sample.gb_s)
    own = {key: median(values) for key, values in by_class.items() if len(values) >= LEAST_CELLS}
    return replace(usual, centres={**usual.centres, **own})


def _merged(by_class: Mapping[tuple[int, bool], Shares], key: tuple[int, bool]) -> Shares:
    """The figures of a class of pairs; of few nodes all figures of the rail."""
    own = by_class[key]
    other = by_class.get((key[0], not key[1]), {})
    if not other or min(len(own), len(other)) >= LEAST_CELLS:
        return own
    return {cell: [*own.get(cell, ()), *other.get(cell, ())] for cell in {*own, *other}}


def _level(figures: Shares, deviation: float) -> float:
    return median(upper_mean(each) / (1 + upper_excess(len(each)) * deviation) for each in figures.values())


def _within(shares: Shares) -> float:
    """The deviation of a figure from the next: of the two highest of a cell, which a bad partner did not lower.

    Three nodes have two figures each; of a rail the two figures that are nearest to each other have no bad partner, or
    the same.
    """
    three = [sorted(each)[-2:] for each in shares.values() if len(each) >= 3]
    gaps = [(high - low) / high for low, high in three if high > 0]
    if gaps:
        return median(gaps) / _GAP_OF_THREE
    nearest: dict[int, float] = {}
    for cell, own in shares.items():
        if len(own) == 2 and max(own) > 0:
            gap = (max(own) - min(own)) / max(own)
            nearest[cell.rail] = min(gap, nearest.get(cell.rail, gap))
    return median(nearest.values()) / _NEAREST_OF_THREE if nearest else 0.0


def _between(yardstick: Yardstick, shares: Shares) -> float:
    """The deviation of a figure that the better half of all cells has from each other, lasting differences included."""
    scores = sorted(yardstick.score(each) for each in shares.values() if len(each) == 3)
    if len(scores) < LEAST_CELLS:
        return 0.0
    upper, middle = scores[len(scores) * 3 // 4], scores[len(scores) // 2]
    return (upper - middle) / _UPPER_QUARTILE / _DEVIATION_OF_THREE
