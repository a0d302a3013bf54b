"""Reads the matrices of nvbandwidth 0.2 to 0.10, as text or JSON (-j), for copies between GPUs and with host
memory.

The formats are in output.cpp, json_output.cpp and testcases_*.cpp of nvbandwidth. The arrow in a title, such as
"GPU(row) <- GPU(column)", is the direction of the data. The name of the test shows which GPU starts the copy, and which
engine it uses. The copy size is 512 MiB by default, or -b (in MiB) in the command line above the output.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.results.compare import HOST
from gpubench.model.results.report import PairRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile, RunPlace, left_out_remark
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.units import shorten
from gpubench.readers.documents import load_json, output_lines
from gpubench.readers.transfers import UNKNOWN_NODE, transfer_row

_DEFAULT_BYTES = 512 * 2**20
_MOST_GPUS = 1024

_JSON = re.compile(r'^\s*\{\s*"nvbandwidth"\s*:\s*\{', re.MULTILINE)
_VERSION = re.compile(r"nvbandwidth Version:? v?(?P<version>[\w.]{1,20})")
_DEVICE = re.compile(
    r"(?:Process \d{1,5} \((?P<host>[\w.-]{1,255})\): )?[Dd]evice (?P<index>\d{1,4}): (?P<name>\S.{0,80}?)"
    r"(?: \((?P<bus>[0-9a-fA-F:.]{7,20})\))?\s*$"
)
_HOST_LINE = re.compile(r"[\w.-]{1,255}")
_DRIVER = re.compile(r"^Driver Version: (?P<version>[\d.]{1,20})\s*$")
_COMMAND = re.compile(r"\bnvbandwidth\s(?P<options>.*)$")
_BUFFER = re.compile(r"(?:^|\s)(?:-b|--bufferSize)[ =]?(?P<mib>\d{1,6})(?!\S)")
_RUNNING = re.compile(r"\bRunning (?P<name>\w{1,80})\.")
_TITLE = re.compile(
    r"memcpy (?P<engine>CE|SM) (?P<row>[CG]PU)\(row\) (?P<arrow><->|->|<-) (?P<column>[CG]PU)\(column\)"
    r"(?: (?P<part>\w{1,10}))? bandwidth \(GB/s\)"
)
_INDICES = re.compile(r"\s*\d{1,4}(?:\s+\d{1,4})*\s*")
_VALUE = re.compile(r"N/A|\d{1,9}(?:\.\d{1,6})?")
_LIKE_A_VALUE = r"(?:N/A|-?\d{1,9}(?:\.\d{1,6})?|-?(?:nan|inf))"
_ROW = re.compile(rf"\s*(?P<row>\d{{1,4}})\s+(?P<values>{_LIKE_A_VALUE}(?:\s+{_LIKE_A_VALUE})*)\s*")
_SUM = re.compile(r"^\s*SUM \w{1,100} (?P<sum>\d{1,12}(?:\.\d{1,6})?)\s*$")
_SUM_OF_COPIES = re.compile(
    r"^\W*SUM \w*(?:_memcpy_|_to_|latency|bidirectional)\w* +(?P<sum>\d{1,12}(?:\.\d{1,6})?)\s*$", re.MULTILINE
)
_MOST_ROUNDING = 1e-3  # Tolerance for a printed sum, because values have two decimals
_BY_ARROW = {"->": "read", "<-": "write"}
_PAIRS = re.compile(
    r"(?:multinode_)?device_to_device_(?P<both>bidirectional_)?memcpy_(?P<way>read|write)_(?P<engine>ce|sm)"
)
_WITH_HOST = re.compile(r"(?:multinode_)?(?:host_to_device|device_to_host)_memcpy_ce")


def recognises(text: str) -> bool:
    """Return True if a text is nvbandwidth's JSON, or contains a matrix title or sum of nvbandwidth."""
    return any(sign.search(text) for sign in (_JSON, _TITLE, _SUM_OF_COPIES))


