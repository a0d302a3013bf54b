"""The verdict on one row of a comparison: data, path, limit, verdict, then time."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from gpubench.measure.compare.noise import OWN_SPREAD, ChangeNoise, NoiseBound, logs_of
from gpubench.measure.compare.rows import RunFigures
from gpubench.model.results.above_limit import ABOVE_LIMIT
from gpubench.model.results.rows.comparison import Change, ComparisonRow, RowKey, Status
from gpubench.model.terms.verdict import Verdict, gravity, overall

WRONG, STAGED, SLOWER, WORSE, NARROWER, LOST, UNSURE, PATH, UNVERIFIED = (
    *("wrong-data", "now-staged", "slower", "worse-verdict", "lower-limit", "not-measured"),
    *("unsure", "other-path", "not-verified"),
)
MISSING = "missing-rows"

UNSURE_FROM = 0.1
"""A slowdown of more than this that noise hides, and that is more than half of it, is neither shown nor ruled out."""

UNSURE_AT_MOST = 0.25
"""So much is never passed for being less than half of the rows' own spread: else the noisier a run, the more passed."""

_LASTS_US, _NO_HICCUP = 10_000.0, 0.75
"""Neighbouring rows of 1 ms were seen half as long again in one hiccup of a run; an operation of 10 ms and more takes
most of a row's time, so that a hiccup that nearly doubles its mean would have to last as long as the row."""

_LIMIT_FALLS = 0.99
_NVLINKS = re.compile(r"NV(\d+)", re.ASCII)
_TIMES = 3.0
"""From here on people say how many times."""


Runs = Sequence[RunFigures]
"""All runs of a side that have the row."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for the verdict on a row, in words, with the finding that reports it."""

    finding: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A row with all reasons for its verdict."""

    key: RowKey
    row: ComparisonRow
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """The option that decides verdicts: a fixed bound in percent in the place of noise."""

    threshold_percent: float | None = None


def judge_missing(key: RowKey, base: Runs) -> JudgedRow:
    """A row that only the old side has."""
    reason = Reason(MISSING, Verdict.WARN, "not in the new results")
    return _judged(key, Status.MISSING, base, (), (reason,))


def judge_added(key: RowKey, new: Runs) -> JudgedRow:
    """A row that only the new side has: nothing to compare, but wrong data are wrong data."""
    reasons = (*_wrong(new), *_above(new))
    return _judged(key, Status.ADDED, (), new, reasons)


def judge(key: RowKey, base: Runs, new: Runs, noise: ChangeNoise, rules: Rules) -> JudgedRow:
    """A row that both sides have."""
    reasons = [*_wrong(new), *_above(new), *_path(base, new), *_limit(base, new), *_verdict(base, new)]
    if any(each.verified for each in base) and not any(each.verified for each in new):
        reasons.append(Reason(UNVERIFIED, Verdict.WARN, "its data are no longer verified"))
    change = noise.change(key)
    if change is None:
        reasons += _unmeasured(base, new)
        return _judged(key, Status.COMPARED, base, new, tuple(reasons))
    slower = math.expm1(change)
    bound = noise.bound(key, math.exp(median(logs_of(base))))
    if rules.threshold_percent is not None:
        bound = NoiseBound(rules.threshold_percent / 100, "--threshold")
    way = Change.SLOWER if slower > bound.share else Change.FASTER if math.expm1(-change) > bound.share else Change.SAME
    alone = way is Change.SLOWER and noise.is_isolated(key) and not (_lasts(base) and slower > _NO_HICCUP)
    reasons += _time(slower, bound, rules, alone=alone)
    times: dict[str, object] = {
        "slower_percent": 100 * slower,
        "noise_percent": 100 * bound.share,
        "noise_source": bound.source,
        "change": way.value,
    }
    return _judged(key, Status.COMPARED, base, new, tuple(reasons), times)


def _time(slower: float, bound: NoiseBound, rules: Rules, *, alone: bool) -> Iterator[Reason]:
    """The verdict on a time that is longer by a part of `slower`; `alone`: its neighbours are not longer."""
    how_much = f"{100 * slower:.1f} % slower" if slower < _TIMES else f"{1 + slower:.1f} times as long"
    figures = f"{how_much}; {100 * bound.share:.1f} % is noise ({bound.source})"
    if slower <= bound.share:
        most = UNSURE_AT_MOST if bound.source == OWN_SPREAD else math.inf
        if rules.threshold_percent is None and slower > max(UNSURE_FROM, min(bound.share / 2, most)):
            yield Reason(UNSURE, Verdict.INCONCLUSIVE, figures)
    elif rules.threshold_percent is not None:
        yield Reason(SLOWER, Verdict.FAIL, f"{how_much} than before")
    elif alone:
        # A run hiccups at times, by any factor: what one row alone shows in few runs is to be repeated.
        yield Reason(UNSURE, Verdict.INCONCLUSIVE, f"{figures}; its neighbours are not, and runs are few")
    else:
        yield Reason(SLOWER, Verdict.FAIL, figures)


def _lasts(runs: Runs) -> bool:
    return median(each.time_us or 0.0 for each in runs) >= _LASTS_US


def _wrong(new: Runs) -> Iterator[Reason]:
    wrong = sum(each.wrong or 0 for each in new)
    if wrong:
        yield Reason(WRONG, Verdict.FAIL, f"{wrong} wrong elements")


def _above(new: Runs) -> Iterator[Reason]:
    """A figure that no link carries is of no use to compare with."""
    times = max((each.times_limit or 0.0 for each in new), default=0.0)
    if times:
        yield Reason(ABOVE_LIMIT, Verdict.ERROR, f"{times:.1f} times the limit")


def _path(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = staged(base), staged(new)
    if after and before is False:
        ways = [transport(base), transport(new)]
        which = f": {ways[1]}, not {ways[0]}" if all(ways) else ""
        yield Reason(STAGED, Verdict.FAIL, f"direct before, through host memory now{which}")
    elif after and before is None and any(each.host_staged is not None for each in new):
        yield Reason(PATH, Verdict.WARN, "through host memory now; nothing says whether it was before")
    for what, one, other in (
        ("transport", transport(base), transport(new)),
        ("path", _first(each.path_class for each in base), _first(each.path_class for each in new)),
    ):
        if one is not None and other is not None and one != other and not _more_links(one, other):
            yield Reason(PATH, Verdict.WARN, f"{what} {one} before, {other} now")


def _more_links(one: str, other: str) -> bool:
    """True where a path class became one with more NVLinks, NV12 → NV18: nobody has to look at that."""
    links = [_NVLINKS.fullmatch(path) for path in (one, other)]
    return links[0] is not None and links[1] is not None and int(links[1][1]) > int(links[0][1])


def _limit(base: Runs, new: Runs) -> Iterator[Reason]:
    before = [each.limit_gb_s for each in base if each.limit_gb_s is not None]
    after = [each.limit_gb_s for each in new if each.limit_gb_s is not None]
    if before and after and min(after) < _LIMIT_FALLS * min(before):
        yield Reason(NARROWER, Verdict.FAIL, f"limit {min(before):.4g} GB/s before, {min(after):.4g} now")


def _verdict(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = worst(base), worst(new)
    if before is None or after is None or gravity(after) >= min(gravity(before), gravity(Verdict.PASS)):
        return
    why = next((f": {each.note}" for each in new if each.verdict == after and each.note), "")
    yield Reason(WORSE, after, f"{before} before, {after} now{why}")


def _unmeasured(base: Runs, new: Runs) -> Iterator[Reason]:
    """The reason why a side has no time; none for rows that never have one, as those of topo."""
    if any(each.wrong for each in base):
        yield Reason(LOST, Verdict.INCONCLUSIVE, "the old data were wrong: their time is no baseline")
    elif logs_of(base) and not any(each.wrong for each in new):
        yield Reason(LOST, Verdict.ERROR, "measured before, and could not be now")


def staged(side: Runs) -> bool | None:
    """True where any run of a side went through host memory, None where no run says so or not."""
    known = [each.host_staged for each in side if each.host_staged is not None]
    return any(known) if known else None


def transport(side: Runs) -> str | None:
    """The transports of a side's runs."""
    return _first(each.transport for each in side)


