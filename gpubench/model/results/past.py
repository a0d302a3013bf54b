"""This machine's past as a source of expected values: the best level that earlier results of a command reached."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, median

from gpubench.model.results.history import CUT_SHORT, ResultHead
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.row_keys import collective_key, pair_key, siblings
from gpubench.model.results.rows.comparison import RowKey
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.statistics.noise import Noise, robust_deviation
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import Verdict

LEAST_RESULTS = 5
"""Fewer results expect nothing of a row. With five the level is the second fastest, so that no single odd run makes it,
and four steps from run to run say how steady the row is; `gpubench compare` too lets a row count alone from five on."""

_NEAR_SIZES = 64
"""Rows up to so many times larger or smaller lend a row their noise: it grows from large sizes to small ones."""

_MEDIAN_EFFICIENCY = 0.37
"""How much of its figures a median makes use of where it tells their spread."""

_QUARTILE = NormalDist().inv_cdf(0.75)
"""The middle of the fastest half is the fastest quarter: so many deviations below the usual time."""

_MOST_LOG = 20.0
"""Five results of a busy host know so little of their noise that no time at all stands out."""

_BAD_RUN = (Verdict.FAIL, Verdict.ERROR)
_WELL = (None, Verdict.PASS, Verdict.SKIP)


@dataclass(frozen=True, slots=True)
class PastResult:
    """An earlier result: its metadata and verdict, its rows and pairs."""

    head: ResultHead
    rows: Sequence[CollectiveRow] = ()
    pairs: Sequence[PairRow] = ()


@dataclass(frozen=True, slots=True)
class PastFigure:
    """The level of a row in the past: the median of the fastest half of its results, and the noise between runs.

    `gb_s` is the busbw of a collective and the bandwidth of a pair; `noise` is that of the logarithm of the time.
    """

    time_us: float | None
    gb_s: float | None
    noise: Noise
    runs: int
    source: str

    @property
    def deviation(self) -> float:
        """The standard deviation from run to run, as a share of the time."""
        return math.expm1(self.noise.deviation)

    def slow_beyond(self, rows: int) -> float:
        """How many times the level a time has to exceed for chance not to explain it, in a run of so many rows.

        The usual time is that much above the level which the middle of the fastest half lies below it.
        """
        return math.exp(min(_MOST_LOG, _QUARTILE * self.noise.deviation + self.noise.bound(rows)))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Results that were left out for one reason ('of another driver'), and the newest one's ('570.1, not 580.2')."""

    reason: str
    example: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.reason}" + (f" ({self.example})" if self.example else "")


@dataclass(frozen=True, slots=True)
class PastFigures:
    """What the rows of a run may be held against. `problem` is why a folder tells nothing.

    `used` is the number of results, of which `wired_otherwise` have another topology than the run.
    """

    folder: str
    used: int = 0
    wired_otherwise: int = 0
    left_out: tuple[LeftOut, ...] = ()
    problem: str = ""
    figures: Mapping[RowKey, PastFigure] = field(default_factory=dict)

    @classmethod
    def of(
        cls, results: Iterable[PastResult], own: ResultHead, folder: str, left_out: Iterable[LeftOut] = ()
    ) -> "PastFigures":
        """The figures of those results, in any order, that are a measure of the run `own`.

        `left_out` are those that were not read at all.
        """
        newest_first = sorted(results, key=lambda each: each.head.started_at, reverse=True)
        unfit = [reason for each in newest_first if (reason := why_unfit(each.head, own)) is not None]
        fit = [each for each in newest_first if why_unfit(each.head, own) is None]
        return cls(
            folder,
            used=len(fit),
            wired_otherwise=sum(each.head.is_wired_otherwise(own) for each in fit),
            left_out=(*left_out, *tallied(unfit)),
            figures=_figures(fit[::-1], folder),
        )

    def time_of(self, row: CollectiveRow) -> PastFigure | None:
        """The level of a row of a collective; None where too few results have it."""
        return self.figures.get(collective_key(row))

    def copy_of(self, row: PairRow) -> PastFigure | None:
        """The level of a pair, known by bus id; None where too few results have it."""
        return self.figures.get(pair_key(row))

    @property
    def note(self) -> str:
        """What was used and what was left out, in a sentence; empty where there is no earlier result."""
        if self.problem:
            return f"this machine's past is not known: {self.problem}"
        if not self.used and not self.left_out:
            return ""
        told = f"this machine's past: {counted(self.used, 'result')} of {self.folder}"
        if self.used < LEAST_RESULTS:
            told += f", and {LEAST_RESULTS} are the least that a row is judged by"
        if self.wired_otherwise:
            told += f"; since {self.wired_otherwise} of them links or NICs came or went (another topology)"
        return told + (f"; left out: {', '.join(map(str, self.left_out))}" if self.left_out else "")


