"""UCX's and NIXL's lines in a log: the protocol tables of `UCX_PROTO_INFO=y`, and lines that explain them.

The tables of UCX 1.13 to 1.23 differ in their layout. Users paste them without borders, prefixes or process names.
"""

import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from gpubench.model.paths.ucx import KvMetrics, ProtocolRange, ProtocolTable, UcxLog
from gpubench.model.terms.units import parse_size

# "[1795845584.493850] [vm:1654 :0]   | 0..inf | zero-copy | cuda_ipc/cuda |": the host and the process ID come first
_HEAD = re.compile(
    r".*?\[(?=[^\]:]*[A-Za-z])(?P<host>[^\]\s:\[]{1,255}):(?P<pid>\d{1,10})\s*:(?P<thread>\w{1,10})\]\s*"
)
_STAMPS = re.compile(r"^(?:\s*(?:\[\d+\.\d+\]|#)\s*)+")
_CONTEXT = re.compile(r"(?:\S.{0,200} )?(?:(?:self|intra-node|inter-node) cfg#\d+|ep_cfg\[\d+\]|cfg#\d+)$")
_MEMORY = r"(?:(?:iov|generic|sgl|strided)\S* )?((?:host|cuda|rocm|ze|rdma|gaudi|unknown)[\w-]*(?:/\S+| memory)?)"
_TITLE = re.compile(
    r"((?:remote memory|tagged message|synchronous tagged|active message|stream message|rendezvous data)\b.{1,100}?)"
    rf" (?:from|into) {_MEMORY}(?: (?:to|from) {_MEMORY})?$"
)
_MESSAGE = re.compile(r"(?:synchronous )?tagged|active|stream|rendezvous")
_RANGE = re.compile(r"(\d{1,12}[KMGT]?)(?:\.\.(\d{1,12}[KMGT]?|inf))?$")
_MOST_TABLES = _MOST_SOURCES = 2**14
_LONGEST_LINE = 2**15
_MOST_RANGES = 64  # UCX selects at most about ten protocols per table


class _TableReader:
    """Reads protocol tables line by line. Tables of several threads may be interleaved."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str], ProtocolTable] = {}

    def add(self, line: str) -> Iterator[ProtocolTable]:
        """Read a line. Yield the thread's previous table when the line begins a new one."""
        process, thread, text = _split_head(line)
        if len(self._opened) >= _MOST_SOURCES and (process, thread) not in self._opened:
            return
        new = ProtocolTable(process=process)
        table = self._opened.get((process, thread), new)
        cells = [cell.strip() for cell in text.strip().removeprefix("|").split("|")]
        for cell in cells[:2]:
            if _CONTEXT.match(cell):
                if table.ranges:
                    yield table
                table = replace(new, context=cell)
            elif title := _TITLE.match(cell):
                if table.operation:  # The line with the context of this table is lost.
                    if table.ranges:
                        yield table
                    table = new
                table = replace(table, operation=title[1], local=title[2], remote=title[3] or "")
        if table.operation and (row := _parse_range(cells, table.operation)) and len(table.ranges) < _MOST_RANGES:
            table = replace(table, ranges=(*table.ranges, row))
        self._opened[process, thread] = table

    def end(self) -> Iterator[ProtocolTable]:
        """Yield the tables that no other line has ended."""
        return (table for table in self._opened.values() if table.ranges)


def _parse_range(cells: list[str], operation: str) -> ProtocolRange | None:
    if len(cells) > 3 and cells[0].isdigit() and _RANGE.match(cells[1]):
        cells = cells[1:]  # With UCX_PROTO_INFO=used, the first column counts uses.
    if len(cells) < 3 or not (sizes := _RANGE.match(cells[0])):
        return None
    first, last = sizes[1], sizes[2] or sizes[1]
    is_message = _MESSAGE.match(operation) is not None
    return ProtocolRange(parse_size(first), None if last == "inf" else parse_size(last), cells[1], cells[2], is_message)


def _split_head(line: str) -> tuple[str, str, str]:
    """Return the process and the thread that wrote a line, or empty texts, and the text after the prefix."""
    if head := _HEAD.match(line):
        return f"{head['host']}:{head['pid']}", head["thread"], line[head.end() :]
    return "", "", _STAMPS.sub("", line)


def read_tables(lines: Iterable[str]) -> Iterator[ProtocolTable]:
    """Yield the tables of all processes whose lines are in a log."""
    reader = _TableReader()
    for line in lines:
        yield from reader.add(line)
    yield from reader.end()


