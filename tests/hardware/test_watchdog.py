"""Watchdogs of ranks that are processes without MPI: who speaks, what it says, and what becomes of the ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpubench.errors import GpubenchError
from gpubench.hardware import watchdog_main, watchdog_process
from gpubench.hardware.progress_block import ProgressBlock
from gpubench.hardware.watchdog_peers import local_name
from gpubench.hardware.watchdog_process import Watchdog, Watched
from gpubench.model import hang
from gpubench.model.hang import Lost, Phase
from tests.cli.running import ROOT, environment

TIMEOUT = 0.5


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "SECONDS_TO_START", 2 * TIMEOUT)
    monkeypatch.setattr(watchdog_process, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(watchdog_process, "_SECONDS_FOR_ANSWERS", 0.5)
    monkeypatch.setattr(watchdog_process, "_SECONDS_FOR_OTHERS_TO_SPEAK", 0.2)
    monkeypatch.setattr(watchdog_process, "_SECONDS_BETWEEN_QUESTIONS", 0.2)
    monkeypatch.setattr(watchdog_process, "_SECONDS_FOR_RAS", 0.2)
    monkeypatch.setattr(watchdog_process, "_is_parent", lambda _pid: True)


class Heard:
    """A speaker that keeps what it is told."""

    hears_all = True

    def __init__(self) -> None:
        self.errors: list[GpubenchError] = []
        self.losses: list[Lost] = []

    def error(self, error: GpubenchError) -> None:
        self.errors.append(error)

    def lost(self, lost: Lost) -> None:
        self.losses.append(lost)


class Rank:
    """A process that sleeps, and a thread that is its watchdog."""

    def __init__(self, rank: int, ranks: int, job: str) -> None:
        dying = f"from gpubench.hardware.watchdog import *; die_at_once_on({int(signal.SIGQUIT)}); print(flush=True)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{dying}; import time; time.sleep(60)"], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            stdout.readline()
        self.block = ProgressBlock()
        self.heard = Heard()
        self.control, other = socket.socketpair()
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("127.0.0.1", 0))
        local = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        local.bind(local_name(job, rank))
        self.sockets = [self.control, other, datagrams, local]
        self.card: tuple[str, str, int, list[str]] = (f"rank {rank} on n0", "n0", datagrams.getsockname()[1], [])
        watched = Watched(rank, ranks, self.card[0], "n0", self.process.pid, TIMEOUT)
        self.watchdog = Watchdog(watched, self.block, other, local, job, datagrams, self.heard)
        self.thread = threading.Thread(target=self.watchdog.run)

    def say(self, **message: Any) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        if self.thread.ident is not None:
            self.thread.join(20)
        for each in self.sockets:
            each.close()


Ranks = Callable[[int], list[Rank]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    every: list[Rank] = []

    def make(count: int) -> list[Rank]:
        every.extend(Rank(rank, count, f"test-{os.getpid()}") for rank in range(count))
        return every

    yield make
    for rank in every:
        rank.close()


def meet(ranks: list[Rank], secret: str = "s") -> None:
    for rank in ranks:
        rank.thread.start()
        rank.block.enter(Phase.OPERATION, "64K", 20)
        rank.say(kind="met", secret=secret, cards=[each.card for each in ranks])


def ended(ranks: list[Rank], seconds: float = 20) -> list[int]:
    """Exit codes. As in the kernel, the line of a rank that is gone is closed."""
    codes = []
    for rank in ranks:
        codes.append(rank.process.wait(seconds))
        with suppress(OSError):
            rank.control.shutdown(socket.SHUT_RDWR)
    return codes


def test_the_first_rank_speaks_for_all_even_when_it_is_the_one_that_is_stopped(ranks: Ranks) -> None:
    three = ranks(3)
    meet(three)
    three[0].process.send_signal(signal.SIGSTOP)
    assert ended(three) == [3, 3, 3]
    assert [len(rank.heard.errors) for rank in three] == [1, 0, 0]
    said = str(three[0].heard.errors[0])
    assert "the others wait for rank 0" in said
    assert f"rank 0 on n0 (pid {three[0].process.pid}), in operation 64K, 0 of 20 done" in said
    assert "arrived:  rank 1 on n0, rank 2 on n0: in operation 64K" in said


def test_a_rank_that_moves_keeps_all_alive_and_its_end_ends_it(ranks: Ranks) -> None:
    two = ranks(2)
    meet(two)
    deadline = time.monotonic() + 4 * TIMEOUT
    while time.monotonic() < deadline:
        two[1].block.completed()
        time.sleep(0.05)
    assert [rank.process.poll() for rank in two] == [None, None]
    assert ended(two) == [3, 3]
    assert "the others wait for rank 0" in str(two[0].heard.errors[0])


def test_where_the_first_watchdog_is_gone_the_next_speaks(ranks: Ranks) -> None:
    three = ranks(3)
    meet(three)
    time.sleep(TIMEOUT / 5)
    three[0].close()
    assert ended(three[1:]) == [3, 3]
    assert [len(rank.heard.errors) for rank in three[1:]] == [1, 0]
    assert "rank 0 on n0: neither it nor its watchdog answers" in str(three[1].heard.errors[0])


def test_before_they_have_met_the_ranks_of_a_host_find_each_other(ranks: Ranks) -> None:
    three = ranks(3)
    three[1].process.send_signal(signal.SIGSTOP)
    for rank in three[:2]:
        rank.block.enter(Phase.MPI_INIT)
        rank.thread.start()
    assert ended(three[:1]) == [3]
    said = str(three[0].heard.errors[0])
    assert f"missing:  rank 1 on n0 (pid {three[1].process.pid}): its process is stopped" in said
    assert "missing:  rank 2: never started, or on another host" in said
    assert ended(three[1:2]) == [3]


def test_silence_that_proves_nothing_takes_longer(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall between two hosts: what never answered is not called dead before launch would be."""
    monkeypatch.setattr(hang, "SECONDS_TO_START", 4 * TIMEOUT)
    (one, other) = ranks(2)
    other.card = (other.card[0], "n1", other.card[2], [])
    meet([one, other])
    time.sleep(2 * TIMEOUT)
    assert one.process.poll() is None
    assert ended([one]) == [3]
    assert "rank 1 on n0: neither it nor its watchdog answers" in str(one.heard.errors[0])


