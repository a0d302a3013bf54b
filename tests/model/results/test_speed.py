"""The verdict on the speed of a row, at the lines between them."""

import pytest
from msgspec.structs import replace

from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import LEAST_KNOWN, MEASURED, MODELLED, OF_ANOTHER_NCCL, ExpectedTime, Tolerance
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


@pytest.mark.parametrize(
    ("size_bytes", "time_us", "again"),
    [(SMALL, 1131.0, False), (SMALL, 1132.0, True), (SMALL, 9000.0, True), (LARGE, 1118.0, True)],
)
def test_what_is_slow_or_nearly_is_measured_again(size_bytes: int, time_us: float, *, again: bool) -> None:
    assert EXPECTED.needs_repetition(row(size_bytes, time_us, 1.0)) is again


def test_few_iterations_whose_noise_nobody_knows_may_take_longer() -> None:
    few = replace(row(SMALL, 1265.0, 1.0), ci95_percent=None)
    assert EXPECTED.verdict(few) is Verdict.PASS
    assert EXPECTED.verdict(replace(few, time_us=1265.1)) is Verdict.FAIL
