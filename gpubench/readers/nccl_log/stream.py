"""Read a job's NCCL log, and the text between its lines, as a stream. `files.py` opens the files.

Most lines in a log of several gigabytes repeat earlier lines. To avoid parsing them again, the reader caches their
parts.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gpubench.model.paths.nccl_log import LogFacts, channel_code
from gpubench.readers import limits
from gpubench.readers.hangs import WatchdogLines
from gpubench.readers.nccl_log.attribution import ARROW, Attribution, Thread
from gpubench.readers.nccl_log.communicators import add_listed_ranks, communicators
from gpubench.readers.nccl_log.endings import WORDS_OF_OTHERS
from gpubench.readers.nccl_log.lines import (
    INFO,
    NAMELESS,
    ReachedLimits,
    clean_block,
    parse_channel,
    parse_head,
    strip_colors,
)
from gpubench.readers.nccl_log.notes import Notes, OwnGpu, may_be_noted, parse_failed_call
from gpubench.readers.nccl_log.parts import PastedParts
from gpubench.readers.pasted import is_markdown
from gpubench.readers.results.nccl_inspector import InspectorLines
from gpubench.readers.ucx_log import UcxLines

if TYPE_CHECKING:
    from gpubench.model.paths.hang import ProcessStack, RankRecord, RasCommunicator

_MOST_LINES = 2**16
_TIMES_REPEATED = 4  # Checking only distinct lines is faster if they repeat more often than this.


class KnownLines(set[bytes]):
    """Complete lines that add nothing, regardless of the communicator that their thread uses."""

    def __init__(self, threads: Mapping[bytes, Thread]) -> None:
        super().__init__()
        self._threads = threads

    def remember(self, line: bytes) -> None:
        """Add a line to the set, unless it is empty."""
        if line:
            if len(self) >= _MOST_LINES:
                self.clear()
            self.add(line)

    def hold_all(self, lines: Sequence[bytes]) -> bool:
        """True if all lines are known and few of them are distinct. This is typical for repeated operations."""
        different = set(lines)
        if len(different) * _TIMES_REPEATED >= len(lines):
            return False
        return all(
            (thread := self._threads.get(line.partition(INFO)[0])) is not None and line in thread.tuning_lines
            for line in different - self
        )


_BLOCK_BYTES = 2**20
_BEGINNING_BYTES = 2**18
_BYTES_BETWEEN_PAIRS = 2**26  # Count pairs only after this many bytes, because counting takes milliseconds.
# NCCL's lines have at most 1,024 bytes, except lists of GPUs. Longer text does not come from NCCL.
_LONGEST_LINE = 2**15

_MOST_THREADS = 2**14

_REPEATED = re.compile(rb" ?\[repeated (\d{1,9})x across cluster\][^\n]*")
"""The remark that Ray appends to a line instead of printing similar lines, even those of other ranks."""

_CHANNEL = INFO + b"Channel "
_MESSAGE = re.compile(rb" NCCL (INFO|WARN) ")
_OPERATION = b": opCount "
_ADDRESS = b" comm 0x"
_REMNANT = b"] via "  # The rest of a line about a connection after another process overwrote its start

_AT_EXIT = b"driver shutting down"
_RETURNED = (b" -> ", b"Failed to execute")
_OF_A_START = (b"Using network ", b"Bootstrap", b"Channel ", b"Trees ", b"Ring ")
"""Messages of a process that creates communicators. It may do so again after all earlier ones have ended."""

_MULTICAST = b"NVLS comm 0x"
_INTERNAL_ERROR = 3

_WORDS = (b"NCCL", _REMNANT, *WORDS_OF_OTHERS)
"""Lines without any of these words are irrelevant."""

_LONGEST_NAME = 50
_SIZE = b" Bytes -> "


class Readable(Protocol):
    """Interface of a binary stream."""

    def read(self, size: int, /) -> bytes: ...


class EndlessLineError(Exception):
    """A line in a stream is longer than the limit."""


class NcclLogReader:
    """Reads the log files of a job, in any order. `facts` returns the facts from all files.

    - `lines`: number of all lines
    - `beginning`: the first bytes of the last stream
    - `reached`: exceeded limits
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
        self.beginning = b""
        self._other_lines = 0
        self._unreadable = 0
        self._left_out = 0
        self.records: list[RankRecord] = []
        self.ras: list[RasCommunicator] = []
        self.stacks: list[ProcessStack] = []
        self.inspector = InspectorLines()
        self._watchdogs = WatchdogLines()
        self._ucx = UcxLines()

    @property
    def nccl_lines(self) -> int:
        return self.lines - self._other_lines

    def read(self, stream: Readable, name: str = "") -> None:
        """Read a stream to its end or until a limit. `name` is the name of the file. Raises EndlessLineError.

        A last line without a line end may be truncated.
        """
        rest, is_endless, without_end = b"", False, 0
        parts = PastedParts(self, name)
        while not self.reached.ends_reading and (block := stream.read(_BLOCK_BYTES)):
            self._count_block(len(block))
            self.beginning = self.beginning or block[:_BEGINNING_BYTES]
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
            if len(rest) > (limits.MOST_DUMP_BYTES if rest.startswith(b"{") else _LONGEST_LINE):
                self._unreadable += _REMNANT in rest
                rest, is_endless, without_end = b"", True, 0
                self.lines += 1
                self._other_lines += 1
            others, tables = self._ucx.add(clean_block(block[:end]))
            self.count_others(tables)
            parts.add(others)
        self._ucx.add(clean_block(rest))
        self._ucx.end_file(is_document=is_markdown(self.beginning.decode("utf-8", "replace").split("\n")))
        parts.end(rest)

    def count_others(self, count: int) -> None:
        """Count lines that another reader parses."""
        self.lines += count
        self._other_lines += count

    def add_command(self, text: str) -> None:
        self._notes.add_command(text)

    def read_cut_line(self, line: bytes) -> None:
        """Parse the last line of a stream, which may be truncated."""
        self.lines += 1
        self._read_messages(strip_colors(line), cut=True)

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
        """Return all facts read so far. `cut_files` are the names of truncated files."""
        attribution, notes = self._attribution, self._notes
        found = communicators(attribution, notes.host_ids, notes.addresses())
        found = add_listed_ranks(found, notes.listed_ranks)
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
            ucx=self._ucx.facts(),
        )

    def read_lines(self, block: bytes) -> None:
        """Parse complete lines. Most of them are connections that combine known parts in a new way."""
        block = self._drop_ray_remarks(block)
        if not any(word in block for word in _WORDS):
            # This is three times as fast as bytes.count in the worst case, where every byte is a line end.
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
                    # NCCL logs all channels of a pair consecutively.
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
            # After this line, the text of a connection may refer to another communicator.
            last = None
            if line in known_lines or self._read_line(line):
                known += 1
        self._repeats = known * 2 > len(lines)

    def _drop_ray_remarks(self, block: bytes) -> bytes:
        """Remove Ray's remarks about repeated lines. Add the number of repeated lines to the count of omitted lines."""
        if b"x across cluster]" in block:
            self._left_out += sum(int(found[1]) for found in _REPEATED.finditer(block))
            return _REPEATED.sub(b"", block)
        return block

    def _read_line(self, line: bytes) -> bool:
        """Parse a line. Return True if it adds nothing.

        Lines about operations make up most of a long log, so they take the fastest branch.
        """
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
            if self._notes.continues_warning(line):
                return
            self._unreadable += _REMNANT in line
            self._notes.add_other(line)
            if b" collective: " in line or b"monitoredBarrier" in line:
                self._watchdogs.add(line)
            return
        self._notes.end_warning()
        if b"[0m" in line:
            line = strip_colors(line)
        if line.endswith(b" NCCL WARN"):
            line += b" "
        head, found, message = line.partition(INFO)
        is_whole = found and b" NCCL " not in message and _REMNANT not in head
        thread = self._thread(head) if is_whole else None
        if thread is None:
            self._read_messages(line)
        else:
            self._info(thread, message, line)

    def _read_messages(self, line: bytes, *, cut: bool = False) -> None:
        """Parse a line that may contain messages of several processes, because they share a file.

        `cut` means that the last message may be truncated.
        """
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
        for number, level in enumerate(found, 1):
            is_last = number == len(found)
            head = line[start : level.start()]
            thread = self._thread(head, follows_text=number > 1 or _REMNANT in before)
            start = level.end()
            message = line[start : len(line) if is_last else found[number].start()]
            if thread is None and level[1] == b"WARN":
                self._notes.add_warning(NAMELESS, NAMELESS, message, head)
            elif thread is None:
                self._unreadable += b" via " in message
                self._lost(message)
            elif level[1] == b"WARN":
                if _AT_EXIT in message:
                    thread.process.is_exiting = True
                if not thread.process.is_closing:
                    self._notes.add_warning(thread.process.host, thread.process.name, message, head)
            else:
                self._info(thread, message, b"", cut=cut or not is_last)

    def _thread(self, head: bytes, *, follows_text: bool = False) -> Thread | None:
        thread = self._threads.get(head)
        if thread is None:
            self._notes.add_other(head)
        if thread is None and (source := parse_head(head)):
            if len(self._threads) >= _MOST_THREADS:
                self._threads.clear()
            source = self._attribution.strip_text(source) if follows_text else source
            thread = self._threads[head] = self._attribution.thread(source)
        return thread

    def _info(self, thread: Thread, message: bytes, line: bytes, *, cut: bool = False) -> None:
        """Parse a message of level INFO.

        `line` is the complete line. It is empty if the line contains other messages or may be truncated.
        """
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
                comm = thread.comm
                own_gpu = None if comm is None or comm.bus is None else OwnGpu(comm.rank, comm.bus)
                self._notes.add(thread.process.host, thread.process.name, message, own_gpu)
            if any(word in message for word in _RETURNED) and self._failed(thread, message):
                return
            self._known_lines.remember(line)
        elif message.startswith(_MULTICAST):
            self._attribution.add_multicast(thread, message)
        else:
            self._attribution.add_communicator(thread, message)

    def _failed(self, thread: Thread, message: bytes) -> bool:
        """Record a failed NCCL call. Return False if the message is not about one."""
        process, call = thread.process, parse_failed_call(message)
        if call is None:
            return False
        # Even in healthy jobs, socket code returns an internal error while communicators are destroyed.
        is_of_the_end = call.code == _INTERNAL_ERROR and call.is_of_sockets and not process.is_starting
        if not process.is_closing and not is_of_the_end:
            self._notes.add_failed_call(process.name, call)
        return True

    def _lost(self, message: bytes) -> None:
        """Record a connection from an unknown process, if the text of its channel is complete."""
        channel, _, text = message.partition(b" : ")
        place = parse_channel(channel)
        if place is not None:
            self._attribution.add_lost(place, text)

    def _channel(self, thread: Thread, message: bytes, line: bytes, *, cut: bool) -> None:
        """Parse a line about a channel of a connection. Skip lines about the order of a ring: 'Channel 03/24 : 0 1
        2'.
        """
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
