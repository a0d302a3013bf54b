"""Groups of ranks that ran the same at once, as a source of expected values for each other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.row_keys import collective_key
from gpubench.model.terms.units import counted

LEAST_OTHERS = 2
"""Of fewer none is the usual one; of two groups the faster is what both should reach."""


@dataclass(frozen=True, slots=True)
class SiblingFigure:
    """What other groups of a run reached, with how many there are, and the source in words."""

    time_us: float
    busbw_gb_s: float
    others: int
    source: str


def figures_of_siblings(rows: Sequence[CollectiveRow]) -> list[SiblingFigure | None]:
    """For each of the rows that all groups of a run have of one case, what the others reach; None where none is alike.

    Groups are alike where the rows have the same ranks, nodes and limit. Of several others the middle one counts, of
    an even number the faster of the two in the middle, so that one slow group among three does not become the measure;
    of two groups the faster one. A row with wrong data is no measure.
    """
    return [_figure(number, row, rows) for number, row in enumerate(rows)]


def _figure(number: int, row: CollectiveRow, rows: Sequence[CollectiveRow]) -> SiblingFigure | None:
    others = [each for place, each in enumerate(rows) if place != number and _are_alike(each, row) and not each.wrong]
    if not others:
        return None
    if len(others) < LEAST_OTHERS:
        own = [row] if not row.wrong else []
        return _of(min((*own, *others), key=_time), 1, "the faster of two groups of this run")
    middle = sorted(others, key=_time)[(len(others) - 1) // 2]
    return _of(middle, len(others), f"{counted(len(others), 'other group')} of this run")


def _of(row: CollectiveRow, others: int, source: str) -> SiblingFigure:
    return SiblingFigure(row.time_us, row.reached_gb_s, others, source)


def _time(row: CollectiveRow) -> float:
    return row.time_us


def _are_alike(one: CollectiveRow, other: CollectiveRow) -> bool:
    keys = [replace(collective_key(row), group=None) for row in (one, other)]
    return keys[0] == keys[1] and one.limit_gb_s == other.limit_gb_s
