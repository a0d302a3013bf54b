"""Questions, answers and orders between the watchdogs of a job, on one host and between hosts.

Until the ranks have started MPI, watchdogs of one host find each other by abstract sockets, whose names end with their
processes; afterwards each has the addresses of all. A question without an answer is asked again; an order to end is
obeyed only with the secret that the ranks exchanged over MPI.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from gpubench.hardware.watchdog.datagrams import DatagramRoute, Datagrams, Received
from gpubench.hardware.watchdog.messages import Content, LossClaim, MessageKind, WatchdogMessage
from gpubench.model.terms.hang import RankState

_SECONDS_TO_ASK_AGAIN = 0.4
_TIMES_SENT = 3
_ARBITER = 0
"""The rank whose watchdog decides which of several lost ranks was the first."""

_SECONDS_FOR_A_DECISION = 0.25
_SECONDS_BEHIND_A_CLAIM = 0.03
"""A rank's claim to be lost may arrive so much later than the launcher's kill that follows it."""

_MOST_AT_ONCE = 64
_MOST_DROPPED = 40
SECONDS_OF_DROPPING = 0.01
"""Of datagrams that are not believed, so many are read in that time: about 3 % of a core. It is short, for whoever has
something to say waits for as long."""


class Peers:
    """The other watchdogs, by one way of sending. Every call that waits also answers questions that arrive.

    Nothing but a question goes to an address that a rank offered, until something believed has come from there.
    """

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
        self._exchange(MessageKind.ASK, None, wanted, seconds, lambda: len(self._states) >= needed)
        return [self._states[rank] for rank in sorted(self._states)]

    def probe(self, ranks: Iterable[int]) -> None:
        """Ask ranks without waiting; who answers is in `reached` later."""
        for rank in ranks:
            self._ask_everywhere(rank)

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
        self._claim(at_seconds, lambda: self._first_lost is not None)
        return self._first_lost == self._rank

    def claim_first(self) -> None:
        """Claim that this rank has reported why the job ends: ranks that are lost from now on end because of it."""
        self._first_lost = self._rank
        if self._rank != _ARBITER:
            self._claim(self._clock(), lambda: self._is_decided)

    def serve(self, seconds: float) -> None:
        """Answer questions for so long."""
        self._exchange(MessageKind.ASK, None, [], seconds, lambda: False)

    def order_end(self) -> None:
        """Order all others that were heard of to end their ranks; sent more than once, since datagrams get lost."""
        for _ in range(_TIMES_SENT):
            for rank, route in self._proven.items():
                self._send(rank, MessageKind.END, route)

    def receive(self) -> None:
        """Take the datagrams that have arrived, and answer them: a limited number, for the timers have to go on."""
        for own in self.sockets:
            for _ in range(_MOST_AT_ONCE):
                if not self._receive_one(own):
                    break

    def _receive_one(self, own: socket.socket) -> bool:
        """False where none has arrived."""
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
        claim = LossClaim(at_seconds, os.uname().nodename)
        self._exchange(MessageKind.LOST, claim, [_ARBITER], _SECONDS_FOR_A_DECISION, is_decided)

    def _decide_first_lost(self, sender: int, claim: LossClaim) -> int:
        """The rank that was lost first, given the claim of one."""
        if self._first_lost is None:
            here = claim.host == os.uname().nodename
            own_first = self._own_loss is not None and here and self._own_loss < claim.at_seconds
            self._first_lost = _ARBITER if own_first else sender
        return self._first_lost

    def _exchange(
        self, kind: MessageKind, content: Content, ranks: Sequence[int], seconds: float, is_done: Callable[[], bool]
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

    def _put(self, rank: int, kind: MessageKind, content: Content, *, everywhere: bool) -> None:
        """Send a message by the way that is proven; where none is, or it led nowhere, ask by all ways instead."""
        route = self._proven.get(rank)
        if route is not None:
            self._questions.add(self._send(rank, kind, route, content))
        if route is None or everywhere:
            self._questions |= self._ask_everywhere(rank)

    def _ask_everywhere(self, rank: int) -> set[int]:
        return {self._send(rank, MessageKind.ASK, route) for route in self._datagrams.candidates(rank)}

    def _take(self, received: Received) -> None:
        message, route = received
        sender, content = message.sender, message.content
        self.reached.add(sender)
        if route.address in (each.address for each in self._datagrams.candidates(sender)):
            self._proven[sender] = route
        if message.kind is MessageKind.ASK:
            self._send(sender, MessageKind.STATE, route, self._own_state(), message.counter)
        elif message.kind is MessageKind.STATE and isinstance(content, RankState):
            if message.answers in self._questions:
                self._states[sender] = content
        elif message.kind is MessageKind.LOST and isinstance(content, LossClaim):
            self._send(sender, MessageKind.FIRST, route, self._decide_first_lost(sender, content), message.counter)
        elif message.kind is MessageKind.FIRST and isinstance(content, int):
            if message.answers in self._questions:
                self._is_decided, self._first_lost = True, content
        elif message.kind is MessageKind.END and self._datagrams.carries_orders:
            self.ordered_to_end = True

    def _send(
        self, rank: int, kind: MessageKind, route: DatagramRoute, content: Content = None, answers: int = 0
    ) -> int:
        """The counter of what was sent."""
        self._counter += 1
        message = WatchdogMessage(kind, self._rank, rank, self._counter, answers, content)
        self._datagrams.send(message, route)
        return self._counter


class _DroppingLimit:
    """The datagrams that were not believed lately."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0

    def note(self) -> None:
        """Count one more."""
        self._count += 1

    def is_reached(self, now: float) -> bool:
        """True where no more is to be read for a moment."""
        if now - self._since > SECONDS_OF_DROPPING:
            self._count, self._since = 0, now
        return self._count >= _MOST_DROPPED
