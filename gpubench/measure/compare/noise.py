"""The noise of a comparison: how much the times on both sides differ by chance.

With several runs per side, noise is the difference between runs. With single runs, it is how much the change varies
between sizes or between pairs. One row has too few values, so neighbouring rows are pooled. Sources and error rates are
in docs/internals/accuracy.md.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.paths.transport import is_staged, parse_transport
from gpubench.model.results.compare import RowKey, collective_key, pair_keys, siblings
from gpubench.model.results.figures import BY_CPU
from gpubench.model.results.report import CollectiveRow, PairRow, column_values, make_record
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.speed import copies_times_limit, times_limit
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.statistics import MEDIAN_EFFICIENCY, Noise, robust_deviation


class RunFigures(NamedTuple):
    """The values in one row of one run. `time_us` is None if it was not measured.

    This is a tuple, because there are many rows and a dataclass takes ten times as long to create.
    """

    time_us: float | None
    gb_s: float | None
    origin: str
    transport: str | None
    host_staged: bool | None
    verdict: str | None
    verified: bool
    path_class: str | None = None
    limit_gb_s: float | None = None
    times_limit: float | None = None
    note: str | None = None
    devices: tuple[str, str] | None = None
    error_of_mean: float | None = None
    iterations: int | None = None
    wrong: int | None = None


RunsByRow = dict[RowKey, list[RunFigures]]
"""The values of every run by row key, in the order of files and rows."""


def gather(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> tuple[RunsByRow, RunsByRow]:
    """Return the values on both sides by row key.

    Keys of pairs contain bus IDs if both sides ran on the same hosts, or else device names.
    """
    keyed = [[[(collective_key(row), row) for row in file.rows] for file in files] for files in (base, new)]
    swept = _keys_with_several_settings(chain.from_iterable(keyed))
    hosts = [_pair_nodes(files) for files in (base, new)]
    sides: list[RunsByRow] = []
    known: dict[RowKey, RowKey] = {}  # Large clusters have many equal keys on both sides, so store each key once
    for files, rows, side_hosts in zip((base, new), keyed, hosts, strict=True):
        measured: RunsByRow = {}
        places = None if hosts[0] == hosts[1] else {host: place for place, host in enumerate(side_hosts)}
        for file, file_rows in zip(files, rows, strict=True):
            for key, row in file_rows:
                if key in swept:
                    key = replace(key, setting=_setting(row))
                measured.setdefault(key, []).append(_collective_figures(row))
            for latency in file.latencies:
                figures = make_record(
                    RunFigures,
                    latency,
                    gb_s=latency.busbw_gb_s,
                    transport=None,
                    host_staged=None,
                    verdict=None,
                    verified=latency.verified != "no",
                )
                measured.setdefault(make_record(RowKey, latency), []).append(figures)
            for key, figures in zip(pair_keys(file.pairs, places), _pair_figures(file.pairs), strict=True):
                measured.setdefault(known.setdefault(key, key), []).append(figures)
        sides.append(measured)
    return sides[0], sides[1]


def _keys_with_several_settings(files: Iterable[Sequence[tuple[RowKey, CollectiveRow]]]) -> set[RowKey]:
    """Return the keys for which one file has several algorithms or protocols, because the user compared settings."""
    found = set()
    for rows in files:
        settings: dict[RowKey, set[str | None]] = {}
        for key, row in rows:
            settings.setdefault(key, set()).add(_setting(row))
        found |= {key for key, names in settings.items() if len(names) > 1}
    return found


def _setting(row: CollectiveRow) -> str | None:
    return " ".join(filter(None, (row.algorithm, row.protocol))) or None


def _pair_nodes(files: Iterable[ResultFile]) -> list[str]:
    nodes = (pair for file in files for pair in column_values(file.pairs, "source_node", "destination_node"))
    return sorted(set(chain.from_iterable(nodes)))


def _collective_figures(row: CollectiveRow) -> RunFigures:
    return make_record(
        RunFigures,
        row,
        gb_s=row.busbw_gb_s,
        error_of_mean=row.batch_cv if row.ci95_percent is None else row.ci95_percent / 100 / 1.96,
        host_staged=_staged(row.host_staged, row.transport),
        verified=row.verified != "no",
        limit_gb_s=None,
        times_limit=times_limit(row),
    )


def _pair_figures(rows: Iterable[PairRow]) -> Iterator[RunFigures]:
    known: dict[tuple[str, str], tuple[str, str]] = {}
    for (
        latency,
        gb_s,
        size,
        engine,
        is_staged_,
        verified,
        source,
        to,
        origin,
        transport,
        verdict,
        *rest,
    ) in column_values(rows, *_FIGURES):
        path_class, limit, note = rest
        ends = source, to
        yield RunFigures(
            latency if latency is not None else size / gb_s / 1e3 if size and gb_s else None,
            gb_s,
            origin,
            transport,
            _staged(is_staged_, transport),
            verdict,
            verified not in (None, "no"),
            path_class,
            limit,
            copies_times_limit(gb_s, limit, engine),
            note,
            known.setdefault(ends, ends),
        )


_FIGURES = (
    *("latency_us", "bandwidth_gb_s", "size_bytes", "engine", "host_staged", "verified", "source", "destination"),
    *("origin", "transport", "verdict", "path_class", "limit_gb_s", "note"),
)


@lru_cache(maxsize=256)
def _staged(column: bool | None, transport: str | None) -> bool | None:  # noqa: FBT001 - the value of a column
    """Return the value of column `host_staged`. If it is empty, derive it from the row's transports."""
    if column is not None or not transport:
        return column
    return is_staged([parse_transport(part) for part in transport.split("+")])


