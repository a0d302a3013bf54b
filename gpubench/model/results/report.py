"""The report of a command (metadata, sections, findings, verdict), and the rows that several commands share.

Column names contain units. Unknown values are None, never 0. A collective streams the rows of one section while it
measures. Other commands write all sections at the end.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import chain, repeat
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from msgspec import field, to_builtins
from msgspec.structs import replace

from gpubench.model.paths.transport import Conclusion, Confidence, State
from gpubench.model.terms.commands import Command, find_command
from gpubench.model.terms.operation import ROW_BACKENDS, DataType, Placement, ReduceOp, TransferBackend
from gpubench.model.terms.overlap import OVERLAP
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import DroppedSize
from gpubench.model.terms.verdict import Finding, Origin, Verdict, worst_verdict

R = TypeVar("R", bound="Record")
Made = TypeVar("Made")

SCHEMA_VERSION = 1
FINDINGS_SECTION = "findings"
TRAFFIC_SECTION = "traffic"
OVERLAP_SECTION = OVERLAP
BACKENDS = ROW_BACKENDS

SIGNED = "signed"  # Marks a column that may be negative. All other numbers are 0 or more.


class Verified(StrEnum):
    """Which output was verified.

    LAST: the output of the timed operations in every buffer. REPEAT: the output of one more operation. NO: none.
    """

    LAST = "last"
    REPEAT = "repeat"
    NO = "no"


class Row(Protocol):
    def to_record(self) -> dict[str, Any]: ...


class OnPage(NamedTuple):
    """How Markdown and HTML pages show a section: its title, its columns and the maximum number of rows.

    Without a title, pages show the section's name. Without columns, they show the columns of the terminal table in
    `formats.text`, or all columns. If `folds` is set, the worst rows come first and passing rows are collapsed.
    """

    title: str = ""
    columns: Sequence[str] = ()
    most: int = 200
    folds: bool = False
    is_hidden: bool = False


HIDDEN = OnPage(is_hidden=True)
"""Pages omit such a section or show it in another form. JSON and CSV contain it."""


class Record(Struct, frozen=True):
    """A row of the section `section`. Its fields are the columns. `host_fields` are the columns with a host name."""

    section: ClassVar[str] = ""
    on_page: ClassVar[OnPage] = OnPage()
    host_fields: ClassVar[Sequence[str]] = ()

    def to_record(self) -> dict[str, Any]:
        return dict(zip(self.columns(), attribute_reader(self.columns())(self), strict=True))

    def __repr__(self) -> str:
        """Show only known values, because most columns of a wide row are empty."""
        known = ((name, value) for name, value in self.to_record().items() if value not in (None, "", ()))
        shown = (f"{name}={value:.6g}" if type(value) is float else f"{name}={value!r}" for name, value in known)
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return cls.__struct_fields__


def make_record(kind: type[Made], *sources: object, **values: Any) -> Made:
    """Make a record from `values`. Copy each remaining field from the first source that has it."""
    made: Any = kind
    for source, (names, read) in zip(sources, _common_fields(made, tuple(map(type, sources)), (*values,)), strict=True):
        values |= zip(names, read(source), strict=True)
    return kind(**values)


@cache
def _common_fields(
    kind: type, sources: tuple[type, ...], left_out: tuple[str, ...]
) -> tuple[tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]], ...]:
    """Return the field names to copy from each source, each with a function that reads them."""
    names = dict.fromkeys(getattr(kind, "_fields", ()) or kind.__struct_fields__)  # type: ignore[attr-defined]
    wanted = [name for name in names if name not in left_out]
    found = []
    for source in sources:
        has = {*dir(source)}
        own = tuple(name for name in wanted if name in has)
        wanted = [name for name in wanted if name not in has]
        found.append((own, attribute_reader(own)))
    return tuple(found)


@cache
def attribute_reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads attributes as a tuple, twice as fast as a loop."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda item: tuple(getattr(item, name) for name in names)


class RowsByColumn(Collection[R], Generic[R]):
    """Rows stored as columns. A row object is made only when it is read, because a cluster has very many rows.

    `pieces` are consecutive blocks of rows: the number of rows, and their columns by name. If a block lacks a column,
    its rows have the default value.
    """

    def __init__(self, kind: type[R], pieces: Sequence[tuple[int, Mapping[str, Sequence[Any]]]]) -> None:
        self._kind, self._pieces = kind, pieces
        self._count = sum(count for count, _ in pieces)

    @classmethod
    def of(cls, kind: type[R], rows: Sequence[R]) -> "RowsByColumn[R]":
        """Store row objects as columns."""
        names = kind.columns()
        return cls(
            kind, [(len(rows), dict(zip(names, zip(*map(attribute_reader(names), rows), strict=True), strict=False)))]
        )

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """The columns by name, if the rows are stored in one block."""
        ((_, columns),) = self._pieces
        return columns

    def __len__(self) -> int:
        return self._count

    def __contains__(self, row: object) -> bool:
        return any(other == row for other in self)

    def __iter__(self) -> Iterator[R]:
        for _, columns in self._pieces:
            for cells in zip(*columns.values(), strict=True):
                yield self._kind(**dict(zip(columns, cells, strict=True)))

    def cells(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield one tuple per row with the values of some columns."""
        names_, defaults = self._kind.__struct_fields__, self._kind.__struct_defaults__
        missing = dict(zip(names_[len(names_) - len(defaults) :], defaults, strict=True))
        return chain.from_iterable(
            zip(*(columns.get(name) or repeat(missing.get(name), count) for name in names), strict=False)
            for count, columns in self._pieces
            if count
        )

    def made(self, numbers: Iterable[int]) -> list[R]:
        """Make the row objects with these numbers, if the rows are stored in one block."""
        return [self._kind(**{name: column[number] for name, column in self.columns.items()}) for number in numbers]


