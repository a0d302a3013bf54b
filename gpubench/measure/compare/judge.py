"""Judge a comparison: one verdict for each row, and for each range of sizes.

The median change over a range of sixty rows is seven times as precise as the change in one row. Rows from a single run
never show how much whole runs differ. So a minimum noise applies unless each side has several runs.
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
    time_logs,
)
from gpubench.model.results import compare
from gpubench.model.results.report import RowsByColumn
from gpubench.model.results.speed import ABOVE_LIMIT
from gpubench.model.terms.statistics import Noise
from gpubench.model.terms.units import format_bandwidth, format_size, plural
from gpubench.model.terms.verdict import Cure, Finding, Verdict, gravity, worst_verdict

WRONG, STAGED, SLOWER, WORSE, NARROWER, LOST, UNSURE, PATH, UNVERIFIED = (
    *("wrong-data", "now-staged", "slower", "worse-verdict", "lower-limit", "not-measured"),
    *("unsure", "other-path", "not-verified"),
)
MISSING = "missing-rows"

UNSURE_FROM = 0.1
"""If a slowdown is larger than this share and than half the noise, but within the noise, the row is inconclusive."""

UNSURE_AT_MOST = 0.25
"""A slowdown above this share never passes because of noise within a run. Otherwise noisy runs would pass more
often.
"""

_LASTS_US, _NO_HICCUP = 10_000.0, 0.75
"""One hiccup, a brief stall of the machine, made neighbouring rows of 1 ms take 50 % longer. Operations over 10 ms
make a row so long that no hiccup nearly doubles its mean, unless the hiccup lasts as long as the row.
"""

_HICCUP_US, _USUAL_ITERATIONS = 10_000.0, 20
"""That hiccup lasted 10 ms, the longest seen on GPUs. None is as long in 17 public result files of nccl-tests. If a
row at the end of a sweep took longer by more than 10 ms in total, the increase is real. Ranks on CPUs wait much
longer for each other. If a file lacks the number of iterations, assume the default of nccl-tests.
"""

_ON_CPUS = "host"
_LIMIT_FALLS = 0.99
_NVLINKS = re.compile(r"NV(\d+)", re.ASCII)
Runs = Sequence[RunFigures]
"""The runs on one side that contain the row."""


class Reason(Struct, frozen=True):
    """A reason for the verdict on a row. `finding` is the id of the finding that reports it."""

    finding: str
    verdict: Verdict
    text: str


class JudgedRow(NamedTuple):
    """A row from one or both sides, with its verdict and all reasons for it.

    `slower` is the relative increase of the time, or None if a side has no time.
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


NOT_IN_NEW = (Reason(MISSING, Verdict.WARN, "not in the new results"),)


def judge_added(key: compare.RowKey, new: Runs) -> JudgedRow:
    """Judge a row that only the new side has.

    Wrong data and impossible bandwidths are errors even without a baseline.
    """
    reasons = (*_wrong_data(new), *_above_limit(new))
    return JudgedRow(key, compare.Status.ADDED, _worst_verdict(reasons, Verdict.SKIP), (), new, reasons)


def judge(key: compare.RowKey, base: Runs, new: Runs, noise: ChangeNoise, threshold_percent: float | None) -> JudgedRow:
    """Judge a row that both sides have.

    If a threshold is set, it replaces the noise. It is the tolerated loss of bandwidth in percent, below 100.
    """
    reasons = () if _differ_only_in_time(base, new) else tuple(_reasons_besides_time(base, new))
    change = noise.change(key)
    if change is None:
        reasons = (*reasons, *_unmeasured(base, new))
        return JudgedRow(key, compare.Status.COMPARED, _worst_verdict(reasons), base, new, reasons)
    slower = math.expm1(change)
    bound = noise.bound(key)
    if threshold_percent is not None:
        bound = NoiseBound(threshold_percent / (100 - threshold_percent), _THRESHOLD)
    direction = (
        compare.Change.SLOWER
        if slower > bound.share
        else compare.Change.FASTER
        if math.expm1(-change) > bound.share
        else compare.Change.SAME
    )
    no_hiccup = slower > _NO_HICCUP and _outlasts_hiccups(
        base, slower, is_last=noise.is_largest(key) and key.backend != _ON_CPUS
    )
    isolated = direction is compare.Change.SLOWER and not no_hiccup and noise.is_isolated(key)
    if slower > min(bound.share, UNSURE_FROM):
        reasons = (*reasons, *_longer_time(slower, bound, isolated=isolated))
    verdict = _worst_verdict(reasons)
    return JudgedRow(key, compare.Status.COMPARED, verdict, base, new, reasons, slower, bound, direction)


