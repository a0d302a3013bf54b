"""Verdicts on copies by what is expected: a profile's value or share, siblings, the limit of the links.

Below 90 % of it warns, below 75 % fails. Thresholds of others judge nobody: they were made for other sizes, tools and
counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpubench.model.paths.p2p import FAILED_SHARE, LIMIT_FAIL_SHARE, SLOW_SHARE, usual
from gpubench.model.profiles.profile import SHARE, Profile
from gpubench.model.terms.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected value of a copy, in GB/s; `whose` is its source in words."""

    value: float
    whose: str


def of_copy(
    profile: Profile | None, quantity: str, limit_gb_s: float | None, path: str | None = None
) -> Expectation | None:
    """The expectation of a profile for copies over a path (`p2p.write_gb_s`, ...); a generic one has shares."""
    if profile is None:
        return None
    if profile.match.generic is not None:
        return _of_limit(profile.typical(quantity.removesuffix("_gb_s") + SHARE), limit_gb_s)
    value = profile.typical(quantity, path)
    if value is None:
        return None
    return Expectation(value, f"profile {profile.name}")


def _of_limit(share: float | None, limit_gb_s: float | None) -> Expectation | None:
    if share is None or limit_gb_s is None:
        return None
    return Expectation(share * limit_gb_s, whose=f"{share:.0%} of the limit")


def judge_bandwidth(
    gb_s: float, expectation: Expectation | None, limit_gb_s: float | None
) -> tuple[Verdict, str, str] | None:
    """The verdict with what was seen and what was expected; None where the figure is well."""
    if expectation is not None and gb_s < SLOW_SHARE * expectation.value:
        share = gb_s / expectation.value
        below_limit = limit_gb_s is not None and gb_s < LIMIT_FAIL_SHARE * limit_gb_s
        fails = share < FAILED_SHARE or below_limit
        seen = f"{gb_s:.4g} GB/s, {share:.0%} of what is expected"
        return Verdict.FAIL if fails else Verdict.WARN, seen, f"{expectation.value:.4g} GB/s, {expectation.whose}"
    if expectation is None and limit_gb_s is not None and gb_s < LIMIT_FAIL_SHARE * limit_gb_s:
        seen = f"{gb_s:.4g} GB/s, {gb_s / limit_gb_s:.0%} of the limit"
        return Verdict.FAIL, seen, f"at least {LIMIT_FAIL_SHARE:.0%} of {limit_gb_s:.4g} GB/s, which the links carry"
    return None


def odd_among(figures: Mapping[str, float]) -> dict[str, tuple[Verdict, float, float]]:
    """Those of several figures that are far below the usual one: verdict, share of the usual, the usual figure."""
    if len(figures) < 2:
        return {}
    common = usual(list(figures.values()))
    return {
        name: (Verdict.FAIL if figure < FAILED_SHARE * common else Verdict.WARN, figure / common, common)
        for name, figure in figures.items()
        if figure < SLOW_SHARE * common
    }
