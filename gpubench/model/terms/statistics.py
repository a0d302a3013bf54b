"""Statistics for timings: the number of operations, noise, spread, times over ranks, and stragglers.

A collective ends only after the last rank has entered it. Ranks that enter early therefore measure a long operation,
and the late rank measures a short one. So late ranks are found by entry times on a common clock, not by durations.
"""

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from gpubench.model.terms.plain import Count, Seconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import group_by

INTERVAL = 0.01  # A mean is precise enough if half its 95 % confidence interval is at most this share of the mean.
BATCH_SECONDS = 1e-3
"""Minimum time between two CUDA events. An event costs 2.1 µs on an H200, and it separates NCCL operations that
would otherwise run without a gap.
"""

# Number of batches to time before deciding how many more are needed. Large sizes vary by less than 1 %.
FIRST_BATCHES = 9
MOST_BATCHES = 4096  # Maximum number of batches per loop, because each batch needs a CUDA event
TRIAL = 0.25  # After this share of a time budget, decide whether to spend the rest.


class Mode(StrEnum):
    """How operations are timed: back to back as in nccl-tests, or one at a time, as seen by a program that waits
    for each.
    """

    THROUGHPUT = "throughput"
    LATENCY = "latency"


DEFAULT_ITERATIONS = {Mode.THROUGHPUT: 20, Mode.LATENCY: 200}
"""Throughput uses nccl-tests' default of 20. Latency needs enough operations that the 99th percentile is not the
maximum.
"""


class Sampling(Struct, frozen=True):
    """How many operations to time per row. If `iterations` is None, run as many as needed within `budget_seconds`
    per row. With `percentiles`, a second loop times single operations.
    """

    mode: Mode = Mode.THROUGHPUT
    iterations: Annotated[int, Meta(ge=1)] | None = DEFAULT_ITERATIONS[Mode.THROUGHPUT]
    budget_seconds: float = 0.1
    percentiles: bool = False

    @property
    def least_iterations(self) -> int:
        """The minimum number of operations in any row. It limits the number of rotated buffers."""
        return FIRST_BATCHES if self.iterations is None else self.iterations

    def single_operations(self, seconds: float) -> int:
        """Return how many operations the loop for percentiles times. `seconds` is the duration of one operation.

        Without a fixed number, it is what fits into the budget: from 20 to 200 operations.
        """
        if self.iterations is not None:
            return self.iterations
        fitting = int(self.budget_seconds / seconds) if seconds > 0 else DEFAULT_ITERATIONS[Mode.LATENCY]
        return max(DEFAULT_ITERATIONS[Mode.THROUGHPUT], min(DEFAULT_ITERATIONS[Mode.LATENCY], fitting))


def operations_per_batch(seconds: float) -> int:
    """Return the number of operations per batch. `seconds` is the duration of one operation."""
    return max(1, math.ceil(BATCH_SECONDS / seconds)) if seconds > 0 else MOST_BATCHES


