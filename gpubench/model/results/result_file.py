r"""The contents of a file of results: rows, circumstances, types of sections, nodes written once, and CSV text.

A text that could do harm gets an apostrophe before it, as spreadsheets mark text, and escapes in the place of its
backslashes and of what cannot be printed: `=1+1` is `'=1+1`, and ESC `'\x1b`. Of a text that begins with an apostrophe
nobody could tell whether it was marked, so it is marked too.

A thousand equal nodes have a quarter of a million pairs. In a document they are those of the first node, and, by the
member `alike`, the names of the nodes that have the same; nodes whose figures alone differ have these beside it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from msgspec import Struct, field

from gpubench.model.results import backends, compare, fallback, overlap, plan, report, scan, topo, watch
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    HIDDEN,
    CollectiveRow,
    EvidenceRow,
    Metadata,
    OnPage,
    PairRow,
    Record,
    RowsOfNode,
    Table,
    VerdictRow,
    cells_of,
)
from gpubench.model.terms.units import escaped, plural, shorten
from gpubench.model.terms.verdict import Finding


class LatencyRow(Struct, frozen=True, kw_only=True):
    """The time of one size of a collective, as a program prints it that may say neither ranks nor bandwidth.

    `size_bytes` is nccl-tests' size; where it depends on ranks, and nothing says how many, that of one rank's block.
    `busbw_gb_s` is computed from size and time, null without ranks. `wrong` is 1 of a verification that failed, the
    least that it can be.
    """

    collective: str
    backend: str
    origin: str
    ranks: int | None
    size_bytes: int
    dtype: str
    op: str | None
    root: int | None
    placement: str
    mode: str
    iterations: int | None
    time_us: float
    time_us_fastest_rank: float | None
    time_us_slowest_rank: float | None
    busbw_gb_s: float | None
    wrong: int | None
    verified: str
    note: str | None


MODELS = "gpu_models"  # The option in the metadata of a check that tells the models of its GPUs
CPU_TIME = "time of the CPU alone (-C)"  # The note on a row of nccl-tests' whose bandwidths are by another time
SHOWN_BY_ROWS = ("sizes", "dtypes", "ops", "placements", "pairs", "gpus", "seed", "root", MODELS)
"""Options that every row or device shows by itself."""


class UserFacts(Struct, frozen=True, kw_only=True):
    """What a person says of rows that do not say it themselves: the collective, by gpubench's name, ranks and nodes."""

    collective: str | None = None
    ranks: int | None = None
    nodes: int = 1


NO_USER_FACTS = UserFacts()


class FileCircumstances(Struct, frozen=True, kw_only=True):
    """The circumstances that numbers depend on. What a file does not tell is empty, or None for `environment`.

    `gpus` are the models, one a GPU; `models` are those of a check, which may have lost some of them.
    `wrong_elements` is what the run as a whole says of its data, None where it says nothing.
    """

    tool: str
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    origin: str | None = None
    started_at: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None
    profile: str | None = None
    wrong_elements: int | None = None


def left_out_remark(left_out: Sequence[str]) -> str:
    """Return the sentence that says which rows of a file could not be read."""
    return f"{plural(len(left_out), 'row')} left out: {shorten(left_out)}"


class RunPlace(NamedTuple):
    """A run in a text: its first line, whose table its rows are in, and the machine that it names: hosts and GPUs.

    `launches` is the number of GPUs on which one thread launches every operation.
    """

    line: int
    table: tuple[str, int, int]
    machine: tuple[tuple[str, ...], tuple[str, ...]]
    launches: int = 1


class ResultFile(Struct, frozen=True, kw_only=True):
    """Rows of one file; `latencies` are of collectives, too, and lack something that `rows` have.

    `kind` says who wrote it; `remarks` are what a reader noticed, in sentences. `left_out` says which rows or values
    could not be read, each with its line, and `runs` where each run of a text begins. `verdict` is that of the run,
    None where the file does not tell. `evidence` is None of files that hold none. `findings` are those of commands that
    judge a machine, None of others, and `stored` those of every command that was stored with its findings; of a check,
    `checks` are the verdicts by check, and `devices` its GPUs and NICs.
    """

    name: str
    kind: str
    circumstances: FileCircumstances
    rows: tuple[CollectiveRow, ...] = ()
    latencies: tuple[LatencyRow, ...] = ()
    pairs: Collection[PairRow] = ()
    evidence: tuple[EvidenceRow, ...] | None = None
    findings: tuple[Finding, ...] | None = None
    stored: tuple[Finding, ...] = ()
    checks: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[VerdictRow, ...] = ()
    complete: bool = True
    verdict: str | None = None
    remarks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    runs: tuple[RunPlace, ...] = ()

    @property
    def count(self) -> int:
        """How many rows it has."""
        return len(self.rows) + len(self.latencies) + len(self.pairs)

    @property
    def origins(self) -> set[str]:
        """Where its rows are from: measured, simulated or recorded."""
        parts: tuple[Iterable[Any], ...] = self.rows, self.latencies, self.pairs
        return {origin for rows in parts for (origin,) in cells_of(rows, "origin")}


