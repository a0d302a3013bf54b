"""What groups that run at once expect of each other."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.model.results.compare import find_sibling_figures
from gpubench.model.results.report import CollectiveRow
from tests.formats.sample import ROW


def row(group: str, time_us: float, **changes: Any) -> CollectiveRow:
    return replace(ROW, group=group, time_us=time_us, busbw_gb_s=1000 / time_us, **changes)


def times(*rows: CollectiveRow) -> list[float | None]:
    return [None if figure is None else figure.time_us for figure in find_sibling_figures(rows)]


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


def test_wrong_data_are_no_measure() -> None:
    fast_and_wrong = row("a", 1.0, wrong=7)
    assert times(fast_and_wrong, row("b", 10.0)) == [10.0, None]
    assert times(fast_and_wrong, row("b", 10.0), row("c", 11.0)) == [10.0, 10.0, 10.0]
