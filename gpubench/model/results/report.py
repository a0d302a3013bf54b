"""The report of a command (metadata, sections, findings, verdict), and the rows that several commands share.

Names contain units, and unknown values are None, never 0. Collectives pass on the rows of one section as they are
measured. Other commands pass all sections at the end. Schema 1 is the only one so far.
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
from gpubench.model.terms.operation import ROW_BACKENDS, DataType, Placement, ReduceOp
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

SIGNED = "signed"  # Annotates a column that may be negative. All other numbers are 0 or more.


class Verified(StrEnum):
    """The verified output: the last timed one of every buffer, that of one more operation, or none."""

    LAST = "last"
    REPEAT = "repeat"
    NO = "no"


class Row(Protocol):
    def to_record(self) -> dict[str, Any]: ...


class OnPage(NamedTuple):
    """How Markdown and HTML show a section: title, columns, and the most rows.

    Defaults: the section's name, and the columns of the terminal table in `formats.text`, or all columns. If it
    `folds`, the worst rows come first, and rows that pass are folded.
    """

    title: str = ""
    columns: Sequence[str] = ()
    most: int = 200
    folds: bool = False
    is_hidden: bool = False


HIDDEN = OnPage(is_hidden=True)
"""A section that pages leave out or show in another form. JSON and CSV have it."""


class Record(Struct, frozen=True):
    """A row of `section`, with its fields as columns. `host_fields` are the columns that hold the node."""

    section: ClassVar[str] = ""
    on_page: ClassVar[OnPage] = OnPage()
    host_fields: ClassVar[Sequence[str]] = ()

    def to_record(self) -> dict[str, Any]:
        return dict(zip(self.columns(), attribute_reader(self.columns())(self), strict=True))

    def __repr__(self) -> str:
        """Show known values only, because most columns of a wide row are empty."""
        known = ((name, value) for name, value in self.to_record().items() if value not in (None, "", ()))
        shown = (f"{name}={value:.6g}" if type(value) is float else f"{name}={value!r}" for name, value in known)
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return cls.__struct_fields__


def make_record(kind: type[Made], *sources: object, **values: Any) -> Made:
    """Make a record from `values`, and take its other fields from the first source that has them."""
    made: Any = kind
    for source, (names, read) in zip(sources, _common_fields(made, tuple(map(type, sources)), (*values,)), strict=True):
        values |= zip(names, read(source), strict=True)
    return kind(**values)


@cache
def _common_fields(
    kind: type, sources: tuple[type, ...], left_out: tuple[str, ...]
) -> tuple[tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]], ...]:
    """Return the fields to take from each source, with a function that reads them."""
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
    """Return a function that reads attributes as a tuple, twice as fast as a loop, because tables have many rows."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda item: tuple(getattr(item, name) for name in names)


class RowsByColumn(Collection[R], Generic[R]):
    """Rows stored by column and made when read, because a cluster has very many rows and most are only summed.

    `pieces` are consecutive rows: their number, and their columns by name. A missing column holds its default.
    """

    def __init__(self, kind: type[R], pieces: Sequence[tuple[int, Mapping[str, Sequence[Any]]]]) -> None:
        self._kind, self._pieces = kind, pieces
        self._count = sum(count for count, _ in pieces)

    @classmethod
    def of(cls, kind: type[R], rows: Sequence[R]) -> "RowsByColumn[R]":
        """Split rows into columns."""
        names = kind.columns()
        return cls(
            kind, [(len(rows), dict(zip(names, zip(*map(attribute_reader(names), rows), strict=True), strict=False)))]
        )

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """The columns of rows in one piece, by name."""
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
        """Yield the values of some columns, one tuple per row."""
        names_, defaults = self._kind.__struct_fields__, self._kind.__struct_defaults__
        missing = dict(zip(names_[len(names_) - len(defaults) :], defaults, strict=True))
        return chain.from_iterable(
            zip(*(columns.get(name) or repeat(missing.get(name), count) for name in names), strict=False)
            for count, columns in self._pieces
            if count
        )

    def made(self, numbers: Iterable[int]) -> list[R]:
        """Make the rows with these numbers, from rows in one piece."""
        return [self._kind(**{name: column[number] for name, column in self.columns.items()}) for number in numbers]


