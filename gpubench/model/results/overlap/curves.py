"""Steps over size and cap, and slow-downs over size, as curves that a page can draw."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gpubench.model.results.curves import Chart, CurveLine
from gpubench.model.results.rows.overlap import OverlapRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.overlap.asked import cap_name

_MOST_LINES = 4
"""Curves that a page can tell apart."""

_FEWEST_SIZES = 2


def overlap_charts(rows: Sequence[OverlapRow]) -> Iterator[Chart]:
    """Of every partner: the step under each cap over that with NCCL's own CTAs, and both slow-downs with these."""
    for partner, members in grouped(rows, lambda row: row.partner).items():
        if len({row.size_bytes for row in members}) < _FEWEST_SIZES:
            continue
        own = {row.size_bytes: row for row in members if row.ctas is None}
        lines = list(_over_own([row for row in members if row.ctas is not None], own))
        for start in range(0, len(lines), _MOST_LINES):
            some = tuple(lines[start : start + _MOST_LINES])
            yield Chart(f"Step beside {partner}, over that with NCCL's own CTAs", "×", some, logarithmic=True)
        if own:
            slowdowns = (
                _line("communication, κm", list(own.values()), lambda row: row.communication_slowdown),
                _line("computation, κc", list(own.values()), lambda row: row.compute_slowdown),
            )
            yield Chart(f"Slow-down beside {partner}, NCCL's own CTAs", "×", slowdowns, logarithmic=True)


def _over_own(rows: Sequence[OverlapRow], own: Mapping[int, OverlapRow]) -> Iterator[CurveLine]:
    """A line a cap, at the sizes that were measured with NCCL's own number too."""
    both = [row for row in rows if row.size_bytes in own]
    for ctas, members in grouped(both, lambda row: row.ctas).items():
        yield _line(cap_name(ctas), members, lambda row: row.step_us / own[row.size_bytes].step_us)


def _line(name: str, rows: Sequence[OverlapRow], value: Callable[[OverlapRow], float | None]) -> CurveLine:
    known = {row.size_bytes: found for row in rows if (found := value(row)) is not None}
    return CurveLine(name, tuple(sorted(known.items())))
