"""NCCL's debug log of a job, read as a stream from files, folders or standard input, packed by gzip or not.

A log of gigabytes is mostly lines that say nothing new: these are recognised by their parts and not parsed again.
"""

import io
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from gpubench.errors import UsageError
from gpubench.model.paths.nccl_log import LogFacts, channel_code
from gpubench.readers import limits
from gpubench.readers.documents import SilentPipeError, opened, unreadable
from gpubench.readers.hangs import (
    WatchdogLines,
    is_ras_answer,
    is_recorder_dump,
    is_stack,
    read_ras_answer,
    read_recorder_dump,
    read_stack,
)
from gpubench.readers.nccl_log.attribution import ARROW, Attribution, Thread
from gpubench.readers.nccl_log.communicators import communicators
from gpubench.readers.nccl_log.lines import (
    INFO,
    NAMELESS,
    ReachedLimits,
    cleaned,
    parse_channel,
    parse_head,
    without_colors,
)
from gpubench.readers.nccl_log.notes import WORDS_OF_OTHERS, Notes, OwnGpu, may_be_noted, parse_failed_call
from gpubench.readers.results import nccl_inspector
from gpubench.readers.results.nccl_inspector import InspectorLines
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.model.paths.hang import ProcessStack, RankRecord, RasCommunicator

_MOST_LINES = 2**16
_TIMES_REPEATED = 4
"""As often as a line has to come in a block, on average, for it to be quicker to look at the different ones."""


class KnownLines(set[bytes]):
    """Whole lines that say nothing new, whichever communicator their thread is at.

    What algorithms run operations with is known beside, of the communicator that the thread is at: `tuning_lines`.
    """

    def __init__(self, threads: Mapping[bytes, Thread]) -> None:
        super().__init__()
        self._threads = threads

    def remember(self, line: bytes) -> None:
        """Remember a line; an empty one is none."""
        if line:
            if len(self) >= _MOST_LINES:
                self.clear()
            self.add(line)

    def hold_all(self, lines: Sequence[bytes]) -> bool:
        """True if lines are few different ones, all of them known, as of operations that come again and again."""
        different = set(lines)
        return len(different) * _TIMES_REPEATED < len(lines) and all(
            line in self or self._is_known_tuning(line) for line in different
        )

    def _is_known_tuning(self, line: bytes) -> bool:
        thread = self._threads.get(line.partition(INFO)[0])
        return thread is not None and line in thread.tuning_lines


_BLOCK_BYTES = 2**20
_BYTES_BETWEEN_PAIRS = 2**26
"""Of a log, between two countings of its pairs, which take a few milliseconds."""

_LONGEST_LINE = 2**15
"""NCCL formats a line in 1,024 bytes, and its longest lists grow with the GPUs of a node; what is longer is no line."""

_MOST_THREADS = 2**14

_REPEATED = re.compile(rb" ?\[repeated (\d{1,9})x across cluster\][^\n]*")
"""What Ray puts behind a line in place of those that are alike but for numbers, of other ranks too."""

_CHANNEL = INFO + b"Channel "
_MESSAGE = re.compile(rb" NCCL (INFO|WARN) ")
_OPERATION = b": opCount "
_ADDRESS = b" comm 0x"
_REMNANT = b"] via "
"""In what is left of a connection's line whose beginning another line took away."""

_AT_EXIT = b"driver shutting down"
_RETURNED = (b" -> ", b"Failed to execute")
_OF_A_START = (b"Using network ", b"Bootstrap", b"Channel ", b"Trees ", b"Ring ")
"""What a process writes while it makes communicators; after the end of all it had, it makes more."""

_MULTICAST = b"NVLS comm 0x"
_INTERNAL_ERROR = 3

_WORDS = (b"NCCL", _REMNANT, *WORDS_OF_OTHERS)
"""Lines without any of these say nothing."""

_LONGEST_NAME = 50
_SIZE = b" Bytes -> "


class Readable(Protocol):
    """A binary stream."""

    def read(self, size: int, /) -> bytes:
        """At most that many bytes, none at its end."""
        ...


class EndlessLineError(Exception):
    """A stream whose line goes on and on."""


