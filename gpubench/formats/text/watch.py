"""Print a watch: a live screen of devices with rates and bars, what each job does, and the conclusions."""

import errno
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import TextIO

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.conditions.ranking import UNKNOWN
from gpubench.formats import layout
from gpubench.formats.delivery import say
from gpubench.formats.layout import INDENT, Column, wrapped
from gpubench.formats.table import Page, ReportView
from gpubench.formats.text.explain import HANGS, print_hangs
from gpubench.model.results.fallback import HangRow, read_cure
from gpubench.model.results.report import Metadata, Report, Row
from gpubench.model.results.watch import AlikeNodes, DeviceKind, JobRow, TrafficRow, WatchFrame, Way
from gpubench.model.terms.units import compress_names, format_ranges, format_share, group_by, plural, printable_line
from gpubench.model.terms.verdict import Detail, Verdict

StyledLine = tuple[str, str]
"""A line of text with its rich style."""

_BAR = 8
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"
_STYLES: Mapping[str, str] = {
    Way.STAGED: "bold red",
    Way.SOCKETS: "bold red",
    Way.UNBALANCED: "bold yellow",
    Way.WAITING: "bold yellow",
    Way.UNKNOWN: "bold magenta",
    Way.NOT_TOLD: "magenta",
    Way.DIRECT: "bold green",
}
_RATES = (
    *("nvlink_sent_gb_s", "nvlink_received_gb_s", "pcie_sent_gb_s", "pcie_received_gb_s"),
    *("network_sent_gb_s", "network_received_gb_s", "limit_percent"),
)
_MOST_KINDS = 6
_LEAST_SHOWN_GB_S = 0.05
_LONGEST_NUMBER = 6
_WIDE = 39
"""Least screen width in columns that has room for the head 'NVLink out'."""

_CAUSE_COLUMNS = 11
"""Indent of the second and further lines after 'because:' or 'try:'."""

_TIME_COLUMNS = 10
"""Indent of the second and further lines of text that begins with a time in seconds."""


def _gb_s(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.0f}" if value >= 999.5 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def bar(percent: float | None) -> str:
    eighths = round(min(max(percent or 0.0, 0.0), 100.0) / 100 * _BAR * 8)
    whole, part = divmod(eighths, 8)
    return (_FULL * whole + (_EIGHTHS[part] if part else "")).ljust(_BAR)


def _users(row: TrafficRow) -> str:
    if row.users is None:
        return "users not known"
    first, *others = row.users or ("",)
    return first + (f" and {len(others)} more" if others else "")


def _share(row: TrafficRow) -> str:
    return format_share(row.limit_percent)


def _remarks(row: TrafficRow) -> str:
    words = [f"throttled: {', '.join(row.throttle_reasons)}"] if row.throttle_reasons else []
    words += [f"+{count} {name}" for name, count in row.errors_grown.items()]
    words += [_users(row)] if row.device_kind == DeviceKind.GPU else []
    return "; ".join([*words, row.note] if row.note else words)


GPUS = (
    Column("NVLink out", lambda row: _gb_s(row.nvlink_sent_gb_s), width=11),
    Column("in", lambda row: _gb_s(row.nvlink_received_gb_s), width=7),
    Column("PCIe out", lambda row: _gb_s(row.pcie_sent_gb_s), width=9),
    Column("in", lambda row: _gb_s(row.pcie_received_gb_s), width=7),
    Column("%", _share, 1, width=6),
    Column("", lambda row: bar(row.limit_percent), 2, width=9),
    Column("MHz", lambda row: "-" if row.clock_mhz is None else str(row.clock_mhz), 3, width=5),
)
NICS = (
    Column("out", lambda row: _gb_s(row.network_sent_gb_s), width=7),
    Column("in GB/s", lambda row: _gb_s(row.network_received_gb_s), width=8),
    Column("%", _share, 1, width=6),
    Column("", lambda row: bar(row.limit_percent), 2, width=9),
)
COLUMNS = {HangRow: HANGS}


def frame_lines(frame: WatchFrame, width: int, height: int, header: str) -> list[StyledLine]:
    """Lay out one interval on a screen: the devices of one node, then the jobs.

    The node is the first of the largest group of equal nodes. If there is not enough room, device lines are omitted
    before job lines.
    """
    kinds = frame.kinds
    below = list(_conclusions(frame, kinds, width))
    room = max(height - len(below) - 2, 0)
    first = kinds[0].hosts[0] if kinds else None
    devices = list(device_lines([row for row in frame.rows if row.node == first], width))
    if len(devices) > room:
        left_out = len(devices) - max(room - 1, 0)
        devices = [*devices[: max(room - 1, 0)], (f"and {left_out} more lines (window too small)", "dim")][:room]
    lines = [(header, "bold"), *devices, ("", ""), *below]
    return [(line[:width], style) for line, style in lines[:height]]


