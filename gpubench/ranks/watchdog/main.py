"""The watchdog, a process beside each rank that detects a hang: `python -m gpubench.ranks.watchdog.main SETUP`."""

import contextlib
import ctypes
import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from gpubench.errors import GpubenchError
from gpubench.machine.host import leave_core
from gpubench.model.terms import ranks
from gpubench.model.terms.units import error_text, printable_line
from gpubench.ranks.ras import ask_ras
from gpubench.ranks.watchdog import messages
from gpubench.ranks.watchdog.peers import (
    SECONDS_OF_DROPPING,
    HearingCheck,
    Peers,
    SameUserDatagrams,
    SealedDatagrams,
)

SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ANSWER = 0.3
_SECONDS_OF_SLEEP = 1.0  # A wait this much longer than asked for was a suspension, and no idle time
_SECONDS_FOR_ANSWERS = 2.0
_SECONDS_FOR_LOWER_RANKS = 1.0
_SECONDS_BETWEEN_QUESTIONS = 2.0
_SECONDS_FOR_RAS = 3.0
_SECONDS_FOR_TROUBLE = 2.0
_SECONDS_TO_ABORT = 2.0
_SECONDS_TO_END = 2.0
_SECONDS_TO_REPORT = 0.5
_MOST_RAS_LINES = 24
_MOST_RAS_BYTES = 1 << 16


class FailureReporter(Protocol):
    """The receiver of a watchdog's reports: the launching gpubench (`sees_all_losses`), or stderr."""

    sees_all_losses: bool

    def error(self, error: GpubenchError) -> None:
        """Report an error that ends the job."""

    def lost(self, lost: ranks.LostRank) -> None:
        """Report a rank that ended without an error of its own."""

    def note(self, text: str) -> None:
        """Say something that ends nothing."""


class RankIsGoneError(Exception):
    """The rank has ended: its end of the line is closed."""