_MARK = "'"
_HARMFUL = re.compile(r"\s*(?:[=+\-@']|::)|.*##[A-Za-z]*\[", re.DOTALL)
"""The beginnings of formulas, of marked texts and of GitHub's commands, and Azure's commands anywhere."""

_ESCAPE = re.compile(r"\\(?:\\|t|n|r|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_SPELLED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


def marked_text(text: str) -> str:
    """A text as a cell that does nothing; `unmarked_text` is the inverse."""
    if text.isprintable() and not _HARMFUL.match(text):
        return text
    shown = "".join(map(escaped, text.replace("\\", "\\\\")))
    return _MARK + shown.replace("##", r"#\x23")


def unmarked_text(cell: str) -> str:
    """The text that a cell was made of."""
    return _ESCAPE.sub(_character, cell[1:]) if cell.startswith(_MARK) else cell


def _character(escape: re.Match[str]) -> str:
    return _SPELLED.get(escape[0]) or chr(int(escape[0][2:], 16))


WIDE_COLUMNS = ("run_id", "run_started_at", "run_hosts", "run_gpus", "run_driver", "run_nccl")
"""Run and time (UTC); hosts and models of GPUs, with semicolons between; versions of driver and NCCL."""


def wide_cells(metadata: Metadata) -> Sequence[str]:
    """The cells of these columns; empty where it is not known."""
    libraries = metadata.libraries
    hosts = dict.fromkeys(metadata.hosts)
    driver, nccl = (libraries.get(name, "").split(" ")[0] for name in ("driver", "NCCL"))
    return metadata.run_id, metadata.started_at, ";".join(hosts), ";".join(_gpus(metadata)), driver, nccl


def _gpus(metadata: Metadata) -> list[str]:
    """The models of the GPUs: of ranks, of copies, or of the nodes that were checked."""
    named = [rank.gpu for rank in metadata.ranks if rank.gpu]
    described = metadata.options.get("gpus")
    if not named and isinstance(described, dict):
        named = [str(each).partition(" ")[2] for each in described.values()]
    return list(dict.fromkeys(named or map(str, metadata.options.get(MODELS) or ())))


ALIKE = "alike"  # The member of a document that says which nodes have the rows of which
LEAST_ROWS = 4096  # Sections with fewer rows are written out: seventeen nodes have as many pairs
_MOST_KNOWN = 8
_MOST_DIFFERING = 3  # The part of the columns, one in so many, in which nodes may differ that are written as alike


class AlikeRows(Struct, frozen=True):
    """A section as it is written: the rows that are written out, and by node, in their order, whose rows it has."""

    written: Sequence[Iterable[Record]]
    nodes: Sequence[Mapping[str, Any]]


class _WrittenNode(Struct):
    host: str
    rows: Sequence[Record]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def values(self, of: "_WrittenNode", hosts: Collection[str]) -> dict[str, list[Any]] | None:
        """The columns in which `of` differs, with its values; None where it has other rows, or too many differ."""
        if of.rows is self.rows:
            return {}
        if len(of.rows) != len(self.rows):
            return None
        for each in (self, of):
            if not each.columns:
                records = [row.to_record() for row in each.rows]
                each.columns = {name: [record[name] for record in records] for name in records[0]}
        differing = {
            name: values for name, values in of.columns.items() if name not in hosts and values != self.columns[name]
        }
        return differing if len(differing) <= len(self.columns) // _MOST_DIFFERING else None


def alike_rows(name: str, section: Table) -> AlikeRows | None:
    """A section with what is alike written once; None where it is short, or has rows that are of no single node."""
    hosts = HOST_FIELDS.get(name)
    parts = None if hosts is None else _split_by_node(section, hosts)
    if hosts is None or parts is None or sum(len(part.rows) for part in parts) < LEAST_ROWS:
        return None
    known: list[_WrittenNode] = []
    written: list[RowsOfNode] = []
    nodes: list[dict[str, Any]] = []
    for part in parts:
        own = _WrittenNode(part.host, part.rows)
        found = [(each, values) for each in known if (values := each.values(own, hosts)) is not None]
        if not found:
            written.append(part)
            known = [*known[-_MOST_KNOWN + 1 :], own]
            nodes.append({"nodes": [part.host]})
            continue
        like, values = min(found, key=lambda each: len(each[1]))
        if not values and nodes[-1].get("as") == like.host and "values" not in nodes[-1]:
            nodes[-1]["nodes"].append(part.host)
        else:
            nodes.append({"nodes": [part.host], "as": like.host} | ({"values": values} if values else {}))
    return AlikeRows(written, nodes)


def _split_by_node(section: Table, hosts: Sequence[str]) -> list[RowsOfNode] | None:
    if section.parts is not None:
        parts = [part for part in section.parts() if part.rows]
    else:
        parts = []
        for found, rows in groupby(section.rows(), lambda row: [getattr(row, name) for name in hosts]):
            if len(set(found)) > 1:
                return None
            own: Any = list(rows)
            parts.append(RowsOfNode(own, hosts, str(found[0])))
    return parts if len({part.host for part in parts}) == len(parts) else None


class UnfoldedRows:
    """The rows of a section, as records, that `alike` says in short; made one by one, for there may be very many.

    `pieces` are by node the rows that it is like, and the columns in which it differs; `hosts` the columns of its name.
    """

    def __init__(self, written: Sequence[Mapping[str, Any]], nodes: Sequence[Any], hosts: Sequence[str]) -> None:
        """ValueError where `nodes` is not what `alike_rows` makes, or does not fit the rows that are written out."""
        self.hosts = hosts
        by_host: dict[Any, list[Mapping[str, Any]]] = {}
        for row in written:
            by_host.setdefault(row.get(hosts[0]), []).append(row)
        self.pieces: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Sequence[Any]]]] = []
        self._count = 0
        for node in nodes:
            names, values = node["nodes"], node.get("values", {})
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a node without a name")
            for name in names:
                rows = by_host.get(node.get("as", name))
                if not rows or any(len(column) != len(rows) or key not in rows[0] for key, column in values.items()):
                    raise ValueError(f"{name} does not fit the rows of {node.get('as', name)}")
                self.pieces.append((name, rows, values))
                self._count += len(rows)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for piece in self.pieces:
            yield from self.records(*piece)

    def parts(self, make: Callable[[Mapping[str, Any]], Record]) -> Iterator[RowsOfNode]:
        """The rows by node, made of records; nodes whose rows are equal share them."""
        shared: dict[int, list[Record]] = {}
        for name, rows, values in self.pieces:
            if values:
                yield RowsOfNode(list(map(make, self.records(name, rows, values))), self.hosts, name)
                continue
            if id(rows) not in shared:
                shared[id(rows)] = list(map(make, rows))
            yield RowsOfNode(shared[id(rows)], self.hosts, name)

    def records(
        self, name: str, rows: Sequence[Mapping[str, Any]], values: Mapping[str, Sequence[Any]]
    ) -> Iterator[dict[str, Any]]:
        """The rows of a piece."""
        own = dict.fromkeys(self.hosts, name)
        for number, row in enumerate(rows):
            yield {**row, **own, **{key: column[number] for key, column in values.items()}}


_MODULES = (report, topo, backends, fallback, compare, scan, watch, overlap, plan)
TABLES: Mapping[str, type[Struct]] = {
    **{
        kind.section: kind
        for module in _MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Record) and kind.section and kind.__module__ == module.__name__
    },
    FINDINGS_SECTION: Finding,
}
"""The row type of every section that is a table."""

HOST_FIELDS: Mapping[str, Sequence[str]] = {
    kind.section: kind.host_fields for kind in TABLES.values() if issubclass(kind, Record) and kind.host_fields
}
"""By section whose rows are of nodes: the columns that hold the node."""

MATRICES = dict.fromkeys(("matrix", "peer_access", "limits", "matrices", "ratios"), OnPage()) | {"matrices": HIDDEN}
"""The sections that are matrices, and how they stand on pages."""
