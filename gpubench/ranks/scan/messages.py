"""Messages between rank 0 and supervisors: JSON over multiprocessing.connection, after mutual authentication.

multiprocessing's own authentication uses HMAC-MD5 in Python 3.11, which hosts in FIPS mode refuse. The handshake here
has one deadline in total, so that a stranger cannot delay it byte by byte.
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
_MOST_BYTES = 2**16  # A message about 64 rails takes less than 6 KiB


class Outcome(IntEnum):
    """How a worker's measurement in a round ended. For the OWN_ outcomes, the supervisor's own worker is at fault."""

    DONE = 0
    DEADLINE = 1
    BROKEN = 2
    OWN_WORKER_DIED = 3
    OWN_WORKER_STOPPED = 4
    OWN_WORKER_BLOCKED = 5
    OWN_WORKER_FAILED = 6
    WRONG_DATA = 7


# Text in reports for each outcome of a failed round.
WORDS = {
    Outcome.DEADLINE: "not done within the deadline",
    Outcome.BROKEN: "the connection broke",
    Outcome.OWN_WORKER_DIED: "its worker died",
    Outcome.OWN_WORKER_STOPPED: "its worker was stopped",
    Outcome.OWN_WORKER_BLOCKED: "its worker hangs in the kernel",
    Outcome.OWN_WORKER_FAILED: "its worker failed",
    Outcome.WRONG_DATA: WRONG_DATA_ARRIVED,
}

# Outcomes for which the supervisor's own worker is at fault.
OWN_FAULT = frozenset(outcome for outcome in Outcome if outcome.name.startswith("OWN_"))


class _Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class ClockOrder(_Message, frozen=True):
    """Request a supervisor's wall-clock time."""


class ClockReply(_Message, frozen=True):
    """A supervisor's wall-clock time, in seconds since the epoch."""

    seconds: float


class LocalOrder(_Message, frozen=True):
    """Order a supervisor to run phase 0, the measurements inside its node, for its rails."""


class LocalReply(_Message, frozen=True):
    """Results of phase 0 as (GPU, quantity, GB/s). 0 GB/s means that the measurement failed, and `remark` has the
    reason.
    """

    figures: tuple[tuple[int, str, float], ...]
    remark: str = ""


class FailedOrder(_Message, frozen=True):
    """Request the list of a supervisor's workers that died or hung in phase 0."""


class RoundOrder(_Message, frozen=True):
    """Order a supervisor to measure its rails against the rails of rank `partner`. One of the two ranks listens."""

    number: int
    partner: int
    listens: bool
    deadline_s: float
    retired: tuple[int, ...] = ()


class Seat(Struct, frozen=True, array_like=True):
    """The position of a rail in a ring of `size` rails, with the ranks and rails before and after it."""

    rail: int
    previous: int
    previous_rail: int
    next: int
    next_rail: int
    place: int
    size: int


class RingOrder(_Message, frozen=True):
    """Order a supervisor to measure its rails in rings, with `all_reduce` or else with exchanges between
    neighbours.

    With `repeats_failures`, the next round reports a failed worker again.
    """

    number: int
    deadline_s: float
    seats: tuple[Seat, ...]
    all_reduce: bool = False
    repeats_failures: bool = False


Figure = tuple[int, float, int]  # (rail, GB/s, outcome)


class RoundReply(_Message, frozen=True):
    """The results for a supervisor's rails in one round. `remark` describes the failures."""

    number: int
    figures: tuple[Figure, ...]
    remark: str = ""


class EndOrder(_Message, frozen=True):
    """Order to end the scan. `is_whole` means that no node is gone, so that all ranks shut down MPI together."""

    is_whole: bool


Message = (
    ClockOrder | ClockReply | LocalOrder | LocalReply | FailedOrder | RoundOrder | RingOrder | RoundReply | EndOrder
)
_DECODER = msgspec.json.Decoder(Message)


def wrap_socket(line: socket.socket, seconds: float) -> Connection:
    """Wrap a connected socket, with a time-out of `seconds` for each read and write."""
    line.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        line.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))
    return Connection(line.detach())


def send(connection: Connection, message: Message) -> None:
    """Send a message. Raise OSError if the connection is lost or blocked."""
    connection.send_bytes(msgspec.json.encode(message))


def receive(connection: Connection) -> Message:
    """Return the next message. Raise OSError if the peer is gone, too slow, or sends something else."""
    try:
        message: Message = _DECODER.decode(connection.recv_bytes(_MOST_BYTES))
    except (EOFError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConnectionError(f"not a message: {error}") from error
    return message


def clock_offset(clock: float, asked: float, answered: float) -> float:
    """Return the smallest possible difference between a supervisor's clock and this one, in seconds.

    The supervisor read `clock` at some time between `asked` and `answered`.
    """
    return clock - min(max(clock, asked), answered)


def keep_alive(connection: socket.socket) -> None:
    """Set TCP keep-alive, so that the kernel detects within 25 s that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Receive exactly `count` bytes.

    Raise ConnectionError if the peer is gone, and TimeoutError at `deadline`, a time of the monotonic clock.
    """
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
    """Authenticate to the listening peer and send it `words`.

    Raise ConnectionError if the peer has another secret, and OSError if it is gone.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_LENGTH.pack(len(nonce + words)) + nonce + words)
    answer = receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES)
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"server", nonce)):
        raise ConnectionError("the other end does not have the secret of this job")
    connection.sendall(_proof(secret, b"client" + words, answer[:_NONCE_BYTES]))


def welcome(connection: socket.socket, secret: bytes) -> bytes:
    """Authenticate a connecting peer and return the words that it sent.

    Raise ConnectionError, OSError or TimeoutError if the peer cannot be authenticated.
    """
    patience = connection.gettimeout()
    deadline = None if patience is None else time.monotonic() + patience
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    if not _NONCE_BYTES <= length <= _NONCE_BYTES + 256:
        raise ConnectionError("not a greeting of this job")
    hello = receive_exactly(connection, length, deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce + _proof(secret, b"server", hello[:_NONCE_BYTES]))
    proof, words = receive_exactly(connection, _PROOF_BYTES, deadline), hello[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client" + words, nonce)):
        raise ConnectionError("the other end does not have the secret of this job")
    return words


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + nonce, hashlib.sha256).digest()


REFUSED = "refused"  # The worker's failure if the MPS server rejects it. The server may accept a new worker later


class WorkerTask(Struct, frozen=True):
    """A task for a worker: phase 0 if `number` is 0, else an exchange with a partner.

    If `ring` is its number of rails, the exchange is part of a ring, in which this rail is at index `place`.
    """

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
