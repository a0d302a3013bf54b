"""Assembles the communicators of a job and the machines of their ranks after all logs are read.

Ranks of one communicator log the same commId. NCCL before 2.17 logs none, and then size, order, and the GPUs of peers
distinguish communicators. Channels that several communicators may have form one more, without an id. So do connections
of processes whose log has no init.

A host name does not identify a machine: virtual machines and pods may share one, and containers of one machine have
several.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.paths.nccl_log import ChannelSet, ChannelSets, Communicator, Connections, Member, RankConnections
from gpubench.model.paths.transport import MULTICAST, TransportKind, Tuning
from gpubench.readers import limits
from gpubench.readers.nccl_log.attribution import AmbiguousChannel, Attribution, Comm, Process
from gpubench.readers.nccl_log.lines import Connection, ReachedLimits, format_bus_id

_BETWEEN_MACHINES = "P2P/MNNVL"
"""The only peer access between machines, over NVLinks between nodes."""


def nodes(comms: Sequence[Comm], count: int | None, host_ids: Mapping[str, str]) -> list[str]:
    """Return the machine of every rank as NCCL distinguishes them: by name or NCCL_HOSTID.

    If NCCL counts more machines than names, each local rank 0 starts a new one, provided that this matches NCCL's
    count.
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
    """Return the machine of every rank as far as the log shows it. `by_node` is NCCL's view.

    Ranks with different addresses are on different machines. Ranks of one host name are on one machine if they share a
    process or an address, or if the first GPU of a node is not the machine's first. Without an address, two ranks on
    the same bus id are on different machines. Peer access and shared memory always join ranks of one machine.
    """
    by_host: dict[str, list[int]] = {}
    for place, comm in enumerate(comms):
        by_host.setdefault(comm.process.host, []).append(place)
    found = [comm.process.host for comm in comms]
    for host, places in by_host.items():
        for place, number in zip(
            places, _numbers([comms[each] for each in places], places, by_node, addresses), strict=True
        ):
            found[place] = host if number == 0 else f"{host}~{number + 1}"
    return _joined(comms, found, connections)


def _numbers(
    comms: Sequence[Comm], places: Sequence[int], by_node: Sequence[str], addresses: Mapping[str, str]
) -> list[int]:
    known = [addresses.get(comm.process.name, "") for comm in comms]
    buses = [comm.bus for comm in comms if comm.bus is not None]
    of_node = [by_node[place] for place in places]
    if len(set(filter(None, known))) > 1:
        keys = known
    elif (len(set(buses)) < len(buses) and not _has_one_address(known)) or not _is_one(comms, of_node, known):
        keys = of_node
    else:
        return [0] * len(comms)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _is_one(comms: Sequence[Comm], of_node: Sequence[str], known: Sequence[str]) -> bool:
    """True if ranks of one host name are on one machine, although NCCL may count several."""
    if len(set(of_node)) == 1 or len({comm.process for comm in comms}) == 1 or _has_one_address(known):
        return True
    firsts = [comm.nvml_index for comm in comms if comm.local_rank == 0]
    return any(firsts)


def _has_one_address(known: Sequence[str]) -> bool:
    return len(set(known)) == 1 and known[0] != ""


def _joined(comms: Sequence[Comm], names: list[str], connections: Mapping[int, RankConnections]) -> list[str]:
    place_of = {comm.rank: place for place, comm in enumerate(comms)}
    if len(set(names)) == 1:
        return names
    joined, inside = _JoinedNames(), _Inside()
    for comm in comms:
        own = names[place_of[comm.rank]]
        for peer in [peer for peer, channels in connections.get(comm.rank, {}).items() if inside[channels]]:
            place = place_of.get(peer)
            if place is not None and joined[names[place]] != joined[own]:
                joined.join(names[place], own)
    return [joined[name] for name in names]


class _JoinedNames:
    """Names that may refer to the same machine: a union-find forest whose roots are the machines."""

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


class _Inside(dict[ChannelSet, bool]):
    def __missing__(self, channels: ChannelSet) -> bool:
        self[channels] = found = is_inside(channels)
        return found


def is_inside(channels: ChannelSet) -> bool:
    """True if channels use a transport that works only within a machine."""
    return any(
        each.transport.kind in (TransportKind.P2P, TransportKind.SHM) and each.transport.name != _BETWEEN_MACHINES
        for each in channels.logged
    )


