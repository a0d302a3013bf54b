"""The verdict on one row of a comparison: data, path, limit, verdict, then time."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from gpubench.measure.compare.noise import NoiseOf, logs_of
from gpubench.measure.compare.rows import Seen
from gpubench.model.results.rows.comparison import Change, ComparisonRow, RowKey, Status
from gpubench.model.terms.verdict import Verdict, overall

WRONG, STAGED, SLOWER, WORSE, NARROWER, LOST, UNSURE, PATH, UNVERIFIED = (
    *("wrong-data", "now-staged", "slower", "worse-verdict", "lower-limit", "not-measured"),
    *("unsure", "other-path", "not-verified"),
)
MISSING = "missing-rows"

UNSURE_FROM = 0.1
"""A slowdown that noise of more than this hides, and that is more than half of it, is neither shown nor ruled out."""

_LIMIT_FALLS = 0.99
_NVLINKS = re.compile(r"NV(\d+)", re.ASCII)
_TIMES = 3.0
"""From here on people say how many times."""

_WORSE = (Verdict.SKIP, Verdict.PASS, Verdict.WARN, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL)


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that a verdict rests on: which finding it belongs to, how bad it is, in words."""

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
    """How a comparison judges: a fixed bound in percent in the place of noise, and whether doubts fail."""

    threshold_percent: float | None = None
    strict: bool = False

    @property
    def doubt(self) -> Verdict:
        """What is no fault in itself, but nothing to pass over."""
        return Verdict.FAIL if self.strict else Verdict.WARN


def judge_missing(key: RowKey, base: Sequence[Seen], rules: Rules) -> JudgedRow:
    """A row that only the old side has."""
    reason = Reason(MISSING, rules.doubt, "not in the new results")
    return _judged(key, Status.MISSING, base, (), (reason,))


def judge_added(key: RowKey, new: Sequence[Seen]) -> JudgedRow:
    """A row that only the new side has: nothing to compare, but wrong data are wrong data."""
    reasons = tuple(_wrong(new))
    return _judged(key, Status.ADDED, (), new, reasons)


def judge(key: RowKey, base: Sequence[Seen], new: Sequence[Seen], noise: NoiseOf, rules: Rules) -> JudgedRow:
    """A row that both sides have."""
    reasons = [*_wrong(new), *_path(base, new, rules), *_limit(base, new), *_verdict(base, new, rules)]
    if any(each.verified for each in base) and not any(each.verified for each in new):
        reasons.append(Reason(UNVERIFIED, rules.doubt, "its data are no longer verified"))
    change = noise.change(key)
    if change is None:
        reasons += _unmeasured(base, new)
        return _judged(key, Status.COMPARED, base, new, tuple(reasons))
    before_us = math.exp(median(logs_of(base)))
    bound = noise.bound(key, before_us)
    share, source = bound.share, bound.source
    if rules.threshold_percent is not None:
        share, source = rules.threshold_percent / 100, "--threshold"
    slower, faster = math.expm1(change), math.expm1(-change)
    way = Change.SLOWER if slower > share else Change.FASTER if faster > share else Change.SAME
    how_much = f"{100 * slower:.1f} % slower" if slower < _TIMES else f"{1 + slower:.1f} times as long"
    figures = f"{how_much}; {100 * share:.1f} % is noise ({source})"
    if way is Change.SLOWER and rules.threshold_percent is not None:
        reasons.append(Reason(SLOWER, Verdict.FAIL, f"{how_much} than before"))
    elif way is Change.SLOWER and noise.stands_alone(key):
        # A run hiccups at times, by any factor: what one row alone shows in few runs is to be repeated.
        verdict = Verdict.FAIL if rules.strict else Verdict.INCONCLUSIVE
        reasons.append(Reason(UNSURE, verdict, f"{figures}; its neighbours are not, and runs are few"))
    elif way is Change.SLOWER:
        reasons.append(Reason(SLOWER, Verdict.FAIL, figures))
    elif rules.threshold_percent is None and share > UNSURE_FROM and slower > share / 2:
        reasons.append(Reason(UNSURE, Verdict.INCONCLUSIVE, figures))
    times: dict[str, object] = {
        "slower_percent": 100 * slower,
        "noise_percent": 100 * share,
        "noise_source": source,
        "change": way.value,
    }
    return _judged(key, Status.COMPARED, base, new, tuple(reasons), times)


