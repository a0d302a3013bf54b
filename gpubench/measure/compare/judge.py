"""Judgement of a comparison: verdicts on rows and on ranges of sizes.

Sixty rows that are each 4 % slower say more than one: their median is known seven times as precisely. How a run as a
whole differs from another, no number of its rows shows. There the floor for single runs applies, or several runs.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import Any, NamedTuple

from msgspec import Struct

from gpubench.measure.compare.noise import (
    FLOOR,
    LARGE_BYTES,
    LEAST_VALUES,
    OF_ONE_RUN,
    REPEATED_RUNS,
    TESTS,
    ChangeNoise,
    NoiseBound,
    RunFigures,
    RunsByRow,
    logs_of,
)
from gpubench.model.results import compare
from gpubench.model.results.report import RowsByColumn
from gpubench.model.results.speed import ABOVE_LIMIT
from gpubench.model.terms.statistics import Noise
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Cure, Finding, Verdict, gravity, worst_verdict

WRONG, STAGED, SLOWER, WORSE, NARROWER, LOST, UNSURE, PATH, UNVERIFIED = (
    *("wrong-data", "now-staged", "slower", "worse-verdict", "lower-limit", "not-measured"),
    *("unsure", "other-path", "not-verified"),
)
MISSING = "missing-rows"

UNSURE_FROM = 0.1
"""A slowdown above this share that noise hides, and that exceeds half of it, is neither shown nor ruled out."""

UNSURE_AT_MOST = 0.25
"""A slowdown above this share never passes because a run is noisy: otherwise noisier runs would pass more."""

_LASTS_US, _NO_HICCUP = 10_000.0, 0.75
"""One hiccup made neighbouring rows of 1 ms 50 % longer. An operation of 10 ms and more takes most of a row's time, so
a hiccup that nearly doubles its mean would have to last as long as the row."""

_HICCUP_US, _USUAL_ITERATIONS = 10_000.0, 20
"""That hiccup lasted 10 ms, the longest seen on GPUs. No row of 17 public files of nccl-tests has one as long. In the
last rows of a sweep, an increase over all iterations beyond it is real. CPU ranks wait for others much longer. The
iterations are those of nccl-tests if a file does not say."""

_ON_CPUS = "host"
_LIMIT_FALLS = 0.99
_NVLINKS = re.compile(r"NV(\d+)", re.ASCII)
Runs = Sequence[RunFigures]
"""The runs of a side that have the row."""


class Reason(Struct, frozen=True):
    """A reason for the verdict on a row, with the finding that reports it."""

    finding: str
    verdict: Verdict
    text: str


class JudgedRow(NamedTuple):
    """A row of either side, or of both, with all reasons for its verdict.

    `slower` is the increase of its time, relative to the old time, or None if a side has no time.
    """

    key: compare.RowKey
    status: compare.Status
    verdict: Verdict
    base: Runs
    new: Runs
    reasons: tuple[Reason, ...] = ()
    slower: float | None = None
    bound: NoiseBound | None = None
    change: compare.Change | None = None


class Rules(Struct, frozen=True):
    """A fixed bound in percent of bandwidth, below 100, that replaces noise."""

    threshold_percent: float | None = None


def judge_missing(key: compare.RowKey, base: Runs) -> JudgedRow:
    return JudgedRow(key, compare.Status.MISSING, Verdict.WARN, base, (), _NOT_IN_NEW)


_NOT_IN_NEW = (Reason(MISSING, Verdict.WARN, "not in the new results"),)


def judge_added(key: compare.RowKey, new: Runs) -> JudgedRow:
    """Judge a row that only the new side has: it compares with nothing, but wrong data are wrong."""
    reasons = (*_wrong(new), *_above(new))
    return JudgedRow(key, compare.Status.ADDED, _verdict_of(reasons, Verdict.SKIP), (), new, reasons)


def judge(key: compare.RowKey, base: Runs, new: Runs, noise: ChangeNoise, rules: Rules) -> JudgedRow:
    reasons = () if _tell_the_same(base, new) else tuple(_other_reasons(base, new))
    change = noise.change(key)
    if change is None:
        reasons = (*reasons, *_unmeasured(base, new))
        return JudgedRow(key, compare.Status.COMPARED, _verdict_of(reasons), base, new, reasons)
    slower = math.expm1(change)
    bound = noise.bound(key)
    if rules.threshold_percent is not None:
        bound = NoiseBound(rules.threshold_percent / (100 - rules.threshold_percent), "--threshold")
    way = (
        compare.Change.SLOWER
        if slower > bound.share
        else compare.Change.FASTER
        if math.expm1(-change) > bound.share
        else compare.Change.SAME
    )
    no_hiccup = slower > _NO_HICCUP and _outlasts_hiccups(
        base, slower, is_last=noise.is_largest(key) and key.backend != _ON_CPUS
    )
    isolated = way is compare.Change.SLOWER and not no_hiccup and noise.is_isolated(key)
    if slower > min(bound.share, UNSURE_FROM):
        reasons = (*reasons, *_time(slower, bound, rules, isolated=isolated))
    return JudgedRow(key, compare.Status.COMPARED, _verdict_of(reasons), base, new, reasons, slower, bound, way)


def _verdict_of(reasons: Sequence[Reason], quiet: Verdict = Verdict.PASS) -> Verdict:
    return worst_verdict([quiet, *(reason.verdict for reason in reasons)]) if reasons else quiet


_BUT_TIME = attrgetter("transport", "host_staged", "path_class", "limit_gb_s", "verdict", "verified")


def _tell_the_same(base: Runs, new: Runs) -> bool:
    """True if two runs differ only in time, as most rows of a large cluster do."""
    if len(base) != 1 or len(new) != 1 or new[0].wrong or new[0].times_limit:
        return False
    return bool(_BUT_TIME(base[0]) == _BUT_TIME(new[0]))


def _other_reasons(base: Runs, new: Runs) -> Iterator[Reason]:
    yield from (*_wrong(new), *_above(new), *_path(base, new), *_limit(base, new), *_verdict(base, new))
    if any(run.verified for run in base) and not any(run.verified for run in new):
        yield Reason(UNVERIFIED, Verdict.WARN, "its data are no longer verified")


def _time(slower: float, bound: NoiseBound, rules: Rules, *, isolated: bool) -> Iterator[Reason]:
    """Judge a time that is longer by the share `slower`. `isolated` means that its neighbours are not longer."""
    is_within = slower <= bound.share
    if is_within and (rules.threshold_percent is not None or slower <= UNSURE_FROM):
        return
    how_much = f"{compare.bandwidth_lost(100 * slower):.1f} % slower"
    figures = f"{how_much} (noise {compare.bandwidth_lost(100 * bound.share):.1f} %: {bound.source})"
    if is_within:
        most = UNSURE_AT_MOST if bound.source in OF_ONE_RUN else math.inf
        if slower > min(bound.share / 2, most):
            yield Reason(UNSURE, Verdict.INCONCLUSIVE, figures)
    elif rules.threshold_percent is not None:
        yield Reason(SLOWER, Verdict.FAIL, f"{how_much} than before")
    elif isolated:
        # A run hiccups at times, by any factor: what one row alone shows in few runs is to be repeated.
        yield Reason(UNSURE, Verdict.INCONCLUSIVE, f"{figures}; its neighbours are not, and runs are few")
    else:
        yield Reason(SLOWER, Verdict.FAIL, figures)


def _outlasts_hiccups(base: Runs, slower: float, *, is_last: bool) -> bool:
    """True if one operation takes long, or in the last rows of a sweep the increase over all iterations does."""
    if median(run.time_us or 0.0 for run in base) >= _LASTS_US:
        return True
    all_iterations = median((run.time_us or 0.0) * (run.iterations or _USUAL_ITERATIONS) for run in base)
    return is_last and slower * all_iterations > _HICCUP_US


def _wrong(new: Runs) -> Iterator[Reason]:
    wrong = sum(run.wrong or 0 for run in new)
    if wrong:
        yield Reason(WRONG, Verdict.FAIL, f"{wrong} wrong elements")


def _above(new: Runs) -> Iterator[Reason]:
    """Report a bandwidth that no link can carry: it is useless for a comparison."""
    times = max((run.times_limit or 0.0 for run in new), default=0.0)
    if times:
        yield Reason(ABOVE_LIMIT, Verdict.ERROR, f"{times:.1f} times the limit")


def _path(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = staged(base), staged(new)
    if after and before is False:
        ways = [transport(base), transport(new)]
        which = f": {ways[1]}, not {ways[0]}" if all(ways) else ""
        yield Reason(STAGED, Verdict.FAIL, f"direct before, through host memory now{which}")
    elif after and before is None and any(run.host_staged is not None for run in new):
        yield Reason(PATH, Verdict.WARN, "through host memory now; nothing says whether it was before")
    for what, one, other in (
        ("transport", transport(base), transport(new)),
        ("path", _first(run.path_class for run in base), _first(run.path_class for run in new)),
    ):
        if one is not None and other is not None and one != other and not _more_links(one, other):
            yield Reason(PATH, Verdict.WARN, f"{what} {one} before, {other} now")


def _more_links(one: str, other: str) -> bool:
    """True if a path class gained NVLinks, NV12 → NV18, which is no reason to look."""
    links = [_NVLINKS.fullmatch(path) for path in (one, other)]
    return links[0] is not None and links[1] is not None and int(links[1][1]) > int(links[0][1])


def _limit(base: Runs, new: Runs) -> Iterator[Reason]:
    before = [run.limit_gb_s for run in base if run.limit_gb_s is not None]
    after = [run.limit_gb_s for run in new if run.limit_gb_s is not None]
    if before and after and min(after) < _LIMIT_FALLS * min(before):
        yield Reason(NARROWER, Verdict.FAIL, f"limit {min(before):.4g} GB/s before, {min(after):.4g} now")


def _verdict(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = worst(base), worst(new)
    if before is None or after is None or gravity(after) >= min(gravity(before), gravity(Verdict.PASS)):
        return
    why = next((f": {run.note}" for run in new if run.verdict == after and run.note), "")
    yield Reason(WORSE, after, f"{before} before, {after} now{why}")


def _unmeasured(base: Runs, new: Runs) -> Iterator[Reason]:
    """Return the reason why a side has no time. Rows that never have one, as those of topo, need none."""
    if any(run.wrong for run in base):
        yield Reason(LOST, Verdict.INCONCLUSIVE, "the old data were wrong: their time is no baseline")
    elif logs_of(base) and not any(run.wrong for run in new):
        yield Reason(LOST, Verdict.ERROR, "measured before, and could not be now")


def staged(side: Runs) -> bool | None:
    """True if any run of a side went through host memory, None if no run says."""
    known = [run.host_staged for run in side if run.host_staged is not None]
    return any(known) if known else None


def transport(side: Runs) -> str | None:
    return _first([run.transport for run in side])


def worst(side: Runs) -> Verdict | None:
    verdicts = [Verdict(run.verdict) for run in side if run.verdict is not None]
    return min(verdicts, key=gravity, default=None)


def _first(texts: Iterable[str | None]) -> str | None:
    found = dict.fromkeys(texts)
    return " or ".join([text for text in found if text is not None]) or None


class ComparedRows(RowsByColumn[compare.ComparisonRow]):
    """The rows of a report, made when they are read."""

    def __init__(self, judged: Sequence[JudgedRow]) -> None:
        super().__init__(compare.ComparisonRow, [(len(judged), {})])
        self._judged = judged

    def __iter__(self) -> Iterator[compare.ComparisonRow]:
        return map(_comparison_row, self._judged)

    def made(self, numbers: Iterable[int]) -> list[compare.ComparisonRow]:
        return [_comparison_row(self._judged[number]) for number in numbers]

    def cells(self, *names: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(map(_SUMMED[name], self._judged) for name in names), strict=True)


_SUMMED: Mapping[str, Callable[[JudgedRow], Any]] = {
    "series": lambda _: None,
    "status": attrgetter("status"),
    "collective": attrgetter("key.collective"),
    "verdict": attrgetter("verdict"),
    "change": attrgetter("change"),
    "slower_percent": lambda row: None if row.slower is None else 100 * row.slower,
    "noise_percent": lambda row: None if row.bound is None else 100 * row.bound.share,
}


def _comparison_row(judged: JudgedRow) -> compare.ComparisonRow:
    columns = judged.key.to_record() | {name: value(judged) for name, value in _SUMMED.items()}
    for names, side in ((_OF_BASE, judged.base), (_OF_NEW, judged.new)):
        columns |= zip(names, _columns(side), strict=True)
    columns["source_device"], columns["destination_device"] = (judged.new or judged.base)[0].devices or _NO_DEVICES
    return compare.ComparisonRow(
        noise_source=None if judged.bound is None else judged.bound.source,
        reason="; ".join(reason.text for reason in judged.reasons) or None,
        **columns,
    )


_NO_DEVICES = None, None
_OF_BASE, _OF_NEW = (
    [f"{side}_{name}" for name in ("time_us", "gb_s", "runs", "origin", "transport", "host_staged", "verdict")]
    for side in ("base", "new")
)


def _columns(side: Runs) -> tuple[object, ...]:
    if len(side) == 1:
        (one,) = side
        figures = one.time_us or None, one.gb_s or None
        return *figures, 1, one.origin, one.transport or None, one.host_staged, one.verdict
    figures = _middle([run.time_us for run in side]), _middle([run.gb_s for run in side])
    return *figures, len(side), _first([run.origin for run in side]), transport(side), staged(side), worst(side)


def _middle(figures: Sequence[float | None]) -> float | None:
    known = [value for value in figures if value]
    return median(known) if known else None


RANGE = "slower-together"

_MEDIAN_WIDTH = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean."""


