"""Spread of timings: intervals that hold what they promise."""

import math
import random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as s

from gpubench.model.terms.statistics import (
    BATCH_SECONDS,
    FIRST_BATCHES,
    INTERVAL,
    MOST_BATCHES,
    TRIAL,
    TWO_SIDED_95,
    BatchTimes,
    Effort,
    Percentiles,
    Sampling,
    Spread,
    operations_per_batch,
    percentile,
    student_quantile,
)

SECONDS = s.floats(1e-7, 10)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(2, 4.303), (3, 3.182), (4, 2.776), (8, 2.306), (30, 2.042), (1e9, 1.960)]
)
def test_students_quantiles_are_those_of_the_tables(degrees: float, quantile: float) -> None:
    assert student_quantile(TWO_SIDED_95, degrees) == pytest.approx(quantile, rel=0.01)


def covered(correlation: float, count: int) -> float:
    """The share of seeded runs whose interval holds the true mean, 1; each value follows the one before it so far."""
    source = random.Random(7)
    runs, hits = 500, 0
    for _ in range(runs):
        deviation, values = source.gauss(0, 0.01), []
        for _ in range(count):
            values.append(1 + deviation)
            deviation = correlation * deviation + math.sqrt(1 - correlation**2) * source.gauss(0, 0.01)
        spread = Spread.of(values)
        hits += abs(spread.mean - 1) <= spread.half_width
    return hits / runs


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    assert covered(0.0, 9) >= 0.95
    assert covered(0.0, 100) >= 0.95
    assert covered(0.5, 100) >= 0.93


@given(s.lists(SECONDS, min_size=1, max_size=50))
def test_a_spread_is_of_its_values(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.count == len(values)
    assert min(values) <= spread.median <= max(values)
    assert spread.mean == pytest.approx(fmean(values))
    assert math.isinf(spread.half_width) == (len(values) < 3)
    assert (spread.interval is None) == (len(values) < 3)


def test_equal_values_leave_no_doubt() -> None:
    assert Spread.of([0.25] * 5).interval == 0
    assert Spread.of([0.0] * 5).interval is None


def test_twenty_values_that_are_a_little_alike_are_worth_eighteen() -> None:
    """Of their 19 neighbours 10 are alike and 9 are not: a correlation of 0.05."""
    values = [1.0, 1.0, 2.0, 2.0] * 5
    worth = 20 * 0.95 / 1.05
    assert Spread.of(values).half_width == pytest.approx(
        student_quantile(0.975, worth - 1) * stdev(values) / math.sqrt(worth)
    )


@given(s.lists(SECONDS, min_size=1, max_size=300), s.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < len(values) * percent / 100


def test_percentiles_of_a_row() -> None:
    assert Percentiles.of([float(value) for value in range(200, 0, -1)]) == Percentiles(100, 190, 198)
    assert Percentiles.of([3.0]) == Percentiles(3, 3, 3)


def test_the_interval_of_the_mean_over_ranks_is_no_narrower_than_it_is() -> None:
    """Ranks that move together, apart, or against each other: what is said is at least what it is."""
    source = random.Random(3)
    one = [1 + source.gauss(0, 0.05) for _ in range(40)]
    other = [1 + source.gauss(0, 0.05) for _ in range(40)]
    against = [2 - value for value in one]
    for pair in ((one, one), (one, other), (one, against)):
        said = BatchTimes.of([Spread.of(each) for each in pair], 10)
        true = Spread.of([fmean(each) for each in zip(*pair, strict=True)])
        assert said.interval is not None
        assert said.interval >= (true.interval or 0) * 0.999
        assert said.median_seconds == pytest.approx(fmean([Spread.of(each).median for each in pair]) / 10)
    assert BatchTimes.of([Spread.of([1.0, 2.0])], 1).interval is None


@given(SECONDS)
def test_a_batch_is_long_enough_for_an_event(seconds: float) -> None:
    operations = operations_per_batch(seconds)
    assert operations * seconds >= BATCH_SECONDS * 0.999
    assert (operations - 1) * seconds < BATCH_SECONDS


def test_what_takes_no_time_at_all_still_has_batches() -> None:
    assert operations_per_batch(0.0) == MOST_BATCHES


@given(s.integers(3, 10**5), SECONDS, s.floats(0, 1), s.floats(0, 100), s.floats(0, 100))
def test_no_more_is_timed_than_it_takes_or_than_there_is_time_for(
    count: int, each: float, interval: float, spent: float, budget: float
) -> None:
    more = Effort(count, each, interval, spent).needed_values(budget)
    assert 0 <= more <= min(2 * count, MOST_BATCHES)
    assert more == 0 or interval > INTERVAL
    worth_it = spent * (interval / INTERVAL) ** 2 <= budget
    assert more == 0 or spent + more * each <= (budget if worth_it else TRIAL * budget) * 1.001


def test_as_many_more_as_the_square_of_what_is_missing() -> None:
    assert Effort(9, 1e-3, 0.0099, 0.0).needed_values(10) == 0
    assert Effort(9, 1e-3, 0.012, 0.0).needed_values(10) == 4
    assert Effort(9, 1e-3, 0.5, 0.0).needed_values(10) == 18
    assert Effort(9, 1e-3, None, 0.0).needed_values(10) == 18
    assert Effort(9, 1.0, 0.0101, 9.0).needed_values(10) == 1
    assert Effort(9, 0.0, 0.5, 0.0).needed_values(10) == 0


def test_what_would_take_more_than_there_is_time_for_ends_with_the_trial() -> None:
    """Four times the interval that is asked for takes sixteen times what was spent."""
    assert Effort(90, 1e-3, 0.04, 0.1).seconds_needed() == pytest.approx(1.6)
    assert Effort(90, 1e-3, 0.04, 0.1).needed_values(1.7) == 180
    assert Effort(90, 1e-3, 0.04, 0.1).needed_values(1.5) == 180
    assert Effort(90, 1e-3, 0.04, 0.4).needed_values(1.5) == 0
    assert Effort(90, 1e-3, None, 0.4).needed_values(1.5) == 0
    assert Effort(90, 1e-3, 0.02, 0.35).needed_values(1.5) == 180


def test_every_row_is_timed_often_enough_for_its_buffers() -> None:
    assert Sampling().least_iterations == 20
    assert Sampling(iterations=None).least_iterations == FIRST_BATCHES


def test_the_half_width_of_timings_that_only_drift() -> None:
    """A correlation is taken for 0.9 at most: a hundred values are then worth 100 × 0.1 / 1.9."""
    ramp = Spread.of([float(each) for each in range(1, 101)])
    worth = 100 * 0.1 / 1.9
    assert ramp.half_width == pytest.approx(
        student_quantile(TWO_SIDED_95, worth - 1) * ramp.deviation / math.sqrt(worth)
    )


def test_what_has_no_spread_and_what_has_no_mean() -> None:
    assert Spread.of([1.0, 2.0]).deviation == 0
    assert Spread(count=3, mean=0.0, median=0.0, deviation=0.0, half_width=0.1).interval is None


def test_a_budget_that_is_just_enough_is_spent() -> None:
    assert Effort(100, 1e-3, 0.02, 0.1).needed_values(0.4) == 200
    assert Effort(100, 1e-3, 0.02, 0.1).needed_values(0.399) == 0
