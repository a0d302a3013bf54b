"""Problems that show only when the rows of a sweep are compared: a lone slow row, a slow range of sizes, a late
rank.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct

from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import NCCL, TORCH_NCCL
from gpubench.model.terms.statistics import Mode, robust_deviation
from gpubench.model.terms.units import group_by
from gpubench.model.terms.verdict import Verdict

SHARE = "ranks share"  # Contained in a row's note if several ranks take turns on few CPUs
LONE = "measured once, while its neighbours are as expected"  # The note on a lone slow row

CurveKey = tuple[object, ...]  # The columns that all rows of a curve share, which are all except size and placement

_NEAR_FACTOR = 4  # Sizes up to this factor apart are neighbours, as usual in tables from nccl-tests
_LEAST_NEIGHBOURS = 2


def _curve_key(row: CollectiveRow) -> CurveKey:
    return row.backend, row.collective, row.dtype, row.op, row.setting, row.mode, row.group, row.ranks


class RowPlace(Struct, frozen=True):
    """The curve, placement and size that identify a row in a sweep."""

    curve: CurveKey
    placement: str
    size_bytes: int

    @classmethod
    def of(cls, row: CollectiveRow) -> "RowPlace":
        return cls(_curve_key(row), row.placement, row.size_bytes)


def lone_slow_rows(verdicts: Mapping[RowPlace, Verdict]) -> frozenset[RowPlace]:
    """Return the slow rows whose neighbours all pass. Rows with fewer than two neighbours do not count.

    Neighbours are the next smaller and the next larger size, and the same size with the other placement.
    """
    by_curve = group_by(verdicts, lambda place: place.curve)
    slow = [place for place, verdict in verdicts.items() if verdict in (Verdict.FAIL, Verdict.WARN)]
    return frozenset(
        place
        for place in slow
        if len(near := list(_neighbours(place, by_curve[place.curve]))) >= _LEAST_NEIGHBOURS
        and all(verdicts[neighbour] is Verdict.PASS for neighbour in near)
    )


def _neighbours(place: RowPlace, curve: Sequence[RowPlace]) -> Iterator[RowPlace]:
    yield from (other for other in curve if other.size_bytes == place.size_bytes and other.placement != place.placement)
    alike = [other for other in curve if other.placement == place.placement]
    smaller = [other for other in alike if place.size_bytes / _NEAR_FACTOR <= other.size_bytes < place.size_bytes]
    larger = [other for other in alike if place.size_bytes < other.size_bytes <= place.size_bytes * _NEAR_FACTOR]
    if smaller:
        yield max(smaller, key=lambda other: other.size_bytes)
    if larger:
        yield min(larger, key=lambda other: other.size_bytes)


LEAST_LOSS = 0.05
"""The smallest relative loss that is reported for a range of sizes or a rank. In 36 healthy tables from 2 to 8 GPUs
in one node, no bandwidth falls by more than 3 % as the size grows. Ranks on 2 to 8 H200s differ by at most 2 %.
"""

_SURE_DEVIATIONS = 4.0  # Standard deviations below the median share of the expected speed that count as slow
_HICCUP_US = 2.5  # Delay that hosts add to some rows: ranks start 50 µs apart, divided by 20 iterations
_LEAST_SHARES = 8  # With fewer rows, the noise is unknown
_LEAST_SIZES = 2  # A single slow size may be chance
_SIMULATED = "simulated"
_OF_ONE_NODE = (NCCL, TORCH_NCCL, _SIMULATED)  # Backends whose time and bus bandwidth grow with the size within a node


class SlowRange(Struct, frozen=True):
    """Adjacent sizes that are slower than the rest of their sweep. `usual_us` is the normal time for the size of
    `worst`.
    """

    rows: tuple[CollectiveRow, ...]
    worst: CollectiveRow
    usual_us: float


def slow_range(rows: Sequence[CollectiveRow]) -> SlowRange | None:
    """Return the slowest range of at least two adjacent sizes, or None.

    Within a node, a larger size takes at least as long as a smaller one, and reaches at least its bus bandwidth. This
    is not true between nodes, where algorithms change, nor on CPUs, which have caches. Simulated rows are also compared
    with their model.
    """
    known = [row for row in rows if row.nodes == 1 and row.backend in _OF_ONE_NODE and row.mode != Mode.LATENCY]
    found = []
    for rows_alike in group_by(known, lambda row: (_curve_key(row), row.placement)).values():
        by_size = {row.size_bytes: row for row in reversed(rows_alike)}
        curve = [by_size[size] for size in sorted(by_size)]
        usual = _usual_times(curve, [row.expected_us if row.backend == _SIMULATED else None for row in curve])
        late = {place: curve[place].time_us / due for place, due in enumerate(usual) if due is not None}
        for run in _runs(late):
            worst = max(run, key=late.__getitem__)
            found.append(SlowRange(tuple(curve[place] for place in run), curve[worst], usual[worst] or math.inf))
    return max(found, key=lambda slow: slow.worst.time_us / slow.usual_us, default=None)


def _runs(places: Collection[int]) -> list[list[int]]:
    """Return the runs of consecutive positions that are long enough."""
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return [run for run in runs if len(run) >= _LEAST_SIZES]


def _usual_times(curve: Sequence[CollectiveRow], expected_us: Sequence[float | None]) -> list[float | None]:
    """Return the usual time in microseconds for each slow row, and None for the others. Sizes must ascend."""
    shares = [None if due is None else due / row.time_us for row, due in zip(curve, expected_us, strict=True)]
    level, least = _level([share for share in shares if share is not None])
    in_time = [share is not None and share >= least for share in shares]
    usual = []
    for place, row in enumerate(curve):
        before, after = curve[:place], curve[place + 1 :]
        bound = row.time_us / (1 + LEAST_LOSS + (row.ci95_percent or 0.0) / 100)
        due = [us for other in before if (us := other.time_us * row.size_bytes / other.size_bytes) < bound]
        # Hosts stall at the start of a job, so ignore a slow range that begins at the smallest size
        least_after = min((other.time_us for other in after), default=math.inf)
        if any(other.time_us <= least_after + _HICCUP_US for other in before) and least_after + _HICCUP_US < bound:
            due.append(least_after)
        is_inside = any(in_time[:place]) and any(in_time[place:])
        known_us = expected_us[place]
        if known_us is not None and is_inside and not in_time[place] and known_us / level + _HICCUP_US < row.time_us:
            due.append(known_us / level)
        usual.append(min(due, default=None))
    return usual


def _level(shares: Sequence[float]) -> tuple[float, float]:
    """Return the median share of the expected speed, and the smallest share that noise explains.

    Return infinity and 0 if there are too few rows.
    """
    if len(shares) < _LEAST_SHARES or (noise := robust_deviation(shares)) is None:
        return math.inf, 0.0
    level = median(shares)
    return level, level - max(LEAST_LOSS * level, _SURE_DEVIATIONS * noise.deviation)


LATE_FROM_BYTES = 16 * 2**20
_MOST_ROOTED_LOSS = 0.2  # On CPUs, and for the root of few operations, ranks differ by up to this share


class LateRank(Struct, frozen=True):
    """A rank that takes longer than the others in most rows. `worst` is the row that shows it best."""

    rank: int
    worst: CollectiveRow

    @property
    def times(self) -> float:
        """The time of the slowest rank divided by that of the fastest rank."""
        return (self.worst.time_us_slowest_rank or 0.0) / (self.worst.time_us_fastest_rank or math.inf)


def late_rank(rows: Sequence[CollectiveRow]) -> LateRank | None:
    """Return the rank that is late beyond noise in most rows of at least 16 MiB, or None."""
    large = [
        row
        for row in rows
        if row.size_bytes >= LATE_FROM_BYTES and row.time_us_fastest_rank and (row.ranks_per_gpu or 1) == 1
    ]
    late = [row for row in large if _is_one_late(row)]
    by_rank = {rank: found for rank, found in group_by(late, lambda row: row.slowest_rank).items() if rank is not None}
    if not by_rank:
        return None
    rank, found = max(by_rank.items(), key=lambda item: len(item[1]))
    shown = max((LateRank(rank, row) for row in found), key=lambda late: late.times)
    return shown if 2 * len(found) > len(large) else None


def shows_more(rows: Sequence[CollectiveRow]) -> bool:
    """Return whether a sweep has noisy rows, a slow range or a late rank."""
    is_noisy = any(row.verdict == Verdict.INCONCLUSIVE for row in rows)
    return is_noisy or slow_range(rows) is not None or late_rank(rows) is not None


def _is_one_late(row: CollectiveRow) -> bool:
    """Return whether the slowest rank is late beyond noise, and further from the mean than the fastest rank."""
    fastest, slowest = row.time_us_fastest_rank or 0.0, row.time_us_slowest_rank or 0.0
    least = LEAST_LOSS if row.root is None and row.backend in _OF_ONE_NODE else _MOST_ROOTED_LOSS
    is_behind = row.ranks == 2 or slowest - row.time_us > row.time_us - fastest
    return is_behind and slowest > (1 + least + (row.ci95_percent or 0.0) / 100) * fastest + _HICCUP_US
