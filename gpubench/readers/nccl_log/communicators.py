"""The communicators of a job, put together from every process's comms once all logs are read.

Ranks of one communicator log the same commId. NCCL before 2.17 logs none: there size, order, and the GPUs that each
rank names for its peers tell communicators apart. Channels that several communicators may have make up one more,
without an id; so do connections of processes whose log has no init.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.model.paths.connections import ChannelSets, Connections, RankConnections
from gpubench.model.paths.nccl_log import Communicator, Member
from gpubench.model.paths.transport import Tuning
from gpubench.readers.nccl_log.lines import MOST_RANKS, bus_id
from gpubench.readers.nccl_log.threads import AmbiguousChannel, Comm, Process


@dataclass(slots=True, eq=False)
class _Builder:
    """A communicator to be. `without_init` are the processes of ranks of which no line names the communicator."""

    sets: ChannelSets
    id: str | None = None
    size: int | None = None
    comms: dict[int, Comm] = field(default_factory=dict)
    without_init: dict[int, Process] = field(default_factory=dict)
    by_rank: dict[int, RankConnections] = field(default_factory=dict)
    tunings: dict[Tuning, None] = field(default_factory=dict)
    candidates: tuple[str, ...] = ()

    def add(self, comm: Comm) -> None:
        """Add a rank; a second log of the same rank only adds connections."""
        if self.comms.setdefault(comm.rank, comm) is comm:
            self.by_rank[comm.rank] = comm.connections
        else:
            self.of_rank(comm.rank).add_all(comm.connections)
        self.tunings |= comm.tunings

    def of_rank(self, rank: int) -> RankConnections:
        """The connections of a rank, to be added to: a copy where they are those of its comm."""
        held = self.by_rank.get(rank)
        if held is None or (rank in self.comms and held is self.comms[rank].connections):
            self.by_rank[rank] = RankConnections(self.sets, self.size or MOST_RANKS)
            self.by_rank[rank].update(held or {})
        return self.by_rank[rank]

    def fits(self, comm: Comm) -> bool:
        """True if a rank without a commId can be of this communicator: no other has its place, and the GPUs agree."""
        return (
            comm.size == self.size
            and comm.rank not in self.comms
            and all(
                comm.is_on(other.peer_devices.get(comm.rank, ""))
                and other.is_on(comm.peer_devices.get(other.rank, ""))
                and not (other.process.host == comm.process.host and other.bus == comm.bus is not None)
                for other in self.comms.values()
            )
        )


def communicators(
    processes: Sequence[Process], sets: ChannelSets, host_ids: Mapping[str, str]
) -> tuple[Communicator, ...]:
    """All communicators in order of appearance, then those without an id.

    `host_ids` are the values of NCCL_HOSTID by process: where it is set, NCCL takes it for the machine.
    """
    for process in processes:
        comms = process.comms or _comms_of_namesake(process, processes)
        for thread in process.threads.values():
            thread.assign_early(comms)
    builders = [*_with_id(processes, sets), *_without_id(processes, sets)]
    builder_of = {comm: builder for builder in builders for comm in builder.comms.values()}
    ambiguous: dict[tuple[str, ...], _Builder] = {}
    for process in processes:
        for channel, count in process.ambiguous.items():
            _assign(channel, count, builder_of, ambiguous, sets)
    for process in processes:
        roots = [builder_of[comm] for comm in process.comms if comm.rank == 0 and comm in builder_of]
        # Operations that several communicators may have run tell something only where none of these is connected.
        if process.tunings and not any(peers for root in roots for peers in root.by_rank.values()):
            _ambiguous(ambiguous, roots, sets).tunings |= process.tunings
    found = (*builders, *ambiguous.values(), *_without_init(processes, sets))
    return tuple(_communicator(builder, host_ids) for builder in found)


def _comms_of_namesake(process: Process, processes: Sequence[Process]) -> list[Comm]:
    """The comms of the one process that this one is, whose host's name stands behind text without a line end."""
    found = [each for each in processes if each.pid == process.pid and each.comms and process.host.endswith(each.host)]
    return found[0].comms if len(found) == 1 else []


def _with_id(processes: Sequence[Process], sets: ChannelSets) -> Iterable[_Builder]:
    builders: dict[tuple[str, int], _Builder] = {}
    for process in processes:
        for comm in process.comms:
            if comm.comm_id is not None:
                key = comm.comm_id, comm.size
                builders.setdefault(key, _Builder(sets, *key)).add(comm)
    return builders.values()