def column_values(rows: Iterable[R], *names: str) -> Iterator[tuple[Any, ...]]:
    """Return one tuple per row with the values of some columns, without building row objects from RowsByColumn."""
    return rows.cells(*names) if isinstance(rows, RowsByColumn) else map(attribute_reader(names), rows)


class RowsOfNode(Struct, frozen=True):
    """The rows of one node. Equal nodes share `rows`, and iteration sets their `host_fields` to `host`."""

    rows: Sequence["Record"]
    host_fields: Sequence[str]
    host: str

    def __iter__(self) -> Iterator["Record"]:
        names: Any = dict.fromkeys(self.host_fields, self.host)
        rows: Any = self.rows
        return (replace(row, **names) for row in rows)


class Table(Struct, frozen=True):
    """A section with rows, which are made when they are read. `parts` yields the same rows grouped by node.

    `parts` is None if the rows do not belong to single nodes.
    """

    columns: Sequence[str]
    rows: Callable[[], Iterable[Row]]
    parts: Callable[[], Iterable[RowsOfNode]] | None = None

    @classmethod
    def of_nodes(cls, columns: Sequence[str], parts: Callable[[], Iterable[RowsOfNode]]) -> "Table":
        return cls(columns, lambda: chain.from_iterable(parts()), parts)

    @classmethod
    def group_by_section(
        cls, tables: Mapping[type[Record], Iterable[Row] | Callable[[], Iterable[Row]]]
    ) -> "dict[str, Section]":
        """Make one section per row type, from rows or from functions that return rows."""

        def reader(rows: Iterable[Row] | Callable[[], Iterable[Row]]) -> Callable[[], Iterable[Row]]:
            return rows if callable(rows) else lambda: rows

        return {kind.section: cls(kind.columns(), reader(rows)) for kind, rows in tables.items()}

    def of(self, nodes: Container[str]) -> Iterator[Row]:
        """Yield the rows of some nodes. Yield nothing if the rows are not grouped by node."""
        return chain.from_iterable(part for part in (self.parts or tuple)() if part.host in nodes)


class Matrix(Struct, frozen=True):
    """A section with cells by row name and column name."""

    cells: Mapping[str, Mapping[str, Any]]


