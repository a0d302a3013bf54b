"""Queries and orders between the watchdogs of a job, over connections that both sides have authenticated."""

import fcntl
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpubench.model.terms.ranks import RankState

Address = tuple[str, int] | str  # Host and port for TCP, or the name of an abstract Unix socket
Request = dict[str, Any]

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_LOCAL_TO_A_HOST = ("127.", "169.254.", "0.")
_MOST_ADDRESSES = 6
_MOST_NAME_BYTES = 100
_BACKLOG: dict[int, int] = {socket.AF_UNIX: 16, socket.AF_INET: 1024}
"""Limit of connections that wait to be accepted. When it is reached, Unix sockets block, but TCP retries only after
a second, so the TCP limit is large enough for a flood.
"""


class WatchdogAddress(Struct, frozen=True):
    """The addresses of a rank's watchdog, with a description of the rank, such as 'rank 3 on gpu07 (GPU 3)'."""

    place: str
    host: str
    addresses: Sequence[Address]

    def addresses_from(self, own_host: str) -> list[Address]:
        """Return the addresses that `own_host` can reach. A Unix socket is reachable only from the same host."""
        addresses = [address if isinstance(address, str) else (address[0], address[1]) for address in self.addresses]
        return [address for address in addresses if not isinstance(address, str) or self.host == own_host]


def job_name(environment: Mapping[str, str]) -> str:
    """Return the launcher's job name, which all ranks on a host share even before MPI is initialized."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID")
    found = [environment[name] for name in names if name in environment]
    return "-".join(found or [str(os.getppid())])


def local_name(job: str, rank: int) -> str:
    """Return the name of the abstract Unix socket for a rank's watchdog. It has no file and disappears with its
    rank.
    """
    return f"\0gpubench-{os.getuid()}-{rank}-{job}"[:_MOST_NAME_BYTES]


def listen_locally(job: str, rank: int) -> socket.socket | None:
    """Listen for watchdogs on this host. Return None if another process already uses the socket name."""
    with suppress(OSError):
        return _listening(socket.AF_UNIX, local_name(job, rank))
    return None


def listen_everywhere() -> list[socket.socket]:
    """Listen on a Unix socket for this host, and on TCP at each address offered to other hosts."""
    listeners = [_listening(socket.AF_UNIX, "")]  # the kernel picks an unused abstract name
    for address in offered_addresses():
        with suppress(OSError):  # the address has disappeared in the meantime
            listeners.append(_listening(socket.AF_INET, (address, 0)))
    return listeners


def _listening(family: int, address: Address) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG[family])
    except OSError:
        listener.close()
        raise
    return listener


def listener_address(listener: socket.socket) -> Address:
    """Return a listener's address in a form that JSON can encode."""
    name = listener.getsockname()
    return name.decode() if isinstance(name, bytes) else name


def offered_addresses(root: Path = Path("/")) -> list[str]:
    """Return the IPv4 addresses at which other hosts may reach this one.

    Interfaces that are down are excluded. So are bridges for containers and virtual machines, because they have the
    same address on every host.
    """
    return list(_interface_addresses(root))[:_MOST_ADDRESSES]


def _interface_addresses(root: Path) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                flags = struct.unpack_from("H", fcntl.ioctl(any_socket.fileno(), _SIOCGIFFLAGS, request), 16)[0]
                address = socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
                local = address.startswith(_LOCAL_TO_A_HOST) or is_inner_bridge(root / "sys/class/net" / name)
                if flags & _IFF_UP and not local:
                    yield address


def is_inner_bridge(interface: Path) -> bool:
    """True if this sysfs directory belongs to a bridge without a physical NIC, such as a container's docker0 or
    cni0.
    """
    if not (interface / "bridge").exists():
        return False
    ports = [interface.parent / port.name for port in (interface / "brif").glob("*")]
    return not any((port / "device").exists() or list(port.glob("lower_*")) for port in ports)


MOST_BYTES = 1 << 16  # A state in which every text has its maximum length takes 10 KB
_CREDENTIALS = struct.Struct("3i")
_KNOCK_BYTES = 8
_TIMEVAL = struct.Struct("@ll")
_SECONDS_PER_READ = 1.0  # A watchdog on a busy machine answers within 0.1 s
_SECONDS_OF_GRACE = 0.05  # Time to authenticate before a connection is closed to make room for another
# Under a flood of silent connections 19 of 20 queries were answered, but only 11 with a limit of 128
_MOST_UNAUTHENTICATED = 512
_MOST_CALLS = 64  # Maximum number of watchdogs to query at the same time
_SECONDS_BETWEEN_TRIES = 0.1
_SECONDS_TO_ORDER = 1.0
_ARBITER = 0  # The rank whose watchdog decides which of several lost ranks was the first
_SECONDS_FOR_A_DECISION = 0.25
_SECONDS_BEHIND_A_CLAIM = 0.1  # The launcher may kill rank 0 up to this long before another rank's claim arrives


