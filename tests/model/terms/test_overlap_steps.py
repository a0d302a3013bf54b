"""Steps as ranks clock them, put together over ranks."""

import pytest

from gpubench.model.terms.overlap import RankSteps, StepMarks, TimeSpan, clock_steps, compute_overlap_times


def step(start: float, computed: float, begins: float, communicated: float) -> StepMarks:
    return StepMarks(TimeSpan(start, start + computed), TimeSpan(start + begins, start + communicated))


def batch(*, slower: float = 1.0) -> list[StepMarks]:
    """Steps of 3 s of computation and a collective that is done after 2, every 4 s; the first one is odd."""
    first = step(0.0, 9.0, 0.0, 9.0)
    return [first, *(step(10.0 + 4 * number, 3.0 * slower, 0.0, 2.0) for number in range(3))]


def test_the_first_step_of_a_batch_does_not_count() -> None:
    found = clock_steps(batch())
    assert [each.partner for each in found] == [3.0, 3.0, 3.0]
    assert [each.communication for each in found] == [2.0, 2.0, 2.0]
    assert [each.period for each in found] == [4.0, 4.0, 3.0], "the last one ends with what it does"


def test_in_flight_is_computation_beside_a_collective_that_is_not_done() -> None:
    assert step(0.0, 3.0, 0.0, 2.0).in_flight == 2.0
    assert step(0.0, 3.0, 1.0, 2.0).in_flight == 1.0
    assert step(0.0, 3.0, 0.0, 8.0).in_flight == 3.0
    assert step(0.0, 3.0, 4.0, 8.0).in_flight == 0.0
    assert StepMarks(TimeSpan(0.0, 1.0)).in_flight == 0.0


def test_a_collective_takes_what_the_last_rank_sees_of_it() -> None:
    early = clock_steps([step(0.0, 3.0, 0.0, 2.5)] * 2)
    late = clock_steps([step(0.0, 3.6, 0.0, 2.0)] * 2)
    found = RankSteps([early, late])
    assert found.communication == 2.0
    assert found.partner == pytest.approx(3.3)
    assert found.together == pytest.approx(3.6)
    assert found.periods.mean == pytest.approx(3.6)
    assert found.in_flight == pytest.approx(2.25)


def test_a_row_has_its_times_from_its_phases() -> None:
    alone = RankSteps([clock_steps([StepMarks(TimeSpan(0.0, 2.6))] * 3)])
    communication = RankSteps([clock_steps([StepMarks(None, TimeSpan(0.0, 1.0))] * 3)])
    first = RankSteps([clock_steps([step(0.1, 3.0, -0.1, 1.2)] * 3)])
    times = compute_overlap_times(alone, communication, first, RankSteps([clock_steps(batch())]))
    assert (times.partner_alone, times.communication_alone) == (2.6, 1.0)
    assert times.communication_first == pytest.approx(1.3)
    assert (times.partner_together, times.communication_together, times.together) == (3.0, 2.0, 3.0)
    assert times.step == pytest.approx(11 / 3)
    assert times.compute_slowdown == pytest.approx(2 / 1.6)


def test_what_is_over_before_computation_begins_tells_no_parts() -> None:
    short = RankSteps([clock_steps([StepMarks(None, TimeSpan(0.0, 50e-6))] * 3)])
    alone = RankSteps([clock_steps([StepMarks(TimeSpan(0.0, 2.6))] * 3)])
    assert compute_overlap_times(alone, short, short, RankSteps([clock_steps(batch())])).communication_first is None
