"""Verdicts on figures, at the lines between them: a profile's values, shares of the limit, siblings."""

import pytest

from gpubench.model.profiles.learning import Expectation, find_slow_values, judge_bandwidth
from gpubench.model.terms.verdict import Verdict

EXPECTED = Expectation(400.0, whose="ours")


@pytest.mark.parametrize(
    ("gb_s", "expectation", "limit", "verdict"),
    [
        (360.0, EXPECTED, None, None),
        (359.9, EXPECTED, None, Verdict.WARN),
        (300.0, EXPECTED, None, Verdict.WARN),
        (299.9, EXPECTED, None, Verdict.FAIL),
        (310.0, EXPECTED, 749.0, Verdict.WARN),
        (310.0, EXPECTED, 776.0, Verdict.FAIL),
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
    assert judge_bandwidth(200.0, EXPECTED, None) == (
        Verdict.FAIL,
        "200 GB/s, 50% of expected",
        "400 GB/s, ours",
    )
    seen = (Verdict.FAIL, "90 GB/s, 20% of the limit", "at least 40% of 450 GB/s, the limit of the links")
    assert judge_bandwidth(90.0, None, 450.0) == seen


def test_figures_that_fall_behind_the_usual_one() -> None:
    """Of five figures the second largest is the usual one."""
    figures = {"a": 128.0, "b": 100.0, "c": 90.0, "d": 87.5, "e": 62.5}
    assert find_slow_values(figures) == {"d": (Verdict.WARN, 0.875, 100.0), "e": (Verdict.FAIL, 0.625, 100.0)}
    assert find_slow_values(figures | {"e": 75.0})["e"][0] is Verdict.WARN
    assert find_slow_values({"a": 100.0, "b": 50.0}) == {"b": (Verdict.FAIL, 0.5, 100.0)}
    assert find_slow_values({"a": 1.0}) == find_slow_values({}) == {}
