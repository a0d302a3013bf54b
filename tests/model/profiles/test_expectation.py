"""Verdicts on figures, at the lines between them: a profile's values, shares of the limit, siblings."""

from dataclasses import replace
from typing import Any

import pytest

from gpubench.model.profiles.expectation import (
    LATE_TIMES,
    Expectation,
    is_near_line,
    judge_bandwidth,
    judge_row,
    middle_row,
    odd_among,
    of_collective,
    of_copy,
)
from gpubench.model.profiles.profile import LARGE_BYTES, Expected, ExpectedKind, Generic, Profile
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles.files import load
from tests.fakes.measured_rows import row

FIRM, DERIVED = Expectation(400.0, firm=True, whose="ours"), Expectation(400.0, firm=False, whose="theirs")


def expecting(*values: tuple[str, float, dict[str, Any]]) -> Profile:
    usual: dict[str, Any] = {"kind": ExpectedKind.MEASURED, "source": "us"}
    expected = tuple(Expected(quantity=quantity, value=value, **usual | keys) for quantity, value, keys in values)
    return replace(load("hgx-h200-8"), expected=expected)


def generic(**shares: float) -> Profile:
    made = expecting(*((f"{name.replace('__', '.')}_share", share, {}) for name, share in shares.items()))
    return replace(made, match=replace(made.match, generic=Generic.NVLINK))


BUSBW = ("allreduce.busbw_gb_s", 360.0, {"size_bytes": LARGE_BYTES})


@pytest.mark.parametrize(
    ("gb_s", "expectation", "limit", "verdict"),
    [
        (360.0, FIRM, None, None),
        (359.9, FIRM, None, Verdict.WARN),
        (300.0, FIRM, None, Verdict.WARN),
        (299.9, FIRM, None, Verdict.FAIL),
        (299.9, DERIVED, None, Verdict.WARN),
        (299.9, DERIVED, 749.0, Verdict.WARN),
        (299.9, DERIVED, 751.0, Verdict.FAIL),
        (180.0, DERIVED, 450.0, Verdict.WARN),
        (180.0, None, 450.0, None),
        (179.9, None, 450.0, Verdict.FAIL),
        (1.0, None, None, None),
    ],
)
def test_bandwidths_at_the_lines(
    gb_s: float, expectation: Expectation | None, limit: float | None, verdict: Verdict | None
) -> None:
    found = judge_bandwidth(gb_s, expectation, limit)
    assert (found and found[0]) == verdict


def test_a_verdict_says_what_was_seen_and_what_is_expected() -> None:
    assert judge_bandwidth(200.0, FIRM, None) == (Verdict.FAIL, "200 GB/s, 50% of what is expected", "400 GB/s, ours")
    seen = (Verdict.FAIL, "90 GB/s, 20% of the limit", "at least 40% of 450 GB/s, which the links carry")
    assert judge_bandwidth(90.0, None, 450.0) == seen


def test_small_rows_are_judged_by_their_time() -> None:
    profile = expecting(("allreduce.time_us", 10.0, {"size_bytes": 1024}))
    assert judge_row(profile, row(1024, LATE_TIMES * 10.0 - 0.1, 1.0)) is None
    assert judge_row(profile, row(1024, LATE_TIMES * 10.0, 1.0)) == (
        Verdict.WARN,
        "20 µs, 2 times as long",
        "10 µs, profile hgx-h200-8",
    )
    assert judge_row(profile, row(2048, 1000.0, 1.0)) is None, "times hold for their own size alone"
    assert judge_row(None, row(1024, 1000.0, 1.0)) is None


def test_a_row_is_large_from_64_mib_on() -> None:
    profile = expecting(BUSBW, ("allreduce.time_us", 10.0, {"size_bytes": LARGE_BYTES - 4}))
    large, small = (
        of_collective(profile, row(LARGE_BYTES, 1.0, 1.0)),
        of_collective(profile, row(LARGE_BYTES - 4, 1.0, 1.0)),
    )
    assert (large and large.value, small and small.value) == (360.0, 10.0)
    assert judge_row(profile, row(LARGE_BYTES, 1e6, 360.0)) is None
    assert judge_row(profile, row(LARGE_BYTES - 4, 1.0, 1.0)) is None


