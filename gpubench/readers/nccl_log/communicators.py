"""Assemble the communicators of a job, and the machines of their ranks, after all logs have been read.

All ranks of a communicator log the same commId. NCCL before 2.17 logs none, so communicators are then distinguished by
size, order and the GPUs of peers. Ambiguous channels, and connections without init lines, form communicators without an
id.

A host name does not identify a machine, because virtual machines or pods may have the same one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache
from itertools import chain

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.paths.nccl_log import ChannelSet, ChannelSets, Communicator, Connections, Member, RankConnections
from gpubench.model.paths.transport import MULTICAST, TransportKind, Tuning
from gpubench.model.terms.units import group_by
from gpubench.readers import limits
from gpubench.readers.nccl_log.attribution import AmbiguousChannel, Attribution, Comm, Process
from gpubench.readers.nccl_log.lines import Connection, ReachedLimits, format_bus_id


def nodes(comms: Sequence[Comm], count: int | None, host_ids: Mapping[str, str]) -> list[str]:
    """Return the node of each rank as NCCL counts nodes: its host name or NCCL_HOSTID.

    If NCCL counts more nodes than there are names, each rank with local rank 0 starts a new node. This is used only if
    the resulting number of nodes equals NCCL's.
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


def machines(
    comms: Sequence[Comm],
    by_node: Sequence[str],
    connections: Mapping[int, RankConnections],
    addresses: Mapping[str, str],
) -> list[str]:
    """Return the machine of each rank, as far as the log shows it. `by_node` has NCCL's node of each rank.

    Ranks with different addresses are on different machines. Without addresses, two ranks with the same bus id are also
    on different machines.

    Ranks with the same host name are on one machine if they share a process or an address. The same is true if a node's
    first GPU is not the first GPU of the machine. Peer access and shared memory only exist within a machine.
    """
    found = [comm.process.host for comm in comms]
    for host, places in group_by(range(len(comms)), lambda place: comms[place].process.host).items():
        keys = _machine_keys([comms[place] for place in places], [by_node[place] for place in places], addresses)
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        for place, key in zip(places, keys, strict=True):
            found[place] = host if numbers[key] == 0 else f"{host}~{numbers[key] + 1}"
    return _join_machines(comms, found, connections)


def _machine_keys(comms: Sequence[Comm], comm_nodes: Sequence[str], addresses: Mapping[str, str]) -> Sequence[str]:
    """Return a key per rank. Ranks on the same machine have equal keys. All ranks must have the same host name."""
    known = [addresses.get(comm.process.name, "") for comm in comms]
    if len(set(filter(None, known))) > 1:
        return known
    buses = [comm.bus for comm in comms if comm.bus is not None]
    has_one_address = len(set(known)) == 1 and known[0] != ""
    # NCCL_HOSTID may make NCCL count several nodes on one machine.
    is_one = has_one_address or (
        len(set(buses)) == len(buses)
        and (
            len(set(comm_nodes)) == 1
            or len({comm.process for comm in comms}) == 1
            or any(comm.nvml_index for comm in comms if comm.local_rank == 0)
        )
    )
    return [""] * len(comms) if is_one else comm_nodes


def _join_machines(comms: Sequence[Comm], names: list[str], connections: Mapping[int, RankConnections]) -> list[str]:
    """Merge machines whose ranks are connected by transports that only work within a machine. Return the new names."""
    if len(set(names)) == 1:
        return names
    rank_names = {comm.rank: name for comm, name in zip(comms, names, strict=True)}
    joined, is_local = _JoinedNames(), cache(is_inside)
    for rank, own in rank_names.items():
        for peer in [peer for peer, channels in connections.get(rank, {}).items() if is_local(channels)]:
            other = rank_names.get(peer)
            if other is not None and joined[other] != joined[own]:
                joined.join(other, own)
    return [joined[name] for name in names]