def device_lines(rows: Sequence[TrafficRow], width: int) -> Iterator[StyledLine]:
    """Yield a line for each GPU, each RDMA port, and each other port with traffic."""
    gpus = [row for row in rows if row.device_kind == DeviceKind.GPU]
    nics = [
        row
        for row in rows
        if row.device_kind == DeviceKind.NIC
        and (
            row.limit_gb_s is not None
            or row.note is not None
            or max(row.network_sent_gb_s or 0.0, row.network_received_gb_s or 0.0) >= 0.001
        )
    ]
    gpu_columns = GPUS if width >= _WIDE else (GPUS[0]._replace(head="NVL out", width=8), *GPUS[1:])
    for head, wide, members, columns in (("GPU", 5, gpus, gpu_columns), ("NIC", 10, nics, NICS)):
        shown = layout.fitting(columns, width - wide, lambda column: column.width)
        is_whole = len(shown) == len(columns)
        if members:
            heads = layout.row_line([(column, column.head) for column in shown])
            remarks = "  used by" if is_whole and members is gpus else ""
            yield f"{head:<{wide}}{heads}{remarks}"[:width].rstrip(), "dim"
        for row in members:
            is_odd = row.throttle_reasons or any(row.errors_grown.values())
            cells = layout.row_line([(column, column.text(row)) for column in shown])
            remarks = f"  {_remarks(row)}" if is_whole else ""
            yield f"{row.device:<{wide}}{cells}{remarks}"[:width].rstrip(), "yellow" if is_odd else ""


def _conclusions(frame: WatchFrame, kinds: Sequence[AlikeNodes], width: int) -> Iterator[StyledLine]:
    if frame.waiting:
        yield "waiting for the first traffic", "dim"
    if not frame.jobs and not frame.silences:
        yield "no process uses a GPU", ""
    several = sum(len(kind.hosts) for kind in kinds) > 1
    silent = dict(frame.silences)
    for number, kind in enumerate(kinds[:_MOST_KINDS]):
        lead = ""
        if several:
            lead = "" if number == 0 else "odd: "
            lead += f"{plural(len(kind.hosts), 'node')} {compress_names(kind.hosts)}: "
        reason = silent.get(kind.hosts[0])
        if reason is not None:
            yield f"{lead}{reason}. All other facts are above"[:width], _STYLES[Way.UNKNOWN]
        for job in kind.jobs:
            yield from _job_lines(lead, job, width)
    if len(kinds) > _MOST_KINDS:
        yield f"and {len(kinds) - _MOST_KINDS} more kinds of nodes", ""


def _job_lines(lead: str, job: JobRow, width: int) -> Iterator[StyledLine]:
    """Yield the lines about a job. The cause and its cure are wrapped, never truncated."""
    style = _STYLES.get(job.way, "")
    yield f"{lead}{_job_line(job)}", style
    below = []
    if job.cause is not None:
        below = [Detail("because", job.cause_seen or ""), *read_cure(job).details]
    elif job.verdict in (Verdict.FAIL, Verdict.WARN, Verdict.ERROR):
        below = [Detail("", job.seen.partition(": ")[2])]
    before = ""
    for label, words, is_command in below:
        shown = "" if label in ("", before) else f"{label}:"
        text = f"{INDENT}{shown:<9}{words}" if label else f"{INDENT}{words}"
        lines = [text] if is_command else wrapped(text, width, " " * _CAUSE_COLUMNS)
        yield from ((line, style) for line in lines)
        before = label


def _job_line(job: JobRow) -> str:
    """Return a line such as 'staged  GPU0-3  NVLink 0.00, PCIe 110 out 108 in GB/s  python (torch 10.0.0.1:29500)'."""
    rates = f"NVLink {_gb_s(job.nvlink_gb_s)}, PCIe {_gb_s(job.pcie_sent_gb_s)} out {_gb_s(job.pcie_received_gb_s)} in"
    nics = f", NICs {_gb_s(job.network_gb_s)}" if (job.network_gb_s or 0.0) >= _LEAST_SHOWN_GB_S else ""
    return f"{job.way:<7} {_devices(job.gpus)}  {rates}{nics} GB/s  {job.job}"