class Range(Struct, frozen=True):
    """Rows of one kind with similar sizes, the change of their median, and its bound. Both are logarithms."""

    keys: tuple[compare.RowKey, ...]
    change: float
    bound: float


def slower_ranges(
    before: RunsByRow, after: RunsByRow, noise: ChangeNoise, judged: Iterable[JudgedRow], rules: Rules
) -> Iterator[Finding]:
    """Return a finding for each range that is slower as a whole, unless most of its rows are named."""
    named = {row.key for row in judged if row.change is compare.Change.SLOWER}
    if rules.threshold_percent is not None:
        return
    families = [part for family in noise.families for part in _parts(family) if len(part) >= LEAST_VALUES]
    for keys in families:
        found = _range(keys, (before, after), noise, len(families))
        if found is not None and found.change > found.bound and 2 * len(named.intersection(keys)) <= len(keys):
            yield _finding(found)


def _parts(keys: Sequence[compare.RowKey]) -> Iterator[list[compare.RowKey]]:
    """Split rows at 16 MiB: latency decides below, bandwidth above."""
    yield [key for key in keys if (key.size_bytes or 0) < LARGE_BYTES]
    yield [key for key in keys if (key.size_bytes or 0) >= LARGE_BYTES]


def _range(
    keys: Sequence[compare.RowKey], sides: tuple[RunsByRow, RunsByRow], noise: ChangeNoise, ranges: int
) -> Range | None:
    """Return a range with the smaller of two bounds: from its rows with the floor for single runs, or from its runs."""
    middle = median(change for key in keys if (change := noise.change(key)) is not None)
    bounds = []
    known = [deviation for key in keys if (deviation := noise.change_noise(key)) is not None]
    if known:
        error = _MEDIAN_WIDTH * median(noise_of_row.deviation for noise_of_row in known) / math.sqrt(len(keys))
        typical = Noise(error, median(noise_of_row.freedom for noise_of_row in known))
        floor = math.log1p(noise.floor(keys[0], median(map(noise.time_us, keys))))
        bounds.append(max(floor, typical.bound(TESTS * ranges)))
    runs = [_run_middles(side, keys) for side in sides] if noise.shows_whole_runs(keys[0]) else []
    if runs and min(map(len, runs)) >= REPEATED_RUNS:
        freedom = sum(map(len, runs)) - len(runs)
        squares = sum((run - fmean(side)) ** 2 for side in runs for run in side)
        error = math.sqrt(squares / freedom * sum(1 / len(side) for side in runs))
        bounds.append(max(math.log1p(FLOOR), Noise(error, freedom).bound(TESTS * ranges)))
    return Range(tuple(keys), middle, min(bounds)) if bounds else None


