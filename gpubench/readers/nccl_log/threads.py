"""The threads and processes that write NCCL's log, and the communicators that each process is in."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from gpubench.model.paths.connections import Bundles, ConnectionRow
from gpubench.model.paths.transport import Tuning
from gpubench.readers.nccl_log.lines import MOST_RANKS, CommunicatorLine, Connection

_MOST_ENDS = 1024
"""Of a thread: its own end of connections is its rank in each communicator, and with each NIC."""


class Membership:
    """A rank of a communicator, as its own process sees it. `key` is what its communicator is told by, or None.

    `tuned` are lines that say with what operations run, and that were taken.
    """

    def __init__(self, process: "Process", line: CommunicatorLine, bundles: Bundles) -> None:
        self.process = process
        self.rank = line.rank
        self.size = line.size
        self.key: str | None = None
        self.nodes: int | None = None
        self.local_rank: int | None = None
        self.nvml_index: int | None = None
        self.bus: int | None = None
        self.alive = True
        self.row = ConnectionRow(bundles, line.size)
        self.tunings: dict[Tuning, None] = {}
        self.tuned: set[bytes] = set()
        self.claims: dict[int, str] = {}

    def is_another_than(self, line: CommunicatorLine, key: str | None) -> bool:
        """Whether its address was used again."""
        if (line.rank, line.size) != (self.rank, self.size):
            return True
        return None not in (key, self.key) and key != self.key

    def learn(self, line: CommunicatorLine, key: str | None) -> None:
        """Take what a line says of it."""
        self.key = self.key or key
        self.nodes = self.nodes if line.nodes is None else line.nodes
        self.local_rank = self.local_rank if line.local_rank is None else line.local_rank
        self.nvml_index = self.nvml_index if line.nvml_index is None else line.nvml_index
        self.bus = self.bus if line.bus is None else line.bus

    def is_writer(self, rank: int, device: str) -> bool:
        """Whether the end that wrote a line can be this rank."""
        return rank == self.rank and is_on(self, device)

    def fits(self, connection: Connection) -> bool:
        """Whether a line can be of this communicator."""
        return self.is_writer(connection.rank, connection.device) and connection.peer < self.size

    def claim(self, connection: Connection) -> ConnectionRow:
        """Where to note a connection of this communicator, which, without a key, is told by the GPUs of its peers."""
        if self.key is None:
            self.claims[connection.peer] = connection.peer_device
        return self.row


def is_on(membership: Membership, device: str) -> bool:
    """Whether a rank's GPU may be the one in brackets: NVML's index, up to NCCL 2.17 the bus id."""
    if not device:
        return True
    if membership.nvml_index is not None:
        return device == str(membership.nvml_index)
    return membership.bus is None or device == f"{membership.bus:x}"


class Waiting:
    """What a rank on a GPU said before, or without, any line that names its communicator."""

    def __init__(self, bundles: Bundles) -> None:
        self.row = ConnectionRow(bundles, MOST_RANKS)
        self.claims: dict[int, str] = {}


class Undecided(NamedTuple):
    """A channel of a connection that several communicators may have made, by their places in the process."""

    connection: Connection
    step: int
    candidates: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Process:
    """One process: its communicators by address, in order of appearance, and the lines that none is told for.

    `undecided` has how often each was seen, at most as often as communicators fit.
    """

    host: str
    pid: int
    memberships: list[Membership] = field(default_factory=list)
    by_handle: dict[bytes, Membership] = field(default_factory=dict)
    threads: dict[int, "Thread"] = field(default_factory=dict)
    undecided: dict[Undecided, int] = field(default_factory=dict)
    tunings: dict[Tuning, None] = field(default_factory=dict)
    splits: Counter[str] = field(default_factory=Counter)
    names_bus_ids: bool = False
    """NCCL up to 2.17: bus ids in brackets, and a communicator is named only when it is complete."""

    @property
    def name(self) -> str:
        """As settings and remarks name it."""
        return f"{self.host}:{self.pid}"

    def forget(self) -> None:
        """Communicators changed: every thread looks again."""
        for thread in self.threads.values():
            thread.forget()

    def fitting(self, connection: Connection) -> list[Membership]:
        """The living communicators that a line can be of."""
        return [each for each in self.memberships if each.alive and each.fits(connection)]

    def leave_open(self, undecided: Undecided) -> None:
        """Count a channel of a connection that several communicators may have."""
        self.undecided[undecided] = min(self.undecided.get(undecided, 0) + 1, len(undecided.candidates))


@dataclass(slots=True, eq=False)
class Thread:
    """One thread: the communicator that it initialises or named last, and lines that came before any was named.

    What follows is for speed, and forgotten when communicators change: where connections are noted, by the text of the
    writer's end; tuning lines that were taken of the communicator at hand, which need no second look as long as `holds`
    has True in it.
    """

    process: Process
    current: Membership | None = None
    waiting: dict[tuple[int, str], Waiting] = field(default_factory=dict)
    rows: dict[bytes, ConnectionRow] = field(default_factory=dict)
    tuned: set[bytes] = field(default_factory=set)
    holds: list[bool] = field(default_factory=lambda: [True])

    def forget(self) -> None:
        """Communicators changed: look again."""
        self.rows.clear()
        self.tuned = self.current.tuned if self.current is not None and self.current.rank == 0 else set()
        self.holds[0] = False
        self.holds = [True]

    def lead(self, own_end: bytes, row: ConnectionRow) -> None:
        """Remember where connections are noted."""
        if len(self.rows) >= _MOST_ENDS:
            self.rows.clear()
        self.rows[own_end] = row

    def wait(self, connection: Connection, bundles: Bundles) -> ConnectionRow:
        """Where to note a line until its communicator is named."""
        key = connection.rank, connection.device
        waiting = self.waiting.get(key)
        if waiting is None:
            waiting = self.waiting[key] = Waiting(bundles)
        waiting.claims[connection.peer] = connection.peer_device
        return waiting.row

    def settle(self, candidates: "list[Membership]") -> None:
        """Hand lines that waited to the one communicator that they fit."""
        for (rank, device), waiting in list(self.waiting.items()):
            fitting = [
                each for each in candidates if each.is_writer(rank, device) and max(waiting.row, default=0) < each.size
            ]
            if len(fitting) == 1:
                fitting[0].row.add(waiting.row)
                if fitting[0].key is None:
                    fitting[0].claims.update(waiting.claims)
                del self.waiting[rank, device]
        self.forget()