LARGE_BYTES = 16 * 2**20
_LARGE, _SMALL, _SMALL_US = 0.02, 0.05, 0.5
"""How much whole runs differ. On four H200s, the medians of NCCL's collectives stayed within 2 % from 16 MiB on,
and within 5 % or 0.5 µs below (docs/internals/validation.md).
"""

_NETWORK_SMALL = 0.10
"""How much whole runs below 16 MiB differ over a network. On two nodes, the medians of three runs of seven
collectives differed by up to 9.3 %.
"""

_OTHER_NODES = 0.15
"""How much jobs on different nodes differ, because they use other links of the network. Among 45 pairs of ten H100
nodes, one test took up to 13 % longer on one pair than on another, at all sizes alike.
"""

_BY_CPU = 0.25
"""Noise of copies that a CPU makes in host memory while other processes use both. `gpubench check` tolerates the
same.
"""

_WITH_HOST = {HostMemory.PINNED.full_name: 0.08, HostMemory.PAGEABLE.full_name: 2.0}
"""Noise of copies between GPU and host by `setting`. In seven runs on healthy H200 machines (2026-11-20), pinned
memory reached 51.4 to 55.4 GB/s. Pageable memory, which a CPU copies first, reached 5.7 to 16.7 GB/s.
"""

_OF_RINGS, _OF_MANY_PEERS = 0.01, 0.03
"""Standard deviation of the change in rows from 16 MiB on. In NCCL's rings, trees and sendrecv, ranks keep their
neighbours, and times vary by 0.1 to 0.9 % per run. Operations with many peers use another order and other
channels in every run. Up to 1 GiB, their times vary by 0.6 to 3 %. Neighbouring sizes vary together, so
differences between them do not show this noise.
"""

_MANY_PEERS = frozenset({"alltoall", "alltoallv", "gather", "scatter"})
_MANY_PEERS_UNTIL = 2**30

_WORTH = 20.0
"""Degrees of freedom of the usual noise when combined with the noise in the files, about as many as 40 rows have."""


def single_run_floor(key: RowKey, time_us: float, *, other_hosts: bool = False) -> float:
    """Return how much whole runs differ, as a share of the row's time `time_us`."""
    if key.engine == BY_CPU:
        return _BY_CPU
    if key.setting in _WITH_HOST:
        return _WITH_HOST[key.setting]
    if other_hosts and is_over_network(key):
        return max(_OTHER_NODES, _SMALL_US / time_us)
    if (key.size_bytes or 0) >= LARGE_BYTES:
        return _LARGE
    return max(_NETWORK_SMALL if is_over_network(key) else _SMALL, _SMALL_US / time_us)


def is_over_network(key: RowKey) -> bool:
    return (key.nodes or 1) > 1