def is_json(text: str) -> bool:
    """Return True if a text starts like nvbandwidth's JSON."""
    return _JSON.match(text) is not None


def read(text: str, name: str) -> ResultFile:
    """Read all matrices of copies between GPUs, or with pinned host memory.

    Raises UsageError if there are none, or if the text is damaged.
    """
    parser, json = _MatrixParser(), _JSON.search(text)
    if json:
        _take_json(parser, text[json.start() : text.rfind("}") + 1], name)
    else:
        for number, line in output_lines(text, name):
            parser.line(line, number)
        parser.end()
    if not parser.rows and not (json or _TITLE.search(text)):
        sums = [" ".join(found[0].split()) for found in _SUM_OF_COPIES.finditer(text)]
        raise UsageError(
            f"{name} has only the sums of nvbandwidth: {shorten(sums, 2)}",
            expected="its matrices, with the lines 'Device 0: ...' above them",
            reason="grep SUM removed them (a sum names no GPU and hides a slow pair)",
            next_step="nvbandwidth > nvbandwidth.txt; gpubench report nvbandwidth.txt",
        )
    if not parser.rows:
        left_out = ", ".join(parser.left_out)
        raise UsageError(
            f"{name} has no nvbandwidth matrix that gpubench can read" + (f", but {left_out}" if left_out else ""),
            expected="device_to_device_memcpy_read_ce, _write_ce, host_to_device_memcpy_ce and similar",
            reason="these tests were not run, or waived",
            next_step="nvbandwidth -p device_to_device_memcpy host_to_device_memcpy_ce device_to_host_memcpy_ce",
        )
    remarks = [f"left out: {', '.join(parser.left_out)}"] if parser.left_out else []
    remarks += [left_out_remark(parser.unread)] if parser.unread else []
    return ResultFile(
        name=name,
        kind="nvbandwidth JSON" if json else "nvbandwidth text",
        circumstances=FileCircumstances(
            tool=" ".join(filter(None, ("nvbandwidth", parser.version))),
            hosts=tuple(dict.fromkeys(filter(None, (device.host for device in parser.devices.values())))),
            gpus=tuple(device.name for _, device in sorted(parser.devices.items())),
            libraries={"driver": parser.driver} if parser.driver else {},
        ),
        pairs=tuple(parser.rows.values()),
        complete=not parser.unread,
        remarks=tuple(remarks),
        left_out=tuple(parser.unread),
        runs=tuple(parser.runs),
    )


class _NamedGpu(Struct, frozen=True):
    host: str
    name: str
    bus_id: str | None


class _OpenMatrix(Struct):
    test: str
    title: re.Match[str]
    line: int
    columns: tuple[int, ...] = ()
    rows: set[int] = field(default_factory=set)
    sum_gb_s: float = 0.0


