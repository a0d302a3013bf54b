"""The transports of connections as NCCL names them, and the routes between two ranks that they make up."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class TransportKind(StrEnum):
    """NCCL's transports in the order in which it tries them; UNKNOWN is any other."""

    P2P = "p2p"
    SHM = "shm"
    NET = "net"
    COLLNET = "collnet"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Transport:
    """The transport of a connection.

    `name` is canonical, as NCCL prints it without what changes from channel to channel: `P2P/CUMEM`, `P2P/IPC`,
    `P2P/MNNVL`, `P2P/direct pointer`, `P2P/indirect`, `SHM/direct`, `NET/IB/0/GDRDMA`, `NET/Socket/0`,
    `COLLNET/SHARP/0`. `gdr` is GPUDirect RDMA; `proxy_rank` the rank whose NIC is used (PXN). `modifiers` are the words
    left out of the name: `read`, `CE`, `Shared`, `PCI`, or the GPU that `P2P/indirect` goes through.
    """

    name: str
    kind: TransportKind
    gdr: bool = False
    proxy_rank: int | None = None
    modifiers: tuple[str, ...] = ()

    @property
    def host_staged(self) -> bool | None:
        """True if the bytes pass through host memory: SHM always, the network unless with GPUDirect RDMA, P2P never."""
        if self.kind is TransportKind.UNKNOWN:
            return None
        return self.kind is not TransportKind.P2P and not self.gdr

    @property
    def family(self) -> str:
        """The name without the NIC's number: 'NET/IB/GDRDMA'."""
        return self.name if self.network is None else _NIC.sub("", self.name)

    @property
    def network(self) -> str | None:
        """The name of the network that carries it ('IB', 'Socket', 'AWS Libfabric'); None where none does."""
        if self.kind not in (TransportKind.NET, TransportKind.COLLNET):
            return None
        return _NETWORK.sub("", self.name)


_NIC = re.compile(r"/-?\d+(?=/GDRDMA$|$)", re.ASCII)
_NETWORK = re.compile(r"^(?:NET|COLLNET)/|/-?\d+(?:/GDRDMA)?$", re.ASCII)
_NET = re.compile(
    r"(?P<net>(?:COLL)?NET/[^/]+/-?\d{1,9})(?:\((?P<proxy>\d{1,9})\))?(?P<gdr>/GDRDMA(?P<pci>\(PCI\))?)?(?P<shared>/Shared)?",
    re.ASCII,
)
_P2P = re.compile(r"(?P<name>P2P/(?:direct pointer|IPC|CUMEM|MNNVL))(?P<words>(?:/(?:read|CE))*)", re.ASCII)
_INDIRECT = re.compile(r"P2P/indirect/(?P<hop>-?\d+\[[0-9A-Fa-f]+\])(?P<words>(?:/read)?)", re.ASCII)
_SHM = re.compile(r"direct shared memory|SHM/(?:direct|CE)(?:/(?P<receiver>direct|CE))?", re.ASCII)

_WHOLE = (
    *(f"P2P/{name}" for name in ("direct pointer/read", "IPC/read/CE", "IPC/CE", "CUMEM/read/CE", "CUMEM/CE")),
    *("P2P/MNNVL/read/CE", "P2P/MNNVL/CE", "P2P/indirect/", "SHM/direct/direct", "SHM/direct/CE", "SHM/CE/direct"),
    *("SHM/CE/CE", "direct shared memory", "NET/", "COLLNET/"),
)
_NET_BEGINNING = re.compile(
    r"(?:P2P/indirect/-?\d*\[?[0-9A-Fa-f]*\]?(?:/r?e?a?)?|(?:COLL)?NET/[^/]+(?:/-?(?:\d{1,9}(?:\(\d*)?"
    r"(?:\)?(?P<rest>/.*))?)?)?)",
    re.ASCII,
)
_NET_ENDS = ("/GDRDMA(PCI)/Shared", "/GDRDMA/Shared", "/Shared")


def parse_transport(via: str) -> Transport:
    """The transport behind `via` in a line of NCCL 2.10 to 2.32. Never raises: other text is UNKNOWN, by that name."""
    text = via.strip()
    if found := _P2P.fullmatch(text):
        return Transport(found["name"], TransportKind.P2P, modifiers=_words(found["words"]))
    if found := _NET.fullmatch(text):
        kind = TransportKind.COLLNET if text.startswith("COLL") else TransportKind.NET
        gdr = found["gdr"] is not None
        modifiers = (*(["PCI"] if found["pci"] else []), *_words(found["shared"] or ""))
        proxy_rank = None if found["proxy"] is None else int(found["proxy"])
        return Transport(found["net"] + ("/GDRDMA" if gdr else ""), kind, gdr, proxy_rank, modifiers)
    if _SHM.fullmatch(text):
        return Transport("SHM/direct", TransportKind.SHM, modifiers=("CE",) if "CE" in text else ())
    if found := _INDIRECT.fullmatch(text):
        return Transport("P2P/indirect", TransportKind.P2P, modifiers=(found["hop"], *_words(found["words"])))
    return Transport(text, TransportKind.UNKNOWN)


