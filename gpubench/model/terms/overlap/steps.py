"""Steps of a collective and computation on two streams, as each rank's GPU clocks them, put together over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from gpubench.model.terms.overlap.times import OverlapTimes
from gpubench.model.terms.spread import Spread

HOLD_SECONDS = 15e-6
"""So much later computation begins where the collective is to have its SMs first: its launch takes 3 to 8 µs."""

_LEAST_MET = 4.0
"""Times of that: a collective that is over sooner is hardly met by computation that begins so late."""


class StepOrder(StrEnum):
    """The work of a step, and which of both gets SMs first."""

    COMPUTATION = "computation alone"
    COMMUNICATION = "communication alone"
    COMPUTATION_FIRST = "computation first"
    COMMUNICATION_FIRST = "communication first"


class TimeSpan(NamedTuple):
    """Beginning and end, in seconds since some moment."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


class StepMarks(NamedTuple):
    """One step by the marks on both streams: when each could begin, and when it was done; None is not in the step."""

    computation: TimeSpan | None = None
    communication: TimeSpan | None = None

    @property
    def start(self) -> float:
        """The beginning of what begins first."""
        return min(each.start for each in self if each is not None)

    @property
    def end(self) -> float:
        """The end of what ends last."""
        return max(each.end for each in self if each is not None)

    @property
    def in_flight(self) -> float:
        """Seconds of computation in which the collective could have begun and was not done."""
        if self.computation is None or self.communication is None:
            return 0.0
        end = min(self.computation.end, self.communication.end)
        return max(0.0, end - max(self.computation.start, self.communication.start))


class ClockedStep(NamedTuple):
    """Seconds of a step on one rank; `period` is from its beginning to that of the next."""

    partner: float
    communication: float
    together: float
    in_flight: float
    period: float


def clocked(batch: Sequence[StepMarks]) -> list[ClockedStep]:
    """The steps of a batch but the first, which begins on idle streams."""
    ends = [each.start for each in batch[1:]] + [batch[-1].end]
    return [
        ClockedStep(
            partner=0.0 if each.computation is None else each.computation.seconds,
            communication=0.0 if each.communication is None else each.communication.seconds,
            together=each.end - each.start,
            in_flight=each.in_flight,
            period=end - each.start,
        )
        for each, end in zip(batch[1:], ends[1:], strict=True)
    ]


@dataclass(frozen=True, slots=True)
class StepsOfRanks:
    """The steps of one phase, by rank; every rank has as many."""

    by_rank: Sequence[Sequence[ClockedStep]]

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.by_rank[0])

    @property
    def partner(self) -> float:
        """Computation of a step, mean over steps and ranks."""
        return fmean(step.partner for steps in self.by_rank for step in steps)

    @property
    def communication(self) -> float:
        """A collective from when the last rank could begin it: the least of all ranks, mean over steps."""
        return fmean(min(step.communication for step in ranks) for ranks in zip(*self.by_rank, strict=True))

    @property
    def together(self) -> float:
        """From the start of a step until all of it is done, on its slowest rank, mean over steps."""
        return fmean(max(step.together for step in ranks) for ranks in zip(*self.by_rank, strict=True))

    @property
    def in_flight(self) -> float:
        """Computation beside a collective that is not done, mean over steps and ranks."""
        return fmean(step.in_flight for steps in self.by_rank for step in steps)

    @property
    def periods(self) -> Spread:
        """From step to step, on the slowest rank."""
        return Spread.of([max(step.period for step in ranks) for ranks in zip(*self.by_rank, strict=True)])


def overlap_times(
    partner_alone: StepsOfRanks,
    communication_alone: StepsOfRanks,
    communication_first: StepsOfRanks | None,
    together: StepsOfRanks,
) -> OverlapTimes:
    """The times of a row from its phases; `together` are the steps in which computation gets SMs first."""
    alone = communication_alone.communication
    is_met = communication_first is not None and alone >= _LEAST_MET * HOLD_SECONDS
    return OverlapTimes(
        partner_alone=partner_alone.partner,
        communication_alone=alone,
        communication_first=communication_first.communication if communication_first is not None and is_met else None,
        partner_together=together.partner,
        communication_together=together.communication,
        together=together.together,
        step=together.periods.mean,
        in_flight=together.in_flight,
    )
