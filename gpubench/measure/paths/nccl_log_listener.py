"""What NCCL says of its connections and algorithms, collected from its log of this rank, piece by piece."""

from gpubench.model.paths.selection import RankSelection
from gpubench.model.paths.transport import Edge, Transport, Tuning
from gpubench.ports.library_log import LibraryLog
from gpubench.readers.nccl_log.lines import INFO, parse_channel, parse_connection, parse_tuning
from gpubench.readers.nccl_log.neighbours import ring_pairs, tree_pairs


class NcclLogListener:
    """Takes in the log of this rank, piece by piece."""

    def __init__(self, log: LibraryLog) -> None:
        self._log = log
        self._channels: dict[tuple[int, int, bool, Transport, bool], int] = {}
        self._ring: set[tuple[int, int]] = set()
        self._tree: set[tuple[int, int]] = set()
        self._hears = log.is_readable()

    def listen(self) -> Tuning | None:
        """Take in what is new; the last algorithm that was named in it."""
        tuning = None
        for line in self._log.lines() if self._hears else ():
            message = line.partition(INFO)[2]
            self._connect(message)
            self._ring.update(ring_pairs(line))
            self._tree.update(tree_pairs(line))
            tuning = parse_tuning(message) or tuning
        return tuning

    def selection(self) -> RankSelection:
        """All that was heard."""
        edges = (
            Edge(src, dst, transport, bits.bit_count(), bool(peer_to_peer), received, bits)
            for (src, dst, received, transport, peer_to_peer), bits in self._channels.items()
        )
        return RankSelection(
            silence=self._log.silence, edges=tuple(edges), ring=frozenset(self._ring), tree=frozenset(self._tree)
        )

    def _connect(self, message: bytes) -> None:
        """Note a channel of a connection."""
        head, _, text = message.partition(b" : ")
        channel = parse_channel(head)
        connection = None if channel is None else parse_connection(text)
        if channel is None or connection is None:
            return
        bit, number = channel
        key = (connection.src, connection.dst, connection.received, connection.transport, bool(number))
        self._channels[key] = self._channels.get(key, 0) | bit
