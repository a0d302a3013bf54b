"""Datagrams by which the watchdogs of a job ask for the states of each other's ranks, on one host and between hosts.

Until the ranks have started MPI, watchdogs of one host find each other by abstract sockets, whose names end with their
processes; afterwards each has the addresses of all. A question without an answer is asked again; an order to end is
obeyed only with the secret that the ranks exchanged over MPI.
"""

import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpubench.model.terms.hang import RankState

_SIOCGIFADDR = 0x8915
_MOST_ADDRESSES = 6
_MOST_BYTES = 1 << 16
_SECONDS_TO_ASK_AGAIN = 0.4
_TIMES_SENT = 3
_ARBITER = 0
"""The rank whose watchdog decides which of several lost ranks was the first."""

_MOST_NAME_BYTES = 100

_SECONDS_FOR_A_DECISION = 0.25
_SECONDS_BEHIND_A_CLAIM = 0.03
"""A rank's claim to be lost may arrive so much later than the launcher's kill that follows it."""

Address = tuple[str, int] | str
"""Of UDP, or the name of an abstract socket."""


@dataclass(frozen=True, slots=True)
class WatchdogAddress:
    """The address of a rank's watchdog, and the rank in words: 'rank 3 on gpu07 (GPU 3, ...)'."""

    place: str
    host: str
    port: int
    addresses: Sequence[str]

    def addresses_from(self, own_host: str) -> list[Address]:
        """All addresses by which it may be reached from a host."""
        loopback = ["127.0.0.1"] if self.host == own_host else []
        return [(address, self.port) for address in (*loopback, *self.addresses)]


def job_name(environment: Mapping[str, str]) -> str:
    """The launcher's name of the job, which its ranks on one host share before they have started MPI."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID")
    found = [environment[name] for name in names if name in environment]
    return "-".join(found or [str(os.getppid())])


def local_name(job: str, rank: int) -> str:
    """The abstract socket of a rank's watchdog; its name has no place in the file system."""
    return f"\0gpubench-{os.getuid()}-{rank}-{job}"[:_MOST_NAME_BYTES]


def own_addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found.append(socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24]))
    return [address for address in found if not address.startswith("127.")][:_MOST_ADDRESSES]


def _claim(at_seconds: float) -> dict[str, Any]:
    return {"kind": "lost", "at_seconds": at_seconds, "host": os.uname().nodename}


class Peers:
    """The other watchdogs, over one kind of socket. Every call that waits also answers questions that arrive."""

    def __init__(
        self,
        asked: socket.socket,
        rank: int,
        addresses: Mapping[int, Sequence[Address]],
        secret: str,
        own_state: Callable[[], RankState],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        asked.settimeout(0)
        self.socket = asked
        self.reached: set[int] = set()
        self.ordered_to_end = False
        self._rank = rank
        self._addresses = addresses
        self._secret = secret
        self._own_state = own_state
        self._clock = clock
        self._states: dict[int, RankState] = {}
        self._first_lost: int | None = None
        self._own_loss: float | None = None

    def ask(self, ranks: Iterable[int], seconds: float, enough: int | None = None) -> list[RankState]:
        """The states that those ranks' watchdogs send within that time, in rank order; it ends once `enough` have."""
        wanted = [rank for rank in ranks if rank != self._rank]
        needed = len(wanted) if enough is None else enough
        self._states.clear()
        self._exchange({"kind": "ask"}, wanted, seconds, lambda: len(self._states) >= needed)
        return [self._states[rank] for rank in sorted(self._states)]

    def is_first_lost(self, at_seconds: float) -> bool:
        """True where this rank was the first that was lost, as the first rank's watchdog decides.

        `at_seconds` is the time of the loss by this host's monotonic clock. False where there is no decision: none of
        the ranks that a launcher kills with the first is to be named.
        """
        if self._rank == _ARBITER:
            self._own_loss = at_seconds
            self.serve(_SECONDS_BEHIND_A_CLAIM)
            self._first_lost = _ARBITER if self._first_lost is None else self._first_lost
            return self._first_lost == _ARBITER
        self._states.clear()
        claim = _claim(at_seconds)
        self._exchange(claim, [_ARBITER], _SECONDS_FOR_A_DECISION, lambda: self._first_lost is not None)
        return self._first_lost == self._rank

    def claim_first(self) -> None:
        """Claim that this rank has reported why the job ends: ranks that are lost from now on end because of it."""
        self._first_lost = self._rank
        if self._rank != _ARBITER:
            self._send(_ARBITER, _claim(self._clock()))

    def serve(self, seconds: float) -> None:
        """Answer questions for so long."""
        self._exchange({}, [], seconds, lambda: False)

    def _decide_first_lost(self, claim: dict[str, Any]) -> int:
        """The rank that was lost first, given the claim of one."""
        if self._first_lost is None:
            here = claim["host"] == os.uname().nodename
            own_first = self._own_loss is not None and here and self._own_loss < claim["at_seconds"]
            self._first_lost = _ARBITER if own_first else int(claim["rank"])
        return self._first_lost

    def order_end(self) -> None:
        """Order all others to end their ranks; sent more than once, since datagrams get lost."""
        for _ in range(_TIMES_SENT):
            for rank in self._addresses:
                if rank != self._rank:
                    self._send(rank, {"kind": "end"})

    def receive(self) -> None:
        """Take the datagrams that have arrived, and answer them."""
        while True:
            try:
                data, sender = self.socket.recvfrom(_MOST_BYTES)
            except OSError:
                return  # nothing more, or an ICMP error: an earlier datagram reached no socket
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._take(json.loads(data), sender)

    def _exchange(
        self, message: dict[str, Any], ranks: Sequence[int], seconds: float, is_done: Callable[[], bool]
    ) -> None:
        """Send a message to ranks, and again to those without a known state, until `is_done`."""
        deadline = self._clock() + seconds
        again_at = 0.0
        while not is_done() and (now := self._clock()) < deadline:
            if now >= again_at:
                again_at = now + _SECONDS_TO_ASK_AGAIN
                for rank in ranks:
                    if rank not in self._states:
                        self._send(rank, message)
            readable, _, _ = select.select([self.socket], [], [], min(deadline, again_at) - now)
            if readable:
                self.receive()

    def _take(self, message: dict[str, Any], sender: Address) -> None:
        if message["secret"] != self._secret:
            return
        self.reached.add(message["rank"])
        if message["kind"] == "ask":
            self._transmit({"kind": "state", "state": self._own_state().to_record()}, sender)
        elif message["kind"] == "state":
            self._states[message["rank"]] = RankState.from_record(message["state"])
        elif message["kind"] == "lost":
            self._transmit({"kind": "first", "first": self._decide_first_lost(message)}, sender)
        elif message["kind"] == "first":
            self._first_lost = message["first"]
        elif message["kind"] == "end" and self._secret:
            self.ordered_to_end = True

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        for address in self._addresses.get(rank, ()):
            self._transmit(message, address)

    def _transmit(self, message: dict[str, Any], address: Address) -> None:
        data = json.dumps(message | {"rank": self._rank, "secret": self._secret}).encode()
        with contextlib.suppress(OSError):
            self.socket.sendto(data, address)
