"""The machines that the ranks of a communicator run on, by NCCL's count and by what else the log shows.

A name of a host is no proof: virtual machines and pods may share one, and containers of one machine have several.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from gpubench.model.paths.connections import ChannelSet, RankConnections
from gpubench.model.paths.transport import TransportKind
from gpubench.readers.nccl_log.threads import Comm

_BETWEEN_MACHINES = "P2P/MNNVL"
"""The one kind of peer access that leaves a machine, over NVLinks between nodes."""


def nodes(comms: Sequence[Comm], count: int | None, host_ids: Mapping[str, str]) -> list[str]:
    """The machine of every rank as NCCL tells them apart: by name, or NCCL_HOSTID.

    Where NCCL counts more machines than there are names, a new one begins with every local rank 0, if that gives as
    many as NCCL counts.
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
    """The machine of every rank as far as the log shows it; `by_node` is what NCCL takes for it.

    Ranks of different addresses are on different machines, whatever these are called. Ranks of one name are on one
    machine where they share a process or an address, or where the GPU of the first rank of a node is not the machine's
    first; without an address, ranks on the same bus id are not. Peer access and shared memory join ranks of one machine
    whatever else is said.
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
    """The machines of the ranks of one name, numbered."""
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
    """True if ranks of one name are on one machine, of which NCCL may count several."""
    if len(set(of_node)) == 1 or len({comm.process for comm in comms}) == 1 or _has_one_address(known):
        return True
    firsts = [comm.nvml_index for comm in comms if comm.local_rank == 0]
    return any(firsts)


def _has_one_address(known: Sequence[str]) -> bool:
    return len(set(known)) == 1 and known[0] != ""


def _joined(comms: Sequence[Comm], names: list[str], connections: Mapping[int, RankConnections]) -> list[str]:
    """The same with the machines joined that peer access or shared memory connects."""
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
    """Names of machines, of which several turn out to be one: a tree a machine, whose root is its name."""

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
        """Have the machine of one name be that of another."""
        self._above[self[old]] = self[new]


class _Inside(dict[ChannelSet, bool]):
    """`is_inside` of channels, each of which a million pairs may have."""

    def __missing__(self, channels: ChannelSet) -> bool:
        self[channels] = found = is_inside(channels)
        return found


def is_inside(channels: ChannelSet) -> bool:
    """True if a rank reaches a peer over channels in a way that only ranks of one machine can."""
    return any(
        each.transport.kind in (TransportKind.P2P, TransportKind.SHM) and each.transport.name != _BETWEEN_MACHINES
        for each in channels.logged
    )