def _prepare(line: socket.socket) -> None:
    """Set kernel time-outs, because `Connection` has none, and disable Nagle's algorithm."""
    line.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        line.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(_SECONDS_PER_READ), 0))
    if line.family == socket.AF_INET:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _is_stranger(line: socket.socket, knock: bytes) -> bool:
    """True if the peer of a new connection is another user on this host, or does not start with the knock.

    The knock is a short code that each TCP client sends first, unencrypted. It proves nothing, but makes a flood cheap
    to reject: 20 µs per stranger, and no thread.
    """
    if line.family == socket.AF_UNIX:
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(credentials)[1] != os.getuid())
    try:
        first = line.recv(len(knock), socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:  # the knock has not arrived yet
        return False
    except OSError:
        return True
    return not first or not knock.startswith(first)


def _knock(secret: bytes) -> bytes:
    return hmac.digest(secret, b"knock", "sha256")[:_KNOCK_BYTES]


def _authenticated(line: socket.socket, secret: bytes, *, dialed: bool) -> Connection:
    """Return the connection after both sides have proved that they know the secret. Without a secret, check only
    the user.

    The key covers both addresses, so that a stranger cannot relay a proof from another address. Raise OSError,
    EOFError, AssertionError or AuthenticationError if the peer cannot be authenticated.
    """
    knock = _knock(secret)
    if line.family == socket.AF_INET and dialed:
        line.sendall(knock)
    elif _is_stranger(line, knock) or (
        line.family == socket.AF_INET and line.recv(_KNOCK_BYTES, socket.MSG_WAITALL) != knock
    ):
        raise PermissionError("a stranger")
    connection = Connection(os.dup(line.fileno()))
    if secret:
        ends = [line.getsockname(), line.getpeername()]
        key = hmac.digest(secret, repr(ends if dialed else ends[::-1]).encode(), "sha256")
        steps = (answer_challenge, deliver_challenge) if dialed else (deliver_challenge, answer_challenge)
        for step in steps:
            step(connection, key)
    return connection


class Peers:
    """The other watchdogs of a job. Each query uses a new connection, and threads answer queries from other
    watchdogs.

    Before all ranks have completed MPI initialization, `secret` is empty. Until then, queries from the same user are
    answered, but orders to end are ignored.
    """

    def __init__(
        self,
        rank: int,
        addresses: Callable[[int], Sequence[Address]],
        secret: bytes,
        own_state: Callable[[], RankState],
        wake: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reached: set[int] = set()
        self.ordered_to_end = False
        self.first_lost: int | None = None
        self._rank = rank
        self._addresses = addresses
        self._secret = secret
        self._own_state = own_state
        self._wake = wake
        self._clock = clock
        self._proven: dict[int, Address] = {}
        self._own_loss: float | None = None
        self._deciding = threading.Lock()
        self._unauthenticated: dict[socket.socket, float] = {}

    def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Answer queries from other watchdogs, in threads that run until this process ends."""
        for listener in listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def ask(self, ranks: Collection[int], seconds: float, enough: int | None = None) -> list[RankState]:
        """Return the states of ranks whose watchdogs answer in time, in rank order. Stop after `enough` answers."""
        answers = self._request({"kind": "state"}, ranks, seconds, enough)
        return [RankState.from_record(answers[rank]) for rank in sorted(answers)]

    def is_first_lost(self, at_seconds: float) -> bool:
        """Ask the arbiter whether this rank was lost first. `at_seconds` is the time of the loss on the host's
        monotonic clock.
        """
        if self._rank == _ARBITER:
            self._own_loss = at_seconds
            time.sleep(_SECONDS_BEHIND_A_CLAIM)
            return self._decide_first_lost(_ARBITER, at_seconds, os.uname().nodename) == _ARBITER
        return self._claim(at_seconds) == self._rank

    def claim_first(self) -> None:
        """Claim that this rank has reported why the job ends. Later losses are consequences and are not reported."""
        if self._rank == _ARBITER:
            self.first_lost = _ARBITER
        else:
            self._claim(self._clock())

    def order_end(self) -> None:
        """Order all watchdogs that were ever reached to end their ranks."""
        self._request({"kind": "end"}, list(self.reached), _SECONDS_TO_ORDER)

    def _claim(self, at_seconds: float) -> int | None:
        request = {"kind": "lost", "at_seconds": at_seconds, "host": os.uname().nodename}
        answer = self._request(request, [_ARBITER], _SECONDS_FOR_A_DECISION).get(_ARBITER, {})
        return answer.get("first")

    def _decide_first_lost(self, sender: int, at_seconds: float, host: str) -> int:
        with self._deciding:
            if self.first_lost is None:
                here = host == os.uname().nodename
                own_first = self._own_loss is not None and here and self._own_loss < at_seconds
                self.first_lost = _ARBITER if own_first else sender
            return self.first_lost

    def _request(
        self, request: Request, ranks: Collection[int], seconds: float, enough: int | None = None
    ) -> dict[int, Request]:
        """Send a request to ranks and return the answers by rank. Each rank has `seconds` to answer, even if it is
        queried late.
        """
        answers: dict[int, Request] = {}
        waiting = deque(rank for rank in ranks if rank != self._rank)
        needed = len(waiting) if enough is None else min(enough, len(waiting))

        def call() -> None:
            with suppress(IndexError):  # no rank is left to query
                while True:
                    rank = waiting.popleft()
                    answer = self._call(rank, request, self._clock() + seconds)
                    if answer is not None:
                        answers[rank] = answer

        threads = [threading.Thread(target=call, daemon=True) for _ in range(min(_MOST_CALLS, len(waiting)))]
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:  # the system allows no more threads
            call()
        deadline = self._clock() + seconds
        while len(answers) < needed and any(thread.is_alive() for thread in threads) and self._clock() < deadline:
            time.sleep(0.005)
            deadline = self._clock() + seconds if waiting else deadline
        waiting.clear()
        return dict(answers)

    def _call(self, rank: int, request: Request, deadline: float) -> Request | None:
        """Return a rank's answer. Retry while its watchdog is busy, but not if no process listens at its addresses."""
        data = json.dumps(request | {"rank": self._rank}).encode()
        while True:
            addresses = sorted(self._addresses(rank), key=lambda address: address != self._proven.get(rank))
            refused = 0
            for address in addresses:
                try:
                    answer: Request = json.loads(self._exchange(address, data))
                except ConnectionRefusedError:
                    refused += 1
                except Exception:  # noqa: BLE001 - whoever listens at that address may send anything
                    continue
                else:
                    self._proven[rank] = address
                    self.reached.add(rank)
                    return answer
            if refused == len(addresses) or self._clock() >= deadline:
                return None
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def _exchange(self, address: Address, data: bytes) -> bytes:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as line:
            _prepare(line)
            line.connect(address)
            with _authenticated(line, self._secret, dialed=True) as connection:
                connection.send_bytes(data)
                return connection.recv_bytes(MOST_BYTES)

    def _accept(self, listener: socket.socket) -> None:
        knock = _knock(self._secret)
        while listener.fileno() >= 0:  # until the listener is closed
            try:
                line, _ = listener.accept()
            except OSError:  # no file descriptor is left
                time.sleep(_SECONDS_OF_GRACE)
                continue
            if _is_stranger(line, knock):
                line.close()
                continue
            self._make_room()
            self._unauthenticated[line] = time.monotonic()
            with suppress(RuntimeError):  # the system allows no more threads
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _make_room(self) -> None:
        """If too many connections are unauthenticated, close the oldest one that has exceeded its time."""
        while len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
            oldest, since = next(iter(list(self._unauthenticated.items())))
            seconds = since + _SECONDS_OF_GRACE - time.monotonic()
            if seconds > 0:
                time.sleep(min(seconds, 0.01))
                continue
            self._unauthenticated.pop(oldest, None)
            with suppress(OSError):  # the peer has already closed it
                oldest.shutdown(socket.SHUT_RDWR)

    def _answer(self, line: socket.socket) -> None:
        with line, suppress(Exception):  # whatever a stranger sends ends only that connection
            try:
                _prepare(line)
                connection = _authenticated(line, self._secret, dialed=False)
            finally:
                self._unauthenticated.pop(line, None)
            with connection:
                request = json.loads(connection.recv_bytes(MOST_BYTES))
                connection.send_bytes(json.dumps(self._reply(request)).encode())

    def _reply(self, request: Request) -> Request:
        sender = int(request["rank"])
        self.reached.add(sender)
        if request["kind"] == "lost":
            return {"first": self._decide_first_lost(sender, request["at_seconds"], request["host"])}
        if request["kind"] == "end" and self._secret:
            self.ordered_to_end = True
            self._wake()
        return self._own_state().to_record()
