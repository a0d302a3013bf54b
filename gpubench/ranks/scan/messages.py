"""Messages between rank 0 and supervisors: JSON over multiprocessing.connection, after both ends proved the secret.

The proof differs from that of multiprocessing: in Python 3.11 that is HMAC-MD5, which hosts in FIPS mode refuse. It has
one deadline for the whole greeting, so that a stranger cannot delay it byte by byte.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from enum import IntEnum
from multiprocessing.connection import Connection

import msgspec
from msgspec import Struct

from gpubench.model.results.scan import WRONG_DATA_ARRIVED

_LENGTH = struct.Struct("!H")
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_MOST_BYTES = 2**16  # A message on 64 rails has less than 6 KiB


class Outcome(IntEnum):
    """The outcome of a worker in a round."""

    DONE = 0
    DEADLINE = 1
    BROKEN = 2
    OWN_WORKER_DIED = 3
    OWN_WORKER_STOPPED = 4
    OWN_WORKER_BLOCKED = 5
    OWN_WORKER_FAILED = 6
    WRONG_DATA = 7


# Descriptions of failed rounds.
WORDS = {
    Outcome.DEADLINE: "not done within the deadline",
    Outcome.BROKEN: "the connection broke",
    Outcome.OWN_WORKER_DIED: "its worker died",
    Outcome.OWN_WORKER_STOPPED: "its worker was stopped",
    Outcome.OWN_WORKER_BLOCKED: "its worker hangs in the kernel",
    Outcome.OWN_WORKER_FAILED: "its worker failed",
    Outcome.WRONG_DATA: WRONG_DATA_ARRIVED,
}

# Outcomes that the supervisor's own side caused.
OWN_FAULT = frozenset(outcome for outcome in Outcome if outcome.name.startswith("OWN_"))


class _Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class ClockOrder(_Message, frozen=True):
    """Ask a supervisor for its wall clock."""


class ClockReply(_Message, frozen=True):
    """The wall clock of a supervisor, in seconds."""

    seconds: float


class LocalOrder(_Message, frozen=True):
    """Order a supervisor to measure phase 0 of its rails."""


class LocalReply(_Message, frozen=True):
    """The results of phase 0: GPU, quantity and GB/s. 0 GB/s were not measured, and `remark` says why."""

    figures: tuple[tuple[int, str, float], ...]
    remark: str = ""


class FailedOrder(_Message, frozen=True):
    """Ask a supervisor which workers died or hung in phase 0."""


class RoundOrder(_Message, frozen=True):
    """Order a supervisor to measure its rails with those of rank `partner`. One of the two listens."""

    number: int
    partner: int
    listens: bool
    deadline_s: float
    retired: tuple[int, ...] = ()


class Seat(Struct, frozen=True, array_like=True):
    """The place of a rail of this rank in a ring of `size`, between two rails of other ranks or its own."""

    rail: int
    previous: int
    previous_rail: int
    next: int
    next_rail: int
    place: int
    size: int


class RingOrder(_Message, frozen=True):
    """Order a supervisor to measure its rails in rings, by exchange or with `all_reduce`.

    With `repeats_failures` the next round reports a failed worker again.
    """

    number: int
    deadline_s: float
    seats: tuple[Seat, ...]
    all_reduce: bool = False
    repeats_failures: bool = False


Figure = tuple[int, float, int]  # Rail, GB/s and outcome


class RoundReply(_Message, frozen=True):
    """The results of a supervisor's rails. `remark` describes failures."""

    number: int
    figures: tuple[Figure, ...]
    remark: str = ""


class EndOrder(_Message, frozen=True):
    """End the scan. If it `is_whole`, no node is gone, and all ranks end MPI together."""

    is_whole: bool


Message = (
    ClockOrder | ClockReply | LocalOrder | LocalReply | FailedOrder | RoundOrder | RingOrder | RoundReply | EndOrder
)
_DECODER = msgspec.json.Decoder(Message)


def wrap_socket(line: socket.socket, seconds: float) -> Connection:
    """Wrap a connected socket, on which no read or write may block for longer than `seconds`."""
    line.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        line.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))
    return Connection(line.detach())


def send(connection: Connection, message: Message) -> None:
    """Send a message. Raise OSError."""
    connection.send_bytes(msgspec.json.encode(message))


def receive(connection: Connection) -> Message:
    """Return the next message. Raise OSError if the other end is gone, too slow, or sent something else."""
    try:
        message: Message = _DECODER.decode(connection.recv_bytes(_MOST_BYTES))
    except (EOFError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConnectionError(f"no message: {error}") from error
    return message


def clock_offset(clock: float, asked: float, answered: float) -> float:
    """Return the smallest possible difference of a supervisor's clock from this one, in seconds."""
    return clock - min(max(clock, asked), answered)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel detect within 25 s that the other host is gone, even on an idle connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Receive `count` bytes. Raise ConnectionError if the other end is gone, TimeoutError at a monotonic deadline."""
    received = bytearray()
    while len(received) < count:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        data = connection.recv(count - len(received))
        if not data:
            raise ConnectionError("the other end is gone")
        received += data
    return bytes(received)


def greet(connection: socket.socket, secret: bytes, words: bytes) -> None:
    """Prove to each other that both ends know the secret. Raise ConnectionError (another secret) or OSError (gone)."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_LENGTH.pack(len(nonce + words)) + nonce + words)
    answer = receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES)
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"server", nonce)):
        raise ConnectionError("the other end does not know the secret of this job")
    connection.sendall(_proof(secret, b"client" + words, answer[:_NONCE_BYTES]))


def welcome(connection: socket.socket, secret: bytes) -> bytes:
    """Return the words of a peer that proved the secret. Raise ConnectionError, OSError or TimeoutError."""
    patience = connection.gettimeout()
    deadline = None if patience is None else time.monotonic() + patience
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    if not _NONCE_BYTES <= length <= _NONCE_BYTES + 256:
        raise ConnectionError("no greeting of this job")
    hello = receive_exactly(connection, length, deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce + _proof(secret, b"server", hello[:_NONCE_BYTES]))
    proof, words = receive_exactly(connection, _PROOF_BYTES, deadline), hello[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client" + words, nonce)):
        raise ConnectionError("the other end does not know the secret of this job")
    return words


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + nonce, hashlib.sha256).digest()


REFUSED = "refused"  # The failure of a worker that an MPS server did not take; it may take a new one later


class WorkerTask(Struct, frozen=True):
    """A task for a worker: phase 0 if `number` is 0, else a pair, or a ring with its `place` in it."""

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
