"""NCCL's debug log of any job, of one rank or of many in one file, streamed: what is kept is what the job is made of.

A log of gigabytes is mostly lines that say nothing new; each is looked at only until that is seen.
"""

import re
from typing import Protocol

from gpubench.model.paths.connections import ConnectionRow, channel_step
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.readers.nccl_log.attribution import ARROW, Attribution
from gpubench.readers.nccl_log.communicators import communicators
from gpubench.readers.nccl_log.lines import parse_channel, parse_head
from gpubench.readers.nccl_log.notes import Notes, may_be_noted
from gpubench.readers.nccl_log.remarks import OwnGpu
from gpubench.readers.nccl_log.threads import Thread

_BLOCK_BYTES = 2**20
_LONGEST_LINE = 2**15
"""NCCL formats a line in 1,024 bytes, and its longest lists grow with the GPUs of a node; what is longer is no line."""

_MOST_CACHED = 2**14

_COLOR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LOST_COLOR = re.compile(rb"\[(?:\d{1,3}(?:;\d{1,3})*)?m")
"""The same where the escape character got lost on the way."""

_STAMP = re.compile(rb"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+-]{0,20}Z?\]? ", re.M)
_STAMPED_BYTES = 4096
"""Whether lines begin with a clock's time is seen in that many."""

_INFO = b" NCCL INFO "
_CHANNEL = _INFO + b"Channel "
_MESSAGE = re.compile(rb" NCCL (INFO|WARN) ")
_OPERATION = b": opCount "
_HANDLE = b" comm 0x"
_REMNANT = b"] via "
"""In what is left of a connection's line whose beginning another line took away."""

_LONGEST_NAME = 50
_SIZE = b" Bytes -> "


class Readable(Protocol):
    """A binary stream."""

    def read(self, size: int, /) -> bytes:
        """At most that many bytes, none at its end."""
        ...


