"""UCX's and NIXL's lines in a log: the protocol tables of `UCX_PROTO_INFO=y`, and lines that explain them.

The tables of UCX 1.13 to 1.23 differ in their layout. Users paste them without borders, prefixes or process names.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpubench.model.paths.ucx import KvMetrics, ProtocolRange, ProtocolTable, UcxLog

# "[1795845584.493850] [vm:1654 :0]   | 0..inf | zero-copy | cuda_ipc/cuda |": the host and the process ID come first
_HEAD = re.compile(
    r".*?\[(?=[^\]:]*[A-Za-z])(?P<host>[^\]\s:\[]{1,255}):(?P<pid>\d{1,10})\s*:(?P<thread>\w{1,10})\]\s*"
)
_STAMP = re.compile(r"\s*(?:\[\d+\.\d+\]|#)\s*")
_CONTEXT = re.compile(r"(?:\S.{0,200} )?(?:(?:self|intra-node|inter-node) cfg#\d+|ep_cfg\[\d+\]|cfg#\d+)$")
_MEMORY = r"(?:(?:iov|generic|sgl|strided)\S* )?((?:host|cuda|rocm|ze|rdma|gaudi|unknown)[\w-]*(?:/\S+| memory)?)"
_TITLE = re.compile(
    r"((?:remote memory|tagged message|synchronous tagged|active message|stream message|rendezvous data)\b.{1,100}?)"
    rf" (?:from|into) {_MEMORY}(?: (?:to|from) {_MEMORY})?$"
)
_MESSAGE = re.compile(r"(?:synchronous )?tagged|active|stream|rendezvous")
_RANGE = re.compile(r"(\d{1,12}[KMGT]?)(?:\.\.(\d{1,12}[KMGT]?|inf))?$")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST_TABLES = _MOST_SOURCES = 2**14
_LONGEST_LINE = 2**15
_MOST_RANGES = 64  # UCX selects at most about ten protocols per table


class _Source(NamedTuple):
    """The process and the thread that wrote a line. Both are '' if the line does not name them."""

    process: str = ""
    thread: str = ""


class _OpenTable:
    """The lines of a thread's table that is not complete yet."""

    def __init__(self) -> None:
        self.context = self.operation = self.local = self.remote = ""
        self.ranges: list[ProtocolRange] = []

    def close(self, process: str) -> Iterator[ProtocolTable]:
        """Yield the table if it has rows, and keep no row of it."""
        if self.operation and self.ranges:
            yield ProtocolTable(process, self.context, self.operation, self.local, self.remote, tuple(self.ranges))
        self.ranges, self.operation = [], ""


class TableReader:
    """Reads protocol tables line by line. Tables of several threads may be interleaved."""

    def __init__(self) -> None:
        self._opened: dict[_Source, _OpenTable] = {}

    def add(self, source: _Source, text: str) -> Iterator[ProtocolTable]:
        """Read a line without its prefix. Yield the thread's previous table when the line begins a new one."""
        cells = [cell.strip() for cell in text.strip().removeprefix("|").split("|")]
        table = self._opened.get(source)
        if table is None:
            table = _OpenTable()
            if len(self._opened) < _MOST_SOURCES:
                self._opened[source] = table
        for cell in cells[:2]:
            if _CONTEXT.match(cell):
                yield from table.close(source.process)
                table.context = cell
            elif title := _TITLE.match(cell):
                if table.operation:  # The line with the context of this table is lost.
                    yield from table.close(source.process)
                    table.context = ""
                table.operation, table.local, table.remote = title[1], title[2], title[3] or ""
        if table.operation and (row := _parse_range(cells, table.operation)) and len(table.ranges) < _MOST_RANGES:
            table.ranges.append(row)

    def end(self) -> Iterator[ProtocolTable]:
        """Yield the tables that no other line has ended."""
        for source, table in self._opened.items():
            yield from table.close(source.process)


def _parse_range(cells: list[str], operation: str) -> ProtocolRange | None:
    """Return the row of a table, with UCX_PROTO_INFO=used after its first column."""
    if len(cells) > 3 and cells[0].isdigit() and _RANGE.match(cells[1]):
        cells = cells[1:]
    if len(cells) < 3 or not (sizes := _RANGE.match(cells[0])):
        return None
    first, last = sizes[1], sizes[2] or sizes[1]
    is_message = _MESSAGE.match(operation) is not None
    return ProtocolRange(_bytes(first), None if last == "inf" else _bytes(last), cells[1], cells[2], is_message)


def _bytes(text: str) -> int:
    return int(text.rstrip("KMGT")) * _UNITS.get(text[-1], 1)


def _split_head(line: str) -> tuple[_Source, str]:
    """Return who wrote a line, and the text after the prefix."""
    if head := _HEAD.match(line):
        return _Source(f"{head['host']}:{head['pid']}", head["thread"]), line[head.end() :]
    while stamp := _STAMP.match(line):
        line = line[stamp.end() :]
    return _Source(), line


def read_tables(lines: Iterable[str]) -> Iterator[ProtocolTable]:
    """Yield the tables of all processes whose lines are in a log."""
    reader = TableReader()
    for line in lines:
        yield from reader.add(*_split_head(line))
    yield from reader.end()