def column_values(rows: Iterable[R], *names: str) -> Iterator[tuple[Any, ...]]:
    """Return the values of some columns, one tuple per row, without making rows that are stored by column."""
    return rows.cells(*names) if isinstance(rows, RowsByColumn) else map(attribute_reader(names), rows)


class RowsOfNode(Struct, frozen=True):
    """The rows of a node, shared with equal nodes: only the `host_fields` differ, which hold `host`."""

    rows: Sequence["Record"]
    host_fields: Sequence[str]
    host: str

    def __iter__(self) -> Iterator["Record"]:
        names: Any = dict.fromkeys(self.host_fields, self.host)
        rows: Any = self.rows
        return (replace(row, **names) for row in rows)


class Table(Struct, frozen=True):
    """A section of rows, made when read. `parts` has the same rows by node, None if rows do not belong to nodes."""

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
        """Make sections from rows, or from functions that return rows, by row type."""

        def reader(rows: Iterable[Row] | Callable[[], Iterable[Row]]) -> Callable[[], Iterable[Row]]:
            return rows if callable(rows) else lambda: rows

        return {kind.section: cls(kind.columns(), reader(rows)) for kind, rows in tables.items()}

    def of(self, nodes: Container[str]) -> Iterator[Row]:
        """Yield the rows of some nodes, if rows are stored by node."""
        return chain.from_iterable(part for part in (self.parts or tuple)() if part.host in nodes)


class Matrix(Struct, frozen=True):
    """A section of cells by row and column name."""

    cells: Mapping[str, Mapping[str, Any]]


Section = Table | Matrix


class CollectiveRow(Record, frozen=True, kw_only=True):
    """One size × dtype × op × placement of one collective. nccl-tests defines sizes, times and bandwidths."""

    section = "rows"
    on_page = HIDDEN

    collective: str  #: allreduce, allgather, reducescatter, broadcast, reduce, alltoall(v), gather, scatter or sendrecv
    backend: Annotated[str, BACKENDS]  #: nccl, host (MPI on CPU buffers), ...; simulated moves no data
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    group: str | None = None  #: the part of the job this row is of; null: the whole job
    ranks: int  #: ranks in the group
    nodes: int  #: hosts in the group, as NCCL counts them (NCCL_HOSTID)
    size_bytes: int  #: nccl-tests' size: the larger buffer of a rank, after rounding
    count: int  #: elements handed to the library
    dtype: Annotated[str, DataType]  #: element type
    op: Annotated[str | None, ReduceOp]  #: reduction; null: data are only moved
    root: int | None  #: root rank; null: none
    placement: Annotated[str, Placement]  #: out_of_place: separate result buffer; in_place: result overwrites the input
    mode: Annotated[str, Mode]  #: throughput: operations back to back; latency: one at a time
    graph: int  #: replays of a captured CUDA graph; 0: plain launches
    #: timed operations (captured ones with a graph); null: unknown
    iterations: int | None
    time_us: float  #: microseconds per operation, mean over ranks
    time_us_fastest_rank: float | None  #: of the fastest rank; null: unknown
    time_us_slowest_rank: float | None  #: of the slowest rank
    slowest_rank: int | None  #: the slowest rank
    algbw_gb_s: float  #: size over time, GB/s of 1e9 bytes
    busbw_gb_s: float | None  #: algbw times the collective's factor; null: one rank
    limit_gb_s: float | None = None  #: physical ceiling
    limit_percent: float | None = None  #: busbw in percent of the limit
    wrong: int | None  #: wrong elements on all ranks; null: not checked
    #: last: every buffer of the timed operations; repeat: one more operation on fresh data; no: not checked
    verified: Annotated[str, Verified]
    batch_median_us: float | None = None  #: median over batches
    batch_cv: float | None = None  #: coefficient of variation over batches
    ci95_percent: float | None = None  #: half of the 95 % confidence interval, percent of the mean
    p50_us: float | None = None  #: median of single operations
    p95_us: float | None = None  #: 95th percentile
    p99_us: float | None = None  #: 99th percentile
    algorithm: str | None = None  #: in NCCL's words; torch:symm: kernel
    protocol: str | None = None  #: in NCCL's words
    channels: int | None = None  #: as NCCL counts them
    transport: str | None = None  #: in NCCL's words
    host_staged: bool | None = None  #: whether data went through host memory
    expected_gb_s: float | None = None  #: expected busbw of a healthy machine of this kind
    verdict: Annotated[str | None, Verdict]  #: null: not judged
    note: str | None = None  #: remark
    #: what was asked of the library: ring/ll, ring, NCCL_X=1, register=user, ...; hierarchical: made of smaller ones;
    #: again: once more; null: its own choice
    setting: str | None = None
    expected_us: float | None = None  #: expected time for expected_gb_s
    expected_percent: float | None = None  #: expected time in percent of the time: 100 is as expected, less is slower
    #: source of the expectation: profile, siblings, this machine's past, share of the limit; null: speed not judged
    expected_source: str | None = None
    issue_us: float | None = None  #: host time to issue one operation, on the slowest rank; null: not known
    #: most ranks on one GPU; null: ranks have no GPU
    ranks_per_gpu: int | None = None
    #: registration of buffers with NCCL: user or symmetric (windows); null: none, or no handle
    registered: str | None = None
    #: alltoallv: how much less than rank 0 the last rank receives, as a share of the size; null: other collectives
    skew: float | None = None

    @property
    def command(self) -> str:
        """The arguments of `gpubench` that measure such a row."""
        return self.collective if self.skew is None else f"alltoall --skew {self.skew:g}"

    @property
    def reached_gb_s(self) -> float:
        """The busbw, or 0 for one rank, which has none."""
        return self.busbw_gb_s or 0.0


