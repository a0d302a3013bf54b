"""What is said of backends beside the first of a table: how fast they are, at which sizes, and over which path."""

from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from gpubench.model.facts.backends import NCCL, TORCH_NCCL
from gpubench.model.results.rows.backends import BackendRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.statistics.sampling import Mode
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import HOST_STAGED, Finding, Verdict

FRAMEWORK_SLOWER = "framework-slower"
"""The finding on a framework that is slower than the library that it calls."""

LARGE_BYTES = 16 * 2**20
"""From here on Python issues an operation in less time than an H200 takes for it: it is no reason to be slower."""

_SMALL_BYTES = 64 * 2**10
_WITHIN_PERCENT = 2.0
"""Within which one backend is as fast as another."""

_SLOWER_PERCENT = 95.0
"""Of the slower of the library's own two times; on two H200s these differed by up to 4 % at 16M."""


def staged_beside(rows: Sequence[BackendRow]) -> tuple[Finding, ...]:
    """The findings on backends that go through host memory, by their own log, where the first goes another way."""
    found = []
    for backend, here in grouped(rows, lambda row: row.backend).items():
        staged = [row for row in here if row.host_staged and row.transport != row.first_transport]
        if staged:
            worst = min(staged, key=lambda row: row.speed_percent)
            found.append(
                Finding(
                    id=HOST_STAGED,
                    severity=Verdict.FAIL,
                    subject=backend,
                    seen=f"{worst.transport} through host memory, {worst.speed_percent:.3g} % of the speed of "
                    f"{worst.first}, which takes {worst.first_transport}",
                    expected=f"the path that {worst.first} takes in the same process",
                    cause="settings that came between the two communicators, or another libnccl",
                    next_command=f"gpubench {worst.collective} --backend {backend} --evidence",
                )
            )
    return tuple(found)


def framework_slower(rows: Sequence[BackendRow]) -> tuple[Finding, ...]:
    """The finding on torch.distributed where it is slower than the NCCL that it calls, at large sizes, in one call.

    Of operations alone it is none: there the framework's own start-up belongs to the time.
    """
    slow = [row for row in rows if _is_slower(row)]
    if not slow:
        return ()
    worst = min(slow, key=lambda row: row.speed_percent)
    finding = Finding(
        id=FRAMEWORK_SLOWER,
        severity=Verdict.WARN,
        subject=worst.backend,
        seen=f"{_percent(slow)} of the speed of {worst.first} {_span(slow)}, {_placements(slow)}",
        expected=f"{_SLOWER_PERCENT:g} % of the slower of the two times of {worst.first}, at the least",
        cause="work on the GPU that torch adds around NCCL's call, such as a copy",
        next_command=f"gpubench {worst.collective} --backend {worst.first},{worst.backend} "
        f"--sizes {format_size(worst.size_bytes)}",
    )
    return (finding,)


def _is_slower(row: BackendRow) -> bool:
    counts = (row.backend, row.first) == (TORCH_NCCL, NCCL) and row.note is None and row.mode != Mode.LATENCY
    return counts and row.size_bytes >= LARGE_BYTES and _slower_first_us(row) < row.time_us * _SLOWER_PERCENT / 100


def _slower_first_us(row: BackendRow) -> float:
    """The slower of the first's two times, of which the row has the mean, and by how much the second was slower."""
    drift = (row.first_drift_percent or 0.0) / 100
    return row.first_time_us * max(1.0, 1 + drift) / (1 + drift / 2)


def speed_words(rows: Sequence[BackendRow], *, composed: bool = True) -> str:
    """'torch:nccl is as fast as nccl, within 2 %, from 1M to 1G in place, and has 94 to 103 % of its speed from 1K to
    64K; its host takes 24 µs to issue an operation, nccl 5'.

    `rows` are of one backend. What is made of several calls is told apart, or, without `composed`, only where there is
    nothing else.
    """
    single = [row for row in rows if row.note is None]
    several = [row for row in rows if row.note is not None] if composed or not single else []
    said = [_series_words(rows[0].backend, single)] if single else []
    if several:
        said.append(_series_words(f"made of several calls {'it' if single else rows[0].backend}", several))
    return "; ".join(filter(None, (*said, _drift_words([*single, *several]), _issue_words([*single, *several]))))