_VERSION = re.compile(r"\bUCX +INFO +(?:Version |UCP version is )(\d[\w.]*)")
_VARIABLES = re.compile(r"UCX_\* env variables?: (.*)")
_ASSIGNED = re.compile(r"\b(UCX_[A-Z0-9_]{2,50}|PYTORCH_(?:CUDA_)?ALLOC_CONF)[=:] ?[\"']?([^\s\"'`|*\\]{1,500})")
_MISSING = re.compile(
    r"transports? ((?:'\w+',?)+) (?:is|are) not available(?:, please use one or more of: ([\w, .]+))?"
)
_EXCLUDED = re.compile(r"closing md (\w+) because it has no selected transport resources")
_NUMBER = r"(\d{1,12}(?:\.\d{1,12})?)"
_METRICS = re.compile(
    rf"KV Transfer metrics: .*?Avg xfer time \(ms\)={_NUMBER}.*?Throughput \(MB/s\)={_NUMBER}"
    rf".*?Avg number of descriptors={_NUMBER}"
)
_GET_DISABLED = "cuda-ipc get zcopy disabled"
_PID_NAMESPACE = re.compile(r"different (?:PID|pid) namespace")
_WORDS = (
    b"UCX",
    b"NIXL",
    b"ucp_",
    b"cfg#",
    b"ep_cfg[",
    b"rendezvous data",
    b"_ALLOC_CONF",
    b"zero-copy",
    b"..inf",
    b"KV Tr",
)
"""A block without these words has no line of UCX or NIXL."""


class UcxLines:
    """Collects UCX's and NIXL's lines from the blocks of a log."""

    def __init__(self) -> None:
        self._reader = TableReader()
        self._tables, self._tables_of_file = dict[ProtocolTable, None](), dict[ProtocolTable, None]()
        self._versions: dict[str, dict[str, None]] = {}
        self._variables: dict[str, dict[str, str]] = {}
        self._available, self._missing, self._excluded = dict[str, None](), dict[str, None](), dict[str, None]()
        self._get_disabled = self._namespaces_differ = False
        self._lines = 0
        self._metrics: KvMetrics | None = None

    def add(self, block: bytes) -> tuple[bytes, int]:
        """Read complete lines. Return the block without lines that only a table of UCX has, and their number."""
        if not any(word in block for word in _WORDS):
            return block, 0
        others, count = list[str](), 0
        for line in block.decode("utf-8", "surrogateescape").split("\n"):
            is_row = "]   |" in line or "]   +-" in line
            count += is_row
            if not is_row:
                others.append(line)
            if len(line) > _LONGEST_LINE or "]   +-" in line:
                continue
            self._lines += "UCX " in line or "UCXPY" in line or "NIXL" in line or "cfg#" in line or "KV Trans" in line
            if is_row or "|" in line or "cfg" in line or "ucp_" in line or "rendezvous data" in line:
                self._keep(self._reader.add(*_split_head(line)))
            if "UCX" in line or "_ALLOC_CONF" in line or "cuda-ipc" in line or "namespace" in line:
                self._note(line)
            if "KV Transfer metrics" in line and (found := _METRICS.search(line)):
                time_ms, mb_s, blocks = map(float, found.groups())
                self._metrics = KvMetrics(mb_s, blocks, 1e3 * time_ms / max(blocks, 1))
        return "\n".join(others).encode("utf-8", "surrogateescape"), count

    def _keep(self, tables: Iterable[ProtocolTable]) -> None:
        for table in tables:
            if len(self._tables) + len(self._tables_of_file) < _MOST_TABLES:
                self._tables_of_file[table] = None

    def _note(self, line: str) -> None:
        process = _split_head(line)[0].process
        if len(self._variables) + len(self._versions) > _MOST_SOURCES:
            return
        if version := _VERSION.search(line):
            self._versions.setdefault(process, {})[version[1]] = None
        if "ALLOC_CONF" in line or "UCX_" in line:
            listed = _VARIABLES.search(line)
            for name, value in _ASSIGNED.findall(listed[1] if listed else line):
                self._variables.setdefault(process, {})[name] = value
        if missing := _MISSING.search(line):
            self._missing.update(dict.fromkeys(missing[1].replace("'", "").split(",")))
            self._available.update(dict.fromkeys((missing[2] or "").replace(" ", "").split(",")))
        if excluded := _EXCLUDED.search(line):
            self._excluded[excluded[1]] = None
        self._get_disabled |= _GET_DISABLED in line
        self._namespaces_differ |= _PID_NAMESPACE.search(line) is not None

    def end_file(self, *, is_document: bool = False) -> None:
        """End all tables, because rows of the next file belong to other tables.

        A Markdown document also has tables as examples, which name no process.
        """
        self._keep(self._reader.end())
        self._reader = TableReader()
        self._tables |= {table: None for table in self._tables_of_file if table.process or not is_document}
        self._tables_of_file.clear()

    def facts(self) -> UcxLog:
        """Return everything that was read so far."""
        self.end_file()
        return UcxLog(
            tables=tuple(self._tables),
            versions={process: tuple(found) for process, found in self._versions.items()},
            variables=self._variables,
            available=tuple(filter(None, self._available)),
            missing=tuple(self._missing),
            excluded=tuple(self._excluded),
            get_disabled=self._get_disabled,
            pid_namespaces_differ=self._namespaces_differ,
            lines=self._lines,
            metrics=self._metrics,
        )
