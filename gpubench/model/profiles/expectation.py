"""Verdicts on figures by what is expected: a profile's value or share, siblings, the limit of the links.

A figure that somebody measured on such a machine may fail one; a derived one only warns, for it may be wrong itself.
Thresholds of others judge nobody: they were made for other sizes, tools and counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpubench.model.paths.p2p import FAILED_SHARE, LIMIT_FAIL_SHARE, NEAR_SHARE, SLOW_SHARE, usual
from gpubench.model.profiles.profile import BUSBW, LARGE_BYTES, SHARE, TIME, Expected, ExpectedKind, Profile
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.verdict import Verdict

LATE_TIMES = 2.0
"""Of the time that a small operation takes on healthy machines: host-staged ones take 2.1 times as long on 8 H200, and
from run to run it varies by a fifth."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected value of a figure, in GB/s or µs; `firm` where it was measured; `whose` is its source in words."""

    value: float
    firm: bool
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
    firm = any(each.value == value and each.kind is ExpectedKind.MEASURED for each in profile.find(quantity))
    return Expectation(value, firm, f"profile {profile.name}")


def of_collective(profile: Profile | None, row: CollectiveRow) -> Expectation | None:
    """The expectation of a profile for a row of a collective: busbw of large sizes, else time; None where none fits.

    Bandwidth rises with size, so values of smaller large sizes hold too. Where the row does not say which algorithm it
    took, the least of all holds. Times are compared at the same size alone, and only with measured ones.
    """
    if profile is None or row.ranks % row.nodes:
        return None
    gpus = row.ranks // row.nodes
    if profile.match.generic is not None:
        is_judged = row.nodes == 1 and row.size_bytes >= LARGE_BYTES
        return _of_limit(profile.typical(f"{row.collective}.busbw{SHARE}"), row.limit_gb_s) if is_judged else None
    quantity = BUSBW if row.size_bytes >= LARGE_BYTES else TIME
    found = [
        each
        for each in profile.find(f"{row.collective}.{quantity}", gpus=gpus, nodes=row.nodes)
        if each.kind is not ExpectedKind.THRESHOLD and _is_for(each, row)
    ]
    if quantity == TIME:
        found = [each for each in found if each.kind is ExpectedKind.MEASURED and each.size_bytes == row.size_bytes]
    if not found:
        return None
    by_algorithm: dict[str | None, Expected] = {}
    for each in sorted(found, key=lambda each: each.size_bytes or 0):
        by_algorithm[each.algorithm] = each
    chosen = min(by_algorithm.values(), key=lambda each: each.value)
    return Expectation(chosen.value, chosen.kind is ExpectedKind.MEASURED, f"profile {profile.name}")


def _of_limit(share: float | None, limit_gb_s: float | None) -> Expectation | None:
    if share is None or limit_gb_s is None:
        return None
    return Expectation(share * limit_gb_s, firm=False, whose=f"{share:.0%} of the limit")


def _is_for(expected: Expected, row: CollectiveRow) -> bool:
    same = row.algorithm is None or expected.algorithm is None or expected.algorithm == row.algorithm.upper()
    large_enough = expected.size_bytes is not None and LARGE_BYTES <= expected.size_bytes <= row.size_bytes
    return same and (large_enough or expected.size_bytes == row.size_bytes)


def judge_bandwidth(
    gb_s: float, expectation: Expectation | None, limit_gb_s: float | None
) -> tuple[Verdict, str, str] | None:
    """The verdict with what was seen and what was expected; None where the figure is well."""
    if expectation is not None and gb_s < SLOW_SHARE * expectation.value:
        share = gb_s / expectation.value
        below_limit = limit_gb_s is not None and gb_s < LIMIT_FAIL_SHARE * limit_gb_s
        fails = (expectation.firm and share < FAILED_SHARE) or below_limit
        seen = f"{gb_s:.4g} GB/s, {share:.0%} of what is expected"
        return Verdict.FAIL if fails else Verdict.WARN, seen, f"{expectation.value:.4g} GB/s, {expectation.whose}"
    if expectation is None and limit_gb_s is not None and gb_s < LIMIT_FAIL_SHARE * limit_gb_s:
        seen = f"{gb_s:.4g} GB/s, {gb_s / limit_gb_s:.0%} of the limit"
        return Verdict.FAIL, seen, f"at least {LIMIT_FAIL_SHARE:.0%} of {limit_gb_s:.4g} GB/s, which the links carry"
    return None


def judge_row(profile: Profile | None, row: CollectiveRow) -> tuple[Verdict, str, str] | None:
    """The verdict on a row of a collective: by bandwidth where it is large, else by time; None where it is well."""
    expectation = of_collective(profile, row)
    if row.size_bytes >= LARGE_BYTES:
        return judge_bandwidth(row.busbw_gb_s, expectation, row.limit_gb_s)
    if expectation is None or row.time_us < LATE_TIMES * expectation.value:
        return None
    times = row.time_us / expectation.value
    seen = f"{row.time_us:.4g} µs, {times:.2g} times as long"
    return Verdict.WARN, seen, f"{expectation.value:.4g} µs, {expectation.whose}"


def is_near_line(profile: Profile | None, row: CollectiveRow) -> bool:
    """True where a row should be measured again before it is judged: near the line, or beyond it."""
    expectation = of_collective(profile, row)
    if expectation is None:
        return judge_row(profile, row) is not None
    if row.size_bytes < LARGE_BYTES:
        return row.time_us > (1 - NEAR_SHARE) * LATE_TIMES * expectation.value
    return row.busbw_gb_s < (1 + NEAR_SHARE) * SLOW_SHARE * expectation.value


def middle_row(rows: Iterable[CollectiveRow]) -> CollectiveRow:
    """Of several rows of one case the middle one, by time."""
    ordered = sorted(rows, key=lambda row: row.time_us)
    return ordered[len(ordered) // 2]


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
