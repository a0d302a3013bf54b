"""The watchdog itself: a process beside each rank that sees when nothing moves any more, says so, and ends the rank."""

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpubench.errors import GpubenchError
from gpubench.hardware.nccl.ras import ask_ras
from gpubench.hardware.watchdog.peers import Address, Peers, WatchdogAddress, local_name
from gpubench.hardware.watchdog.progress_block import ProgressBlock, ProgressReading
from gpubench.model.terms.hang import (
    LostRank,
    Phase,
    RankState,
    hang_error,
    is_suspended,
    limit_seconds,
    not_started_error,
)

END_SIGNAL = signal.SIGQUIT
"""Ends a rank with exit code 3: its handler is C's `_exit`, which is called with the signal's number, and that is 3."""

SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ANSWER = 0.3
_SECONDS_OF_SLEEP = 1.0
"""What is longer than a look by so much was no look: nothing else ran either, or not as it should."""

_SECONDS_FOR_ANSWERS = 2.0
_SECONDS_FOR_LOWER_RANKS = 1.0
_SECONDS_BETWEEN_QUESTIONS = 2.0
_SECONDS_FOR_RAS = 3.0
_SECONDS_FOR_TROUBLE = 2.0
_SECONDS_TO_ABORT = 2.0
_SECONDS_TO_END = 2.0
_SECONDS_TO_REPORT = 0.5
_MOST_RAS_LINES = 24


class FailureReporter(Protocol):
    """Who passes on what a watchdog has to say: the gpubench that launched the ranks, or stderr.

    `sees_all_losses` is whether it hears of every rank that is lost, and can see itself which one was the first.
    """

    sees_all_losses: bool

    def error(self, error: GpubenchError) -> None:
        """The job cannot go on."""
        ...

    def lost(self, lost: LostRank) -> None:
        """The rank is gone without a word."""
        ...


@dataclass(frozen=True, slots=True)
class Watched:
    """The rank that a watchdog belongs to."""

    rank: int
    ranks: int
    place: str
    host: str
    pid: int
    timeout_s: float


class RankIsGoneError(Exception):
    """The rank closed its end: it ended."""