Section = Table | Matrix


class CollectiveRow(Record, frozen=True, kw_only=True):
    """One measured case of a collective: a size, data type, reduction and placement.

    Sizes, times and bandwidths are defined as in nccl-tests.
    """

    section = "rows"
    on_page = HIDDEN

    #: name of the collective: allreduce, allgather, reducescatter, broadcast, reduce, alltoall(v), gather, scatter or
    #: sendrecv
    collective: str
    #: backend that ran the collective: nccl, host (MPI on CPU buffers), ...; simulated: no data moved
    backend: Annotated[str, BACKENDS]
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    group: str | None = None  #: group of ranks that ran the collective (null for the whole job)
    ranks: int  #: number of ranks in the group
    nodes: int  #: number of hosts in the group, as NCCL counts them (NCCL_HOSTID)
    size_bytes: int  #: size as nccl-tests defines it, in bytes: the larger buffer of a rank, after rounding
    count: int  #: number of elements passed to the library call
    dtype: Annotated[str, DataType]  #: element type, for example float32
    op: Annotated[str | None, ReduceOp]  #: reduction operation (null if the collective only moves data)
    root: int | None  #: root rank (null if the collective has no root)
    #: out_of_place (separate result buffer) or in_place (the result overwrites the input)
    placement: Annotated[str, Placement]
    mode: Annotated[str, Mode]  #: throughput (operations back to back) or latency (one operation at a time)
    graph: int  #: number of replays of a captured CUDA graph, 0 for plain launches
    iterations: int | None  #: number of timed operations (with a CUDA graph, of captured operations) (null if unknown)
    time_us: float  #: time of one operation in microseconds, mean over ranks
    time_us_fastest_rank: float | None  #: time of one operation on the fastest rank, in microseconds (null if unknown)
    time_us_slowest_rank: float | None  #: time of one operation on the slowest rank, in microseconds (null if unknown)
    slowest_rank: int | None  #: number of the slowest rank
    algbw_gb_s: float  #: algorithm bandwidth in GB/s (1e9 bytes): the size divided by the time
    busbw_gb_s: float | None  #: bus bandwidth in GB/s: algbw times the collective's factor (null for one rank)
    limit_gb_s: float | None = None  #: physical limit of the bus bandwidth in GB/s
    limit_percent: float | None = None  #: bus bandwidth as a percentage of the limit
    wrong: int | None  #: number of wrong elements on all ranks (null if not checked)
    #: verified output: last (of the timed operations, every buffer), repeat (of one more operation on fresh data), or
    #: no
    verified: Annotated[str, Verified]
    batch_median_us: float | None = None  #: median over batches of the time of one operation, in microseconds
    batch_cv: float | None = None  #: coefficient of variation of the time over batches
    ci95_percent: float | None = None  #: half of the 95 % confidence interval, as a percentage of the mean
    p50_us: float | None = None  #: median time of single operations in microseconds
    p95_us: float | None = None  #: 95th percentile of the time of single operations, in microseconds
    p99_us: float | None = None  #: 99th percentile of the time of single operations, in microseconds
    algorithm: str | None = None  #: algorithm as NCCL names it (for torch:symm, the kernel)
    protocol: str | None = None  #: protocol as NCCL names it
    channels: int | None = None  #: number of channels that NCCL used
    transport: str | None = None  #: transport as NCCL names it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    host_staged: bool | None = None  #: whether data went through host memory
    expected_gb_s: float | None = None  #: bus bandwidth in GB/s expected from a healthy machine of this type
    verdict: Annotated[str | None, Verdict]  #: verdict on the row (null if not judged)
    note: str | None = None  #: remark on the row
    #: setting requested from the library: ring/ll, ring, NCCL_X=1, register=user, ...; hierarchical: composed of
    #: smaller collectives; again: the library's own choice, measured a second time (null for the library's own choice)
    setting: str | None = None
    expected_us: float | None = None  #: time in microseconds that corresponds to expected_gb_s
    #: expected time as a percentage of the measured time; below 100: slower than expected
    expected_percent: float | None = None
    #: source of the expectation: profile, siblings, this machine's past, share of the limit (null if not judged)
    expected_source: str | None = None
    #: host time to issue one operation on the slowest rank, in microseconds (null if unknown)
    issue_us: float | None = None
    ranks_per_gpu: int | None = None  #: largest number of ranks on one GPU (null if ranks have no GPU)
    #: registration of buffers with NCCL: user or symmetric windows (null if none, or NCCL returned no handle)
    registered: str | None = None
    #: alltoallv: how much less data the last rank receives than rank 0, as a share of the size (otherwise null)
    skew: float | None = None

    @property
    def command(self) -> str:
        """The `gpubench` arguments that measure this row."""
        return self.collective if self.skew is None else f"alltoall --skew {self.skew:g}"

    @property
    def reached_gb_s(self) -> float:
        """The bus bandwidth in GB/s. It is 0 for a single rank, whose bus bandwidth is undefined."""
        return self.busbw_gb_s or 0.0


