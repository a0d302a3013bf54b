"""Who keeps the others waiting: the table of `explain` and `watch --hang`, and a line for every answer of RAS."""

from collections.abc import Sequence

from gpubench.formats.lines import Column, fitted_lines
from gpubench.formats.table import Page
from gpubench.model.paths.hang import Hang
from gpubench.model.results.fallback import HangRow
from gpubench.model.terms.units import counted, some_of

_MOST_LINES = 10


def hang_columns(rows: Sequence[HangRow]) -> list[Column]:
    """The columns in the terminal and on pages."""
    return [
        Column("group", [row.group for row in rows]),
        Column("who", [some_of(row.ranks) for row in rows]),
        Column("what", [row.reason for row in rows]),
        Column("waiting", [str(row.waiting) for row in rows], right=True),
        Column("in", [row.operation or "-" for row in rows], 1),
        Column("since (UTC)", [row.since or "?" for row in rows], 2),
        Column("called instead", [row.theirs or "-" for row in rows], 3),
        Column("at", [row.place or "-" for row in rows], 4),
    ]


def print_hangs(page: Page, hangs: Sequence[HangRow]) -> None:
    """Who, why, and in which operation the others wait."""
    if not hangs:
        return
    shown = hangs[:_MOST_LINES]
    page.print("")
    page.table(fitted_lines(hang_columns(shown), page.width))
    if len(hangs) > _MOST_LINES:
        page.wrap(f"and {len(hangs) - _MOST_LINES} more: --format csv --section {HangRow.section}")


def status_line(seconds: float, communicators: int | None, hangs: Sequence[Hang]) -> str:
    """'   20.0 s  rank 2 (10.0.0.1:4711): did not join, AllReduce number 6650', or that nobody hangs.

    `communicators` is None where nobody answered.
    """
    said = [f"{some_of(each.ranks)}: {', '.join(filter(None, (each.reason.value, each.operation)))}" for each in hangs]
    if not said:
        said = ["no answer in time"]
        if communicators is not None:
            said = [f"{counted(communicators, 'communicator')}, no rank keeps others waiting"]
    return f"{seconds:8.1f} s  {'; '.join(said)}"