class Watchdog:
    """Looks at the page of a rank twice a second until the rank is gone.

    `local` is a datagram socket for what is asked on this host, `datagrams` for what comes from any.
    Only the lowest rank that can be reached decides that a job hangs, and only where no rank has moved for as long as
    its phase may take. All the others leave the word to it, and end when it says so.
    """

    def __init__(
        self,
        watched: Watched,
        block: ProgressBlock,
        control: socket.socket,
        local: socket.socket,
        job: str,
        datagrams: socket.socket,
        reporter: FailureReporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = watched
        self._block = block
        self._control = control
        names = {rank: [local_name(job, rank)] for rank in range(watched.ranks)}
        self._local = Peers(local, watched.rank, names, "", self.state, clock)
        self._datagrams = datagrams
        self._reporter = reporter
        self._clock = clock
        self._peers: Peers | None = None
        self._watchdogs: Sequence[WatchdogAddress] = ()
        self._place = watched.place
        self._parent = _parent_of(watched.pid)
        self._rank_answers = False
        self._answers: list[dict[str, Any]] = []
        self._rest = b""
        self._trouble = ""
        self._last: ProgressReading | None = None
        self._since = self._wait_until = clock()

    def run(self) -> None:
        """Watch until the rank is gone, and say so where it did not end by its own will."""
        try:
            while not self._must_end():
                before = self._clock()
                self._wait(SECONDS_BETWEEN_LOOKS)
                slept = self._clock() - before
                if slept > SECONDS_BETWEEN_LOOKS + _SECONDS_OF_SLEEP:
                    self._since += slept  # somebody suspended this process too: a scheduler, or a frozen container
            self._end()
        except RankIsGoneError:
            if not self._block.left():
                self._report_loss(LostRank(self.state(), self._clock(), _status_of(self._watched.pid)))

    def state(self) -> RankState:
        """The rank at this moment."""
        reading, now = self._block.read(), self._clock()
        if self._last is None or (reading.step, reading.done) != (self._last.step, self._last.done):
            self._last, self._since = reading, now
        return RankState(
            rank=self._watched.rank,
            place=self._place,
            pid=self._watched.pid,
            phase=reading.phase,
            label=reading.label,
            step=reading.step,
            done=reading.done,
            total=reading.total,
            idle_seconds=now - self._since,
            process=_process_state(self._watched.pid),
            trouble=self._trouble,
        )

    def _report_loss(self, lost: LostRank) -> None:
        """Say it, unless it is only because of another: launchers kill all ranks as soon as one was."""
        if self._reporter.sees_all_losses:
            self._reporter.lost(lost)
            return
        peers = self._peers or self._local
        if not lost.asked_to_end and peers.is_first_lost(lost.at_seconds):
            self._reporter.lost(lost)
        if self._watched.rank == 0:
            peers.serve(_SECONDS_TO_ANSWER)

    def _must_end(self) -> bool:
        """Whether the rank has to be ended."""
        parent = _parent_of(self._watched.pid)
        if (self._peers is not None and self._peers.ordered_to_end) or (parent and parent != self._parent):
            return True
        state = self.state()
        if self._clock() < self._wait_until or state.seconds_left(self._watched.timeout_s) > 0:
            return False
        self._wait_until = self._clock() + _SECONDS_BETWEEN_QUESTIONS
        self._trouble = self._ask_rank("trouble", _SECONDS_FOR_TROUBLE)
        peers = self._peers or self._local
        if any(peers.ask(batch, _SECONDS_FOR_LOWER_RANKS, enough=1) for batch in _batches(self._watched.rank)):
            return False
        states = peers.ask(range(self._watched.ranks), _SECONDS_FOR_ANSWERS)
        if peers.ordered_to_end:  # while this one asked, another has spoken, and may be gone already
            return True
        return self._is_hung(peers, sorted([*states, self.state()], key=lambda each: each.rank))

    def _is_hung(self, peers: Peers, states: Sequence[RankState]) -> bool:
        """Whether the job hangs, which is then told."""
        timeout_s = self._watched.timeout_s
        seconds_left = max(each.seconds_left(timeout_s) for each in states)
        if seconds_left > 0:
            self._wait_until = self._clock() + seconds_left
            return False
        if is_suspended(states) and len(states) == self._watched.ranks:
            # Whatever is continued later has its full time again.
            self._since = self._clock()
            return False
        idle = min(each.idle_seconds for each in states)
        if self._peers is None:
            self._reporter.error(not_started_error(states, self._watched.ranks, round(idle)))
        else:
            answered = {each.rank for each in states}
            silent = {rank: card.place for rank, card in enumerate(self._watchdogs) if rank not in answered}
            # Where datagrams never got through (a firewall), silence proves nothing until much later.
            known = set(silent) <= peers.reached if self._watched.rank == 0 else 0 in peers.reached
            if silent and not known and idle < limit_seconds(Phase.LAUNCH, timeout_s):
                return False
            self._reporter.error(hang_error(states, silent, round(idle), self._ras_lines()))
        self._block.leave()
        peers.claim_first()
        self._wait(_SECONDS_TO_REPORT)
        peers.order_end()
        return True

    def _ras_lines(self) -> list[str]:
        lines = ask_ras(_SECONDS_FOR_RAS) if self._rank_answers else []
        more = [f"({len(lines) - _MOST_RAS_LINES} lines more)"] if len(lines) > _MOST_RAS_LINES else []
        return [f"  NCCL RAS: {line}" for line in [*lines[:_MOST_RAS_LINES], *more]]

    def _end(self) -> None:
        """End the rank with exit code 3, also one that is stopped, or inside a library that does not return."""
        self._block.leave()
        self._ask_rank("abort", _SECONDS_TO_ABORT)
        for number in (END_SIGNAL, signal.SIGKILL):
            if _is_parent(self._watched.pid):  # else the rank is gone, and its number may be another's
                with contextlib.suppress(ProcessLookupError):  # gone with the first signal: no SIGCONT is needed
                    os.kill(self._watched.pid, number)
                    os.kill(self._watched.pid, signal.SIGCONT)
            self._wait(_SECONDS_TO_END)

    def _ask_rank(self, what: str, seconds: float) -> str:
        """What a thread of the rank answers, where it has one for this; empty where it does not in time."""
        if not self._rank_answers:
            return ""
        self._answers.clear()
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps({"kind": what}).encode() + b"\n")
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            self._wait(left, until_answer=True)
            for answer in self._answers:
                if answer["kind"] == what:
                    return str(answer["text"])
        return ""

    def _wait(self, seconds: float, *, until_answer: bool = False) -> None:
        """Hear the rank and the other watchdogs for so long.

        Raises:
            RankIsGoneError: the rank ended.
        """
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            every = [peers for peers in (self._local, self._peers) if peers is not None]
            readable, _, _ = select.select([self._control, *(peers.socket for peers in every)], [], [], left)
            for peers in every:
                if peers.socket in readable:
                    peers.receive()
            if self._control in readable:
                self._receive()
                if until_answer:
                    return
            if self._peers is not None and self._peers.ordered_to_end and not self._block.left():
                return

    def _receive(self) -> None:
        """Take what the rank says."""
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise RankIsGoneError
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "met":
            self._learn_addresses(message)
        elif kind == "places":
            self._place = message["places"][self._watched.rank]
            self._watchdogs = [
                WatchdogAddress(place, card.host, card.port, card.addresses)
                for place, card in zip(message["places"], self._watchdogs, strict=True)
            ]
        elif kind == "helps":
            self._rank_answers = True
        elif kind == "breaks":
            (self._peers or self._local).claim_first()
        else:
            self._answers.append(message)

    def _learn_addresses(self, message: dict[str, Any]) -> None:
        """The ranks have exchanged where their watchdogs are; the first sees at once whom it can reach."""
        self._watchdogs = [WatchdogAddress(*card) for card in message["cards"]]
        self._place = self._watchdogs[self._watched.rank].place
        addresses: dict[int, Sequence[Address]] = {
            rank: card.addresses_from(self._watched.host) for rank, card in enumerate(self._watchdogs)
        }
        self._peers = Peers(self._datagrams, self._watched.rank, addresses, message["secret"], self.state, self._clock)
        if self._watched.rank == 0:
            self._peers.ask(range(self._watched.ranks), _SECONDS_FOR_ANSWERS)


def _batches(rank: int) -> Iterator[range]:
    """The lower ranks, in a few groups, the lowest first: of thousands, most are spared the question."""
    first, size = 0, 1
    while first < rank:
        yield range(first, min(first + size, rank))
        first, size = first + size, size * 8


def _is_parent(pid: int) -> bool:
    return os.getppid() == pid


def _process_state(pid: int) -> str:
    return _stat(pid)[0]


def _parent_of(pid: int) -> str:
    return _stat(pid)[1]


def _status_of(pid: int) -> int:
    """How a process that is just ending ends, as wait(2) has it; 0 where its launcher has taken that already."""
    return int(_stat(pid)[-1] or 0)


def _stat(pid: int) -> list[str]:
    """`/proc/PID/stat` from the third field on: state, parent, ..., exit status; empty texts where it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "", ""]