def combine_with_usual_noise(key: RowKey, found: Noise | None) -> Noise | None:
    """Return the noise in the files, combined with the usual noise of such rows by degrees of freedom.

    A standard deviation from few rows is often half or twice the true one (Smyth 2004, "Linear models and empirical
    Bayes methods"). Only large sizes of collectives need this, because the minimum noise of all other rows is larger.
    """
    if key.collective is None or (key.size_bytes or 0) < LARGE_BYTES:
        return found
    many = key.collective in _MANY_PEERS and (key.size_bytes or 0) <= _MANY_PEERS_UNTIL
    usual = Noise(_OF_MANY_PEERS if many else _OF_RINGS, _WORTH)
    if found is None:
        return usual
    if found.deviation > usual.deviation:
        return found
    freedom = found.freedom + usual.freedom
    squares = found.freedom * found.deviation**2 + usual.freedom * usual.deviation**2
    return Noise((squares / freedom) ** 0.5, freedom)


NEIGHBOURS = 6
"""Number of sizes on either side that are pooled to estimate the noise at a size. Noise is larger at small sizes."""

LEAST_FREEDOM, LEAST_VALUES = 4, 6
"""The fewest degrees of freedom and values from which a standard deviation is useful."""

REPEATED_RUNS = 3
"""With this many runs per side, runs can be compared with each other, and the minimum noise is not needed."""

TESTS = 2
"""Tests per row: once alone and once in a range. Each test may cause half of the false alarms."""

SETTLED_RUNS = 5
"""With this many runs per side, a slower row is no hiccup even if its neighbours are not slower."""

DENSE_ROWS, _APART = 8, math.sqrt(2)
"""A sweep counts as dense if this many rows are within half an octave of a size."""

FLOOR = 0.01
"""Smaller changes are ignored."""

_USUAL = "the usual difference between single runs"
"""The source of the noise if the files have too few rows."""

_NORMAL_MEDIAN = 1.4826
"""Standard deviation of a normal distribution relative to its median absolute deviation."""

OWN_SPREAD, _NEIGHBOURS = "the spread of the rows", "differences between neighbours"
OF_ONE_RUN = OWN_SPREAD, _NEIGHBOURS
"""The sources of a noise bound that comes from a single run."""


class NoiseBound(NamedTuple):
    """The smallest change that exceeds noise, relative to the time, and the source of the bound as text."""

    share: float
    source: str


_LEAST = NoiseBound(FLOOR, "the smallest difference that counts")


