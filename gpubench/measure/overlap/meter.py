"""Phases of steps, each run until it has settled and then measured, on all ranks alike."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import NamedTuple

from gpubench.model.facts.gpu_load import GpuLoad, load_of_ranks, mean_load
from gpubench.model.terms.overlap.asked import Partner
from gpubench.model.terms.overlap.steps import ClockedStep, StepOrder, StepsOfRanks, clocked
from gpubench.model.terms.progress import Progress
from gpubench.ports.group import Group
from gpubench.ports.launch import Launch
from gpubench.ports.steps import OverlapSteps

_SECONDS_A_BATCH = 0.06
_FEWEST_STEPS = 3
"""Of a batch, the first of which does not count."""

_MOST_QUEUED = 900
"""Launches that a stream takes before the host has to wait; a step has some beside its operations."""

_BESIDE_OPERATIONS = 8

_SETTLED_SHARE = 0.01
_MOST_SETTLING_SECONDS = 0.3
"""A phase has settled once two batches in a row take the same within 1 %: clocks then follow the power it draws."""

_SECONDS_BETWEEN_READINGS = 0.025


class StepPhase(NamedTuple):
    """The steps of a phase: their order, the partner, the collectives in turn, operations of a step."""

    order: StepOrder
    partner: Partner
    collectives: Sequence[Launch]
    operations: int


@dataclass(frozen=True, slots=True)
class PhaseSample:
    """The measured steps of one rank, and readings of its GPU meanwhile."""

    steps: list[ClockedStep]
    load: GpuLoad


@dataclass(frozen=True, slots=True)
class PhaseOfRanks:
    """The same of all ranks."""

    steps: StepsOfRanks
    load: GpuLoad

    @classmethod
    def of(cls, samples: Sequence[PhaseSample]) -> "PhaseOfRanks":
        """From a sample a rank."""
        return cls(StepsOfRanks([each.steps for each in samples]), load_of_ranks([each.load for each in samples]))


@dataclass(slots=True)
class StepMeter:
    """Measures phases on this rank; every rank calls it alike."""

    group: Group
    steps: OverlapSteps
    progress: Progress
    read_load: Callable[[], GpuLoad]
    clock: Callable[[], float] = perf_counter
    _readings: list[GpuLoad] = field(default_factory=list)
    _read_at: float = 0.0

    def measure(self, phase: StepPhase, seconds: float) -> PhaseSample:
        """Run a phase until it has settled, and then measure it for so many seconds."""
        period, spent = self._batch(phase, _FEWEST_STEPS)[1:]
        count = _steps_a_batch(period, phase.operations)
        before = math.inf
        while spent < _MOST_SETTLING_SECONDS and abs(period - before) > _SETTLED_SHARE * period:
            before = period
            _, period, took = self._batch(phase, count)
            spent += took
        self._readings.clear()
        measured, spent = list[ClockedStep](), 0.0
        while spent < seconds:
            steps, _, took = self._batch(phase, count)
            measured += steps
            spent += took
        if not self._readings:
            self._readings.append(self.read_load())
        return PhaseSample(measured, mean_load(self._readings))

    def gathered(self, sample: PhaseSample) -> PhaseOfRanks | None:
        """The sample of every rank, on the first."""
        collected = self.group.collect(sample)
        return None if collected is None else PhaseOfRanks.of(collected)

    def _batch(self, phase: StepPhase, count: int) -> tuple[list[ClockedStep], float, float]:
        """Steps of this rank, and the same on every rank: the mean period of the slowest, and the time of the batch."""
        self.group.barrier()
        start = self.clock()
        marks = self.steps.run(*phase, steps=count, look=self._look)
        steps, took = clocked(marks), self.clock() - start
        period, spent = self.group.largest([fmean(step.period for step in steps), took])
        return steps, period, spent

    def _look(self, completed: int) -> None:
        """Report progress, and read the GPU from time to time."""
        if completed:
            self.progress.completed(completed)
        now = self.clock()
        if now - self._read_at >= _SECONDS_BETWEEN_READINGS:
            self._read_at = now
            self._readings.append(self.read_load())


def _steps_a_batch(period: float, operations: int) -> int:
    """As many steps as fit into a batch, and into the queue of a stream."""
    fitting = math.ceil(_SECONDS_A_BATCH / period) if period > 0 else _FEWEST_STEPS
    return max(_FEWEST_STEPS, min(fitting, _MOST_QUEUED // (operations + _BESIDE_OPERATIONS)))
