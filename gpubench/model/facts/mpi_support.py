"""What an MPI does with memory of GPUs: every operation, tried in a job of its own before anything rests on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpubench.model.terms.units import format_size


class TrialOutcome(StrEnum):
    """The end of an operation that was handed GPU memory."""

    RIGHT = "right"
    WRONG = "wrong data"
    CRASHED = "crashed"
    REFUSED = "refused"
    HUNG = "hung"
    UNKNOWN = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTrial:
    """One operation at one size: how it ended, after how many seconds of its job, and in whose words."""

    operation: str
    size_bytes: int
    outcome: TrialOutcome
    seconds: float | None = None
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiSupport:
    """All trials of an MPI, and what it says of itself: `claims` by where that stands. `asked` is what matters most."""

    library: str
    asked: str
    trials: Sequence[OperationTrial]
    claims: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None

    def of(self, operation: str) -> Sequence[OperationTrial]:
        """The trials of an operation, by size."""
        return [each for each in self.trials if each.operation == operation]

    def works(self, operation: str) -> bool:
        """True if it was tried, and gave right data at all sizes."""
        trials = self.of(operation)
        return bool(trials) and all(each.outcome is TrialOutcome.RIGHT for each in trials)

    @property
    def operations(self) -> Sequence[str]:
        """All operations, in the order in which they were tried."""
        return list(dict.fromkeys(each.operation for each in self.trials))

    @property
    def working(self) -> Sequence[str]:
        """Those that work."""
        return [each for each in self.operations if self.works(each)]

    @property
    def failing(self) -> Sequence[str]:
        """Those that were tried and do not."""
        bad = {each.operation for each in self.trials if each.outcome not in (TrialOutcome.RIGHT, TrialOutcome.UNKNOWN)}
        return [each for each in self.operations if each in bad]

    @property
    def said(self) -> str:
        """'Open MPI v4.1.6: MPIX_Query_cuda_support no; built with CUDA no'."""
        claims = "; ".join(f"{name} {value}" for name, value in self.claims.items())
        return f"{self.library}: {claims}" if claims else self.library

    def why_not(self, operation: str) -> str:
        """'allreduce of 1K crashed: signal 11 (Segmentation fault)'; empty where it works."""
        bad = next((each for each in self.of(operation) if each.outcome is not TrialOutcome.RIGHT), None)
        if bad is None:
            return "" if self.of(operation) else f"{operation} was not tried"
        said = f": {bad.said}" if bad.said else ""
        return f"{operation} of {format_size(bad.size_bytes)} on GPU memory {bad.outcome}{said}"
