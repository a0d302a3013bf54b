"""The watchdog process, which detects hangs. Ranks start it as `python -m gpubench.ranks.watchdog.main SETUP`."""

import ctypes
import hmac
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from gpubench.errors import GpubenchError
from gpubench.machine.host import leave_core
from gpubench.model.terms import ranks
from gpubench.model.terms.units import format_error, format_ranges, printable_line
from gpubench.ranks.channel import ChannelSender, remove_if_abandoned
from gpubench.ranks.ras import ask_ras
from gpubench.ranks.watchdog.peers import Peers, WatchdogAddress, local_name
from gpubench.ranks.watchdog.progress import END_SIGNAL, ProgressBlock, ProgressReading, Watched, write_stderr_line

SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ANSWER = 0.3
_SECONDS_OF_SLEEP = 1.0  # If a wait takes this much too long, this process was suspended
_SECONDS_FOR_ANSWERS = 2.0
_SECONDS_FOR_LOWER_RANKS = 1.0
_SECONDS_BETWEEN_QUESTIONS = 2.0
_SECONDS_FOR_RAS = 3.0
_SECONDS_FOR_TROUBLE = 2.0
_SECONDS_TO_ABORT = 2.0
_SECONDS_TO_END = 2.0
_SECONDS_TO_REPORT = 0.5
SECONDS_TO_REACH = 5.0  # A watchdog on a busy machine may take this long to answer
_LONGEST_TROUBLE = 1024
_MOST_HOSTS = 8
_MOST_RAS_LINES = 24
_MOST_RAS_BYTES = 1 << 16


class FailureReporter(Protocol):
    """The destination of a watchdog's reports: the launcher, which sees the losses of all ranks, or stderr."""

    sees_all_losses: bool

    def error(self, error: GpubenchError) -> None:
        """Report an error that ends the job."""

    def lost(self, lost: ranks.LostRank) -> None:
        """Report a rank that ended without reporting an error itself."""

    def note(self, text: str) -> None:
        """Print a note about something that does not end the job."""


class RankIsGoneError(Exception):
    """The rank closed its control socket, so it has ended."""


