"""Assign each line of an NCCL log to a process, a thread and a communicator.

A line about a connection contains ranks, but not the communicator in which they count. It belongs to a comm with the
rank and the GPU of the process that wrote the line.

If several comms match, choose the one that the thread named last. Otherwise choose the only one whose rings are not set
up. Otherwise choose the only one without this channel, because NCCL logs each channel once. Remaining lines are
assigned after all logs have been read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from gpubench.model.paths.nccl_log import ChannelSets, RankConnections, channel_code
from gpubench.model.paths.transport import Tuning
from gpubench.readers import limits
from gpubench.readers.nccl_log import lines

_MOST_ENDS = 1024  # Maximum number of cached texts per thread. Each text names its rank in one communicator, and a NIC.


class Comm:
    """One `ncclComm` of a process, which is one rank of a communicator.

    - `comm_id`: id that all processes of a communicator log; None if not logged
    - `peer_devices`: the GPUs of peers, which distinguish communicators without an id
    - `tuning_lines`: the lines that contained `tunings`
    - `began`, `is_complete`: the initialization has started, or has completed
    - `is_connected`: rings or trees are set up
    - `has_multicast`: the rank shares memory with the ranks of its node through NVLink SHARP (NVLS)
    """

    def __init__(self, process: "Process", line: lines.CommunicatorLine, sets: ChannelSets) -> None:
        self.process = process
        self.rank = line.rank
        self.size = line.size
        self.comm_id: str | None = None
        self.nodes: int | None = None
        self.local_rank: int | None = None
        self.nvml_index: int | None = None
        self.bus: int | None = None
        self.is_alive = True
        self.began = False
        self.is_complete = False
        self.is_connected = False
        self.has_multicast = False
        self.connections = RankConnections(sets, line.size)
        self.peer_devices: dict[int, str] = {}
        self.tunings: dict[Tuning, None] = {}
        self.tuning_lines: set[bytes] = set()

    def update(self, line: lines.CommunicatorLine, comm_id: str | None) -> None:
        self.comm_id = self.comm_id or comm_id
        self.nodes = self.nodes if line.nodes is None else line.nodes
        self.local_rank = self.local_rank if line.local_rank is None else line.local_rank
        self.nvml_index = self.nvml_index if line.nvml_index is None else line.nvml_index
        self.bus = self.bus if line.bus is None else line.bus

    def is_rank(self, rank: int, device: str) -> bool:
        return rank == self.rank and self.is_on(device)

    def is_on(self, device: str) -> bool:
        """True if a device in a line may be the GPU of this comm. Lines have NVML's index, or the bus id up to NCCL
        2.17.
        """
        if not device:
            return True
        if self.nvml_index is not None:
            return device == str(self.nvml_index)
        return self.bus is None or device == f"{self.bus:x}"

    def may_write(self, rank: int, device: str, peer: int) -> bool:
        """True if this comm may have written a line with this rank, device and peer."""
        return rank == self.rank and self.is_alive and peer < self.size and self.is_on(device)

    def has(self, peer: int, code: int) -> bool:
        return self.connections.channels_to(peer).has(code)

    def connections_for(self, connection: lines.Connection) -> RankConnections:
        """Return the connections of this comm, so that the caller can add one.

        If the comm has no id, remember the peer's GPU.
        """
        if self.comm_id is None:
            self.peer_devices[connection.peer] = connection.peer_device
        return self.connections


class EarlyConnections:
    """Connections that a rank logs before any line that names its communicator. Such a line may be missing."""

    def __init__(self, sets: ChannelSets) -> None:
        self.connections = RankConnections(sets, limits.MOST_LOG_RANKS)
        self.peer_devices: dict[int, str] = {}


class AmbiguousChannel(NamedTuple):
    """A channel that may belong to several comms. `code` encodes its number, connection and transport."""

    connection: lines.Connection
    code: int
    comms: tuple[Comm, ...]


class _Passing:
    """The comms that passed a test. `tried` is the number of comms tested so far."""

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self.tried = 0


class Process(Struct, eq=False):
    """One process, with its comms in order of appearance.

    `ambiguous` has channels that may belong to several comms, with the number of their lines. The number is at most the
    number of these comms.
    """

    host: str
    pid: int
    comms: list[Comm] = field(default_factory=list)
    comm_by_address: dict[bytes, Comm] = field(default_factory=dict)
    threads: dict[int, "Thread"] = field(default_factory=dict)
    ambiguous: dict[AmbiguousChannel, int] = field(default_factory=dict)
    tunings: dict[Tuning, None] = field(default_factory=dict)
    splits: Counter[str] = field(default_factory=Counter)
    passing: dict[tuple[str | int, ...], _Passing] = field(default_factory=dict)
    remembering: list["Thread"] = field(default_factory=list)
    """Threads with cached lines. The caches are valid until the comms of the process change."""

    is_exiting: bool = False
    begins_again: bool = False
    """True if the process starts new communicators after all earlier ones have ended."""

    has_bus_ids: bool = False
    """True for NCCL up to 2.17, which prints bus ids in brackets and names a communicator only after its
    initialization.
    """

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}"

    @property
    def is_closing(self) -> bool:
        """True after all communicators of the process have ended. Errors are then normal, because NCCL closes its
        resources.
        """
        if self.is_exiting:
            return True
        return bool(self.comms) and not self.begins_again and not any(comm.is_alive for comm in self.comms)

    @property
    def is_starting(self) -> bool:
        """True while a communicator initializes, and before the first one."""
        return not self.comms or any(comm.is_alive and not comm.is_complete for comm in self.comms)

    def first_passing(
        self, key: tuple[str | int, ...], test: Callable[[Comm], bool], most: int | None = None
    ) -> Sequence[Comm]:
        """Return the first comms that pass a test, at most `most`. `key` identifies the test for the cache.

        Comms that failed a test are not tested again, because a process with 8,000 communicators logs a million lines.
        """
        known = self.passing.get(key)
        if known is None:
            known = self.passing[key] = _Passing()
        known.comms = [comm for comm in known.comms if test(comm)]
        while known.tried < len(self.comms) and (most is None or len(known.comms) < most):
            comm = self.comms[known.tried]
            known.tried += 1
            if test(comm):
                known.comms.append(comm)
        return known.comms

    def forget_caches(self) -> None:
        for thread in self.remembering:
            thread.forget_caches()
        self.remembering.clear()


class Thread(Struct, eq=False):
    """One thread of a process.

    - `comm`: the comm that the thread named last
    - `newest`: the last comm whose initialization it completed
    - `early`: connections before any line that names a communicator
    - `connections`: cache of the connections to extend, by the text of the writing rank
    - `tuning_lines`: cache of lines that add nothing to `comm`

    The caches are valid until the comms of the process change.
    """

    process: Process
    comm: Comm | None = None
    newest: Comm | None = None
    early: dict[tuple[int, str], EarlyConnections] = field(default_factory=dict)
    connections: dict[bytes, RankConnections] = field(default_factory=dict)
    tuning_lines: set[bytes] = field(default_factory=set)

    def use(self, comm: Comm | None) -> None:
        """Assign the following lines of this thread to `comm`."""
        if comm is not self.comm:
            self.comm = comm
            self.forget_caches()

    def forget_caches(self) -> None:
        self.connections.clear()
        self.tuning_lines = self.comm.tuning_lines if self.comm is not None and self.comm.rank == 0 else set()

    def remember(self, own_end: bytes, connections: RankConnections) -> None:
        """Cache the connections to extend, by the text of the writing rank."""
        if len(self.connections) >= _MOST_ENDS:
            self.connections.clear()
        self.connections[own_end] = connections
        self.process.remembering.append(self)

    def early_connections(self, connection: lines.Connection, sets: ChannelSets) -> RankConnections:
        """Return the connections of a rank whose communicator is still unknown, so that the caller can add one."""
        key = connection.rank, connection.device
        if key not in self.early:
            self.early[key] = EarlyConnections(sets)
        self.early[key].peer_devices[connection.peer] = connection.peer_device
        return self.early[key].connections

    def assign_early(self, comms: list[Comm]) -> None:
        """Move early connections to a comm if it is the only one that matches."""
        for (rank, device), early in list(self.early.items()):
            most_rank = max(early.connections, default=0)
            fitting = [comm for comm in comms if comm.is_rank(rank, device) and most_rank < comm.size]
            if len(fitting) == 1:
                fitting[0].connections.add_all(early.connections)
                if fitting[0].comm_id is None:
                    fitting[0].peer_devices.update(early.peer_devices)
                del self.early[rank, device]
        self.forget_caches()


_MOST_TUNINGS = 4096  # Per communicator. It limits memory use for jobs with ever new sizes.

_MOST_CACHED = 2**16
_MOST_LOST = 2**12
_MOST_NAMESAKES = 64

ARROW = b" -> "


class Attribution:
    """The processes of a job with their comms, built line by line.

    For speed, it caches the text on both sides of ` -> ` in lines about connections. The left side has the source rank.
    The right side has the destination rank, the code of the line, and whether the receiver wrote it.

    `lost` has connections of unknown processes, with their channel codes. `cut_heads` is the number of processes whose
    host name lost its beginning.
    """

    def __init__(self, reached: lines.ReachedLimits) -> None:
        self.reached = reached
        self.sets = ChannelSets()
        self.no_connections = RankConnections(self.sets, 0)
        self.processes: dict[tuple[str, int], Process] = {}
        self._by_pid: dict[int, list[Process]] = {}
        self._comms = 0
        self._ambiguous = 0
        self.lost: list[tuple[lines.Connection, int]] = []
        self.cut_heads = 0
        self.left_sides: dict[bytes, int] = {}
        self.right_sides: dict[bytes, tuple[int, int, bool]] = {}

    def thread(self, source: lines.LineSource) -> Thread:
        process = self.processes.get((source.host, source.pid))
        if process is None:
            process = self.processes[source.host, source.pid] = Process(source.host, source.pid)
            self._by_pid.setdefault(source.pid, []).append(process)
            self._end_beyond(len(self.processes), limits.MOST_PROCESSES, "processes")
        if source.tid not in process.threads:
            process.threads[source.tid] = Thread(process)
            self._end_beyond(len(process.threads), limits.MOST_THREADS_OF_A_PROCESS, "threads of a process")
        return process.threads[source.tid]

    def find_by_pid(self, pid: int) -> Sequence[Process]:
        """Return the processes with this process id on all hosts. Return none if there are too many."""
        found = self._by_pid.get(pid, ())
        return found if len(found) <= _MOST_NAMESAKES else ()

    def pairs(self) -> int:
        """Return the number of connected pairs of a rank and a peer."""
        return sum(
            sum(len(comm.connections) for comm in process.comms)
            + sum(len(early.connections) for thread in process.threads.values() for early in thread.early.values())
            for process in self.processes.values()
        )

    def _end_beyond(self, count: int, most: int, what: str) -> None:
        if count > most:
            self.reached.end(f"more than {most} {what}", f"{most} {what}")

    def strip_text(self, source: lines.LineSource) -> lines.LineSource:
        """Remove other text before the host name, if exactly one known process remains that fits."""
        known = {process.host for process in self.find_by_pid(source.pid) if source.host.endswith(process.host)}
        return source._replace(host=min(known, key=len)) if len(known) == 1 else source

    def add_connection(self, thread: Thread, place: tuple[int, int], text: bytes, *, cut: bool) -> bool:
        """Add a channel. `place` is its number and NCCL's connection number. Return False if the text cannot be
        parsed.
        """
        connection = lines.parse_connection(text, cut=cut)
        if connection is None:
            return False
        line_code = self.sets.line_code(connection.transport, received=connection.received)
        code = line_code + channel_code(*place)
        if connection.handle is not None and connection.size is not None:
            self._name(thread.process, connection.handle, connection.rank, connection.size).connections.add(
                connection.peer, code
            )
            return True
        connections = self._find_connections(thread, connection, code, is_send=place[1] == 1)
        if connections is not None:
            connections.add(connection.peer, code)
            if not cut:
                self._remember(thread, connection, text, line_code)
        return True

    def add_lost(self, place: tuple[int, int], text: bytes) -> None:
        """Record a channel whose line lost the process that wrote it."""
        connection = lines.parse_connection(text)
        if connection is not None and len(self.lost) < _MOST_LOST:
            line_code = self.sets.line_code(connection.transport, received=connection.received)
            self.lost.append((connection, line_code + channel_code(*place)))

    def connected(self, thread: Thread) -> None:
        """Process a line that says that rings or trees are connected. It does not name the communicator."""
        comm = thread.comm or thread.newest
        if comm is None:
            unconnected = thread.process.first_passing(
                ("connects",), lambda comm: comm.is_alive and not comm.is_connected
            )
            waiting = [comm for comm in unconnected if comm.connections]
            comm = waiting[0] if len(waiting) == 1 else None
        if comm is not None:
            comm.is_connected = True
        thread.newest = None

    def _name(self, process: Process, handle: bytes, rank: int, size: int) -> Comm:
        """Return the comm whose address RCCL prints in a line about a connection. Create it if it is new."""
        comm = process.comm_by_address.get(handle)
        if comm is None or (comm.rank, comm.size) != (rank, size):
            line = lines.CommunicatorLine(handle, rank, size, None, None, None, None, None, None, None, None, "")
            comm = self._begin_comm(process, line)
        return comm

    def _begin_comm(self, process: Process, line: lines.CommunicatorLine) -> Comm:
        comm = process.comm_by_address[line.handle] = Comm(process, line, self.sets)
        process.comms.append(comm)
        process.forget_caches()
        self._comms += 1
        self._end_beyond(self._comms, limits.MOST_COMMS, "ranks of communicators")
        self._end_beyond(len(process.comms), limits.MOST_COMMS_OF_A_PROCESS, "communicators of a process")
        return comm

    def add_communicator(self, thread: Thread, message: bytes) -> None:
        """Process a message about the start, the properties or the end of a comm."""
        line = lines.parse_communicator(message)
        if line is None:
            ranks = lines.parse_claimed_ranks(message)
            if ranks is not None and ranks > limits.MOST_LOG_RANKS:
                self.reached.pass_over(
                    f"a communicator of {ranks} ranks", f"{limits.MOST_LOG_RANKS} ranks of one communicator"
                )
            return
        process = thread.process
        comm_id, ends = _comm_id(process, line), line.event.startswith(("Destroy", "Abort", "Revoke"))
        comm = process.comm_by_address.get(line.handle)
        if comm is None:
            comm = self._begin_comm(process, line)
        elif (comm.rank, comm.size) != (line.rank, line.size) or (
            None not in (comm_id, comm.comm_id) and comm_id != comm.comm_id
        ):
            # The address now belongs to a new comm.
            comm.is_alive = False
            comm = self._begin_comm(process, line)
        if comm.nvml_index is None and line.nvml_index is not None and comm.bus is not None:
            # Now that the NVML index is known in addition to the bus id, the comm may match other GPUs.
            process.passing.clear()
        comm.update(line, comm_id)
        comm.began = comm.began or line.event == "Init START"
        if line.event == "Init COMPLETE":
            comm.is_complete = True
            thread.newest = comm
            # NCCL up to 2.17 names a communicator only at this point. Later lines of this thread may belong to any
            # communicator.
            process.has_bus_ids = line.nvml_index is None and line.bus is not None
            thread.assign_early([comm])
            thread.use(None)
        else:
            thread.use(None if ends else comm)
        if ends:
            process.begins_again = False
        if comm.is_alive == ends:
            comm.is_alive = not ends
            if comm.is_alive:
                process.passing.clear()
            process.forget_caches()

    def add_multicast(self, thread: Thread, message: bytes) -> None:
        """Process 'NVLS comm 0x7f headRank 0 nHeads 6 ...'. A rank logs it after it has set up shared NVLS memory."""
        comm = thread.process.comm_by_address.get(message.split(b" ", 3)[2])
        if comm is not None:
            comm.has_multicast = True

    def use(self, thread: Thread, address: bytes) -> None:
        """Assign the following lines of a thread to the comm whose address an operation's line contains."""
        thread.use(thread.process.comm_by_address.get(address))

    def add_tuning(self, thread: Thread, message: bytes, line: bytes) -> None:
        """Add the algorithm and the protocol of an operation. Only rank 0 logs them. If `line` is not empty, cache
        it.
        """
        tuning = lines.parse_tuning(message)
        if tuning is None:
            return
        process = thread.process
        roots = process.first_passing(("root",), _is_living_root, most=2)
        if thread.comm is not None and _is_living_root(thread.comm):
            roots = [thread.comm]
        tunings = roots[0].tunings if len(roots) == 1 else process.tunings
        if len(tunings) < _MOST_TUNINGS:
            tunings[tuning] = None
        if line and len(thread.tuning_lines) < _MOST_TUNINGS:
            thread.tuning_lines.add(line)
            process.remembering.append(thread)

    def _find_connections(
        self, thread: Thread, connection: lines.Connection, code: int, *, is_send: bool
    ) -> RankConnections | None:
        """Return the connections to which a channel belongs. None if they already contain it, or if several comms
        match.
        """
        process, writer = thread.process, (connection.rank, connection.device, connection.peer)
        if thread.comm is not None and thread.comm.may_write(*writer):
            return thread.comm.connections
        comms = process.first_passing(("any", *writer), lambda comm: comm.may_write(*writer), most=2)
        if not comms or (process.has_bus_ids and not is_send):
            self._end_beyond(len(thread.early), limits.MOST_EARLY_OF_A_THREAD, "ranks without a communicator")
            return thread.early_connections(connection, self.sets)
        unconnected = process.first_passing(
            ("unconnected", *writer), lambda comm: not comm.is_connected and comm.may_write(*writer), most=2
        )
        if len(unconnected) == 1:
            return unconnected[0].connections_for(connection)
        if len(comms) > 1:
            comms = process.first_passing(
                ("lacking", *writer, code), lambda comm: comm.may_write(*writer) and not comm.has(connection.peer, code)
            )
        if len(comms) == 1:
            return comms[0].connections_for(connection)
        if comms:
            channel = AmbiguousChannel(connection, code, tuple(comms))
            before = process.ambiguous.get(channel, 0)
            process.ambiguous[channel] = min(before + 1, len(comms))
            self._ambiguous += 0 if before else len(comms)
            self._end_beyond(
                self._ambiguous, limits.MOST_AMBIGUOUS, "channels that may belong to several communicators"
            )
        return None

    def _remember(self, thread: Thread, connection: lines.Connection, text: bytes, line_code: int) -> None:
        """Cache the connections to extend, if the text of the writing rank alone determines them."""
        process = thread.process
        writer = (connection.rank, connection.device, 0)
        comm = thread.comm
        if comm is None or not comm.may_write(*writer):
            comms = process.first_passing(("any", *writer), lambda comm: comm.may_write(*writer), most=2)
            comm = comms[0] if len(comms) == 1 else None
        left, arrow, right = text.partition(ARROW)
        if comm is None or comm.comm_id is None or process.has_bus_ids or not arrow:
            return
        for sides in (self.left_sides, self.right_sides):
            if len(sides) >= _MOST_CACHED:
                sides.clear()
        self.left_sides[left] = connection.src
        self.right_sides[right] = connection.dst, line_code, connection.received
        thread.remember(right if connection.received else left, comm.connections)


def _is_living_root(comm: Comm) -> bool:
    return comm.is_alive and comm.rank == 0


def _comm_id(process: Process, line: lines.CommunicatorLine) -> str | None:
    """Return the commId. For a split communicator, it is the parent's commId, the number of the split, and the
    color.

    NCCL 2.23 does not log the number of the split, so it is counted here.
    """
    if line.id is not None:
        return line.id
    parent = None if line.parent is None else process.comm_by_address.get(line.parent)
    if parent is None or parent.comm_id is None:
        return None
    if line.event == "Init START":
        process.splits[parent.comm_id] += 1
    split = process.splits[parent.comm_id] if line.split is None else line.split
    return f"{parent.comm_id}/split{split}/color{line.color}"
