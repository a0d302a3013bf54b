"""The noise of a comparison: by how much its rows differ by chance, as their own files show it.

Where a side has several runs, by how these differ; else by how unsteadily the change runs from size to size, which no
real change of many sizes moves; among pairs of devices by how much the pairs differ. Neighbours lend each other what
they know: a row alone has too few figures.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter
from statistics import median

from gpubench.measure.compare.rows import RunFigures, RunsByRow
from gpubench.measure.compare.single_runs import is_over_network, single_run_floor, with_usual_noise
from gpubench.model.results.row_keys import siblings
from gpubench.model.results.rows.comparison import RowKey
from gpubench.model.terms.statistics.noise import Noise, robust_deviation

NEIGHBOURS = 6
"""Sizes on either side that lend a size their noise: it grows from large sizes to small ones."""

LEAST_FREEDOM, LEAST_VALUES = 4, 6
"""So many degrees of freedom or figures have to be there for a standard deviation that is worth something."""

REPEATED_RUNS = 3
"""From so many runs a side on, what differs from run to run is known, and the floor for single runs falls away."""

TESTS = 2
"""Rows are judged one by one and in ranges; each may use half of the false alarms."""

SETTLED_RUNS = 5
"""From so many runs a side on, a row that is slower alone is slower."""

DENSE_ROWS, _APART = 8, math.sqrt(2)
"""A sweep is one of small steps where so many rows are within half an octave of a size."""

FLOOR = 0.01
"""A smaller change is none that anybody looks for."""

_USUAL = "what single runs usually differ by"
"""The source of noise where the files do not show enough."""

_NORMAL_MEDIAN, _MEDIAN_EFFICIENCY = 1.4826, 0.37
"""A normal deviation over the median distance from its centre, and how much of the figures that median makes use of."""

OWN_SPREAD = "the rows' own spread"
"""The source of a bound that a run brought along itself; others are of runs that were seen."""


@dataclass(frozen=True, slots=True)
class NoiseBound:
    """The least change that counts, as a part of the time, and its source in words."""

    share: float
    source: str


class ChangeNoise:
    """The noise of every row that both sides have.

    `files` is how many files either side has, None where every run is one: what a file repeats is of one process, and
    does not show what one run differs by from another as a whole. `other_hosts`: the sides ran elsewhere.
    """

    def __init__(
        self, base: RunsByRow, new: RunsByRow, *, other_hosts: bool = False, files: tuple[int, int] | None = None
    ) -> None:
        self._other_hosts = other_hosts
        self._files = files
        self._logs = {
            key: (logs_of(base[key]), logs_of(new[key]))
            for key in base
            if key in new and logs_of(base[key]) and logs_of(new[key])
        }
        self._within = {key: _within(base[key], new[key]) for key in self._logs}
        self._family: dict[RowKey, Sequence[RowKey]] = {key: each for each in siblings(self._logs) for key in each}
        self._by_size: dict[int, _RowsBySize] = {}
        self._found: dict[tuple[int, int], tuple[Noise | None, Noise | None]] = {}

    @property
    def keys(self) -> Collection[RowKey]:
        """The rows that have times on both sides."""
        return self._logs.keys()

    def runs(self, key: RowKey) -> tuple[int, int]:
        """The runs of both sides; what one file repeats is one."""
        base, new = map(len, self._logs[key])
        return (base, new) if self._files is None else (min(base, self._files[0]), min(new, self._files[1]))

    def shows_whole_runs(self, key: RowKey) -> bool:
        """True where both sides have runs enough to show what whole runs differ by: not what other nodes do."""
        return min(self.runs(key)) >= REPEATED_RUNS and not (self._other_hosts and is_over_network(key))

    def floor(self, key: RowKey, time_us: float) -> float:
        """By how much single runs of a row differ as a whole; `time_us` is what it takes."""
        return single_run_floor(key, time_us, other_hosts=self._other_hosts)

    def of_change(self, key: RowKey) -> Noise | None:
        """The noise of a row's change; None where too few rows tell."""
        return self._noise(key)[0]

    def change(self, key: RowKey) -> float | None:
        """The logarithm of the new time over the old one; None where a side has none."""
        if key not in self._logs:
            return None
        base, new = self._logs[key]
        return median(new) - median(base)

    def bound(self, key: RowKey, time_us: float) -> NoiseBound:
        """The least change of a row that counts; `time_us` is the old time."""
        floor, floor_source = self._floor(key, time_us)
        candidates = [NoiseBound(floor, floor_source)]
        noise, source = self._noise(key)
        if noise is not None:
            candidates.append(NoiseBound(math.expm1(min(5.0, noise.bound(TESTS * len(self._logs)))), source))
        within = self._within[key]
        if within is not None:
            own = Noise(within, math.inf).bound(TESTS * len(self._logs))
            candidates.append(NoiseBound(math.expm1(min(5.0, own)), OWN_SPREAD))
        return max(candidates, key=lambda each: each.share)

    def is_isolated(self, key: RowKey) -> bool:
        """True where a row of a collective is slower, and neither its other placement nor the next sizes are.

        In a sweep of small steps also where these are, and most rows of about its size are not: what is measured one
        after the other has a hiccup in common. False where there are no such rows to ask, or so many runs that no two
        hiccups make their median.
        """
        base, new = self._logs[key]
        if key.collective is None or min(len(base), len(new)) >= SETTLED_RUNS:
            return False
        half = (self.change(key) or 0.0) / 2
        beside = [(self.change(each) or 0.0) >= half for each in self._beside(key)]
        if beside and not any(beside):
            return True
        near = [(self.change(each) or 0.0) >= half for each in self._half_an_octave(key)]
        return len(near) >= DENSE_ROWS and sum(near) < len(near) / 4

    def _beside(self, key: RowKey) -> Iterator[RowKey]:
        """The other placement of a row, and the next sizes of the same placement."""
        for each in self._sizes(key).near(key.size_bytes or 0, 1):
            alike = each.size_bytes == key.size_bytes or each.placement == key.placement
            if each != key and alike:
                yield each

    def _half_an_octave(self, key: RowKey) -> Iterator[RowKey]:
        """All rows whose size is not far off, whatever the placement."""
        size = key.size_bytes or 0
        return self._sizes(key).between(size / _APART, size * _APART)

    def _sizes(self, key: RowKey) -> "_RowsBySize":
        """The rows among which a row is, by size."""
        family = self._family[key]
        return self._by_size.get(id(family)) or self._by_size.setdefault(id(family), _RowsBySize.of(family))

    def _floor(self, key: RowKey, time_us: float) -> tuple[float, str]:
        if self.shows_whole_runs(key):
            return FLOOR, "the least that counts"
        return self.floor(key, time_us), "the least that single runs show"

    def _noise(self, key: RowKey) -> tuple[Noise | None, str]:
        """The noise of a row's change, from the runs of its neighbours where there are enough, else from changes."""
        place = id(self._family[key]), 0 if key.collective is None else key.size_bytes or 0
        if place not in self._found:
            near = tuple(self._near(key))
            self._found[place] = self._between_runs(near), self._between_changes(near)
        runs, changes = self._found[place]
        base, new = self._logs[key]
        usual = None
        if max(self.runs(key)) < REPEATED_RUNS:
            usual = with_usual_noise(key, changes if runs is None else None)
        if runs is None:
            return usual or changes, _USUAL if changes is None else "differences between neighbours"
        share = math.sqrt(_part_of_variance(len(base)) + _part_of_variance(len(new)))
        between = Noise(runs.deviation * share, runs.freedom)
        if usual is not None and usual.deviation > between.deviation:
            return usual, _USUAL
        return between, "differences between runs"

    def _near(self, key: RowKey) -> Iterator[RowKey]:
        if key.collective is None:
            yield from self._family[key]
        else:
            yield from self._sizes(key).near(key.size_bytes or 0, NEIGHBOURS)

    def _between_runs(self, keys: Sequence[RowKey]) -> Noise | None:
        """The deviation between runs of the same row, over all these rows: by the median, for a run may hiccup."""
        sides = [side for key in keys for side in self._logs[key]]
        freedom = _MEDIAN_EFFICIENCY * sum(len(logs) - 1 for logs in sides)
        if freedom < LEAST_FREEDOM:
            return None
        distances = [abs(one - other) for logs in sides for one, other in combinations(logs, 2)]
        return Noise(_NORMAL_MEDIAN * median(distances) / math.sqrt(2), freedom)

    def _between_changes(self, keys: Sequence[RowKey]) -> Noise | None:
        """Of pairs how much their changes differ; of sizes how unsteady the change is."""
        changes = {key: self.change(key) or 0.0 for key in keys}
        unsteady = list(changes.values()) if keys[0].collective is None else list(_second_differences(changes))
        found = robust_deviation(unsteady) if len(unsteady) >= LEAST_VALUES else None
        if found is None or keys[0].collective is None:
            return found
        # Every change has a part in four of these figures, so about half of them know something new.
        return Noise(found.deviation, max(LEAST_FREEDOM, found.freedom / 2))