class Watchdog:
    """Reads the progress of a rank twice a second until the rank is gone.

    The watchdog of the lowest reachable rank alone decides that a job hangs: no rank made progress for as long as its
    phase may take. `local` and `datagrams` are the sockets of this host and of all.
    """

    def __init__(
        self,
        watched: messages.Watched,
        block: messages.ProgressBlock,
        control: socket.socket,
        local: socket.socket,
        job: str,
        datagrams: Sequence[socket.socket],
        reporter: FailureReporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = watched
        self._block = block
        self._control = control
        self._local = Peers(SameUserDatagrams(local, job, watched.ranks), watched.rank, self.state, clock)
        self._datagrams = datagrams
        self._reporter = reporter
        self._clock = clock
        self._peers: Peers | None = None
        self._hearing: HearingCheck | None = None
        self._watchdogs: Sequence[messages.WatchdogAddress] = ()
        self._place = watched.place
        self._parent = _parent_of(watched.pid)
        self._rank_answers = False
        self._answers: list[dict[str, Any]] = []
        self._rest = b""
        self._trouble = ""
        self._last: messages.ProgressReading | None = None
        self._since = self._wait_until = clock()

    def run(self) -> None:
        """Watch until the rank is gone, and report that where the rank did not end on its own."""
        try:
            while not self._must_end():
                if self._hearing is not None and (text := self._hearing.complaint(self._clock())) is not None:
                    self._hearing = None
                    if text:
                        self._reporter.note(text)
                before = self._clock()
                self._wait(SECONDS_BETWEEN_LOOKS)
                slept = self._clock() - before
                if slept > SECONDS_BETWEEN_LOOKS + _SECONDS_OF_SLEEP:
                    self._since += slept  # this process was suspended too: by a scheduler, or a frozen container
            self._end()
        except RankIsGoneError:
            if not self._block.left():
                self._report_loss(ranks.LostRank(self.state(), self._clock(), int(_stat(self._watched.pid)[-1] or 0)))

    def state(self) -> ranks.RankState:
        """The rank at this moment."""
        reading, now = self._block.read(), self._clock()
        if self._last is None or (reading.step, reading.done) != (self._last.step, self._last.done):
            self._last, self._since = reading, now
        return ranks.RankState(
            rank=self._watched.rank,
            place=self._place,
            pid=self._watched.pid,
            phase=reading.phase,
            label=reading.label,
            step=reading.step,
            done=reading.done,
            total=reading.total,
            idle_seconds=now - self._since,
            process=_stat(self._watched.pid)[0],
            trouble=self._trouble,
        )

    def _report_loss(self, lost: ranks.LostRank) -> None:
        if self._reporter.sees_all_losses:
            self._reporter.lost(lost)
            return
        peers = self._peers or self._local
        if not lost.asked_to_end and peers.is_first_lost(lost.at_seconds):
            self._reporter.lost(lost)
        if self._watched.rank == 0:
            peers.serve(_SECONDS_TO_ANSWER)

    def _must_end(self) -> bool:
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
        if peers.ordered_to_end:  # while this one asked, another has reported the hang, and may be gone already
            return True
        return self._is_hung(peers, sorted([*states, self.state()], key=lambda each: each.rank))

    def _is_hung(self, peers: Peers, states: Sequence[ranks.RankState]) -> bool:
        timeout_s = self._watched.timeout_s
        seconds_left = max(each.seconds_left(timeout_s) for each in states)
        if seconds_left > 0:
            self._wait_until = self._clock() + seconds_left
            return False
        if ranks.is_suspended(states) and len(states) == self._watched.ranks:
            # Whatever is continued later has its full time again.
            self._since = self._clock()
            return False
        idle = min(each.idle_seconds for each in states)
        if self._peers is None:
            self._reporter.error(ranks.not_started_error(states, self._watched.ranks, round(idle)))
        else:
            answered = {each.rank for each in states}
            unanswered = {rank: address.place for rank, address in enumerate(self._watchdogs) if rank not in answered}
            # Where datagrams never got through (a firewall), silence proves nothing until much later.
            known = set(unanswered) <= peers.reached if self._watched.rank == 0 else 0 in peers.reached
            if unanswered and not known and idle < ranks.limit_seconds(ranks.Phase.LAUNCH, timeout_s):
                return False
            self._reporter.error(ranks.hang_error(states, unanswered, round(idle), self._ras_lines()))
        self._block.leave()
        peers.claim_first()
        self._wait(_SECONDS_TO_REPORT)
        peers.order_end()
        return True

    def _ras_lines(self) -> list[str]:
        answer = ask_ras(_SECONDS_FOR_RAS, most_bytes=_MOST_RAS_BYTES) if self._rank_answers else None
        lines = [line for line in (answer or b"").decode(errors="replace").splitlines() if line.strip()]
        more = [f"({len(lines) - _MOST_RAS_LINES} lines more)"] if len(lines) > _MOST_RAS_LINES else []
        return [f"  NCCL RAS: {line}" for line in [*lines[:_MOST_RAS_LINES], *more]]

    def _end(self) -> None:
        """End the rank with exit code 3, also one that is stopped or inside a library call that does not return."""
        self._block.leave()
        self._ask_rank("abort", _SECONDS_TO_ABORT)
        for number in (messages.END_SIGNAL, signal.SIGKILL):
            if _is_parent(self._watched.pid):  # else the rank is gone, and its number may be another's
                with contextlib.suppress(ProcessLookupError):  # gone with the first signal: no SIGCONT is needed
                    os.kill(self._watched.pid, number)
                    os.kill(self._watched.pid, signal.SIGCONT)
            self._wait(_SECONDS_TO_END)

    def _ask_rank(self, request: str, seconds: float) -> str:
        if not self._rank_answers:
            return ""
        self._answers.clear()
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps({"kind": request}).encode() + b"\n")
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            self._wait(left, until_answer=True)
            for answer in self._answers:
                if answer["kind"] == request:
                    return str(answer["text"])
        return ""

    def _wait(self, seconds: float, *, until_answer: bool = False) -> None:
        """Take messages of the rank and the other watchdogs for so long; RankIsGoneError where the rank ended."""
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            every = [peers for peers in (self._local, self._peers) if peers is not None]
            waited_for = [peers.sockets for peers in every]
            patience = left if all(waited_for) else min(left, SECONDS_OF_DROPPING)
            readable, _, _ = select.select([self._control, *itertools.chain(*waited_for)], [], [], patience)
            for peers, sockets in zip(every, waited_for, strict=True):
                if set(sockets) & set(readable):
                    peers.receive()
            if self._control in readable:
                self._receive()
                if until_answer:
                    return
            if self._peers is not None and self._peers.ordered_to_end and not self._block.left():
                return

    def _receive(self) -> None:
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
                messages.WatchdogAddress(place, address.host, address.addresses)
                for place, address in zip(message["places"], self._watchdogs, strict=True)
            ]
        elif kind == "helps":
            self._rank_answers = True
        elif kind == "breaks":
            (self._peers or self._local).claim_first()
        else:
            self._answers.append(message)

    def _learn_addresses(self, message: dict[str, Any]) -> None:
        """Take the addresses of all watchdogs; the first one asks at once which of them it can reach."""
        self._watchdogs = [messages.WatchdogAddress(*address) for address in message["cards"]]
        self._place = self._watchdogs[self._watched.rank].place
        addresses = {rank: each.addresses_from(self._watched.host) for rank, each in enumerate(self._watchdogs)}
        sealed = SealedDatagrams(self._datagrams, self._watched.rank, addresses, message["secret"], message["job"])
        self._peers = Peers(sealed, self._watched.rank, self.state, self._clock)
        if self._watched.rank == 0:
            self._peers.ask(range(self._watched.ranks), _SECONDS_FOR_ANSWERS)
            self._hearing = HearingCheck(self._peers, self._watchdogs, self._watched.timeout_s, self._clock())