@pytest.mark.parametrize(
    ("values", "changes", "value"),
    [
        ([BUSBW], {}, 360.0),
        ([BUSBW], {"nodes": 3}, None),
        ([BUSBW], {"nodes": 2}, None),
        ([BUSBW], {"ranks": 4}, None),
        ([("allreduce.busbw_gb_s", 360.0, {"size_bytes": 2**30})], {}, None),
        ([("allreduce.busbw_gb_s", 360.0, {"size_bytes": 2**20})], {}, None),
        ([("allreduce.busbw_gb_s", 360.0, {"size_bytes": None})], {}, None),
        ([BUSBW, ("allreduce.busbw_gb_s", 370.0, {"size_bytes": 2**28})], {}, 370.0),
        ([("allreduce.busbw_gb_s", 360.0, {"size_bytes": 2**28, "kind": ExpectedKind.THRESHOLD})], {}, None),
        ([("allreduce.busbw_gb_s", 480.0, {"size_bytes": 2**28, "algorithm": "NVLS"})], {"algorithm": "ring"}, None),
        ([("allreduce.busbw_gb_s", 480.0, {"size_bytes": 2**28, "algorithm": "NVLS"})], {"algorithm": "nvls"}, 480.0),
        ([BUSBW, ("allreduce.busbw_gb_s", 480.0, {"size_bytes": 2**28, "algorithm": "NVLS"})], {}, 360.0),
    ],
)
def test_the_value_of_a_profile_that_holds_for_a_row(
    values: list[tuple[str, float, dict[str, Any]]], changes: dict[str, Any], value: float | None
) -> None:
    found = of_collective(expecting(*values), row(2**28, 1.0, 1.0, **changes))
    assert (found and found.value) == value


def test_a_derived_time_judges_nobody_and_a_derived_bandwidth_is_not_firm() -> None:
    derived = {"kind": ExpectedKind.DERIVED}
    profile = expecting(
        ("allreduce.time_us", 10.0, {"size_bytes": 1024} | derived),
        ("allreduce.busbw_gb_s", 360.0, {"size_bytes": 2**28} | derived),
    )
    assert of_collective(profile, row(1024, 1.0, 1.0)) is None
    assert of_collective(profile, row(2**28, 1.0, 1.0)) == Expectation(360.0, False, "profile hgx-h200-8")


@pytest.mark.parametrize(
    ("size_bytes", "changes", "is_known"),
    [
        (LARGE_BYTES, {}, True),
        (LARGE_BYTES - 4, {}, False),
        (LARGE_BYTES, {"nodes": 2}, False),
        (LARGE_BYTES, {"limit_gb_s": None}, False),
        (LARGE_BYTES, {"collective": "broadcast"}, False),
    ],
)
def test_a_generic_profile_has_shares_of_the_limit(size_bytes: int, changes: dict[str, Any], *, is_known: bool) -> None:
    found = of_collective(generic(allreduce__busbw=0.5), row(size_bytes, 1.0, 1.0, **{"limit_gb_s": 450.0} | changes))
    assert found == (Expectation(225.0, False, "50% of the limit") if is_known else None)


def test_what_is_expected_of_copies() -> None:
    profile = expecting(("p2p.write_gb_s", 390.0, {}), ("p2p.read_gb_s", 380.0, {"kind": ExpectedKind.DERIVED}))
    assert of_copy(profile, "p2p.write_gb_s", 450.0) == Expectation(390.0, True, "profile hgx-h200-8")
    assert of_copy(profile, "p2p.read_gb_s", 450.0) == Expectation(380.0, False, "profile hgx-h200-8")
    assert of_copy(profile, "p2p.staged_gb_s", 450.0) is None
    assert of_copy(None, "p2p.write_gb_s", 450.0) is None
    shares = generic(p2p__write=0.8)
    assert of_copy(shares, "p2p.write_gb_s", 100.0) == Expectation(80.0, False, "80% of the limit")
    assert of_copy(shares, "p2p.write_gb_s", None) is None
    assert of_copy(shares, "p2p.read_gb_s", 100.0) is None


@pytest.mark.parametrize(
    ("size_bytes", "time_us", "busbw", "is_near"),
    [
        (LARGE_BYTES, 1.0, 333.8, False),
        (LARGE_BYTES, 1.0, 333.6, True),
        (LARGE_BYTES, 1.0, 1.0, True),
        (1024, 19.39, 1.0, False),
        (1024, 19.41, 1.0, True),
        (2048, 1e6, 1.0, False),
    ],
)
def test_rows_near_a_line_are_measured_again(size_bytes: int, time_us: float, busbw: float, *, is_near: bool) -> None:
    profile = expecting(BUSBW, ("allreduce.time_us", 10.0, {"size_bytes": 1024}))
    assert is_near_line(profile, row(size_bytes, time_us, busbw)) == is_near


def test_the_middle_of_several_rows_is_by_time() -> None:
    rows = [row(1024, time_us, 1.0) for time_us in (5.0, 1.0, 9.0)]
    assert middle_row(rows).time_us == 5.0
    assert middle_row(rows[:2]).time_us == 5.0


def test_figures_that_fall_behind_the_usual_one() -> None:
    """Of five figures the second largest is the usual one."""
    figures = {"a": 128.0, "b": 100.0, "c": 90.0, "d": 87.5, "e": 62.5}
    assert odd_among(figures) == {"d": (Verdict.WARN, 0.875, 100.0), "e": (Verdict.FAIL, 0.625, 100.0)}
    assert odd_among(figures | {"e": 75.0})["e"][0] is Verdict.WARN
    assert odd_among({"a": 100.0, "b": 50.0}) == {"b": (Verdict.FAIL, 0.5, 100.0)}
    assert odd_among({"a": 1.0}) == odd_among({}) == {}