@dataclass(frozen=True, slots=True)
class _RowsBySize:
    """The rows of a family by their sizes, which ascend, so that the neighbours of one are found by bisection."""

    sizes: Sequence[int]
    rows: Mapping[int, Sequence[tuple[int, RowKey]]]

    @classmethod
    def of(cls, family: Sequence[RowKey]) -> "_RowsBySize":
        """Each with its place in the family."""
        rows: dict[int, list[tuple[int, RowKey]]] = {}
        for place, key in enumerate(family):
            rows.setdefault(key.size_bytes or 0, []).append((place, key))
        return cls(sorted(rows), rows)

    def near(self, size: int, steps: int) -> Iterator[RowKey]:
        """The rows of a size and of so many sizes before and after it, in the family's order."""
        place = bisect_left(self.sizes, size)
        return self._of(self.sizes[max(0, place - steps) : place + steps + 1])

    def between(self, least: float, most: float) -> Iterator[RowKey]:
        """The rows of these sizes and those between them."""
        return self._of(self.sizes[bisect_left(self.sizes, least) : bisect_right(self.sizes, most)])

    def _of(self, sizes: Sequence[int]) -> Iterator[RowKey]:
        return (key for _, key in sorted((each for size in sizes for each in self.rows[size]), key=itemgetter(0)))


