"""Whose connection a line speaks of: lines name ranks, ranks count within a communicator, and a process has many.

A line belongs to a communicator of its process in which the writer has that rank, on that GPU. Where several fit, the
one is meant that the thread is initialising, or has named since; else one that lacks the connection so far, for NCCL
makes each once. What remains is kept apart, with all that fit, until every log is read.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from gpubench.model.paths.connections import MOST_CHANNELS, Bundles, ConnectionRow, channel_step
from gpubench.readers.nccl_log.lines import (
    CommunicatorLine,
    Connection,
    Source,
    parse_communicator,
    parse_connection,
    parse_tuning,
)
from gpubench.readers.nccl_log.threads import Membership, Process, Thread, Undecided

if TYPE_CHECKING:
    from gpubench.model.paths.transport import Tuning

Parsed = TypeVar("Parsed")

_MOST_TUNINGS = 4096
"""Of a communicator: every size is kept once, and a job whose sizes all differ must not fill the memory."""

_MOST_CACHED = 2**16
_MOST_MESSAGES = 2**13

ARROW = b" -> "
_ALWAYS = [True]


class Attribution:
    """Every thread of every process, and what each line adds to it.

    For speed: `passed` are lines that say nothing new, each with whether that still holds; `ranks` and `ends` what
    texts before and behind an arrow stand for: a rank; a rank, a kind of line, and whether the receiver wrote it.
    """

    def __init__(self) -> None:
        self.bundles = Bundles()
        self.processes: dict[tuple[str, int], Process] = {}
        self.passed: dict[bytes, list[bool]] = {}
        self.ranks: dict[bytes, int] = {}
        self.ends: dict[bytes, tuple[int, int, bool]] = {}
        self._connections: dict[bytes, Connection | None] = {}
        self._announced: dict[bytes, CommunicatorLine | None] = {}
        self._tunings: dict[bytes, Tuning | None] = {}

    def thread(self, source: Source) -> Thread:
        """The thread that writes as `source`."""
        process = self.processes.get((source.host, source.pid))
        if process is None:
            process = self.processes[source.host, source.pid] = Process(source.host, source.pid)
        thread = process.threads.get(source.tid)
        if thread is None:
            thread = process.threads[source.tid] = Thread(process)
        return thread

    def without_text(self, source: Source) -> Source:
        """The process that is meant where another line without an end stands before a host's name."""
        known = {host for host, pid in self.processes if pid == source.pid and source.host.endswith(host)}
        return source._replace(host=min(known, key=len)) if len(known) == 1 else source

    def connect(self, thread: Thread, place: tuple[int, int], text: bytes, *, cut: bool) -> bool:
        """Take a connection's text, of a channel of NCCL's connection 0 or 1; False where it cannot be read."""
        connection = parse_connection(text, cut=True) if cut else _remembered(self._connections, text, parse_connection)
        if connection is None:
            return False
        channel, index = place
        kind = self.bundles.kind(connection.transport, received=connection.received)
        step = channel_step(channel, index)
        row = self._row(thread, connection, kind, step)
        if row is not None:
            row[connection.peer] = row[connection.peer][kind + step]
            if not cut:
                self._learn(thread, connection, text, kind)
        return True

    def announce(self, thread: Thread, message: bytes) -> None:
        """Take a message that names a communicator: it begins, has a shape, is complete, or ends."""
        line = _remembered(self._announced, message, parse_communicator)
        if line is None:
            return
        process = thread.process
        key, ends = _key(process, line), line.event.startswith(("Destroy", "Abort", "Revoke"))
        membership = process.by_handle.get(line.handle)
        if membership is None or membership.is_another_than(line, key):
            if membership is not None:
                membership.alive = False
            membership = process.by_handle[line.handle] = Membership(process, line, self.bundles)
            process.memberships.append(membership)
            process.forget()
        membership.learn(line, key)
        if line.event == "Init COMPLETE":
            # NCCL up to 2.17 names a communicator only now; later lines of this thread may be of any.
            process.names_bus_ids = line.nvml_index is None and line.bus is not None
            thread.settle([membership])
            _turn(thread, None)
        else:
            _turn(thread, None if ends else membership)
        if membership.alive == ends:
            membership.alive = not ends
            process.forget()

    def use(self, thread: Thread, handle: bytes) -> None:
        """Take what an operation names: the communicator that the thread uses."""
        _turn(thread, thread.process.by_handle.get(handle))

    def tune(self, thread: Thread, message: bytes, line: bytes) -> None:
        """Take what rank 0 of a communicator runs an operation with. `line` is all of it, if nothing else is in it."""
        tuning = _remembered(self._tunings, message, parse_tuning)
        if tuning is None:
            return
        process = thread.process
        roots = [each for each in process.memberships if each.alive and each.rank == 0]
        is_clear = len(roots) == 1
        if thread.current in roots:
            roots = [thread.current]
        tunings = roots[0].tunings if len(roots) == 1 else process.tunings
        if len(tunings) < _MOST_TUNINGS:
            tunings[tuning] = None
        if line and len(thread.tuned) < _MOST_TUNINGS:
            thread.tuned.add(line)
        if is_clear:
            self.pass_over(line, thread.holds)

    def pass_over(self, line: bytes, holds: list[bool] | None = None) -> None:
        """Remember a line that says nothing new, as long as `holds` has True in it."""
        if line:
            if len(self.passed) >= _MOST_CACHED:
                self.passed.clear()
            self.passed[line] = holds or _ALWAYS

    def _row(self, thread: Thread, connection: Connection, kind: int, step: int) -> ConnectionRow | None:
        """Where to note a connection; None where that was done, as it depends on what else is known."""
        process = thread.process
        candidates = process.fitting(connection)
        if thread.current in candidates:
            return thread.current.row
        if not candidates or (process.names_bus_ids and step < MOST_CHANNELS):
            return thread.wait(connection, self.bundles)
        if len(candidates) == 1:
            return candidates[0].claim(connection)
        lacking = [each for each in candidates if not each.row[connection.peer].has(kind + step)]
        if len(lacking) == 1:
            return lacking[0].claim(connection)
        if lacking:
            process.leave_open(Undecided(connection, kind + step, tuple(map(process.memberships.index, lacking))))
        return None

    def _learn(self, thread: Thread, connection: Connection, text: bytes, kind: int) -> None:
        """Remember where such texts lead, where that follows from the writer's end alone."""
        process, rank, device = thread.process, connection.rank, connection.device
        fitting = [each for each in process.memberships if each.alive and each.is_writer(rank, device)]
        owner = thread.current if thread.current in fitting else fitting[0] if len(fitting) == 1 else None
        left, arrow, rest = text.partition(ARROW)
        if owner is None or owner.key is None or process.names_bus_ids or not arrow:
            return
        for known in (self.ranks, self.ends):
            if len(known) >= _MOST_CACHED:
                known.clear()
        self.ranks[left] = connection.src
        self.ends[rest] = connection.dst, kind, connection.received
        thread.lead(rest if connection.received else left, owner.row)


def _turn(thread: Thread, membership: Membership | None) -> None:
    if membership is not thread.current:
        thread.current = membership
        thread.forget()


def _key(process: Process, line: CommunicatorLine) -> str | None:
    """What tells a communicator in every process: its commId, or its parent's, the number of the split and the colour.

    NCCL 2.23 does not print the number: there it is counted.
    """
    if line.id is not None:
        return line.id
    parent = None if line.parent is None else process.by_handle.get(line.parent)
    if parent is None or parent.key is None:
        return None
    if line.event == "Init START":
        process.splits[parent.key] += 1
    split = process.splits[parent.key] if line.split is None else line.split
    return f"{parent.key}/split{split}/color{line.color}"


def _remembered(kept: dict[bytes, Parsed], message: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
    """What a message says, parsed once for as long as it is remembered."""
    if message not in kept:
        if len(kept) >= _MOST_MESSAGES:
            kept.clear()
        kept[message] = parse(message)
    return kept[message]