def why_unfit(head: ResultHead, own: ResultHead) -> tuple[str, str] | None:
    """Why a result says nothing of what the run `own` should reach, and the values that differ; None where it does."""
    if not head.complete:
        return CUT_SHORT, ""
    if head.started_at > own.started_at:
        return "begun after this run", ""
    if head.verdict in _BAD_RUN:
        return f"whose run ended with {head.verdict}", ""
    obstacle = next(head.obstacles_to(own), None)
    if obstacle is None:
        return None
    reason, _, example = obstacle.partition(": ")
    return f"of {reason}", example


def tallied(reasons: Iterable[tuple[str, str]]) -> tuple[LeftOut, ...]:
    """Results that were left out, the newest first, by reason."""
    known = list(reasons)
    counts = Counter(reason for reason, _ in known)
    examples = dict(reversed(known))
    return tuple(LeftOut(reason, examples[reason], count) for reason, count in counts.items())


@dataclass(frozen=True, slots=True)
class _Measured:
    """One row of one result."""

    time_us: float | None
    gb_s: float | None

    @property
    def cost(self) -> float:
        """The time, up to a factor that is the same for all rows of a key."""
        return 1 / self.gb_s if self.gb_s else self.time_us or 0.0


def _figures(oldest_first: Sequence[PastResult], folder: str) -> dict[RowKey, PastFigure]:
    measured: dict[RowKey, list[_Measured]] = {}
    for result in oldest_first:
        for key, figure in _of_result(result).items():
            measured.setdefault(key, []).append(figure)
    known = {key: runs for key, runs in measured.items() if len(runs) >= LEAST_RESULTS}
    noise = _with_neighbours({key: _between_runs(runs) for key, runs in known.items()})
    return {key: _figure(runs, noise[key], folder) for key, runs in known.items()}


def _figure(runs: Sequence[_Measured], noise: Noise, folder: str) -> PastFigure:
    """The median of the fastest half: a machine that gets slower from week to week is held against its better days."""
    fastest = sorted(runs, key=lambda each: each.cost)[: (len(runs) + 1) // 2]
    level = fastest[len(fastest) // 2]
    source = f"this machine's past, {counted(len(runs), 'result')} of {folder}"
    return PastFigure(level.time_us, level.gb_s, noise, len(runs), source)


def _of_result(result: PastResult) -> dict[RowKey, _Measured]:
    """The rows of a result that are right and not slow; of several alike the middle one."""
    found = [
        (collective_key(row), _Measured(row.time_us, row.busbw_gb_s))
        for row in result.rows
        if row.verdict in _WELL and not row.wrong
    ]
    found += [
        (pair_key(pair), _Measured(pair.latency_us, pair.bandwidth_gb_s))
        for pair in result.pairs
        if pair.verdict in _WELL
    ]
    alike = grouped([each for each in found if each[1].cost > 0], lambda each: each[0])
    ordered = {key: sorted((each for _, each in rows), key=lambda each: each.cost) for key, rows in alike.items()}
    return {key: rows[len(rows) // 2] for key, rows in ordered.items()}


def _between_runs(runs: Sequence[_Measured]) -> Noise:
    """The noise from one run to the next, which a slow decline does not widen: by robust steps of the logarithm."""
    steps = [math.log(later.cost / earlier.cost) for earlier, later in pairwise(runs)]
    found = robust_deviation(steps)
    return Noise(found.deviation / math.sqrt(2), found.freedom) if found is not None else Noise(0.0, math.inf)


def _with_neighbours(noise: Mapping[RowKey, Noise]) -> dict[RowKey, Noise]:
    """The noise of every row, no less than that of most rows beside it, and known as well as all of these tell it.

    A few steps may be alike by chance. Rows of one run have a part of their noise in common, so that only half of what
    the others tell is new.
    """
    found: dict[RowKey, Noise] = {}
    for family in siblings(noise):
        for key in family:
            near = [noise[each] for each in family if _is_near(each, key)]
            deviation = max(noise[key].deviation, median(each.deviation for each in near))
            told = _MEDIAN_EFFICIENCY * sum(each.freedom for each in near) / 2
            found[key] = Noise(deviation, max(noise[key].freedom, told))
    return found


def _is_near(one: RowKey, other: RowKey) -> bool:
    sizes = sorted((one.size_bytes or 1, other.size_bytes or 1))
    return sizes[1] <= _NEAR_SIZES * sizes[0]
