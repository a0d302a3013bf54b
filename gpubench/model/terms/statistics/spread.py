"""The variation of repeated timings, and the confidence interval of their mean."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

from gpubench.model.terms.statistics.noise import student_quantile

LEAST_VALUES = 3
"""Fewer say nothing of their spread."""

TWO_SIDED_95 = 0.975
"""Below its quantile lies so much of a distribution of which 95 % lie between that and the opposite one."""

_MOST_CORRELATION = 0.9


@dataclass(frozen=True, slots=True)
class Spread:
    """Some timings in seconds: mean, median, standard deviation, and half of the 95 % confidence interval of the mean.

    The interval is infinite where there are too few timings.
    """

    count: int
    mean: float
    median: float
    deviation: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of timings in the order in which they were made; at least one.

        Neighbours in time are alike, clocks and other jobs change slowly, so that n timings are worth fewer:
        n (1 - r) / (1 + r) with r their correlation at lag 1 (that of a first-order autoregressive process).
        """
        mean, middle = fmean(values), median(values)
        if len(values) < LEAST_VALUES:
            return cls(len(values), mean, middle, 0.0, math.inf)
        deviation = stdev(values)
        correlation = min(max(_correlation(values, mean), 0.0), _MOST_CORRELATION)
        worth = max(LEAST_VALUES, len(values) * (1 - correlation) / (1 + correlation))
        half_width = student_quantile(TWO_SIDED_95, worth - 1) * deviation / math.sqrt(worth)
        return cls(len(values), mean, middle, deviation, half_width)

    @property
    def interval(self) -> float | None:
        """Half of the interval as a part of the mean; None where it is infinite."""
        return self.half_width / self.mean if self.mean > 0 and math.isfinite(self.half_width) else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank, as nccl-tests has it: the smallest value that so many percent of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _correlation(values: Sequence[float], mean: float) -> float:
    centred = [value - mean for value in values]
    power = sum(each * each for each in centred)
    if power == 0:
        return 0.0
    return sum(one * other for one, other in pairwise(centred)) / power
