"""Datagrams that are believed: of the same user on this host, or sealed with the job's secret.

Nothing of a datagram is read before it is known who sent it.
"""

import contextlib
import ctypes
import hmac
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

from gpubench.hardware.watchdog.addresses import Address, UdpAddress, local_name
from gpubench.hardware.watchdog.messages import MOST_BYTES, WatchdogMessage

_MAC_BYTES = 32
_KNOCK_BYTES = 8
_UDP_HEADER_BYTES = 8
_CREDENTIALS = struct.Struct("3i")
_REPLAYS_TOLD_APART = 64

_TIMEVAL = struct.Struct("@ll")
_MICROSECONDS_OF_WAITING = 50_000
_MOST_SECONDS_OF_WAITING = 0.3
"""In a second, for names that somebody has taken may never be read."""

_SO_ATTACH_FILTER = 26
_LOAD_WORD, _LOAD_LENGTH, _JUMP_IF_EQUAL, _JUMP_IF_GREATER, _RETURN = 0x20, 0x80, 0x15, 0x25, 0x06
_WHOLE = 0xFFFFFFFF


class DatagramRoute(NamedTuple):
    """A socket of this watchdog, and the address of another's."""

    own: socket.socket
    address: Address


class Received(NamedTuple):
    """A message that is believed, and the way back to its sender."""

    message: WatchdogMessage
    route: DatagramRoute


class Datagrams(Protocol):
    """A way of sending messages by which the receiver knows who sent them.

    `carries_orders` is true where whoever may send may also end the job.
    """

    carries_orders: bool

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The sockets at which messages arrive."""

    def candidates(self, rank: int) -> Sequence[DatagramRoute]:
        """All ways by which a rank's watchdog might be reached."""

    def send(self, message: WatchdogMessage, route: DatagramRoute) -> None:
        """Send it; nobody knows whether it arrives."""

    def receive(self, own: socket.socket) -> Received | None:
        """The next message at a socket; None for a datagram that is not believed. Raises OSError: there is none.

        What is believed may still hold no message: ValueError, IndexError or struct.error.
        """


class SameUserDatagrams:
    """Datagrams between abstract sockets, believed where the kernel says that the sender is the same user.

    This is all that watchdogs know of each other until their ranks have met, and anybody may have taken a name.
    """

    carries_orders = False

    def __init__(self, own: socket.socket, job: str, ranks: int) -> None:
        own.settimeout(None)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, _MICROSECONDS_OF_WAITING))
        self.sockets = [own]
        self._waited = self._waited_since = 0.0
        self._job = job
        self._ranks = ranks

    def candidates(self, rank: int) -> Sequence[DatagramRoute]:
        """The name that the rank's watchdog has if it is on this host."""
        return [DatagramRoute(self.sockets[0], local_name(self._job, rank))]

    def send(self, message: WatchdogMessage, route: DatagramRoute) -> None:
        """Send it as it is; the kernel adds who sent it.

        Where somebody floods the other's queue, which holds ten by default, the kernel lets senders in by turns.
        """
        data = message.to_bytes()
        with contextlib.suppress(OSError):
            try:
                route.own.sendto(data, socket.MSG_DONTWAIT, route.address)
            except BlockingIOError:
                began = time.monotonic()
                if began - self._waited_since > 1:
                    self._waited, self._waited_since = 0, began
                if self._waited < _MOST_SECONDS_OF_WAITING:
                    try:
                        route.own.sendto(data, route.address)
                    finally:
                        self._waited += time.monotonic() - began

    def receive(self, own: socket.socket) -> Received | None:
        """As `Datagrams.receive`."""
        # With room for credentials and nothing else, the kernel hands over no descriptor that somebody sends along.
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        data, ancillary, _, sender = own.recvmsg(MOST_BYTES + 1, room, socket.MSG_DONTWAIT)
        credentials = [content for level, kind, content in ancillary if (level, kind) == _CREDENTIALS_KIND]
        if len(data) > MOST_BYTES or [_CREDENTIALS.unpack(each)[1] for each in credentials] != [os.getuid()]:
            return None
        message = WatchdogMessage.from_bytes(data)
        if message.sender >= self._ranks:
            return None
        name = sender.decode(errors="surrogateescape") if isinstance(sender, bytes) else ""
        return Received(message, DatagramRoute(own, name))


_CREDENTIALS_KIND = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)


