"""Reads the text output of nccl-tests, with several runs, launcher tags, NCCL's log lines among the rows, and
truncation.

Before 2.11, programs printed only the columns that they needed. A collective without a root had no root column, and one
that only moves data had no redop. 1.x printed milliseconds. rccl-tests can omit one placement (-O).
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.results.result_file import NO_USER_FACTS, ResultFile, UserFacts
from gpubench.model.terms.operation import Placement, nccl_version
from gpubench.readers import limits
from gpubench.readers.documents import prefix_shape, remove_quotes, split_by_tag, split_lines, strip_prefix
from gpubench.readers.results.nccl_tests import table
from gpubench.readers.results.nccl_tests.cut import CutColumns
from gpubench.readers.results.nccl_tests.run import NcclTestsRun, result_file

HEADER = re.compile(r"(?:^|[#\s])(?P<size>size|bytes)\s+(?:count|N)\s+type\s(?P<others>.*)")
ROW = re.compile(
    r"(?<![\w.])(?P<size>\d{1,18})\s+(?P<count>\d{1,18})\s+"
    rf"(?P<type>{'|'.join(sorted(table.ELEMENT_TYPES, key=len, reverse=True))})(?P<rest>(?:\s.*)?)$"
)
_VALUE = re.compile(r"(?:\d{1,15}(?:\.\d{1,6})?(?:e[+-]?\d{1,3})?|N/A|-?inf|-?nan)\*?")
"""A value. rccl-tests appends an asterisk to an error above its threshold."""

_RANK_TAG = re.compile(r"\[\d{1,7}\]")  # Line prefix from MPICH's -prepend-rank and Intel MPI's -l
_ROOT = re.compile(r"-1|\d{1,7}")
_TIMESTAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_US_PER_MS = 1e3
_MOST_SHOWN = 40  # Most characters of an unreadable row in error messages
# Time, algbw, busbw and #wrong. Option -I adds minimum, maximum, 99th percentile and variation
_FIGURES, _STATISTICS = 4, 4


class Columns(Struct, frozen=True, kw_only=True):
    """The columns of a table.

    `largest_error` is true if the last column is the largest error instead of the number of wrong elements. An error
    can be due to rounding.
    """

    reduction: bool = True
    root: bool = True
    placements: tuple[Placement, ...] = tuple(Placement)
    statistics: bool = False
    milliseconds: bool = False
    cpu_time: bool = False
    largest_error: bool = False

    @classmethod
    def of(cls, header: re.Match[str], line_above: str) -> Self:
        """Return the columns of a header. If there is only one placement, the line above the header shows which one."""
        words = header["others"].split()
        only = Placement.OUT_OF_PLACE if "out-of-place" in line_above else Placement.IN_PLACE
        return cls(
            reduction="redop" in words or "op" in words,
            root="root" in words,
            placements=tuple(Placement) if words.count("time") + words.count("cputime") > 1 else (only,),
            statistics="i_min" in words,
            milliseconds=header["size"] == "bytes",
            cpu_time="cputime" in words,
            largest_error="#wrong" not in words,
        )

    @classmethod
    def guessed(cls, row: re.Match[str]) -> Self:
        """Guess the columns of a row without a header: whether it has a root, and whether it ends with the largest
        error.
        """
        words = _words(row["rest"])
        reduction = bool(words) and words[0] in table.REDUCTIONS
        words = words[reduction:]
        has_root = len(words) % _FIGURES == 1 and _ROOT.fullmatch(words[0]) is not None
        last = words[has_root:][_FIGURES - 1 :: _FIGURES]
        return cls(reduction=reduction, root=has_root or not words, largest_error=any("e" in word for word in last))

    @property
    def values_per_placement(self) -> int:
        return _FIGURES + _STATISTICS * self.statistics


class TableRow:
    """A row that is still being read, because other output may interrupt it."""

    def __init__(self, found: re.Match[str], columns: Columns, number: int) -> None:
        self.number = number
        self._cells = found.groupdict()
        self._columns = columns
        self._values: list[str] = []
        self._prefix = prefix_shape(found.string[: found.start()])
        words = _words(found["rest"])
        self._cells["redop"] = words.pop(0) if columns.reduction and words and words[0] in table.REDUCTIONS else "none"
        self._cells["root"] = -1
        self.is_damaged = columns.root and not (words and _ROOT.fullmatch(words[0]))
        if columns.root and not self.is_damaged:
            self._cells["root"] = words.pop(0)
        self._take(words)

    @property
    def is_whole(self) -> bool:
        """True if the row has all its values."""
        return len(self._values) == self._columns.values_per_placement * len(self._columns.placements)

    def goes_on(self, text: str) -> bool:
        """Add a line that continues this row. Return False if it has another prefix, or anything else than values."""
        values = strip_prefix(_TIMESTAMP.sub("", text), self._prefix)
        if not values or not all(map(_VALUE.fullmatch, values)):
            return False
        self._take(values)
        return True

    def _take(self, values: Sequence[str]) -> None:
        self._values += values
        most = self._columns.values_per_placement * len(self._columns.placements)
        self.is_damaged = self.is_damaged or len(self._values) > most or not all(map(_VALUE.fullmatch, values))

    def fault(self) -> str:
        """Return the reason why the row is skipped, with its line number and size."""
        most = self._columns.values_per_placement * len(self._columns.placements)
        odd = [
            value
            for place, value in enumerate(self._values)
            if not _VALUE.fullmatch(value)
            or not _is_possible(value, is_time=place % self._columns.values_per_placement == 0)
        ]
        why = f"{odd[0]!r} is not a valid value" if odd else f"{len(self._values)} of {most} values"
        return f"line {self.number} ({self._cells['size']} bytes): {why}"

    def line(self, iterations: int | None) -> table.OutputLine | None:
        """Return the complete row. None if nothing was timed or a value is invalid, such as a time of zero."""
        placed = tuple(self._placed(iterations))
        return self._line_of(placed) if len(placed) == len(self._columns.placements) else None

    def first_half(self, iterations: int | None) -> table.OutputLine | None:
        """Return the row with only its first placement. None unless exactly the values of one placement were
        printed.
        """
        whole = not self.is_damaged and len(self._values) == self._columns.values_per_placement
        placed = tuple(self._placed(iterations)) if whole else ()
        return self._line_of(placed) if placed else None

    def _line_of(self, placed: tuple[table.Placed, ...]) -> table.OutputLine:
        line = table.OutputLine.of(self._cells, placed)
        return replace(line, names_reduction=self._columns.reduction, names_root=self._columns.root)

    def _placed(self, iterations: int | None) -> Iterator[table.Placed]:
        count, factor = self._columns.values_per_placement, _US_PER_MS if self._columns.milliseconds else 1.0
        for number, placement in enumerate(self._columns.placements):
            own = [_number(value) for value in self._values[number * count : (number + 1) * count]]
            if not own:
                return
            time, algbw, busbw, wrong, *statistics = own
            if time is None or algbw is None or busbw is None or time <= 0:
                return
            if wrong is not None and not self._columns.largest_error and not wrong.is_integer():
                # The number of wrong elements is an integer, so this value belongs to another column.
                return
            yield table.Placed(
                placement=placement,
                time_us=time * factor,
                algbw_gb_s=algbw,
                busbw_gb_s=busbw,
                wrong=None if wrong is None or (wrong and self._columns.largest_error) else int(wrong),
                per_iteration=table.PerIteration(p99_us=statistics[2], cv_percent=statistics[3], samples=iterations)
                if statistics
                else None,
            )


def wrong_data_in(line: str) -> str | None:
    """Return a row that counts wrong elements, without its line prefix. None for all other lines.

    The header is not needed, so this also works for pasted and shortened tables. Before 2.12, the column was the
    largest error. A value of at least 1 exceeds nccl-tests' tolerance for every type.
    """
    found = ROW.search(line)
    if found is None:
        return None
    words = _words(found["rest"])
    if words and words[0] in table.REDUCTIONS:
        del words[0]
    if len(words) % _FIGURES == 1 and _ROOT.fullmatch(words[0]):
        del words[0]
    count = _FIGURES + _STATISTICS if len(words) == 2 * (_FIGURES + _STATISTICS) else _FIGURES
    if len(words) not in (count, 2 * count) or not all(map(_VALUE.fullmatch, words)):
        return None
    counts = [_number(word) for word in words[_FIGURES - 1 :: count]]
    wrong = any(count is not None and count >= 1 for count in counts)
    return " ".join(line[found.start() :].split()) if wrong else None


def _words(text: str) -> list[str]:
    return _TIMESTAMP.sub("", _RANK_TAG.sub(" ", text)).split()


def _number(text: str) -> float | None:
    plain = text.rstrip("*")
    value = None if plain == "N/A" else float(plain)
    return value if value is not None and math.isfinite(value) else None


def _is_possible(text: str, *, is_time: bool) -> bool:
    """Return True for a valid value. A bandwidth may be rounded down to 0.00, and N/A means that data were not
    verified.
    """
    number = _number(text)
    return text == "N/A" if number is None else number > 0 or (number == 0 and not is_time)


TORN = "\ufffd"  # Replaces digits that may belong to a row or to a host name, so that the row counts as damaged
_NCCL_LINE = re.compile(
    r"(?:\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[\d.]*\]? )?(?P<glued>(?<![\w.-])[\w.-]{0,280}):\d{1,10}:\d{1,10} "
    r"\[-?\d{1,9}\](?: \S+:\d{1,9}(?: \([^()]*\))?)? NCCL [A-Z]+ .*"
)
_CELL = re.compile(rf"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|N/A|{'|'.join((*table.REDUCTIONS, *table.ELEMENT_TYPES))}")


def strip_nccl(text: str, hosts: Collection[str]) -> str:
    """Remove a log line that NCCL wrote into a row. `hosts` helps to separate the row's digits from a host name."""
    if " NCCL " not in text:
        return text  # Fast path, because most lines contain nothing from NCCL
    return _NCCL_LINE.sub(lambda found: _row_prefix(found["glued"], text[: found.start()], hosts), text)


