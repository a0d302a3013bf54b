"""Communicators put together from what each rank's process says, once every log is read.

Ranks of one communicator print the same commId. NCCL before 2.17 prints none: there they are told by size, order, and
the GPUs that each says its peers have. Lines that fit several communicators make up one without an id that names them;
so do lines of processes whose beginning is missing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.model.paths.connections import Bundles, ConnectionRow, Connections
from gpubench.model.paths.nccl_log import Communicator, Member
from gpubench.model.paths.transport import Tuning
from gpubench.readers.nccl_log.lines import MOST_RANKS, bus_id
from gpubench.readers.nccl_log.threads import Membership, Process, Undecided, is_on


@dataclass(slots=True, eq=False)
class _Group:
    """A communicator in the making. `strangers` are ranks whose process says no more than that they have this rank."""

    id: str | None
    size: int | None
    bundles: Bundles
    ranks: dict[int, Membership] = field(default_factory=dict)
    strangers: dict[int, Process] = field(default_factory=dict)
    rows: dict[int, ConnectionRow] = field(default_factory=dict)
    tunings: dict[Tuning, None] = field(default_factory=dict)
    candidates: tuple[str, ...] = ()

    def add(self, membership: Membership) -> None:
        """Take a member; a second log of the same rank only adds connections."""
        self.ranks.setdefault(membership.rank, membership)
        if membership.rank in self.rows:
            self.own_row(membership.rank).add(membership.row)
        else:
            self.rows[membership.rank] = membership.row
        self.tunings |= membership.tunings

    def own_row(self, rank: int) -> ConnectionRow:
        """A rank's row that may be changed: the reader's own stay as they are."""
        row = self.rows.get(rank)
        if row is None or any(row is each.row for each in self.ranks.values()):
            own = self.rows[rank] = ConnectionRow(self.bundles, self.size or MOST_RANKS)
            own.update(row or {})
        return self.rows[rank]

    def takes(self, membership: Membership) -> bool:
        """Whether a rank without a commId can be of this communicator: nobody else is, and the GPUs agree."""
        if membership.size != self.size or membership.rank in self.ranks:
            return False
        return all(
            is_on(membership, other.claims.get(membership.rank, ""))
            and is_on(other, membership.claims.get(other.rank, ""))
            and not (other.process.host == membership.process.host and other.bus == membership.bus is not None)
            for other in self.ranks.values()
        )


def communicators(
    processes: Sequence[Process], bundles: Bundles, host_ids: Mapping[str, str]
) -> tuple[Communicator, ...]:
    """All communicators in order of appearance; what none can be told for comes last.

    `host_ids` are the values of NCCL_HOSTID by process: where it is set, NCCL takes it for the machine.
    """
    _settle(processes)
    groups = [*_named(processes, bundles), *_unnamed(processes, bundles)]
    home = {id(each): group for group in groups for each in group.ranks.values()}
    shared: dict[tuple[str, ...], _Group] = {}
    for process in processes:
        for undecided, seen in process.undecided.items():
            _decide(process, undecided, seen, home, shared, bundles)
    for process in processes:
        roots = [home[id(each)] for each in process.memberships if each.rank == 0 and id(each) in home]
        # Operations that several communicators may have run tell something only where none of these is connected.
        if process.tunings and not any(row for group in roots for row in group.rows.values()):
            _shared(shared, roots, bundles).tunings |= process.tunings
    found = (*groups, *shared.values(), *_strangers(processes, bundles))
    return tuple(_communicator(group, host_ids) for group in found)


def _settle(processes: Sequence[Process]) -> None:
    """Hand what waits to the only communicator that fits, also where text glued to a host's name made up a process."""
    for process in processes:
        memberships = process.memberships or _namesake(process, processes)
        for thread in process.threads.values():
            thread.settle(memberships)


def _namesake(process: Process, processes: Sequence[Process]) -> list[Membership]:
    """The communicators of the one process that this one must be, behind text without a line end."""
    found = [
        each for each in processes if each.pid == process.pid and each.memberships and process.host.endswith(each.host)
    ]
    return found[0].memberships if len(found) == 1 else []


def _named(processes: Sequence[Process], bundles: Bundles) -> list[_Group]:
    groups: dict[tuple[str, int], _Group] = {}
    for process in processes:
        for membership in process.memberships:
            if membership.key is not None:
                key = membership.key, membership.size
                groups.setdefault(key, _Group(*key, bundles)).add(membership)
    return list(groups.values())


