"""One timed row seen from every rank."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds an operation took, averaged over a rank's iterations: mean over ranks, extremes, and who was slowest.

    The mean is what nccl-tests prints by default (-a 1); the slowest rank is what a training step waits for.
    """

    mean_seconds: float
    fastest_seconds: float
    slowest_seconds: float
    slowest_rank: int

    @classmethod
    def of(cls, seconds_by_rank: Sequence[float]) -> "RankTimes":
        """Summary of one value a rank, in rank order."""
        slowest = max(range(len(seconds_by_rank)), key=seconds_by_rank.__getitem__)
        return cls(
            mean_seconds=sum(seconds_by_rank) / len(seconds_by_rank),
            fastest_seconds=min(seconds_by_rank),
            slowest_seconds=seconds_by_rank[slowest],
            slowest_rank=slowest,
        )
