"""Who said what of its connections: a job of a thousand ranks has a million pairs, which say few different things."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpubench.model.paths.transport import Edge, Route, Transport, TransportKind, routes

MOST_CHANNELS = 1024
"""NCCL has 64 channels; what is beyond these is no line of NCCL's, but a garbled one."""

_STEPS = 2 * MOST_CHANNELS
_MOST_TRANSPORTS = 4096
_ONE_TOO_MANY = Transport("one of many more", TransportKind.UNKNOWN)


def channel_step(channel: int, connection: int) -> int:
    """A channel of NCCL's connection 0 (collectives) or 1 (send and receive) as a number."""
    return connection * MOST_CHANNELS + channel


def _parted(step: int) -> tuple[int, int]:
    """The kind, with NCCL's connection in it, and the bit of a channel."""
    return step - step % MOST_CHANNELS, 1 << step % MOST_CHANNELS


class Said(NamedTuple):
    """The channels of which one end said that they travel so."""

    transport: Transport
    received: bool
    peer_to_peer: bool
    channel_bits: int


class Bundle(dict[int, "Bundle"]):
    """All that one rank said of another, also by kind and channels as `bits`. Equal ones are one object.

    `hears` is whether it receives from the other.

    As a dictionary: the bundle with one channel more, by a step: what `Bundles.kind` and `channel_step` say, summed.
    """

    __slots__ = ("_bundles", "bits", "hears", "said")

    def __init__(self, bundles: "Bundles", bits: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self._bundles = bundles
        self.bits = bits
        self.said = tuple(bundles.said(kind, channels) for kind, channels in bits)
        self.hears = any(said.received for said in self.said)

    def __missing__(self, step: int) -> "Bundle":
        following = self[step] = self.with_channels(*_parted(step))
        return following

    def has(self, step: int) -> bool:
        """Whether the channel of that end and of that connection of NCCL's is in it, with whatever transport."""
        kind, channel = _parted(step)
        return any(channels & channel for other, channels in self.bits if not (other - kind) % (2 * _STEPS))

    def with_channels(self, kind: int, channels: int) -> "Bundle":
        """This one and some channels, by their bits, of a kind with NCCL's connection in it."""
        bits = dict(self.bits)
        bits[kind] = bits.get(kind, 0) | channels
        return self._bundles.bundle(tuple(sorted(bits.items())))

    def with_all(self, other: "Bundle") -> "Bundle":
        """This one and another."""
        both = self
        for kind, channels in other.bits:
            both = both.with_channels(kind, channels)
        return both


class ConnectionRow(dict[int, Bundle]):
    """What one rank said, by the other rank; of one that is not in it nothing.

    A rank beyond the communicator's size raises IndexError.
    """

    __slots__ = ("nothing", "size")

    def __init__(self, bundles: "Bundles", size: int) -> None:
        super().__init__()
        self.nothing = bundles.nothing
        self.size = size

    def __missing__(self, peer: int) -> Bundle:
        if peer >= self.size:
            raise IndexError(peer)
        return self.nothing

    def add(self, other: Mapping[int, Bundle]) -> None:
        """Take what another row says."""
        for peer, bundle in other.items():
            self[peer] = self[peer].with_all(bundle)


class Bundles:
    """All bundles of a job, each once."""

    def __init__(self) -> None:
        self._transports: list[Transport] = []
        self._numbers: dict[Transport, int] = {}
        self._by_bits: dict[tuple[tuple[int, int], ...], Bundle] = {}
        self.nothing = self.bundle(())

    def kind(self, transport: Transport, *, received: bool) -> int:
        """What a line says beside ranks and channel, as a number."""
        number = self._numbers.get(transport)
        if number is None:
            if len(self._transports) >= _MOST_TRANSPORTS:
                transport = _ONE_TOO_MANY
            number = self._numbers.setdefault(transport, len(self._transports))
            if number == len(self._transports):
                self._transports.append(transport)
        return (number << 1 | received) * _STEPS

    def said(self, kind: int, channels: int) -> Said:
        """What a kind and channels, by their bits, stand for."""
        number = kind // _STEPS
        return Said(self._transports[number >> 1], bool(number & 1), bool(kind % _STEPS), channels)

    def bundle(self, bits: tuple[tuple[int, int], ...]) -> Bundle:
        """The one with these channels by kind, in ascending order."""
        found = self._by_bits.get(bits)
        if found is None:
            found = self._by_bits[bits] = Bundle(self, bits)
        return found


@dataclass(frozen=True, slots=True)
class Connections:
    """What every rank of a communicator said, by rank and by the other rank."""

    rows: Mapping[int, Mapping[int, Bundle]] = field(default_factory=dict)

    @classmethod
    def of(cls, edges: Iterable[Edge]) -> "Connections":
        """Connections from a list of them."""
        bundles = Bundles()
        rows: dict[int, ConnectionRow] = {}
        for edge in edges:
            rank, peer = (edge.dst, edge.src) if edge.received else (edge.src, edge.dst)
            row = rows.setdefault(rank, ConnectionRow(bundles, max(edge.src, edge.dst) + 1))
            kind = bundles.kind(edge.transport, received=edge.received) + channel_step(0, edge.peer_to_peer)
            row[peer] = row.get(peer, bundles.nothing).with_channels(kind, edge.channel_bits)
        return cls(rows)

    def __bool__(self) -> bool:
        return any(self.rows.values())

    def edges(self) -> Iterator[Edge]:
        """One by one, what the ends said."""
        for rank, row in self.rows.items():
            for peer, bundle in row.items():
                yield from _edges(rank, peer, bundle.said)

    def pairs(self) -> Iterator[tuple[int, int, tuple[Route, ...]]]:
        """Source, destination, and how the bytes between them travel, ordered by ranks."""
        for src, destinations, travel in self.by_source():
            for dst, found in zip(destinations, travel, strict=True):
                yield src, dst, found

    def by_source(self) -> Iterator[tuple[int, list[int], list[tuple[Route, ...]]]]:
        """Every source, its destinations in order, and how the bytes to each travel: pairs alike have one object."""
        known = _Routes()
        heard_by: dict[int, tuple[list[int], list[Bundle]]] = {}
        for rank, row in self.rows.items():
            for peer, bundle in row.items():
                if bundle.hears:
                    ranks, bundles = heard_by.setdefault(peer, ([], []))
                    ranks.append(rank)
                    bundles.append(bundle)
        for src in sorted(self.rows.keys() | heard_by.keys()):
            own, heard = self.rows.get(src, _EMPTY), dict(zip(*heard_by.get(src, ((), ())), strict=True))
            destinations = sorted(own.keys() | heard.keys())
            travel = known.joined(list(map(own.get, destinations)), list(map(heard.get, destinations)))
            if all(travel):
                yield src, destinations, travel
            elif any(travel):
                kept = [place for place, found in enumerate(travel) if found]
                yield src, [destinations[place] for place in kept], [travel[place] for place in kept]


_EMPTY: Mapping[int, Bundle] = {}


class _Routes(dict[tuple[int, int], tuple[Route, ...]]):
    """What the bundles of both ends say together, by their ids."""

    def joined(self, said: Sequence[Bundle | None], heard: Sequence[Bundle | None]) -> list[tuple[Route, ...]]:
        """How the bytes travel from one rank to others: what it said of them, and what they said of it."""
        keys = list(zip(map(id, said), map(id, heard), strict=True))
        for place in (place for place, key in enumerate(keys) if key not in self):
            self[keys[place]] = _ways(said[place], heard[place])
        return [self[key] for key in keys]


def _ways(said: Bundle | None, heard: Bundle | None) -> tuple[Route, ...]:
    sent = [each for each in said.said if not each.received] if said is not None else []
    received = [each for each in heard.said if each.received] if heard is not None else []
    return routes([*_edges(0, 1, sent), *_edges(1, 0, received)])


def _edges(rank: int, peer: int, said: Iterable[Said]) -> Iterator[Edge]:
    """What a rank said of another."""
    for each in said:
        src, dst = (peer, rank) if each.received else (rank, peer)
        yield Edge(
            src=src,
            dst=dst,
            transport=each.transport,
            channels=each.channel_bits.bit_count(),
            peer_to_peer=each.peer_to_peer,
            received=each.received,
            channel_bits=each.channel_bits,
        )