def _devices(names: Sequence[str]) -> str:
    numbers = [name.removeprefix("GPU") for name in names]
    if not all(number.isdecimal() and len(number) < _LONGEST_NUMBER for number in numbers):
        return ", ".join(names)  # A recording from another program may use other names
    return "GPU" + format_ranges(sorted(map(int, numbers)))


def plain_lines(frame: WatchFrame) -> Iterator[str]:
    """Yield one interval for an output that cannot be redrawn: one line per job. Equal nodes share lines."""
    time = f"{frame.seconds:8.1f} s  "
    kinds = frame.kinds
    silent = dict(frame.silences)
    several = sum(len(kind.hosts) for kind in kinds) > 1
    if frame.waiting:
        yield f"{time}waiting for the first traffic"
        return
    for kind in kinds:
        where = f"{compress_names(kind.hosts)}  " if several else ""
        if kind.hosts[0] in silent:
            yield f"{time}{where}{silent[kind.hosts[0]]}"
        for job in kind.jobs:
            is_known = job.cause_seen and job.cause != UNKNOWN.id and job.verdict in (Verdict.FAIL, Verdict.WARN)
            cause = f"  because {job.cause_seen}" if is_known else ""
            yield f"{time}{where}{_job_line(job)}{cause}"
    if not frame.jobs and not frame.silences:
        yield f"{time}no process uses a GPU"


def broken(line: str, width: int) -> Iterator[str]:
    yield from wrapped(line, width, " " * _TIME_COLUMNS)


class WatchView(ReportView):
    """Prints mean rates of all devices over the whole watch, what each job did, findings and the verdict."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        super().__init__(page, metadata)
        self._means: dict[tuple[str, str], _Mean] = {}

    def row(self, row: Row) -> None:
        """Add a row to the mean of its device. The screens print the intervals themselves."""
        if isinstance(row, TrafficRow):
            self._means.setdefault((row.node, row.device), _Mean(row)).add(row)

    def end(self, report: Report) -> None:
        """Print the means, the jobs, the findings and the verdict."""
        metadata = self._metadata
        seconds = max((mean.last.seconds for mean in self._means.values()), default=0.0)
        options = metadata.options
        extent = f"--hang  {plural(options['answers'], 'answer')}" if "answers" in options else f"{seconds:.0f} s"
        self._page.heading(metadata, "watch", extent)
        if metadata.source:
            self._page.wrap(f"{INDENT}from {metadata.source}")
        self._page.defaults(metadata)
        print_hangs(self._page, report.rows(HangRow))
        self._devices()
        self._jobs(report.rows(JobRow))
        self._page.outcome(report)

    def _devices(self) -> None:
        rows_by_node = group_by([mean.row for mean in self._means.values()], lambda row: row.node)
        shown = list(rows_by_node.items())[:1]
        for node, rows in shown:
            self._page.print("", f"{node}, means in GB/s" if len(rows_by_node) > 1 else "means in GB/s")
            for line, style in device_lines(rows, self._page.width):
                self._page.print(line, style=style)
        if len(rows_by_node) > 1:
            self._page.print(f"{len(rows_by_node) - 1} more nodes: --format csv --section traffic has every interval")

    def _jobs(self, rows: Sequence[JobRow]) -> None:
        if rows:
            self._page.print("")
        alike = group_by(rows, lambda row: (row.way, tuple(row.gpus), row.cause, round(row.seconds)))
        for members in alike.values():
            first, hosts = members[0], compress_names(list(dict.fromkeys(row.node for row in members)))
            where = f"  on {hosts}" if len(self._metadata.hosts) > 1 else ""
            self._page.wrap(
                f"{first.seconds:6.1f} s  {_job_line(first)}{where}", _TIME_COLUMNS, _STYLES.get(first.way, "")
            )
        self._page.print("")


class _Mean(Struct):
    """Running mean of a device's rates. It keeps no rows, because a watch may last for days."""

    last: TrafficRow
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)

    def add(self, row: TrafficRow) -> None:
        """Add an interval to the mean. Error counts are summed instead."""
        self.last = row
        for name in _RATES:
            value = getattr(row, name)
            if value is not None:
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        for name, count in row.errors_grown.items():
            self.errors[name] = self.errors.get(name, 0) + count

    @property
    def row(self) -> TrafficRow:
        means = {name: self.sums[name] / count for name, count in self.counts.items()}
        note = self.last.note if any(name not in means for name in _RATES) else None
        unknown = dict.fromkeys(_RATES) | means
        return replace(self.last, **unknown, errors_grown=self.errors, note=note)


