"""An overlap as blocks of a page: curves, a grid of steps by size and cap for every partner, every row."""

from collections.abc import Iterator, Sequence

from gpubench.formats.sections import Grid, GridCell, Listing, verdict_of, without_empty, word
from gpubench.model.results.curves import Chart
from gpubench.model.results.overlap.curves import overlap_charts
from gpubench.model.results.rows.overlap import OverlapRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.overlap.asked import cap_name
from gpubench.model.terms.units import format_percent, format_size
from gpubench.model.terms.verdict import Verdict


def overlap_blocks(rows: Sequence[OverlapRow]) -> Iterator[Listing | Grid | Chart]:
    """Curves; a grid of steps for every partner, by size and cap; all rows."""
    yield from overlap_charts(rows)
    for partner, members in grouped(rows, lambda row: row.partner).items():
        lines: dict[str, dict[str, GridCell]] = {}
        for size, of_size in grouped(members, lambda row: row.size_bytes).items():
            best = min(row.step_us for row in of_size)
            lines[format_size(size)] = {
                cap_name(row.ctas): GridCell(word(row.step_us), best / row.step_us, verdict_of(row.verdict))
                for row in of_size
            }
        columns = list(dict.fromkeys(cap_name(row.ctas) for row in members))
        yield Grid(f"Step, by size and cap, µs, beside {partner}", "size", columns, lines)
    if rows:
        yield _overlap(rows)


def _overlap(rows: Sequence[OverlapRow]) -> Listing:
    heads = (
        *(
            "beside",
            "size",
            "CTAs",
            "channels",
            "collective µs",
            "beside it µs",
            "κm",
            "waiting",
            "sharing",
            "operations",
        ),
        *("alone µs", "beside it µs", "κc", "step µs", "hidden", "MHz", "W", "note", "verdict"),
    )
    lines = [
        (
            *(row.partner, format_size(row.size_bytes), cap_name(row.ctas), word(row.channels)),
            *(word(row.communication_alone_us), word(row.communication_together_us), word(row.communication_slowdown)),
            *(word(row.waiting_slowdown), word(row.sharing_slowdown), word(row.partner_count)),
            *(word(row.partner_alone_us), word(row.partner_together_us), word(row.compute_slowdown), word(row.step_us)),
            "" if row.hidden_share is None else format_percent(100 * row.hidden_share),
            *(word(row.sm_clock_mhz), word(row.power_w), row.note or ""),
            row.verdict or Verdict.SKIP.value,
        )
        for row in rows
    ]
    return without_empty(Listing("Every row", heads, lines, [verdict_of(row.verdict) for row in rows]))