class Effort(Struct, frozen=True):
    """The measurements behind a mean.

    - `count`: number of measured values
    - `seconds_each`: time to measure one more value
    - `interval`: half the 95 % confidence interval, relative to the mean; None if the interval is unbounded
    - `spent_seconds`: total measuring time so far
    """

    count: int
    seconds_each: float
    interval: float | None
    spent_seconds: float

    def seconds_needed(self) -> float:
        """Estimate the total measuring time in seconds until the mean is precise enough. It may be infinite.

        The confidence interval shrinks with the square root of the time.
        """
        return math.inf if self.interval is None else self.spent_seconds * (self.interval / INTERVAL) ** 2

    def needed_values(self, budget_seconds: float) -> int:
        """Return how many more values to measure. 0 if the mean is precise enough or more values would not help
        enough.

        The need is only an estimate, so each call at most triples the number of values. If the full need exceeds the
        budget, spend only the trial share: an interval that halves with four times the work would still be too wide.
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

FALSE_ALARMS = 0.01  # The probability that a comparison of two equal results flags any row
_MOST_VALUES = 400
_FEW_VALUES = 50  # Up to this number of values, sorting all distances is faster than searching.
_NORMAL = 2.2219
_SMALL = {2: 0.399, 3: 0.994, 4: 0.512, 5: 0.844, 6: 0.611, 7: 0.857, 8: 0.669, 9: 0.872}
_EFFICIENCY = 0.82
MEDIAN_EFFICIENCY = 0.37  # Efficiency of the median absolute deviation, relative to the standard deviation


class Noise(Struct, frozen=True):
    """A standard deviation and its degrees of freedom, which are infinite if the deviation is known exactly."""

    deviation: float
    freedom: float

    def bound(self, comparisons: int) -> float:
        """Return the largest difference that chance explains when `comparisons` rows are compared.

        If two results are equal, `FALSE_ALARMS` is the probability that any row exceeds it (Bonferroni correction).
        """
        return self.deviation * student_quantile(1 - FALSE_ALARMS / (2 * max(1, comparisons)), self.freedom)


def robust_deviation(values: Sequence[float]) -> Noise | None:
    """Estimate the standard deviation of values. Up to half of the values may be outliers. None for fewer than two
    values.

    The estimator is Qn from Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation" (1993): the k-th
    smallest distance between two values. Without outliers its efficiency is 82 %.
    """
    count = len(values)
    if count > _MOST_VALUES:
        values, count = values[:: -(-count // _MOST_VALUES)], len(values[:: -(-count // _MOST_VALUES)])
    if count < 2:
        return None
    half = count // 2 + 1
    small = _SMALL.get(count, count / (count + (1.4 if count % 2 else 3.8)))
    distance = _smallest_distance(sorted(values), half * (half - 1) // 2)
    return Noise(small * _NORMAL * distance, _EFFICIENCY * (count - 1))


def _smallest_distance(ordered: Sequence[float], number: int) -> float:
    """Return the n-th smallest distance between ascending values.

    400 values have 80,000 distances, which would take too long to sort.
    """
    if len(ordered) <= _FEW_VALUES:
        return sorted(other - one for place, one in enumerate(ordered, 1) for other in ordered[place:])[number - 1]
    low, high = 0.0, ordered[-1] - ordered[0]
    below, until = _distances_within(ordered, low), len(ordered) ** 2
    if below >= number:
        return low
    while until - below > 2 * len(ordered) and low < (middle := (low + high) / 2) < high:
        found = _distances_within(ordered, middle)
        if found < number:
            low, below = middle, found
        else:
            high, until = middle, found
    near, begin, end = list[float](), 0, 0
    for one in ordered:
        while begin < len(ordered) and ordered[begin] - one <= low:
            begin += 1
        while end < len(ordered) and ordered[end] - one <= high:
            end += 1
        near += [other - one for other in ordered[begin:end]]
    return sorted(near)[number - below - 1]


def _distances_within(ordered: Sequence[float], most: float) -> int:
    """Count the pairs of ascending values that differ by at most `most`."""
    found = end = 0
    for place, value in enumerate(ordered, 1):
        while end < len(ordered) and ordered[end] - value <= most:
            end += 1
        found += end - place
    return found


@lru_cache(maxsize=256)
def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution, from its expansion around the normal quantile.

    Source: Abramowitz and Stegun 26.7.5. At the probabilities that comparisons use, the error is below 1 % from 8
    degrees of freedom on, and below 10 % from 4 on. For a 95 % interval it is below 10 % from 2 on.
    """
    from statistics import NormalDist

    z = NormalDist().inv_cdf(probability)
    if math.isinf(freedom):
        return z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


LEAST_VALUES = 3  # Fewer values do not show how much timings vary.
TWO_SIDED_95 = 0.975  # The upper quantile of a two-sided 95 % interval
_MOST_CORRELATION = 0.9


