"""Print how a measurement scales over GPUs: one line per number of ranks at the largest size, and where it breaks."""

from collections.abc import Iterator, Sequence

from gpubench.formats.layout import Column, figure
from gpubench.formats.table import Page
from gpubench.model.results.report import Report
from gpubench.model.results.scaling import ScalingRow, largest_rows
from gpubench.model.terms.units import format_percent, format_share, format_size, group_by, plural

SCALING = (
    Column("measured", "measured", page_only=True),
    Column("size", "size_bytes", page_only=True),
    Column("ranks", "ranks", right=True),
    Column("GPUs", "gpus", 1),
    Column("time µs", lambda row: figure(row.time_us), 2, right=True),
    Column("GB/s", lambda row: figure(row.bandwidth_gb_s), right=True),
    Column("% exp", lambda row: format_share(row.expected_percent), 3, right=True),
    Column("efficiency", lambda row: format_percent(row.efficiency_percent, "-"), right=True),
    Column("", lambda row: "breaks" if row.breaks else "", optional=True),
    Column("reason", "reason", page_only=True),
)
_MOST_TABLES = 2  # In-place and out-of-place. An overlap has one for each CTA limit


def print_scaling(page: Page, report: Report) -> None:
    """Print one table per measurement, each followed by an empty line. Print nothing without scaling rows."""
    groups = group_by(largest_rows(report.rows(ScalingRow)), lambda row: row.measured)
    for name, rows in list(groups.items())[:_MOST_TABLES]:
        page.wrap(f"scaling of {name}, {format_size(rows[0].size_bytes)}")
        page.table(SCALING, rows)
        page.print(*_break_lines(rows), "")
    if len(groups) > _MOST_TABLES:
        page.print(f"{plural(len(groups) - _MOST_TABLES, 'more table')} in --format csv --section scaling", "")


def _break_lines(rows: Sequence[ScalingRow]) -> Iterator[str]:
    known = [row for row in rows if row.efficiency_percent is not None]
    for row in (row for row in known if row.breaks):
        yield f"scaling breaks at {plural(row.ranks, 'rank')}: {row.reason}"
    if len(known) > 1 and not any(row.breaks for row in known):
        yield f"scaling does not break up to {plural(known[-1].ranks, 'rank')}"
    for row in (row for row in rows if row.ranks == 1 and row.reason):
        yield f"1 rank: {row.reason}"
