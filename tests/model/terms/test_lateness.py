"""Who is late as a rule: seeded ranks with clocks of their own, some of them held up."""

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as s

from gpubench.model.terms.statistics import (
    ClockOffset,
    EntryTimes,
    bound_chance,
    convert_to_rank0_clock,
    find_straggler,
)

OPERATION = 100e-6
OPERATIONS = 200


def entries_of(held_up: Mapping[int, float], ranks: int, source: random.Random) -> list[EntryTimes]:
    """Ranks that enter within 10 µs of each other, except those that are held up."""
    entered = [[source.uniform(0, 10e-6) + held_up.get(rank, 0.0) for _ in range(OPERATIONS)] for rank in range(ranks)]
    first = [min(each) for each in zip(*entered, strict=True)]
    last = [max(each) for each in zip(*entered, strict=True)]
    return [EntryTimes.of(own, first, last, 1e-6) for own in entered]


def rows_of(
    held_up: Mapping[int, float], ranks: int, *, rows: int = 3, seed: int = 1
) -> list[tuple[Sequence[EntryTimes], float]]:
    source = random.Random(seed)
    return [(entries_of(held_up, ranks, source), OPERATION) for _ in range(rows)]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_rank_that_is_held_up_is_named_with_how_late_and_how_sure(ranks: int) -> None:
    found = find_straggler(rows_of({1: 50e-6}, ranks), [0] * ranks)
    assert found is not None
    assert found.ranks == (1,)
    assert found.late_seconds == pytest.approx(50e-6, abs=6e-6)
    assert (found.last, found.operations, found.operation_seconds) == (600, 600, OPERATION)
    assert found.chance < 1e-100


@pytest.mark.parametrize(("ranks", "seed"), [*product([2, 3, 8], range(20))])
def test_ranks_that_come_as_they_come_are_not_named(ranks: int, seed: int) -> None:
    assert find_straggler(rows_of({}, ranks, seed=seed), [rank // 2 for rank in range(ranks)]) is None


def test_a_node_is_named_where_all_its_ranks_are_late_together() -> None:
    found = find_straggler(rows_of({4: 60e-6, 5: 60e-6, 6: 60e-6, 7: 60e-6}, 12), [0] * 4 + [1] * 4 + [2] * 4)
    assert found is not None
    assert found.ranks == (4, 5, 6, 7)
    assert found.late_seconds == pytest.approx(60e-6, abs=6e-6)


def test_a_rank_that_is_the_latest_of_its_node_is_named_alone() -> None:
    found = find_straggler(rows_of({4: 60e-6, 5: 120e-6}, 8), [0] * 4 + [1] * 4)
    assert found is not None
    assert found.ranks == (5,)


def test_less_than_a_barrier_leaves_between_ranks_is_nobodys_fault() -> None:
    assert find_straggler(rows_of({1: 15e-6}, 4), [0] * 4) is None


def test_less_than_clocks_may_be_wrong_is_not_known() -> None:
    rows = [
        ([EntryTimes(each.operations, each.last, each.late_seconds, 80e-6) for each in entries], seconds)
        for entries, seconds in rows_of({1: 50e-6}, 4)
    ]
    assert find_straggler(rows, [0] * 4) is None


def test_no_rows_or_a_single_rank_have_no_straggler() -> None:
    assert find_straggler([], [0, 0]) is None
    assert find_straggler([([EntryTimes(99, 99, 0.0, 0.0)], 1.0)], [0]) is None


@given(s.integers(1, 400), s.data(), s.floats(0.01, 0.99))
def test_the_chance_is_no_smaller_than_it_is(trials: int, data: s.DataObject, probability: float) -> None:
    successes = data.draw(s.integers(0, trials))
    exact = sum(
        math.comb(trials, each) * probability**each * (1 - probability) ** (trials - each)
        for each in range(successes, trials + 1)
    )
    assert bound_chance(successes, trials, probability) >= exact * (1 - 1e-9) - 1e-12
    assert bound_chance(successes, trials, probability) <= 1


@given(s.floats(-1e5, 1e5), s.floats(-1e-4, 1e-4))
def test_clocks_that_differ_and_drift_are_made_comparable(offset: float, drift: float) -> None:
    true = [10.0 + number * 0.01 for number in range(50)]

    def own(at: float) -> float:
        return at * (1 + drift) - offset

    def compared(at: float) -> ClockOffset:
        return ClockOffset(at - own(at), 1e-6)

    found = convert_to_rank0_clock(
        [own(at) for at in true], compared(true[0]), compared(true[-1]), own(true[0]), own(true[-1])
    )
    assert found == pytest.approx(true, abs=1e-7 + 1e-9 * abs(offset))


def counted(last: int, operations: int, late: float = 50e-6) -> list[EntryTimes]:
    """Eight ranks, of which the second is the last in so many operations."""
    others = EntryTimes(operations, 0, 0.0, 1e-6)
    return [others, EntryTimes(operations, last, late, 1e-6), *[others] * 6]


def test_entries_are_counted_and_delays_are_medians() -> None:
    entries = EntryTimes.of([1.0, 5.0, 9.0], [0.5, 4.0, 9.0], [2.0, 5.0, 9.5], 0.1)
    assert entries == EntryTimes(operations=3, last=1, late_seconds=0.5, uncertainty=0.1)


@pytest.mark.parametrize(
    ("last", "operations", "is_named"), [(30, 30, True), (29, 29, False), (101, 200, True), (100, 200, False)]
)
def test_a_straggler_is_last_in_more_than_half_of_enough_operations(last: int, operations: int, is_named: bool) -> None:
    assert (find_straggler([(counted(last, operations), OPERATION)], [0] * 8) is not None) == is_named


@pytest.mark.parametrize(("late", "is_named"), [(51e-6, True), (50e-6, False)])
def test_a_delay_counts_from_a_twentieth_of_the_operation_on(late: float, is_named: bool) -> None:
    assert (find_straggler([(counted(200, 200, late), 1e-3)], [0] * 8) is not None) == is_named


def test_a_clock_that_was_compared_once_has_no_drift() -> None:
    assert convert_to_rank0_clock([7.0], ClockOffset(1.0, 0.0), ClockOffset(1.0, 0.0), 5.0, 5.0) == [8.0]