_THRESHOLD = "--threshold"


def _worst_verdict(reasons: Sequence[Reason], default: Verdict = Verdict.PASS) -> Verdict:
    return worst_verdict([default, *(reason.verdict for reason in reasons)]) if reasons else default


_ALL_BUT_TIME = attrgetter("transport", "host_staged", "path_class", "limit_gb_s", "verdict", "verified")


def _differ_only_in_time(base: Runs, new: Runs) -> bool:
    """True if each side has one run and only the times differ.

    This shortcut applies to most rows of a large cluster.
    """
    if len(base) != 1 or len(new) != 1 or new[0].wrong or new[0].times_limit:
        return False
    return bool(_ALL_BUT_TIME(base[0]) == _ALL_BUT_TIME(new[0]))


def _reasons_besides_time(base: Runs, new: Runs) -> Iterator[Reason]:
    yield from (*_wrong_data(new), *_above_limit(new))
    yield from (*_changed_path(base, new), *_lower_limit(base, new), *_worse_verdict(base, new))
    if any(run.verified for run in base) and not any(run.verified for run in new):
        yield Reason(UNVERIFIED, Verdict.WARN, "its data are no longer verified")


def _longer_time(slower: float, bound: NoiseBound, *, isolated: bool) -> Iterator[Reason]:
    """Judge a time that increased by the share `slower`. `isolated` is true if neighbouring rows did not get slower."""
    is_within = slower <= bound.share
    if is_within and (bound.source == _THRESHOLD or slower <= UNSURE_FROM):
        return
    loss = f"{compare.bandwidth_lost(100 * slower):.1f} % slower"
    text = f"{loss} (noise {compare.bandwidth_lost(100 * bound.share):.1f} %: {bound.source})"
    if is_within:
        most = UNSURE_AT_MOST if bound.source in OF_ONE_RUN else math.inf
        if slower > min(bound.share / 2, most):
            yield Reason(UNSURE, Verdict.INCONCLUSIVE, text)
    elif bound.source == _THRESHOLD:
        yield Reason(SLOWER, Verdict.FAIL, f"{loss} than before")
    elif isolated:
        # A hiccup can slow down a single row by any factor, so an isolated row from few runs must be measured again.
        yield Reason(UNSURE, Verdict.INCONCLUSIVE, f"{text}, but its neighbours are not, and there are few runs")
    else:
        yield Reason(SLOWER, Verdict.FAIL, text)


def _outlasts_hiccups(base: Runs, slower: float, *, is_last: bool) -> bool:
    """True if the increase is too long for a hiccup.

    This holds for operations over 10 ms, and at the end of a sweep if the increase over all iterations exceeds 10 ms.
    """
    if median(run.time_us or 0.0 for run in base) >= _LASTS_US:
        return True
    all_iterations = median((run.time_us or 0.0) * (run.iterations or _USUAL_ITERATIONS) for run in base)
    return is_last and slower * all_iterations > _HICCUP_US


def _wrong_data(new: Runs) -> Iterator[Reason]:
    wrong = sum(run.wrong or 0 for run in new)
    if wrong:
        yield Reason(WRONG, Verdict.FAIL, plural(wrong, "wrong element"))


def _above_limit(new: Runs) -> Iterator[Reason]:
    """Yield a reason if a bandwidth exceeds the links' limit, because such a value cannot be compared."""
    times = max((run.times_limit or 0.0 for run in new), default=0.0)
    if times:
        yield Reason(ABOVE_LIMIT, Verdict.ERROR, f"{times:.1f} times the limit")