class Watchdog:
    """Read a rank's progress twice per second until the rank is gone.

    A job hangs if every rank has been without progress for longer than its phase may take. Only the watchdog of the
    lowest reachable rank decides that. Until all ranks have completed MPI initialization, other watchdogs connect to
    `local`, and later to `listeners`.
    """

    def __init__(
        self,
        watched: Watched,
        block: ProgressBlock,
        control: socket.socket,
        local: Sequence[socket.socket],
        job: str,
        listeners: Sequence[socket.socket],
        reporter: FailureReporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = watched
        self._block = block
        self._control = control
        self._local = local
        self._listeners = listeners
        self._reporter = reporter
        self._clock = clock
        self._order = os.eventfd(0)
        self._wake = partial(os.eventfd_write, self._order, 1)
        self._reading = threading.Lock()
        self._have_met = False
        self._peers = Peers(watched.rank, lambda rank: [local_name(job, rank)], b"", self.state, self._wake, clock)
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
        """Watch the rank until it is gone. Report the rank as lost if it did not announce its end."""
        self._peers.serve(self._local)
        try:
            while not self._must_end():
                before = self._clock()
                self._wait(SECONDS_BETWEEN_LOOKS)
                slept = self._clock() - before
                if slept > SECONDS_BETWEEN_LOOKS + _SECONDS_OF_SLEEP:
                    self._since += slept  # suspended by a scheduler, or in a frozen container
            self._end()
        except RankIsGoneError:
            if not self._block.left():
                self._report_loss(ranks.LostRank(self.state(), self._clock(), int(_stat(self._watched.pid)[-1] or 0)))

    def state(self) -> ranks.RankState:
        """Return the rank's current state. Safe to call from any thread."""
        with self._reading:
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
        # Before MPI is initialized, other watchdogs may still be starting. Only mpirun can then detect which rank was
        # lost first.
        if self._have_met and not lost.asked_to_end and self._peers.is_first_lost(lost.end_seconds):
            self._reporter.lost(lost)
        if self._watched.rank == 0:
            time.sleep(_SECONDS_TO_ANSWER)

    def _must_end(self) -> bool:
        parent = _parent_of(self._watched.pid)
        if self._is_ordered_to_end() or (parent and parent != self._parent):
            return True
        state = self.state()
        if self._clock() < self._wait_until or state.seconds_left(self._watched.timeout_s) > 0:
            return False
        self._wait_until = self._clock() + _SECONDS_BETWEEN_QUESTIONS
        self._trouble = self._ask_rank("trouble", _SECONDS_FOR_TROUBLE)[:_LONGEST_TROUBLE]
        lower: Sequence[int] = range(self._watched.rank)
        if self._have_met:  # query this host first, so that thousands of hanging ranks do not all query rank 0
            lower = sorted(lower, key=lambda rank: self._watchdogs[rank].host != self._watched.host)
        if any(self._peers.ask(batch, _SECONDS_FOR_LOWER_RANKS, enough=1) for batch in _batches(lower)):
            return False
        states = self._peers.ask(range(self._watched.ranks), _SECONDS_FOR_ANSWERS)
        if self._is_ordered_to_end():  # another watchdog has reported the hang in the meantime
            return True
        return self._is_hung(sorted([*states, self.state()], key=lambda state: state.rank))

    def _is_hung(self, states: Sequence[ranks.RankState]) -> bool:
        timeout_s = self._watched.timeout_s
        seconds_left = max(state.seconds_left(timeout_s) for state in states)
        if seconds_left > 0:
            self._wait_until = self._clock() + seconds_left
            return False
        if ranks.is_suspended(states) and len(states) == self._watched.ranks:
            # Restart the time limit, so that a job has its full time when it is resumed.
            self._since = self._clock()
            return False
        idle = min(state.idle_seconds for state in states)
        if not self._have_met:
            self._reporter.error(ranks.not_started_error(states, self._watched.ranks, round(idle)))
        else:
            answered = {state.rank for state in states}
            unanswered = {rank: address.place for rank, address in enumerate(self._watchdogs) if rank not in answered}
            # A watchdog that was never reachable, as behind a firewall, may still be alive. Its silence proves nothing
            # until the limit for the launch has passed.
            reached = self._peers.reached
            known = set(unanswered) <= reached if self._watched.rank == 0 else 0 in reached
            if unanswered and not known and idle < ranks.limit_seconds(ranks.Phase.LAUNCH, timeout_s):
                return False
            self._reporter.error(ranks.hang_error(states, unanswered, round(idle), self._ras_lines()))
        self._block.leave()
        self._peers.claim_first()
        self._wait(_SECONDS_TO_REPORT)
        self._peers.order_end()
        return True

    def _ras_lines(self) -> list[str]:
        answer = ask_ras(_SECONDS_FOR_RAS, most_bytes=_MOST_RAS_BYTES) if self._rank_answers else None
        lines = [line for line in (answer or b"").decode(errors="replace").splitlines() if line.strip()]
        more = [f"({len(lines) - _MOST_RAS_LINES} lines more)"] if len(lines) > _MOST_RAS_LINES else []
        return [f"  NCCL RAS: {line}" for line in [*lines[:_MOST_RAS_LINES], *more]]

    def _end(self) -> None:
        """End the rank with exit code 3, even if it is stopped or inside a library call that does not return."""
        self._block.leave()
        self._ask_rank("abort", _SECONDS_TO_ABORT)
        for number in (END_SIGNAL, signal.SIGKILL):
            if _is_parent(self._watched.pid):  # otherwise the rank is gone, and another process may have its PID
                with suppress(ProcessLookupError):  # the first signal has already ended it
                    os.kill(self._watched.pid, number)
                    os.kill(self._watched.pid, signal.SIGCONT)
            self._wait(_SECONDS_TO_END)

    def _ask_rank(self, request: str, seconds: float) -> str:
        if not self._rank_answers:
            return ""
        self._answers.clear()
        with suppress(OSError):
            self._control.sendall(json.dumps({"kind": request}).encode() + b"\n")
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            self._wait(left, until_answer=True)
            for answer in self._answers:
                if answer["kind"] == request:
                    return str(answer["text"])
        return ""

    def _wait(self, seconds: float, *, until_answer: bool = False) -> None:
        """Process the rank's messages for `seconds`, or until another watchdog orders the end.

        Raise RankIsGoneError if the rank has ended.
        """
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            readable, _, _ = select.select([self._control.fileno(), self._order], [], [], left)
            if self._order in readable:
                os.eventfd_read(self._order)
            if self._control.fileno() in readable:
                self._receive()
                if until_answer:
                    return
            if self._is_ordered_to_end() and not self._block.left():
                return

    def _is_ordered_to_end(self) -> bool:  # mypy would assume that the attribute stays False if `run` read it directly
        return self._peers.ordered_to_end

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
                WatchdogAddress(place, address.host, address.addresses)
                for place, address in zip(message["places"], self._watchdogs, strict=True)
            ]
        elif kind == "helps":
            self._rank_answers = True
        elif kind == "breaks":
            self._peers.claim_first()
        else:
            self._answers.append(message)

    def _learn_addresses(self, message: dict[str, Any]) -> None:
        """Store the addresses of all watchdogs. The watchdog of rank 0 then checks which of them it can reach."""
        self._watchdogs = [WatchdogAddress(*address) for address in message["cards"]]
        self._place = self._watchdogs[self._watched.rank].place
        addresses = [watchdog.addresses_from(self._watched.host) for watchdog in self._watchdogs]
        key = hmac.digest(bytes.fromhex(message["secret"]), message["job"].encode(), "sha256")
        peers = Peers(self._watched.rank, addresses.__getitem__, key, self.state, self._wake, self._clock)
        peers.serve(self._listeners)
        self._peers, self._have_met = peers, True
        if self._watched.rank == 0:
            threading.Thread(target=self._check_reach, args=(peers,), daemon=True).start()

    def _check_reach(self, peers: Peers) -> None:
        """Try for a few seconds to reach every other rank's watchdog. Print a note about those that do not
        answer.
        """
        others = set(range(1, self._watched.ranks))
        deadline = self._clock() + SECONDS_TO_REACH
        while (unreached := sorted(others - peers.reached)) and self._clock() < deadline:
            peers.ask(unreached, _SECONDS_FOR_ANSWERS)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if not unreached or self._block.left():
            return
        hosts = list(dict.fromkeys(self._watchdogs[rank].host for rank in unreached))
        where = ", ".join(hosts[:_MOST_HOSTS]) + (f" and {len(hosts) - _MOST_HOSTS} more" * (len(hosts) > _MOST_HOSTS))
        timeout_s = self._watched.timeout_s
        late = ranks.limit_seconds(ranks.Phase.LAUNCH, timeout_s)
        self._reporter.note(
            f"the watchdogs of rank {format_ranges(unreached)} on {where} do not answer the watchdog of rank 0. "
            f"Likely: a firewall drops TCP between hosts, or they are dead. A hang is noticed after {late:g} s, not "
            f"after {timeout_s:g} s. Try: allow TCP between these hosts, on all ports that programs may use"
        )


