"""What groups that run at once expect of each other."""

from dataclasses import replace
from typing import Any

import pytest

from gpubench.model.results.compare import figures_of_siblings
from gpubench.model.results.report import CollectiveRow
from tests.formats.sample import ROW


def row(group: str, time_us: float, **changes: Any) -> CollectiveRow:
    return replace(ROW, group=group, time_us=time_us, busbw_gb_s=1000 / time_us, **changes)


def times(*rows: CollectiveRow) -> list[float | None]:
    return [None if each is None else each.time_us for each in figures_of_siblings(rows)]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((10.0, 11.0, 100.0, 12.0), [12.0, 12.0, 11.0, 11.0]),
        ((10.0, 100.0, 11.0), [11.0, 10.0, 10.0]),
        ((10.0, 100.0), [10.0, 10.0]),
        ((10.0,), [None]),
        ((), []),
    ],
)
def test_others_are_the_measure(measured: tuple[float, ...], expected: list[float | None]) -> None:
    assert times(*(row(f"g{number}", each) for number, each in enumerate(measured))) == expected


def test_the_source_says_how_many() -> None:
    several = figures_of_siblings([row("a", 10.0), row("b", 10.0), row("c", 20.0)])
    assert [each.source for each in several if each] == ["2 other groups of this run"] * 3
    (first, _) = figures_of_siblings([row("a", 10.0), row("b", 20.0)])
    assert first is not None
    assert (first.source, first.others, first.busbw_gb_s) == ("the faster of two groups of this run", 1, 100.0)


def test_groups_that_differ_are_no_siblings() -> None:
    assert times(row("a", 10.0), row("b", 20.0, ranks=3)) == [None, None]
    assert times(row("a", 10.0), row("b", 20.0, limit_gb_s=50.0)) == [None, None]
    assert times(row("a", 10.0), row("b", 20.0, placement="in_place")) == [None, None]


def test_wrong_data_are_no_measure() -> None:
    fast_and_wrong = row("a", 1.0, wrong=7)
    assert times(fast_and_wrong, row("b", 10.0)) == [10.0, None]
    assert times(fast_and_wrong, row("b", 10.0), row("c", 11.0)) == [10.0, 10.0, 10.0]