COLLECTIVE_COLUMNS = CollectiveRow.columns()

# Source of an expectation that comes only from similar pairs in the same run
SIBLINGS = "pairs wired alike, in this run"


class PairRow(Record, frozen=True, kw_only=True):
    """An ordered pair of devices: its path class, its limit and, if measured, its bandwidth."""

    section = "pairs"
    on_page = HIDDEN
    host_fields = ("source_node", "destination_node")

    source: str  #: source of the data: a GPU, a rank, or host memory (host)
    destination: str  #: destination of the data: a GPU, a rank, or host memory (host)
    source_bus_id: str | None  #: PCI address of the source
    destination_bus_id: str | None  #: PCI address of the destination
    source_node: str  #: host of the source
    destination_node: str  #: host of the destination
    #: process (one process copies), ipc (between processes on a node) or network (between nodes)
    scope: str | None = None
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    #: write (by the source), read (by the destination) or both (sum of both directions at once)
    direction: str | None = None
    #: ce: copy engine; sm: kernel; nccl: send and receive; cpu: within host memory; rdma, mpi, ucx, nixl: in other
    #: benchmarks; for managed memory prefetch, faults (a kernel's page faults) or in place (a kernel accesses pages
    #: that do not migrate)
    engine: str | None = None
    peer: str | None = None  #: peer access: on or off
    size_bytes: int | None = None  #: size of one copy in bytes
    bandwidth_gb_s: float | None = None  #: measured bandwidth in GB/s (1e9 bytes)
    latency_us: float | None = None  #: time of one copy in microseconds
    limit_gb_s: float | None  #: limit of the links on the path, in GB/s per direction
    limit_percent: float | None = None  #: bandwidth as a percentage of the limit
    #: bytes that the source's NVLink counters recorded from just before to just after the last sample
    nvlink_bytes: Annotated[int | None, SIGNED] = None
    #: bytes that the source's PCIe counter recorded from just before to just after the last sample
    pcie_bytes: Annotated[int | None, SIGNED] = None
    path_class: str | None  #: path class as in nvidia-smi topo -m (NV18, PIX, PXB, PHB, NODE, SYS), XGMI or NET
    transport: str | None = None  #: transport as NCCL names it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    host_staged: bool | None = None  #: whether data went through host memory
    verified: str | None = None  #: verified output: last (of the timed copies), repeat (of one more copy), or no
    verdict: str | None = None  #: verdict: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    note: str | None = None  #: remark on the row
    expected_gb_s: float | None = None  #: bandwidth in GB/s expected from healthy machines or similar pairs
    expected_us: float | None = None  #: expected time of one copy in microseconds (null if unknown for this size)
    #: bandwidth as a percentage of the expected bandwidth, or expected time in percent of the measured time
    expected_percent: float | None = None
    #: source of the expectation: profile, siblings, this machine's past, share of the limit (null if not judged)
    expected_source: str | None = None
    ci95_percent: float | None = None  #: half of the 95 % confidence interval, as a percentage of the mean

    @property
    def healthy_gb_s(self) -> float | None:
        """The bandwidth in GB/s that a healthy pair reaches, or None if unknown.

        Normally this is the expected bandwidth. Without a profile or an earlier run, all similar pairs may be faulty.
        If they reach less than half of the limit, return the limit instead.
        """
        if self.expected_gb_s is not None and self.expected_source != SIBLINGS:
            return self.expected_gb_s
        reached = self.expected_gb_s if self.expected_gb_s is not None else self.bandwidth_gb_s
        is_far = self.limit_gb_s is not None and reached is not None and reached < self.limit_gb_s / 2
        return self.limit_gb_s if is_far else self.expected_gb_s


