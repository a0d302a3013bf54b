"""Watchdogs of ranks that are processes without MPI."""

import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpubench.errors import GpubenchError
from gpubench.model.terms import ranks as hang
from gpubench.model.terms.ranks import LostRank, Phase, RankState
from gpubench.ranks.watchdog import main as watchdog_process
from gpubench.ranks.watchdog.main import Watchdog
from gpubench.ranks.watchdog.peers import Address, Peers, listen_everywhere, listen_locally, listener_address
from gpubench.ranks.watchdog.progress import END_SIGNAL, ProgressBlock, Watched
from tests.cli.running import ROOT, environment

TIMEOUT = 0.3
NEVER = 1000.0
"""A time-out that never expires"""

SECONDS = 60
"""An upper limit for events that happen much sooner"""

ENDED = -END_SIGNAL
"""Exit code of a rank that its watchdog ended. In gpubench it is 3, by the handler of this signal."""


Card = tuple[str, str, list[Address]]


class Clock:
    """The time of all watchdogs in this test. It stands still while a busy machine suspends this process."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._now = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __call__(self) -> float:
        return self._now + self.ahead

    def _run(self) -> None:
        seen = time.monotonic()
        while not self._over.wait(0.005):
            before, seen = seen, time.monotonic()
            self._now += min(seen - before, 0.05)

    def pass_by(self, seconds: float) -> None:
        end = self() + seconds
        until(lambda: self() >= end)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "SECONDS_TO_START", 2 * TIMEOUT)
    monkeypatch.setattr(watchdog_process, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(watchdog_process, "_SECONDS_FOR_ANSWERS", 0.3)
    monkeypatch.setattr(watchdog_process, "_SECONDS_FOR_LOWER_RANKS", 0.2)
    monkeypatch.setattr(watchdog_process, "_SECONDS_TO_REPORT", 0.1)
    monkeypatch.setattr(watchdog_process, "_SECONDS_BETWEEN_QUESTIONS", 0.2)
    monkeypatch.setattr(watchdog_process, "_SECONDS_FOR_RAS", 0.2)
    monkeypatch.setattr(watchdog_process, "_is_parent", lambda _pid: True)


class Heard:
    """A reporter that records all reports."""

    sees_all_losses = True

    def __init__(self) -> None:
        self.errors: list[GpubenchError] = []
        self.losses: list[LostRank] = []
        self.notes: list[str] = []

    def error(self, error: GpubenchError) -> None:
        self.errors.append(error)

    def lost(self, lost: LostRank) -> None:
        self.losses.append(lost)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Rank:
    """A process that sleeps, and a thread that is its watchdog."""

    def __init__(self, rank: int, ranks: int, job: str, clock: Clock, timeout_s: float) -> None:
        self.process = subprocess.Popen(["sh", "-c", "ulimit -c 0; exec sleep 300"])
        self.block = ProgressBlock()
        self.heard = Heard()
        self.control, other = socket.socketpair()
        local, (listener, *others) = listen_locally(job, rank), listen_everywhere()
        assert local is not None
        self.listeners = [local, listener, *others]
        self.sockets = [self.control, other]
        self.card: Card = (f"rank {rank} on n0", "n0", [listener_address(listener)])
        watched = Watched(rank, ranks, self.card[0], "n0", self.process.pid, timeout_s)
        self.watchdog = Watchdog(watched, self.block, other, [local], job, [listener], self.heard, clock)
        self.thread = threading.Thread(target=self.watchdog.run)

    def say(self, **message: Any) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def stop(self) -> None:
        """Stop the process, and return when it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(self.process.pid) == "T")

    def hang_up(self) -> None:
        """Close the socket, as the kernel does when a process ends."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def stop_listening(self) -> None:
        """Close the listeners, as the kernel does when a watchdog ends."""
        for listener in self.listeners:
            with suppress(OSError):  # already closed
                listener.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        """Kill the process, but leave its exit status to the launcher."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.hang_up()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()
        if self.thread.ident is not None:
            self.thread.join(SECONDS)
        self.stop_listening()
        for line in (*self.sockets, *self.listeners):
            line.close()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """Return the letter of its process state, Z if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    clock.close()


Ranks = Callable[..., list[Rank]]


@pytest.fixture
def ranks(clock: Clock) -> Iterator[Ranks]:
    every: list[Rank] = []

    def make(count: int, timeout_s: float = TIMEOUT) -> list[Rank]:
        every.extend(Rank(rank, count, f"test-{os.getpid()}", clock, timeout_s) for rank in range(count))
        return every

    yield make
    for rank in every:
        rank.close()


SECRET = "5e" * 32


def meet(ranks: list[Rank], cards: Sequence[Card] = ()) -> None:
    for rank in ranks:
        rank.block.enter(Phase.OPERATION, "64K", 20)
        rank.thread.start()
        rank.say(kind="met", job="j", secret=SECRET, cards=cards or [each.card for each in ranks])


def ended(ranks: list[Rank]) -> list[int]:
    codes = []
    for rank in ranks:
        codes.append(rank.process.wait(SECONDS))
        rank.hang_up()
        rank.stop_listening()
    return codes


def know_each_other(ranks: list[Rank]) -> bool:
    everyone = set(range(len(ranks)))
    return all(rank.watchdog._have_met for rank in ranks) and ranks[0].watchdog._peers.reached == everyone - {0}


def first_lost(rank: Rank) -> int | None:
    return rank.watchdog._peers.first_lost


def test_the_first_rank_speaks_for_all_even_when_it_is_the_one_that_is_stopped(ranks: Ranks) -> None:
    three = ranks(3)
    three[0].stop()
    meet(three)
    assert ended(three) == [ENDED, ENDED, ENDED]
    assert [len(rank.heard.errors) for rank in three] == [1, 0, 0]
    said = str(three[0].heard.errors[0])
    assert "the others wait for rank 0" in said
    assert f"rank 0 on n0 (pid {three[0].process.pid}), in operation 64K, 0 of 20 done" in said
    assert "arrived:  rank 1 on n0, rank 2 on n0: in operation 64K" in said


def test_a_rank_that_moves_keeps_all_alive_and_its_end_ends_it(ranks: Ranks, clock: Clock) -> None:
    two = ranks(2)
    meet(two)
    for _ in range(25):
        two[1].block.completed()
        clock.pass_by(TIMEOUT / 10)
    assert [rank.process.poll() for rank in two] == [None, None]
    assert ended(two) == [ENDED, ENDED]
    assert "the others wait for rank 0" in str(two[0].heard.errors[0])


def test_where_the_first_watchdog_is_gone_the_next_speaks(ranks: Ranks) -> None:
    three = ranks(3)
    meet(three)
    until(lambda: know_each_other(three))
    three[0].close()
    assert ended(three[1:]) == [ENDED, ENDED]
    assert [len(rank.heard.errors) for rank in three[1:]] == [1, 0]
    assert "rank 0 on n0: neither it nor its watchdog answers" in str(three[1].heard.errors[0])


def test_a_watchdog_that_is_told_to_end_while_it_asks_does_not_speak_too(ranks: Ranks) -> None:
    """Another watchdog reports the hang and ends before this one has its answer."""
    two = ranks(2)
    two[1].block.enter(Phase.OPERATION, "64K", 20)
    two[1].say(kind="met", job="j", secret=SECRET, cards=[each.card for each in two])
    two[1].watchdog._receive()
    peers = two[1].watchdog._peers
    asking = threading.Event()

    def ask(*_: object, **__: object) -> list[RankState]:
        asking.set()
        until(lambda: peers.ordered_to_end)
        return []

    peers.ask = ask  # type: ignore[method-assign]
    two[1].thread.start()
    assert asking.wait(SECONDS)
    key = hmac.digest(bytes.fromhex(SECRET), b"j", "sha256")
    orderer = Peers(0, lambda _rank: two[1].card[2], key, two[0].watchdog.state, lambda: None)
    orderer.reached.add(1)
    orderer.order_end()
    assert ended([two[1]]) == [ENDED]
    assert two[1].heard.errors == []


def test_before_they_have_met_the_ranks_of_a_host_find_each_other(ranks: Ranks) -> None:
    three = ranks(3)
    three[1].stop()
    for rank in three[:2]:
        rank.block.enter(Phase.MPI_INIT)
        rank.thread.start()
    assert ended(three[:1]) == [ENDED]
    said = str(three[0].heard.errors[0])
    assert f"missing:  rank 1 on n0 (pid {three[1].process.pid}): its process is stopped" in said
    assert "missing:  rank 2: never started, or on another host" in said
    assert ended(three[1:2]) == [ENDED]


def test_silence_that_proves_nothing_takes_longer(ranks: Ranks, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall drops connections between two hosts, so silence alone proves nothing."""
    monkeypatch.setattr(hang, "SECONDS_TO_START", 4 * TIMEOUT)
    monkeypatch.setattr(watchdog_process, "SECONDS_TO_REACH", TIMEOUT)
    (one, other) = ranks(2)
    other.card = (other.card[0], "n1", other.card[2])
    meet([one], [one.card, other.card])
    clock.pass_by(2 * TIMEOUT)
    assert one.process.poll() is None
    assert ended([one]) == [ENDED]
    assert one.heard.notes[0].startswith(
        "the watchdogs of rank 1 on n1 do not answer the watchdog of rank 0. Likely: a firewall drops"
    )
    assert "rank 1 on n0: neither it nor its watchdog answers" in str(one.heard.errors[0])