def test_a_suspended_job_has_its_full_time_again(ranks: Ranks) -> None:
    two = ranks(2)
    meet(two)
    for rank in two:
        rank.process.send_signal(signal.SIGSTOP)
    time.sleep(3 * TIMEOUT)
    for rank in two:
        rank.process.send_signal(signal.SIGCONT)
        rank.block.completed()
    assert [rank.process.poll() for rank in two] == [None, None]
    assert ended(two) == [3, 3]


def test_time_in_which_the_watchdog_slept_too_does_not_count(ranks: Ranks) -> None:
    """As where a container is frozen, or a scheduler stops every process of a job."""
    (one,) = ranks(1)
    ahead = [0.0]
    one.watchdog._clock = lambda: time.monotonic() + ahead[0]
    meet([one])
    wait = one.watchdog._wait

    def sleeping(seconds: float, *, until_answer: bool = False) -> None:
        wait(seconds, until_answer=until_answer)
        if not ahead[0]:
            ahead[0] = 1000

    one.watchdog._wait = sleeping  # type: ignore[method-assign]
    time.sleep(0.6 * TIMEOUT)
    assert ahead[0]
    assert one.heard.errors == []
    assert ended([one]) == [3]
    assert str(one.heard.errors[0]).startswith("no progress for 0 s") or "for 1 s" in str(one.heard.errors[0])


def test_a_rank_that_ends_by_its_own_will_is_no_news_and_one_that_is_killed_is(ranks: Ranks) -> None:
    (one, other) = ranks(2)
    meet([one, other])
    one.block.leave()
    other.process.kill()
    os.waitid(os.P_PID, other.process.pid, os.WEXITED | os.WNOWAIT)
    for rank in (one, other):
        rank.control.shutdown(socket.SHUT_RDWR)
        rank.thread.join(20)
    assert one.heard.losses == []
    assert other.heard.losses[0].status == 9
    assert "was killed by SIGKILL in operation 64K" in str(other.heard.losses[0].error(""))


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2), (1, 2, 0)])
def test_of_ranks_that_a_launcher_kills_the_first_alone_is_named(ranks: Ranks, order: tuple[int, ...]) -> None:
    three = ranks(3)
    for rank in three:
        rank.heard.hears_all = False
    meet(three)
    time.sleep(TIMEOUT / 4)
    for number in order:
        three[number].process.kill()
        os.waitid(os.P_PID, three[number].process.pid, os.WEXITED | os.WNOWAIT)
        three[number].control.shutdown(socket.SHUT_RDWR)
        time.sleep(0.05)
    for rank in three:
        rank.thread.join(20)
    assert [len(rank.heard.losses) for rank in three] == [int(number == order[0]) for number in range(3)]