def _batches(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split ranks into a few batches of growing size. The first batch is small, so that usually only a few ranks
    out of thousands are queried.
    """
    first, size = 0, 1
    while first < len(ranks):
        yield ranks[first : first + size]
        first, size = first + size, size * 8


def _is_parent(pid: int) -> bool:
    return os.getppid() == pid


def _parent_of(pid: int) -> str:
    return _stat(pid)[1]


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the third one on: state, parent, ..., exit status.

    Return empty strings if the process is gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "", ""]


_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_PROCESS_NAME = b"gpubench-watch"


def main() -> None:
    """Watch the rank that started this process."""
    # no traceback on Ctrl-C, because the rank already reports that its watchdog was killed
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
    # continue a stopped watchdog when its rank dies, so that it reports the death
    prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    leave_core()
    setup = json.loads(sys.argv[1])
    watched = Watched(**setup["watched"])
    block = ProgressBlock(setup["block"])
    control = socket.socket(fileno=setup["control"])
    local, listeners = ([socket.socket(fileno=number) for number in setup[key]] for key in ("local", "listeners"))
    channel = Connection(setup["channel"]) if "channel" in setup else None
    reporter = _StderrReporter() if channel is None else _ChannelReporter(channel)
    Watchdog(watched, block, control, local, setup["job"], listeners, reporter).run()
    if channel is not None:
        remove_if_abandoned(setup["path"])


class _StderrReporter:
    sees_all_losses = False

    def error(self, error: GpubenchError) -> None:
        write_stderr_line(format_error(error).removeprefix("gpubench: "))

    def lost(self, lost: ranks.LostRank) -> None:
        """Print which rank was lost, because not every mpirun names it."""
        self.error(lost.error(". The outputs have the rows measured before"))

    def note(self, text: str) -> None:
        write_stderr_line(printable_line(f"note: {text}"))


class _ChannelReporter:
    sees_all_losses = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def error(self, error: GpubenchError) -> None:
        with suppress(OSError):
            ChannelSender(self._connection).error(error)

    def lost(self, lost: ranks.LostRank) -> None:
        """Send the lost rank to the launcher, which names only the first lost rank of a job."""
        with suppress(OSError):
            ChannelSender(self._connection, alive=False).lost(lost)

    def note(self, text: str) -> None:
        """Print the note on stderr, which the launcher forwards."""
        write_stderr_line(printable_line(f"note: {text}"))


if __name__ == "__main__":
    main()
