"""Reads the tables of `rocm-smi --showtopo` and `amd-smi topology` from saved or pasted text, and amd-smi's JSON.

Both programs print a table for each property of a link, with a row and a column for each GPU. The link type becomes
the path: XGMI, SYS for PCIe between two NUMA nodes, or PCIE inside a NUMA node, because neither program prints PCIe
switches. Weights are not used, nor amd-smi's bandwidths, which are 0 with some drivers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from gpubench.errors import UsageError
from gpubench.model.facts import snapshot
from gpubench.model.paths.topology import ACROSS_SOCKETS, PCIE, XGMI
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits
from gpubench.readers.documents import load_json, remove_quotes

_TYPE, _HOPS, _ACCESS = "link_type", "num_hops", "link_status"  # Keys of amd-smi's JSON
_TITLES = {
    "link type between two gpus": _TYPE,
    "link type table": _TYPE,
    "hops between two gpus": _HOPS,
    "hops table": _HOPS,
    "link accessibility between two gpus": _ACCESS,
    "access table": _ACCESS,
}
_SIGN = re.compile(r"(?i)link type (?:between two gpus|table:)|\"link_type\":")
_LABEL = re.compile(r"GPU\d{1,3}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", re.ASCII)
_NUMA = re.compile(r"GPU\[(\d{1,3})\]\s*: \(Topology\) Numa Node: (\d{1,4})\s*$", re.ASCII | re.MULTILINE)
_MODEL = re.compile(r"GPU\[(\d{1,3})\]\s*: Card [Ss]eries:\s*(\S.*?)\s*$", re.ASCII | re.MULTILINE)
_TYPES = (XGMI, PCIE, "XXXX", "UNKNOWN", "N/A", "SELF", "0")
_ANSWERS = {"ENABLED": True, "True": True, "1": True, "DISABLED": False, "False": False, "0": False}
_FAR_HOPS = 3  # From the GPU to its CPU, to the other CPU, to the other GPU


class _Table(Struct):
    """A table, with the line of its title. `rows` has the cells of each GPU, in the order of `labels`."""

    line: int
    labels: tuple[str, ...] = ()
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)


def recognises(text: str) -> bool:
    """Return True if a text has the title of a table of link types, or is amd-smi's JSON."""
    return _SIGN.search(text) is not None


def read(text: str, name: str) -> snapshot.Snapshot:
    """Read the node in the text of the file `name`. Its `host` stays empty, because neither program prints it.

    rocm-smi numbers the GPUs, and amd-smi prints their bus ids in the same order. Raises
    UsageError with the line if there are no link types, or if a table is truncated or repeated.
    """
    tables = _json_tables(text, name) if text.lstrip().startswith("[") else _text_tables(text, name)
    for table in tables.values():
        _check(table, name)
    types = tables.get(_TYPE)
    if types is None:
        raise _wrong(name, text.count("\n") + 1, "the text has no complete table of link types")
    odd = [word for cells in types.rows.values() for word in cells if word not in _TYPES]
    if odd:
        raise _wrong(name, types.line, f"{odd[0]!r} is not a link type")
    numa = {int(number): int(node) for number, node in _NUMA.findall(text)}
    models = {int(number): model if "AMD" in model else f"AMD {model}" for number, model in _MODEL.findall(text)}
    gpus = tuple(
        snapshot.GpuFacts(
            index=index,
            bus_id=None if label.startswith("GPU") else label.lower(),
            name=models.get(index, "AMD GPU"),
            place=snapshot.PciPlace(numa_node=numa.get(index)),
            unknown={"nvlinks": "rocm-smi and amd-smi do not print the number of xGMI links"},
        )
        for index, label in enumerate(types.labels)
    )
    return snapshot.Snapshot(
        host="",
        origin=Origin.RECORDED,
        source=f"{'amd-smi' if gpus[0].bus_id else 'rocm-smi'} text {name}",
        gpus=gpus,
        pairs=tuple(_pairs(tables, gpus)),
    )