_VERSION = re.compile(r"\bUCX +INFO +(?:Version |UCP version is )(\d[\w.]*)")
_VARIABLES = re.compile(r"UCX_\* env variables?: (.*)")
_ASSIGNED = re.compile(r"\b(UCX_[A-Z0-9_]{2,50}|PYTORCH_(?:CUDA_)?ALLOC_CONF)[=:] ?[\"']?([^\s\"'`|*\\]{1,500})")
_MISSING = re.compile(r"transports? ((?:'\w+',?)+) (?:is|are) not available")
_EXCLUDED = re.compile(r"closing md (\w+) because it has no selected transport resources")
_NUMBER = r"(\d{1,12}(?:\.\d{1,12})?)"
_METRICS = re.compile(
    rf"KV Transfer metrics: .*?Avg xfer time \(ms\)={_NUMBER}.*?Throughput \(MB/s\)={_NUMBER}"
    rf".*?Avg number of descriptors={_NUMBER}"
)
_LINE_WORDS = ("UCX ", "UCXPY", "NIXL", "cfg#", "KV Trans")
_TABLE_WORDS = ("|", "cfg", "ucp_", "rendezvous data")
_NOTE_WORDS = ("UCX", "_ALLOC_CONF", "cuda-ipc", "namespace", "KV Trans")
_BLOCK_WORDS = (b"UCX", b"NIXL", b"ucp_", b"cfg", b"rendezvous data", b"_ALLOC_CONF", b"..inf", b"KV Trans")
"""Words of UCX's and NIXL's lines, of lines in tables, of lines that explain a path, and of blocks with any of them."""


class UcxLines:
    """Collects UCX's and NIXL's lines from the blocks of a log."""

    def __init__(self) -> None:
        self._reader = _TableReader()
        self._log = UcxLog()
        self._tables_of_file: dict[ProtocolTable, None] = {}
        self._rows = 0

    def add(self, block: bytes) -> tuple[bytes, int]:
        """Read complete lines. Return the block without lines that only a table of UCX has, and their number."""
        if not any(word in block for word in _BLOCK_WORDS):
            return block, 0
        lines = block.decode("utf-8", "surrogateescape").split("\n")
        others = [line for line in lines if "]   |" not in line and "]   +-" not in line]
        self._rows += len(lines) - len(others)
        for line in lines:
            if len(line) > _LONGEST_LINE:
                continue
            self._log.lines += any(word in line for word in _LINE_WORDS)
            if any(word in line for word in _TABLE_WORDS):
                self._keep(self._reader.add(line))
            if any(word in line for word in _NOTE_WORDS):
                self._note(line)
        return "\n".join(others).encode("utf-8", "surrogateescape"), len(lines) - len(others)

    def _keep(self, tables: Iterable[ProtocolTable]) -> None:
        for table in tables:
            if len(self._log.tables) + len(self._tables_of_file) < _MOST_TABLES:
                self._tables_of_file[table] = None

    def _note(self, line: str) -> None:
        log, process = self._log, _split_head(line)[0]
        if version := _VERSION.search(line):
            log.releases[version[1]] = None
        listed = _VARIABLES.search(line)
        for name, value in _ASSIGNED.findall(listed[1] if listed else line):
            if process in log.variables or len(log.variables) < _MOST_SOURCES:
                log.variables.setdefault(process, {})[name] = value
        if missing := _MISSING.search(line):
            log.missing.update(dict.fromkeys(missing[1].replace("'", "").split(",")))
        if excluded := _EXCLUDED.search(line):
            log.excluded[excluded[1]] = None
        if metrics := _METRICS.search(line):
            time_ms, mb_s, blocks = map(float, metrics.groups())
            log.metrics = KvMetrics(mb_s, blocks, 1e3 * time_ms / max(blocks, 1))
        log.get_disabled |= "cuda-ipc get zcopy disabled" in line
        log.pid_namespaces_differ |= "different pid namespace" in line.lower()

    def end_file(self, *, is_document: bool = False) -> None:
        """End all tables, because rows of the next file belong to other tables.

        A Markdown document also has tables as examples, which name no process.
        """
        self._keep(self._reader.end())
        self._reader = _TableReader()
        self._log.tables |= {table: None for table in self._tables_of_file if table.process or not is_document}
        self._tables_of_file.clear()

    def facts(self) -> UcxLog:
        """Return everything that was read so far."""
        self.end_file()
        self._log.lines = self._log.lines or self._rows  # A scrollback may begin in the middle of a table.
        return self._log