def _row_prefix(glued: str, before: str, hosts: Collection[str]) -> str:
    """Return the start of a word that is a cell of a row. NCCL printed a host name directly after the cell."""
    for host in sorted(hosts, key=len, reverse=True):
        cell = glued.removesuffix(host)
        if cell != glued and (not cell or _CELL.fullmatch(cell)):
            return cell
    return TORN if before.strip() and _CELL.match(glued) else ""


_SETTINGS = re.compile(
    r"nThreads?:? (?P<threads>\d{1,5}) nGpus:? (?P<gpus>\d{1,5}) (?:nRanks: (?P<ranks_a_gpu>\d{1,5}) )?minBytes:? \d+ "
    r"maxBytes:? \d+ step: \d+\(\w+\) warmup *[iI]ters: (?P<warmup>\d{1,9}) +iters: (?P<iterations>\d{1,9})"
    r"(?: agg +iters: (?P<aggregated>\d{1,9}))? validation: (?P<validation>\d{1,9})(?: graph: (?P<graph>\d{1,9}))?"
)
_DEVICE = re.compile(
    r"(?:^|[#\s])Rank\s+(?P<rank>\d{1,7}) (?:Group\s+(?P<group>\d{1,7}) )?(?:Pid\s+(?P<pid>\d{1,10}) )?on\s+"
    r"(?P<host>\S{1,255}) device\s+(?P<index>\d{1,5}) \[(?P<bus>[0-9a-fA-Fx:.]{1,20})\]\s+(?P<name>\S.*)"
)
_VERSION = re.compile(r"\bnccl-tests version (?P<version>\S{1,40}) .*nccl-library=(?P<nccl>\d{4,6})")
_RCCL_VERSION = re.compile(r"rccl-tests: Version (?P<version>\S{1,80})")
_LIBRARY = re.compile(r"\b(?P<name>[NR]CCL) version\s*:?\s*(?P<version>\d+\.\d+(?:\.\d+)?)")
_STARTING = re.compile(r"\bCollective test starting: (?P<name>\w+?)_perf")
_CONCLUDED = re.compile(r"\bCollective test concluded: (?P<name>\w+?)_perf")
_COMMAND = re.compile(r"(?<!\w)(?P<name>[a-z_]+?)_perf(?:_mpi)?(?P<options>\s.*|$)")
_AVERAGE = re.compile(r"\s(?:-a|--average)[ =]?([0-3])(?!\S)")
_SETTING = re.compile(r"(?:^|\s)(?P<name>NCCL_[A-Z0-9_]{2,60})=(?P<value>[^\s\\]{0,200})")
"""A variable that is set on a command line, by export, or by mpirun's -x."""