class NcclLogReader:
    """Reads the logs of a job, line by line or as streams, in any order; `facts` is what they hold together.

    `lines` counts the lines that were read. `reached` are the limits of `readers/limits.py` that the logs went
    beyond; once it says so, nothing more is read.
    """

    def __init__(self) -> None:
        self.reached = ReachedLimits()
        self._bytes, self._bytes_until_pairs = 0, _BYTES_BETWEEN_PAIRS
        self._begun = time.monotonic()
        self._attribution = Attribution(self.reached)
        self._threads: dict[bytes, Thread] = {}
        self._channel_codes: dict[bytes, int] = {}
        self._known_lines = KnownLines(self._threads)
        self._repeats = False
        self._notes = Notes(self.reached)
        self.lines = 0
        self._other_lines = 0
        self._unreadable = 0
        self._left_out = 0
        self.records: list[RankRecord] = []
        self.ras: list[RasCommunicator] = []
        self.stacks: list[ProcessStack] = []
        self.inspector = InspectorLines()
        self._watchdogs = WatchdogLines()

    @property
    def nccl_lines(self) -> int:
        """The number of lines of NCCL."""
        return self.lines - self._other_lines

    def read(self, stream: Readable) -> None:
        """Read a stream to its end, or to a limit. Its last line, where it has no end, may have been cut off.

        Raises EndlessLineError where it has a line that no program writes.
        """
        rest, is_endless, without_end = b"", False, 0
        while not self.reached.ends_reading and (block := stream.read(_BLOCK_BYTES)):
            self._count_block(len(block))
            if is_endless:
                without_end += len(block)
                _, is_ended, block = block.partition(b"\n")
                if not is_ended:
                    if without_end > limits.MOST_BYTES_WITHOUT_LINE_END:
                        raise EndlessLineError
                    continue
                is_endless = False
            block = rest + block
            end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
            rest = block[end:]
            if len(rest) > _LONGEST_LINE:
                self._unreadable += _REMNANT in rest
                rest, is_endless, without_end = b"", True, 0
                self.lines += 1
                self._other_lines += 1
            self._read_lines(block[:end])
        if rest:
            self.lines += 1
            self._read_messages(without_colors(rest), cut=True)

    def _count_block(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        spent, pairs = time.monotonic() - self._begun, 0
        if self._bytes >= self._bytes_until_pairs:
            self._bytes_until_pairs += _BYTES_BETWEEN_PAIRS
            pairs = self._attribution.pairs()
        for count, most, what in (
            (self._bytes, limits.MOST_LOG_BYTES, "bytes"),
            (self.lines, limits.MOST_LOG_LINES, "lines"),
            (spent, limits.MOST_LOG_SECONDS, "seconds of reading"),
            (pairs, limits.MOST_LOG_PAIRS, "connections of a rank with a peer"),
        ):
            if count > most:
                self.reached.end(f"more than {most:.0f} {what}", f"{most:.0f} {what}")

    def facts(self, cut_files: tuple[str, ...] = ()) -> LogFacts:
        """All that was read so far; `cut_files` ended before their end."""
        attribution, notes = self._attribution, self._notes
        found = communicators(attribution, notes.host_ids, notes.addresses())
        return LogFacts(
            versions=tuple(notes.versions),
            settings=notes.settings(),
            communicators=found,
            networks=notes.networks(),
            remarks=notes.remarks(),
            paths=dict(notes.paths),
            nvlink_hosts=frozenset(notes.nvlink_hosts),
            complaints=notes.complaints(),
            failed_calls=notes.failed_calls(),
            gpu_models=tuple(notes.models),
            listed_models=tuple(notes.listed_models),
            lines=self.lines,
            nccl_lines=self.nccl_lines,
            unreadable=self._unreadable + attribution.cut_heads,
            left_out=self._left_out,
            cut_files=cut_files,
            limits=self.reached.found(),
            records=tuple(self.records),
            watchdogs=self._watchdogs.records(),
            missed_barrier=tuple(self._watchdogs.missed_barrier),
            ras=tuple(self.ras),
            stacks=tuple(self.stacks),
            inspected=self.inspector.operations(),
        )

    def _read_lines(self, block: bytes) -> None:
        """Read whole lines: most are connections whose parts were all in earlier lines, if of other pairs."""
        block = self._with_what_was_left_out(cleaned(block))
        if not any(word in block for word in _WORDS):
            # Three times as fast as bytes.count where every byte is a line's end.
            count = len(block) - len(block.translate(None, b"\n"))
            self.lines += count
            self._other_lines += count
            return
        lines = block.split(b"\n")[:-1]
        self.lines += len(lines)
        if self._repeats and self._known_lines.hold_all(lines):
            return
        left_sides, right_sides = self._attribution.left_sides, self._attribution.right_sides
        threads, channel_codes, empty = self._threads, self._channel_codes, self._attribution.sets.empty
        known_lines, known = self._known_lines, 0
        last, last_head, connections, peer, line_code = None, b"", self._attribution.no_connections, 0, 0
        for line in lines:
            head, found, rest = line.partition(_CHANNEL)
            if found:
                channel, _, text = rest.partition(b" : ")
                try:
                    # NCCL writes the channels of a pair behind each other.
                    if text == last and head == last_head:
                        connections[peer] = connections[peer].plus[line_code + channel_codes[channel]]
                        continue
                    left, _, right = text.partition(ARROW)
                    peer, line_code, received = right_sides[right]
                    if received:
                        connections, peer = threads[head].connections[right], left_sides[left]
                    else:
                        connections = threads[head].connections[left]
                    if peer < connections.size:
                        connections[peer] = connections.get(peer, empty).plus[line_code + channel_codes[channel]]
                        last, last_head = text, head
                        continue
                except KeyError:
                    pass
            # What is read now may change what the text of a connection stands for.
            last = None
            if line in known_lines or self._read_line(line):
                known += 1
        self._repeats = known * 2 > len(lines)

    def _with_what_was_left_out(self, block: bytes) -> bytes:
        """Count the lines that Ray left out, and read those that it wrote in their place."""
        if b"x across cluster]" in block:
            self._left_out += sum(int(found[1]) for found in _REPEATED.finditer(block))
            return _REPEATED.sub(b"", block)
        return block

    def _read_line(self, line: bytes) -> bool:
        """Read a line; True if nothing in it was new. In long logs most are operations, and how NCCL runs them."""
        head, _, message = line.partition(INFO)
        thread = self._threads.get(head)
        if thread is None:
            self._read_any(line)
            return False
        if line in thread.tuning_lines:
            return True
        operation = message.find(_OPERATION, 0, _LONGEST_NAME)
        start = -1 if operation < 0 else message.find(_ADDRESS, operation)
        if start >= 0 and b" NCCL " not in message:
            start += len(_ADDRESS) - 2
            self._attribution.use(thread, message[start : message.find(b" ", start)])
        else:
            self._read_any(line)
        return False

    def _read_any(self, line: bytes) -> None:
        if b"NCCL" not in line:
            self._other_lines += 1
            self._unreadable += _REMNANT in line
            self._notes.add_other(line)
            if b" collective: " in line or b"monitoredBarrier" in line:
                self._watchdogs.add(line)
            return
        if b"[0m" in line:
            line = without_colors(line)
        head, found, message = line.partition(INFO)
        is_whole = found and b" NCCL " not in message and _REMNANT not in head
        thread = self._thread(head) if is_whole else None
        if thread is None:
            self._read_messages(line)
        else:
            self._info(thread, message, line)

    def _read_messages(self, line: bytes, *, cut: bool = False) -> None:
        """Read a line that may hold several messages, as processes that share a file write; the last may be `cut`."""
        if len(line) > _LONGEST_LINE:
            self._other_lines += 1
            self._unreadable += _REMNANT in line
            return
        if b"NCCL version " in line:
            self._notes.add_version(line)
        start, found = 0, list(_MESSAGE.finditer(line))
        if not found:
            self._other_lines += 1
            self._notes.add_other(line)
            self._watchdogs.add(line)
        before = line[: found[0].start()] if found else line
        self._unreadable += _REMNANT in before
        for number, each in enumerate(found, 1):
            is_last = number == len(found)
            behind_text = number > 1 or _REMNANT in before
            head = line[start : each.start()]
            thread = self._thread(head, behind_text=behind_text)
            start = each.end()
            message = line[start : len(line) if is_last else found[number].start()]
            if thread is None and each[1] == b"WARN":
                self._notes.add_warning(NAMELESS, NAMELESS, message, head)
            elif thread is None:
                self._unreadable += b" via " in message
                self._lost(message)
            elif each[1] == b"WARN":
                if _AT_EXIT in message:
                    thread.process.is_exiting = True
                if not thread.process.is_closing:
                    self._notes.add_warning(thread.process.host, thread.process.name, message, head)
            else:
                self._info(thread, message, b"", cut=cut or not is_last)

    def _thread(self, head: bytes, *, behind_text: bool = False) -> Thread | None:
        thread = self._threads.get(head)
        if thread is None:
            self._notes.add_other(head)
        if thread is None and (source := parse_head(head)):
            if len(self._threads) >= _MOST_THREADS:
                self._threads.clear()
            source = self._attribution.without_text(source) if behind_text else source
            thread = self._threads[head] = self._attribution.thread(source)
        return thread

    def _info(self, thread: Thread, message: bytes, line: bytes, *, cut: bool = False) -> None:
        """Read a message of level INFO. `line` is its whole line, empty where that has more in it or may be cut off."""
        if message.startswith(_OF_A_START):
            thread.process.begins_again = True
        if message.startswith((b"Channel ", b"CollNet ", b"Ring ", b"Coll ")):
            self._channel(thread, message, line, cut=cut)
        elif message.startswith(b"Connected all "):
            self._attribution.connected(thread)
        elif _SIZE in message:
            self._attribution.add_tuning(thread, message, line)
        elif _ADDRESS[1:] not in message or _OPERATION in message:
            if may_be_noted(message):
                self._notes.add(thread.process.host, thread.process.name, message, _own_gpu(thread))
            if any(word in message for word in _RETURNED) and self._failed(thread, message):
                return
            self._known_lines.remember(line)
        elif message.startswith(_MULTICAST):
            self._attribution.add_multicast(thread, message)
        else:
            self._attribution.add_communicator(thread, message)

    def _failed(self, thread: Thread, message: bytes) -> bool:
        """Keep a call that failed; False where the message is none."""
        process, call = thread.process, parse_failed_call(message)
        if call is None:
            return False
        # Sockets' readers hand on an internal error when communicators are taken down, in healthy jobs too.
        is_of_the_end = call.code == _INTERNAL_ERROR and call.is_of_sockets and not process.is_starting
        if not process.is_closing and not is_of_the_end:
            self._notes.add_failed_call(process.name, call)
        return True

    def _lost(self, message: bytes) -> None:
        """Keep a connection whose writer was cut away, if its line is whole from there on."""
        channel, _, text = message.partition(b" : ")
        place = parse_channel(channel)
        if place is not None:
            self._attribution.add_lost(place, text)

    def _channel(self, thread: Thread, message: bytes, line: bytes, *, cut: bool) -> None:
        """Read a channel of a connection; 'Channel 03/24 : 0 1 2' is the order of a ring and no connection."""
        channel, _, text = message.partition(b" : ")
        place = parse_channel(channel)
        if place is None or b" via " not in text:
            is_damaged = b" via " in text or (b" -> " in text and not message.startswith(b"Ring "))
            self._unreadable += is_damaged
            self._known_lines.remember(b"" if is_damaged else line)
            return
        kind, _, number = channel.partition(b" ")
        if kind == b"Channel":
            self._channel_codes[number] = channel_code(*place)
        self._unreadable += not self._attribution.add_connection(thread, place, text, cut=cut)


def _own_gpu(thread: Thread) -> OwnGpu | None:
    comm = thread.comm
    return None if comm is None or comm.bus is None else OwnGpu(comm.rank, comm.bus)


STDIN = "-"

_GZIP = b"\x1f\x8b"
_UNPACKERS = {
    b"\xfd7zXZ\x00": "xz -dc",
    b"\x28\xb5\x2f\xfd": "zstd -dc",
    b"BZh": "bzip2 -dc",
    b"PK\x03\x04": "unzip -p",
    b"\xff\xfe": "iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "iconv -f UTF-16 -t UTF-8",
}
_LONGEST_MAGIC = 6
_LONGEST_BEGINNING = 2**12
_PACKED_BYTES = 2**10
"""Little at a time: what is unpacked together with the damage is lost."""

_MOST_AT_ONCE = 2**18
_WITH_HEADER = 16
"""What zlib takes for the header of a gzip."""

_MIB_WITHOUT_LINE_END = limits.MOST_BYTES_WITHOUT_LINE_END // 2**20
_EXPECTED = "NCCL's log, as NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log writes one for every rank"


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file that was read, how many of its lines are NCCL's, and whether it is a gzip that ends before its end."""

    name: str
    nccl_lines: int
    is_damaged: bool = False


ReadSoFar = Callable[[int, int, str], None]
"""Is told how many bytes of all files were read, how many there are, and which file is being read."""


def read_logs(
    names: Sequence[str], reader: NcclLogReader, stdin: BinaryIO, read_so_far: ReadSoFar | None = None
) -> tuple[LogFile, ...]:
    """Have `reader` read all of these: '-' is `stdin`, and a folder is every file in it but hidden ones.

    A file that is named twice is read once. Behind a limit nothing more is read, which `reader.reached` says. Raises
    UsageError where something is not there, cannot be opened, or is packed in another way than by gzip, and where
    nothing of NCCL was read before a line or a pipe that does not end.
    """
    found: list[LogFile] = []
    unended: list[UsageError] = []
    files = list(_files(names))
    meter = _Meter(sum(map(_size, files)), read_so_far)
    for name in files:
        if len(found) == limits.MOST_LOG_FILES:
            reader.reached.end(f"{name}, and more", f"{limits.MOST_LOG_FILES} files")
        if reader.reached.ends_reading:
            break
        before, is_damaged = reader.nccl_lines, False
        try:
            is_damaged = _read_file(name, reader, stdin, meter)
        except EndlessLineError:
            unended.append(_endless(name))
            reader.reached.pass_over(unended[-1].seen, f"{_MIB_WITHOUT_LINE_END} MiB without the end of a line")
        except SilentPipeError as error:
            unended.append(error)
            reader.reached.pass_over(error.seen, "a pipe as long as its writer says something")
        found.append(LogFile(name, reader.nccl_lines - before, is_damaged))
    if unended and not reader.nccl_lines:
        raise unended[0]
    return tuple(found)


def _endless(name: str) -> UsageError:
    return UsageError(
        f"{name} has no line end in {_MIB_WITHOUT_LINE_END} MiB",
        expected=_EXPECTED,
        reason="it is no text: a device, a core dump, or a file that was made to hold up who reads it",
        next_step=f"head -c 200 {name} | od -c",
    )


def _size(name: str) -> int:
    """The bytes of a file; 0 of what tells none, a pipe."""
    try:
        return 0 if name == STDIN else Path(name).stat().st_size
    except (OSError, ValueError):
        return 0


class _Meter:
    def __init__(self, total: int, read_so_far: ReadSoFar | None) -> None:
        self._done, self._total, self._tell = 0, total, read_so_far
        self.name = ""

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._tell is not None:
            self._tell(self._done, max(self._total, self._done), self.name)


@dataclass(frozen=True, slots=True)
class _Metered:
    stream: io.BufferedReader
    meter: _Meter

    def read(self, size: int, /) -> bytes:
        found = self.stream.read(size)
        self.meter.add(len(found))
        return found


def _read_file(name: str, reader: NcclLogReader, stdin: BinaryIO, meter: _Meter) -> bool:
    """Read a file, or standard input; whether it is a gzip that ends before its end."""
    meter.name = name
    if name == STDIN:
        peekable = io.BufferedReader(stdin) if not hasattr(stdin, "peek") else stdin  # type: ignore[type-var]
        return _read(reader, cast("io.BufferedReader", peekable), "standard input", meter)
    try:
        with opened(Path(name), _EXPECTED) as stream:
            return _read(reader, stream, name, meter)
    except (OSError, ValueError) as error:
        raise unreadable(name, error, _EXPECTED) from None


def _files(names: Sequence[str]) -> Iterator[str]:
    seen = set()
    for name in names:
        for file in [name] if name == STDIN else _opened_files(name):
            key = file if file == STDIN else os.path.realpath(file)
            if key not in seen:
                seen.add(key)
                yield file


def _opened_files(name: str) -> list[str]:
    if not name:
        raise UsageError("the name of a log is empty", expected=_EXPECTED, reason="a variable that is not set")
    try:
        mode = Path(name).stat().st_mode
        if not stat.S_ISDIR(mode):
            return [name]
        with os.scandir(name) as found:
            entries = sorted((each for each in found if not each.name.startswith(".")), key=lambda each: each.name)
        files = [each.path for each in entries if each.is_file()]
    except (OSError, ValueError) as error:
        raise unreadable(name, error, _EXPECTED) from None
    if not files:
        raise UsageError(
            f"{name} is a folder without files" + (", but with folders in it" if entries else ""),
            expected=_EXPECTED,
            reason="a folder stands for the files in it, not for folders below",
            next_step=f"ls -R {name} shows where the logs are",
        )
    return files


def _read(reader: NcclLogReader, stream: io.BufferedReader, name: str, meter: _Meter) -> bool:
    magic = stream.peek(_LONGEST_MAGIC)[:_LONGEST_MAGIC]
    for beginning, unpacker in _UNPACKERS.items():
        if magic.startswith(beginning):
            raise UsageError(
                f"{name} is no plain text, and no gzip",
                expected=_EXPECTED,
                next_step=f"{unpacker} {name} | gpubench explain -",
            )
    if not magic.startswith(_GZIP):
        if _read_dump(reader, stream, name):
            return False
        reader.read(_Metered(stream, meter))
        return False
    unpacked = _Gunzipped(_Metered(stream, meter))
    reader.read(unpacked)
    return unpacked.is_damaged


def _read_dump(reader: NcclLogReader, stream: io.BufferedReader, name: str) -> bool:
    beginning = stream.peek()
    if is_recorder_dump(beginning):
        reader.records.append(read_recorder_dump(_whole(stream, name), name))
    elif is_ras_answer(beginning):
        reader.ras.extend(read_ras_answer(_whole(stream, name), name))
    elif is_stack(beginning):
        reader.stacks.append(read_stack(_whole(stream, name), name))
    elif nccl_inspector.recognises(beginning[:_LONGEST_BEGINNING].decode("utf-8", "replace")):
        while line := stream.readline(_LONGEST_LINE + 1):
            reader.inspector.add(line.decode("utf-8", "replace"))
    else:
        return False
    return True


def _whole(stream: io.BufferedReader, name: str) -> bytes:
    data = stream.read(limits.MOST_DUMP_BYTES + 1)
    if len(data) > limits.MOST_DUMP_BYTES:
        raise UsageError(f"{name} has more than {limits.MOST_DUMP_BYTES} bytes", expected="the dump of one rank")
    return data


class _Gunzipped:
    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._packed = b""
        self._unpacker = _unpacker()
        self.is_damaged = False

    def read(self, size: int, /) -> bytes:
        """At least that many bytes, as long as there are; none at the end, or where the damage begins."""
        parts, length = [], 0
        while length < size and (text := self._text()):
            parts.append(text)
            length += len(text)
        return b"".join(parts)

    def _text(self) -> bytes:
        while not self.is_damaged:
            if self._unpacker.eof:
                self._packed, self._unpacker = self._unpacker.unused_data.lstrip(b"\0"), _unpacker()
                if not (self._packed or self._more()):
                    return b""
            elif not (self._packed or self._more()):
                self.is_damaged = True
                return b""
            try:
                text = self._unpacker.decompress(self._packed, _MOST_AT_ONCE)
            except zlib.error:
                self.is_damaged = True
                return b""
            self._packed = self._unpacker.unconsumed_tail
            if text:
                return text
        return b""

    def _more(self) -> bool:
        self._packed = self._stream.read(_PACKED_BYTES)
        return bool(self._packed)


def _unpacker() -> "zlib._Decompress":
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | _WITH_HEADER)
