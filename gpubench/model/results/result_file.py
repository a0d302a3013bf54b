"""The contents of a result file: rows, circumstances, section types, rows of equal nodes, and CSV text."""

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
    column_values,
)
from gpubench.model.terms.units import escaped, plural, shorten
from gpubench.model.terms.verdict import Finding


class LatencyRow(Struct, frozen=True, kw_only=True):
    """The time of one size of a collective from a program that may report neither ranks nor bandwidth.

    `size_bytes` is nccl-tests' size, or one rank's block if the size depends on an unknown number of ranks.
    `busbw_gb_s` is computed, None without ranks. `wrong` is 1 if verification failed, because the number of wrong
    elements is unknown.
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


MODELS = "gpu_models"  # The option in the metadata of a check that names the models of its GPUs
CPU_TIME = "time of the CPU alone (-C)"  # The note on a row of nccl-tests whose bandwidths are based on another time
SHOWN_BY_ROWS = ("sizes", "dtypes", "ops", "placements", "pairs", "gpus", "seed", "root", MODELS)
"""Options that every row or device contains."""


class UserFacts(Struct, frozen=True, kw_only=True):
    """What a user adds to files that lack it: the collective in gpubench's name, ranks and nodes."""

    collective: str | None = None
    ranks: int | None = None
    nodes: int = 1


NO_USER_FACTS = UserFacts()


class FileCircumstances(Struct, frozen=True, kw_only=True):
    """The circumstances of the rows in a file. Unknown values are empty, `environment` None.

    `gpus` has one model per GPU. `models` are those of a check, which may have lost some GPUs. `wrong_elements` is the
    total of the run, None if not reported.
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
    """A run in a text: its first line, the table of its rows, and its machine (hosts and GPUs).

    `launches` is the number of GPUs for which one thread launches every operation.
    """

    line: int
    table: tuple[str, int, int]
    machine: tuple[tuple[str, ...], tuple[str, ...]]
    launches: int = 1


class ResultFile(Struct, frozen=True, kw_only=True):
    """The contents of a result file. `latencies` are collective rows that lack columns of `rows`.

    `kind` names the program. `remarks` are sentences of the reader. `left_out` lists unreadable rows with their lines,
    and `runs` where each run of a text begins. `evidence` is None if the file has none. `findings` is None unless the
    command judges a machine, and `stored` has all findings. `checks` and `devices` are the verdicts of a check.
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
        return len(self.rows) + len(self.latencies) + len(self.pairs)

    @property
    def origins(self) -> set[str]:
        """The origins of its rows: measured, simulated or recorded."""
        parts: tuple[Iterable[Any], ...] = self.rows, self.latencies, self.pairs
        return {origin for rows in parts for (origin,) in column_values(rows, "origin")}


_MARK = "'"
_HARMFUL = re.compile(r"\s*(?:[=+\-@']|::)|.*##[A-Za-z]*\[", re.DOTALL)
"""Beginnings of formulas, marked texts and GitHub commands, and Azure commands anywhere in a text."""