def _wrong(new: Sequence[Seen]) -> Iterator[Reason]:
    wrong = sum(each.wrong or 0 for each in new)
    if wrong:
        yield Reason(WRONG, Verdict.FAIL, f"{wrong} wrong elements")


def _path(base: Sequence[Seen], new: Sequence[Seen], rules: Rules) -> Iterator[Reason]:
    before, after = staged(base), staged(new)
    if after and before is False:
        yield Reason(STAGED, Verdict.FAIL, "direct before, through host memory now")
    elif after and before is None and any(each.host_staged is not None for each in new):
        yield Reason(PATH, rules.doubt, "through host memory now; nothing says whether it was before")
    for what, one, other in (
        ("transport", transport(base), transport(new)),
        ("path", _first(each.path_class for each in base), _first(each.path_class for each in new)),
    ):
        if one is not None and other is not None and one != other and not _more_links(one, other):
            yield Reason(PATH, rules.doubt, f"{what} {one} before, {other} now")


def _more_links(one: str, other: str) -> bool:
    """Whether a path became another with more NVLinks, which nobody has to look at."""
    links = [_NVLINKS.fullmatch(path) for path in (one, other)]
    return links[0] is not None and links[1] is not None and int(links[1][1]) > int(links[0][1])


def _limit(base: Sequence[Seen], new: Sequence[Seen]) -> Iterator[Reason]:
    before = [each.limit_gb_s for each in base if each.limit_gb_s is not None]
    after = [each.limit_gb_s for each in new if each.limit_gb_s is not None]
    if before and after and min(after) < _LIMIT_FALLS * min(before):
        yield Reason(NARROWER, Verdict.FAIL, f"limit {min(before):.4g} GB/s before, {min(after):.4g} now")


def _verdict(base: Sequence[Seen], new: Sequence[Seen], rules: Rules) -> Iterator[Reason]:
    before, after = worst(base), worst(new)
    if before is None or after is None or _WORSE.index(after) <= max(_WORSE.index(before), _WORSE.index(Verdict.PASS)):
        return
    why = next((f": {each.note}" for each in new if each.verdict == after and each.note), "")
    verdict = rules.doubt if after is Verdict.WARN else after
    yield Reason(WORSE, verdict, f"{before} before, {after} now{why}")


def _unmeasured(base: Sequence[Seen], new: Sequence[Seen]) -> Iterator[Reason]:
    """Why there is no time to compare; rows that never have one, as those of topo, are none of it."""
    if any(each.wrong for each in base):
        yield Reason(LOST, Verdict.INCONCLUSIVE, "the old data were wrong: their time is no baseline")
    elif logs_of(base) and not any(each.wrong for each in new):
        yield Reason(LOST, Verdict.ERROR, "measured before, and could not be now")


def staged(side: Sequence[Seen]) -> bool | None:
    """Whether any run of a side went through host memory."""
    known = [each.host_staged for each in side if each.host_staged is not None]
    return any(known) if known else None


def transport(side: Sequence[Seen]) -> str | None:
    """The transports of a side's runs."""
    return _first(each.transport for each in side)


def worst(side: Sequence[Seen]) -> Verdict | None:
    """The worst verdict of a side's runs."""
    verdicts = [Verdict(each.verdict) for each in side if each.verdict is not None]
    return max(verdicts, key=_WORSE.index) if verdicts else None


def _first(texts: Iterator[str | None]) -> str | None:
    return " or ".join(dict.fromkeys(text for text in texts if text is not None)) or None


def _judged(
    key: RowKey,
    status: Status,
    base: Sequence[Seen],
    new: Sequence[Seen],
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
    """The median of what is known."""
    known = [each for each in figures if each]
    return median(known) if known else None
