"""The rows of `gpubench compare`: what was measured on both sides, on one alone, and under which circumstances."""

from dataclasses import dataclass
from enum import StrEnum

from gpubench.model.results.report import Record

COMPARISON_SECTION, CIRCUMSTANCES_SECTION, HISTORY_SECTION = "comparison", "circumstances", "history"
FINDING_CHANGES_SECTION = "finding_changes"


class Status(StrEnum):
    """Which side has a row."""

    COMPARED = "compared"
    MISSING = "missing"
    ADDED = "added"


class Change(StrEnum):
    """Which way time changed by more than noise."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKey(Record):
    """What a row is of: two rows with the same key measured the same thing. Its fields are columns of a comparison.

    `setting` is what else tells rows of one file apart: algorithm and protocol in a sweep over them, the kind of host
    memory.
    """

    collective: str | None = None
    backend: str | None = None
    group: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    source: str | None = None
    destination: str | None = None
    source_node: str | None = None
    destination_node: str | None = None
    scope: str | None = None
    direction: str | None = None
    engine: str | None = None
    peer: str | None = None
    size_bytes: int | None = None
    dtype: str | None = None
    op: str | None = None
    root: int | None = None
    placement: str | None = None
    mode: str | None = None
    graph: int | None = None
    setting: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow(RowKey):
    """The same thing on both sides: first what it is, as in rows of collectives and pairs, then how it fared.

    Times and bandwidths are medians over the runs of a side. `slower_percent` is how much longer the new one takes,
    negative where it is faster; `noise_percent` is what it has to exceed to count, with `noise_source` saying where
    that is from. `reason` says what the verdict rests on.
    """

    status: str
    change: str | None = None
    verdict: str
    slower_percent: float | None = None
    noise_percent: float | None = None
    noise_source: str | None = None
    base_time_us: float | None = None
    new_time_us: float | None = None
    base_gb_s: float | None = None
    new_gb_s: float | None = None
    base_runs: int = 0
    new_runs: int = 0
    base_origin: str | None = None
    new_origin: str | None = None
    base_transport: str | None = None
    new_transport: str | None = None
    base_host_staged: bool | None = None
    new_host_staged: bool | None = None
    base_verdict: str | None = None
    new_verdict: str | None = None
    reason: str | None = None
    series: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CircumstanceRow(Record):
    """One circumstance of both sides; None is what no file of a side tells. `changed` needs both."""

    name: str
    base: str | None
    new: str | None
    changed: bool
    series: str | None = None


class FindingStatus(StrEnum):
    """How a finding of the new results relates to the old ones, the worst first."""

    NEW = "new"
    GRAVER = "graver"
    SAME = "same"
    MILDER = "milder"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingChangeRow(Record):
    """A finding on one subject, as both sides tell it; None: a side has none. `verdict` is on the change."""

    finding: str
    subject: str
    status: str
    verdict: str
    base_severity: str | None
    new_severity: str | None
    base_seen: str | None
    new_seen: str | None
    series: str | None = None


class Use(StrEnum):
    """What became of a dated result."""

    NEW = "new"
    BASE = "base"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow(Record):
    """A file of a folder of dated results: in which comparison it took part, or why in none.

    Of a file that was not opened only its name is known.
    """

    file: str
    started_at: str | None = None
    command: str | None = None
    host: str | None = None
    run_verdict: str | None = None
    use: str
    series: str | None = None
    reason: str | None = None
