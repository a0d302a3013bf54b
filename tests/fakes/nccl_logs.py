"""Logs of any NCCL version from 2.10 to 2.32, generated from the documented formats."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from msgspec import Struct, field

Via = Callable[[int, int, bool], str | None]
"""The words after `via`, by source, destination and whether the receiver writes the line. None for no line"""


def direct(source: int, destination: int, received: bool) -> str | None:
    """Use P2P in nodes of two ranks, and InfiniBand with GPUDirect RDMA between nodes."""
    return between(source, destination, received, inside="P2P/CUMEM", across="NET/IB/0/GDRDMA")


def between(
    source: int, destination: int, received: bool, *, inside: str, across: str, ranks_per_node: int = 2
) -> str | None:
    if source // ranks_per_node == destination // ranks_per_node:
        if inside.startswith("NET"):
            return inside
        return None if received else inside
    return across


class Job(Struct, frozen=True, kw_only=True):
    """A communicator that is connected in a ring in both directions. Ranks fill nodes one by one.

    With `one_machine`, the GPUs of the nodes differ.
    """

    version: tuple[int, int] = (2, 28)
    ranks: int = 4
    per_node: int = 2
    via: Via = direct
    channels: int = 2
    id: str = "0xabc1"
    handle: int = 0x5000
    hosts: Sequence[str] = ("nodeA", "nodeB", "nodeC", "nodeD")
    one_machine: bool = False
    first_pid: int = 100
    notes: Sequence[str] = ()
    notes_of: Mapping[int, Sequence[str]] = field(default_factory=dict)
    ops: Sequence[str] = ()

    def head(self, rank: int) -> str:
        host = self.hosts[rank // self.per_node]
        pid = self.first_pid + rank
        return f"{host}:{pid}:{pid} [{rank % self.per_node}] NCCL INFO "

    def bus(self, rank: int) -> int:
        return 0x1A000 + self.gpu(rank) * 0x1000

    def gpu(self, rank: int) -> int:
        return rank if self.one_machine else rank % self.per_node

    def device(self, rank: int) -> str:
        return str(self.gpu(rank)) if self.version >= (2, 18) else f"{self.bus(rank):x}"

    def messages(self, rank: int) -> Iterable[str]:
        """Yield the messages of a rank's process in NCCL's order."""
        yield f"NCCL version {self.version[0]}.{self.version[1]}.3+cuda12.4"
        lazily = self.version >= (2, 22)
        if self.version >= (2, 18):
            yield self.communicator(rank, "Init START")
        yield from self.notes
        yield from self.notes_of.get(rank, ())
        if self.version >= (2, 20):
            nodes = -(-self.ranks // self.per_node)
            local = f"localRanks {self.per_node} localRank {rank % self.per_node} MNNVL 0"
            yield f"comm {self.handle + rank:#x} rank {rank} nRanks {self.ranks} nNodes {nodes} {local}"
        if rank == 0:
            order = " ".join(map(str, range(self.ranks)))
            yield from (f"Channel {channel:02}/{self.channels:02} :    {order}" for channel in range(self.channels))
        if not lazily:
            yield from self.connections(rank)
        yield self.communicator(rank, "Init COMPLETE")
        if lazily:
            yield from self.connections(rank)
        if rank == 0:
            yield from self.ops

    def communicator(self, rank: int, event: str) -> str:
        handle, bus = self.handle + rank, self.bus(rank)
        if self.version < (2, 16):
            text = f"comm {handle:#x} rank {rank} nranks {self.ranks} cudaDev {rank % self.per_node} busId {bus:x}"
            return f"{text} - {event}"
        nvml = f" nvmlDev {self.gpu(rank)}" if self.version >= (2, 18) else ""
        name = "ncclCommInitRankConfig" if self.version >= (2, 25) else "ncclCommInitRank"
        prefix = f"{name} " if self.version >= (2, 21) else ""
        return (
            f"{prefix}comm {handle:#x} rank {rank} nranks {self.ranks} cudaDev {rank % self.per_node}{nvml} "
            f"busId {bus:x} commId {self.id} - {event}"
        )

    def connections(self, rank: int) -> Iterable[str]:
        ring = [((rank - 1) % self.ranks, rank), (rank, (rank + 1) % self.ranks)]
        for source, destination in dict.fromkeys((*ring, *((b, a) for a, b in ring))):
            received = rank == destination
            via = self.via(source, destination, received)
            if via is not None:
                yield from (self.line(channel, source, destination, via, received) for channel in range(self.channels))

    def line(self, channel: int, source: int, destination: int, via: str, received: bool) -> str:
        network = via.startswith("NET")
        since = (2, 12) if network else (2, 99) if via.startswith(("SHM", "direct")) else (2, 14)
        index = "/0" if self.version >= since else ""
        end = (" [receive]" if received else " [send]") if network else ""
        ends = f"{source}[{self.device(source)}] -> {destination}[{self.device(destination)}]"
        return f"Channel {channel:02}{index} : {ends}{end} via {via}"

    def log(self, rank: int) -> str:
        return "".join(f"{self.head(rank)}{message}\n" for message in self.messages(rank))

    def logs(self) -> list[str]:
        return [self.log(rank) for rank in range(self.ranks)]


def interleaved(logs: Sequence[str], seed: int) -> str:
    """Merge the lines of all ranks. The order of each rank's lines is kept."""
    random = Random(seed)
    waiting = [log.splitlines(keepends=True) for log in logs]
    lines = []
    while any(waiting):
        lines.append(random.choice([each for each in waiting if each]).pop(0))
    return "".join(lines)
