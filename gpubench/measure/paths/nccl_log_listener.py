"""NCCL's connections and algorithms, read from this rank's log piece by piece."""

from gpubench.model.paths.selection import RankSelection
from gpubench.model.paths.transport import Edge, LoggedChannels, Transport, Tuning
from gpubench.ports.library_log import LibraryLog
from gpubench.readers.nccl_log.lines import INFO, parse_channel, parse_connection, parse_tuning
from gpubench.readers.nccl_log.neighbours import ring_pairs, tree_pairs


class NcclLogListener:
    """Reads the log of this rank while NCCL writes it."""

    def __init__(self, log: LibraryLog) -> None:
        self._log = log
        self._channel_bits: dict[tuple[int, int, Transport, bool, bool], int] = {}
        self._ring: set[tuple[int, int]] = set()
        self._tree: set[tuple[int, int]] = set()
        self._is_readable = log.is_readable()

    def listen(self) -> Tuning | None:
        """Read what is new; return the last algorithm that is named in it."""
        tuning = None
        for line in self._log.lines() if self._is_readable else ():
            message = line.partition(INFO)[2]
            self._add_channel(message)
            self._ring.update(ring_pairs(line))
            self._tree.update(tree_pairs(line))
            tuning = parse_tuning(message) or tuning
        return tuning

    def selection(self) -> RankSelection:
        """All that was read."""
        edges = (
            Edge(src, dst, LoggedChannels(transport, bits, peer_to_peer, received))
            for (src, dst, transport, peer_to_peer, received), bits in self._channel_bits.items()
        )
        return RankSelection(
            no_log=self._log.no_log, edges=tuple(edges), ring=frozenset(self._ring), tree=frozenset(self._tree)
        )

    def _add_channel(self, message: bytes) -> None:
        head, _, text = message.partition(b" : ")
        place = parse_channel(head)
        found = None if place is None else parse_connection(text)
        if place is not None and found is not None:
            channel, connection = place
            key = found.src, found.dst, found.transport, connection == 1, found.received
            self._channel_bits[key] = self._channel_bits.get(key, 0) | 1 << channel