_SKIPPED = re.compile(r"\bsummary skips first (?P<count>\d{1,9}) iterations")  # Option -K, which needs -I
_OUT_OF_BOUNDS = re.compile(r"\bOut of bounds values\s*: *(?P<count>\d{1,18})\b")
_ELLIPSIS = re.compile(
    r"[#\s]*(?:\.{2,}|…|\W*(?:snip|truncated|omitted|elided)\W*|(?:[\[(<]\s*)?(?:\.{2,}|…).{0,40})\s*"
)
"""Marks that people write in place of omitted lines."""

_VIA = re.compile(r"NCCL INFO .{0,200} via (?P<via>[A-Z][\w/().+ -]{2,60}?)(?: comm .*)?\s*$")
_MAY_BE_CUT = re.compile(r"(?i)size|bytes")
_WHOLE_BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?")


def recognises(text: str) -> bool:
    """Return True if a text contains a header or a row of nccl-tests."""
    if "Using devices" in text or _SETTINGS.search(text) is not None:
        return True
    lines = map(remove_quotes, islice(text.splitlines(), limits.MOST_RESULT_LINES))
    return any(ROW.search(line) or (_MAY_BE_CUT.search(line) and CutColumns.of(line)) for line in lines)


def read(text: str, name: str, user_facts: UserFacts = NO_USER_FACTS) -> ResultFile:
    """Read the rows of all runs in a text. `user_facts` supplies facts that the runs lack.

    Raises UsageError if there are no rows, or if the number of ranks or the collective is unknown.
    """
    parser = _Parser()
    for number, line in enumerate(split_lines(text, name), 1):
        parser.line(line, number)
    parser.end()
    environment = parser.environment or None
    return result_file(parser.runs, name, "text", parser.remarks, environment, user_facts=user_facts)