_QUIT = ("q", "Q", "\x03", "\x04")
_KEYS = "q or Ctrl-C to end"
_MOST_TYPED = 64

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_THE_END, _BELOW = "\x1b[H", "\x1b[K", "\x1b[K\x1b[J"
"""Terminal codes: enter or leave the alternate screen, go to its start, erase to the end of the line or screen."""

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "magenta": "35"}
_WITHOUT_COLOR = ("bold", "dim")


class NoScreen:
    """Shows nothing, because stdout is for programs or the watch is quiet."""

    def show(self, frame: WatchFrame) -> None: ...


class PlainScreen:
    """Prints one line per job and interval. Lines are wrapped only if a `width` was chosen, so that grep finds
    whole lines.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width

    def show(self, frame: WatchFrame) -> None:
        """Print the lines. Raises InterruptedRunError if the process that reads stdout exited."""
        lines = plain_lines(frame)
        say(*(lines if self._width is None else chain.from_iterable(broken(line, self._width) for line in lines)))


class LiveScreen:
    """Draws each interval over the previous one, on the alternate screen of a terminal.

    It writes terminal codes itself. rich takes five times as long, and wraps lines at the width that it assumes.
    """

    def __init__(self, stream: TextIO, header: Callable[[float], str], *, color: bool) -> None:
        self._stream, self._header = stream, header
        self._codes = _CODES if color else {name: _CODES[name] for name in _WITHOUT_COLOR}
        self._shown: WatchFrame | None = None

    def show(self, frame: WatchFrame) -> None:
        self._shown = frame
        self.draw()

    def draw(self) -> None:
        """Redraw the last interval, for example after the terminal was resized."""
        if self._shown is None:
            return
        width, height = self._size()
        lines = frame_lines(self._shown, width - 1, height - 1, self._header(self._shown.seconds))
        drawn = f"{_TO_THE_END}\n".join(self._styled(*line) for line in lines)
        self._stream.write(f"{_HOME}{drawn}{_BELOW}")
        self._stream.flush()

    def _size(self) -> tuple[int, int]:
        """Return the current width and height of the terminal. COLUMNS and LINES do not follow when it is resized."""
        with suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(self._stream.fileno())
            if columns and lines:
                return columns, lines
        return shutil.get_terminal_size()

    def _styled(self, line: str, style: str) -> str:
        codes = ";".join(self._codes[name] for name in style.split() if name in self._codes)
        return f"\x1b[{codes}m{printable_line(line)}\x1b[0m" if codes else printable_line(line)


@contextmanager
def live_screen(
    stream: TextIO, header: Callable[[float], str], *, color: bool
) -> Iterator[tuple[LiveScreen, Callable[[float], bool]]]:
    """Yield a screen, and a function that waits some seconds and returns True if the user typed q."""
    screen = LiveScreen(stream, lambda seconds: f"{header(seconds)}   {_KEYS}", color=color)
    with ExitStack() as stack:
        stack.callback(_write, stream, _LEAVE)
        _write(stream, _ENTER)
        keys = stack.enter_context(keyboard())
        resized = stack.enter_context(resizes())
        yield screen, lambda seconds: _wait(seconds, keys, resized, screen.draw)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


@contextmanager
def keyboard() -> Iterator[int | None]:
    """Yield a file descriptor that returns single key presses, or None without a keyboard."""
    import termios
    import tty

    try:
        descriptor = sys.stdin.fileno()
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            raise OSError(
                errno.ENOTTY, "it runs in the background, where a terminal stops programs that change its settings"
            )
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):  # stdin is closed or not a terminal
        yield None
        return
    try:
        yield descriptor
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def resizes() -> Iterator[int]:
    """Yield a file descriptor that becomes readable when the terminal is resized."""
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGWINCH, handler)
        os.close(read)
        os.close(write)


def _wait(seconds: float, keys: int | None, resized: int, draw: Callable[[], None]) -> bool:
    """Wait, and redraw if the terminal is resized. Return True if the user typed q, Ctrl-C or Ctrl-D."""
    deadline = time.monotonic() + seconds
    listened = [resized] if keys is None else [resized, keys]
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(listened, [], [], left)
        if resized in ready:
            os.read(resized, _MOST_TYPED)
            draw()
        if keys is not None and keys in ready:
            typed = os.read(keys, _MOST_TYPED).decode(errors="replace")
            if any(key in typed for key in _QUIT):
                return True
            if not typed:
                listened.remove(keys)  # End of input
    return False
