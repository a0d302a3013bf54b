"""What a command hands to the formats: metadata, rows of one schema, findings, a verdict.

Rows are plain data. Units are in the names; what is unknown is None, never 0.

Schema history: 1 (gpubench 0.1) collective rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from gpubench.model.sweep import DroppedSize
from gpubench.model.verdict import Finding, Verdict

SCHEMA_VERSION = 1
ROWS_SECTION = "rows"


class Origin(StrEnum):
    """Where numbers come from."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    RECORDED = "recorded"


class Verified(StrEnum):
    """Which output was compared: the last timed one of every buffer, that of one more operation, or none."""

    LAST = "last"
    REPEAT = "repeat"
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One size × dtype × op × placement of one collective. Sizes, times and bandwidths as nccl-tests defines them.

    `time_us` is the mean over ranks; `graph` counts replays of a captured CUDA graph (0: plain launches); `wrong`
    counts wrong elements over all ranks, None where nothing was compared.
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
    time_us_fastest_rank: float
    time_us_slowest_rank: float
    slowest_rank: int
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

    def to_record(self) -> dict[str, Any]:
        """The row as plain data, in column order."""
        return asdict(self)


COLLECTIVE_COLUMNS = tuple(each.name for each in fields(CollectiveRow))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """One rank: where it runs and what it drives. GPU fields are None on the host backend."""

    rank: int
    host: str
    node: int
    local_rank: int
    pid: int
    gpu: str | None = None
    gpu_index: int | None = None
    gpu_bus_id: str | None = None
    gpu_uuid: str | None = None

    def __str__(self) -> str:
        if self.gpu_bus_id is None:
            return f"rank {self.rank} on {self.host}"
        return f"rank {self.rank} on {self.host} (GPU {self.gpu_index}, {self.gpu_bus_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What a reader needs to know to believe a number, or to measure it again.

    `libraries` names versions and files (MPI, NCCL and where it was loaded from, CuPy, CUDA, driver); `environment` is
    an allow-list of settings, never the whole environment; `options` are the values the run used.
    """

    gpubench_version: str
    run_id: str
    started_at: str
    command: Sequence[str]
    collective: str
    backend: str
    origin: str
    ranks: Sequence[RankIdentity]
    libraries: Mapping[str, str]
    environment: Mapping[str, str]
    options: Mapping[str, Any]
    dropped_sizes: Sequence[DroppedSize] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names in the order of their first rank."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    def to_record(self) -> dict[str, Any]:
        """The metadata as plain data."""
        record = asdict(self) | {"hosts": self.hosts}
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
    """How a run ended. `complete` is false while it runs and when it was cut short."""

    verdict: Verdict
    complete: bool
    findings: Sequence[Finding] = field(default=())

    def to_record(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "verdict": self.verdict.value,
            "complete": self.complete,
            "findings": [asdict(finding) for finding in self.findings],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Report":
        """The inverse of `to_record`."""
        findings = tuple(
            Finding(**(finding | {"severity": Verdict(finding["severity"])})) for finding in record["findings"]
        )
        return cls(verdict=Verdict(record["verdict"]), complete=record["complete"], findings=findings)