class _Parser:
    def __init__(self) -> None:
        self.runs = [NcclTestsRun()]
        self._number = 0
        self.remarks: list[str] = []
        self.environment: dict[str, str] = {}
        self._hosts: set[str] = set()
        self._columns: Columns | None = None
        self._cut: CutColumns | None = None
        self._above = ""
        self._row: TableRow | None = None
        self._tag, self._torn = "", False
        self._command: tuple[str | None, int | None] = (None, None)

    def line(self, text: str, number: int) -> None:
        self._number = number
        said = list(split_by_tag(text))
        for tag, piece in said:
            if " via " in piece and (via := _VIA.search(piece)):
                self.runs[-1].transports.add(via["via"])
            plain = strip_nccl(piece, self._hosts)
            # Ranks write concurrently, so a row may continue after lines of other ranks.
            if self._row is None or tag == self._tag or "#" in plain or ROW.search(plain):
                self._take(plain, tag)
            # Only NCCL or another rank can interrupt a row. If the line simply ends, its remaining values are lost.
            self._torn = self._row is not None and (self._torn or plain != piece or len(said) > 1 or tag != self._tag)

    def _take(self, plain: str, tag: str) -> None:
        if found := ROW.search(plain):
            self.drop_row()
            columns = self._columns or Columns.guessed(found)
            self._row, self._tag, self._torn = TableRow(found, columns, self._number), tag, False
            self._end_row(self._row)
        elif not plain.strip():
            return
        elif self._row is not None and self._torn and self._row.goes_on(plain):
            self._torn = False
            self._end_row(self._row)
        elif self._cut_line(plain) or self._header(plain) or self._row is not None:
            self.drop_row()
        else:
            self._command_line(plain)

    def _cut_line(self, plain: str) -> bool:
        run = self.runs[-1]
        if self._cut is not None and (found := self._cut.line(plain)) is not None:
            if isinstance(found, str):
                run.left_out[self._number] = f"line {self._number} ({' '.join(plain.split())[:_MOST_SHOWN]}): {found}"
            else:
                run.cut.append(found)
            return True
        may_be = _MAY_BE_CUT.search(plain) is not None and HEADER.search(plain) is None
        columns = CutColumns.of(plain) if may_be else None
        self._cut = columns or self._cut
        return columns is not None

    def _command_line(self, plain: str) -> None:
        self.environment |= {found["name"]: found["value"].strip("\"'") for found in _SETTING.finditer(plain)}
        if found := self._program_in(plain):
            average = _AVERAGE.search(found["options"])
            self._command = table.COLLECTIVE_NAMES[found["name"]], int(average[1]) if average else None
            # A line among the rows may also name the program, but only a command has options.
            if " -" in found["options"] and (self.runs[-1].lines or self.runs[-1].cut):
                self._begin().collective = self._command[0]

    @staticmethod
    def _program_in(text: str) -> re.Match[str] | None:
        found = _COMMAND.search(text)
        return found if found and found["name"] in table.COLLECTIVE_NAMES else None

    def _end_row(self, row: TableRow) -> None:
        if row.is_damaged:
            self.drop_row()
        elif row.is_whole:
            self._row, run = None, self.runs[-1]
            line = row.line(run.samples)
            if line is None:
                run.left_out[row.number] = row.fault()
            else:
                run.lines.append(line)

    def drop_row(self) -> None:
        """End an unfinished row and record why it is skipped."""
        if self._row is not None:
            run = self.runs[-1]
            if half := self._row.first_half(run.samples):
                run.halves[self._row.number] = half
            run.left_out[self._row.number] = self._row.fault()
            self._row = None

    def end(self) -> None:
        self.drop_row()
        measured = [run for run in self.runs if run.lines or run.cut]
        run = measured[0] if len(measured) == 1 else self.runs[-1]
        if not run.settings and run.collective is None:
            run.collective, run.average = self._command

    def _begin(self) -> NcclTestsRun:
        if self.runs[-1].has_begun:
            self.runs.append(NcclTestsRun())
        if not self.runs[-1].first_line:
            self.runs[-1].first_line = self._number
        return self.runs[-1]

    def _header(self, text: str) -> bool:
        run = self.runs[-1]
        above, self._above = self._above, text
        if found := _VERSION.search(text):
            run = self._begin()
            run.version, run.library = found["version"], ("NCCL", nccl_version(int(found["nccl"])))
        elif found := _STARTING.search(text):
            self._begin().collective = table.COLLECTIVE_NAMES.get(found["name"])
        elif found := _CONCLUDED.search(text):
            run.collective = run.collective or table.COLLECTIVE_NAMES.get(found["name"])
        elif found := _SETTINGS.search(text):
            self._settings(self._begin(), found)
        elif found := _DEVICE.search(text):
            self._device(_device(found))
        elif found := _OUT_OF_BOUNDS.search(text):
            self._end_run(run, int(found["count"]))
        elif found := HEADER.search(text):
            self._columns = Columns.of(found, above)
            run.cpu_time = self._columns.cpu_time
        elif found := _RCCL_VERSION.search(text):
            run.program, run.version = "rccl-tests", found["version"]
        elif (found := _LIBRARY.search(text)) and run.library is None:
            run.library = found["name"], found["version"]
            run.program = "rccl-tests" if found["name"] == "RCCL" else run.program
        else:
            # The prompt of root ends with #, so a command after it is not a comment.
            is_comment = re.search(r"#(?:\s|$)", text) is not None and self._program_in(text) is None
            return self._note(run, text) or is_comment
        return True

    def _device(self, device: table.Device) -> None:
        """Add a rank to the current run. Start a new run if the current one already has this rank, or has rows."""
        run = self.runs[-1]
        if device.rank in run.listed or run.lines or run.cut or not run.devices:
            run = self._begin()
        run.devices.append(device)
        run.listed.add(device.rank)
        self._hosts.add(device.host)

    def _note(self, run: NcclTestsRun, text: str) -> bool:
        if _ELLIPSIS.fullmatch(text) and run.devices and not run.lines:
            run.is_elided = True
        elif found := _SKIPPED.search(text):
            run.settings["skipped"] = int(found["count"])
        elif "Blocking Enabled" in text:
            run.blocking = True
        elif "Reducing maxBytes" in text:
            self.remarks.append(text[text.index("Reducing") :].strip())
        else:
            return False
        return True

    def _settings(self, run: NcclTestsRun, found: re.Match[str]) -> None:
        run.settings = {key: int(value) for key, value in found.groupdict().items() if value is not None}
        run.collective, run.average = run.collective or self._command[0], self._command[1]
        self._command = (None, None)
        self._columns = Columns()
        if "nThread:" in found[0] or "nThreads:" in found[0]:
            run.program = "rccl-tests"

    def _end_run(self, run: NcclTestsRun, out_of_bounds: int) -> None:
        self.drop_row()
        run.out_of_bounds, run.complete = out_of_bounds, True
        run.ends += 1
        if run.halves and not run.lines:
            # No row of this complete run has a second placement, so the program does not print it.
            run.lines, run.is_halved = list(run.halves.values()), True
            run.left_out = {number: fault for number, fault in run.left_out.items() if number not in run.halves}


def _device(found: re.Match[str]) -> table.Device:
    bus = found["bus"]
    whole = normalize_bus_id(bus if "." in bus else f"{bus}.0") if _WHOLE_BUS_ID.fullmatch(bus) else None
    pid, group, name = int(found["pid"] or 0), int(found["group"] or 0), found["name"].strip()
    return table.Device(int(found["rank"]), group, pid, found["host"], int(found["index"]), whole, name)