def _run_middles(side: RunsByRow, keys: Sequence[compare.RowKey]) -> list[float]:
    """Return the median of the logarithms of each run, if every row has all runs."""
    logs = [logs_of(side[key]) for key in keys]
    runs = min(map(len, logs))
    return [median(row[run] for row in logs) for run in range(runs)] if runs == max(map(len, logs)) else []


def _finding(found: Range) -> Finding:
    first = found.keys[0]
    sizes = sorted({key.size_bytes or 0 for key in found.keys})
    peer = f"peer {first.peer}" if first.peer else None
    what = first.collective or " ".join(filter(None, (first.direction, first.engine, peer)))
    span = " to ".join(dict.fromkeys(map(format_size, (sizes[0], sizes[-1]))))
    return Finding(
        id=RANGE,
        severity=Verdict.FAIL,
        subject=f"{what} {span}: {len(found.keys)} rows together",
        seen=f"{compare.bandwidth_lost(100 * math.expm1(found.change)):.1f} % slower in their middle "
        f"(noise {compare.bandwidth_lost(100 * math.expm1(found.bound)):.1f} %)",
        expected="times as before, within noise",
        cause="one of the changed circumstances, clocks, or a fault",
        cure=Cure(comment="Measure again and add it: --new AGAIN.json."),
    )
