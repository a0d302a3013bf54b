"""How rows are timed, with backends whose clocks are made up."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, cast

import pytest

from gpubench.measure.collective.cases import OwnTimes, Timer
from gpubench.model.terms.statistics import FIRST_BATCHES, Mode, Sampling
from gpubench.ports.backend import Launch
from tests.fakes.ranks import ThreadGroup, run_ranks

if TYPE_CHECKING:
    from gpubench.ports.backend import Backend

AUTO = Sampling(iterations=None)


class Batched:
    def __init__(self, launches: Sequence[Launch], operations: int, seconds: Callable[[], float]) -> None:
        self.launches = launches
        self.seconds: list[float] = []
        self._operations = operations
        self._next_seconds = seconds

    def __call__(self) -> None:
        self.seconds = []
        for start in range(0, len(self.launches), self._operations):
            batch = self.launches[start : start + self._operations]
            for launch in batch:
                launch()
            self.seconds.append(sum(self._next_seconds() for _ in batch))

    def batch_seconds(self) -> list[float]:
        return self.seconds[1:]


class Clocked:
    """Every operation lasts as long as `seconds` says next; what ran is in `ran`."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.next_seconds = seconds
        self.loops: list[int] = []
        self.batches: list[int] = []

    def bind(self, launches: Sequence[Launch], _replays: int) -> Batched:
        return Batched(launches, 1, self.next_seconds)

    def in_batches(self, launches: Sequence[Launch], operations: int) -> Batched:
        self.batches.append(operations)
        return Batched(launches, operations, self.next_seconds)

    def once(self, _launch: Launch) -> None:
        """Nothing that counts."""

    def seconds(self, launch: Batched) -> float:
        launch()
        self.loops.append(len(launch.launches))
        return sum(launch.seconds)

    together = seconds


def timed(
    sampling: Sampling, backends: Sequence[Clocked], *, buffers: int = 1, warm: float = 0.0, replays: int = 0
) -> tuple[list[OwnTimes], list[int]]:
    """What each rank found, and how often the first launched each buffer."""
    launched = [0] * buffers

    def body(group: ThreadGroup) -> OwnTimes:
        def launch(buffer: int) -> Launch:
            def issue() -> None:
                launched[buffer] += group.rank == 0

            return issue

        timer = Timer(sampling, group, cast("Backend", backends[group.rank]), replays)
        launches = [launch(buffer) for buffer in range(buffers)]
        each = timer.learn(launches, warm)
        launched[:] = [0] * buffers
        return timer.time(launches, each, lambda: None)

    return run_ranks(len(backends), body), launched