def worst(side: Runs) -> Verdict | None:
    """The worst verdict of a side's runs."""
    verdicts = [Verdict(each.verdict) for each in side if each.verdict is not None]
    return min(verdicts, key=gravity, default=None)


def _first(texts: Iterator[str | None]) -> str | None:
    return " or ".join(dict.fromkeys(text for text in texts if text is not None)) or None


def _judged(
    key: RowKey,
    status: Status,
    base: Runs,
    new: Runs,
    reasons: tuple[Reason, ...],
    times: dict[str, object] | None = None,
) -> JudgedRow:
    quiet = Verdict.SKIP if status is Status.ADDED else Verdict.PASS
    columns: dict[str, object] = {}
    for name, side in (("base", base), ("new", new)):
        columns[f"{name}_time_us"] = _middle([each.time_us for each in side])
        columns[f"{name}_gb_s"] = _middle([each.gb_s for each in side])
        columns[f"{name}_runs"] = len(side)
        columns[f"{name}_origin"] = _first(iter(dict.fromkeys(each.origin for each in side)))
        columns[f"{name}_transport"] = transport(side)
        columns[f"{name}_host_staged"] = staged(side)
        columns[f"{name}_verdict"] = worst(side)
    row = ComparisonRow(
        **key.to_record(),
        status=status,
        verdict=overall([quiet, *(each.verdict for each in reasons)]),
        reason="; ".join(each.text for each in reasons) or None,
        **columns,  # type: ignore[arg-type]
        **(times or {}),  # type: ignore[arg-type]
    )
    return JudgedRow(key, row, reasons)


def _middle(figures: Sequence[float | None]) -> float | None:
    known = [each for each in figures if each]
    return median(known) if known else None
