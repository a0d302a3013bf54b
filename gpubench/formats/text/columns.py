"""Columns of text that make room by leaving some out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpubench.model.terms.foreign_text import printable_line
from gpubench.model.terms.verdict import Verdict

_GAP = "  "

VERDICT_MARKS = {Verdict.FAIL: "!", Verdict.WARN: "*", Verdict.INCONCLUSIVE: "~"}
"""Behind a figure that is not as it should be, so that it is seen without colours too."""


def verdict_mark(verdict: str | None) -> str:
    """The mark of a verdict; none where nothing is wrong, or nothing was judged."""
    return VERDICT_MARKS.get(Verdict(verdict), "") if verdict else ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, a cell a line, and when it goes: the highest `spare` first, 0 never.

    Cells are as they are shown: escapes take more room than the characters that they stand for.
    """

    head: str
    cells: Sequence[str]
    spare: int = 0
    right: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(map(printable_line, self.cells)))

    @property
    def width(self) -> int:
        """Of its widest cell."""
        return max(map(len, (self.head, *self.cells)))


def fitting(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """The columns that fit a width; what may not go stays, however narrow it is."""
    kept = list(columns)
    while _width(kept) > width:
        spare = max(kept, key=lambda column: column.spare)
        if not spare.spare:
            break
        kept.remove(spare)
    return tuple(kept)


def fitted_lines(columns: Sequence[Column], width: int, keys: int = 1) -> Iterator[str]:
    """The lines of a table that fits a width: columns that can be spared go, and of the others a further table below
    has those that have no room. The first `keys` columns, which say what a line is of, stand in each.
    """
    kept = fitting(columns, width)
    names, rest = kept[:keys], kept[keys:]
    while rest:
        most = len(rest)
        while most > 1 and _width((*names, *rest[:most])) > width:
            most -= 1
        yield from lines((*names, *rest[:most]))
        rest = rest[most:]
        if rest:
            yield ""
    if len(kept) <= keys:
        yield from lines(kept)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + len(_GAP) for column in columns) - len(_GAP)


def lines(columns: Sequence[Column]) -> Iterator[str]:
    """The head, then line by line."""
    for cells in zip(*((column.head, *column.cells) for column in columns), strict=True):
        yield _GAP.join(
            cell.rjust(column.width) if column.right else cell.ljust(column.width)
            for cell, column in zip(cells, columns, strict=True)
        ).rstrip()
