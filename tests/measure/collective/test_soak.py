"""A sweep that is repeated: when it ends, what is said of it, and that wrong data are not lost."""

from dataclasses import replace
from typing import Any, cast

import pytest

from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.soak import SECONDS_BETWEEN_LINES, Soak
from gpubench.model.terms.operation import DataType, Layout, Placement, ReduceOp
from tests.formats.sample import ROW

CASES = [Case(DataType.FLOAT32, ReduceOp.SUM, Placement.OUT_OF_PLACE, Layout(size, size, size)) for size in (256, 512)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def repeated(soak: Soak, clock: Clock, seconds_a_row: float, times: dict[int, float] | None = None) -> None:
    """As measure_runs and _repeat drive it, until it is over."""
    for case in CASES:
        soak.begin(case, replace(ROW, time_us=10.0))
    while True:
        soak.cycle += 1
        for case in CASES:
            if soak.is_over():
                return
            clock.now += seconds_a_row
            soak.add(case, replace(ROW, time_us=(times or {}).get(soak.cycle, 10.0), wrong=int(soak.cycle == 3)))


@pytest.mark.parametrize("cycles", [2, 5])
def test_as_many_cycles_as_were_asked_for(cycles: int) -> None:
    clock, said = Clock(), list[str]()
    soak = Soak(cycles, said.append, clock=clock)
    repeated(soak, clock, 0.1)
    assert soak.rows == cycles * len(CASES)
    assert said == [], "all within a minute"
    wrong = "2 wrong elements" if cycles > 2 else "0 wrong elements"
    assert soak.line().startswith(f"soak: 0 min, {cycles} cycles, {cycles * 2} rows, {wrong}; slowest since")


def test_without_a_number_until_somebody_asks_for_the_end() -> None:
    clock = Clock()
    soak = Soak(0, cast("Any", None), asked_to_end=lambda: clock.now > 110, clock=clock)
    repeated(soak, clock, 1.0)
    assert soak.rows == len(CASES) + 11


def test_a_line_a_minute_names_the_slowest_since_the_last() -> None:
    clock, said = Clock(), list[str]()
    soak = Soak(10, said.append, clock=clock)
    repeated(soak, clock, SECONDS_BETWEEN_LINES / 4, {3: 2500.0, 5: 11.0})
    assert len(said) == 4
    assert said[0].startswith("soak: 1 min, 2 cycles, 6 rows, 2 wrong elements; slowest since the last line: 1K out of")
    assert said[0].endswith("2.50 ms, 10.0 µs in the first cycle")
    assert said[1].endswith("11.0 µs, 10.0 µs in the first cycle")
    assert "2.50 ms" not in "".join(said[1:])