COLLECTIVE_COLUMNS = CollectiveRow.columns()

SIBLINGS = "pairs wired alike, in this run"  # Source of an expectation that only comes from similar pairs


class PairRow(Record, frozen=True, kw_only=True):
    """An ordered pair of devices: its wiring, its limit and, if measured, its speed."""

    section = "pairs"
    on_page = HIDDEN
    host_fields = ("source_node", "destination_node")

    source: str  #: sender: a GPU, a rank, host
    destination: str  #: receiver
    source_bus_id: str | None  #: PCI address of the source
    destination_bus_id: str | None  #: PCI address of the destination
    source_node: str  #: host of the source
    destination_node: str  #: host of the destination
    #: process (one process copies), ipc (between processes of a node), network (between nodes)
    scope: str | None = None
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    direction: str | None = None  #: write (by the source), read (by the destination), both (at once, summed)
    #: ce (copy engine), sm (kernel), nccl (send and receive), cpu (within host memory); of managed memory prefetch,
    #: faults (a kernel's page faults) and in place (a kernel, pages that stay)
    engine: str | None = None
    peer: str | None = None  #: peer access on or off
    size_bytes: int | None = None  #: bytes of a copy
    bandwidth_gb_s: float | None = None  #: GB/s of 1e9 bytes
    latency_us: float | None = None  #: time of one copy
    limit_gb_s: float | None  #: maximum of the links, GB/s per direction
    limit_percent: float | None = None  #: bandwidth in percent of the limit
    nvlink_bytes: Annotated[int | None, SIGNED] = None  #: traffic of the source's NVLinks around the last sample
    pcie_bytes: Annotated[int | None, SIGNED] = None  #: traffic of the source's PCIe link
    path_class: str | None  #: wiring, as nvidia-smi topo -m: NV18, PIX, PXB, PHB, NODE, SYS; NET between nodes
    transport: str | None = None  #: transport in NCCL's words: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    host_staged: bool | None = None  #: whether bytes pass through host memory
    verified: str | None = None  #: verified output: last, repeat, no
    verdict: str | None = None  #: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    note: str | None = None  #: remark
    expected_gb_s: float | None = None  #: expected bandwidth of healthy machines or of siblings
    expected_us: float | None = None  #: expected time of one copy; null: unknown for this size
    #: bandwidth in percent of the expected one, or expected time in percent of the time
    expected_percent: float | None = None
    #: source of the expectation: profile, siblings, this machine's past, share of the limit; null: speed not judged
    expected_source: str | None = None
    ci95_percent: float | None = None  #: half of the 95 % confidence interval of the mean of its samples

    @property
    def healthy_gb_s(self) -> float | None:
        """The bandwidth of a healthy pair in GB/s. None if unknown.

        It is the expected one. If all siblings reach less than half of their limit, none may be healthy, so it is the
        limit, unless a profile or an earlier run gave the expectation.
        """
        if self.expected_gb_s is not None and self.expected_source != SIBLINGS:
            return self.expected_gb_s
        reached = self.expected_gb_s if self.expected_gb_s is not None else self.bandwidth_gb_s
        is_far = self.limit_gb_s is not None and reached is not None and reached < self.limit_gb_s / 2
        return self.limit_gb_s if is_far else self.expected_gb_s