PAIR_COLUMNS = PairRow.columns()


class Metadata(Struct, frozen=True, kw_only=True):
    """The conditions of a run, which a reader needs to trust it or repeat it."""

    gpubench_version: str  #: gpubench version that wrote the file
    run_id: str  #: UUID of the run
    started_at: str  #: start of the run in UTC, ISO 8601
    command: Sequence[str]  #: command line of the run
    subject: str  #: subcommand of gpubench
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    hosts: Annotated[Sequence[str], {"minItems": 1}]  #: host names of all nodes, in the order of the job
    collective: str | None = None  #: collective in the rows (null if the rows are not from a collective)
    #: backend that ran the collective or the transfers (null if neither ran)
    backend: Annotated[str | None, (*BACKENDS, *TransferBackend)] = None
    ranks: Sequence[RankIdentity] = ()  #: all ranks, with their hosts
    libraries: Mapping[str, str] = field(default_factory=dict)  #: versions and paths of libraries
    #: environment variables that change results, selected by an allow-list
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  #: options of the run
    dropped_sizes: Sequence[DroppedSize] = ()  #: requested sizes that were not measured
    topology: str | None = None  #: fingerprint of the machine's topology
    #: profile with which the run was compared: name, sha256, note
    profile: Annotated[Mapping[str, str] | None, {"required": ["name", "sha256"]}] = None
    source: str | None = None  #: source of facts that were not read from this machine
    #: default options from the environment or a file, with their source, for example GPUBENCH_TIMEOUT=60
    defaults: Mapping[str, str] = field(default_factory=dict)
    defaults_file: str | None = None  #: configuration file in the current directory
    schema_version: Annotated[int, {"const": SCHEMA_VERSION}] = SCHEMA_VERSION  #: version of this schema

    @property
    def command_record(self) -> Command:
        return find_command(self.subject, self.collective)

    @property
    def rows_section(self) -> str:
        """The section whose rows are written one by one. Empty if there is none."""
        return self.command_record.streamed_section

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = to_builtins(self)
        return record | {name: list(record[name]) for name in ("command", "hosts", "ranks", "dropped_sizes")}