_SHORTEST_BUS_ID = 4
"""Digits of a bus id in brackets. NCCL 2.18 and later print a small number instead."""


class _Builder(Struct, eq=False):
    """A communicator under construction. `without_init` are the processes and devices of ranks that no line assigns
    to it.
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
        """Add a rank. A second log of the same rank only adds connections."""
        if self.comms.setdefault(comm.rank, comm) is comm:
            self.by_rank[comm.rank] = comm.connections
        else:
            self.of_rank(comm.rank).add_all(comm.connections)
        self.tunings |= comm.tunings

    def of_rank(self, rank: int) -> RankConnections:
        """Return the connections of a rank for changes, copied if they are those of its comm."""
        held = self.by_rank.get(rank)
        if held is None or (rank in self.comms and held is self.comms[rank].connections):
            self.by_rank[rank] = RankConnections(self.sets, self.size or limits.MOST_LOG_RANKS)
            self.by_rank[rank].update(held or {})
        return self.by_rank[rank]

    def fits(self, comm: Comm) -> bool:
        """True if a rank without a commId may belong here: its place is free, and the GPUs agree."""
        return (
            comm.size == self.size
            and comm.rank not in self.comms
            and all(
                comm.is_on(other.peer_devices.get(comm.rank, ""))
                and other.is_on(comm.peer_devices.get(other.rank, ""))
                and not (other.process.host == comm.process.host and other.bus == comm.bus is not None)
                and not (other.process.host != comm.process.host and _reach_inside(comm, other))
                for other in self.comms.values()
            )
        )


def _reach_inside(one: Comm, other: Comm) -> bool:
    """True if either comm reaches the other's rank by a transport that works only within a machine."""
    return is_inside(one.connections.channels_to(other.rank)) or is_inside(other.connections.channels_to(one.rank))


def communicators(
    attribution: Attribution, host_ids: Mapping[str, str], addresses: Mapping[str, str]
) -> tuple[Communicator, ...]:
    """Return all communicators in order of appearance, then those without an id.

    `host_ids` has NCCL_HOSTID by process, which NCCL uses as the machine. `addresses` has the interface addresses over
    which processes meet.
    """
    processes, sets = tuple(attribution.processes.values()), attribution.sets
    attribution.cut_heads = 0
    for process in processes:
        namesake = None if process.comms else _namesake(process, attribution.find_by_pid(process.pid))
        attribution.cut_heads += namesake is not None and len(process.host) < len(namesake.host)
        for thread in process.threads.values():
            thread.assign_early(process.comms if namesake is None else namesake.comms)
    builders = [*_group_by_id(processes, sets), *_group_without_id(processes, attribution)]
    builders = _within_limits(builders, attribution.reached)
    builder_of = {comm: builder for builder in builders for comm in builder.comms.values()}
    ambiguous: dict[tuple[str, ...], _Builder] = {}
    for process in processes:
        for channel, count in process.ambiguous.items():
            _assign(channel, count, builder_of, ambiguous, sets)
    for process in processes:
        roots = [builder_of[comm] for comm in process.comms if comm.rank == 0 and comm in builder_of]
        # Operations that several communicators may have run are evidence only if none of these is connected.
        roots = roots or list(dict.fromkeys(builder_of[comm] for comm in process.comms if comm in builder_of))
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
                builder.of_rank(comm.rank).add(comm.rank, code)


def _add_lost(builder: _Builder, lost: Sequence[tuple[Connection, int]]) -> None:
    """Add channels of unknown writers to the only communicator, because their ends name the writer."""
    for connection, code in lost:
        if builder.size is None or max(connection.rank, connection.peer) < builder.size:
            builder.of_rank(connection.rank).add(connection.peer, code)


def _within_limits(builders: Sequence[_Builder], reached: ReachedLimits) -> list[_Builder]:
    """Return the first communicators within the limits on their number and total ranks."""
    kept, places = list[_Builder](), 0
    for builder in builders:
        places += builder.size or 0
        if len(kept) == limits.MOST_COMMUNICATORS or places > limits.MOST_PLACES:
            reached.pass_over(
                f"{len(builders) - len(kept)} communicators beyond these",
                f"{limits.MOST_COMMUNICATORS} communicators, of {limits.MOST_PLACES} ranks together",
            )
            break
        kept.append(builder)
    return kept