_ESCAPE = re.compile(r"\\(?:\\|t|n|r|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_SPELLED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


def mark_text(text: str) -> str:
    r"""Make a text harmless in a spreadsheet. `unmark_text` is the inverse.

    A dangerous text gets an apostrophe, as spreadsheets mark text, and escapes: `=1+1` becomes `'=1+1`, ESC `'\x1b`. A
    text that begins with an apostrophe gets one too, so that the inverse is unique.
    """
    if text.isprintable() and not _HARMFUL.match(text):
        return text
    shown = "".join(map(escaped, text.replace("\\", "\\\\")))
    return _MARK + shown.replace("##", r"#\x23")


def unmark_text(cell: str) -> str:
    """Return the original text of a cell."""
    if not cell.startswith(_MARK):
        return cell
    return _ESCAPE.sub(lambda found: _SPELLED.get(found[0]) or chr(int(found[0][2:], 16)), cell[1:])


WIDE_COLUMNS = ("run_id", "run_started_at", "run_hosts", "run_gpus", "run_driver", "run_nccl")
"""Run id, start (UTC), hosts and GPU models separated by semicolons, versions of driver and NCCL."""


def wide_cells(metadata: Metadata) -> Sequence[str]:
    """Return the cells of WIDE_COLUMNS, '' if unknown."""
    libraries = metadata.libraries
    hosts = dict.fromkeys(metadata.hosts)
    driver, nccl = (libraries.get(name, "").split(" ")[0] for name in ("driver", "NCCL"))
    return metadata.run_id, metadata.started_at, ";".join(hosts), ";".join(_gpus(metadata)), driver, nccl


def _gpus(metadata: Metadata) -> list[str]:
    """Return the GPU models of ranks, copies or checked nodes."""
    named = [rank.gpu for rank in metadata.ranks if rank.gpu]
    described = metadata.options.get("gpus")
    if not named and isinstance(described, dict):
        named = [str(text).partition(" ")[2] for text in described.values()]
    return list(dict.fromkeys(named or map(str, metadata.options.get(MODELS) or ())))


ALIKE = "alike"  # The key of a document that says which nodes share rows
# Shorter sections are written in full: seventeen nodes of eight GPUs and eight NICs have as many pairs
LEAST_ROWS = 4096
_MOST_KNOWN = 8
_MOST_DIFFERING = 3  # Nodes are written as alike if at most one in so many columns differs


class AlikeRows(Struct, frozen=True):
    """A section whose equal nodes are written once: the written rows, and for each node whose rows it has.

    A thousand equal nodes have a quarter of a million pairs.
    """

    written: Sequence[Iterable[Record]]
    nodes: Sequence[Mapping[str, Any]]


class _WrittenNode(Struct):
    host: str
    rows: Sequence[Record]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def values(self, of: "_WrittenNode", hosts: Collection[str]) -> dict[str, list[Any]] | None:
        """Return the columns in which `of` differs, with its values. None for other rows, or too many differences."""
        if of.rows is self.rows:
            return {}
        if len(of.rows) != len(self.rows):
            return None
        for node in (self, of):
            if not node.columns:
                records = [row.to_record() for row in node.rows]
                node.columns = {name: [record[name] for record in records] for name in records[0]}
        differing = {
            name: values for name, values in of.columns.items() if name not in hosts and values != self.columns[name]
        }
        return differing if len(differing) <= len(self.columns) // _MOST_DIFFERING else None


def alike_rows(name: str, section: Table) -> AlikeRows | None:
    """Write equal nodes once. None for a short section, or for rows that belong to several nodes."""
    hosts = HOST_FIELDS.get(name)
    parts = None if hosts is None else _split_by_node(section, hosts)
    if hosts is None or parts is None or sum(len(part.rows) for part in parts) < LEAST_ROWS:
        return None
    known: list[_WrittenNode] = []
    written: list[RowsOfNode] = []
    nodes: list[dict[str, Any]] = []
    for part in parts:
        own = _WrittenNode(part.host, part.rows)
        found = [(node, values) for node in known if (values := node.values(own, hosts)) is not None]
        if not found:
            written.append(part)
            known = [*known[-_MOST_KNOWN + 1 :], own]
            nodes.append({"nodes": [part.host]})
            continue
        like, values = min(found, key=lambda item: len(item[1]))
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
    """The rows of a section whose equal nodes were written once, made one by one.

    `pieces` has, per node, the rows that it shares and the columns in which it differs. `hosts` are the node columns.
    """

    def __init__(self, written: Sequence[Mapping[str, Any]], nodes: Sequence[Any], hosts: Sequence[str]) -> None:
        """Raise ValueError if `nodes` is not the result of `alike_rows`, or does not fit the written rows."""
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
        """Yield the rows by node. Equal nodes share them."""
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
"""The columns that hold the node, by section."""

MATRICES = dict.fromkeys(("matrix", "peer_access", "limits", "matrices", "ratios"), OnPage()) | {"matrices": HIDDEN}
"""The sections that are matrices, and how pages show them."""
