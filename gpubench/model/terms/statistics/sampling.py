"""The number of timed operations of a row: given, or as many as its mean needs to be known well enough."""

import math
from dataclasses import dataclass
from enum import StrEnum

INTERVAL = 0.01
"""Half of the 95 % confidence interval that is good enough, as a part of the mean."""

BATCH_SECONDS = 1e-3
"""The least work between two looks at the clock: an event costs 2.1 µs on an H200 by itself, and keeps operations
of NCCL apart that otherwise follow each other without a gap.
"""

FIRST_BATCHES = 9
"""Batches that are timed before anything is decided; enough for large sizes, which vary by less than 1 %."""

MOST_BATCHES = 4096
"""Of one loop: each has an event of its own."""

TRIAL = 0.25
"""A part of a budget that is enough to see whether the rest of it is worth spending."""


class Mode(StrEnum):
    """Operations back to back, as nccl-tests times them, or each alone, as a program that waits for it sees it."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"


DEFAULT_ITERATIONS = {Mode.THROUGHPUT: 20, Mode.LATENCY: 200}
"""Where a number is needed: nccl-tests' 20; alone so many that the 99th percentile is not the largest."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The timing of rows. `iterations` of None are as many as it takes, within `budget_seconds` a row."""

    mode: Mode = Mode.THROUGHPUT
    iterations: int | None = DEFAULT_ITERATIONS[Mode.THROUGHPUT]
    budget_seconds: float = 0.1

    @property
    def least_iterations(self) -> int:
        """Operations that any row is timed for: no more buffers than that are sure to be used."""
        return FIRST_BATCHES if self.iterations is None else self.iterations


def operations_a_batch(seconds: float) -> int:
    """The number of operations of so many seconds in a batch."""
    return max(1, math.ceil(BATCH_SECONDS / seconds)) if seconds > 0 else MOST_BATCHES


@dataclass(frozen=True, slots=True)
class Effort:
    """The work spent on a mean: number of values, seconds each, interval reached, None where they are too few.

    Values are batches of operations, or operations alone. `interval` is half of the 95 % one, as a part of the mean.
    """

    count: int
    seconds_each: float
    interval: float | None
    spent_seconds: float

    def seconds_needed(self) -> float:
        """Seconds in all until the mean is known well enough, going by what was spent: an interval shrinks with the
        square root of the number. Infinite where nothing is known of it.
        """
        return math.inf if self.interval is None else self.spent_seconds * (self.interval / INTERVAL) ** 2

    def further(self, budget_seconds: float) -> int:
        """The number of values still needed; 0 where the mean is known well enough, or more are not worth it.

        No more at once than twice as many: what is needed is an estimate. Where it is more than the budget, only the
        trial is spent: four times as long makes an interval half as wide, and it would still be too wide.
        """
        wide = math.inf if self.interval is None else self.interval / INTERVAL
        if wide <= 1:
            return 0
        most = 2 * self.count
        needed = most if math.isinf(wide) else math.ceil(self.count * (wide * wide - 1))
        seconds = budget_seconds if self.seconds_needed() <= budget_seconds else TRIAL * budget_seconds
        affordable = int((seconds - self.spent_seconds) / self.seconds_each) if self.seconds_each > 0 else 0
        return max(0, min(needed, most, affordable, MOST_BATCHES))


AUTO = "auto"