def _namesake(process: Process, of_its_pid: Sequence[Process]) -> Process | None:
    """Return the process that this one duplicates, because its host name lost its start or follows other text."""
    found = [
        each
        for each in of_its_pid
        if each.comms and (process.host.endswith(each.host) or each.host.endswith(process.host))
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
    """Group ranks without a commId. Try the nth of a size in its process first in the nth communicator of that size."""
    builders: list[_Builder] = []
    by_size: dict[int, list[_Builder]] = {}
    for process in processes:
        counts: Counter[int] = Counter()
        for comm in process.comms:
            if comm.comm_id is None:
                nth, counts[comm.size] = counts[comm.size], counts[comm.size] + 1
                alike = by_size.setdefault(comm.size, [])
                builder = next((each for each in chain(alike[nth:], alike[:nth]) if each.fits(comm)), None)
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
    builder_of: Mapping[Comm, _Builder],
    ambiguous: dict[tuple[str, ...], _Builder],
    sets: ChannelSets,
) -> None:
    """Add a channel to every comm that may have it, if each logged it. Otherwise add it to the only comm without it."""
    connection, code, comms = channel
    comms = tuple(comm for comm in comms if comm in builder_of)  # a damaged log may leave comms without a communicator
    lacking = [
        comm
        for comm in comms
        if builder_of[comm].comms.get(connection.peer, comm).is_on(connection.peer_device)
        and not comm.connections.channels_to(connection.peer).has(code)
    ]
    silent = [comm for comm in lacking if not comm.connections and _others_are_connected(comm, builder_of[comm])]
    if count == len(comms):
        builders = [builder_of[comm] for comm in comms]
    elif len(silent) == 1:
        # In rings and trees every rank sends. Without these channels this rank would be the only one that does not.
        builders = [builder_of[silent[0]]]
    elif len(lacking) == 1:
        builders = [builder_of[lacking[0]]]
    else:
        builders = [_ambiguous(ambiguous, [builder_of[comm] for comm in lacking or comms], sets)]
    for builder in builders:
        builder.of_rank(connection.rank).add(connection.peer, code)


def _others_are_connected(comm: Comm, builder: _Builder) -> bool:
    return any(other.connections for other in builder.comms.values() if other is not comm)


def _ambiguous(found: dict[tuple[str, ...], _Builder], candidates: Sequence[_Builder], sets: ChannelSets) -> _Builder:
    """Return the communicator of channels that may belong to any candidate. It has the ranks on which all agree."""
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
    """Assign connections of processes without init lines to the only communicator, if their ranks fit. Otherwise
    join them as long as no two have the same rank.
    """
    found: list[_Builder] = []
    for process in processes:
        early = [pair for thread in process.threads.values() for pair in thread.early.items()]
        if not early:
            continue
        ranks = {rank: device for (rank, device), _ in early}
        largest = max((*ranks, *(peer for _, each in early for peer in each.connections)))
        only = builders[0] if len(builders) == 1 and not process.comms else None
        if (
            only is not None
            and largest < (only.size or 0)
            and not ranks.keys() & (only.comms | only.without_init).keys()
        ):
            builder = only
        else:
            known = next((each for each in found if not ranks.keys() & each.without_init.keys()), None)
            if known is None and len(found) == limits.MOST_WITHOUT_ID:
                _pass_over_without_id(attribution, f"connections of {process.name} without a communicator")
                return found
            builder = known or _Builder(attribution.sets)
            found += [] if known else [builder]
        builder.without_init |= {rank: (process, device) for rank, device in ranks.items()}
        for (rank, _), each in early:
            builder.of_rank(rank).add_all(each.connections)
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
    """Add the silent ranks that nccl-tests lists, if the text has one run and no init lines.

    `listed` has hosts and processes by rank. Several for one rank mean several runs.
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
    """Return a rank known only from connections, with the GPU in their brackets.

    If a host name has one GPU twice, it stands for several machines and identifies none (`is_unique`).
    """
    is_bus_id = len(device) >= _SHORTEST_BUS_ID
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