class NcclLogReader:
    """Reads the logs of a job, line by line or as streams, in any order; `facts` is what they say together."""

    def __init__(self) -> None:
        self._attribution = Attribution()
        self._threads: dict[bytes, Thread] = {}
        self._rows: dict[bytes, dict[bytes, ConnectionRow]] = {}
        self._channels: dict[bytes, int] = {}
        self._notes = Notes()
        self._lines = 0
        self._other_lines = 0
        self._unreadable = 0

    @property
    def lines(self) -> int:
        """How many lines were read."""
        return self._lines

    @property
    def nccl_lines(self) -> int:
        """How many of them are NCCL's."""
        return self._lines - self._other_lines

    def read(self, stream: Readable) -> None:
        """Read a stream to its end. Its last line, where it has no end, may have been cut off."""
        rest = b""
        while block := stream.read(_BLOCK_BYTES):
            block = rest + block
            end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
            rest = block[end:]
            if len(rest) > _LONGEST_LINE:
                self._unreadable += _REMNANT in rest
                rest = b""
            self._read_lines(block[:end])
        if rest:
            self._lines += 1
            self._read_messages(_LOST_COLOR.sub(b"", _COLOR.sub(b"", rest)), cut=True)

    def feed(self, line: bytes) -> None:
        """Take one line, with or without its end."""
        self._read_lines(line if line.endswith(b"\n") else line + b"\n")

    def facts(self) -> LogFacts:
        """All that was read so far."""
        attribution, notes = self._attribution, self._notes
        return LogFacts(
            versions=tuple(notes.versions),
            settings=notes.settings(),
            communicators=communicators(tuple(attribution.processes.values()), attribution.bundles, notes.host_ids),
            networks=notes.networks(),
            remarks=notes.remarks(),
            paths=dict(notes.paths),
            warnings=dict(notes.warnings),
            lines=self.lines,
            nccl_lines=self.nccl_lines,
            unreadable=self._unreadable,
        )

    def _read_lines(self, block: bytes) -> None:
        """Take whole lines: most are connections whose parts were all met before, in this pair or in others."""
        lines = _cleaned(block).split(b"\n")[:-1]
        self._lines += len(lines)
        ends, ranks, passed = self._attribution.ends, self._attribution.ranks, self._attribution.passed
        rows_of, channels, nothing = self._rows, self._channels, self._attribution.bundles.nothing
        for line in lines:
            head, found, rest = line.partition(_CHANNEL)
            if found:
                channel, _, text = rest.partition(b" : ")
                left, _, right = text.partition(ARROW)
                try:
                    peer, kind, received = ends[right]
                    if received:
                        row, peer = rows_of[head][right], ranks[left]
                    else:
                        row = rows_of[head][left]
                    step = kind + channels[channel]
                except KeyError:
                    pass
                else:
                    if peer < row.size:
                        row[peer] = row.get(peer, nothing)[step]
                        continue
            holds = passed.get(line)
            if holds is None or not holds[0]:
                self._take(line)

    def _take(self, line: bytes) -> None:
        """Take a line that was not met before; in long logs most are operations, and what NCCL runs them with."""
        head, _, message = line.partition(_INFO)
        thread = self._threads.get(head)
        if thread is None:
            self._take_any(line)
        elif line not in thread.tuned:
            operation = message.find(_OPERATION, 0, _LONGEST_NAME)
            start = -1 if operation < 0 else message.find(_HANDLE, operation)
            if start >= 0 and b" NCCL " not in message:
                start += len(_HANDLE) - 2
                self._attribution.use(thread, message[start : message.find(b" ", start)])
            else:
                self._take_any(line)

    def _take_any(self, line: bytes) -> None:
        if b"NCCL" not in line:
            self._other_lines += 1
            self._unreadable += _REMNANT in line
            return
        if b"[0m" in line:
            line = _LOST_COLOR.sub(b"", line)
        head, found, message = line.partition(_INFO)
        is_whole = found and b" NCCL " not in message and _REMNANT not in head
        thread = self._thread(head) if is_whole else None
        if thread is None:
            self._read_messages(line)
        else:
            self._info(thread, message, line)

    def _read_messages(self, line: bytes, *, cut: bool = False) -> None:
        """Take a line, which may hold several messages where processes write into one file; the last may be `cut`."""
        if len(line) > _LONGEST_LINE:
            self._other_lines += 1
            self._unreadable += _REMNANT in line
            return
        if b"NCCL version " in line:
            self._notes.take_version(line)
        start, found = 0, list(_MESSAGE.finditer(line))
        self._other_lines += not found
        before = line[: found[0].start()] if found else line
        self._unreadable += _REMNANT in before
        for number, each in enumerate(found, 1):
            is_last = number == len(found)
            behind_text = number > 1 or _REMNANT in before
            thread = self._thread(line[start : each.start()], behind_text=behind_text)
            start = each.end()
            message = line[start : len(line) if is_last else found[number].start()]
            if thread is None:
                self._unreadable += b" via " in message
            elif each[1] == b"WARN":
                self._notes.warn(thread.process.host, thread.process.name, message)
            else:
                self._info(thread, message, b"", cut=cut or not is_last)

    def _thread(self, head: bytes, *, behind_text: bool = False) -> Thread | None:
        thread = self._threads.get(head)
        if thread is None and (source := parse_head(head)):
            if len(self._threads) >= _MOST_CACHED:
                self._threads.clear()
                self._rows.clear()
            source = self._attribution.without_text(source) if behind_text else source
            thread = self._threads[head] = self._attribution.thread(source)
            self._rows[head] = thread.rows
        return thread

    def _info(self, thread: Thread, message: bytes, line: bytes, *, cut: bool = False) -> None:
        """Take a message of level INFO. `line` is all of it, empty where there is more in it, or it may be cut off."""
        if message.startswith((b"Channel ", b"CollNet ")):
            self._channel(thread, message, line, cut=cut)
        elif _SIZE in message:
            self._attribution.tune(thread, message, line)
        elif _HANDLE[1:] not in message or _OPERATION in message:
            if may_be_noted(message):
                self._notes.take(thread.process.host, thread.process.name, message, _own_gpu(thread))
            self._attribution.pass_over(line)
        else:
            self._attribution.announce(thread, message)

    def _channel(self, thread: Thread, message: bytes, line: bytes, *, cut: bool) -> None:
        """Take a connection, or the order of a ring, which is none."""
        channel, _, text = message.partition(b" : ")
        place = parse_channel(channel)
        if place is None or b" via " not in text:
            is_damaged = b" -> " in text or b" via " in text
            self._unreadable += is_damaged
            self._attribution.pass_over(b"" if is_damaged else line)
            return
        word, _, number = channel.partition(b" ")
        if word == b"Channel":
            self._channels[number] = channel_step(*place)
        self._unreadable += not self._attribution.connect(thread, place, text, cut=cut)


def _own_gpu(thread: Thread) -> OwnGpu | None:
    """The GPU of the communicator that a thread initialises."""
    current = thread.current
    return None if current is None or current.bus is None else OwnGpu(current.rank, current.bus)


def _cleaned(block: bytes) -> bytes:
    """The same without what writers and terminals add."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\x1b" in block:
        block = _COLOR.sub(b"", block)
    return _STAMP.sub(b"", block) if _STAMP.search(block, 0, _STAMPED_BYTES) else block