def _unnamed(processes: Sequence[Process], bundles: Bundles) -> list[_Group]:
    """Ranks without a commId, each with the first group that can take it, from the one of the same order on."""
    groups: list[_Group] = []
    for process in processes:
        taken: dict[int, int] = {}
        for membership in process.memberships:
            if membership.key is None:
                order = taken[membership.size] = taken.get(membership.size, -1) + 1
                alike = [each for each in groups if each.size == membership.size]
                group = next((each for each in (*alike[order:], *alike[:order]) if each.takes(membership)), None)
                if group is None:
                    number = len(alike) + 1
                    group = _Group(f"{membership.size} ranks, number {number}", membership.size, bundles)
                    groups.append(group)
                group.add(membership)
    return groups


def _decide(
    process: Process,
    undecided: Undecided,
    seen: int,
    home: dict[int, _Group],
    shared: dict[tuple[str, ...], _Group],
    bundles: Bundles,
) -> None:
    """A channel that several communicators may have: all do if it was seen as often, else those are left that can."""
    connection, step = undecided.connection, undecided.step
    known = (process.memberships[place] for place in undecided.candidates)
    memberships = [each for each in known if id(each) in home]  # a damaged log may say nothing of whose one is
    able = [
        each
        for each in memberships
        if is_on(home[id(each)].ranks.get(connection.peer, each), connection.peer_device)
        and not each.row[connection.peer].has(step)
    ]
    if seen == len(memberships):
        groups = [home[id(each)] for each in memberships]
    elif len(able) == 1:
        groups = [home[id(able[0])]]
    else:
        fitting = tuple(home[id(each)] for each in able or memberships)
        groups = [_shared(shared, fitting, bundles)]
    for group in groups:
        row = group.own_row(connection.rank)
        row[connection.peer] = row[connection.peer][step]


def _shared(shared: dict[tuple[str, ...], _Group], groups: Sequence[_Group], bundles: Bundles) -> _Group:
    """What lines belong to that may be of any of these; its ranks are those of which they all say the same."""
    names = tuple(sorted({str(group.id) for group in groups}))
    if names not in shared:
        found = shared[names] = _Group(None, None, bundles, candidates=names)
        for rank, membership in groups[0].ranks.items() if groups else ():
            others = [group.ranks[rank] for group in groups if rank in group.ranks]
            if len(others) == len(groups) and len({each.process for each in others}) == 1:
                found.ranks[rank] = membership
    return shared[names]


def _strangers(processes: Sequence[Process], bundles: Bundles) -> list[_Group]:
    """What processes say that never name a communicator: put together as long as no two claim a rank."""
    groups: list[_Group] = []
    for process in processes:
        waiting = [pair for thread in process.threads.values() for pair in thread.waiting.items()]
        if not waiting:
            continue
        ranks = {rank for (rank, _), _ in waiting}
        group = next((each for each in groups if not ranks & set(each.strangers)), None)
        if group is None:
            group = _Group(None, None, bundles)
            groups.append(group)
        group.strangers |= dict.fromkeys(ranks, process)
        for (rank, _), said in waiting:
            group.own_row(rank).add(said.row)
    return groups


def _communicator(group: _Group, host_ids: Mapping[str, str]) -> Communicator:
    ranks = sorted(group.ranks.items())
    told = [each.nodes for _, each in ranks if each.nodes is not None]
    count = max(told, default=None)
    nodes = _nodes([each for _, each in ranks], count, host_ids)
    members = [_member(each, node) for (_, each), node in zip(ranks, nodes, strict=True)]
    members += [
        Member(rank=rank, host=each.host, pid=each.pid, node=host_ids.get(each.name, each.host))
        for rank, each in group.strangers.items()
    ]
    return Communicator(
        id=group.id,
        size=group.size,
        nodes=count,
        members=tuple(sorted(members, key=lambda member: member.rank)),
        connections=Connections(group.rows),
        tunings=tuple(group.tunings),
        candidates=group.candidates,
    )


def _nodes(ranks: Sequence[Membership], count: int | None, host_ids: Mapping[str, str]) -> list[str]:
    """The machine of every rank as NCCL tells them apart: by name, or NCCL_HOSTID.

    Machines may share a name, as virtual ones do. Where NCCL counts more of them than there are names, a new one begins
    with every local rank 0, if that gives as many as NCCL counts.
    """
    names = [host_ids.get(each.process.name, each.process.host) for each in ranks]
    if count is None or len(set(names)) >= count:
        return names
    seen: Counter[str] = Counter()
    numbered = []
    for name, each in zip(names, ranks, strict=True):
        seen[name] += each.local_rank == 0
        numbered.append(f"{name}~{seen[name]}" if seen[name] > 1 else name)
    return numbered if len(set(numbered)) == count else names


def _member(membership: Membership, node: str) -> Member:
    return Member(
        rank=membership.rank,
        host=membership.process.host,
        pid=membership.process.pid,
        bus_id=None if membership.bus is None else bus_id(membership.bus),
        nvml_index=membership.nvml_index,
        node=node,
        local_rank=membership.local_rank,
    )
