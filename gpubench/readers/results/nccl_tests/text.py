"""The text of nccl-tests: run after run, behind launchers' prefixes, among NCCL's own lines, cut off anywhere."""

import math
import re
from collections.abc import Iterator

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import bus_id
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.nccl_choice import nccl_version
from gpubench.model.terms.operation import Placement
from gpubench.readers.results.nccl_tests.file import result_file
from gpubench.readers.results.nccl_tests.run import (
    COLLECTIVE_NAMES,
    ELEMENT_TYPES,
    REDUCTIONS,
    Device,
    NcclTestsRun,
    OutputLine,
    PerIteration,
    Placed,
)

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f]")
_NCCL_LINE = re.compile(
    r"(?:[A-Za-z][\w.-]{0,254})?:\d{1,10}:\d{1,10} \[-?\d{1,9}\](?: \S+:\d{1,9}(?: \([^()]*\))?)? NCCL [A-Z]+ .*"
)
_PREAMBLE = re.compile(
    r"(?<![\w.])(?P<size>\d{1,18})\s+(?P<count>\d{1,18})\s+"
    rf"(?P<type>{'|'.join(sorted(ELEMENT_TYPES, key=len, reverse=True))})\s+(?P<redop>{'|'.join(REDUCTIONS)})\s+"
    r"(?P<root>-1|\d{1,7})(?P<rest>.*)"
)
_VALUE = r"(?:\d{1,15}(?:\.\d{1,6})?(?:e[+-]?\d{1,3})?|N/A|-?inf|-?nan)"
_VALUES = re.compile(rf"(?:(?<=\s)|^){_VALUE}(?:\s+{_VALUE})*(?=\s*$)")
_TIMESTAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_SETTINGS = re.compile(
    r"# nThread (?P<threads>\d{1,5}) nGpus (?P<gpus>\d{1,5}) minBytes \d+ maxBytes \d+ step: \d+\(\w+\) "
    r"warmup iters: (?P<warmup>\d{1,9}) iters: (?P<iterations>\d{1,9})(?: agg iters: (?P<aggregated>\d{1,9}))? "
    r"validation: (?P<validation>\d{1,9})(?: graph: (?P<graph>\d{1,9}))?"
)
_DEVICE = re.compile(
    r"#\s+Rank\s+(?P<rank>\d{1,7}) (?:Group\s+(?P<group>\d{1,7}) )?Pid\s+(?P<pid>\d{1,10}) on\s+(?P<host>\S{1,255}) "
    r"device\s+(?P<index>\d{1,5}) \[(?P<bus>[0-9a-fA-Fx:]{1,20})\]\s+(?P<name>\S.*)"
)
_VERSION = re.compile(r"# nccl-tests version (?P<version>\S{1,40}) .*nccl-library=(?P<nccl>\d{4,6})")
_STARTING = re.compile(r"# Collective test starting: (?P<name>\w+?)_perf")
_COMMAND = re.compile(r"(?<!\w)(?P<name>[a-z_]+?)_perf(?:_mpi)?(?P<options>\s.*|$)")
_AVERAGE = re.compile(r"\s(?:-a|--average)[ =]?([0-3])(?!\S)")
_OUT_OF_BOUNDS = re.compile(r"# Out of bounds values\s+: (?P<count>\d{1,18}) (?:OK|FAILED)")
_COLONS_OF_A_WHOLE_BUS_ID = 2
_VALUES_A_PLACEMENT, _WITH_STATISTICS = 4, 8


def recognises(text: str) -> bool:
    """True if a text has what nccl-tests prints above its rows, or a row."""
    return "# Using devices" in text or _SETTINGS.search(text) is not None or _PREAMBLE.search(text) is not None


def read(text: str, name: str) -> ResultFile:
    """The rows of every run in a text.

    Raises UsageError where there are no rows, or nothing says of how many ranks or of which collective they are.
    """
    parser = _Parser()
    for line in re.split(r"\r?\n|\r", text):
        parser.line(_CONTROL.sub("", line))
    parser.drop_pending()
    if not any(run.lines for run in parser.runs):
        raise UsageError(
            f"{name} has nothing that was measured",
            expected="the rows of nccl-tests: size, count, type, redop, root, time, algbw, busbw, #wrong",
            reason="the run ended before its first size; the end of the file may say why",
            next_step=f"tail {name}",
        )
    remarks = [f"{parser.damaged} damaged lines left out"] if parser.damaged else []
    return result_file(parser.runs, name, "nccl-tests text", [*parser.remarks, *remarks])