def _changed_path(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = staged(base), staged(new)
    transports = transport(base), transport(new)
    if after and before is False:
        names = f": {transports[1]}, not {transports[0]}" if all(transports) else ""
        yield Reason(STAGED, Verdict.FAIL, f"direct before, through host memory now{names}")
    elif after and before is None:
        yield Reason(PATH, Verdict.WARN, "through host memory now (unknown before)")
    classes = _distinct(run.path_class for run in base), _distinct(run.path_class for run in new)
    for kind, (one, other) in (("transport", transports), ("path", classes)):
        if one is not None and other is not None and one != other and not _has_more_nvlinks(one, other):
            yield Reason(PATH, Verdict.WARN, f"{kind} {one} before, {other} now")


def _has_more_nvlinks(one: str, other: str) -> bool:
    before, after = (_NVLINKS.fullmatch(path_class) for path_class in (one, other))
    return before is not None and after is not None and int(after[1]) > int(before[1])


def _lower_limit(base: Runs, new: Runs) -> Iterator[Reason]:
    before = [run.limit_gb_s for run in base if run.limit_gb_s is not None]
    after = [run.limit_gb_s for run in new if run.limit_gb_s is not None]
    if before and after and min(after) < _LIMIT_FALLS * min(before):
        yield Reason(
            NARROWER,
            Verdict.FAIL,
            f"limit {format_bandwidth(min(before), 4)} before, {format_bandwidth(min(after), 4)} now",
        )


def _worse_verdict(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = worst(base), worst(new)
    if before is None or after is None or gravity(after) >= min(gravity(before), gravity(Verdict.PASS)):
        return
    why = next((f": {run.note}" for run in new if run.verdict == after and run.note), "")
    yield Reason(WORSE, after, f"{before} before, {after} now{why}")


def _unmeasured(base: Runs, new: Runs) -> Iterator[Reason]:
    """Yield the reason why a side has no time. Rows without a time on both sides, as from topo, need no reason."""
    if any(run.wrong for run in base):
        yield Reason(LOST, Verdict.INCONCLUSIVE, "the old data were wrong, so their time is not a baseline")
    elif time_logs(base) and not any(run.wrong for run in new):
        yield Reason(LOST, Verdict.ERROR, "measured before, but could not be measured now")


def staged(side: Runs) -> bool | None:
    """True if any of the runs went through host memory, or None if it is unknown for all of them."""
    known = [run.host_staged for run in side if run.host_staged is not None]
    return any(known) if known else None


def transport(side: Runs) -> str | None:
    return _distinct(run.transport for run in side)


def worst(side: Runs) -> Verdict | None:
    verdicts = [Verdict(run.verdict) for run in side if run.verdict is not None]
    return min(verdicts, key=gravity, default=None)


def _distinct(texts: Iterable[str | None]) -> str | None:
    return " or ".join([text for text in dict.fromkeys(texts) if text is not None]) or None


class ComparedRows(RowsByColumn[compare.ComparisonRow]):
    """The rows of a comparison, created on access."""

    def __init__(self, judged: Sequence[JudgedRow]) -> None:
        super().__init__(compare.ComparisonRow, [(len(judged), {})])
        self._judged = judged

    def __iter__(self) -> Iterator[compare.ComparisonRow]:
        return map(_comparison_row, self._judged)

    def made(self, numbers: Iterable[int]) -> list[compare.ComparisonRow]:
        return [_comparison_row(self._judged[number]) for number in numbers]

    def cells(self, *names: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(map(_COLUMNS[name], self._judged) for name in names), strict=True)


_COLUMNS: Mapping[str, Callable[[JudgedRow], Any]] = {
    "series": lambda _: None,
    "status": attrgetter("status"),
    "collective": attrgetter("key.collective"),
    "verdict": attrgetter("verdict"),
    "change": attrgetter("change"),
    "slower_percent": lambda row: None if row.slower is None else 100 * row.slower,
    "noise_percent": lambda row: None if row.bound is None else 100 * row.bound.share,
}


def _comparison_row(judged: JudgedRow) -> compare.ComparisonRow:
    columns = judged.key.to_record() | {name: value(judged) for name, value in _COLUMNS.items()}
    for names, side in ((_BASE_COLUMNS, judged.base), (_NEW_COLUMNS, judged.new)):
        columns |= zip(names, _columns(side), strict=True)
    columns["source_device"], columns["destination_device"] = (judged.new or judged.base)[0].devices or _NO_DEVICES
    return compare.ComparisonRow(
        noise_source=None if judged.bound is None else judged.bound.source,
        reason="; ".join(reason.text for reason in judged.reasons) or None,
        **columns,
    )


_NO_DEVICES = None, None
_BASE_COLUMNS, _NEW_COLUMNS = (
    [f"{side}_{name}" for name in ("time_us", "gb_s", "runs", "origin", "transport", "host_staged", "verdict")]
    for side in ("base", "new")
)


def _columns(side: Runs) -> tuple[object, ...]:
    if len(side) == 1:
        (one,) = side
        figures = one.time_us or None, one.gb_s or None
        return *figures, 1, one.origin, one.transport or None, one.host_staged, one.verdict
    figures = _median([run.time_us for run in side]), _median([run.gb_s for run in side])
    return *figures, len(side), _distinct(run.origin for run in side), transport(side), staged(side), worst(side)


def _median(figures: Sequence[float | None]) -> float | None:
    known = [value for value in figures if value]
    return median(known) if known else None


RANGE = "slower-together"

_MEDIAN_WIDTH = math.sqrt(math.pi / 2)
"""The standard error of a median relative to the standard error of a mean."""


def slower_ranges(
    before: RunsByRow, after: RunsByRow, noise: ChangeNoise, judged: Iterable[JudgedRow]
) -> Iterator[Finding]:
    """Yield a finding for each range of sizes that is slower as a whole.

    Skip ranges if most rows are already slower alone.
    """
    slower = {row.key for row in judged if row.change is compare.Change.SLOWER}
    ranges = [part for family in noise.families for part in _parts(family) if len(part) >= LEAST_VALUES]
    for keys in ranges:
        change = median(known for key in keys if (known := noise.change(key)) is not None)
        bound = _range_bound(keys, (before, after), noise, len(ranges))
        if bound is not None and change > bound and 2 * len(slower.intersection(keys)) <= len(keys):
            yield _range_finding(keys, change, bound)


def _parts(keys: Sequence[compare.RowKey]) -> Iterator[list[compare.RowKey]]:
    """Split rows at 16 MiB, where the time begins to depend on bandwidth instead of latency."""
    yield [key for key in keys if (key.size_bytes or 0) < LARGE_BYTES]
    yield [key for key in keys if (key.size_bytes or 0) >= LARGE_BYTES]


def _range_bound(
    keys: Sequence[compare.RowKey], sides: tuple[RunsByRow, RunsByRow], noise: ChangeNoise, ranges: int
) -> float | None:
    """Return the smallest median change of a range that exceeds noise, as a logarithm, or None if noise is unknown.

    It is the smaller of two bounds. One comes from single rows and a minimum noise, the other from whole runs.
    """
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
    return min(bounds, default=None)


def _run_middles(side: RunsByRow, keys: Sequence[compare.RowKey]) -> list[float]:
    """Return the median logarithmic time of each run over the rows, or nothing if a run lacks a row."""
    logs = [time_logs(side[key]) for key in keys]
    runs = min(map(len, logs))
    return [median(row[run] for row in logs) for run in range(runs)] if runs == max(map(len, logs)) else []


def _range_finding(keys: Sequence[compare.RowKey], change: float, bound: float) -> Finding:
    first = keys[0]
    sizes = sorted({key.size_bytes or 0 for key in keys})
    peer = f"peer {first.peer}" if first.peer else None
    what = first.collective or " ".join(filter(None, (first.direction, first.engine, peer)))
    span = " to ".join(dict.fromkeys(map(format_size, (sizes[0], sizes[-1]))))
    return Finding(
        id=RANGE,
        severity=Verdict.FAIL,
        subject=f"{what} {span}: {len(keys)} rows together",
        seen=f"{compare.bandwidth_lost(100 * math.expm1(change)):.1f} % slower at the median (noise "
        f"{compare.bandwidth_lost(100 * math.expm1(bound)):.1f} %)",
        expected="times as before, within noise",
        cause="one of the changed circumstances, different clock rates, or a fault",
        cure=Cure(comment="Measure again, and add the result with `--new`."),
    )