def test_a_suspended_job_has_its_full_time_again(ranks: Ranks, clock: Clock) -> None:
    two = ranks(2)
    for rank in two:
        rank.stop()
    meet(two)
    clock.pass_by(3 * TIMEOUT)
    for rank in two:
        rank.block.completed()
        rank.process.send_signal(signal.SIGCONT)
    assert [rank.process.poll() for rank in two] == [None, None]
    assert ended(two) == [ENDED, ENDED]


def test_time_in_which_the_watchdog_slept_too_does_not_count(ranks: Ranks, clock: Clock) -> None:
    """For example in a frozen container, or if a scheduler stops all processes of a job."""
    (one,) = ranks(1)
    slept = threading.Event()
    wait = one.watchdog._wait

    def sleeping(seconds: float, *, until_answer: bool = False) -> None:
        wait(seconds, until_answer=until_answer)
        if not slept.is_set():
            clock.ahead = 1000
            slept.set()

    one.watchdog._wait = sleeping  # type: ignore[method-assign]
    meet([one])
    assert slept.wait(SECONDS)
    clock.pass_by(0.6 * TIMEOUT)
    assert one.heard.errors == []
    assert ended([one]) == [ENDED]
    assert str(one.heard.errors[0]).startswith(("no progress for 0 s", "no progress for 1 s"))


