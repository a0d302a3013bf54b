"""The verdict on the speed of a row, at the lines between them."""

from dataclasses import replace

import pytest

from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import (
    LEAST_KNOWN,
    MEASURED,
    MODELLED,
    OF_ANOTHER_NCCL,
    ExpectedTime,
    Slowness,
    Tolerance,
    compared,
    is_slow,
    judged,
)
from gpubench.model.terms.verdict import Verdict
from tests.fakes import measured_rows


def row(size_bytes: int, time_us: float, busbw: float) -> CollectiveRow:
    """A row whose mean is known to the last digit."""
    return replace(measured_rows.row(size_bytes, time_us, busbw), ci95_percent=0.0)


EXPECTED = ExpectedTime(1000.0, "profile x", MEASURED)
LARGE, SMALL = 2**26, 2**20


@pytest.mark.parametrize(
    ("size_bytes", "time_us", "verdict"),
    [
        (LARGE, 900.0, Verdict.PASS),
        (LARGE, 1117.0, Verdict.PASS),
        (LARGE, 1117.1, Verdict.WARN),
        (LARGE, 1257.0, Verdict.WARN),
        (LARGE, 1257.1, Verdict.FAIL),
        (SMALL, 1257.0, Verdict.PASS),
        (SMALL, 1257.1, Verdict.FAIL),
    ],
)
def test_a_time_at_the_lines(size_bytes: int, time_us: float, verdict: Verdict) -> None:
    assert EXPECTED.verdict(row(size_bytes, time_us, 1.0)) is verdict


@pytest.mark.parametrize(
    ("tolerance", "most"), [(OF_ANOTHER_NCCL, 1510.0), (MODELLED, 1681.6), (LEAST_KNOWN, 1115.0), (MEASURED, 1257.0)]
)
def test_what_is_known_less_well_is_judged_less_strictly(tolerance: Tolerance, most: float) -> None:
    expected = replace(EXPECTED, tolerance=tolerance)
    assert expected.verdict(row(SMALL, most, 1.0)) is Verdict.PASS
    assert expected.verdict(row(SMALL, most + 0.1, 1.0)) is Verdict.FAIL


def test_a_time_whose_interval_reaches_what_is_not_slow_is_inconclusive() -> None:
    late = row(SMALL, 1300.0, 1.0)
    assert EXPECTED.verdict(late) is Verdict.FAIL
    assert EXPECTED.verdict(replace(late, ci95_percent=5.0)) is Verdict.INCONCLUSIVE
    assert EXPECTED.verdict(replace(late, ci95_percent=3.0)) is Verdict.FAIL
    assert EXPECTED.verdict(replace(late, ci95_percent=400.0)) is Verdict.INCONCLUSIVE


def test_an_operation_alone_may_take_the_host_s_part_longer() -> None:
    alone = replace(row(LARGE, 1282.0, 1.0), mode="latency")
    assert EXPECTED.verdict(alone) is Verdict.PASS
    assert EXPECTED.verdict(replace(alone, time_us=1282.1)) is Verdict.FAIL


@pytest.mark.parametrize(
    ("size_bytes", "time_us", "again"),
    [(SMALL, 1131.0, False), (SMALL, 1132.0, True), (SMALL, 9000.0, True), (LARGE, 1118.0, True)],
)
def test_what_is_slow_or_nearly_is_measured_again(size_bytes: int, time_us: float, *, again: bool) -> None:
    assert EXPECTED.wants_another(row(size_bytes, time_us, 1.0)) is again


def test_a_row_tells_what_is_expected_of_it() -> None:
    measured = replace(row(1_000_000, 2000.0, 0.75), algbw_gb_s=0.5)
    shown = compared(measured, EXPECTED)
    assert shown.expected_gb_s == pytest.approx(1.5)
    assert (shown.expected_us, shown.expected_percent) == (1000.0, 50.0)
    assert (shown.expected_source, shown.verdict) == ("profile x", measured.verdict)
    assert judged(measured, EXPECTED).verdict is Verdict.FAIL
    assert judged(replace(measured, verdict=None), EXPECTED).verdict is Verdict.FAIL
    assert judged(replace(measured, verdict=None, time_us=900.0), EXPECTED).verdict is Verdict.PASS
    wrong = judged(replace(measured, time_us=900.0, verdict=Verdict.FAIL, wrong=3), EXPECTED)
    assert wrong.verdict is Verdict.FAIL, "no speed makes up for wrong data"


def test_a_slow_row_is_one_whose_speed_was_judged() -> None:
    slow = judged(row(SMALL, 2000.0, 1.0), EXPECTED)
    assert is_slow(slow)
    assert not is_slow(replace(slow, wrong=1)), "that is a matter of its data"
    assert not is_slow(replace(slow, expected_us=None))
    assert not is_slow(judged(row(SMALL, 900.0, 1.0), EXPECTED))


def test_the_slowest_large_row_stands_for_all() -> None:
    rows = [judged(row(size, time_us, 10.0), EXPECTED) for size, time_us in ((SMALL, 9e3), (LARGE, 2e3), (2**28, 4e3))]
    slowness = Slowness.of(rows)
    assert slowness.worst is rows[2]
    assert slowness.subject("node3") == "allreduce of 1M to 256M, 8 ranks on node3"
    assert slowness.seen == "10 GB/s (25 % of what is expected) at 256M"
    assert slowness.expected.endswith("GB/s, profile x")
    small = Slowness.of(rows[:1])
    assert small.subject("node3") == "allreduce of 1M, 8 ranks on node3"
    assert (small.seen, small.expected) == ("9 ms (11 % of what is expected) at 1M", "1 ms, profile x")
    assert small.severity is Verdict.FAIL


def test_few_iterations_whose_noise_nobody_knows_may_take_longer() -> None:
    few = replace(row(SMALL, 1265.0, 1.0), ci95_percent=None)
    assert EXPECTED.verdict(few) is Verdict.PASS
    assert EXPECTED.verdict(replace(few, time_us=1265.1)) is Verdict.FAIL
