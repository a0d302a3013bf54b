"""The rows of `gpubench compare`: what was measured on both sides, on one alone, and under which circumstances."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from gpubench.model.results.report import SIGNED, Record
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Verdict

COMPARISON_SECTION, CIRCUMSTANCES_SECTION, HISTORY_SECTION = "comparison", "circumstances", "history"
FINDING_CHANGES_SECTION = "finding_changes"


class Status(StrEnum):
    """The sides that have a row: both, the old one alone, the new one alone."""

    COMPARED = "compared"
    MISSING = "missing"
    ADDED = "added"


class Change(StrEnum):
    """The direction in which time changed by more than noise."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKey(Record):
    """The columns that say what a row is of: two rows with the same key measured the same thing."""

    collective: str | None = None  #: as in rows of collectives; null where it is a pair
    backend: str | None = None  #: what moved the data; a model of NCCL counts as nccl
    group: str | None = None  #: the part of the job
    ranks: Annotated[int | None, {"minimum": 1}] = None  #: ranks in the group
    nodes: Annotated[int | None, {"minimum": 1}] = None  #: hosts in the group
    source: str | None = None  #: of a pair: bus id where both sides have the same hosts, else the device's name
    destination: str | None = None  #: as source
    source_node: str | None = None  #: host, or 'node 0' where the sides have different hosts
    destination_node: str | None = None  #: as source_node
    scope: str | None = None  #: process, ipc or network
    direction: str | None = None  #: write, read or both
    engine: str | None = None  #: ce, sm, nccl or cpu
    peer: str | None = None  #: peer access: on or off
    size_bytes: int | None = None  #: as in rows
    dtype: str | None = None  #: element type
    op: str | None = None  #: reduction
    root: int | None = None  #: root rank
    placement: str | None = None  #: out_of_place or in_place
    mode: str | None = None  #: throughput or latency
    graph: int | None = None  #: replays of a captured CUDA graph
    #: what else tells rows of one file apart: algorithm and protocol of a sweep, kind of host memory
    setting: str | None = None

    @property
    def name(self) -> str:
        """In words, without defaults such as float32 or sum: 'allreduce 1M in place', 'GPU0 → GPU1 256M write ce'."""
        size = None if self.size_bytes is None else format_size(self.size_bytes)
        if self.collective is None:
            peer = "peer off" if self.peer == "off" else None
            parts: tuple[str | None, ...] = (
                f"{self.source} → {self.destination}",
                size,
                self.direction,
                self.engine,
                peer,
                self.setting,
            )
        else:
            usual = ("float32", "sum", "throughput")
            dtype, op, mode = (None if each in usual else each for each in (self.dtype, self.op, self.mode))
            root = f"root {self.root}" if self.root else None
            place = "in place" if self.placement == "in_place" else None
            graph = "graph" if self.graph else None
            parts = (self.collective, size, dtype, op, root, place, mode, graph, self.setting, self.group)
        return " ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow(RowKey):
    """The same thing in old and new results."""

    status: Annotated[str, Status]  #: which side has it: both, the old one alone, the new one alone
    change: Annotated[str | None, Change] = None  #: of time, beyond noise; null where there is no time on both sides
    verdict: Annotated[str, Verdict]  #: of this row
    slower_percent: Annotated[float | None, SIGNED] = None  #: how much longer the new one takes; negative: faster
    noise_percent: float | None = None  #: what that has to exceed to count
    noise_source: str | None = None  #: where noise_percent is from
    base_time_us: float | None = None  #: median over runs
    new_time_us: float | None = None  #: as base_time_us
    base_gb_s: float | None = None  #: busbw of a collective, bandwidth of a pair
    new_gb_s: float | None = None  #: as base_gb_s
    base_runs: int = 0  #: runs that have it
    new_runs: int = 0  #: as base_runs
    base_origin: str | None = None  #: measured, simulated or recorded
    new_origin: str | None = None  #: as base_origin
    base_transport: str | None = None  #: as NCCL names it
    new_transport: str | None = None  #: as base_transport
    base_host_staged: bool | None = None  #: whether data went through host memory
    new_host_staged: bool | None = None  #: as base_host_staged
    base_verdict: Annotated[str | None, Verdict] = None  #: the worst of the runs; null: not judged
    new_verdict: Annotated[str | None, Verdict] = None  #: as base_verdict
    reason: str | None = None  #: what the verdict rests on
    series: str | None = None  #: the newest of the dated results that were compared; null: two files were named


@dataclass(frozen=True, slots=True, kw_only=True)
class CircumstanceRow(Record):
    """A circumstance that numbers depend on."""

    name: str  #: what it is: a version, the GPUs, the topology, an option, a variable
    base: str | None  #: null: no file of this side tells
    new: str | None  #: as base
    changed: bool  #: both are known, and differ
    series: str | None = None  #: the newest of the dated results that were compared; null: two files were named


class FindingStatus(StrEnum):
    """A finding of the new results in relation to the old ones, the worst first."""

    NEW = "new"
    GRAVER = "graver"
    SAME = "same"
    MILDER = "milder"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingChangeRow(Record):
    """A finding of a check or of topo on one subject, as both sides tell it."""

    finding: str  #: its id
    subject: str  #: what it is on
    status: Annotated[str, FindingStatus]  #: new, graver or milder than before, the same, or gone
    #: on the change: a finding that is new or graver has its own
    verdict: Annotated[str, Verdict]
    base_severity: str | None  #: null: not found before
    new_severity: str | None  #: null: not found now
    base_seen: str | None  #: what was seen before
    new_seen: str | None  #: what is seen now
    series: str | None = None  #: the newest of the dated results that were compared; null: two files were named


class Use(StrEnum):
    """The use of a dated result in a comparison."""

    NEW = "new"
    BASE = "base"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow(Record):
    """A file of a folder of dated results."""

    file: str  #: its name in the folder
    started_at: str | None = None  #: when its run began, UTC; null: it was not read
    command: str | None = None  #: what was run; null: its name is none of a dated result
    host: str | None = None  #: the first host, and how many more
    run_verdict: str | None = None  #: what its run ended with; null: it was not read
    use: Annotated[str, Use]  #: new: compared with those before it; base: one of these; left out: in no comparison
    series: str | None = None  #: the comparison it took part in, by its newest result
    reason: str | None = None  #: why it was left out