def _second_differences(changes: Mapping[RowKey, float]) -> Iterator[float]:
    """Differences that no real change explains, each scaled to the deviation of one change.

    How far a size is from the middle of its neighbours (a change that grows with the size leaves nothing of that), and
    how much out of place and in place differ at a size.
    """
    curves: dict[str | None, dict[int, float]] = {}
    for key, change in changes.items():
        curves.setdefault(key.placement, {})[key.size_bytes or 0] = change
    for curve in curves.values():
        ordered = [change for _, change in sorted(curve.items())]
        for before, middle, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
            yield (before - 2 * middle + after) / math.sqrt(6)
    if len(curves) == 2:
        one, other = curves.values()
        yield from ((one[size] - other[size]) / math.sqrt(2) for size in one.keys() & other.keys())


def _part_of_variance(runs: int) -> float:
    """The variance of the middle of so many runs, in those of one: of a median π/2 times that of a mean."""
    return 1 / runs if runs < REPEATED_RUNS else math.pi / 2 / runs


def logs_of(seen: Sequence[RunFigures]) -> list[float]:
    """Logarithms of the times of a side; wrong data make no time."""
    return [math.log(each.time_us) for each in seen if each.time_us and not each.wrong]


def _within(base: Sequence[RunFigures], new: Sequence[RunFigures]) -> float | None:
    """The standard error of a change, from the spread that rows have in themselves; None where no row has one."""
    sides = [[each.error_of_mean for each in side if each.error_of_mean is not None] for side in (base, new)]
    squares = [sum(error * error for error in errors) / len(errors) ** 2 for errors in sides if errors]
    return math.sqrt(sum(squares)) if squares else None