class ChangeNoise:
    """The noise of every row that both sides have.

    `families` are groups of rows that differ only in size and placement, or only in the pair.

    `files` are the numbers of files per side, or None if every run is a file. If one file repeats a row, both values
    come from one process and do not show how whole runs differ.

    `other_hosts` is true if the two sides ran on different hosts.
    """

    def __init__(
        self, base: RunsByRow, new: RunsByRow, *, other_hosts: bool = False, files: tuple[int, int] | None = None
    ) -> None:
        self._other_hosts = other_hosts
        self._files = files
        self._files_repeat = files is None or min(files) >= REPEATED_RUNS
        self._times: dict[RowKey, _Times] = {}
        for key, old_runs in base.items():
            new_runs = new.get(key, ())
            if (logs := time_logs(old_runs)) and (new_logs := time_logs(new_runs)):
                error = None if key.collective is None else _standard_error(old_runs, new_runs)
                self._times[key] = _Times(logs, new_logs, error)
        self.families = list(siblings(self._times))
        for number, family in enumerate(self.families):
            for key in family:
                self._times[key].family = number
        self._by_size: dict[int, _RowsBySize] = {}
        self._near_noise: dict[tuple[int, int], tuple[Noise | None, Noise | None]] = {}
        self._noises: dict[tuple[tuple[int, int], tuple[int, int]], tuple[Noise | None, NoiseBound | None]] = {}

    def runs(self, key: RowKey) -> tuple[int, int]:
        """Return the number of runs per side. Repetitions within a file count once."""
        (base, new), files = self._times[key].runs, self._files
        return (base, new) if files is None else (min(base, files[0]), min(new, files[1]))

    def shows_whole_runs(self, key: RowKey) -> bool:
        """True if both sides have enough runs to show how whole runs differ.

        Runs over a network on different hosts never show it.
        """
        return (
            self._files_repeat
            and min(self._times[key].runs) >= REPEATED_RUNS
            and not (self._other_hosts and is_over_network(key))
        )

    def floor(self, key: RowKey, time_us: float) -> float:
        return single_run_floor(key, time_us, other_hosts=self._other_hosts)

    def change_noise(self, key: RowKey) -> Noise | None:
        """Return the noise of a row's change, or None if there are too few rows."""
        return self._noise(key, self._times[key])[0]

    def change(self, key: RowKey) -> float | None:
        """Return the logarithm of the new time divided by the old time, or None if a side has no time."""
        times = self._times.get(key)
        return None if times is None else times.change

    def time_us(self, key: RowKey) -> float:
        return math.exp(self._times[key].middle)

    def bound(self, key: RowKey) -> NoiseBound:
        times = self._times[key]
        least = _LEAST
        if not self.shows_whole_runs(key):
            source = "the smallest difference that single runs can show"
            least = NoiseBound(self.floor(key, math.exp(times.middle)), source)
        _, found = self._noise(key, times)
        if found is None or found.share <= least.share:
            found = least
        if times.standard_error is not None:
            bound = self._make_bound(Noise(times.standard_error, math.inf), OWN_SPREAD)
            found = bound if bound.share > found.share else found
        return found

    def _make_bound(self, noise: Noise, source: str) -> NoiseBound:
        return NoiseBound(math.expm1(min(5.0, noise.bound(TESTS * len(self._times)))), source)

    def is_isolated(self, key: RowKey) -> bool:
        """True if a row of a collective is slower, but its other placement and the next sizes are not.

        In a dense sweep, one hiccup can slow several successive rows. There a row is isolated too if most rows within
        half an octave are not slower.

        False for rows without neighbours, and if there are enough runs for the median to exclude hiccups.
        """
        if key.collective is None or min(self._times[key].runs) >= SETTLED_RUNS:
            return False
        half = (self.change(key) or 0.0) / 2
        slower = [(self.change(neighbour) or 0.0) >= half for neighbour in self._neighbours(key)]
        if slower and not any(slower):
            return True
        size = key.size_bytes or 0
        half_an_octave = self._sizes(key).between(size / _APART, size * _APART)
        near = [(self.change(neighbour) or 0.0) >= half for neighbour in half_an_octave]
        return len(near) >= DENSE_ROWS and sum(near) < len(near) / 4

    def is_largest(self, key: RowKey) -> bool:
        sizes = self._sizes(key).sizes
        return len(sizes) > 1 and key.size_bytes == sizes[-1]

    def _neighbours(self, key: RowKey) -> Iterator[RowKey]:
        """Yield the other placement of a row, and the next sizes with the same placement."""
        for neighbour in self._sizes(key).near(key.size_bytes or 0, 1):
            alike = neighbour.size_bytes == key.size_bytes or neighbour.placement == key.placement
            if neighbour != key and alike:
                yield neighbour

    def _sizes(self, key: RowKey) -> "_RowsBySize":
        family = self._times[key].family
        if family not in self._by_size:
            self._by_size[family] = _RowsBySize.of(self.families[family])
        return self._by_size[family]

    def _noise(self, key: RowKey, times: "_Times") -> tuple[Noise | None, NoiseBound | None]:
        """Return the noise of a row's change and its bound.

        Use the differences between runs of neighbouring rows if possible, or else the differences between their
        changes.
        """
        place = times.family, 0 if key.collective is None else key.size_bytes or 0
        if (known := self._noises.get((place, times.runs))) is None:
            if place not in self._near_noise:
                near = tuple(self._near(key))
                self._near_noise[place] = self._run_noise(near), self._change_spread(near)
            noise, source = self._combine_neighbours(key, *self._near_noise[place])
            bound = None if noise is None else self._make_bound(noise, source)
            known = self._noises[place, times.runs] = noise, bound
        return known

    def _combine_neighbours(self, key: RowKey, runs: Noise | None, changes: Noise | None) -> tuple[Noise | None, str]:
        usual = None
        if max(self.runs(key)) < REPEATED_RUNS:
            usual = combine_with_usual_noise(key, changes if runs is None else None)
        if runs is None:
            return usual or changes, _USUAL if changes is None else _NEIGHBOURS
        share = math.sqrt(sum(map(_relative_variance, self._times[key].runs)))
        between = Noise(runs.deviation * share, runs.freedom)
        if usual is not None and usual.deviation > between.deviation:
            return usual, _USUAL
        return between, "differences between runs"

    def _near(self, key: RowKey) -> Iterator[RowKey]:
        if key.collective is None:
            yield from self.families[self._times[key].family]
        else:
            yield from self._sizes(key).near(key.size_bytes or 0, NEIGHBOURS)

    def _run_noise(self, keys: Sequence[RowKey]) -> Noise | None:
        """Return the standard deviation between runs, pooled over these rows. The median tolerates hiccups."""
        sides = [side for key in keys for side in self._times[key].sides]
        freedom = MEDIAN_EFFICIENCY * sum(len(logs) - 1 for logs in sides)
        if freedom < LEAST_FREEDOM:
            return None
        distances = [abs(one - other) for logs in sides for one, other in combinations(logs, 2)]
        return Noise(_NORMAL_MEDIAN * median(distances) / math.sqrt(2), freedom)

    def _change_spread(self, keys: Sequence[RowKey]) -> Noise | None:
        """Return the standard deviation of the change between pairs, or between sizes."""
        changes = {key: self.change(key) or 0.0 for key in keys}
        values = list(changes.values()) if keys[0].collective is None else list(_second_differences(changes))
        found = robust_deviation(values) if len(values) >= LEAST_VALUES else None
        if found is None or keys[0].collective is None:
            return found
        # Every change is part of four of these values, so about half of them are independent.
        return Noise(found.deviation, max(LEAST_FREEDOM, found.freedom / 2))


