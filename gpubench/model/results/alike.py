"""Rows of nodes that are alike, written once: a node has the rows of an earlier one, but for its name and some values.

A thousand equal nodes have a quarter of a million pairs. In a document they are those of the first node, and, by the
member `alike`, the names of the nodes that have the same; nodes whose figures alone differ have these beside it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gpubench.model.results.report import PAIRS_SECTION, Record, RowsOfNode, Table
from gpubench.model.results.rows.checks import VERDICTS_SECTION

ALIKE = "alike"
"""The member of a document that says which nodes have the rows of which."""

LEAST_ROWS = 4096
"""Sections with fewer rows are written out: seventeen nodes have as many pairs."""

HOST_FIELDS: Mapping[str, Sequence[str]] = {
    PAIRS_SECTION: ("source_node", "destination_node"),
    **dict.fromkeys(("gpus", "nvlinks", "nics", VERDICTS_SECTION), ("node",)),
}
"""By section whose rows are of nodes: the columns that hold the node."""

_MOST_KNOWN = 8
_MOST_DIFFERING = 3
"""The part of the columns, one in so many, in which nodes may differ that are written as alike."""


@dataclass(frozen=True, slots=True)
class AlikeRows:
    """A section as it is written: the rows that are written out, and by node, in their order, whose rows it has."""

    written: Sequence[Iterable[Record]]
    nodes: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class _WrittenNode:
    """The rows of a node that are written out."""

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
    parts = None if hosts is None else _by_node(section, hosts)
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


def _by_node(section: Table, hosts: Sequence[str]) -> list[RowsOfNode] | None:
    """The rows of every node, in order; None where some are of two nodes, or those of one stand apart."""
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
    """The rows of a section, as records, that `alike` says in short; made one by one, for there may be very many."""

    def __init__(self, written: Sequence[Mapping[str, Any]], nodes: Sequence[Any], hosts: Sequence[str]) -> None:
        """ValueError where `nodes` is not what `alike_rows` makes, or does not fit the rows that are written out."""
        self._hosts = hosts
        by_host: dict[Any, list[Mapping[str, Any]]] = {}
        for row in written:
            by_host.setdefault(row.get(hosts[0]), []).append(row)
        self._pieces: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Sequence[Any]]]] = []
        self._count = 0
        for each in nodes:
            names, values = each["nodes"], each.get("values", {})
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a node without a name")
            for name in names:
                rows = by_host.get(each.get("as", name))
                if not rows or any(len(column) != len(rows) or key not in rows[0] for key, column in values.items()):
                    raise ValueError(f"{name} does not fit the rows of {each.get('as', name)}")
                self._pieces.append((name, rows, values))
                self._count += len(rows)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for piece in self._pieces:
            yield from self._records(*piece)

    def parts(self, make: Callable[[Mapping[str, Any]], Record]) -> Iterator[RowsOfNode]:
        """The rows by node, made of records; nodes whose rows are equal share them."""
        shared: dict[int, list[Record]] = {}
        for name, rows, values in self._pieces:
            if values:
                yield RowsOfNode(list(map(make, self._records(name, rows, values))), self._hosts, name)
                continue
            if id(rows) not in shared:
                shared[id(rows)] = list(map(make, rows))
            yield RowsOfNode(shared[id(rows)], self._hosts, name)

    def _records(
        self, name: str, rows: Sequence[Mapping[str, Any]], values: Mapping[str, Sequence[Any]]
    ) -> Iterator[dict[str, Any]]:
        own = dict.fromkeys(self._hosts, name)
        for number, row in enumerate(rows):
            yield {**row, **own, **{key: column[number] for key, column in values.items()}}
