"""Bandwidth and time over size, as curves that a terminal or a page can draw."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from gpubench.model.results.report import CollectiveRow, PairRow, Row
from gpubench.model.results.rows.comparison import ComparisonRow, Status
from gpubench.model.terms.grouping import grouped

Points = tuple[tuple[int, float], ...]
"""Size in bytes and value, by ascending size."""

_MOST_LINES = 4
_FEWEST_SIZES = 3
HOST = "host"
OPEN_ENDED = "neither limit nor expectation is known: the axis ends at the highest measured"


@dataclass(frozen=True, slots=True)
class CurveLine:
    """A named curve."""

    name: str
    points: Points


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with one unit, and what they are held against: what links carry at most, what healthy machines reach."""

    title: str
    unit: str
    lines: tuple[CurveLine, ...]
    limit: Points = ()
    expected: Points = ()
    logarithmic: bool = False

    @property
    def highest(self) -> float:
        """The highest value of all, what curves are held against included: 25 of 340 GB/s is seen as 25 of 340."""
        drawn = (*(line.points for line in self.lines), self.limit, self.expected)
        return max((value for points in drawn for _, value in points), default=0.0)

    @property
    def is_open_ended(self) -> bool:
        """True where nothing is known to hold the curves against: the highest of them may still be low."""
        return not (self.limit or self.expected or self.logarithmic or self.is_comparison)

    @property
    def is_comparison(self) -> bool:
        """True if its curves are held against each other."""
        return [line.name for line in self.lines] == ["before", "after"]


def charts(rows: Sequence[Row]) -> list[Chart]:
    """A chart of bandwidth and one of time for every way of measuring that visited three sizes or more."""
    collectives = [row for row in rows if isinstance(row, CollectiveRow)]
    pairs = [row for row in rows if isinstance(row, PairRow) and HOST not in (row.source, row.destination)]
    found: list[Chart] = []
    for members in grouped(collectives, _series).values():
        found += _collective(members)
    for copies in grouped(pairs, lambda row: (row.engine, row.direction, row.peer)).values():
        found += _pairs(copies)
    return [chart for chart in found if any(len(line.points) >= _FEWEST_SIZES for line in chart.lines)]


def compared_charts(rows: Sequence[ComparisonRow]) -> list[Chart]:
    """A chart for everything that was compared in three sizes or more: both sides in one; of many pairs the slowest."""
    both = [row for row in rows if row.status == Status.COMPARED and row.size_bytes is not None]
    found = []
    for name, members in grouped(both, _compared_series).items():
        lines = tuple(
            CurveLine(side, _lowest((row.size_bytes or 0, getattr(row, field)) for row in members))
            for side, field in (("before", "base_gb_s"), ("after", "new_gb_s"))
        )
        pairs = len({(row.source, row.destination) for row in members})
        words = f"slowest of {pairs} pairs, {name}" if pairs > 1 else name
        what = "bandwidth" if members[0].collective is None else "bus bandwidth"
        found.append(Chart(f"{words}: {what}, before and after", "GB/s", lines))
    return [chart for chart in found if all(len(line.points) >= _FEWEST_SIZES for line in chart.lines)]


def _compared_series(row: ComparisonRow) -> str:
    """The name of what was compared, without its size; of pairs without the pair."""
    if row.collective is not None:
        return replace(row, size_bytes=None).name
    peer = "peer access off" if row.peer == "off" else None
    ends = HOST if HOST in (row.source, row.destination) else None
    return " ".join(filter(None, ("copies:", row.engine, row.direction, peer, row.setting, ends)))


def _lowest(values: Iterable[tuple[int, float | None]]) -> Points:
    """The lowest value of each size."""
    found: dict[int, float] = {}
    for size, value in values:
        if value is not None:
            found[size] = min(value, found.get(size, value))
    return tuple(sorted(found.items()))


def _series(row: CollectiveRow) -> tuple[str, ...]:
    return row.dtype, row.op or "", row.group or "", row.backend, row.setting or ""


def _collective(rows: Sequence[CollectiveRow]) -> list[Chart]:
    what = " ".join(filter(None, (rows[0].collective, rows[0].dtype, rows[0].op, rows[0].group, rows[0].setting)))
    lines = {
        name.replace("_", " "): [row for row in rows if row.placement == name]
        for name in dict.fromkeys(row.placement for row in rows)
    }
    bandwidth = tuple(
        CurveLine(name, _points((row.size_bytes, row.busbw_gb_s) for row in each)) for name, each in lines.items()
    )
    times = tuple(
        CurveLine(name, _points((row.size_bytes, row.time_us) for row in each)) for name, each in lines.items()
    )
    limit = _points((row.size_bytes, row.limit_gb_s) for row in rows)
    expected = _points((row.size_bytes, row.expected_gb_s) for row in rows)
    expected_times = _points((row.size_bytes, row.expected_us) for row in rows)
    return [
        Chart(f"{what}: bus bandwidth", "GB/s", bandwidth, limit, expected),
        Chart(f"{what}: time", "µs", times, expected=expected_times, logarithmic=True),
    ]


def _pairs(rows: Sequence[PairRow]) -> list[Chart]:
    access = f"peer access {rows[0].peer}" if rows[0].peer else ""
    what = "copies: " + ", ".join(filter(None, (rows[0].engine, rows[0].direction, access)))
    limit = _points((row.size_bytes or 0, row.limit_gb_s) for row in rows)
    expected = _points((row.size_bytes or 0, row.expected_gb_s) for row in rows)
    expected_times = _points((row.size_bytes or 0, row.expected_us) for row in rows)
    bandwidth, times = (_pair_lines(rows, attrgetter(name)) for name in ("bandwidth_gb_s", "latency_us"))
    return [
        Chart(f"{what}: bandwidth", "GB/s", bandwidth, limit, expected),
        Chart(f"{what}: time", "µs", times, expected=expected_times, logarithmic=True),
    ]


def _pair_lines(rows: Sequence[PairRow], value: Callable[[PairRow], float | None]) -> tuple[CurveLine, ...]:
    """A line a pair; of many pairs the highest and the lowest value of all."""
    by_pair = grouped(rows, lambda row: (row.source, row.destination)).values()
    if len(by_pair) <= _MOST_LINES:
        return tuple(
            CurveLine(
                f"{members[0].source} → {members[0].destination}",
                _points((row.size_bytes or 0, value(row)) for row in members),
            )
            for members in by_pair
        )
    known = sorted((row.size_bytes or 0, each) for row in rows if (each := value(row)) is not None)
    by_size = [(size, [each for _, each in found]) for size, found in groupby(known, key=lambda item: item[0])]
    return (
        CurveLine(f"highest of {len(by_pair)} pairs", tuple((size, max(found)) for size, found in by_size)),
        CurveLine("lowest", tuple((size, min(found)) for size, found in by_size)),
    )


def _points(values: Iterable[tuple[int, float | None]]) -> Points:
    """The last value of each size that has one."""
    return tuple(sorted({size: value for size, value in values if value is not None}.items()))
