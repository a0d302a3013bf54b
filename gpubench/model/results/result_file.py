"""The contents of a result file: rows, run conditions, section types, shared rows of equal nodes, and safe CSV text."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from msgspec import Struct, field

from gpubench.model.results import backends, compare, fallback, kv, overlap, plan, report, scaling, scan, topo, watch
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
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import escaped, plural, shorten
from gpubench.model.terms.verdict import Finding, Origin


class LatencyRow(Struct, frozen=True, kw_only=True):
    """The time of a collective at one size, from a program that may report neither ranks nor bandwidth.

    `size_bytes` is the size as nccl-tests defines it. If that depends on an unknown number of ranks, it is the size of
    one rank's block. `busbw_gb_s` is computed, and None if the number of ranks is unknown. `wrong` is 1 if verification
    failed, because such programs do not report the number of wrong elements.
    """

    collective: str
    backend: str
    origin: str = Origin.RECORDED
    ranks: int | None
    size_bytes: int
    dtype: str
    op: str | None
    root: int | None = None
    placement: str
    mode: str = Mode.LATENCY
    iterations: int | None
    time_us: float
    time_us_fastest_rank: float | None = None
    time_us_slowest_rank: float | None = None
    busbw_gb_s: float | None
    wrong: int | None = None
    verified: str
    note: str | None = None


MODELS = "gpu_models"  # The option in a check's metadata that contains the models of its GPUs
# Note on a row from nccl-tests -C. Its bandwidths are computed from another time
CPU_TIME = "CPU time only (-C)"
SHOWN_BY_ROWS = ("sizes", "dtypes", "ops", "placements", "pairs", "gpus", "seed", "root", MODELS)
"""Options whose values also appear in each row or device."""


class UserFacts(Struct, frozen=True, kw_only=True):
    """Facts from the user about files that lack them: the gpubench name of the collective, and numbers of ranks and
    nodes.
    """

    collective: str | None = None
    ranks: int | None = None
    nodes: int = 1


NO_USER_FACTS = UserFacts()


class FileCircumstances(Struct, frozen=True, kw_only=True):
    """The conditions under which a file's rows were measured. Unknown values are empty. An unknown `environment` is
    None.

    `gpus` contains one model per GPU. `models` are the GPU models in a check, which may have lost some GPUs.
    `wrong_elements` is the total for the run, or None if not reported.
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
    """Return a sentence that lists the rows of a file that could not be read."""
    return f"{plural(len(left_out), 'row')} left out: {shorten(left_out)}"


class RunPlace(NamedTuple):
    """One run in a text file: its first line, its range of rows, and its machine (hosts and GPUs).

    `launches` is the number of GPUs on which a single thread launches each operation. `rows` is the number of its rows,
    and `wrong_elements` their total, or None if not reported.
    """

    line: int
    table: tuple[str, int, int]
    machine: tuple[tuple[str, ...], tuple[str, ...]]
    launches: int = 1
    rows: int = 0
    wrong_elements: int | None = None