PAIR_COLUMNS = PairRow.columns()


class Metadata(Struct, frozen=True, kw_only=True):
    """The circumstances of a run, which a reader needs to trust or repeat it."""

    gpubench_version: str  #: version that wrote the file
    run_id: str  #: a UUID of the run
    started_at: str  #: UTC, ISO 8601
    command: Sequence[str]  #: the command line
    subject: str  #: the subcommand
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    hosts: Annotated[Sequence[str], {"minItems": 1}]  #: every host, in the order of the job
    collective: str | None = None  #: collective of the rows; null: other rows
    backend: Annotated[str | None, BACKENDS] = None  #: backend; null: no collective ran
    ranks: Sequence[RankIdentity] = ()  #: ranks with their hosts
    libraries: Mapping[str, str] = field(default_factory=dict)  #: versions and files of libraries
    #: settings that change results, from an allow-list
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  #: options of the run
    dropped_sizes: Sequence[DroppedSize] = ()  #: requested sizes that were not measured
    topology: str | None = None  #: fingerprint of the machine
    #: profile that the run was compared with: name, sha256, note
    profile: Annotated[Mapping[str, str] | None, {"required": ["name", "sha256"]}] = None
    source: str | None = None  #: source of facts that were not read on this machine
    #: defaults from the environment or a file, with their source: GPUBENCH_TIMEOUT=60
    defaults: Mapping[str, str] = field(default_factory=dict)
    defaults_file: str | None = None  #: configuration file in the current folder
    schema_version: Annotated[int, {"const": SCHEMA_VERSION}] = SCHEMA_VERSION  #: of the rows

    @property
    def command_record(self) -> Command:
        return find_command(self.subject, self.collective)

    @property
    def rows_section(self) -> str:
        """The section whose rows are written one by one, or ''."""
        return self.command_record.streamed_section

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = to_builtins(self)
        return record | {name: list(record[name]) for name in ("command", "hosts", "ranks", "dropped_sizes")}


