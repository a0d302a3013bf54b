"""The simulation of streams: cases that can be computed by hand, and what holds of every set of tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.training.events import Contention, GpuTimes, StreamTask, _Simulation, simulate

GRADIENTS = "gradients"


class Recorded(_Simulation):
    """A simulation that notes when each task ended, and how often time went on."""

    def __init__(self, tasks: list[StreamTask]) -> None:
        super().__init__(tasks)
        self.ends: dict[int, float] = {}
        self.now, self.advances = 0.0, 0
        self.times: GpuTimes = self.run()

    def _advance(self) -> None:
        self.advances += 1
        super()._advance()

    def _end(self, number: int) -> None:
        self.now = self._compute + self._slowed + sum(self._exposed.values())
        self.ends[number] = self.now
        super()._end(number)


def compute(seconds: float, *after: int, kernel_seconds: float = 0.0) -> StreamTask:
    return StreamTask(seconds=seconds, after=after, kernel_seconds=kernel_seconds)


def communicate(
    seconds: float, *after: int, source: str = "reduce", contention: Contention | None = None
) -> StreamTask:
    return StreamTask(
        seconds=seconds, stream=GRADIENTS, after=after, source=source, contention=contention or Contention()
    )


def test_streams_of_their_own_run_beside_each_other() -> None:
    times = simulate([compute(3), communicate(2)])
    assert times.total == times.compute == 3
    assert times.exposed == {}


def test_what_is_waited_for_is_exposed_by_its_source() -> None:
    times = simulate([compute(1), communicate(2, 0, source="gather"), compute(1, 1)])
    assert times.total == 4
    assert times.exposed == {"gather": 2}


def test_a_communication_behind_all_computation_is_exposed() -> None:
    times = simulate([compute(1), communicate(5, 0)])
    assert times.total == 6
    assert times.exposed == {"reduce": 5}


def test_a_stream_keeps_the_order_of_issue() -> None:
    """The second may not overtake the first, which waits for more."""
    ends = Recorded([compute(4), communicate(1, 0, source="first"), communicate(1, source="second")]).ends
    assert (ends[1], ends[2]) == (5, 6)


def test_the_one_ahead_in_the_queue_is_what_is_waited_for() -> None:
    tasks = [compute(1), communicate(4, 0, source="ahead"), communicate(1, 0, source="own"), compute(1, 2)]
    assert simulate(tasks).exposed == {"ahead": 4, "own": 1}


def test_both_slow_each_other_while_both_run() -> None:
    """2 s of communication at half speed take 4 s, in which 8 s of computation at 1/1.25 advance by 3.2."""
    found = Recorded([compute(8), communicate(2, contention=Contention(1.25, 2.0))])
    assert found.ends == pytest.approx({1: 4, 0: 8.8})
    assert found.advances == 2, "time goes on to an end and no oftener"
    assert found.times.slowed == pytest.approx(0.8)
    assert found.times.compute == pytest.approx(8)


def test_a_slowed_communication_speeds_up_once_computation_has_ended() -> None:
    times = simulate([compute(1), communicate(2, contention=Contention(1.0, 2.0))])
    assert times.total == pytest.approx(2.5)


def test_communication_waits_for_multiprocessors_and_slows_nothing_meanwhile() -> None:
    contention = Contention(compute=1.5, communication=1.0, wait_seconds=3.0)
    found = Recorded([compute(10), communicate(2, contention=contention)])
    assert found.ends[1] == pytest.approx(5)
    assert found.times.slowed == pytest.approx(2 * (1 - 1 / 1.5))


def test_nobody_waits_for_multiprocessors_that_are_free() -> None:
    contention = Contention(wait_seconds=3.0)
    assert simulate([communicate(2, contention=contention)]).total == 2
    assert simulate([compute(1), communicate(2, contention=contention)]).total == pytest.approx(3)


def test_shorter_kernels_are_waited_for_less() -> None:
    contention = Contention(wait_seconds=3.0, kernel_seconds=2.0)
    found = Recorded([compute(10, kernel_seconds=1.0), communicate(2, contention=contention)])
    assert found.ends[1] == pytest.approx(3.5)


def test_one_that_begins_amid_a_kernel_waits_for_the_rest_of_it() -> None:
    """Of two in a row the second begins 1.5 s into the second kernel of 2 s: it waits 0.5, the first a whole kernel."""
    contention = Contention(wait_seconds=2.0, kernel_seconds=2.0)
    tasks = [
        compute(8, kernel_seconds=2.0),
        communicate(1.5, contention=contention),
        communicate(1, contention=contention),
    ]
    ends = Recorded(tasks).ends
    assert (ends[1], ends[2]) == pytest.approx((3.5, 5.0))


def test_tasks_without_length_end_at_once() -> None:
    assert simulate([compute(0), compute(0, 0), communicate(1, 1), compute(0, 2)]).total == 1


def test_no_task_at_all_takes_no_time() -> None:
    assert simulate([]).total == 0


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
def test_tasks_end_behind_what_they_wait_for_and_every_second_is_accounted_for(tasks: list[StreamTask]) -> None:
    times, found = simulate(tasks), Recorded(tasks)
    assert times.compute == pytest.approx(sum(task.seconds for task in tasks if task.computes), abs=1e-9)
    assert min([times.slowed, *times.exposed.values()]) >= -1e-12
    for stream in {task.stream for task in tasks}:
        assert times.total >= sum(task.seconds for task in tasks if task.stream == stream) - 1e-9
    assert len(found.ends) == len(tasks)
    last: dict[str, float] = {}
    for number, task in enumerate(tasks):
        begun = found.ends[number] - task.seconds
        assert all(found.ends[each] <= begun + 1e-9 for each in task.after)
        assert begun >= last.get(task.stream, 0.0) - 1e-9
        last[task.stream] = found.ends[number]
    assert found.times.total == pytest.approx(max(found.ends.values()), abs=1e-9)