def _without_id(processes: Sequence[Process], sets: ChannelSets) -> list[_Builder]:
    """Ranks without a commId: the nth of a size in its process is tried first in the nth communicator of that size."""
    builders: list[_Builder] = []
    for process in processes:
        counts: Counter[int] = Counter()
        for comm in process.comms:
            if comm.comm_id is None:
                nth, counts[comm.size] = counts[comm.size], counts[comm.size] + 1
                alike = [each for each in builders if each.size == comm.size]
                builder = next((each for each in (*alike[nth:], *alike[:nth]) if each.fits(comm)), None)
                if builder is None:
                    builder = _Builder(sets, f"{comm.size} ranks, number {len(alike) + 1}", comm.size)
                    builders.append(builder)
                builder.add(comm)
    return builders


def _assign(
    channel: AmbiguousChannel,
    count: int,
    builder_of: Mapping[Comm, _Builder],
    ambiguous: dict[tuple[str, ...], _Builder],
    sets: ChannelSets,
) -> None:
    """Add a channel to every comm that may have it, if it was logged for each; else to the one comm that lacks it."""
    connection, code, comms = channel
    comms = tuple(comm for comm in comms if comm in builder_of)  # of a damaged log some may be in none
    lacking = [
        comm
        for comm in comms
        if builder_of[comm].comms.get(connection.peer, comm).is_on(connection.peer_device)
        and not comm.connections.of(connection.peer).has(code)
    ]
    if count == len(comms):
        builders = [builder_of[comm] for comm in comms]
    elif len(lacking) == 1:
        builders = [builder_of[lacking[0]]]
    else:
        builders = [_ambiguous(ambiguous, [builder_of[comm] for comm in lacking or comms], sets)]
    for builder in builders:
        builder.of_rank(connection.rank).add(connection.peer, code)


def _ambiguous(found: dict[tuple[str, ...], _Builder], candidates: Sequence[_Builder], sets: ChannelSets) -> _Builder:
    """The communicator of what may be of any of these; its ranks are those in which they all agree."""
    ids = tuple(sorted({str(each.id) for each in candidates}))
    if ids not in found:
        builder = found[ids] = _Builder(sets, candidates=ids)
        for rank, comm in candidates[0].comms.items() if candidates else ():
            processes = {each.comms[rank].process if rank in each.comms else None for each in candidates}
            if processes == {comm.process}:
                builder.comms[rank] = comm
    return found[ids]


def _without_init(processes: Sequence[Process], sets: ChannelSets) -> list[_Builder]:
    """Connections of processes that name no communicator: put together as long as no two have the same rank."""
    builders: list[_Builder] = []
    for process in processes:
        early = [pair for thread in process.threads.values() for pair in thread.early.items()]
        if not early:
            continue
        ranks = {rank for (rank, _), _ in early}
        builder = next((each for each in builders if not ranks & each.without_init.keys()), None)
        if builder is None:
            builder = _Builder(sets)
            builders.append(builder)
        builder.without_init |= dict.fromkeys(ranks, process)
        for (rank, _), each in early:
            builder.of_rank(rank).add_all(each.connections)
    return builders


def _communicator(builder: _Builder, host_ids: Mapping[str, str]) -> Communicator:
    comms = [comm for _, comm in sorted(builder.comms.items())]
    count = max((comm.nodes for comm in comms if comm.nodes is not None), default=None)
    members = [_member(comm, node) for comm, node in zip(comms, _nodes(comms, count, host_ids), strict=True)]
    members += [
        Member(rank=rank, host=process.host, pid=process.pid, node=host_ids.get(process.name, process.host))
        for rank, process in builder.without_init.items()
    ]
    return Communicator(
        id=builder.id,
        size=builder.size,
        nodes=count,
        members=tuple(sorted(members, key=lambda member: member.rank)),
        connections=Connections(builder.by_rank),
        tunings=tuple(builder.tunings),
        candidates=builder.candidates,
    )


def _nodes(comms: Sequence[Comm], count: int | None, host_ids: Mapping[str, str]) -> list[str]:
    """The machine of every rank as NCCL tells them apart: by name, or NCCL_HOSTID.

    Machines may share a name, as virtual ones do. Where NCCL counts more of them than there are names, a new one begins
    with every local rank 0, if that gives as many as NCCL counts.
    """
    names = [host_ids.get(comm.process.name, comm.process.host) for comm in comms]
    if count is None or len(set(names)) >= count:
        return names
    seen: Counter[str] = Counter()
    numbered = []
    for name, comm in zip(names, comms, strict=True):
        seen[name] += comm.local_rank == 0
        numbered.append(f"{name}~{seen[name]}" if seen[name] > 1 else name)
    return numbered if len(set(numbered)) == count else names


def _member(comm: Comm, node: str) -> Member:
    return Member(
        rank=comm.rank,
        host=comm.process.host,
        pid=comm.process.pid,
        bus_id=None if comm.bus is None else bus_id(comm.bus),
        nvml_index=comm.nvml_index,
        node=node,
        local_rank=comm.local_rank,
    )