def _pairs(tables: Mapping[str, _Table], gpus: Sequence[snapshot.GpuFacts]) -> Iterator[snapshot.PairFacts]:
    labels = tables[_TYPE].labels
    whole = {kind: table for kind, table in tables.items() if table.labels == labels}
    for one, label in zip(gpus, labels, strict=True):
        for place, other in enumerate(gpus):
            if one is other:
                continue
            words = {kind: table.rows[label][place] for kind, table in whole.items()}
            nodes, hops = {one.place.numa_node, other.place.numa_node} - {None}, words.get(_HOPS, "")
            is_far = len(nodes) > 1 or (hops.isdecimal() and int(hops) >= _FAR_HOPS)
            path = {XGMI: XGMI, PCIE: ACROSS_SOCKETS if is_far else PCIE}.get(words[_TYPE])
            access = _ANSWERS.get(words.get(_ACCESS, ""))
            unknown = {} if access is not None else {"peer access": "amd-smi topology decides"}
            yield snapshot.PairFacts(
                source=one.device, destination=other.device, path=path, rocm=access, unknown=unknown
            )


def _text_tables(text: str, name: str) -> dict[str, _Table]:
    tables: dict[str, _Table] = {}
    current: _Table | None = None
    for number, line in enumerate(map(remove_quotes, text.split("\n")), 1):
        words = line.split() if len(line) <= limits.LONGEST_LINE else []
        kind = _TITLES.get(line.strip(" =:\r").lower())
        if kind in tables:
            raise UsageError(
                f"{name}, line {number}: a second table of the same kind",
                expected="the tables of one machine",
                reason="the text has the output of two machines, or of two commands",
                next_step="gpubench topo --from FILE, with one file per machine",
            )
        if kind is not None:
            current = tables[kind] = _Table(number)
        elif current is None or not words:
            continue
        elif not current.labels and all(map(_LABEL.fullmatch, words)):
            current.labels = tuple(words)
        elif words[0] in current.labels:
            cells, gpus = plural(len(words) - 1, "cell"), plural(len(current.labels), "GPU")
            if len(words) - 1 != len(current.labels):
                raise _wrong(name, number, f"the row of {words[0]} has {cells}, but the header has {gpus}")
            current.rows[words[0]] = tuple(words[1:])
        else:
            current = None
    return tables


def _json_tables(text: str, name: str) -> dict[str, _Table]:
    try:
        nodes = load_json(text)
        labels = tuple(node["bdf"] for node in nodes)
        kinds = [kind for kind in (_TYPE, _HOPS, _ACCESS) if all(kind in link for link in nodes[0]["links"])]
        return {
            kind: _Table(1, labels, {node["bdf"]: tuple(str(link[kind]) for link in node["links"]) for node in nodes})
            for kind in kinds
        }
    except (LookupError, TypeError, ValueError) as error:
        raise _wrong(name, 1, f"it is not complete JSON of amd-smi topology ({error})") from None


def _check(table: _Table, name: str) -> None:
    """Raise UsageError unless the table has a row for each GPU, with a cell for each GPU."""
    gpus = len(table.labels)
    if not 0 < gpus <= limits.MOST_GPUS:
        raise _wrong(name, table.line, f"the table has {gpus} GPUs, but gpubench reads 1 to {limits.MOST_GPUS}")
    missing = [label for label in table.labels if len(table.rows.get(label, ())) != gpus]
    if missing:
        raise _wrong(name, table.line, f"the table names {plural(gpus, 'GPU')}, but no complete row of {missing[0]}")


def _wrong(name: str, line: int, what: str) -> UsageError:
    return UsageError(
        f"{name}, line {line}: {what}",
        expected="the complete tables of rocm-smi --showtopo or amd-smi topology",
        reason="the text was cut off, wrapped by a terminal, or mixed with another program's output",
        next_step="rocm-smi --showtopo > topo.txt, or amd-smi topology > topo.txt",
    )