def test_ranks_that_end_because_another_broke_off_are_no_news(ranks: Ranks) -> None:
    three = ranks(3)
    for rank in three:
        rank.heard.hears_all = False
    meet(three)
    three[2].block.leave()
    three[2].say(kind="breaks")
    for rank in (three[2], three[1], three[0]):
        time.sleep(0.1)
        rank.process.kill()
        os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
        rank.control.shutdown(socket.SHUT_RDWR)
    for rank in three:
        rank.thread.join(20)
    assert [rank.heard.losses for rank in three] == [[], [], []]


def test_ranks_that_were_asked_to_end_are_no_news(ranks: Ranks) -> None:
    (one,) = ranks(1)
    one.heard.hears_all = False
    meet([one])
    one.process.terminate()
    os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
    one.control.shutdown(socket.SHUT_RDWR)
    one.thread.join(20)
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
    assert ended([one]) == [3]
    helper.join(20)
    assert said == ["trouble", "abort"]
    assert "library:  rank 0 on n0 (GPU 7, 0000:07:00.0): NCCL's asynchronous error: x" in str(one.heard.errors[0])


def test_a_rank_whose_launcher_is_gone_is_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = ranks(1)
    meet([one])
    monkeypatch.setattr(watchdog_process, "_parent_of", lambda _pid: "1")
    assert ended([one]) == [3]
    assert one.heard.errors == []


SCRIPT = """
import sys, time
from gpubench.hardware import watchdog
from gpubench.hardware.alone import AloneGroup
from gpubench.model.hang import Phase
progress = watchdog.start(0, 1, "n0", 60.0 if sys.argv[2] == "wait" else 0.5, sys.argv[1] or None)
progress.meet(AloneGroup())
progress.know(["rank 0 on n0 (GPU 3)"])
print(progress._watchdog.pid, flush=True)
progress.enter(Phase.OPERATION, "64K", 9)
if sys.argv[2] != "end":
    progress.let_abort(lambda: "gone", lambda: print("gone", flush=True))  # a communicator before the one at work
    progress.let_abort(lambda: "bad", lambda: print("aborted", flush=True))
    time.sleep(60)
assert not progress.ends
progress.leave()
progress.close()
"""


def script(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), cwd=ROOT,
    )  # fmt: skip


def wait_until_it_watches(pid: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/comm").read_text() != "gpubench-watch\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_process_starts_its_watchdog_which_ends_it() -> None:
    rank = script("", "hang")
    stdout, stderr = rank.communicate(timeout=60)
    assert rank.returncode == 3
    assert "gpubench: error: no progress for " in stderr
    assert "library:  rank 0 on n0 (GPU 3): bad" in stderr
    assert stdout.splitlines()[1:] == ["aborted"]
    deadline = time.monotonic() + 20
    while not is_gone(int(stdout.split()[0])):
        assert time.monotonic() < deadline


def test_a_process_that_ends_takes_its_watchdog_along() -> None:
    rank = script("", "end")
    stdout, stderr = rank.communicate(timeout=60)
    assert (rank.returncode, stderr) == (0, "")
    assert is_gone(int(stdout))


def test_a_watchdog_has_a_session_and_a_name_of_its_own() -> None:
    rank = script("", "wait")
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    wait_until_it_watches(pid)
    assert os.getsid(pid) == pid
    rank.kill()
    rank.communicate()


def test_what_is_said_over_a_channel() -> None:
    from gpubench.hardware.channel import ChannelReceiver, Chatter

    def sleeping(path: str, how: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", SCRIPT, path, how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), cwd=ROOT)

    with ChannelReceiver() as channel, sleeping(channel.path, "hang") as rank:
        heard = [each for each in channel.messages(rank) if not isinstance(each, Chatter)]
    assert [each["kind"] for each in heard] == ["hello", "error"]
    with ChannelReceiver() as channel, sleeping(channel.path, "wait") as rank:
        assert rank.stdout is not None
        wait_until_it_watches(int(rank.stdout.readline()))
        rank.kill()
        channel.expect_end(5)
        heard = [each for each in channel.messages(rank) if not isinstance(each, Chatter)]
    assert [each["kind"] for each in heard] == ["lost"]
    assert heard[0]["state"]["place"] in ("rank 0 on n0", "rank 0 on n0 (GPU 3)")


def test_a_watchdog_leaves_a_taken_name_to_its_owner() -> None:
    job = f"taken-{os.getpid()}"
    with watchdog_main._local_socket(job, 0) as first, watchdog_main._local_socket(job, 0) as second:
        assert first.getsockname() == local_name(job, 0).encode()
        assert second.getsockname() != first.getsockname()