class SealedDatagrams:
    """UDP datagrams with a message authentication code (HMAC-SHA256) by a key that only this job's ranks have.

    The code covers the message with sender, receiver and counter, and the addresses it was sent from and to: what was
    caught elsewhere is believed neither a second time nor at another address, and whoever passes it on is not taken
    for its sender. The key is made of the job's name and its secret, which is never sent.
    """

    carries_orders = True

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        rank: int,
        addresses: Mapping[int, Sequence[UdpAddress]],
        secret: str,
        job: str,
    ) -> None:
        self.sockets = sockets
        self._rank = rank
        self._addresses = addresses
        self._key = hmac.digest(bytes.fromhex(secret), job.encode(), "sha256")
        self._knock = self._knock_of(rank)
        self._own = {each: each.getsockname() for each in sockets}
        self._towards: dict[str, socket.socket] = {}
        self._seen: dict[int, ReplayWindow] = {}
        for each in sockets:
            each.settimeout(0)
            with contextlib.suppress(OSError):  # a kernel, or a sandbox, without filters: it is looked at here then
                _let_in(each, self._knock)

    def candidates(self, rank: int) -> Sequence[DatagramRoute]:
        """The addresses that the rank offered, each from the own address that the kernel would take."""
        return [DatagramRoute(self._socket_towards(each[0]), each) for each in self._addresses.get(rank, ())]

    def send(self, message: WatchdogMessage, route: DatagramRoute) -> None:
        """Send it with its code."""
        data = message.to_bytes()
        code = self._code(data, self._own[route.own], route.address)
        with contextlib.suppress(OSError):
            route.own.sendto(self._knock_of(message.receiver) + code + data, route.address)

    def receive(self, own: socket.socket) -> Received | None:
        """As `Datagrams.receive`."""
        received, sender = own.recvfrom(_KNOCK_BYTES + _MAC_BYTES + MOST_BYTES + 1)
        knock, sealed = received[:_KNOCK_BYTES], received[_KNOCK_BYTES:]
        code, data = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if knock != self._knock or len(data) > MOST_BYTES:
            return None
        if not hmac.compare_digest(code, self._code(data, sender, self._own[own])):
            return None
        message = WatchdogMessage.from_bytes(data)
        if message.receiver != self._rank or message.sender not in self._addresses:
            return None
        is_new = self._seen.setdefault(message.sender, ReplayWindow()).is_new(message.counter)
        return Received(message, DatagramRoute(own, sender)) if is_new else None

    def _code(self, data: bytes, sender: Address, receiver: Address) -> bytes:
        return hmac.digest(self._key, _packed(sender) + _packed(receiver) + data, "sha256")

    def _knock_of(self, rank: int) -> bytes:
        """What every datagram to a rank begins with. It is sent in clear and proves nothing, but it keeps what is sent
        without it out of the socket's queue.
        """
        return hmac.digest(self._key, b"knock" + rank.to_bytes(8, "big"), "sha256")[:_KNOCK_BYTES]

    def _socket_towards(self, address: str) -> socket.socket:
        if address not in self._towards:
            own = ""
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
                asked.connect((address, 9))  # of UDP: looks up the route and sends nothing
                own = asked.getsockname()[0]
            fitting = [each for each, name in self._own.items() if name[0] == own]
            self._towards[address] = (fitting or [self.sockets[-1]])[0]
        return self._towards[address]


class ReplayWindow:
    """The counters of one sender that were seen; a message that comes a second time, or far too late, is not new."""

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0

    def is_new(self, counter: int) -> bool:
        """True once for each counter."""
        ahead = counter - self._highest
        if ahead > 0:
            shifted = self._seen << ahead if ahead < _REPLAYS_TOLD_APART else 0
            self._seen = (shifted | 1) & ((1 << _REPLAYS_TOLD_APART) - 1)
            self._highest = counter
            return True
        bit = 1 << -ahead if -ahead < _REPLAYS_TOLD_APART else 0
        is_new = bool(bit) and not self._seen & bit
        self._seen |= bit
        return is_new


def _packed(address: Address) -> bytes:
    host, port = cast("UdpAddress", address)
    return socket.inet_aton(host) + port.to_bytes(2, "big")


def _let_in(own: socket.socket, knock: bytes) -> None:
    """Have the kernel drop what does not begin with the knock, before it takes room in the queue or wakes anybody.

    A sender at full speed fills a queue faster than any program empties it, and others' datagrams are lost.
    """
    first, second = struct.unpack("!II", knock)
    most = _UDP_HEADER_BYTES + _KNOCK_BYTES + _MAC_BYTES + MOST_BYTES
    steps = (
        (_LOAD_LENGTH, 0, 0, 0),
        (_JUMP_IF_GREATER, 5, 0, most),
        (_LOAD_WORD, 0, 0, _UDP_HEADER_BYTES),
        (_JUMP_IF_EQUAL, 0, 3, first),
        (_LOAD_WORD, 0, 0, _UDP_HEADER_BYTES + 4),
        (_JUMP_IF_EQUAL, 0, 1, second),
        (_RETURN, 0, 0, _WHOLE),
        (_RETURN, 0, 0, 0),
    )
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    memory = ctypes.create_string_buffer(program, len(program))
    own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(steps), ctypes.addressof(memory)))