class _MatrixParser(Struct):
    version: str = ""
    driver: str = ""
    devices: dict[int, _NamedGpu] = field(default_factory=dict)
    rows: dict[tuple[object, ...], PairRow] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    runs: list[RunPlace] = field(default_factory=list)
    size_bytes: int = _DEFAULT_BYTES
    _test: str = ""
    _announced: int = 0
    _host: str = ""
    _matrix: _OpenMatrix | None = None
    _sum_gb_s: float | None = None

    def line(self, text: str, number: int) -> None:
        if self._matrix is not None and self._values(self._matrix, text, number):
            return
        if found := _TITLE.search(text):
            self._begin_matrix(found, number)
        elif found := _RUNNING.search(text):
            self.end()
            self._test, self._announced = found["name"], number
            if not (_PAIRS.fullmatch(self._test) or _WITH_HOST.fullmatch(self._test)):
                self.left_out[self._test], self._announced = None, 0
        elif found := _SUM.search(text):
            self._check_sum(float(found["sum"]), number)
        else:
            self._circumstance(text)

    def _circumstance(self, text: str) -> None:
        if found := _DEVICE.search(text):
            self.device(int(found["index"]), found)
        elif found := _VERSION.search(text):
            self.version = found["version"]
        elif found := _DRIVER.search(text):
            self.driver = found["version"]
        elif found := _COMMAND.search(text):
            buffer = _BUFFER.search(found["options"])
            self.size_bytes = int(buffer["mib"]) * 2**20 if buffer and int(buffer["mib"]) else _DEFAULT_BYTES
        elif _HOST_LINE.fullmatch(text.strip()):
            self._host = text.strip()

    def end(self) -> None:
        """End the current matrix. If the current test printed no matrix, record that."""
        self._end_matrix()
        if self._announced:
            self.unread.append(f"line {self._announced} ({self._test}): no matrix")
        self._test, self._announced, self._sum_gb_s = "", 0, None

    def _begin_matrix(self, title: re.Match[str], number: int) -> None:
        self._end_matrix()
        if not self._test and title["row"] == title["column"] == "GPU" and title["arrow"] != "<->":
            # If the line with the test's name is missing, the arrow shows whether the copies are reads or writes.
            self._test = f"device_to_device_memcpy_{_BY_ARROW[title['arrow']]}_{title['engine'].lower()}"
        if self._announced or not self.runs:
            hosts = tuple(dict.fromkeys(device.host for device in self.devices.values()))
            names = tuple(device.name for _, device in sorted(self.devices.items()))
            self.runs.append(RunPlace(self._announced or number, (self._test, self.size_bytes, 1), (hosts, names)))
        self._announced = 0
        self._matrix = _OpenMatrix(self._test, title, number)

    def _end_matrix(self) -> None:
        matrix, self._matrix = self._matrix, None
        if matrix is None:
            return
        self._sum_gb_s = matrix.sum_gb_s
        is_square = matrix.title["row"] == matrix.title["column"]
        missing = [f"GPU{gpu}" for gpu in matrix.columns if is_square and gpu not in matrix.rows]
        if missing:
            of = f"of {len(matrix.columns)} rows, without {shorten(missing)}"
            self.unread.append(f"line {matrix.line} ({matrix.test}): {len(matrix.columns) - len(missing)} {of}")

    def _check_sum(self, said: float, number: int) -> None:
        self._end_matrix()
        summed, self._sum_gb_s = self._sum_gb_s, None
        if summed is not None and abs(said - summed) > _MOST_ROUNDING * max(said, summed, 1.0):
            self.unread.append(f"line {number}: SUM is {said:g}, but the sum of the values above is {summed:g}")

    def device(self, index: int, found: re.Match[str]) -> None:
        bus = found["bus"] or ""
        whole = normalize_bus_id(bus if "." in bus else f"{bus}.0") if bus.count(":") == 2 else None
        # On several nodes, each process counts its devices from 0
        place = len(self.devices) if found["host"] else index
        if place < _MOST_GPUS:
            self.devices[place] = _NamedGpu(found["host"] or self._host, found["name"].strip(), whole)

    def _values(self, matrix: _OpenMatrix, text: str, number: int) -> bool:
        if not matrix.columns:
            if not _INDICES.fullmatch(text):
                self._matrix = None
                return False
            matrix.columns = tuple(map(int, text.split()))
            return True
        found = _ROW.fullmatch(text)
        if found is None:
            self._end_matrix()
            return False
        values, row = found["values"].split(), int(found["row"])
        if len(values) != len(matrix.columns) or not all(map(_VALUE.fullmatch, values)):
            self.unread.append(f"line {number} ({matrix.test}): no valid row of GPU{row}")
            matrix.rows.add(row)
            return True
        matrix.rows.add(row)
        figures = [
            (column, float(value)) for column, value in zip(matrix.columns, values, strict=True) if value != "N/A"
        ]
        matrix.sum_gb_s += sum(value for _, value in figures)
        if matrix.title["row"] == "CPU" and row:
            self.unread.append(f"line {number} ({matrix.test}): a second row of the CPU")
            return True
        for column, value in figures:
            self.cell(matrix.test, matrix.title, row, column, value)
        return True

    def cell(self, test: str, title: re.Match[str], row: int, column: int, gb_s: float) -> None:
        """Add a bandwidth. For bidirectional tests, only the sum is kept. For host memory, only the copy engine's
        value is.
        """
        between = _PAIRS.fullmatch(test)
        if gb_s <= 0 or max(row, column) >= _MOST_GPUS:
            return
        if between is not None and row != column:
            if between["both"] and title["part"] not in (None, "Total"):
                return
            ends = (column, row) if title["arrow"] == "<-" else (row, column)
            direction = "both" if between["both"] else between["way"]
            self._keep(f"GPU{ends[0]}", f"GPU{ends[1]}", ends, direction, between["engine"], gb_s)
        elif between is None and _WITH_HOST.fullmatch(test):
            to_gpu = test.endswith("host_to_device_memcpy_ce")
            names = (HOST, f"GPU{column}") if to_gpu else (f"GPU{column}", HOST)
            self._keep(*names, (column, column), "read" if to_gpu else "write", "ce", gb_s)

    def _keep(
        self, source: str, destination: str, ends: tuple[int, int], direction: str, engine: str, gb_s: float
    ) -> None:
        known = [self.devices.get(end, _NamedGpu(self._host, "", None)) for end in ends]
        with_host = HOST in (source, destination)
        note = HostMemory.PINNED.full_name if with_host else None
        row = transfer_row(
            (source, destination), engine, self.size_bytes, gb_s, direction=direction, scope="process", note=note
        )
        self.rows[source, destination, direction, engine, self.size_bytes] = replace(
            row,
            source_bus_id=None if source == HOST else known[0].bus_id,
            destination_bus_id=None if destination == HOST else known[1].bus_id,
            source_node=known[0].host or UNKNOWN_NODE,
            destination_node=known[1].host or UNKNOWN_NODE,
            peer=None if with_host else "on",
        )


