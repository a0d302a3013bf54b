"""What a command hands to the formats: metadata, named sections, findings, a verdict.

Rows are plain data. Units are in the names; what is unknown is None, never 0. Collectives hand over the rows of their
one section as they are measured; other commands have all their sections at the end.

Schema history: 1 (gpubench 0.1) collective rows, the sections of `topo`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol

from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.sweep import DroppedSize
from gpubench.model.terms.verdict import Finding, Verdict

SCHEMA_VERSION = 1
ROWS_SECTION = "rows"
FINDINGS_SECTION = "findings"
PAIRS_SECTION = "pairs"
FINDING_COLUMNS = tuple(each.name for each in fields(Finding))


class Verified(StrEnum):
    """Which output was compared: the last timed one of every buffer, that of one more operation, or none."""

    LAST = "last"
    REPEAT = "repeat"
    NO = "no"


class Row(Protocol):
    """A line of a table."""

    def to_record(self) -> dict[str, Any]:
        """Its values by column name, as plain data."""
        ...


class Record:
    """A frozen dataclass of plain values that is a row: its fields are the columns."""

    __slots__ = ()

    def to_record(self) -> dict[str, Any]:
        """Its values by column name."""
        return {name: getattr(self, name) for name in self.columns()}

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The names of its fields, in order."""
        return tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Table:
    """A section of rows, made when somebody reads them: of a thousand nodes most formats want few."""

    columns: Sequence[str]
    rows: Callable[[], Iterable[Row]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A section of cells by row and column name."""

    cells: Mapping[str, Mapping[str, Any]]


Section = Table | Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow(Record):
    """One size × dtype × op × placement of one collective. Sizes, times and bandwidths as nccl-tests defines them.

    `time_us` is the mean over ranks; those of single ranks are None where another tool's file has the mean alone.
    `graph` counts replays of a captured CUDA graph (0: plain launches); `wrong`
    counts wrong elements over all ranks, None where nothing was compared. `setting` is what was asked of the library
    (`model.terms.nccl_choice`), None where the choice was its own.
    """

    collective: str
    backend: str
    origin: str
    group: str | None = None
    ranks: int
    nodes: int
    size_bytes: int
    count: int
    dtype: str
    op: str | None
    root: int | None
    placement: str
    mode: str
    graph: int
    iterations: int
    time_us: float
    time_us_fastest_rank: float | None
    time_us_slowest_rank: float | None
    slowest_rank: int | None
    algbw_gb_s: float
    busbw_gb_s: float
    limit_gb_s: float | None = None
    limit_percent: float | None = None
    wrong: int | None
    verified: str
    batch_median_us: float | None = None
    batch_cv: float | None = None
    ci95_percent: float | None = None
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    algorithm: str | None = None
    protocol: str | None = None
    channels: int | None = None
    transport: str | None = None
    host_staged: bool | None = None
    expected_gb_s: float | None = None
    verdict: str | None
    note: str | None = None
    setting: str | None = None


COLLECTIVE_COLUMNS = CollectiveRow.columns()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow(Record):
    """An ordered pair of devices: how it is wired and what it may carry, and, where it was measured, what it does.

    Devices are named as in matrices, nodes by host. `limit_gb_s` is per direction.
    """

    source: str
    destination: str
    source_bus_id: str | None
    destination_bus_id: str | None
    source_node: str
    destination_node: str
    scope: str | None = None
    origin: str
    direction: str | None = None
    engine: str | None = None
    peer: str | None = None
    size_bytes: int | None = None
    bandwidth_gb_s: float | None = None
    latency_us: float | None = None
    limit_gb_s: float | None
    limit_percent: float | None = None
    nvlink_bytes: int | None = None
    pcie_bytes: int | None = None
    path_class: str | None
    transport: str | None = None
    host_staged: bool | None = None
    verified: str | None = None
    verdict: str | None = None
    note: str | None = None


PAIR_COLUMNS = PairRow.columns()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What a reader needs to know to believe a number, or to measure it again.

    `subject` is the subcommand; `collective` and `backend` are None where none ran. `libraries` names versions and
    files (MPI, NCCL and where it was loaded from, CuPy, CUDA, driver); `environment` is an allow-list of settings,
    never the whole environment; `options` are the values the run used. `topology` is the fingerprint of the machine,
    `profile` the one it was simulated from, `source` where facts came from that were not read here.
    """

    gpubench_version: str
    run_id: str
    started_at: str
    command: Sequence[str]
    subject: str
    origin: str
    hosts: Sequence[str]
    collective: str | None = None
    backend: str | None = None
    ranks: Sequence[RankIdentity] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dropped_sizes: Sequence[DroppedSize] = ()
    topology: str | None = None
    profile: Mapping[str, str] | None = None
    source: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def rows_section(self) -> str:
        """The section that rows belong to which come one by one: `rows` of a collective, else `pairs`."""
        return ROWS_SECTION if self.collective is not None else PAIRS_SECTION

    def to_record(self) -> dict[str, Any]:
        """The metadata as plain data."""
        record = asdict(self)
        return record | {name: list(record[name]) for name in ("command", "ranks", "hosts", "dropped_sizes")}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Metadata":
        """The inverse of `to_record`."""
        values = {each.name: record[each.name] for each in fields(cls)}
        values["ranks"] = tuple(RankIdentity(**rank) for rank in record["ranks"])
        values["dropped_sizes"] = tuple(DroppedSize(**dropped) for dropped in record["dropped_sizes"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a run ended. `complete` is false while it runs and when it was cut short.

    `sections` are what is not handed over row by row, in the order in which formats show them; `main` is the one that
    formats show which show only one.
    """

    verdict: Verdict
    complete: bool
    findings: Sequence[Finding] = field(default=())
    sections: Mapping[str, Section] = field(default_factory=dict)
    main: str = ROWS_SECTION

    def to_record(self) -> dict[str, Any]:
        """The outcome as plain data, without the sections."""
        return {
            "verdict": self.verdict.value,
            "complete": self.complete,
            "findings": [asdict(finding) for finding in self.findings],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Report":
        """The inverse of `to_record`."""
        findings = tuple(
            Finding(**(each | {"severity": Verdict(each["severity"]), "subjects": tuple(each["subjects"])}))
            for each in record["findings"]
        )
        return cls(verdict=Verdict(record["verdict"]), complete=record["complete"], findings=findings)