class Spread(Struct, frozen=True):
    """Summary of timings in seconds. `half_width` is half the 95 % confidence interval of the mean, and may be
    infinite.
    """

    count: int
    mean: float
    median: float
    deviation: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize one or more timings, in the order of measurement.

        Clocks and other jobs change slowly, so neighboring timings are correlated. With correlation r at lag 1, n
        timings count as n (1 - r) / (1 + r) independent timings (first-order autoregressive process).
        """
        from statistics import fmean, median, stdev

        mean, middle = fmean(values), median(values)
        if len(values) < LEAST_VALUES:
            return cls(len(values), mean, middle, 0.0, math.inf)
        deviation = stdev(values)
        centred = [value - mean for value in values]
        power = sum(value * value for value in centred)
        correlation = sum(one * other for one, other in pairwise(centred)) / power if power else 0.0
        correlation = min(max(correlation, 0.0), _MOST_CORRELATION)
        worth = max(LEAST_VALUES, len(values) * (1 - correlation) / (1 + correlation))
        half_width = student_quantile(TWO_SIDED_95, worth - 1) * deviation / math.sqrt(worth)
        return cls(len(values), mean, middle, deviation, half_width)

    @property
    def interval(self) -> float | None:
        """Half the 95 % confidence interval, relative to the mean. None if the interval is unbounded."""
        return self.half_width / self.mean if self.mean > 0 and math.isfinite(self.half_width) else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile, as nccl-tests computes it."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class RankTimes(Struct, frozen=True):
    """Seconds per operation over all ranks: the mean (as in nccl-tests with -a 1), the extremes, and the slowest
    rank.
    """

    mean_seconds: float
    fastest_seconds: float
    slowest_seconds: float
    slowest_rank: int

    @classmethod
    def of(cls, seconds_by_rank: Sequence[float]) -> "RankTimes":
        slowest = max(range(len(seconds_by_rank)), key=seconds_by_rank.__getitem__)
        return cls(
            mean_seconds=sum(seconds_by_rank) / len(seconds_by_rank),
            fastest_seconds=min(seconds_by_rank),
            slowest_seconds=seconds_by_rank[slowest],
            slowest_rank=slowest,
        )


class BatchTimes(Struct, frozen=True):
    """Summary of batches over all ranks.

    - `median_seconds`: median time of one operation
    - `variation`: coefficient of variation
    - `interval`: half the 95 % confidence interval, relative to the mean; None if the interval is unbounded
    """

    median_seconds: float
    variation: float
    interval: float | None

    @classmethod
    def of(cls, spreads: Sequence[Spread], operations: int) -> "BatchTimes":
        """Combine one `Spread` per rank. Each batch has `operations` operations.

        Ranks wait for each other, so their batches are correlated. Whatever the correlation, the deviation of the mean
        over ranks is at most the mean of the ranks' deviations. So the interval may be too wide, but never too narrow.
        """
        mean = sum(spread.mean for spread in spreads) or math.inf
        interval = sum(spread.half_width for spread in spreads) / mean
        return cls(
            median_seconds=sum(spread.median for spread in spreads) / (len(spreads) * operations),
            variation=sum(spread.deviation for spread in spreads) / mean,
            interval=interval if math.isfinite(interval) else None,
        )


class Percentiles(Struct, frozen=True):
    """Percentiles of the duration of single operations. The duration of an operation is that of its slowest rank."""

    p50_seconds: float
    p95_seconds: float
    p99_seconds: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        return cls(*(percentile(seconds, percent) for percent in (50, 95, 99)))


LEAST_OPERATIONS = 30  # With fewer operations, report no straggler.
LEAST_SHARE = 0.05  # Ignore delays below this share of an operation's time
LEAST_SECONDS = 20e-6  # Shorter delays are normal, because ranks do not leave a barrier at exactly the same time.
MOST_CHANCE = 1e-6  # Much below 0.01, because neighboring operations are not independent.


class ClockOffset(Struct, frozen=True):
    """The offset to add to a rank's clock to convert it to rank 0's clock, and its uncertainty in seconds."""

    seconds: float
    uncertainty: float


class EntryTimes(Struct, frozen=True):
    """How late a rank entered the operations of a row.

    - `operations`: number of operations in the row
    - `last`: number of operations that this rank entered last
    - `late_seconds`: median delay after the first rank
    - `uncertainty`: possible clock error in seconds; smaller differences mean nothing
    """

    operations: Annotated[int, Meta(ge=1)]
    last: Count
    late_seconds: Seconds
    uncertainty: Seconds

    @classmethod
    def of(
        cls, own: Sequence[float], first: Sequence[float], last: Sequence[float], uncertainty: float
    ) -> "EntryTimes":
        """Compute the delays from the entry times of this rank, the first rank and the last rank, all on one clock."""
        from statistics import median

        return cls(
            operations=len(own),
            last=sum(entry >= latest for entry, latest in zip(own, last, strict=True)),
            late_seconds=median(entry - earliest for entry, earliest in zip(own, first, strict=True)),
            uncertainty=uncertainty,
        )


class Straggler(Struct, frozen=True):
    """One rank, or all ranks of a node, that usually enter operations late.

    - `late_seconds`: the delay beyond that of other ranks, median over rows
    - `operation_seconds`: the duration of an operation, median over rows
    - `last`, `operations`: the group entered `last` of all `operations` last
    - `chance`: upper bound on the probability that this is a coincidence
    """

    ranks: tuple[int, ...]
    late_seconds: float
    operation_seconds: float
    last: int
    operations: int
    chance: float


def find_straggler(rows: Sequence[tuple[Sequence[EntryTimes], float]], nodes: Sequence[int]) -> Straggler | None:
    """Return the rank or node that usually enters operations late, or None.

    Each row consists of the entry times by rank, and the duration of one operation in seconds. `nodes` has the node of
    each rank.
    """
    if not rows or len(nodes) < 2:
        return None
    members = group_by(range(len(nodes)), lambda rank: nodes[rank])
    single_ranks = [(rank,) for rank in range(len(nodes))]
    whole_nodes = [tuple(ranks) for ranks in members.values() if 1 < len(ranks) < len(nodes)]
    for groups in (single_ranks, whole_nodes):
        found = [late for ranks in groups if (late := _find_lateness(rows, ranks, len(nodes))) is not None]
        if found:
            return max(found, key=lambda late: late.last)
    return None


def _find_lateness(
    rows: Sequence[tuple[Sequence[EntryTimes], float]], ranks: tuple[int, ...], size: int
) -> Straggler | None:
    from statistics import median

    operations = sum(entries[0].operations for entries, _ in rows)
    last = min(operations, sum(entries[rank].last for entries, _ in rows for rank in ranks))
    if operations < LEAST_OPERATIONS or 2 * last <= operations:
        return None
    late, costs = [], []
    for entries, seconds in rows:
        usual = median(entry.late_seconds for rank, entry in enumerate(entries) if rank not in ranks)
        own = min(entries[rank].late_seconds for rank in ranks) - usual
        clocks = median(entry.uncertainty for entry in entries)
        doubt = max(clocks, *(entries[rank].uncertainty for rank in ranks))
        late.append(own if own > doubt else 0.0)
        costs.append(seconds)
    late_seconds, operation_seconds = median(late), median(costs)
    chance = bound_chance(last, operations, len(ranks) / size)
    if chance > MOST_CHANCE or late_seconds <= max(LEAST_SECONDS, LEAST_SHARE * operation_seconds):
        return None
    return Straggler(ranks, late_seconds, operation_seconds, last, operations, chance)


def bound_chance(successes: int, trials: int, probability: float) -> float:
    """Return Hoeffding's upper bound, exp(-n D(k/n || p)), on the probability of at least `successes` successes."""
    share = successes / trials
    if share <= probability:
        return 1.0
    divergence = share * math.log(share / probability)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - probability))
    return math.exp(-trials * divergence)


def convert_to_rank0_clock(
    own: Iterable[float], before: ClockOffset, after: ClockOffset, start: float, end: float
) -> list[float]:
    """Convert entry times from this rank's clock to rank 0's clock.

    The clock offset was measured at `start` and at `end`. Offsets between them are interpolated, because clocks drift.
    """
    slope = (after.seconds - before.seconds) / (end - start) if end > start else 0.0
    return [time + before.seconds + slope * (time - start) for time in own]
