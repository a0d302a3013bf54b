"""Questions, answers and orders between the watchdogs of a job: abstract sockets first, then sealed datagrams."""

import contextlib
import ctypes
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

from gpubench.model.terms.ranks import Phase, RankState, limit_seconds
from gpubench.model.terms.units import spans
from gpubench.ranks.watchdog import messages

_MAC_BYTES = 32
_KNOCK_BYTES = 8
_UDP_HEADER_BYTES = 8
_CREDENTIALS = struct.Struct("3i")
_REPLAYS_TOLD_APART = 64

_TIMEVAL = struct.Struct("@ll")
_MICROSECONDS_OF_WAITING = 50_000
_MOST_SECONDS_OF_WAITING = 0.3  # In a second, for names that somebody has taken may never be read
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _LOAD_LENGTH, _JUMP_IF_EQUAL, _JUMP_IF_GREATER, _RETURN = 0x20, 0x80, 0x15, 0x25, 0x06
_WHOLE = 0xFFFFFFFF


class DatagramRoute(NamedTuple):
    """A socket of this watchdog, and the address of another's."""

    own: socket.socket
    address: messages.Address


class Received(NamedTuple):
    """A message that is believed, and the way back to its sender."""

    message: messages.WatchdogMessage
    route: DatagramRoute


class Datagrams(Protocol):
    """A way of sending by which the receiver knows the sender; `carries_orders`: who may send may end the job."""

    carries_orders: bool

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The sockets at which messages arrive."""

    def candidates(self, rank: int) -> Sequence[DatagramRoute]:
        """All ways by which a rank's watchdog might be reached."""

    def send(self, message: messages.WatchdogMessage, route: DatagramRoute) -> None:
        """Send it; nobody knows whether it arrives."""

    def receive(self, own: socket.socket) -> Received | None:
        """The next believed message at a socket, else None. Raises OSError, ValueError, IndexError or struct.error."""


class SameUserDatagrams:
    """Datagrams between abstract sockets, believed where the kernel says that the sender is the same user."""

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
        return [DatagramRoute(self.sockets[0], messages.local_name(self._job, rank))]

    def send(self, message: messages.WatchdogMessage, route: DatagramRoute) -> None:
        """Send it as it is; the kernel adds who sent it, and lets senders in by turns where somebody floods."""
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
        data, ancillary, _, sender = own.recvmsg(messages.MOST_BYTES + 1, room, socket.MSG_DONTWAIT)
        credentials = [content for level, kind, content in ancillary if (level, kind) == _CREDENTIALS_KIND]
        if len(data) > messages.MOST_BYTES or [_CREDENTIALS.unpack(each)[1] for each in credentials] != [os.getuid()]:
            return None
        message = messages.WatchdogMessage.from_bytes(data)
        if message.sender >= self._ranks:
            return None
        name = sender.decode(errors="surrogateescape") if isinstance(sender, bytes) else ""
        return Received(message, DatagramRoute(own, name))


_CREDENTIALS_KIND = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)


class SealedDatagrams:
    """UDP datagrams sealed by HMAC-SHA256 with a key of job and secret, against replays and relays."""

    carries_orders = True

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        rank: int,
        addresses: Mapping[int, Sequence[messages.UdpAddress]],
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

    def send(self, message: messages.WatchdogMessage, route: DatagramRoute) -> None:
        """Send it with its code."""
        data = message.to_bytes()
        code = self._code(data, self._own[route.own], route.address)
        with contextlib.suppress(OSError):
            route.own.sendto(self._knock_of(message.receiver) + code + data, route.address)

    def receive(self, own: socket.socket) -> Received | None:
        """As `Datagrams.receive`."""
        received, sender = own.recvfrom(_KNOCK_BYTES + _MAC_BYTES + messages.MOST_BYTES + 1)
        knock, sealed = received[:_KNOCK_BYTES], received[_KNOCK_BYTES:]
        code, data = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if knock != self._knock or len(data) > messages.MOST_BYTES:
            return None
        if not hmac.compare_digest(code, self._code(data, sender, self._own[own])):
            return None
        message = messages.WatchdogMessage.from_bytes(data)
        if message.receiver != self._rank or message.sender not in self._addresses:
            return None
        is_new = self._seen.setdefault(message.sender, ReplayWindow()).is_new(message.counter)
        return Received(message, DatagramRoute(own, sender)) if is_new else None

    def _code(self, data: bytes, sender: messages.Address, receiver: messages.Address) -> bytes:
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


def _packed(address: messages.Address) -> bytes:
    host, port = cast("messages.UdpAddress", address)
    return socket.inet_aton(host) + port.to_bytes(2, "big")


def _let_in(own: socket.socket, knock: bytes) -> None:
    """Have the kernel drop what lacks the knock, so that a flood does not push others out of the queue."""
    first, second = struct.unpack("!II", knock)
    most = _UDP_HEADER_BYTES + _KNOCK_BYTES + _MAC_BYTES + messages.MOST_BYTES
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