def test_a_rank_that_ends_by_its_own_will_is_no_news_and_one_that_is_killed_is(ranks: Ranks) -> None:
    (one, other) = ranks(2, NEVER)
    meet([one, other])
    one.block.leave()
    one.hang_up()
    other.die()
    for rank in (one, other):
        rank.thread.join(SECONDS)
    assert one.heard.losses == []
    assert other.heard.losses[0].status == 9
    assert "was killed by SIGKILL in operation 64K" in str(other.heard.losses[0].error(""))


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2), (1, 2, 0)])
def test_of_ranks_that_a_launcher_kills_the_first_alone_is_named(ranks: Ranks, order: tuple[int, ...]) -> None:
    three = ranks(3, NEVER)
    for rank in three:
        rank.heard.sees_all_losses = False
    meet(three)
    until(lambda: know_each_other(three))
    for number in order:
        three[number].die()
        until(lambda: first_lost(three[0]) == order[0])
    for rank in three:
        rank.thread.join(SECONDS)
    assert [len(rank.heard.losses) for rank in three] == [int(number == order[0]) for number in range(3)]


def test_ranks_that_end_because_another_broke_off_are_no_news(ranks: Ranks) -> None:
    three = ranks(3, NEVER)
    for rank in three:
        rank.heard.sees_all_losses = False
    meet(three)
    until(lambda: know_each_other(three))
    three[2].block.leave()
    three[2].say(kind="breaks")
    until(lambda: first_lost(three[0]) == 2)
    for rank in (three[2], three[1], three[0]):
        rank.die()
    for rank in three:
        rank.thread.join(SECONDS)
    assert [rank.heard.losses for rank in three] == [[], [], []]