class ResultFile(Struct, frozen=True, kw_only=True):
    """The contents of a result file. `kind` is the program that wrote it.

    `latencies` are collective rows that lack some columns of `rows`. `evidence` is None if the file has none.
    `findings` is None unless the command judges a machine. `stored` contains all findings in the file. `checks` and
    `devices` contain verdicts from `gpubench check`.

    `remarks` are sentences from the reader. `left_out` lists unreadable rows with their line numbers. `runs` lists the
    runs in a text file.
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
        """The origins of all rows: measured, simulated or recorded."""
        parts: tuple[Iterable[Any], ...] = self.rows, self.latencies, self.pairs
        return {origin for rows in parts for (origin,) in column_values(rows, "origin")}


_MARK = "'"
_HARMFUL = re.compile(r"\s*(?:[=+\-@']|::)|.*##[A-Za-z]*\[", re.DOTALL)
"""Matches the start of a formula, a marked text or a GitHub command, and an Azure command anywhere in a text."""

_ESCAPE = re.compile(r"\\(?:\\|t|n|r|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_SPELLED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


def mark_text(text: str) -> str:
    r"""Make a text safe to open in a spreadsheet. `unmark_text` is the inverse.

    A dangerous text gets an apostrophe, with which spreadsheets mark text, and escapes. `=1+1` becomes `'=1+1`, and ESC
    becomes `'\x1b`. A text that already begins with an apostrophe gets another one, so that the inverse is unique.
    """
    if text.isprintable() and not _HARMFUL.match(text):
        return text
    shown = "".join(map(escaped, text.replace("\\", "\\\\")))
    return _MARK + shown.replace("##", r"#\x23")


def unmark_text(cell: str) -> str:
    """Return the original text of a cell made by `mark_text`."""
    if not cell.startswith(_MARK):
        return cell
    return _ESCAPE.sub(lambda found: _SPELLED.get(found[0]) or chr(int(found[0][2:], 16)), cell[1:])


WIDE_COLUMNS = ("run_id", "run_started_at", "run_hosts", "run_gpus", "run_driver", "run_nccl")
"""Columns that describe the run in a wide CSV table. `run_started_at` is in UTC. Hosts and GPU models are separated
by semicolons. `run_driver` and `run_nccl` are versions.
"""


def wide_cells(metadata: Metadata) -> Sequence[str]:
    """Return the cells for WIDE_COLUMNS. Unknown cells are empty."""
    libraries = metadata.libraries
    hosts = dict.fromkeys(metadata.hosts)
    driver, nccl = (libraries.get(name, "").split(" ")[0] for name in ("driver", "NCCL"))
    return metadata.run_id, metadata.started_at, ";".join(hosts), ";".join(_gpus(metadata)), driver, nccl


def _gpus(metadata: Metadata) -> list[str]:
    """Return the different GPU models of ranks, copies or checked nodes."""
    named = [rank.gpu for rank in metadata.ranks if rank.gpu]
    described = metadata.options.get("gpus")
    if not named and isinstance(described, dict):
        named = [str(text).partition(" ")[2] for text in described.values()]
    return list(dict.fromkeys(named or map(str, metadata.options.get(MODELS) or ())))


ALIKE = "alike"  # The key in a JSON document that maps nodes to the rows that they share
# Write shorter sections in full. A section of pairs reaches this length with seventeen nodes of eight GPUs and eight
# NICs.
LEAST_ROWS = 4096
_MOST_KNOWN = 8
_MOST_DIFFERING = 3  # Two nodes share rows if at most one in this many columns differs


class AlikeRows(Struct, frozen=True):
    """A section in which equal nodes share rows: the written rows, and for each node whose rows it uses.

    Without sharing, a thousand equal nodes would need a quarter of a million rows of pairs.
    """

    written: Sequence[Iterable[Record]]
    nodes: Sequence[Mapping[str, Any]]


class _WrittenNode(Struct):
    host: str
    rows: Sequence[Record]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def values(self, of: "_WrittenNode", hosts: Collection[str]) -> dict[str, list[Any]] | None:
        """Return the columns in which `of` differs from this node, with the values of `of`.

        Return None if the numbers of rows differ, or if too many columns differ.
        """
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
    """Return a section with the rows of equal nodes written once.

    Return None if the section is short or has rows that belong to several nodes.
    """
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
    """Iterates over all rows of a section in which equal nodes share rows.

    `pieces` contains, for each node, the shared rows and the columns in which the node differs. `hosts` are the columns
    with the host name.
    """

    def __init__(self, written: Sequence[Mapping[str, Any]], nodes: Sequence[Any], hosts: Sequence[str]) -> None:
        """Raise ValueError if `nodes` does not come from `alike_rows`, or does not match the written rows."""
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
        """Yield the rows of each node. Equal nodes share one list."""
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


_MODULES = (report, topo, backends, fallback, compare, scan, watch, overlap, plan, kv, scaling)
TABLES: Mapping[str, type[Struct]] = {
    **{
        kind.section: kind
        for module in _MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Record) and kind.section and kind.__module__ == module.__name__
    },
    FINDINGS_SECTION: Finding,
}
"""The row type of each section that is a table."""

HOST_FIELDS: Mapping[str, Sequence[str]] = {
    kind.section: kind.host_fields for kind in TABLES.values() if issubclass(kind, Record) and kind.host_fields
}
"""The columns with a host name, by section."""

MATRICES = {
    "matrix": OnPage("Paths between devices"),
    "peer_access": OnPage("Peer access, as CUDA / NVML report it"),
    "limits": OnPage("Limits, GB/s per direction"),
    "matrices": HIDDEN,
    "ratios": OnPage("Times faster with peer access on"),
}
"""The sections that are matrices, and how pages show them."""