class _Parser:
    """Takes a file line by line and sorts it into runs."""

    def __init__(self) -> None:
        self.runs = [NcclTestsRun()]
        self.damaged = 0
        self.remarks: list[str] = []
        self._pending: tuple[re.Match[str], list[str]] | None = None
        self._command: tuple[str | None, int | None] = (None, None)

    def line(self, text: str) -> None:
        plain = _NCCL_LINE.sub("", text)
        if found := _PREAMBLE.search(plain):
            self.drop_pending()
            self._pending = found, []
            self._values(found["rest"])
        elif "#" in plain and self._header(plain):
            self.drop_pending()
        elif self._pending is not None:
            self._values(plain)
        elif found := _COMMAND.search(plain):
            average = _AVERAGE.search(found["options"])
            self._command = COLLECTIVE_NAMES.get(found["name"]), int(average[1]) if average else None

    def drop_pending(self) -> None:
        """A row that was begun does not go on."""
        if self._pending is not None:
            self.damaged += 1
            self.runs[-1].complete = False
            self._pending = None

    def _begin(self) -> NcclTestsRun:
        """The run that a header is of: a new one where the last has its devices."""
        if self.runs[-1].devices or self.runs[-1].lines:
            self.runs.append(NcclTestsRun())
        return self.runs[-1]

    def _header(self, text: str) -> bool:
        """True if this is one of nccl-tests' own lines; its facts are kept."""
        run = self.runs[-1]
        if found := _VERSION.search(text):
            run = self._begin()
            run.version, run.nccl = found["version"], nccl_version(int(found["nccl"]))
        elif found := _STARTING.search(text):
            self._begin().collective = COLLECTIVE_NAMES.get(found["name"])
        elif found := _SETTINGS.search(text):
            run = self._begin()
            run.settings = {key: int(value) for key, value in found.groupdict().items() if value is not None}
            run.collective, run.average = run.collective or self._command[0], self._command[1]
            self._command = (None, None)
        elif found := _DEVICE.search(text):
            run.devices.append(_device(found))
        elif found := _OUT_OF_BOUNDS.search(text):
            run.out_of_bounds, run.complete = int(found["count"]), True
        elif "# Blocking Enabled" in text:
            run.blocking = True
        elif "# Per-Iteration Report" in text:
            run.per_iteration = True
        elif "# Reducing maxBytes" in text:
            self.remarks.append(text[text.index("Reducing") :].strip())
        elif re.search(r"#\s+size\s+count\s", text):
            run.cpu_time, run.per_iteration = "cputime" in text, run.per_iteration or "i_min" in text
            run.largest_error = "#wrong" not in text
        else:
            return re.search(r"#(?:\s|$)", text) is not None
        return True

    def _values(self, text: str) -> None:
        """Numbers of the row that was begun, which NCCL's own lines may have torn apart."""
        if self._pending is None:
            return
        found, values = self._pending
        numbers = _VALUES.search(_TIMESTAMP.sub("", text))
        if numbers is not None:
            values += numbers[0].split()
        elif text.strip() and text is not found["rest"]:
            self.drop_pending()
            return
        run = self.runs[-1]
        each = _WITH_STATISTICS if run.per_iteration else _VALUES_A_PLACEMENT
        if len(values) < 2 * each:
            return
        line = _line(found, values, each, run) if len(values) == 2 * each else None
        if line is None:
            self.drop_pending()
        else:
            self._pending = None
            run.lines.append(line)


def _device(found: re.Match[str]) -> Device:
    bus = found["bus"]
    whole = bus_id(f"{bus}.0") if bus.count(":") == _COLONS_OF_A_WHOLE_BUS_ID else None
    group = int(found["group"] or 0)
    name = found["name"].strip()
    return Device(int(found["rank"]), group, int(found["pid"]), found["host"], int(found["index"]), whole, name)


def _line(found: re.Match[str], values: list[str], each: int, run: NcclTestsRun) -> OutputLine | None:
    """A row; None where its numbers are none, as of a time of zero, or where nothing was timed."""
    placed = tuple(_placed(values, each, run))
    return OutputLine.of(found.groupdict(), placed) if len(placed) == len(Placement) else None


def _placed(values: list[str], each: int, run: NcclTestsRun) -> Iterator[Placed]:
    for number, placement in enumerate(Placement):
        own = [_number(value) for value in values[number * each : (number + 1) * each]]
        time_us, algbw, busbw, wrong, *statistics = own
        if time_us is None or algbw is None or busbw is None or time_us <= 0:
            return
        per_iteration = None
        if statistics:
            samples = run.settings.get("iterations")
            per_iteration = PerIteration(p99_us=statistics[2], cv_percent=statistics[3], samples=samples)
        yield Placed(
            placement=placement,
            time_us=time_us,
            algbw_gb_s=algbw,
            busbw_gb_s=busbw,
            wrong=None if wrong is None or (wrong and run.largest_error) else math.ceil(wrong),
            per_iteration=per_iteration,
        )


def _number(text: str) -> float | None:
    """A value; None where it is 'N/A', or no number at all."""
    value = None if text == "N/A" else float(text)
    return value if value is not None and math.isfinite(value) else None
