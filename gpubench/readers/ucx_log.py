"""UCX's protocol tables in a log, as `UCX_PROTO_INFO=y` prints them."""

import re
from collections.abc import Iterable, Iterator

from gpubench.model.paths.ucx import ProtocolRange, ProtocolTable

# "[1795845584.493850] [vm:1654 :0]   | 0..inf | zero-copy | cuda_ipc/cuda |": the host and the process ID come first
_LINE = re.compile(r"(?:.*?\[(?P<host>[^\]\s:]+):(?P<pid>\d+)\s*:\d+\])?[^|+]*(?P<table>[|+].*[|+])\s*$")
_CONTEXT = re.compile(r"\S.* (?:self|intra-node|inter-node) cfg#\d+$|\S.* cfg#\d+$")
_TWO_ENDS = re.compile(r"(?P<operation>.+?) (?:from|into) (?P<local>\S+(?: memory)?)(?: (?:to|from) (?P<remote>\S+))?$")
_RANGE = re.compile(r"(?P<first>\d+[KMGT]?)(?:\.\.(?P<last>\d+[KMGT]?|inf))?$")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class _OpenTable:
    """The lines of a table that is not complete yet."""

    def __init__(self, process: str, context: str) -> None:
        self.process, self.context = process, context
        self.operation = self.local = self.remote = ""
        self.ranges: list[ProtocolRange] = []

    def close(self) -> Iterator[ProtocolTable]:
        if self.operation and self.ranges:
            yield ProtocolTable(self.process, self.context, self.operation, self.local, self.remote, tuple(self.ranges))


def read_tables(lines: Iterable[str]) -> Iterator[ProtocolTable]:
    """Yield the tables of all processes whose lines are in a log. Tables of several processes may be interleaved."""
    opened: dict[str, _OpenTable] = {}
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        process = f"{found['host']}:{found['pid']}" if found["host"] else ""
        cells = [cell.strip() for cell in found["table"].strip("|+").split("|")]
        table = opened.get(process)
        if len(cells) == 1 and _CONTEXT.fullmatch(cells[0]):
            if table is not None:
                yield from table.close()
            opened[process] = _OpenTable(process, cells[0])
        elif table is not None and len(cells) == 1 and not table.operation and (ends := _TWO_ENDS.fullmatch(cells[0])):
            table.operation, table.local, table.remote = ends["operation"], ends["local"], ends["remote"] or ""
        elif table is not None and len(cells) == 3 and (sizes := _RANGE.fullmatch(cells[0])):
            first, last = sizes["first"], sizes["last"] or sizes["first"]
            row = ProtocolRange(_bytes(first), None if last == "inf" else _bytes(last), cells[1], cells[2])
            table.ranges.append(row)
    for table in opened.values():
        yield from table.close()


def _bytes(text: str) -> int:
    return int(text.rstrip("KMGT")) * _UNITS.get(text[-1], 1)