def steady(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def turning(*seconds: float) -> Callable[[], float]:
    """These, again and again."""
    position = count()
    return lambda: seconds[next(position) % len(seconds)]


def test_a_given_number_is_one_loop_and_nothing_else() -> None:
    backend = Clocked(steady(3e-6))
    (own,), launched = timed(Sampling(iterations=7), [backend], buffers=3, warm=1e-6)
    assert own.seconds == pytest.approx(3e-6)
    assert own.iterations == 7
    assert (own.batches, own.percentiles, own.interval, own.note) == (None, None, None, None)
    assert backend.loops == [7]
    assert backend.batches == []
    assert launched == [3, 2, 2]


class Issuing(Clocked):
    """The host takes so long to issue an operation, of a loop that is short enough to tell."""

    def __init__(self, seconds: float, *issued: float | None) -> None:
        super().__init__(steady(seconds))
        self.asked: list[int] = []
        self._issued = list(issued)

    def issue_seconds(self, launch: Batched, operations: int) -> float | None:
        assert len(launch.launches) == operations
        self.asked.append(operations)
        return self._issued.pop(0) if len(self._issued) > 1 else self._issued[0]


def test_the_time_to_issue_an_operation_is_that_of_the_loop_that_is_timed() -> None:
    backend = Issuing(9e-6, 6e-6)
    (own,), _ = timed(Sampling(iterations=7), [backend])
    assert (own.issue_seconds, backend.asked) == (6e-6, [7])
    (own,), _ = timed(Sampling(iterations=7), [Issuing(9e-6, None)])
    assert own.issue_seconds is None
    (own,), _ = timed(Sampling(iterations=7), [Clocked(steady(9e-6))])
    assert own.issue_seconds is None


def test_of_several_loops_the_quickest_to_issue_counts() -> None:
    """What the host surely needs: the first of them finds caches cold."""
    (own,), _ = timed(AUTO, [Issuing(10e-6, 9e-6)], warm=10e-6)
    assert own.issue_seconds == 9e-6
    (own,), _ = timed(Sampling(Mode.LATENCY, iterations=5), [Issuing(10e-6, 9e-6)])
    assert own.issue_seconds is None, "operations alone are waited for"


def test_what_does_not_vary_is_timed_for_as_many_batches_as_are_needed_to_know_it() -> None:
    backend = Clocked(steady(10e-6))
    (own,), launched = timed(AUTO, [backend], buffers=5, warm=30e-6)
    assert backend.loops[0] == 66, "2 ms of them, to learn what they take"
    assert backend.batches == [100], "1 ms of work"
    assert own.iterations == backend.loops[1] == (FIRST_BATCHES + 1) * 100
    assert own.interval == pytest.approx(0, abs=1e-6)
    assert own.batches is not None
    assert own.batches.median_seconds == pytest.approx(10e-6)
    assert own.note is None
    assert min(launched) >= 1


def test_large_operations_are_batches_of_their_own_and_need_not_be_learnt() -> None:
    backend = Clocked(steady(17e-3))
    (own,), launched = timed(AUTO, [backend], buffers=FIRST_BATCHES, warm=17e-3)
    assert backend.loops == [FIRST_BATCHES + 1]
    assert own.iterations == FIRST_BATCHES + 1
    assert min(launched) >= 1, "every buffer that is verified was timed"


def test_what_varies_is_timed_until_it_is_known_well_enough() -> None:
    backend = Clocked(turning(1e-3, 1.1e-3, 0.95e-3, 1.02e-3, 0.9e-3, 1.04e-3, 0.99e-3))
    (own,), _ = timed(Sampling(iterations=None, budget_seconds=10), [backend], warm=1e-3)
    assert len(backend.loops) > 2
    assert own.interval is not None
    assert own.interval <= 0.01
    assert own.note is None


def test_a_budget_that_is_spent_says_what_was_reached() -> None:
    backend = Clocked(turning(1e-3, 3e-3, 2e-3, 1e-3))
    (own,), _ = timed(Sampling(iterations=None, budget_seconds=0.03), [backend], warm=2e-3)
    assert own.interval is not None
    assert own.interval > 0.01
    assert own.note is not None
    assert own.note.startswith(f"95 % interval ±{100 * own.interval:.1f} %, budget 0.03 s; ±1 % takes about ")


def test_no_more_than_a_trial_is_spent_where_the_budget_would_not_do() -> None:
    noisy = [turning(1e-3, 3e-3, 2e-3, 1e-3) for _ in range(2)]
    budgets = (0.4, 40.0)
    few, many = (
        timed(Sampling(iterations=None, budget_seconds=budget), [Clocked(clock)], warm=2e-3)[0][0]
        for budget, clock in zip(budgets, noisy, strict=True)
    )
    assert few.iterations * 2e-3 < 0.15 < 1 < many.iterations * 2e-3 < 40
    assert few.note is not None
    assert many.note is None
    # What it says of the seconds that it takes is about what it took.
    assert float(few.note.split(" about ")[1].removesuffix(" s")) == pytest.approx(many.iterations * 2e-3, rel=0.5)


def test_all_ranks_do_the_same_whatever_their_clocks_say() -> None:
    backends = [Clocked(steady(1e-3)), Clocked(turning(1e-3, 1.5e-3, 0.5e-3, 1.2e-3)), Clocked(steady(2e-3))]
    owns, _ = timed(Sampling(iterations=None, budget_seconds=0.2), backends, warm=1e-3)
    assert len({own.iterations for own in owns}) == 1
    assert len({own.batches for own in owns}) == 1
    assert len({own.note for own in owns}) == 1
    assert {tuple(backend.loops) for backend in backends} == {tuple(backends[0].loops)}


@pytest.mark.parametrize("seconds", [0.0, 1e-7])
def test_operations_that_take_no_time_come_to_an_end(seconds: float) -> None:
    (own,), _ = timed(AUTO, [Clocked(steady(seconds))])
    assert own.iterations > 0
    assert own.seconds == pytest.approx(seconds)


def test_operations_alone_have_percentiles_over_the_slowest_rank() -> None:
    slow_at_times = Clocked(turning(*[1e-6] * 9, 50e-6))
    owns, launched = timed(Sampling(Mode.LATENCY, 40), [Clocked(steady(2e-6)), slow_at_times], buffers=3)
    assert set(slow_at_times.loops) == {1}
    assert launched == [14, 13, 13]
    for own in owns:
        assert own.percentiles is not None
        assert own.percentiles.p50_seconds == pytest.approx(2e-6), "the steady rank is the slower one nine times of ten"
        assert own.percentiles.p95_seconds == own.percentiles.p99_seconds == pytest.approx(50e-6)
        assert (own.iterations, own.batches, own.note) == (40, None, None)
    assert owns[0].seconds == pytest.approx(2e-6)


def test_operations_alone_until_they_are_known_well_enough_or_time_is_up() -> None:
    (known,), _ = timed(Sampling(Mode.LATENCY, None), [Clocked(turning(1e-6, 1.01e-6))])
    assert known.iterations == 100
    (unknown,), _ = timed(Sampling(Mode.LATENCY, None, 1e-3), [Clocked(turning(1e-6, 1e-6, 9e-6))])
    assert unknown.iterations == 100, "a row of this size would take more than the budget"
    assert "budget 0.001 s; ±1 % takes about 0.1" in str(unknown.note)
    (more,), _ = timed(Sampling(Mode.LATENCY, None, 1.0), [Clocked(turning(1e-6, 1e-6, 9e-6))])
    assert more.iterations > 100
    assert more.note is None


def test_replays_of_a_graph_alone_count_for_all_that_they_hold() -> None:
    (own,), _ = timed(Sampling(Mode.LATENCY, 5), [Clocked(steady(8e-6))], replays=4)
    assert own.seconds == pytest.approx(2e-6)


def test_replays_of_a_graph_in_one_loop_count_for_all_that_they_hold() -> None:
    (own,), _ = timed(Sampling(iterations=4), [Clocked(steady(8e-6))], replays=5)
    assert own.seconds == pytest.approx(8e-6 / 5)
