"""The simulation of streams: cases that can be computed by hand, and what holds of every set of tasks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.measure.plan import events
from gpubench.measure.plan.events import Contention, StreamTask, simulate

GRADIENTS = "gradients"


def compute(seconds: float, *after: int, kernel_seconds: float = 0.0) -> StreamTask:
    return StreamTask(name="c", seconds=seconds, after=after, kernel_seconds=kernel_seconds)


def communicate(
    seconds: float, *after: int, source: str = "reduce", contention: Contention | None = None
) -> StreamTask:
    return StreamTask(
        name="m",
        seconds=seconds,
        stream=GRADIENTS,
        after=after,
        source=source,
        contention=contention or Contention(),
    )


def test_streams_of_their_own_run_beside_each_other() -> None:
    timeline = simulate([compute(3), communicate(2)])
    assert timeline.seconds == 3
    assert timeline.times.exposed == {}
    assert timeline.times.compute == 3


def test_what_is_waited_for_is_exposed_by_its_source() -> None:
    timeline = simulate([compute(1), communicate(2, 0, source="gather"), compute(1, 1)])
    assert timeline.seconds == 4
    assert timeline.times.exposed == {"gather": 2}
    assert [(each.start, each.end, each.source) for each in timeline.idle] == [(1, 3, "gather")]


def test_a_communication_behind_all_computation_is_exposed() -> None:
    timeline = simulate([compute(1), communicate(5, 0)])
    assert timeline.seconds == 6
    assert timeline.times.exposed == {"reduce": 5}


def test_a_stream_keeps_the_order_of_issue() -> None:
    """The second may not overtake the first, which waits for more."""
    timeline = simulate([compute(4), communicate(1, 0, source="first"), communicate(1, source="second")])
    spans = {span.task: span for span in timeline.spans}
    assert (spans[1].start, spans[2].start) == (4, 5)


def test_the_one_ahead_in_the_queue_is_what_is_waited_for() -> None:
    tasks = [compute(1), communicate(4, 0, source="ahead"), communicate(1, 0, source="own"), compute(1, 2)]
    assert simulate(tasks).times.exposed == {"ahead": 4, "own": 1}


def test_both_slow_each_other_while_both_run() -> None:
    """2 s of communication at half speed take 4 s, in which 8 s of computation at 1/1.25 advance by 3.2."""
    timeline = simulate([compute(8), communicate(2, contention=Contention(1.25, 2.0))])
    spans = {span.task: span for span in timeline.spans}
    assert spans[1].end == pytest.approx(4)
    assert timeline.seconds == pytest.approx(8.8)
    assert timeline.times.slowed == pytest.approx(0.8)
    assert timeline.times.compute == pytest.approx(8)


def test_time_goes_on_to_an_end_and_no_oftener(monkeypatch: pytest.MonkeyPatch) -> None:
    advance, times = events._Simulation._advance, list[float]()

    def advanced(simulation: events._Simulation) -> None:
        advance(simulation)
        times.append(simulation._now)

    monkeypatch.setattr(events._Simulation, "_advance", advanced)
    simulate([compute(8), communicate(2, contention=Contention(1.25, 2.0))])
    assert times == pytest.approx([4, 8.8])


def test_a_slowed_communication_speeds_up_once_computation_has_ended() -> None:
    timeline = simulate([compute(1), communicate(2, contention=Contention(1.0, 2.0))])
    assert timeline.seconds == pytest.approx(2.5)


def test_communication_waits_for_multiprocessors_and_slows_nothing_meanwhile() -> None:
    contention = Contention(compute=1.5, communication=1.0, wait_seconds=3.0)
    timeline = simulate([compute(10), communicate(2, contention=contention)])
    spans = {span.task: span for span in timeline.spans}
    assert spans[1].end == pytest.approx(5)
    assert timeline.times.slowed == pytest.approx(2 * (1 - 1 / 1.5))


def test_nobody_waits_for_multiprocessors_that_are_free() -> None:
    contention = Contention(wait_seconds=3.0)
    assert simulate([communicate(2, contention=contention)]).seconds == 2
    assert simulate([compute(1), communicate(2, contention=contention)]).seconds == pytest.approx(3)


def test_shorter_kernels_are_waited_for_less() -> None:
    contention = Contention(wait_seconds=3.0, kernel_seconds=2.0)
    timeline = simulate([compute(10, kernel_seconds=1.0), communicate(2, contention=contention)])
    assert {span.task: span.end for span in timeline.spans}[1] == pytest.approx(3.5)


def test_one_that_begins_amid_a_kernel_waits_for_the_rest_of_it() -> None:
    """Of two in a row the second begins 1.5 s into the second kernel of 2 s: it waits 0.5, the first a whole kernel."""
    contention = Contention(wait_seconds=2.0, kernel_seconds=2.0)
    tasks = [
        compute(8, kernel_seconds=2.0),
        communicate(1.5, contention=contention),
        communicate(1, contention=contention),
    ]
    first, second = (span for span in simulate(tasks).spans if span.task)
    assert (first.start, first.end) == pytest.approx((0, 3.5))
    assert (second.start, second.end) == pytest.approx((3.5, 5.0))


def test_tasks_without_length_end_at_once() -> None:
    timeline = simulate([compute(0), compute(0, 0), communicate(1, 1), compute(0, 2)])
    assert timeline.seconds == 1


def test_no_task_at_all_takes_no_time() -> None:
    assert simulate([]).seconds == 0


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([compute(1, 1), compute(1, 0)])


@st.composite
def programs(draw: st.DrawFn) -> list[StreamTask]:
    """Tasks that wait for earlier ones."""
    tasks: list[StreamTask] = []
    for number in range(draw(st.integers(1, 14))):
        after = tuple(draw(st.sets(st.integers(0, number - 1), max_size=3))) if number else ()
        seconds = draw(st.one_of(st.just(0.0), st.floats(1e-6, 2.0)))
        if draw(st.booleans()):
            tasks.append(compute(seconds, *after, kernel_seconds=seconds))
            continue
        slow = Contention(
            draw(st.floats(1.0, 3.0)), draw(st.floats(1.0, 6.0)), draw(st.floats(0.0, 0.5)), draw(st.floats(0.0, 0.5))
        )
        tasks.append(communicate(seconds, *after, contention=slow))
    return tasks


@given(programs())
def test_every_instant_of_a_gpu_is_accounted_for(tasks: list[StreamTask]) -> None:
    timeline = simulate(tasks)
    times = timeline.times
    assert times.total == pytest.approx(timeline.seconds, abs=1e-9)
    assert times.compute == pytest.approx(sum(task.seconds for task in tasks if task.computes), abs=1e-9)
    assert min([times.slowed, *times.exposed.values()]) >= -1e-12


@given(programs())
def test_a_step_is_no_shorter_than_any_stream(tasks: list[StreamTask]) -> None:
    timeline = simulate(tasks)
    for stream in {task.stream for task in tasks}:
        alone = sum(task.seconds for task in tasks if task.stream == stream)
        assert timeline.seconds >= alone - 1e-9


@given(programs())
def test_tasks_begin_behind_what_they_wait_for_and_in_order(tasks: list[StreamTask]) -> None:
    timeline = simulate(tasks)
    spans = {span.task: span for span in timeline.spans}
    assert len(spans) == len(tasks)
    last: dict[str, float] = {}
    for number, task in enumerate(tasks):
        assert all(spans[each].end <= spans[number].start + 1e-9 for each in task.after)
        assert spans[number].start >= last.get(task.stream, 0.0) - 1e-9
        last[task.stream] = spans[number].end
    assert math.isclose(timeline.seconds, max(span.end for span in timeline.spans), abs_tol=1e-9)