class _JoinedNames:
    """Machine names that may mean the same machine: a union-find forest with one root per machine."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        root = name
        while root in self._above:
            root = self._above[root]
        while name != root:
            self._above[name], name = root, self._above[name]
        return root

    def join(self, old: str, new: str) -> None:
        self._above[self[old]] = self[new]


def is_inside(channels: ChannelSet) -> bool:
    """True if any channel uses a transport that only works within a machine. P2P/MNNVL also works between machines."""
    transports = (logged.transport for logged in channels.logged)
    return any(one.kind in (TransportKind.P2P, TransportKind.SHM) and one.name != "P2P/MNNVL" for one in transports)


class _Builder(Struct, eq=False):
    """A communicator that is being assembled.

    `without_init` has the process and the device of each rank that has no init lines.
    """

    sets: ChannelSets
    id: str | None = None
    size: int | None = None
    comms: dict[int, Comm] = field(default_factory=dict)
    without_init: dict[int, tuple[Process, str]] = field(default_factory=dict)
    by_rank: dict[int, RankConnections] = field(default_factory=dict)
    tunings: dict[Tuning, None] = field(default_factory=dict)
    candidates: tuple[str, ...] = ()

    def add(self, comm: Comm) -> None:
        """Add a rank. If the rank is already known from another log, only add the connections."""
        if self.comms.setdefault(comm.rank, comm) is comm:
            self.by_rank[comm.rank] = comm.connections
        else:
            self.editable(comm.rank).add_all(comm.connections)
        self.tunings |= comm.tunings

    def editable(self, rank: int) -> RankConnections:
        """Return a rank's connections for modification. They are copied first if they belong to the rank's comm."""
        held = self.by_rank.get(rank)
        if held is None or (rank in self.comms and held is self.comms[rank].connections):
            self.by_rank[rank] = RankConnections(self.sets, self.size or limits.MOST_LOG_RANKS)
            self.by_rank[rank].update(held or {})
        return self.by_rank[rank]

    def fits(self, comm: Comm) -> bool:
        """True if a rank without a commId may belong to this communicator.

        No other log may claim the rank, and the GPUs that ranks logged for their peers must agree.
        """
        return (
            comm.size == self.size
            and comm.rank not in self.comms
            and all(
                comm.is_on(other.peer_devices.get(comm.rank, ""))
                and other.is_on(comm.peer_devices.get(other.rank, ""))
                and not (other.process.host == comm.process.host and other.bus == comm.bus is not None)
                and not (
                    other.process.host != comm.process.host
                    and (
                        is_inside(comm.connections.channels_to(other.rank))
                        or is_inside(other.connections.channels_to(comm.rank))
                    )
                )
                for other in self.comms.values()
            )
        )


def communicators(
    attribution: Attribution, host_ids: Mapping[str, str], addresses: Mapping[str, str]
) -> tuple[Communicator, ...]:
    """Return all communicators in order of appearance, followed by those without an id.

    `host_ids` has NCCL_HOSTID by process. `addresses` has the address that each process uses for bootstrap.
    """
    processes, sets = tuple(attribution.processes.values()), attribution.sets
    attribution.cut_heads = 0
    for process in processes:
        namesake = None if process.comms else _find_original(process, attribution.find_by_pid(process.pid))
        attribution.cut_heads += namesake is not None and len(process.host) < len(namesake.host)
        for thread in process.threads.values():
            thread.assign_early(process.comms if namesake is None else namesake.comms)
    builders = [*_group_by_id(processes, sets), *_group_without_id(processes, attribution)]
    builders = _within_limits(builders, attribution.reached)
    owners = {comm: builder for builder in builders for comm in builder.comms.values()}
    ambiguous: dict[tuple[str, ...], _Builder] = {}
    for process in processes:
        for channel, count in process.ambiguous.items():
            _assign(channel, count, owners, ambiguous, sets)
    for process in processes:
        roots = [owners[comm] for comm in process.comms if comm.rank == 0 and comm in owners]
        # If several communicators may have run an operation, it is evidence only if none of them has connections.
        roots = roots or list(dict.fromkeys(owners[comm] for comm in process.comms if comm in owners))
        if process.tunings and not any(peers for root in roots for peers in root.by_rank.values()):
            _ambiguous(ambiguous, roots, sets).tunings |= process.tunings
    found = [*builders, *ambiguous.values(), *_assign_without_init(processes, attribution, builders)]
    for builder in builders:
        _add_multicast(builder)
    if len(found) == 1:
        _add_lost(found[0], attribution.lost)
    return tuple(_communicator(builder, host_ids, addresses) for builder in found)


def _add_multicast(builder: _Builder) -> None:
    if not any(builder.by_rank.values()):
        code = builder.sets.line_code(MULTICAST, received=False)
        for comm in builder.comms.values():
            if comm.has_multicast:
                builder.editable(comm.rank).add(comm.rank, code)


def _add_lost(only: _Builder, lost: Sequence[tuple[Connection, int]]) -> None:
    """Add channels of unknown processes if there is only one communicator. The ranks in the line identify the
    connection.
    """
    for connection, code in lost:
        if only.size is None or max(connection.rank, connection.peer) < only.size:
            only.editable(connection.rank).add(connection.peer, code)


def _within_limits(builders: Sequence[_Builder], reached: ReachedLimits) -> list[_Builder]:
    """Return the first communicators within the limits for the number of communicators and of their ranks."""
    kept, places = list[_Builder](), 0
    for builder in builders:
        places += builder.size or 0
        if len(kept) == limits.MOST_COMMUNICATORS or places > limits.MOST_PLACES:
            reached.pass_over(
                f"{len(builders) - len(kept)} further communicators",
                f"{limits.MOST_COMMUNICATORS} communicators, of {limits.MOST_PLACES} ranks together",
            )
            break
        kept.append(builder)
    return kept


def _find_original(process: Process, candidates: Sequence[Process]) -> Process | None:
    """Return the process to which the lines of `process` really belong, or None.

    Its host name is a part of this process's name or contains it, because text was cut off or inserted before the name.
    """
    found = [
        other
        for other in candidates
        if other.comms and (process.host.endswith(other.host) or other.host.endswith(process.host))
    ]
    return found[0] if len(found) == 1 else None


def _group_by_id(processes: Sequence[Process], sets: ChannelSets) -> Iterable[_Builder]:
    builders: dict[tuple[str, int], _Builder] = {}
    for process in processes:
        for comm in process.comms:
            if comm.comm_id is not None:
                key = comm.comm_id, comm.size
                builders.setdefault(key, _Builder(sets, *key)).add(comm)
    return builders.values()


def _group_without_id(processes: Sequence[Process], attribution: Attribution) -> list[_Builder]:
    """Group ranks without a commId into communicators.

    For the nth comm of a certain size in a process, try the nth communicator of this size first.
    """
    builders: list[_Builder] = []
    same_size: dict[int, list[_Builder]] = {}
    for process in processes:
        counts: Counter[int] = Counter()
        for comm in process.comms:
            if comm.comm_id is None:
                nth, counts[comm.size] = counts[comm.size], counts[comm.size] + 1
                alike = same_size.setdefault(comm.size, [])
                builder = next((other for other in chain(alike[nth:], alike[:nth]) if other.fits(comm)), None)
                if builder is None and len(builders) == limits.MOST_WITHOUT_ID:
                    _pass_over_without_id(attribution, f"a communicator without an id in {process.name}")
                    return builders
                if builder is None:
                    builder = _Builder(attribution.sets, f"{comm.size} ranks, number {len(alike) + 1}", comm.size)
                    builders.append(builder)
                    alike.append(builder)
                builder.add(comm)
    return builders


def _pass_over_without_id(attribution: Attribution, seen: str) -> None:
    attribution.reached.pass_over(seen, f"{limits.MOST_WITHOUT_ID} communicators without an id")


def _assign(
    channel: AmbiguousChannel,
    count: int,
    owners: Mapping[Comm, _Builder],
    ambiguous: dict[tuple[str, ...], _Builder],
    sets: ChannelSets,
) -> None:
    """Add a channel that several comms may own.

    If it was logged once per comm, add it to all of them. Otherwise add it to the only possible comm. If several are
    possible, add it to a communicator for ambiguous channels.
    """
    connection, code, comms = channel
    # In a damaged log, a comm may not belong to any communicator.
    comms = tuple(comm for comm in comms if comm in owners)
    lacking = [
        comm
        for comm in comms
        if owners[comm].comms.get(connection.peer, comm).is_on(connection.peer_device)
        and not comm.connections.channels_to(connection.peer).has(code)
    ]
    # Every rank sends in rings and trees. So the channel likely belongs to a comm that is the only one without
    # connections.
    silent = [
        comm
        for comm in lacking
        if not comm.connections and any(other.connections for other in owners[comm].comms.values())
    ]
    if count == len(comms):
        builders = [owners[comm] for comm in comms]
    elif len(silent) == 1:
        builders = [owners[silent[0]]]
    elif len(lacking) == 1:
        builders = [owners[lacking[0]]]
    else:
        builders = [_ambiguous(ambiguous, [owners[comm] for comm in lacking or comms], sets)]
    for builder in builders:
        builder.editable(connection.rank).add(connection.peer, code)


def _ambiguous(found: dict[tuple[str, ...], _Builder], candidates: Sequence[_Builder], sets: ChannelSets) -> _Builder:
    """Return the communicator for channels that may belong to any of these candidates.

    It contains the ranks that have the same process in all candidates.
    """
    ids = tuple(sorted({str(candidate.id) for candidate in candidates}))
    if ids not in found:
        builder = found[ids] = _Builder(sets, candidates=ids)
        for rank, comm in candidates[0].comms.items() if candidates else ():
            processes = {candidate.comms[rank].process if rank in candidate.comms else None for candidate in candidates}
            if processes == {comm.process}:
                builder.comms[rank] = comm
    return found[ids]


def _assign_without_init(
    processes: Sequence[Process], attribution: Attribution, builders: Sequence[_Builder]
) -> list[_Builder]:
    """Assign connections without init lines to the only communicator, if their ranks fit into it.

    Otherwise create new communicators. Processes with different ranks share one.
    """
    found: list[_Builder] = []
    for process in processes:
        early = [pair for thread in process.threads.values() for pair in thread.early.items()]
        if not early:
            continue
        ranks = {rank: device for (rank, device), _ in early}
        largest = max((*ranks, *(peer for _, own in early for peer in own.connections)))
        only = builders[0] if len(builders) == 1 and not process.comms else None
        if (
            only is not None
            and largest < (only.size or 0)
            and not ranks.keys() & (only.comms | only.without_init).keys()
        ):
            builder = only
        else:
            known = next((other for other in found if not ranks.keys() & other.without_init.keys()), None)
            if known is None and len(found) == limits.MOST_WITHOUT_ID:
                _pass_over_without_id(attribution, f"connections of {process.name} without a communicator")
                return found
            builder = known or _Builder(attribution.sets)
            found += [] if known else [builder]
        builder.without_init |= {rank: (process, device) for rank, device in ranks.items()}
        for (rank, _), own in early:
            builder.editable(rank).add_all(own.connections)
    return found


def _communicator(builder: _Builder, host_ids: Mapping[str, str], addresses: Mapping[str, str]) -> Communicator:
    comms = [comm for _, comm in sorted(builder.comms.items())]
    count = max((comm.nodes for comm in comms if comm.nodes is not None), default=None)
    by_node = nodes(comms, count, host_ids)
    places = Counter((process.host, device) for process, device in builder.without_init.values())
    repeated = {host for (host, _), times in places.items() if times > 1}
    by_machine = machines(comms, by_node, builder.by_rank, addresses)
    members = [_member(comm, *places) for comm, *places in zip(comms, by_node, by_machine, strict=True)]
    members += [
        _member_without_init(rank, process, device, host_ids, is_unique=is_unique)
        for rank, (process, device) in builder.without_init.items()
        for is_unique in [process.host not in repeated]
    ]
    return Communicator(
        id=builder.id,
        size=builder.size,
        nodes=count,
        members=tuple(sorted(members, key=lambda member: member.rank)),
        unfinished_ranks=tuple(comm.rank for comm in comms if comm.began and not comm.is_complete),
        connections=Connections(builder.by_rank),
        tunings=tuple(builder.tunings),
        candidates=builder.candidates,
    )


def add_listed_ranks(
    found: tuple[Communicator, ...], listed: Mapping[int, Set[tuple[str, int]]]
) -> tuple[Communicator, ...]:
    """Add ranks that have no log lines, but that nccl-tests lists. The text must have one run and no init lines.

    `listed` has hosts and processes by rank. Several entries for one rank mean several runs.
    """
    if len(found) != 1 or found[0].id is not None or any(len(places) > 1 for places in listed.values()):
        return found
    (only,) = found
    known = {member.rank: (member.host, member.pid) for member in only.members}
    if any(place not in listed.get(rank, ()) for rank, place in known.items()):
        return found
    peers = {peer for by_peer in only.connections.ranks.values() for peer in by_peer} - known.keys()
    added = [
        Member(rank=rank, host=host, pid=pid, node=host, machine=host)
        for rank in sorted(peers & listed.keys())
        for host, pid in listed[rank]
    ]
    return (replace(only, members=tuple(sorted((*only.members, *added), key=lambda member: member.rank))),)


def _member(comm: Comm, node: str, machine: str) -> Member:
    return Member(
        rank=comm.rank,
        host=comm.process.host,
        pid=comm.process.pid,
        bus_id=None if comm.bus is None else format_bus_id(comm.bus),
        nvml_index=comm.nvml_index,
        node=node,
        machine=machine,
        local_rank=comm.local_rank,
    )


def _member_without_init(
    rank: int, process: Process, device: str, host_ids: Mapping[str, str], *, is_unique: bool
) -> Member:
    """Return a rank whose GPU is known only from its connections.

    `is_unique` is false if two ranks on this host name use the same GPU, because then the name stands for several
    machines.
    """
    is_bus_id = len(device) >= 4  # NCCL 2.18 and later print an NVML index, which is shorter.
    machine = process.host if is_unique else f"{process.host}~{rank}"
    return Member(
        rank=rank,
        host=process.host,
        pid=process.pid,
        bus_id=format_bus_id(int(device, 16)) if is_bus_id else None,
        nvml_index=int(device) if device.isdigit() and not is_bus_id else None,
        node=host_ids.get(process.name, machine),
        machine=machine,
    )
