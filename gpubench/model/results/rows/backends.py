"""Backends held against the first of a table, size by size, and what an MPI made of GPU memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated

from gpubench.model.facts.mpi_support import MpiSupport, TrialOutcome
from gpubench.model.results.report import BACKENDS, SIGNED, CollectiveRow, Record, made_of
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.nccl_choice import AGAIN
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.statistics.sampling import Mode
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import HOST_STAGED, Finding, Verdict

BACKENDS_SECTION = "backends"
MPI_SUPPORT_SECTION = "mpi_support"

LARGE_BYTES = 16 * 2**20
"""From here on an operation takes an H200 longer than Python takes to issue it: a framework has no excuse."""

_SMALL_BYTES = 64 * 2**10
_AS_FAST_PERCENT = 98.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow(Record):
    """One size with one backend, against the first backend of the table at the same size."""

    collective: str  #: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or sendrecv
    origin: Annotated[str, Origin]  #: where the numbers come from
    ranks: int  #: ranks in the group
    size_bytes: int  #: nccl-tests' size: the larger buffer of a rank, after rounding
    dtype: Annotated[str, DataType]  #: element type
    op: Annotated[str | None, ReduceOp]  #: reduction; null where data are only moved
    placement: Annotated[str, Placement]  #: result in a buffer of its own, or over the input
    mode: Annotated[str, Mode]  #: throughput: operations back to back; latency: each alone
    backend: Annotated[str, BACKENDS]  #: what moved the data
    time_us: float  #: microseconds an operation
    busbw_gb_s: float  #: GB/s of 1e9 bytes
    issue_us: float | None  #: host time to issue one operation; null: it is in time_us
    first: Annotated[str, BACKENDS]  #: the backend that it is held against
    first_time_us: float  #: mean of before and after all others
    first_issue_us: float | None  #: host time to issue one of its operations
    speed_percent: float  #: first_time_us over time_us: 100 is as fast, more is faster
    first_drift_percent: Annotated[float | None, SIGNED]  #: by how much the first was slower the second time
    transport: str | None  #: as NCCL names it
    first_transport: str | None  #: of the first
    host_staged: bool | None  #: whether data went through host memory
    note: str | None  #: what the operation is made of, where it is not one call


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiTrialRow(Record):
    """One operation of MPI on GPU memory, in a job of its own."""

    operation: str  #: the collective
    size_bytes: int  #: bytes of the larger buffer
    outcome: Annotated[str, TrialOutcome]  #: right, wrong data, crashed, refused, hung, or not tried
    seconds: float | None  #: of the job, start included
    said: str  #: its last words


def trial_rows(support: MpiSupport) -> list[MpiTrialRow]:
    """The rows of all trials."""
    return [
        MpiTrialRow(
            operation=each.operation,
            size_bytes=each.size_bytes,
            outcome=each.outcome,
            seconds=each.seconds,
            said=each.said,
        )
        for each in support.trials
    ]


def against_first(rows: Sequence[CollectiveRow]) -> list[BackendRow]:
    """Every row of another backend in its own choice, held against the first row's backend at the same size.

    Rows with wrong data, on either side, are left out.
    """
    found: list[BackendRow] = []
    for here in grouped(rows, lambda row: (row.dtype, row.op, row.placement, row.size_bytes)).values():
        own = [row for row in here if row.backend == rows[0].backend and row.setting in (None, AGAIN) and not row.wrong]
        others = [row for row in here if row.backend != rows[0].backend and row.setting is None and not row.wrong]
        found += [_against(row, own) for row in others if own]
    return found


def _against(row: CollectiveRow, own: Sequence[CollectiveRow]) -> BackendRow:
    first = own[0]
    time_us = fmean(map(_time_us, own))
    issued = [each.issue_us for each in own if each.issue_us is not None]
    return made_of(
        BackendRow,
        row,
        time_us=_time_us(row),
        first=first.backend,
        first_time_us=time_us,
        first_issue_us=min(issued, default=None),
        speed_percent=100 * time_us / _time_us(row),
        first_drift_percent=100 * (_time_us(own[1]) / _time_us(first) - 1) if len(own) > 1 else None,
        first_transport=first.transport,
    )


def _time_us(row: CollectiveRow) -> float:
    return row.time_us if row.p50_us is None else row.p50_us


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


def speed_words(rows: Sequence[BackendRow]) -> str:
    """'torch:nccl is within 2 % of nccl from 64K on, and takes 24 µs of the host to issue an operation (nccl 5 µs)'.

    `rows` are of one backend. Those count that are one call, and of both placements each as fast as it is.
    """
    counted = [row for row in rows if row.note is None] or list(rows)
    backend, first = rows[0].backend, rows[0].first
    sizes = sorted({row.size_bytes for row in counted})
    slow = [row.size_bytes for row in counted if row.speed_percent < _AS_FAST_PERCENT]
    from_bytes = next((size for size in sizes if size > max(slow, default=0)), None)
    large = [row.speed_percent for row in counted if row.size_bytes >= min(LARGE_BYTES, sizes[-1])]
    if from_bytes is not None and from_bytes == sizes[0]:
        said = f"{backend} is as fast as {first}, within {100 - _AS_FAST_PERCENT:g} %, at all sizes"
    elif from_bytes is not None and len(sizes) > 1:
        said = f"{backend} is within {100 - _AS_FAST_PERCENT:g} % of {first} from {format_size(from_bytes)} on"
    else:
        share = " to ".join(dict.fromkeys(f"{each:.3g}" for each in (min(large), max(large))))
        said = f"{backend} reaches {share} % of the speed of {first} at large sizes"
    return "; ".join(filter(None, (said, _issue_words(counted))))


def _issue_words(rows: Sequence[BackendRow]) -> str:
    small = [row for row in rows if row.size_bytes <= _SMALL_BYTES and row.issue_us is not None] or [
        row for row in rows if row.issue_us is not None
    ]
    if not small:
        return ""
    own = median(row.issue_us for row in small if row.issue_us is not None)
    firsts = [row.first_issue_us for row in small if row.first_issue_us is not None]
    beside = f", {rows[0].first} {median(firsts):.2g}" if firsts else ""
    return f"its host takes {own:.2g} µs to issue an operation{beside}"


def path_words(rows: Sequence[BackendRow]) -> str:
    """'over the same path (P2P/CUMEM)', or that paths differ; empty where either was not heard."""
    pairs = {(row.transport, row.first_transport) for row in rows}
    if any(None in pair for pair in pairs):
        return ""
    if all(one == other for one, other in pairs):
        return f"over the same path ({', '.join(sorted({str(one) for one, _ in pairs}))})"
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"over another path: {one}, {rows[0].first} {other}"
