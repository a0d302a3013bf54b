"""Messages between rank 0 and supervisors: fixed forms over TCP, after both ends proved the job's secret."""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from gpubench.model.results.scan import WRONG_DATA_ARRIVED, LocalFigure, LocalQuantity
from gpubench.records import dataclass

_LENGTH = struct.Struct("!H")
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_ORDER = struct.Struct("!IIBdQ")
_RING_ORDER, _SEAT = struct.Struct("!IdBB"), struct.Struct("!BIBIBII")
_REPLY = struct.Struct("!IH")
_FIGURE = struct.Struct("!BdB")
_COUNT = struct.Struct("!H")
_LOCAL = struct.Struct("!BBd")


class MessageType(IntEnum):
    """The first byte of a message."""

    ORDER = 1
    REPLY = 2
    LOCAL_ORDER = 3
    LOCAL_REPLY = 4
    END = 5
    CLOCK = 6
    """To a supervisor the question, from it the answer."""
    RING_ORDER = 7
    FAILED_ORDER = 8
    """Which workers died or hung since the last round."""


class Outcome(IntEnum):
    """How a worker fared in a round."""

    DONE = 0
    DEADLINE = 1
    BROKEN = 2
    OWN_WORKER_DIED = 3
    OWN_WORKER_STOPPED = 4
    OWN_WORKER_BLOCKED = 5
    OWN_WORKER_FAILED = 6
    WRONG_DATA = 7


WORDS = {
    Outcome.DEADLINE: "not done within the deadline",
    Outcome.BROKEN: "the connection broke",
    Outcome.OWN_WORKER_DIED: "its worker died",
    Outcome.OWN_WORKER_STOPPED: "its worker was stopped",
    Outcome.OWN_WORKER_BLOCKED: "its worker hangs in the kernel",
    Outcome.OWN_WORKER_FAILED: "its worker failed",
    Outcome.WRONG_DATA: WRONG_DATA_ARRIVED,
}
"""What is said of a round without a figure."""

OWN_FAULT = frozenset(
    {
        Outcome.OWN_WORKER_DIED,
        Outcome.OWN_WORKER_STOPPED,
        Outcome.OWN_WORKER_BLOCKED,
        Outcome.OWN_WORKER_FAILED,
    }
)
"""Outcomes of which a supervisor knows that its own side is to blame."""


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """What a supervisor is to do: measure its rails with those of rank `partner`; one of the two listens."""

    number: int
    partner: int
    listens: bool
    deadline_s: float
    retired: int = 0

    def packed(self) -> bytes:
        """As bytes."""
        body = _ORDER.pack(self.number, self.partner, self.listens, self.deadline_s, self.retired)
        return bytes((MessageType.ORDER,)) + body

    @classmethod
    def of(cls, body: bytes) -> "RoundOrder":
        """The inverse. Raises struct.error."""
        number, partner, listens, deadline_s, retired = _ORDER.unpack(body)
        return cls(number, partner, bool(listens), deadline_s, retired)


class Seat(NamedTuple):
    """The place of a rail of this rank in a ring of `size`, between two rails, each of a rank."""

    rail: int
    before: int
    before_rail: int
    after: int
    after_rail: int
    place: int
    size: int


@dataclass(frozen=True, slots=True)
class RingOrder:
    """What a supervisor is to do: measure rails in rings with these seats, sending on or with `all_reduce` reducing."""

    number: int
    deadline_s: float
    seats: tuple[Seat, ...]
    all_reduce: bool = False
    told_later: bool = False

    def packed(self) -> bytes:
        """As bytes."""
        head = _RING_ORDER.pack(self.number, self.deadline_s, self.all_reduce, self.told_later)
        return bytes((MessageType.RING_ORDER,)) + head + b"".join(_SEAT.pack(*each) for each in self.seats)

    @classmethod
    def of(cls, body: bytes) -> "RingOrder":
        """The inverse. Raises struct.error."""
        number, deadline_s, all_reduce, told_later = _RING_ORDER.unpack_from(body)
        seats = tuple(Seat(*each) for each in _SEAT.iter_unpack(body[_RING_ORDER.size :]))
        return cls(number, deadline_s, seats, bool(all_reduce), bool(told_later))


Figure = tuple[int, float, int]  # Rail, GB/s and outcome


@dataclass(frozen=True, slots=True)
class RoundReply:
    """How the rails of a supervisor fared: by rail, GB/s and outcome; `remark` are the words of what failed."""

    number: int
    figures: tuple[Figure, ...]
    remark: str = ""

    def packed(self) -> bytes:
        """As bytes."""
        body = b"".join(_FIGURE.pack(*each) for each in self.figures)
        head = bytes((MessageType.REPLY,)) + _REPLY.pack(self.number, len(self.figures))
        return head + body + self.remark.encode()[:500]

    @classmethod
    def of(cls, body: bytes) -> "RoundReply":
        """The inverse. Raises struct.error."""
        number, count = _REPLY.unpack_from(body)
        end = _REPLY.size + count * _FIGURE.size
        figures = tuple(_FIGURE.iter_unpack(body[_REPLY.size : end]))
        return cls(number, figures, body[end:].decode(errors="replace"))


