"""Timing of rows with fake clocks."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, cast

import pytest
from msgspec.structs import replace

from gpubench.measure.collective.cases import OwnTimes, Timer
from gpubench.model.terms.statistics import Mode, Sampling
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
    """A backend whose operations take `seconds`. `ran` lists the operations."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.next_seconds = seconds
        self.loops: list[int] = []
        self.batches: list[int] = []

    def bind(self, launches: Sequence[Launch], _replays: int) -> Batched:
        return Batched(launches, 1, self.next_seconds)

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> Batched:
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
    launched = [0] * buffers

    def body(group: ThreadGroup) -> OwnTimes:
        def launch(buffer: int) -> Launch:
            def issue() -> None:
                launched[buffer] += group.rank == 0

            return issue

        timer = Timer(sampling, group, cast("Backend", backends[group.rank]), replays)
        launches = [launch(buffer) for buffer in range(buffers)]
        each = timer.estimate_seconds(launches, warm)
        launched[:] = [0] * buffers
        return timer.time(launches, each, lambda: None)

    return run_ranks(len(backends), body), launched


def steady(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def turning(*seconds: float) -> Callable[[], float]:
    position = count()
    return lambda: seconds[next(position) % len(seconds)]


def test_noisy_operations_are_timed_until_the_interval_is_tight() -> None:
    backend = Clocked(turning(1e-3, 1.1e-3, 0.95e-3, 1.02e-3, 0.9e-3, 1.04e-3, 0.99e-3))
    (own,), _ = timed(Sampling(iterations=None, budget_seconds=10), [backend], warm=1e-3)
    assert len(backend.loops) > 2
    assert own.interval is not None
    assert own.interval <= 0.01
    assert own.note is None


def test_ranks_with_different_clocks_run_the_same_operations() -> None:
    backends = [Clocked(steady(1e-3)), Clocked(turning(1e-3, 1.5e-3, 0.5e-3, 1.2e-3)), Clocked(steady(2e-3))]
    owns, _ = timed(Sampling(iterations=None, budget_seconds=0.2), backends, warm=1e-3)
    assert len({own.iterations for own in owns}) == 1
    assert len({own.batches for own in owns}) == 1
    assert len({own.note for own in owns}) == 1
    assert {tuple(backend.loops) for backend in backends} == {tuple(backends[0].loops)}


@pytest.mark.parametrize("seconds", [0.0, 1e-7])
def test_operations_without_duration_end(seconds: float) -> None:
    (own,), _ = timed(AUTO, [Clocked(steady(seconds))])
    assert own.iterations > 0
    assert own.seconds == pytest.approx(seconds)


def test_single_operations_run_until_the_interval_is_tight_or_the_budget_is_spent() -> None:
    (known,), _ = timed(Sampling(Mode.LATENCY, None), [Clocked(turning(1e-6, 1.01e-6))])
    assert known.iterations == 100
    (unknown,), _ = timed(Sampling(Mode.LATENCY, None, 1e-3), [Clocked(turning(1e-6, 1e-6, 9e-6))])
    assert unknown.iterations == 100, "a row of this size would take more than the budget"
    assert "budget 0.001 s; ±1 % takes about 0.1" in str(unknown.note)
    (more,), _ = timed(Sampling(Mode.LATENCY, None, 1.0), [Clocked(turning(1e-6, 1e-6, 9e-6))])
    assert more.iterations > 100
    assert more.note is None


@pytest.mark.parametrize(
    "sampling",
    [Sampling(iterations=30), Sampling(iterations=None, budget_seconds=0.02), Sampling(Mode.THROUGHPUT, 1)],
    ids=["fixed", "auto", "one"],
)
def test_percentiles_come_from_a_second_loop_that_leaves_the_plain_one_as_it_is(sampling: Sampling) -> None:
    plain, with_second = [[Clocked(steady(1e-3)), Clocked(turning(1e-3, 2e-3, 1e-3))] for _ in range(2)]
    means, launched = timed(sampling, plain, warm=1e-3)
    owns, launched_twice = timed(replace(sampling, percentiles=True), with_second, warm=1e-3)
    assert [replace(own, percentiles=None) for own in owns] == means
    for alone, backend in zip(plain, with_second, strict=True):
        assert backend.loops[:-1] == alone.loops
        assert backend.batches == [*alone.batches, 1]
    extra = sampling.iterations or 20  # What fits into 20 ms, and never fewer
    assert with_second[0].loops[-1] == extra + 1
    assert launched_twice[0] - launched[0] == extra + 1
    assert len({own.percentiles for own in owns}) == 1


def test_a_percentile_is_of_the_slowest_rank_of_each_operation() -> None:
    backends = [Clocked(turning(*[1e-3] * 60, 1e-3, 5e-3)), Clocked(turning(*[2e-3] * 60, 9e-3, 2e-3))]
    owns, _ = timed(Sampling(iterations=60, percentiles=True), backends)
    found = owns[0].percentiles
    assert found is not None
    assert (found.p50_seconds, found.p99_seconds) == (2e-3, 5e-3)
