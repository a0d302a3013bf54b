"""What a fault of the fabric costs: the same step, its collectives slowed as a simulated machine with that fault is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpubench.measure.plan.curves import FaultSeconds
from gpubench.measure.plan.step import StepPrediction, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """A fault: as --fault writes it, in words, who asked for it, and what it makes of a time."""

    text: str
    what: str
    source: str
    seconds: FaultSeconds
    how: str


@dataclass(frozen=True, slots=True)
class FaultCost:
    """A fault with the step that it makes."""

    case: FaultCase
    prediction: StepPrediction


def fault_costs(healthy: StepPrediction, cases: Sequence[FaultCase]) -> list[FaultCost]:
    """The same step with each fault, the costliest first."""
    found = []
    for case in cases:
        job = replace(healthy.job, times=healthy.job.times.with_fault(case.seconds))
        found.append(FaultCost(case, predict(job, with_range=False)))
    return sorted(found, key=lambda each: (-each.prediction.seconds, -each.prediction.communication_seconds))
