"""A library's choice of connections, as all ranks log it, and those that an operation uses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpubench.model.paths.transport import Edge, Path, Transport, TransportKind, is_staged, join

Pair = tuple[int, int]
"""Source and destination rank."""

RING, TREE = "RING", "TREE"
_NVLS, _NVLS_TREE = "NVLS", "NVLS_TREE"
_WITHOUT_CONNECTIONS = {
    _NVLS: "NVLS",
    _NVLS_TREE: "NVLS",
    "SYMMETRIC": "symmetric memory",
    "COPY_ENGINE": "copy engine",
}
"""Algorithms whose bytes take no connection that the log shows inside a node, by what they go through there instead.
They need memory that ranks reach by load and store, or multicast by NVSwitch, so none passes through the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSelection:
    """The connections that one rank logs.

    `no_log` is why its log cannot be read. `ring` and `tree` are the ordered pairs of neighbours that this rank names.
    """

    no_log: str = ""
    edges: tuple[Edge, ...] = ()
    ring: frozenset[Pair] = frozenset()
    tree: frozenset[Pair] = frozenset()


@dataclass(frozen=True, slots=True)
class Used:
    """The connections of an operation: the transports of every ordered pair, worst first, none where none is logged.

    `unconnected` are ranks that must take part and log no connection.
    """

    pairs: Mapping[Pair, tuple[Transport, ...]]
    unconnected: tuple[int, ...] = ()

    @property
    def transport(self) -> str | None:
        """The names of all transports, worst first: 'NET/Socket/0+P2P/CUMEM'."""
        return names(transport for transports in self.pairs.values() for transport in transports)

    @property
    def host_staged(self) -> bool | None:
        """True if anything passes through host memory; None where nothing is known to, and not all is known."""
        staged = [is_staged(transports) for transports in self.pairs.values()]
        if True in staged:
            return True
        return None if self.unconnected or None in staged or not staged else False


def names(transports: Iterable[Transport]) -> str | None:
    """Distinct transports by name, worst first, joined by '+'; None where there are none."""
    return "+".join(dict.fromkeys(each.name for each in sorted(transports, key=_badness))) or None


def _badness(transport: Transport) -> tuple[int, str]:
    """Slowest first: sockets and staging networks, shared memory, the unknown, networks, other GPUs, direct."""
    if transport.host_staged:
        return (0 if transport.network else 1), transport.name
    kinds = (TransportKind.UNKNOWN, TransportKind.COLLNET, TransportKind.NET)
    return (2 + kinds.index(transport.kind) if transport.kind in kinds else 5), transport.name


def without_idle(pairs: Iterable[Pair], expected_bytes: Sequence[tuple[float, float]]) -> list[Pair]:
    """The pairs of a closed ring that carry data; `expected_bytes` are what each rank sends and receives, at least.

    Nothing goes into the root of a broadcast, which alone has something to send, or out of that of a reduction.
    """
    only_sender, only_receiver = (_only(each[end] for each in expected_bytes) for end in (0, 1))
    return [pair for pair in pairs if pair[1] != only_sender and pair[0] != only_receiver]


def _only(expected_bytes: Iterable[float]) -> int | None:
    """The rank that has any bytes, where it is the only one."""
    ranks = [rank for rank, each in enumerate(expected_bytes) if each]
    return ranks[0] if len(ranks) == 1 else None


class Selection:
    """The connections that all ranks log together. `nodes` are the ranks' nodes, as MPI sees them."""

    def __init__(self, ranks: Sequence[RankSelection], nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._paths = join(edge for rank in ranks for edge in rank.edges)
        self._ring = frozenset[Pair]().union(*(rank.ring for rank in ranks))
        self._tree = frozenset[Pair]().union(*(rank.tree for rank in ranks))
        self.no_log = next((f"rank {number}: {rank.no_log}" for number, rank in enumerate(ranks) if rank.no_log), "")

    def of_algorithm(self, algorithm: str | None) -> Used:
        """The connections of a collective; without an algorithm, all connections of collectives.

        Rings and trees are known by their neighbours, so that a connection that no rank logs is missed.
        """
        paths = [path for path in self._paths if not path.peer_to_peer]
        if algorithm in _WITHOUT_CONNECTIONS:
            return self._without_connections(algorithm, paths)
        neighbours = {RING: self._ring, TREE: self._tree}.get(algorithm or "", frozenset())
        if neighbours:
            return Used(_by_pair(paths, neighbours))
        pairs = _by_pair(paths, {(path.src, path.dst) for path in paths})
        connected = {source for source, _ in pairs}
        ranks = range(len(self._nodes)) if len(self._nodes) > 1 else ()
        return Used(pairs, tuple(rank for rank in ranks if rank not in connected))

    def of_sends(self, pairs: Iterable[Pair]) -> Used:
        """The connections of sends and receives between these ranks. Lines of SHM do not say which they are of."""
        paths = [path for path in self._paths if path.peer_to_peer or path.transport.kind is TransportKind.SHM]
        return Used(_by_pair(paths, pairs))

    def _without_connections(self, algorithm: str, paths: Sequence[Path]) -> Used:
        through = Transport(_WITHOUT_CONNECTIONS[algorithm], TransportKind.P2P)
        ranks = range(len(self._nodes))
        inside = {(one, other) for one in ranks for other in ranks if one != other and self._together(one, other)}
        across = {(path.src, path.dst) for path in paths if not self._together(path.src, path.dst)}
        return Used(dict.fromkeys(sorted(inside), (through,)) | _by_pair(paths, across))

    def _together(self, one: int, other: int) -> bool:
        return self._nodes[one] == self._nodes[other]


def _by_pair(paths: Sequence[Path], pairs: Iterable[Pair]) -> dict[Pair, tuple[Transport, ...]]:
    """The distinct transports of these pairs, worst first; both ends' where they differ."""
    found: dict[Pair, dict[Transport, None]] = {pair: {} for pair in sorted(pairs)}
    for path in paths:
        if (path.src, path.dst) in found:
            ends = (end for end in (path.sent, path.received) if end is not None)
            found[path.src, path.dst] |= dict.fromkeys(ends)
    return {pair: tuple(sorted(transports, key=_badness)) for pair, transports in found.items()}