class Report(Struct, frozen=True, kw_only=True):
    """The result of a run. `complete` is false during the run, and stays false if the run was cut short.

    `sections` contains all sections that are not streamed, in display order. `main` names the section for formats that
    show only one. `sentence` is the last line, which stays empty until the report is presented. `duration_s` is None if
    unknown.
    """

    verdict: Verdict
    complete: bool
    findings: Sequence[Finding] = field(default=())
    sections: Mapping[str, Section] = field(default_factory=dict)
    main: str = CollectiveRow.section
    sentence: str = ""
    duration_s: float | None = None

    def __repr__(self) -> str:
        """Omit the sections, which may have thousands of rows."""
        return (
            f"Report(verdict={self.verdict!r}, complete={self.complete}, findings={self.findings!r}, "
            f"main={self.main!r}, sentence={self.sentence!r}, duration_s={self.duration_s})"
        )

    def add_findings(self, first: Sequence[Finding] = (), last: Sequence[Finding] = ()) -> "Report":
        """Return the report with additional findings, which can only worsen its verdict."""
        verdict = worst_verdict([self.verdict, *(finding.severity for finding in (*first, *last))])
        return replace(self, verdict=verdict, findings=(*first, *self.findings, *last))

    def rows(self, kind: type[R], nodes: Container[str] | None = None, *, section: str = "") -> list[R]:
        """Return the rows of one type from its section, or from the section `section`.

        If rows are grouped by node, `nodes` selects nodes.
        """
        table = self.sections.get(section or kind.section)
        if not isinstance(table, Table):
            return []
        found: Iterable[object] = table.rows() if nodes is None or table.parts is None else table.of(nodes)
        return [row for row in found if isinstance(row, kind)]

    def by_column(self, kind: type[R]) -> RowsByColumn[R]:
        table = self.sections.get(kind.section)
        found = table.rows() if isinstance(table, Table) else ()
        return found if isinstance(found, RowsByColumn) else RowsByColumn.of(kind, self.rows(kind))

    def to_record(self) -> dict[str, Any]:
        """Convert the report to plain data, without the sections."""
        return {
            "verdict": self.verdict.value,
            "complete": self.complete,
            "sentence": self.sentence,
            "duration_s": self.duration_s,
            "findings": [finding.to_record() for finding in self.findings],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Report":
        """Make a report from the result of `to_record`."""
        return cls(
            verdict=Verdict(record["verdict"]),
            complete=record["complete"],
            findings=tuple(map(Finding.from_record, record["findings"])),
            sentence=record.get("sentence", ""),
            duration_s=record.get("duration_s"),
        )


class CheckRow(Record, frozen=True, kw_only=True):
    """One check: its verdict, the number of its findings and, if it did not run, the reason."""

    section = "checks"
    on_page = OnPage(columns=("check", "verdict", "findings", "looks_for", "note", "nodes_in_error"), folds=True)

    check: str  #: name of the check
    verdict: Annotated[str, Verdict]  #: worst severity of the check's findings; SKIP if the check did not run
    findings: int  #: number of findings from the check
    looks_for: str  #: problems that the check looks for
    note: str | None  #: why the check did not run (null if it ran)
    origin: str  #: origin of the values: measured, simulated or recorded
    nodes_in_error: tuple[str, ...] = ()  #: hosts that could not be checked and that the verdict does not cover


class VerdictRow(Record, frozen=True, kw_only=True):
    """The verdict of `check` on one node, GPU, NIC or link, and the IDs of its findings."""

    section = "verdicts"
    on_page = OnPage(columns=("scope", "node", "subject", "verdict", "findings"), folds=True)
    host_fields = ("node",)

    scope: Annotated[str, ("node", "gpu", "nic", "link")]  #: type of the subject: node, gpu, nic or link
    node: str  #: host name of the node
    subject: str  #: name of the node, GPU, NIC or link
    verdict: Annotated[str, Verdict]  #: worst severity of the subject's findings
    findings: tuple[str, ...]  #: IDs of the subject's findings
    origin: str  #: origin of the values: measured, simulated or recorded


class EvidenceRow(Record, frozen=True, kw_only=True):
    """All evidence on one path. Each of the four kinds of evidence is present, absent or contradicts a direct path.

    docs/explanation/evidence.md has the decision table. With more than 10,000 paths, rows of direct ones are omitted.
    """

    section = "evidence"
    on_page = OnPage(
        columns=(
            *("source", "destination", "path_class", "capability", "selection", "measurement", "correctness"),
            *("transport", "bandwidth_gb_s", "limit_gb_s", "conclusion", "confidence", "verdict"),
        ),
        folds=True,
    )

    source: str  #: source of the data: a GPU, a rank, or host memory (host)
    destination: str  #: destination of the data: a GPU, a rank, or host memory (host)
    source_node: str  #: host of the source
    destination_node: str  #: host of the destination
    source_bus_id: str | None  #: PCI address of the source
    destination_bus_id: str | None  #: PCI address of the destination
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    path_class: str | None  #: path class as in nvidia-smi topo -m (NV18, PIX, PXB, PHB, NODE, SYS), XGMI or NET
    transport: str | None  #: transport as NCCL names it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    host_staged: bool | None  #: whether data went through host memory
    bandwidth_gb_s: float | None  #: measured bandwidth in GB/s (1e9 bytes)
    limit_gb_s: float | None  #: limit of the links on the path, in GB/s per direction
    capability: Annotated[str, State]  #: evidence from the driver that a direct path is possible
    capability_seen: str  #: description of the capability evidence
    selection: Annotated[str, State]  #: evidence from NCCL's log that it chose a direct path
    selection_seen: str  #: description of the selection evidence
    measurement: Annotated[str, State]  #: evidence from counters or bandwidth that the data went directly
    measurement_seen: str  #: description of the measurement evidence
    correctness: Annotated[str, State]  #: evidence from verified data; contradicting: wrong data
    correctness_seen: str  #: description of the correctness evidence
    by_design: str | None  #: why this path is expected to use host memory (null if it is not)
    #: conclusion from all evidence: direct, staged, wrong data, disputed or unknown
    conclusion: Annotated[str, Conclusion]
    confidence: Annotated[str, Confidence]  #: confidence in the conclusion: proven, likely, weak or none
    verdict: Annotated[str, Verdict]  #: verdict: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    meaning: str  #: rule in docs/explanation/evidence.md that led to the conclusion


class FallbackRow(Record, frozen=True, kw_only=True):
    """The verdict on a group of similar paths. The worst group comes first."""

    section = "fallback"
    on_page = OnPage(
        "Paths",
        columns=(
            *("conclusion", "verdict", "confidence", "count", "pairs", "transport", "bandwidth_gb_s", "limit_gb_s"),
            *("cause_seen", "commands", "comment", "how"),
        ),
    )

    #: conclusion for these paths; "direct possible" and "direct impossible" appear only in `topo`
    conclusion: Annotated[str, Conclusion]
    verdict: Annotated[str, Verdict]  #: verdict: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    confidence: Annotated[str, Confidence]  #: confidence in the conclusion: proven, likely, weak or none
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    count: int  #: number of ordered pairs in the group
    pairs: tuple[str, ...]  #: ordered pairs in the group, at most 1,000
    transport: str | None = None  #: transport as NCCL names it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    bandwidth_gb_s: float | None = None  #: measured bandwidth in GB/s (1e9 bytes)
    limit_gb_s: float | None = None  #: limit of the links on the path, in GB/s per direction
    times_slower: float | None = None  #: limit divided by the measured bandwidth
    cause: str | None = None  #: ID of the first known cause
    cause_seen: str | None = None  #: evidence for the cause
    advice: str | None = None  #: cure for the cause: commands and comment in one text
    commands: tuple[str, ...] = ()  #: commands to run in this order, ready to paste
    comment: str | None = None  #: comment on the commands, or what to do if there are none
    how: str  #: description of the evidence for the conclusion


class Effect(StrEnum):
    """The effect of a cause on a path. The first four effects mean that NCCL uses host memory."""

    STAGED = "host memory inside a node"
    NETWORK_INSIDE = "a network inside a node"
    SOCKETS = "sockets between nodes"
    NO_GPUDIRECT = "RDMA through host memory"
    APPLICATION = "MPI, UCX or a framework copies through host memory"
    WRONG = "wrong data, or a hang"
    SLOW = "a slower path"


class CauseRow(Record, frozen=True, kw_only=True):
    """A cause that was found, the most important first. docs/reference/conditions.md lists all causes."""

    section = "causes"
    on_page = OnPage(columns=("id", "verdict", "title", "evidence", "subject", "paths", "confidence", "effects"))

    id: str  #: ID of the cause
    evidence: str  #: evidence for the cause
    advice: str  #: cure for the cause: commands and comment in one text
    commands: tuple[str, ...] = ()  #: commands to run in this order, ready to paste
    comment: str | None = None  #: comment on the commands, or what to do if there are none
    paths: int  #: number of staged paths that the cause explains
    #: verdict on the cause: FAIL; WARN: only a slower path; SKIP: by design; ERROR: unknown
    verdict: Annotated[str, Verdict]
    hosts: tuple[str, ...]  #: hosts on which the cause was found
    title: str  #: short description of the cause
    confidence: Annotated[str, Confidence]  #: confidence that this is the cause: proven, likely, weak or none
    effects: tuple[str, ...]  #: effects of the cause on paths
    subject: str  #: affected GPUs, nodes, ranks or pairs
    implied_by: str | None  #: ID of the cause that implies this one (null if none)
    settles: str  #: experiment that confirms or rules out the cause
    link: str  #: link to vendor documentation or to an issue about the cause


class UnreadRow(Record, frozen=True, kw_only=True):
    """A cause that could not be checked, with the reason."""

    section = "causes_unread"
    on_page = OnPage("Causes that could not be checked")

    id: str  #: ID of the cause that could not be checked
    title: str  #: short description of the cause
    subject: str  #: GPU, node, rank or pair that could not be checked
    reason: str  #: why the cause could not be checked: needs root, not read, ...


class PatternRow(Record, frozen=True, kw_only=True):
    """The total bandwidth of several pairs that copy at once, compared with the sum of the pairs measured one at a
    time.
    """

    section = "patterns"
    on_page = OnPage("Many pairs at once")

    pattern: str  #: pattern of the copies: ring, all to one, one to all, bisection, all to all
    direction: str  #: direction of the copies: write or read
    gpus: int  #: number of GPUs that take part
    pairs: int  #: number of pairs that copy at the same time
    size_bytes: int  #: size of one copy in bytes
    total_gb_s: float | None  #: bandwidth of all pairs together in GB/s
    parts_gb_s: float | None  #: sum of the bandwidths of the same pairs measured one at a time, in GB/s
    share_percent: float | None  #: total_gb_s as a percentage of parts_gb_s
    wrong: int | None  #: number of wrong elements
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    note: str | None  #: remark on the row
    #: expected bandwidth of all pairs together in GB/s, if each link carries its copies one after another
    expected_gb_s: float | None = None
    #: verdict: PASS, WARN, FAIL, INCONCLUSIVE (null if the speed is not judged)
    verdict: Annotated[str | None, Verdict] = None
    node: str | None = None  #: host name of the node
    ci95_percent: float | None = None  #: half of the 95 % confidence interval, as a percentage of the mean


class RankTimeRow(Record, frozen=True, kw_only=True):
    """The times of one rank in one collective row."""

    section = "rank_times"

    #: name of the collective: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or
    #: sendrecv
    collective: str
    #: backend that ran the collective: nccl, host (MPI on CPU buffers), ...; simulated: no data moved
    backend: Annotated[str, BACKENDS]
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    size_bytes: int  #: size as nccl-tests defines it, in bytes: the larger buffer of a rank, after rounding
    dtype: Annotated[str, DataType]  #: element type, for example float32
    op: Annotated[str | None, ReduceOp]  #: reduction operation (null if the collective only moves data)
    #: out_of_place (separate result buffer) or in_place (the result overwrites the input)
    placement: Annotated[str, Placement]
    mode: Annotated[str, Mode]  #: throughput (operations back to back) or latency (one operation at a time)
    rank: int  #: number of the rank in the job
    host: str  #: host name of the rank's node
    node: int  #: number of the rank's host, counted from 0 in rank order
    gpu_bus_id: str | None  #: PCI address of the rank's GPU (null with the host backend)
    time_us: float  #: time of one operation on this rank in microseconds, including waiting for other ranks
    #: median delay of this rank after the first rank that enters an operation, in microseconds (null if operations run
    #: back to back)
    late_us: Annotated[float | None, SIGNED]
    clock_uncertainty_us: float | None  #: uncertainty of late_us in microseconds: half a round trip between the clocks
    #: percent of operations that this rank entered last (null if operations run back to back)
    last_percent: Annotated[float | None, {"minimum": 0, "maximum": 100}]
    setting: str | None = None  #: setting of the collective row