def _series_words(subject: str, rows: Sequence[BackendRow]) -> str:
    """Every size is either among the largest, at all of which both are as fast, or in the range that is named."""
    by_size = [here for _, here in sorted(grouped(rows, lambda row: row.size_bytes).items())]
    first, where = rows[0].first, _placements(rows)
    alike = list(takewhile(lambda here: all(map(_is_as_fast, here)), reversed(by_size)))
    if alike:
        rest = by_size[: len(by_size) - len(alike)]
        said = f"{subject} is as fast as {first}, within {_WITHIN_PERCENT:g} %, {_span(_flat(alike))} {where}"
        return f"{said}, and has {_percent(_flat(rest))} of its speed {_span(_flat(rest))}" if rest else said
    smallest_large = min(LARGE_BYTES, by_size[-1][0].size_bytes)
    large = [row for row in rows if row.size_bytes >= smallest_large]
    small = [row for row in rows if row.size_bytes < smallest_large]
    said = f"{subject} has {_percent(large)} of the speed of {first} {_span(large)} {where}"
    return f"{said}, and {_percent(small)} {_span(small)}" if small else said


def _is_as_fast(row: BackendRow) -> bool:
    return abs(row.speed_percent - 100) <= _WITHIN_PERCENT


def _flat(sizes: Sequence[Sequence[BackendRow]]) -> list[BackendRow]:
    return [row for here in sizes for row in here]


def _percent(rows: Sequence[BackendRow]) -> str:
    """'88.4 to 101 %', from the slowest to the fastest."""
    speeds = [row.speed_percent for row in rows]
    return " to ".join(dict.fromkeys(_digits(each) for each in (min(speeds), max(speeds)))) + " %"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _span(rows: Sequence[BackendRow]) -> str:
    """'from 1K to 64M', 'at 64M'."""
    sizes = [row.size_bytes for row in rows]
    smallest, largest = format_size(min(sizes)), format_size(max(sizes))
    return f"at {largest}" if smallest == largest else f"from {smallest} to {largest}"


def _placements(rows: Sequence[BackendRow]) -> str:
    found = {row.placement for row in rows}
    return "in and out of place" if len(found) > 1 else found.pop().replace("_", " ")


def _drift_words(rows: Sequence[BackendRow]) -> str:
    """That the first was not as fast as itself either."""
    worst = max(rows, key=lambda row: abs(row.first_drift_percent or 0.0))
    drift = abs(worst.first_drift_percent or 0.0)
    if drift <= _WITHIN_PERCENT:
        return ""
    return f"{worst.first}'s own two times differ by up to {_digits(drift)} %, at {format_size(worst.size_bytes)}"


def _issue_words(rows: Sequence[BackendRow]) -> str:
    small = [row for row in rows if row.size_bytes <= _SMALL_BYTES and row.issue_us is not None] or [
        row for row in rows if row.issue_us is not None
    ]
    if not small:
        return ""
    own = median(row.issue_us for row in small if row.issue_us is not None)
    firsts = [row.first_issue_us for row in small if row.first_issue_us is not None]
    beside = f", {rows[0].first} {_microseconds(median(firsts))}" if firsts else ""
    return f"its host takes {_microseconds(own)} µs to issue an operation{beside}"


def _microseconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def path_words(rows: Sequence[BackendRow]) -> str:
    """'over the same path (P2P/CUMEM)', or that paths differ; empty where either was not heard."""
    pairs = {(row.transport, row.first_transport) for row in rows}
    if any(None in pair for pair in pairs):
        return ""
    if all(one == other for one, other in pairs):
        return f"over the same path ({', '.join(sorted({str(one) for one, _ in pairs}))})"
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"over another path: {one}, {rows[0].first} {other}"