class Report(Struct, frozen=True, kw_only=True):
    """The result of a run. `complete` is false while it runs and if it was cut short.

    `sections` has what is not written row by row, in the order of display. `main` is the section for formats that show
    only one. `sentence` is the last line, '' until presented. `duration_s` is None if unknown.
    """

    verdict: Verdict
    complete: bool
    findings: Sequence[Finding] = field(default=())
    sections: Mapping[str, Section] = field(default_factory=dict)
    main: str = CollectiveRow.section
    sentence: str = ""
    duration_s: float | None = None

    def __repr__(self) -> str:
        """Leave out the sections, which may have thousands of rows."""
        return (
            f"Report(verdict={self.verdict!r}, complete={self.complete}, findings={self.findings!r}, "
            f"main={self.main!r}, sentence={self.sentence!r}, duration_s={self.duration_s})"
        )

    def add_findings(self, first: Sequence[Finding] = (), last: Sequence[Finding] = ()) -> "Report":
        """Return the report with more findings, which can only worsen its verdict."""
        verdict = worst_verdict([self.verdict, *(finding.severity for finding in (*first, *last))])
        return replace(self, verdict=verdict, findings=(*first, *self.findings, *last))

    def rows(self, kind: type[R], nodes: Container[str] | None = None, *, section: str = "") -> list[R]:
        """Return the rows of a type, from its section or another one. `nodes` selects rows if they are stored by
        node.
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
        """Convert to plain data, without the sections."""
        return {
            "verdict": self.verdict.value,
            "complete": self.complete,
            "sentence": self.sentence,
            "duration_s": self.duration_s,
            "findings": [finding.to_record() for finding in self.findings],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Report":
        """Convert the result of `to_record` back."""
        return cls(
            verdict=Verdict(record["verdict"]),
            complete=record["complete"],
            findings=tuple(map(Finding.from_record, record["findings"])),
            sentence=record.get("sentence", ""),
            duration_s=record.get("duration_s"),
        )


class CheckRow(Record, frozen=True, kw_only=True):
    """One check of `check`: its verdict, its number of findings, and why it was left out."""

    section = "checks"
    on_page = OnPage(columns=("check", "verdict", "findings", "looks_for", "note", "nodes_in_error"), folds=True)

    check: str  #: name of the check
    verdict: Annotated[str, Verdict]  #: worst severity of its findings; SKIP if left out
    findings: int  #: number of findings
    looks_for: str  #: description
    note: str | None  #: reason for leaving it out
    origin: str  #: origin of the values: measured, simulated or recorded
    nodes_in_error: tuple[str, ...] = ()  #: hosts that could not be checked; the verdict covers the others


class VerdictRow(Record, frozen=True, kw_only=True):
    """The verdict of `check` on a node, GPU, NIC or link, and the ids of its findings."""

    section = "verdicts"
    on_page = OnPage(columns=("scope", "node", "subject", "verdict", "findings"), folds=True)
    host_fields = ("node",)

    scope: Annotated[str, ("node", "gpu", "nic", "link")]  #: kind of the subject
    node: str  #: host
    subject: str  #: the node, GPU, NIC or link
    verdict: Annotated[str, Verdict]  #: worst severity of its findings
    findings: tuple[str, ...]  #: ids of its findings
    origin: str  #: origin of the values: measured, simulated or recorded


class EvidenceRow(Record, frozen=True, kw_only=True):
    """All evidence on one path. Each kind supports the claim that it is direct, contradicts it, or is absent.

    docs/evidence.md has the decision table. Of more than ten thousand paths, direct ones are left out.
    """

    section = "evidence"
    on_page = OnPage(
        columns=(
            *("source", "destination", "path_class", "capability", "selection", "measurement", "correctness"),
            *("transport", "bandwidth_gb_s", "limit_gb_s", "conclusion", "confidence", "verdict"),
        )
    )

    source: str  #: sender: a GPU, a rank, host
    destination: str  #: receiver
    source_node: str  #: host of the source
    destination_node: str  #: host of the destination
    source_bus_id: str | None  #: PCI address of the source
    destination_bus_id: str | None  #: PCI address of the destination
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    path_class: str | None  #: wiring, as nvidia-smi topo -m: NV18, PIX, PXB, PHB, NODE, SYS; NET between nodes
    transport: str | None  #: transport in NCCL's words: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    host_staged: bool | None  #: whether bytes pass through host memory
    bandwidth_gb_s: float | None  #: GB/s of 1e9 bytes
    limit_gb_s: float | None  #: maximum of the links, GB/s per direction
    capability: Annotated[str, State]  #: evidence that the path is direct: present, absent or contradicting
    capability_seen: str  #: evidence in words
    selection: Annotated[str, State]  #: evidence that the path is direct: present, absent or contradicting
    selection_seen: str  #: evidence in words
    measurement: Annotated[str, State]  #: evidence that the path is direct: present, absent or contradicting
    measurement_seen: str  #: evidence in words
    correctness: Annotated[str, State]  #: evidence that the path is direct: present, absent or contradicting
    correctness_seen: str  #: evidence in words
    by_design: str | None  #: why host memory is expected here
    conclusion: Annotated[str, Conclusion]  #: direct, staged, wrong data, disputed or unknown
    confidence: Annotated[str, Confidence]  #: proven, likely, weak or none
    verdict: Annotated[str, Verdict]  #: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    meaning: str  #: rule in docs/evidence.md


class FallbackRow(Record, frozen=True, kw_only=True):
    """The verdict on a group of similar paths, the gravest first."""

    section = "fallback"
    on_page = OnPage(
        columns=(
            *("conclusion", "verdict", "confidence", "count", "pairs", "transport", "bandwidth_gb_s", "limit_gb_s"),
            *("cause_seen", "commands", "comment", "how"),
        )
    )

    conclusion: Annotated[str, Conclusion]  #: the last two appear in `topo` only
    verdict: Annotated[str, Verdict]  #: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    confidence: Annotated[str, Confidence]  #: proven, likely, weak or none
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    count: int  #: number of ordered pairs
    pairs: tuple[str, ...]  #: first thousand pairs
    transport: str | None = None  #: transport in NCCL's words: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    bandwidth_gb_s: float | None = None  #: GB/s of 1e9 bytes
    limit_gb_s: float | None = None  #: maximum of the links, GB/s per direction
    times_slower: float | None = None  #: limit divided by the measured bandwidth
    cause: str | None = None  #: stable id of the first known cause
    cause_seen: str | None = None  #: evidence
    advice: str | None = None  #: cure: commands and comment in one text
    commands: tuple[str, ...] = ()  #: commands to run in this order, ready to paste
    comment: str | None = None  #: remark on the commands, or what to do if there are none
    how: str  #: evidence in words


class Effect(StrEnum):
    """The effect of a cause on a path. Host staging appears in the first four forms."""

    STAGED = "host memory inside a node"
    NETWORK_INSIDE = "a network inside a node"
    SOCKETS = "sockets between nodes"
    NO_GPUDIRECT = "RDMA through host memory"
    APPLICATION = "MPI, UCX or a framework copies through host memory"
    WRONG = "wrong data, or a hang"
    SLOW = "a slower path"


class CauseRow(Record, frozen=True, kw_only=True):
    """A cause that was found, the most important first. docs/conditions.md lists all."""

    section = "causes"

    id: str  #: stable id
    evidence: str  #: evidence
    advice: str  #: cure: commands and comment in one text
    commands: tuple[str, ...] = ()  #: commands to run in this order, ready to paste
    comment: str | None = None  #: remark on the commands, or what to do if there are none
    paths: int  #: number of paths it explains
    verdict: Annotated[str, Verdict]  #: SKIP: by design; WARN: only slower; ERROR: unknown
    hosts: tuple[str, ...]  #: where it was seen
    title: str  #: title
    confidence: Annotated[str, Confidence]  #: proven, likely or weak
    effects: tuple[str, ...]  #: effects on paths
    subject: str  #: GPUs, nodes, ranks or pairs
    implied_by: str | None  #: cause that implies it
    settles: str  #: how to settle a doubt
    link: str  #: the vendor's page, or an issue about it


class UnreadRow(Record, frozen=True, kw_only=True):
    """A cause that could not be checked, and why."""

    section = "causes_unread"

    id: str  #: of the cause that could not be looked for
    title: str  #: description
    subject: str  #: subject
    reason: str  #: why not: needs root, was not read, ...


class PatternRow(Record, frozen=True, kw_only=True):
    """The bandwidth of several pairs at once, compared with the sum of the same pairs one at a time."""

    section = "patterns"

    pattern: str  #: ring, all to one, one to all, bisection, all to all
    direction: str  #: write or read
    gpus: int  #: GPUs that take part
    pairs: int  #: pairs that copy at the same time
    size_bytes: int  #: bytes of a copy
    total_gb_s: float | None  #: GB/s of all pairs together
    parts_gb_s: float | None  #: GB/s of the same pairs one at a time, summed
    share_percent: float | None  #: total_gb_s in percent of parts_gb_s
    wrong: int | None  #: wrong elements
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    note: str | None  #: remark
    #: expected GB/s of all pairs together, if each link carries its copies one after another
    expected_gb_s: float | None = None
    verdict: Annotated[str | None, Verdict] = None  #: PASS, WARN, FAIL, INCONCLUSIVE; null: speed not judged
    node: str | None = None  #: host of the GPUs
    ci95_percent: float | None = None  #: half of the 95 % confidence interval of the mean of its samples


class RankTimeRow(Record, frozen=True, kw_only=True):
    """The times of one rank in a collective row."""

    section = "rank_times"

    collective: str  #: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or sendrecv
    backend: Annotated[str, BACKENDS]  #: nccl, host (MPI on CPU buffers), ...; simulated moves no data
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    size_bytes: int  #: nccl-tests' size: the larger buffer of a rank, after rounding
    dtype: Annotated[str, DataType]  #: element type
    op: Annotated[str | None, ReduceOp]  #: reduction; null: data are only moved
    placement: Annotated[str, Placement]  #: out_of_place: separate result buffer; in_place: result overwrites the input
    mode: Annotated[str, Mode]  #: throughput: operations back to back; latency: one at a time
    rank: int  #: rank of the job
    host: str  #: name of its host
    node: int  #: number of its host, from 0 in the order of ranks
    gpu_bus_id: str | None  #: PCI address of its GPU; null: host backend
    time_us: float  #: microseconds per operation on that rank, including waiting for others
    #: median delay after the first rank that entered an operation; null: operations back to back
    late_us: Annotated[float | None, SIGNED]
    clock_uncertainty_us: float | None  #: uncertainty of late_us: half a round trip between the clocks
    #: percent of operations that it entered last; null: operations back to back
    last_percent: Annotated[float | None, {"minimum": 0, "maximum": 100}]
    setting: str | None = None  #: setting of the row