_SECONDS_TO_ASK_AGAIN = 0.4
_TIMES_SENT = 3
_ARBITER = 0  # The rank whose watchdog decides which of several lost ranks was the first
_SECONDS_FOR_A_DECISION = 0.25
_SECONDS_BEHIND_A_CLAIM = 0.03  # A rank's claim may come so much later than the launcher's next kill
_MOST_AT_ONCE = 64
_MOST_DROPPED = 40
SECONDS_OF_DROPPING = 0.01
"""Of datagrams that are not believed, so many are read in that time: about 3 % of a core. It is short, for whoever has
something to say waits for as long."""


class Peers:
    """The other watchdogs; a wait answers questions too, and offered addresses get questions only until believed."""

    def __init__(
        self,
        datagrams: Datagrams,
        rank: int,
        own_state: Callable[[], RankState],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reached: set[int] = set()
        self.ordered_to_end = False
        self._datagrams = datagrams
        self._rank = rank
        self._own_state = own_state
        self._clock = clock
        # Of a watchdog that follows one that was killed, the others have seen higher counters than zero.
        self._counter = time.monotonic_ns()
        self._proven: dict[int, DatagramRoute] = {}
        self._questions: set[int] = set()
        self._states: dict[int, RankState] = {}
        self._first_lost: int | None = None
        self._own_loss: float | None = None
        self._is_decided = False
        self._dropping = _DroppingLimit()

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The sockets to wait for; none for a moment, where somebody floods them."""
        return [] if self._dropping.is_reached(self._clock()) else self._datagrams.sockets

    def ask(self, ranks: Iterable[int], seconds: float, enough: int | None = None) -> list[RankState]:
        """The states that those ranks' watchdogs send within that time, in rank order; it ends once `enough` have."""
        wanted = [rank for rank in ranks if rank != self._rank]
        needed = len(wanted) if enough is None else enough
        self._states.clear()
        self._exchange(messages.MessageKind.ASK, None, wanted, seconds, lambda: len(self._states) >= needed)
        return [self._states[rank] for rank in sorted(self._states)]

    def probe(self, ranks: Iterable[int]) -> None:
        """Ask ranks without waiting; who answers is in `reached` later."""
        for rank in ranks:
            self._ask_everywhere(rank)

    def is_first_lost(self, at_seconds: float) -> bool:
        """True where this rank was lost first, as the first rank's watchdog decides, by the host's monotonic clock."""
        if self._rank == _ARBITER:
            self._own_loss = at_seconds
            self.serve(_SECONDS_BEHIND_A_CLAIM)
            self._first_lost = _ARBITER if self._first_lost is None else self._first_lost
            return self._first_lost == _ARBITER
        self._claim(at_seconds, lambda: self._first_lost is not None)
        return self._first_lost == self._rank

    def claim_first(self) -> None:
        """Claim that this rank has reported why the job ends: ranks that are lost from now on end because of it."""
        self._first_lost = self._rank
        if self._rank != _ARBITER:
            self._claim(self._clock(), lambda: self._is_decided)

    def serve(self, seconds: float) -> None:
        """Answer questions for so long."""
        self._exchange(messages.MessageKind.ASK, None, [], seconds, lambda: False)

    def order_end(self) -> None:
        """Order all others that were heard of to end their ranks; sent more than once, since datagrams get lost."""
        for _ in range(_TIMES_SENT):
            for rank, route in self._proven.items():
                self._send(rank, messages.MessageKind.END, route)

    def receive(self) -> None:
        """Take the datagrams that have arrived, and answer them: a limited number, for the timers have to go on."""
        for own in self.sockets:
            for _ in range(_MOST_AT_ONCE):
                if not self._receive_one(own):
                    break

    def _receive_one(self, own: socket.socket) -> bool:
        try:
            received = self._datagrams.receive(own)
            if received is not None:
                self._take(received)
                return True
        except OSError:
            return False  # nothing more, or an ICMP error: an earlier datagram reached no socket
        except Exception:  # noqa: BLE001 - whatever is in a datagram, it costs the datagram and not the watchdog
            pass
        self._dropping.note()
        return not self._dropping.is_reached(self._clock())

    def _claim(self, at_seconds: float, is_decided: Callable[[], bool]) -> None:
        if _ARBITER not in self._proven:
            self.ask([_ARBITER], _SECONDS_FOR_A_DECISION)
        self._states.clear()
        self._is_decided = False
        claim = messages.LossClaim(at_seconds, os.uname().nodename)
        self._exchange(messages.MessageKind.LOST, claim, [_ARBITER], _SECONDS_FOR_A_DECISION, is_decided)

    def _decide_first_lost(self, sender: int, claim: messages.LossClaim) -> int:
        if self._first_lost is None:
            here = claim.host == os.uname().nodename
            own_first = self._own_loss is not None and here and self._own_loss < claim.at_seconds
            self._first_lost = _ARBITER if own_first else sender
        return self._first_lost

    def _exchange(
        self,
        kind: messages.MessageKind,
        content: messages.Content,
        ranks: Sequence[int],
        seconds: float,
        is_done: Callable[[], bool],
    ) -> None:
        """Send a message to ranks, and again to those without a known state, until `is_done`."""
        deadline = self._clock() + seconds
        again_at = 0.0
        self._questions.clear()
        while not is_done() and (now := self._clock()) < deadline:
            if now >= again_at:
                is_again, again_at = bool(again_at), now + _SECONDS_TO_ASK_AGAIN
                for rank in ranks:
                    if rank not in self._states:
                        self._put(rank, kind, content, everywhere=is_again)
            sockets = self.sockets
            patience = min(deadline, again_at) - now
            select.select(sockets, [], [], patience if sockets else min(patience, SECONDS_OF_DROPPING))
            self.receive()

    def _put(self, rank: int, kind: messages.MessageKind, content: messages.Content, *, everywhere: bool) -> None:
        """Send a message by the way that is proven; where none is, or it led nowhere, ask by all ways instead."""
        route = self._proven.get(rank)
        if route is not None:
            self._questions.add(self._send(rank, kind, route, content))
        if route is None or everywhere:
            self._questions |= self._ask_everywhere(rank)

    def _ask_everywhere(self, rank: int) -> set[int]:
        return {self._send(rank, messages.MessageKind.ASK, route) for route in self._datagrams.candidates(rank)}

    def _take(self, received: Received) -> None:
        message, route = received
        sender, content = message.sender, message.content
        self.reached.add(sender)
        if route.address in (each.address for each in self._datagrams.candidates(sender)):
            self._proven[sender] = route
        if message.kind is messages.MessageKind.ASK:
            self._send(sender, messages.MessageKind.STATE, route, self._own_state(), message.counter)
        elif message.kind is messages.MessageKind.STATE and isinstance(content, RankState):
            if message.answers in self._questions:
                self._states[sender] = content
        elif message.kind is messages.MessageKind.LOST and isinstance(content, messages.LossClaim):
            self._send(
                sender, messages.MessageKind.FIRST, route, self._decide_first_lost(sender, content), message.counter
            )
        elif message.kind is messages.MessageKind.FIRST and isinstance(content, int):
            if message.answers in self._questions:
                self._is_decided, self._first_lost = True, content
        elif message.kind is messages.MessageKind.END and self._datagrams.carries_orders:
            self.ordered_to_end = True

    def _send(
        self,
        rank: int,
        kind: messages.MessageKind,
        route: DatagramRoute,
        content: messages.Content = None,
        answers: int = 0,
    ) -> int:
        self._counter += 1
        message = messages.WatchdogMessage(kind, self._rank, rank, self._counter, answers, content)
        self._datagrams.send(message, route)
        return self._counter


class _DroppingLimit:
    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0

    def note(self) -> None:
        self._count += 1

    def is_reached(self, now: float) -> bool:
        """True where no more is to be read for a moment."""
        if now - self._since > SECONDS_OF_DROPPING:
            self._count, self._since = 0, now
        return self._count >= _MOST_DROPPED


SECONDS_TO_HEAR = 5.0  # On a busy machine a watchdog may answer so late
_MOST_HOSTS = 8


class HearingCheck:
    """The first rank's look, once the ranks have met, whether the watchdogs of all others answer."""

    def __init__(
        self, peers: Peers, watchdogs: Sequence[messages.WatchdogAddress], timeout_s: float, now: float
    ) -> None:
        self._peers = peers
        self._watchdogs = watchdogs
        self._timeout_s = timeout_s
        self._until = now + SECONDS_TO_HEAR

    def complaint(self, now: float) -> str | None:
        """What to say of those that do not answer, empty where all do; None while that is open, and they are asked."""
        deaf = sorted(set(range(1, len(self._watchdogs))) - self._peers.reached)
        if not deaf:
            return ""
        if now < self._until:
            self._peers.probe(deaf)
            return None
        hosts = list(dict.fromkeys(self._watchdogs[rank].host for rank in deaf))
        where = ", ".join(hosts[:_MOST_HOSTS]) + (f" and {len(hosts) - _MOST_HOSTS} more" * (len(hosts) > _MOST_HOSTS))
        late = limit_seconds(Phase.LAUNCH, self._timeout_s)
        return (
            f"the watchdogs of rank {spans(deaf)} on {where} do not answer that of rank 0: a firewall drops UDP "
            f"between hosts, or they are dead; a hang is noticed after {late:g} s, not after {self._timeout_s:g} s. "
            "Let UDP pass between the addresses of these hosts, at all ports that programs may take"
        )
