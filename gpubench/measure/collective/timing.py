"""The timing of one row: a number of operations at once, batches until their mean is known, or each operation alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from time import perf_counter

from gpubench.model.terms.statistics.lateness import ClockOffset, EntryTimes, common_clock
from gpubench.model.terms.statistics.samples import BatchTimes, Percentiles, RankTimes, RowTimes
from gpubench.model.terms.statistics.sampling import FIRST_BATCHES, INTERVAL, Effort, Mode, Sampling, operations_a_batch
from gpubench.model.terms.statistics.spread import Spread
from gpubench.ports.group import Group
from gpubench.ports.launch import IssueClock, Launch, LaunchTimer

_SECONDS_TO_LEARN = 2e-3
"""Of operations back to back, to learn how long one takes: a short warm-up says too much of the first of them."""

_MOST_TO_LEARN = 1000

_FIRST_ALONE = 100
"""Operations alone that are timed before anything is decided."""

_MOST_SAMPLES = 10_000
"""That are kept of a row: a recording of a sweep stays within what is read of a file."""


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """A rank's times of a row: its seconds an operation, how many of them, and what all ranks agreed on.

    `samples` are the first of the seconds that this rests on, where there are several: of this rank's batches, or of
    operations alone by their slowest rank. `issue_seconds` are those that this rank's host takes to issue an operation.
    """

    seconds: float
    iterations: int
    batches: BatchTimes | None = None
    percentiles: Percentiles | None = None
    interval: float | None = None
    note: str | None = None
    entries: EntryTimes | None = None
    samples: tuple[float, ...] = ()
    issue_seconds: float | None = None

    def with_others(self, seconds_by_rank: Sequence[float]) -> RowTimes:
        """The row's, once every rank's seconds are known."""
        ranks = RankTimes.of(seconds_by_rank)
        return RowTimes(ranks, self.iterations, self.batches, self.percentiles, self.interval, self.note)


@dataclass(frozen=True, slots=True)
class Timer:
    """Times the operations of a row on this rank; every rank calls every method alike."""

    sampling: Sampling
    group: Group
    backend: LaunchTimer
    graph_replays: int

    def learn(self, launches: Sequence[Launch], warm_seconds: float) -> float:
        """Seconds an operation takes among others on the slowest rank, where that decides what a batch is.

        In the warm-up each took `warm_seconds` on this rank, 0 where there was none. What runs here is not timed.
        """
        if not self._in_batches:
            return warm_seconds
        (seconds,) = self.group.largest([warm_seconds])
        if seconds < _SECONDS_TO_LEARN:
            count = min(_MOST_TO_LEARN, max(1, int(_SECONDS_TO_LEARN / seconds))) if seconds else 1
            learnt = self.backend.together(self.backend.bind(in_turn(launches, count), 0)) / count
            (seconds,) = self.group.largest([learnt])
        return seconds

    def time(self, launches: Sequence[Launch], seconds_each: float, clean: Callable[[], None]) -> OwnTimes:
        """Time operations that go round `launches`, each of which takes about as long as was learnt.

        `clean` makes the buffers ready for what is timed, after the last operation that is not.
        """
        if self.sampling.mode is Mode.LATENCY:
            clean()
            return self._alone(launches)
        if self._in_batches:
            clean()
            return self._batches(launches, operations_a_batch(seconds_each))
        return self._at_once(launches, self.sampling.least_iterations, clean)

    def _at_once(self, launches: Sequence[Launch], iterations: int, clean: Callable[[], None]) -> OwnTimes:
        """nccl-tests' loop: one more operation that is waited for, a barrier, and one time for all."""
        timed = self.backend.bind(in_turn(launches, iterations), self.graph_replays)
        operations = iterations * max(1, self.graph_replays)
        self.backend.once(launches[0])
        clean()
        seconds = self.backend.together(timed) / operations
        return OwnTimes(seconds, iterations, issue_seconds=self._issue_seconds(timed, operations))

    def _issue_seconds(self, timed: Launch, operations: int) -> float | None:
        """Seconds of this rank's host to issue an operation of what was timed last, where that is known."""
        clock = self.backend
        return clock.issue_seconds(timed, operations) if isinstance(clock, IssueClock) else None

    @property
    def _in_batches(self) -> bool:
        return self.sampling.mode is Mode.THROUGHPUT and self.sampling.iterations is None

    def _batches(self, launches: Sequence[Launch], a_batch: int) -> OwnTimes:
        """Loops of batches of so many operations, until their mean is known well enough or the budget is spent."""
        seconds, operations, values, issued = 0.0, 0, list[float](), list[float]()
        more = FIRST_BATCHES
        while True:
            count = (more + 1) * a_batch
            timed = self.backend.in_batches(in_turn(launches, count), a_batch)
            seconds += self.backend.together(timed)
            operations += count
            values += timed.batch_seconds()
            each = self._issue_seconds(timed, count)
            issued += [] if each is None else [each]
            batches, effort = self._agree(values, a_batch, seconds)
            more = effort.further(self.sampling.budget_seconds)
            if not more:
                return OwnTimes(
                    seconds / operations,
                    operations,
                    batches,
                    interval=batches.interval,
                    note=self._note(effort),
                    samples=tuple(values[:_MOST_SAMPLES]),
                    issue_seconds=min(issued, default=None),
                )

    def _agree(self, values: Sequence[float], a_batch: int, seconds: float) -> tuple[BatchTimes, Effort]:
        """The first rank's statistics of all ranks' batches, and the effort spent on them."""
        collected = self.group.collect((Spread.of(values), seconds))
        decision = None
        if collected is not None:
            spreads = [spread for spread, _ in collected]
            batches = BatchTimes.of(spreads, a_batch)
            slowest = max(spent for _, spent in collected)
            each = max(spread.mean for spread in spreads)
            decision = batches, Effort(len(values), each, batches.interval, slowest)
        return self.group.broadcast(decision)

    def _alone(self, launches: Sequence[Launch]) -> OwnTimes:
        """Operation by operation, each begun together and waited for.

        An operation takes as long as it does on its slowest rank, by the clock of the host: launch and completion are
        in it.
        """
        bound = [self.backend.bind([launch], self.graph_replays) for launch in launches]
        divisor = max(1, self.graph_replays)
        own, values = list[float](), list[float]()
        more = _FIRST_ALONE if self.sampling.iterations is None else self.sampling.iterations
        entered, before, start = list[float](), self.group.clock_offset(), perf_counter()
        while True:
            fresh = []
            for launch in islice(cycle(bound), more):
                self.group.barrier()
                entered.append(perf_counter())
                fresh.append(self.backend.seconds(launch) / divisor)
            own += fresh
            values += self.group.largest(fresh)
            spread = Spread.of(values)
            effort = Effort(len(values), spread.mean * divisor, spread.interval, sum(values) * divisor)
            more = 0 if self.sampling.iterations else effort.further(self.sampling.budget_seconds)
            if not more:
                return OwnTimes(
                    seconds=fmean(own),
                    iterations=len(own),
                    percentiles=Percentiles.of(values),
                    interval=spread.interval,
                    note=self._note(effort),
                    entries=self._entries(entered, before, start),
                    samples=tuple(values[:_MOST_SAMPLES]),
                )

    def _entries(self, entered: Sequence[float], before: ClockOffset, start: float) -> EntryTimes:
        """When this rank entered operations, against all others; the clocks were compared `before`, at `start`."""
        end, after = perf_counter(), self.group.clock_offset()
        own = common_clock(entered, before, after, start, end)
        last = self.group.largest(own)
        first = [-each for each in self.group.largest([-each for each in own])]
        return EntryTimes.of(own, first, last, max(before.uncertainty, after.uncertainty))

    def _note(self, effort: Effort) -> str | None:
        """The note of a row whose interval did not get tight within the budget."""
        interval = effort.interval
        if self.sampling.iterations is not None or (interval is not None and interval <= INTERVAL):
            return None
        if interval is None:
            return f"95 % interval unknown after {effort.count} values"
        needed = f"±{100 * INTERVAL:g} % takes about {effort.seconds_needed():.2g} s"
        return f"95 % interval ±{100 * interval:.1f} %, budget {self.sampling.budget_seconds:g} s; {needed}"


def in_turn(launches: Sequence[Launch], count: int) -> list[Launch]:
    """So many launches, each of those that there are in its turn."""
    return list(islice(cycle(launches), count))
