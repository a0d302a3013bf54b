"""One timed row seen from every rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.model.terms.statistics.spread import Spread, percentile


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


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Batches of operations back to back, over all ranks: median seconds an operation, coefficient of variation.

    `interval` is half of the 95 % confidence interval of the mean as a part of it, None where batches are too few.
    """

    median_seconds: float
    variation: float
    interval: float | None

    @classmethod
    def of(cls, spreads: Sequence[Spread], operations: int) -> "BatchTimes":
        """Of one spread a rank, of batches of so many operations.

        Ranks wait for each other, so their batches are alike and not independent. The deviation of a mean over ranks is
        at most the mean of the ranks' deviations, whatever their correlation: the interval errs on the wide side.
        """
        mean = sum(each.mean for each in spreads) or math.inf
        interval = sum(each.half_width for each in spreads) / mean
        return cls(
            median_seconds=sum(each.median for each in spreads) / (len(spreads) * operations),
            variation=sum(each.deviation for each in spreads) / mean,
            interval=interval if math.isfinite(interval) else None,
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds that half, 95 % and 99 % of single operations did not exceed, each by its slowest rank."""

    p50_seconds: float
    p95_seconds: float
    p99_seconds: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """Of the operations of a row, in any order."""
        return cls(*(percentile(seconds, percent) for percent in (50, 95, 99)))


@dataclass(frozen=True, slots=True)
class RowTimes:
    """All that was timed of a row. Batches are of operations back to back, percentiles of operations alone.

    `interval` is half of the 95 % confidence interval, as a part of the mean.
    """

    ranks: RankTimes
    iterations: int
    batches: BatchTimes | None = None
    percentiles: Percentiles | None = None
    interval: float | None = None
    note: str | None = None
