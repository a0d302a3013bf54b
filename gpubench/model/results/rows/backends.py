"""Backends held against the first of a table, size by size, and what an MPI made of GPU memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from gpubench.model.facts.mpi_support import MpiSupport, TrialOutcome
from gpubench.model.results.report import BACKENDS, SIGNED, CollectiveRow, Record, made_of
from gpubench.model.results.rows.case_key import CaseKey
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.nccl_choice import AGAIN

BACKENDS_SECTION = "backends"
MPI_SUPPORT_SECTION = "mpi_support"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow(CaseKey):
    """One size with one backend, against the first backend of the table at the same size."""

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