_QUANTITIES = tuple(LocalQuantity)


def packed_local(figures: Sequence[LocalFigure]) -> bytes:
    """The figures of phase 0 of one node; why some are not there is told once."""
    remark = next((each.failure for each in figures if each.failure), "")
    body = _COUNT.pack(len(figures))
    body += b"".join(_LOCAL.pack(each.gpu, _QUANTITIES.index(each.quantity), each.gb_s) for each in figures)
    return bytes((MessageType.LOCAL_REPLY,)) + body + remark.encode()[:500]


def local_figures(node: int, body: bytes) -> Iterator[LocalFigure]:
    """The inverse. Raises struct.error, or IndexError for a quantity that is not known."""
    (count,) = _COUNT.unpack_from(body)
    end = _COUNT.size + count * _LOCAL.size
    remark = body[end:].decode(errors="replace")
    for gpu, quantity, gb_s in _LOCAL.iter_unpack(body[_COUNT.size : end]):
        yield LocalFigure(node, gpu, _QUANTITIES[quantity], gb_s, failure="" if gb_s else remark)


def packed_clock(seconds: float) -> bytes:
    """The wall clock of a supervisor."""
    return bytes((MessageType.CLOCK,)) + struct.pack("!d", seconds)


def clock_offset(body: bytes, asked: float, answered: float) -> float:
    """The least seconds by which a supervisor's clock differs from this one's. Raises struct.error."""
    clock = float(struct.unpack("!d", body)[0])
    return clock - min(max(clock, asked), answered)


def framed(message: bytes) -> bytes:
    """A message with its length in front."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Messages out of the bytes that arrive."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now. Raises ValueError for an empty one."""
        data = self._left + data if self._left else data
        found, start, size = [], 0, len(data)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            if not length:
                raise ValueError("an empty message")
            if size - start - _LENGTH.size < length:
                break
            start += _LENGTH.size + length
            found.append(data[start - length : start])
        self._left = data[start:]
        return found


def receive_one(connection: socket.socket) -> bytes | None:
    """The next message; None where the other end is gone. Raises OSError, TimeoutError among them."""
    head = exactly(connection, _LENGTH.size)
    return None if head is None else exactly(connection, _LENGTH.unpack(head)[0])


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out within 25 s that the other host is gone, whether or not anything was sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes | None:
    """So many bytes; None where the other end is gone before. Raises TimeoutError at a monotonic deadline."""
    parts = []
    while count:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        data = connection.recv(min(count, 2**16))
        if not data:
            return None
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def greet(connection: socket.socket, secret: bytes, words: bytes) -> None:
    """Prove knowledge of the secret, both ways. Raises ConnectionError: the other end has another; OSError: gone."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(framed(nonce + words))
    answer = exactly(connection, _NONCE_BYTES + _PROOF_BYTES)
    if answer is None or not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"server", nonce)):
        raise ConnectionError("the other end does not know the secret of this job")
    connection.sendall(_proof(secret, b"client" + words, answer[:_NONCE_BYTES]))


def welcome(connection: socket.socket, secret: bytes) -> bytes:
    """Who connects, once the secret is proven. Raises ConnectionError, OSError, or TimeoutError."""
    patience = connection.gettimeout()
    deadline = None if patience is None else time.monotonic() + patience
    head = exactly(connection, _LENGTH.size, deadline)
    length = 0 if head is None else _LENGTH.unpack(head)[0]
    if not _NONCE_BYTES <= length <= _NONCE_BYTES + 256:
        raise ConnectionError("no greeting of this job")
    hello = exactly(connection, length, deadline)
    if hello is None:
        raise ConnectionError("gone while it greeted")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce + _proof(secret, b"server", hello[:_NONCE_BYTES]))
    proof = exactly(connection, _PROOF_BYTES, deadline)
    words = hello[_NONCE_BYTES:]
    if proof is None or not hmac.compare_digest(proof, _proof(secret, b"client" + words, nonce)):
        raise ConnectionError("the other end does not know the secret of this job")
    return words


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + nonce, hashlib.sha256).digest()


REFUSED = "refused"  # The failure of a worker that an MPS server did not take; it may take a new one later


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a supervisor tells its worker: measure alone where `number` is 0, else in a ring at `place`."""

    number: int
    rail: int
    partner: int
    rank: int
    deadline_s: float
    addresses: tuple[tuple[str, int], ...] = ()
    ring: int = 0
    place: int = 0
    partner_rail: int | None = None
    reduces: bool = False