def begins_a_transport(via: str) -> bool:
    """True if a text that names no transport is the beginning of one that does: a line that was cut off."""
    if any(whole.startswith(via) for whole in _WHOLE):
        return True
    found = _NET_BEGINNING.fullmatch(via)
    return found is not None and any(whole.startswith(found["rest"] or "") for whole in _NET_ENDS)


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("/")))


class LoggedChannels(NamedTuple):
    """Channels of one connection that one rank logs with the same transport.

    `channel_bits` has bit c set for channel c. `peer_to_peer` is NCCL's connection 1 (send and receive), not 0
    (collectives). `received` marks lines of the receiving rank: P2P and SHM are logged by the sender alone, NET by both
    ranks, whose transports may differ.
    """

    transport: Transport
    channel_bits: int
    peer_to_peer: bool = False
    received: bool = False


class Edge(NamedTuple):
    """Logged channels that carry data from rank `src` to rank `dst` of a communicator.

    COLLNET has no peer: `dst` is `src`, the rank that talks to the switch.
    """

    src: int
    dst: int
    logged: LoggedChannels


@dataclass(frozen=True, slots=True)
class Route:
    """Channels between two ranks with the same transports at both ends; None is an end that logged nothing."""

    sent: Transport | None
    received: Transport | None
    channels: int
    peer_to_peer: bool

    @property
    def transport(self) -> Transport:
        """The sender's transport, else the receiver's."""
        transport = self.sent or self.received
        if transport is None:
            raise ValueError("a path has at least one end")
        return transport

    @property
    def host_staged(self) -> bool | None:
        """True where either end goes through host memory, None where neither does and one is unknown."""
        return is_staged([end for end in (self.sent, self.received) if end is not None])

    @property
    def name(self) -> str:
        """The transport's name, and the receiver's where that differs: 'NET/IB/0/GDRDMA, received NET/IB/0'."""
        return _both(self.transport.name, (self.received or self.transport).name)

    @property
    def family(self) -> str:
        """The same without the NICs' numbers: 'NET/IB/GDRDMA, received NET/IB'."""
        return _both(self.transport.family, (self.received or self.transport).family)


def is_staged(transports: Iterable[Transport]) -> bool | None:
    """True if any transport passes through host memory; None where none is known to, and one is not known."""
    staged = [transport.host_staged for transport in transports]
    return True if True in staged else None if None in staged or not staged else False


def _both(sent: str, received: str) -> str:
    return sent if sent == received else f"{sent}, received {received}"


@dataclass(frozen=True, slots=True)
class Path(Route):
    """A route from rank `src` to rank `dst`."""

    src: int
    dst: int


def join(edges: Iterable[Edge]) -> tuple[Path, ...]:
    """The routes of all pairs of ranks, ordered by source, destination and first appearance."""
    pairs: dict[tuple[int, int], list[LoggedChannels]] = {}
    for src, dst, logged in edges:
        pairs.setdefault((src, dst), []).append(logged)
    return tuple(
        Path(route.sent, route.received, route.channels, route.peer_to_peer, *pair)
        for pair in sorted(pairs)
        for route in routes(pairs[pair])
    )


def routes(logged: Iterable[LoggedChannels]) -> tuple[Route, ...]:
    """The routes of one pair of ranks, from what both logged: NCCL's connection 0 first, then 1."""
    channels = list(logged)
    return tuple(route for peer_to_peer in (False, True) for route in _routes_of(channels, peer_to_peer=peer_to_peer))


def _routes_of(logged: Sequence[LoggedChannels], *, peer_to_peer: bool) -> Iterator[Route]:
    """Channels that both ends name, then those that only one does."""
    ends = [each for each in logged if each.peer_to_peer is peer_to_peer]
    received = [each for each in ends if each.received]
    both_ends = 0
    for sent in (each for each in ends if not each.received):
        left = sent.channel_bits
        for other in received:
            if both := left & other.channel_bits:
                yield Route(sent.transport, other.transport, both.bit_count(), peer_to_peer)
                left &= ~both
                both_ends |= both
        if left:
            yield Route(sent.transport, None, left.bit_count(), peer_to_peer)
    for other in received:
        if left := other.channel_bits & ~both_ends:
            yield Route(None, other.transport, left.bit_count(), peer_to_peer)


@dataclass(frozen=True, slots=True)
class Tuning:
    """NCCL's choice for one operation in its own words ('AllReduce', 'RING', 'SIMPLE'); None is not logged.

    `algorithm` is SYMMETRIC, COPY_ENGINE or HIERARCHICAL_CE where NCCL runs no algorithm over channels; `protocol` is
    then the kernel, where it has a name.
    """

    function: str
    size_bytes: int
    algorithm: str | None
    protocol: str | None
    channels: int | None