def _take_json(parser: _MatrixParser, text: str, name: str) -> None:
    try:
        document = load_json(text)["nvbandwidth"]
        parser.version = str(document.get("version", "")).removeprefix("v")
        parser.driver = str(document.get("Driver Version", ""))
        for test in document.get("testcases", ()):
            _take_test(parser, test)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{name} is not JSON of nvbandwidth: {error}",
            expected="the output of nvbandwidth -j",
            reason="the run was killed, or the file was edited by hand",
        ) from None


def _take_test(parser: _MatrixParser, test: Mapping[str, Any]) -> None:
    test_name, matrix = str(test["name"]), test.get("bandwidth_matrix")
    title = _TITLE.search(str(test.get("bandwidth_description", "")))
    if matrix is None or title is None or not (_PAIRS.fullmatch(test_name) or _WITH_HOST.fullmatch(test_name)):
        if str(test.get("status", "")).lower().startswith("error") or test.get("error"):
            parser.unread.append(f"{test_name}: {test.get('error') or test['status']}")
        parser.left_out[test_name] = None
        return
    if title["row"] == title["column"] and len(matrix) < len(matrix[0]):
        parser.unread.append(f"{test_name}: {len(matrix)} of {len(matrix[0])} rows")
    for row, column, value in _cells(matrix):
        parser.cell(test_name, title, row, column, value)


def _cells(matrix: Sequence[Sequence[str]]) -> Iterator[tuple[int, int, float]]:
    columns = len(matrix[0]) if matrix else 0
    whole = matrix[-columns:] if columns and len(matrix) > columns else matrix
    for row, values in enumerate(whole):
        for column, value in enumerate(values):
            if value != "N/A":
                yield row, column, float(value)