def test_ranks_that_were_asked_to_end_are_no_news(ranks: Ranks) -> None:
    (one,) = ranks(1, NEVER)
    one.heard.sees_all_losses = False
    meet([one])
    one.process.terminate()
    os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
    one.hang_up()
    one.thread.join(SECONDS)
    assert one.heard.losses == []


def test_a_rank_lost_before_the_ranks_have_met_is_left_to_the_users_mpirun(ranks: Ranks) -> None:
    (one,) = ranks(1, NEVER)
    one.heard.sees_all_losses = False
    one.thread.start()
    one.die()
    one.thread.join(SECONDS)
    assert one.heard.losses == []


def test_a_stuck_rank_with_a_thread_that_helps_aborts_first(ranks: Ranks) -> None:
    (one,) = ranks(1)
    said = []

    def answer() -> None:
        with one.control.makefile("rb") as questions:
            for line in questions:
                said.append(kind := json.loads(line)["kind"])
                one.say(kind=kind, text="NCCL's asynchronous error: x")

    helper = threading.Thread(target=answer)
    helper.start()
    one.say(kind="helps")
    meet([one])
    one.say(kind="places", places=["rank 0 on n0 (GPU 7, 0000:07:00.0)"])
    assert ended([one]) == [ENDED]
    helper.join(SECONDS)
    assert said == ["trouble", "abort"]
    assert "library:  rank 0 on n0 (GPU 7, 0000:07:00.0): NCCL's asynchronous error: x" in str(one.heard.errors[0])


def test_a_rank_whose_launcher_is_gone_is_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = ranks(1, NEVER)
    meet([one])
    monkeypatch.setattr(watchdog_process, "_parent_of", lambda _pid: "1")
    assert ended([one]) == [ENDED]
    assert one.heard.errors == []


SCRIPT = """
import msgspec, sys, time
from gpubench.ranks.watchdog import rank as watchdog
from gpubench.backends.mpi.group import AloneGroup
from gpubench.model.terms.ranks import Phase
watchdog._SECONDS_STOPPED = watchdog._SECONDS_TO_END_TOO = 0.1
progress = watchdog.start(0, 1, "n0", 0.5 if sys.argv[2] == "hang" else 1000.0, sys.argv[1] or None)
progress.exchange_addresses(AloneGroup())
progress.name_ranks(["rank 0 on n0 (GPU 3)"])
print(progress._watchdog.pid, flush=True)
if sys.argv[2] != "end":
    progress.answer_watchdog(lambda: "gone", lambda: print("gone", flush=True))  # a communicator before the one at work
    progress.answer_watchdog(lambda: "bad", lambda: print("aborted", flush=True))
progress.enter(Phase.OPERATION, "64K", 9)
if sys.argv[2] == "end when told":
    sys.stdin.readline()
elif sys.argv[2] == "a next watchdog with less patience":
    progress._watchdog._watched = msgspec.structs.replace(progress._watchdog._watched, timeout_s=0.5)
    print(flush=True)
    time.sleep(300)
elif sys.argv[2] != "end":
    time.sleep(300)
assert not progress.is_ending
progress.leave()
progress.close()
"""


def script(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        env=environment(), cwd=ROOT,
    )  # fmt: skip


def wait_until_it_watches(pid: int) -> None:
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "gpubench-watch\n")
    assert os.getsid(pid) == pid


def is_gone(pid: int) -> bool:
    return state_of(pid) in "ZX"


