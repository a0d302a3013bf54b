"""Reads the JSON of NCCL's Inspector (plugins/profiler/inspector) in format v4.

Each process writes one file, with one object per operation. Since v4.1, each dump starts with a `dump_stats` object.
Since v4.3, only that object contains the header and metadata.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.paths.nccl_log import INSPECTED, InspectedOperation, InspectedSize, summarize_by_size
from gpubench.model.results.report import CollectiveRow, Verified, make_record
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits
from gpubench.readers.documents import split_lines
from gpubench.readers.pasted import Kind, split

_BEGINNING = re.compile(r'\s*\[?\s*\{\s*"header"\s*:\s*\{[^{}]{0,400}"n_ranks"')
_LONGEST_LINE = 2**17  # Longer than the event traces of 64 channels, which have 10 kB
_TIMES_RANKS = ("allgather", "reducescatter")
_REDUCES = ("allreduce", "reducescatter", "reduce")
_ROOTED = ("broadcast", "reduce")


def recognises(text: str) -> bool:
    """Return True if a text starts with an operation in the Inspector's format."""
    return _BEGINNING.match(text) is not None


class Header:
    """The most recent header and metadata in a file. They apply to all operations that follow."""

    def __init__(self) -> None:
        self.header: Any = None
        self.metadata: Any = None


class InspectorLines:
    """Joins the lines of all processes by communicator, collective and operation number."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int], tuple[int, int, int, dict[int, float]]] = {}
        self.hosts: dict[str, None] = {}
        self.damaged = self.lines = self.left_out = 0

    def add(self, line: str, before: "Header") -> None:
        """Add an object to which the header `before` applies. Count it if it is damaged, or is not a collective
        with a time.
        """
        self.lines += 1
        if self.lines > limits.MOST_INSPECTED or len(line) > _LONGEST_LINE:
            self.left_out += 1
            return
        try:
            record = json.loads(line)
            header, metadata = record.get("header", before.header), record.get("metadata", before.metadata)
            before.header, before.metadata = header, metadata
            if "dump_stats" not in record or "coll_perf" in record:
                self._add(header, record.get("coll_perf"), str(metadata["hostname"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.damaged += 1

    def _add(self, header: Any, operation: Any, host: str) -> None:
        name = None if operation is None else INSPECTED.get(operation["coll"])
        if name is None or not operation["coll_exec_time_us"] > 0:
            self.left_out += 1
            return
        ranks, nodes, size = int(header["n_ranks"]), int(header["nnodes"]), int(operation["coll_msg_size_bytes"])
        key = str(header["id"]), name[0], int(operation["coll_sn"])
        whole = size * ranks if name[0] in _TIMES_RANKS else size
        if min(ranks, nodes, whole) < 1:
            raise ValueError("sizes and ranks are counted from 1")
        times = self._found.setdefault(key, (whole, ranks, nodes, {}))[3]
        times[int(header["rank"])] = float(operation["coll_exec_time_us"])
        self.hosts[host] = None

    def operations(self) -> tuple[InspectedOperation, ...]:
        return tuple(
            InspectedOperation(communicator, collective, size, ranks, nodes, times)
            for (communicator, collective, _), (size, ranks, nodes, times) in self._found.items()
        )

    def remarks(self) -> Iterable[str]:
        """Yield remarks about skipped lines."""
        if self.damaged:
            yield f"{plural(self.damaged, 'damaged line')} left out"
        if self.left_out:
            yield f"{plural(self.left_out, 'line')} left out (sends, without a time, or above a limit)"


def read(text: str, name: str) -> ResultFile:
    """Return one row per collective and size. The text may contain the files of several processes.

    Raises UsageError if no operation can be read.
    """
    found, header = InspectorLines(), Header()
    for part in split(split_lines(text, name)):
        text = part.text.strip().strip("[],")
        if part.kind is Kind.JSON or text.startswith("{"):
            found.add(text, header)
    rows = tuple(make_row(size, _NOTE) for size in summarize_by_size(found.operations()))
    if not rows:
        raise UsageError(
            f"{name} has no collective with a time",
            expected="lines with coll_perf",
            reason=f"{plural(found.damaged, 'line')} damaged, {found.left_out} of other kinds",
            next_step="NCCL_INSPECTOR_REQUIRE_KERNEL_TIMING=0 keeps operations that are timed by the CPU",
        )
    return ResultFile(
        name=name,
        kind="NCCL Inspector",
        circumstances=FileCircumstances(tool="NCCL Inspector", hosts=tuple(found.hosts)),
        rows=rows,
        complete=not found.damaged,
        remarks=tuple(found.remarks()),
    )


_NOTE = "element type not recorded; median over a job's operations, each timed from the arrival of the last rank"


def make_row(found: InspectedSize, note: str) -> CollectiveRow:
    """Return the row of a summary. `note` says how it was made."""
    return make_record(
        CollectiveRow,
        found,
        backend="nccl",
        origin=Origin.RECORDED,
        count=found.size_bytes,
        dtype=DataType.INT8,
        op=ReduceOp.SUM if found.collective in _REDUCES else None,
        root=0 if found.collective in _ROOTED else None,
        placement=Placement.OUT_OF_PLACE,
        mode=Mode.THROUGHPUT,
        graph=0,
        iterations=found.operations or None,
        time_us_fastest_rank=None,
        time_us_slowest_rank=None,
        slowest_rank=None,
        wrong=None,
        verified=Verified.NO,
        verdict=None,
        note=note,
    )