def _batches(rank: int) -> Iterator[range]:
    """The lower ranks in a few groups, the lowest first, so that of thousands few have to be asked."""
    first, size = 0, 1
    while first < rank:
        yield range(first, min(first + size, rank))
        first, size = first + size, size * 8


def _is_parent(pid: int) -> bool:
    return os.getppid() == pid


def _parent_of(pid: int) -> str:
    return _stat(pid)[1]


def _stat(pid: int) -> list[str]:
    """`/proc/PID/stat` from the third field on: state, parent, ..., exit status; empty texts where it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "", ""]


_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_PROCESS_NAME = b"gpubench-watch"


def main() -> None:
    """Watch the rank that started this process, by the descriptors that it handed over."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback: the rank says that its watchdog was killed
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # it reports the death of its rank also where it is stopped
    leave_core()
    setup = json.loads(sys.argv[1])
    watched = messages.Watched(**setup["watched"])
    job = setup["job"]
    block = messages.ProgressBlock(setup["block"])
    control = socket.socket(fileno=setup["control"])
    datagrams = [socket.socket(fileno=each) for each in setup["datagrams"]]
    channel = socket.socket(fileno=setup["channel"]) if "channel" in setup else None
    reporter = _StderrReporter() if channel is None else _ChannelReporter(channel)
    Watchdog(watched, block, control, _local_socket(job, watched.rank), job, datagrams, reporter).run()
    if channel is not None:
        messages.remove_if_abandoned(channel)


def _local_socket(job: str, rank: int) -> socket.socket:
    """The socket that other watchdogs of this host ask; a nameless one where its name is taken."""
    local = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    local.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before it has a name: no sender stays unknown
    try:
        local.bind(messages.local_name(job, rank))
    except OSError:
        local.bind("")
    return local


class _StderrReporter:
    sees_all_losses = False

    def error(self, error: GpubenchError) -> None:
        messages.write_stderr_line(error_text(error).removeprefix("gpubench: "))

    def lost(self, lost: ranks.LostRank) -> None:
        """Print it: not every mpirun names the rank that was killed."""
        self.error(lost.error("; rows measured before are in the outputs"))

    def note(self, text: str) -> None:
        messages.write_stderr_line(printable_line(f"note: {text}"))


class _ChannelReporter:
    sees_all_losses = True

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def error(self, error: GpubenchError) -> None:
        with suppress(OSError):
            messages.ChannelSender(self._line).error(error)

    def lost(self, lost: ranks.LostRank) -> None:
        """Send it; the launcher names the first rank that was killed, and not those that ended with it."""
        with suppress(OSError):
            messages.ChannelSender(self._line, alive=False).lost(lost)

    def note(self, text: str) -> None:
        """Print it: the launcher passes on what ranks print."""
        messages.write_stderr_line(printable_line(f"note: {text}"))


if __name__ == "__main__":
    main()