def test_a_process_starts_its_watchdog_which_ends_it() -> None:
    rank = script("", "hang")
    stdout, stderr = rank.communicate(timeout=300)
    assert rank.returncode == 3
    assert "gpubench: error: no progress for " in stderr
    assert "library:  rank 0 on n0 (GPU 3): bad" in stderr
    assert stdout.splitlines()[1:] == ["aborted"]
    until(lambda: is_gone(int(stdout.split()[0])))


def test_a_process_that_ends_takes_its_watchdog_along() -> None:
    rank = script("", "end")
    stdout, stderr = rank.communicate(timeout=300)
    assert (rank.returncode, stderr) == (0, "")
    assert is_gone(int(stdout))


HOW_IT_ENDS = {
    signal.SIGKILL: "was killed by signal 9",
    signal.SIGINT: "was killed by signal 2",
    signal.SIGSTOP: "was stopped by a signal, and killed because it did not continue",
}


@pytest.mark.parametrize("number", HOW_IT_ENDS)
def test_a_watchdog_that_is_ended_or_stopped_is_followed_by_one_that_knows_as_much(number: signal.Signals) -> None:
    """The new watchdog names the rank with its GPU, queries the library's error, and has the communicator aborted."""
    rank = script("", "a next watchdog with less patience")
    assert rank.stdout is not None
    first = int(rank.stdout.readline())
    wait_until_it_watches(first)
    rank.stdout.readline()
    os.kill(first, number)
    stdout, stderr = rank.communicate(timeout=300)
    assert rank.returncode == 3
    assert f"gpubench: note: the watchdog of rank 0 on n0 {HOW_IT_ENDS[number]}; another watchdog was started" in stderr
    assert "library:  rank 0 on n0 (GPU 3): bad" in stderr
    assert "aborted" in stdout
    assert "Traceback" not in stderr


def test_a_stopped_watchdog_keeps_no_rank_that_ends() -> None:
    rank = script("", "end when told")
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    wait_until_it_watches(pid)
    os.kill(pid, signal.SIGSTOP)
    _, stderr = rank.communicate("\n", timeout=300)
    assert rank.returncode == 0
    assert "the watchdog of rank 0 on n0 was stopped by a signal, and killed because it did not continue\n" in stderr
    assert is_gone(pid)


def test_a_stopped_watchdog_of_a_rank_that_is_killed_goes_on_and_reports_that() -> None:
    rank = script("", "wait")
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    wait_until_it_watches(pid)
    os.kill(pid, signal.SIGSTOP)
    rank.kill()
    _, stderr = rank.communicate(timeout=300)
    assert "rank 0 on n0 (GPU 3)" in stderr
    assert "was killed" in stderr
    until(lambda: is_gone(pid))


def test_where_watchdogs_are_killed_again_and_again_the_rank_says_so() -> None:
    rank = script("", "wait")
    assert rank.stdout is not None
    assert rank.stderr is not None
    pid = int(rank.stdout.readline())
    said = ""
    while "without one" not in said:
        wait_until_it_watches(pid)
        os.kill(pid, signal.SIGKILL)
        said = rank.stderr.readline()
        pid = next(iter(children_of(rank.pid)), 0)
    assert "was killed by signal 9; without one, a hang of this rank is not ended" in said
    rank.kill()
    rank.communicate()


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def test_what_is_said_over_a_channel() -> None:
    from gpubench.ranks.channel import ChannelReceiver

    def sleeping(path: str, how: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", SCRIPT, path, how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), cwd=ROOT)

    with ChannelReceiver() as channel, sleeping(channel.path, "hang") as rank:
        heard = [each for each in channel.messages(rank) if not isinstance(each, str)]
    assert [each["kind"] for each in heard] == ["hello", "error"]
    with ChannelReceiver() as channel, sleeping(channel.path, "wait") as rank:
        assert rank.stdout is not None
        wait_until_it_watches(int(rank.stdout.readline()))
        rank.kill()
        heard = [each for each in channel.messages(rank) if not isinstance(each, str)]
    assert [each["kind"] for each in heard] == ["lost"]
    assert heard[0]["state"]["place"] in ("rank 0 on n0", "rank 0 on n0 (GPU 3)")
