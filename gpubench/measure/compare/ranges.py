"""Ranges of sizes as a whole: a change too small to show in any one row may show in all of them together.

Sixty rows that are 4 % slower each say more than one that is: their middle is known seven times as well. What a run as
a whole differs from another, no number of its rows shows; there the floor for single runs stands, or several runs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gpubench.measure.compare.judge import JudgedRow, Rules
from gpubench.measure.compare.noise import (
    FLOOR,
    LEAST_VALUES,
    REPEATED_RUNS,
    TESTS,
    ChangeNoise,
    logs_of,
)
from gpubench.measure.compare.rows import RunsByRow
from gpubench.measure.compare.single_runs import LARGE_BYTES
from gpubench.model.results.row_keys import siblings
from gpubench.model.results.rows.comparison import Change, RowKey
from gpubench.model.terms.statistics.noise import Noise
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Finding, Verdict

RANGE = "slower-together"

_MEDIAN_WIDTH = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rows of one kind whose sizes are alike, the change in their middle, and what it has to exceed; both as logs."""

    keys: tuple[RowKey, ...]
    change: float
    bound: float


def slower_ranges(
    before: RunsByRow, after: RunsByRow, noise: ChangeNoise, judged: Iterable[JudgedRow], rules: Rules
) -> Iterator[Finding]:
    """A finding for each range that is slower as a whole, unless most of its rows are named, or a threshold judges."""
    named = {each.key for each in judged if each.row.change == Change.SLOWER}
    if rules.threshold_percent is not None:
        return
    families = [part for family in siblings(noise.keys) for part in _parts(family) if len(part) >= LEAST_VALUES]
    for keys in families:
        found = _range(keys, before, after, noise, len(families))
        if found is not None and found.change > found.bound and 2 * len(named.intersection(keys)) <= len(keys):
            yield _finding(found)


def _parts(keys: Sequence[RowKey]) -> Iterator[list[RowKey]]:
    """Below 16 MiB, where latency decides, and from there on, where bandwidth does."""
    yield [key for key in keys if (key.size_bytes or 0) < LARGE_BYTES]
    yield [key for key in keys if (key.size_bytes or 0) >= LARGE_BYTES]


def _range(
    keys: Sequence[RowKey], before: RunsByRow, after: RunsByRow, noise: ChangeNoise, ranges: int
) -> Range | None:
    """A range with the smaller of two bounds: from its rows with the floor for single runs, and from its runs."""
    middle = median(change for key in keys if (change := noise.change(key)) is not None)
    bounds = []
    known = [deviation for key in keys if (deviation := noise.of_change(key)) is not None]
    if known:
        error = _MEDIAN_WIDTH * median(each.deviation for each in known) / math.sqrt(len(keys))
        typical = Noise(error, median(each.freedom for each in known))
        bounds.append(max(_floor(keys, before, noise), typical.bound(TESTS * ranges)))
    runs = [_run_middles(side, keys) for side in (before, after)]
    if min(map(len, runs)) >= REPEATED_RUNS and noise.shows_whole_runs(keys[0]):
        freedom = sum(map(len, runs)) - len(runs)
        squares = sum((each - fmean(side)) ** 2 for side in runs for each in side)
        error = math.sqrt(squares / freedom * sum(1 / len(side) for side in runs))
        bounds.append(max(math.log1p(FLOOR), Noise(error, freedom).bound(TESTS * ranges)))
    return Range(tuple(keys), middle, min(bounds)) if bounds else None


def _floor(keys: Sequence[RowKey], before: RunsByRow, noise: ChangeNoise) -> float:
    typical_us = math.exp(median(median(logs_of(before[key])) for key in keys))
    return math.log1p(noise.floor(keys[0], typical_us))


def _run_middles(side: RunsByRow, keys: Sequence[RowKey]) -> list[float]:
    """The middle of the logarithms of each run, where every row has all of them."""
    logs = [logs_of(side[key]) for key in keys]
    runs = min(map(len, logs))
    return [median(each[run] for each in logs) for run in range(runs)] if runs == max(map(len, logs)) else []


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
        seen=f"{100 * math.expm1(found.change):.1f} % slower in their middle; "
        f"{100 * math.expm1(found.bound):.1f} % is noise",
        expected="times as before, within noise",
        cause="one of the changed circumstances, clocks, or a fault",
        next_command="measure again and add it: --new AGAIN.json",
    )