_ONE_EACH = 1, 1


class _Times:
    """The logarithmic times of a row on both sides, and the change between their medians."""

    __slots__ = ("change", "family", "middle", "runs", "sides", "standard_error")

    def __init__(self, base: list[float], new: list[float], standard_error: float | None) -> None:
        self.runs = _ONE_EACH if len(base) == len(new) == 1 else (len(base), len(new))
        self.sides = () if self.runs is _ONE_EACH else (base, new)  # A single run shows no difference between runs
        self.middle = middle_of(base)
        self.change = middle_of(new) - self.middle
        self.standard_error = standard_error
        self.family = 0


class _RowsBySize(Struct, frozen=True):
    """The rows of a family, sorted by size so that bisection finds neighbours."""

    sizes: Sequence[int]
    rows: Mapping[int, Sequence[tuple[int, RowKey]]]

    @classmethod
    def of(cls, family: Sequence[RowKey]) -> "_RowsBySize":
        rows: dict[int, list[tuple[int, RowKey]]] = {}
        for place, key in enumerate(family):
            rows.setdefault(key.size_bytes or 0, []).append((place, key))
        return cls(sorted(rows), rows)

    def near(self, size: int, steps: int) -> Iterator[RowKey]:
        """Yield the rows at a size and at up to `steps` sizes before and after it, in the family's order."""
        place = bisect_left(self.sizes, size)
        return self._rows_of_sizes(self.sizes[max(0, place - steps) : place + steps + 1])

    def between(self, least: float, most: float) -> Iterator[RowKey]:
        return self._rows_of_sizes(self.sizes[bisect_left(self.sizes, least) : bisect_right(self.sizes, most)])

    def _rows_of_sizes(self, sizes: Sequence[int]) -> Iterator[RowKey]:
        return (key for _, key in sorted((row for size in sizes for row in self.rows[size]), key=itemgetter(0)))


def _second_differences(changes: Mapping[RowKey, float]) -> Iterator[float]:
    """Yield differences that only noise explains, each scaled to the standard deviation of one change.

    They are the distance of a size from the mean of its neighbours, and the difference between the two placements. A
    change that grows steadily with the size affects neither.
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


def _relative_variance(runs: int) -> float:
    """Return the variance of the median or mean over several runs, relative to one run.

    From three runs on it is a median, whose variance is π/2 times the variance of a mean.
    """
    return 1 / runs if runs < REPEATED_RUNS else math.pi / 2 / runs


def middle_of(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else median(values)


def time_logs(runs: Sequence[RunFigures]) -> list[float]:
    """Return the logarithms of the times of all runs, without runs that have wrong data."""
    return [math.log(run.time_us) for run in runs if run.time_us and not run.wrong]


def _standard_error(base: Sequence[RunFigures], new: Sequence[RunFigures]) -> float | None:
    """Return the standard error of a change, from the spread within each row. Return None if no row has a spread."""
    sides = [[run.error_of_mean for run in side if run.error_of_mean is not None] for side in (base, new)]
    squares = [sum(error * error for error in errors) / len(errors) ** 2 for errors in sides if errors]
    return math.sqrt(sum(squares)) if squares else None
