"""Whole leaves that are slow: a loss too small to see on one cell stands out in the mean of all cells of a leaf."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median

from gpubench.measure.scan.scores import Yardstick
from gpubench.model.results.scan_rounds import PairSample, ScanFabric

LEAST_NODES, LEAST_LEAVES = 4, 3
"""Fewer nodes are judged one by one; of two leaves nobody can say which one's uplink is slow."""

STANDARD_ERRORS = 5.0
"""By so many standard errors of its median a leaf has to be slow: by chance one in three million is."""

LEAST_LOSS = 0.015
"""And by this much: one of 32 uplinks is 3 %."""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean, of normal values."""


@dataclass(frozen=True, slots=True)
class LeafLevel:
    """What a rail of a leaf delivers, inside and across, as shares of what is usual; None where nobody measured."""

    leaf: str
    rail: int
    inside: float | None
    across: float | None

    @property
    def is_uplink(self) -> bool:
        """True where only what leaves the leaf is slow: inside is nearer to what is usual than to that."""
        return self.across is not None and (self.inside is None or self.inside > (1 + self.across) / 2)


def slow_leaves(
    fabric: ScanFabric, yardstick: Yardstick, samples: Sequence[PairSample], good: Set[int] | None = None
) -> list[LeafLevel]:
    """The rails of leaves that are slow; with `good`, by figures across with these alone."""
    if len(set(filter(None, fabric.leaves))) < LEAST_LEAVES:
        return []
    plain = replace(yardstick, slow_leaves={})
    values = _by_leaf(fabric, plain, samples, good)
    found = []
    for leaf, rail in {key[:2]: None for key in values}:
        levels = {}
        slow = False
        for inside in (True, False):
            shares = values.get((leaf, rail, inside), [])
            levels[inside] = median(shares) if shares else None
            slow = slow or _is_slow(shares, yardstick.deviation)
        if slow:
            found.append(LeafLevel(leaf, rail, levels[True], levels[False]))
    return found


def with_slow_leaves(yardstick: Yardstick, levels: Iterable[LeafLevel]) -> Yardstick:
    """The yardstick that holds cells of slow leaves against the others of their leaf."""
    offsets: dict[tuple[str, int, bool], float] = {}
    for each in levels:
        if each.across is not None:
            offsets[each.leaf, each.rail, False] = min(1.0, each.across)
        if each.inside is not None and not each.is_uplink:
            offsets[each.leaf, each.rail, True] = min(1.0, each.inside)
    return replace(yardstick, slow_leaves=offsets)


def _by_leaf(
    fabric: ScanFabric, yardstick: Yardstick, samples: Iterable[PairSample], good: Set[int] | None
) -> Mapping[tuple[str, int, bool], list[float]]:
    members: dict[str, int] = {}
    for leaf in fabric.leaves:
        if leaf is not None:
            members[leaf] = members.get(leaf, 0) + 1
    values: dict[tuple[str, int, bool], list[float]] = {}
    for sample in samples:
        first, second, rail = sample[:3]
        inside = fabric.inside(first, second)
        if sample.failure or (good is not None and not inside and (first in good) == (second in good)):
            continue
        share = yardstick.share(fabric, sample)
        for leaf in {fabric.leaves[first], fabric.leaves[second]}:
            if leaf is not None and members[leaf] >= LEAST_NODES:
                values.setdefault((leaf, rail, inside), []).append(share)
    return values


def _is_slow(shares: Sequence[float], deviation: float) -> bool:
    if len(shares) < LEAST_NODES:
        return False
    error = MEDIAN_ERROR * deviation / math.sqrt(len(shares))
    return 1 - median(shares) > max(STANDARD_ERRORS * error, LEAST_LOSS)
