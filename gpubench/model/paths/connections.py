"""The connections of a communicator: what every rank logs of every peer.

A job of a thousand ranks has a million pairs and few different sets of channels, so equal sets are one object.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from gpubench.model.paths.transport import LoggedChannels, Route, Transport, TransportKind, routes

MOST_CHANNELS = 1024
"""NCCL has 64 channels; larger numbers come from garbled lines."""

_MOST_TRANSPORTS = 4096
_ONE_TOO_MANY = Transport("one of many more", TransportKind.UNKNOWN)
_KINDS_A_TRANSPORT = 4
"""Sent or received, over NCCL's connection 0 or 1."""


def channel_code(channel: int, connection: int) -> int:
    """The number of a channel of NCCL's connection 0 (collectives) or 1 (send and receive)."""
    return connection * MOST_CHANNELS + channel


class ChannelSet:
    """The channels that one rank logs of one peer. `bits_by_kind` has the channels' bits by kind of line, ascending.

    `plus` caches the sets with one channel more, by that channel's code: `ChannelSets.line_code` + `channel_code`.
    """

    __slots__ = ("_sets", "bits_by_kind", "logged", "plus", "receives")

    def __init__(self, sets: "ChannelSets", bits_by_kind: tuple[tuple[int, int], ...]) -> None:
        self._sets = sets
        self.bits_by_kind = bits_by_kind
        self.logged = tuple(sets.logged(kind, bits) for kind, bits in bits_by_kind)
        self.receives = any(each.received for each in self.logged)
        self.plus: dict[int, ChannelSet] = {}

    def with_channel(self, code: int) -> "ChannelSet":
        """The set with one channel more."""
        if code not in self.plus:
            kind, channel = divmod(code, MOST_CHANNELS)
            self.plus[code] = self._with_bits(kind, 1 << channel)
        return self.plus[code]

    def with_all(self, other: "ChannelSet") -> "ChannelSet":
        """The union of two sets."""
        union = self
        for kind, bits in other.bits_by_kind:
            union = union._with_bits(kind, bits)
        return union

    def has(self, code: int) -> bool:
        """True if the channel was logged at that end of that NCCL connection, with whatever transport."""
        kind, channel = divmod(code, MOST_CHANNELS)
        return any(bits >> channel & 1 and not (other - kind) % _KINDS_A_TRANSPORT for other, bits in self.bits_by_kind)

    def _with_bits(self, kind: int, bits: int) -> "ChannelSet":
        merged = dict(self.bits_by_kind)
        merged[kind] = merged.get(kind, 0) | bits
        return self._sets.channel_set(tuple(sorted(merged.items())))


class ChannelSets:
    """All different channel sets of a job, each once."""

    def __init__(self) -> None:
        self._numbers: dict[Transport, int] = {}
        self._transports: list[Transport] = []
        self._sets: dict[tuple[tuple[int, int], ...], ChannelSet] = {}
        self.empty = self.channel_set(())

    def line_code(self, transport: Transport, *, received: bool) -> int:
        """The number of a line's transport and end; `channel_code` adds channel and NCCL connection."""
        if transport not in self._numbers and len(self._transports) >= _MOST_TRANSPORTS:
            transport = _ONE_TOO_MANY
        number = self._numbers.setdefault(transport, len(self._transports))
        if number == len(self._transports):
            self._transports.append(transport)
        return (number * _KINDS_A_TRANSPORT + 2 * received) * MOST_CHANNELS

    def logged(self, kind: int, bits: int) -> LoggedChannels:
        """The channels with these bits of a kind of line: a code without its channel."""
        number, of_transport = divmod(kind, _KINDS_A_TRANSPORT)
        received, connection = divmod(of_transport, 2)
        return LoggedChannels(self._transports[number], bits, bool(connection), bool(received))

    def channel_set(self, bits_by_kind: tuple[tuple[int, int], ...]) -> ChannelSet:
        """The one set with these channels."""
        if bits_by_kind not in self._sets:
            self._sets[bits_by_kind] = ChannelSet(self, bits_by_kind)
        return self._sets[bits_by_kind]


class RankConnections(dict[int, ChannelSet]):
    """The connections that one rank logs, by peer. `size` is that of its communicator."""

    __slots__ = ("empty", "size")

    def __init__(self, sets: ChannelSets, size: int) -> None:
        super().__init__()
        self.empty = sets.empty
        self.size = size

    def of(self, peer: int) -> ChannelSet:
        """The channels of a peer, none where it has none."""
        return self.get(peer, self.empty)

    def add(self, peer: int, code: int) -> None:
        """Add a channel by its code."""
        self[peer] = self.of(peer).with_channel(code)

    def add_all(self, other: Mapping[int, ChannelSet]) -> None:
        """Add the connections of another log of the same rank."""
        for peer, channels in other.items():
            self[peer] = self[peer].with_all(channels) if peer in self else channels


@dataclass(frozen=True, slots=True, eq=False)
class PairRoutes:
    """The routes from one rank to another. Pairs with the same channels share one object, so identity is its key."""

    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of a communicator by rank."""

    by_rank: Mapping[int, Mapping[int, ChannelSet]] = field(default_factory=dict)

    @property
    def joins_ranks(self) -> bool:
        """True if any rank is connected with another one; a switch that reduces is none."""
        return any(peer != rank for rank, peers in self.by_rank.items() for peer in peers)

    def by_source(self) -> Iterator[tuple[int, dict[int, PairRoutes]]]:
        """Every source with its destinations, both in order, and the routes to each."""
        joined = cache(_routes)
        receivers: dict[int, dict[int, ChannelSet]] = {}
        for rank, peers in self.by_rank.items():
            for peer, channels in peers.items():
                if channels.receives:
                    receivers.setdefault(peer, {})[rank] = channels
        for src in sorted(self.by_rank.keys() | receivers.keys()):
            sent, received = self.by_rank.get(src, {}), receivers.get(src, {})
            destinations = sorted(sent.keys() | received.keys())
            found = {dst: joined(sent.get(dst), received.get(dst)) for dst in destinations}
            if found := {dst: pair for dst, pair in found.items() if pair.routes}:
                yield src, found


def _routes(at_source: ChannelSet | None, at_destination: ChannelSet | None) -> PairRoutes:
    sent = [each for each in at_source.logged if not each.received] if at_source else []
    received = [each for each in at_destination.logged if each.received] if at_destination else []
    return PairRoutes(routes([*sent, *received]))
