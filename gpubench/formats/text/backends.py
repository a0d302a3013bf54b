"""Backends side by side for people: how fast each is against the first, and what an MPI made of GPU memory."""

from collections.abc import Iterator, Mapping, Sequence

from gpubench.formats.text.columns import Column, fitted_lines
from gpubench.model.facts.mpi_support import TrialOutcome
from gpubench.model.results.report import Report
from gpubench.model.results.rows.backend_speed import speed_words
from gpubench.model.results.rows.backends import (
    BACKENDS_SECTION,
    MPI_SUPPORT_SECTION,
    BackendRow,
    MpiTrialRow,
)
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.units import format_size

_UNKNOWN = "-"


def backend_lines(report: Report, width: int) -> Iterator[str]:
    """A table by type, reduction and placement: the first backend's time, and the speed of the others."""
    rows = report.rows(BACKENDS_SECTION, BackendRow)
    for series in grouped(rows, lambda row: (row.dtype, row.op, row.placement)).values():
        yield from ("", *_table(series, width))
    if rows:
        yield ""
    for series in grouped(rows, lambda row: row.backend).values():
        yield f"beside            {speed_words(series)}"


def _table(rows: Sequence[BackendRow], width: int) -> Iterator[str]:
    first = rows[0]
    what = ", ".join(filter(None, (first.dtype, first.op, first.placement.replace("_", " "))))
    yield f"speed, % of {first.first}'s, {what}"
    by_size = grouped(rows, lambda row: row.size_bytes)
    names = list(dict.fromkeys(row.backend for row in rows))
    at = [{row.backend: row for row in here} for here in by_size.values()]
    columns = [
        Column("size", [format_size(size) for size in by_size], right=True),
        Column(f"{first.first} µs", [_number(here[0].first_time_us) for here in by_size.values()], right=True),
    ]
    for name in names:
        cells = [_UNKNOWN if name not in here else _share(here[name].speed_percent) for here in at]
        columns.append(Column(name, cells, right=True))
    columns += _issue_columns(rows, list(by_size.values()), at)
    yield from fitted_lines(columns, width)
    for note, here in grouped([row for row in rows if row.note], lambda row: row.note).items():
        yield f"  {', '.join(dict.fromkeys(row.backend for row in here))}: {note}"


def _issue_columns(
    rows: Sequence[BackendRow], by_size: Sequence[Sequence[BackendRow]], at: Sequence[Mapping[str, BackendRow]]
) -> list[Column]:
    """What the host takes to issue an operation, of those backends of which it is known."""
    known = list(dict.fromkeys(row.backend for row in rows if row.issue_us is not None))
    if not known:
        return []
    firsts = [_number(here[0].first_issue_us) for here in by_size]
    columns = [Column("issued in µs:", [""] * len(at), spare=1), Column(rows[0].first, firsts, spare=1, right=True)]
    for name in known:
        cells = [_UNKNOWN if name not in here else _number(here[name].issue_us) for here in at]
        columns.append(Column(name, cells, spare=1, right=True))
    return columns


def support_lines(report: Report, width: int) -> Iterator[str]:
    """Every operation that MPI was handed GPU memory for, and how that ended."""
    rows = report.rows(MPI_SUPPORT_SECTION, MpiTrialRow)
    if not rows:
        return
    by_operation = grouped(rows, lambda row: row.operation)
    sizes = list(dict.fromkeys(row.size_bytes for row in rows))
    yield from ("", "MPI on GPU memory, each operation in a job of its own")
    columns = [Column("operation", list(by_operation))]
    for size in sizes:
        cells = [next((row.outcome for row in here if row.size_bytes == size), "") for here in by_operation.values()]
        columns.append(Column(format_size(size), cells))
    columns.append(Column("after s", [_seconds(here) for here in by_operation.values()], right=True, spare=1))
    columns.append(Column("its words", [_said(here) for here in by_operation.values()], spare=2))
    yield from fitted_lines(columns, width)


def _said(rows: Sequence[MpiTrialRow]) -> str:
    return next((row.said for row in rows if row.outcome != TrialOutcome.RIGHT and row.said), "")


def _seconds(rows: Sequence[MpiTrialRow]) -> str:
    known = [row.seconds for row in rows if row.seconds is not None]
    return f"{max(known):.1f}" if known else _UNKNOWN


def _share(percent: float) -> str:
    if percent >= 1000:
        return f"{percent / 100:.3g} ×"
    return f"{percent:.1f}" if percent >= 10 else f"{percent:.2g}"


def _number(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.2f}" if value < 1_000 else f"{value:.1f}"
