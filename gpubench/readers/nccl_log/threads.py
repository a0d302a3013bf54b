"""The processes and threads that write NCCL's log, and the communicators that each process has."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from gpubench.model.paths.connections import ChannelSets, RankConnections
from gpubench.model.paths.transport import Tuning
from gpubench.readers.nccl_log import limits
from gpubench.readers.nccl_log.lines import CommunicatorLine, Connection

_MOST_ENDS = 1024
"""Of a thread: its own end of connections is its rank in each communicator, and with each NIC."""


class Comm:
    """One `ncclComm` of a process: its rank in a communicator. The comms of all ranks make up the communicator.

    `comm_id` names the communicator in every process, None where no line does; `peer_devices` are the GPUs of peers,
    which tell communicators without an id apart. `tuning_lines` are the whole lines that `tunings` were read from.
    `began` and `is_complete` are the start and the end of its init, `is_connected` whether rings or trees were set up.
    """

    def __init__(self, process: "Process", line: CommunicatorLine, sets: ChannelSets) -> None:
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
        self.connections = RankConnections(sets, line.size)
        self.peer_devices: dict[int, str] = {}
        self.tunings: dict[Tuning, None] = {}
        self.tuning_lines: set[bytes] = set()

    def is_same(self, line: CommunicatorLine, comm_id: str | None) -> bool:
        """True if a line with this comm's address can be of it, not of a later comm at the same address."""
        return (line.rank, line.size) == (self.rank, self.size) and (
            None in (comm_id, self.comm_id) or comm_id == self.comm_id
        )

    def update(self, line: CommunicatorLine, comm_id: str | None) -> None:
        """Take the facts of this comm from a line."""
        self.comm_id = self.comm_id or comm_id
        self.nodes = self.nodes if line.nodes is None else line.nodes
        self.local_rank = self.local_rank if line.local_rank is None else line.local_rank
        self.nvml_index = self.nvml_index if line.nvml_index is None else line.nvml_index
        self.bus = self.bus if line.bus is None else line.bus

    def is_rank(self, rank: int, device: str) -> bool:
        """True if it is this rank, on this GPU."""
        return rank == self.rank and self.is_on(device)

    def is_on(self, device: str) -> bool:
        """True if its GPU may be the one that a line has in brackets: NVML's index, up to NCCL 2.17 the bus id."""
        if not device:
            return True
        if self.nvml_index is not None:
            return device == str(self.nvml_index)
        return self.bus is None or device == f"{self.bus:x}"

    def connections_for(self, connection: Connection) -> RankConnections:
        """The connections of this comm, to which one is to be added."""
        if self.comm_id is None:
            self.peer_devices[connection.peer] = connection.peer_device
        return self.connections


class EarlyConnections:
    """Connections that a rank logs before, or without, a line that names its communicator."""

    def __init__(self, sets: ChannelSets) -> None:
        self.connections = RankConnections(sets, limits.MOST_RANKS)
        self.peer_devices: dict[int, str] = {}


class AmbiguousChannel(NamedTuple):
    """A channel, by its code, of a connection that each of several comms may have."""

    connection: Connection
    code: int
    comms: tuple[Comm, ...]


@dataclass(slots=True, eq=False)
class Process:
    """One process: its comms in order of appearance, and what may be of several of them.

    `ambiguous` has how often each channel was logged, at most as often as there are comms that may have it.
    """

    host: str
    pid: int
    comms: list[Comm] = field(default_factory=list)
    comm_by_address: dict[bytes, Comm] = field(default_factory=dict)
    threads: dict[int, "Thread"] = field(default_factory=dict)
    ambiguous: dict[AmbiguousChannel, int] = field(default_factory=dict)
    tunings: dict[Tuning, None] = field(default_factory=dict)
    splits: Counter[str] = field(default_factory=Counter)
    is_exiting: bool = False
    begins_again: bool = False
    """It writes what communicators begin with, after the end of all that it had."""

    has_bus_ids: bool = False
    """NCCL up to 2.17: bus ids in brackets, and a communicator is named only when its init is complete."""

    @property
    def name(self) -> str:
        """As settings and remarks name it."""
        return f"{self.host}:{self.pid}"

    @property
    def is_closing(self) -> bool:
        """True if it had communicators, and has none any more: what it closes then may fail in a healthy job too."""
        if self.is_exiting:
            return True
        return bool(self.comms) and not self.begins_again and not any(comm.is_alive for comm in self.comms)

    @property
    def is_starting(self) -> bool:
        """True if the init of any of its communicators began and did not end, or none is known."""
        return not self.comms or any(comm.is_alive and not comm.is_complete for comm in self.comms)

    def comms_of(self, rank: int, device: str, most_rank: int) -> list[Comm]:
        """The living comms that have this rank on this GPU, and a rank `most_rank`."""
        return [comm for comm in self.comms if comm.is_alive and most_rank < comm.size and comm.is_rank(rank, device)]

    def add_ambiguous(self, channel: AmbiguousChannel) -> bool:
        """Count a channel that several comms may have; True for a new one."""
        before = self.ambiguous.get(channel, 0)
        self.ambiguous[channel] = min(before + 1, len(channel.comms))
        return not before

    def forget_caches(self) -> None:
        """Drop what threads remember of lines: the comms changed."""
        for thread in self.threads.values():
            thread.forget_caches()


@dataclass(slots=True, eq=False)
class Thread:
    """One thread: the comm that it initialises or named last, the `newest` of those that it completed, and connections
    logged before any was named.

    For speed, until the comms of the process change: `connections` has where a connection is added, by the text of the
    writer's end of it; `tuning_lines` are lines that say nothing new of `comm`.
    """

    process: Process
    comm: Comm | None = None
    newest: Comm | None = None
    early: dict[tuple[int, str], EarlyConnections] = field(default_factory=dict)
    connections: dict[bytes, RankConnections] = field(default_factory=dict)
    tuning_lines: set[bytes] = field(default_factory=set)

    def use(self, comm: Comm | None) -> None:
        """Take the following lines for those of a comm."""
        if comm is not self.comm:
            self.comm = comm
            self.forget_caches()

    def forget_caches(self) -> None:
        """Drop what is remembered of lines."""
        self.connections.clear()
        self.tuning_lines = self.comm.tuning_lines if self.comm is not None and self.comm.rank == 0 else set()

    def remember(self, own_end: bytes, connections: RankConnections) -> None:
        """Remember where the connections with this text at the writer's end are added."""
        if len(self.connections) >= _MOST_ENDS:
            self.connections.clear()
        self.connections[own_end] = connections

    def early_connections(self, connection: Connection, sets: ChannelSets) -> RankConnections:
        """The connections to which one is added until its communicator is named."""
        key = connection.rank, connection.device
        if key not in self.early:
            self.early[key] = EarlyConnections(sets)
        self.early[key].peer_devices[connection.peer] = connection.peer_device
        return self.early[key].connections

    def assign_early(self, comms: list[Comm]) -> None:
        """Hand early connections to the one comm that can have them."""
        for (rank, device), early in list(self.early.items()):
            most_rank = max(early.connections, default=0)
            fitting = [comm for comm in comms if comm.is_rank(rank, device) and most_rank < comm.size]
            if len(fitting) == 1:
                fitting[0].connections.add_all(early.connections)
                if fitting[0].comm_id is None:
                    fitting[0].peer_devices.update(early.peer_devices)
                del self.early[rank, device]
        self.forget_caches()
