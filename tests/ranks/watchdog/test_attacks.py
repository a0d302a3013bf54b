"""Attacks by other users of the host and network: the watchdog lives, is not taken in, and keeps its deadlines."""

import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.terms.ranks import RankState
from gpubench.ranks.watchdog import main as watchdog_main
from gpubench.ranks.watchdog.messages import MOST_BYTES, LossClaim, MessageKind, WatchdogMessage, local_name
from gpubench.ranks.watchdog.peers import DatagramRoute, Peers, ReplayWindow, SameUserDatagrams, SealedDatagrams
from tests.cli.running import ROOT, environment
from tests.fakes.progress import FakeProgress
from tests.ranks.watchdog import strangers

SECRET = "5e" * 32
QUEUE = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())

SCRIPT = """
import sys, time
from gpubench.ranks.watchdog import rank as watchdog
from gpubench.backends.mpi.group import AloneGroup
from gpubench.model.terms.ranks import Phase
progress = watchdog.start(0, 1, "n0", float(sys.argv[1]), None)
progress.enter(Phase.MPI_INIT)
if sys.argv[2] == "met":
    progress.exchange_addresses(AloneGroup())
    progress.enter(Phase.OPERATION, "64K", 9)
print(progress._watchdog.pid, flush=True)
time.sleep(300)
"""


@contextmanager
def watched(timeout_s: float, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A rank whose watchdog, the second one given, is at work."""
    rank = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(timeout_s), how],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    deadline = time.monotonic() + 300
    while not strangers.local_names(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield rank, pid
    finally:
        rank.kill()
        rank.communicate()


ASK = WatchdogMessage(MessageKind.ASK, 0, 0, 1).to_bytes()

DATAGRAMS = [
    b"[" * 5000,
    b'{"secret":"","kind":"lost","host":"x","at_seconds":0,"rank":1e999}',
    b"",
    bytes(60000),
    WatchdogMessage(MessageKind.END, 1, 0, 1).to_bytes(),
    WatchdogMessage(MessageKind.FIRST, 1, 0, 1, content=7).to_bytes()[:-1],
]


@pytest.mark.parametrize("how", ["starting", "met"])
def test_no_datagram_ends_a_watchdog(how: str) -> None:
    """Those over the abstract socket come from the user himself, of whom alone anything is read there."""
    with watched(1000, how) as (rank, pid):
        names = strangers.local_names(pid)
        for data in DATAGRAMS:
            strangers.send_over_udp(data, strangers.udp_addresses(pid))
            strangers.send_locally(data, names)
        for _ in range(2):  # what it answers again it answers behind all of them
            assert strangers.answer_to(names[0], ASK, os.getuid()) > 0
        assert rank.poll() is None


@given(st.binary(max_size=300))
def test_whatever_the_bytes_they_are_a_message_or_none(data: bytes) -> None:
    for kind in (b"", *(bytes([each]) for each in MessageKind)):
        try:
            message = WatchdogMessage.from_bytes(kind + data)
        except (ValueError, IndexError, struct.error):
            continue
        message.to_bytes()


STATE = replace(
    FakeProgress(3).state(), place="rank 3 on n0" * 100, label="\ud800é" * 999, trouble="x" * 9999, process="T"
)


def test_messages_are_read_as_they_were_written_and_long_texts_are_cut() -> None:
    for message in (
        WatchdogMessage(MessageKind.ASK, 3, 0, 2**60),
        WatchdogMessage(MessageKind.LOST, 3, 0, 1, content=LossClaim(1.5, "n0")),
        WatchdogMessage(MessageKind.FIRST, 3, 0, 1, 9, 2),
        WatchdogMessage(MessageKind.STATE, 3, 0, 1, 9, FakeProgress(3).state(2.5)),
    ):
        assert WatchdogMessage.from_bytes(message.to_bytes()) == message
    data = WatchdogMessage(MessageKind.STATE, 3, 0, 1, 9, STATE).to_bytes()
    assert len(data) <= MOST_BYTES
    content = WatchdogMessage.from_bytes(data).content
    assert isinstance(content, RankState)
    assert (len(content.place), content.process, len(content.trouble)) == (256, "T", 1024)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_a_time_that_is_none_is_no_message(seconds: float) -> None:
    data = WatchdogMessage(MessageKind.LOST, 1, 0, 1, content=LossClaim(seconds, "n0")).to_bytes()
    with pytest.raises(ValueError, match="is no time"):
        WatchdogMessage.from_bytes(data)


def test_a_counter_is_new_once() -> None:
    window = ReplayWindow()
    assert [window.is_new(each) for each in (100, 100, 101, 99, 99, 300, 101, 237, 236)] == [
        True, False, True, True, False, True, False, True, False,
    ]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("how", ["starting", "met"])
def test_another_user_gets_no_answer_over_the_abstract_socket(how: str) -> None:
    with watched(1000, how) as (rank, pid):
        (name,) = strangers.local_names(pid)
        assert strangers.answer_to_stranger(name, ASK) == 0
        assert strangers.answer_to(name, ASK, os.getuid()) > 0
        assert rank.poll() is None


class Wire:
    """Two watchdogs of a job, an address of the second at which a stranger listens, and all that he caught there."""

    def __init__(self) -> None:
        self.sockets = [self._bound() for _ in range(3)]
        first, second, stranger = (each.getsockname() for each in self.sockets)
        self.stranger = self.sockets[2]
        self.first = SealedDatagrams(self.sockets[:1], 0, {1: [second, stranger]}, SECRET, "j")
        self.second = SealedDatagrams(self.sockets[1:2], 1, {0: [first]}, SECRET, "j")
        seconds = itertools.count()  # so that no limit is reached
        self.peers = Peers(self.second, 1, FakeProgress(1).state, lambda: float(next(seconds)))

    @staticmethod
    def _bound() -> socket.socket:
        each = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        each.bind(("127.0.0.1", 0))
        each.settimeout(0.3)
        return each


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    for each in wire.sockets:
        each.close()


def order(number: int) -> WatchdogMessage:
    return WatchdogMessage(MessageKind.END, 0, 1, number)


def test_an_order_that_was_caught_is_not_believed_where_it_is_passed_on(wire: Wire) -> None:
    wire.first.send(order(1), wire.first.candidates(1)[1])
    caught = wire.stranger.recv(1 << 16)
    wire.stranger.sendto(caught, wire.sockets[1].getsockname())
    wire.peers.receive()
    assert not wire.peers.ordered_to_end
    assert wire.peers.reached == set()


def test_no_bit_of_a_message_can_be_changed(wire: Wire) -> None:
    """Sent by the very socket that it is to come from."""
    wire.first.send(order(1), wire.first.candidates(1)[0])
    genuine = wire.sockets[1].recv(1 << 16)
    for at in range(len(genuine)):
        forged = bytearray(genuine)
        forged[at] ^= 1
        wire.sockets[0].sendto(bytes(forged), wire.sockets[1].getsockname())
        wire.peers.receive()
    for forged_length in (0, 7, 8, 39, 40, len(genuine) - 1):
        wire.sockets[0].sendto(genuine[:forged_length], wire.sockets[1].getsockname())
    wire.sockets[0].sendto(genuine + b"x", wire.sockets[1].getsockname())
    wire.peers.receive()
    assert wire.peers.reached == set()
    wire.sockets[0].sendto(genuine, wire.sockets[1].getsockname())
    wire.peers.receive()
    assert wire.peers.ordered_to_end


def test_what_comes_a_second_time_is_not_believed(wire: Wire) -> None:
    wire.first.send(WatchdogMessage(MessageKind.ASK, 0, 1, 1), wire.first.candidates(1)[0])
    genuine = wire.sockets[1].recv(1 << 16)
    for _ in range(10):
        wire.sockets[0].sendto(genuine, wire.sockets[1].getsockname())
    wire.peers.receive()
    answers = 0
    while True:
        try:
            wire.sockets[0].recv(1 << 16)
        except OSError:
            break
        answers += 1
    assert answers == 1


def test_an_old_answer_answers_no_later_question(wire: Wire) -> None:
    asker = Peers(wire.first, 0, FakeProgress(0).state)
    old = WatchdogMessage(MessageKind.STATE, 1, 0, 5, 1, FakeProgress(1).state())
    wire.second.send(old, DatagramRoute(wire.sockets[1], wire.sockets[0].getsockname()))
    assert asker.ask([1], 0.2) == []
    assert asker.reached == {1}


def test_the_queue_is_kept_for_those_who_know_the_secret(wire: Wire) -> None:
    """A flood that was there first, of more than any queue holds."""
    for _ in range(5000):
        wire.stranger.sendto(bytes(500), wire.sockets[1].getsockname())
    wire.first.send(order(1), wire.first.candidates(1)[0])
    wire.peers.receive()
    assert wire.peers.ordered_to_end


def test_work_on_what_is_not_believed_is_bounded() -> None:
    job = f"flooded-{os.getpid()}"
    with watchdog_main._local_socket(job, 0) as own, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        now = 0.5
        peers = Peers(SameUserDatagrams(own, job, 2), 0, FakeProgress(0).state, lambda: now)
        taken = 0
        sender.settimeout(0)
        for _ in range(1000):
            try:
                sender.sendto(b"x", local_name(job, 0))
                taken += 1
            except BlockingIOError:
                if not peers.sockets:
                    break
                peers.receive()
        assert 40 <= taken < 40 + QUEUE + 2
        assert peers.sockets == []
        now = 1.0
        assert peers.sockets == [own]


@pytest.mark.parametrize("where", ["udp", "abstract socket"])
def test_a_flood_changes_no_deadline(where: str) -> None:
    """Of a rank that hangs from its start; tests/mpi has ranks that ask each other under a flood."""
    with watched(1.0, "met") as (rank, pid):
        flood = (
            strangers.flood(strangers.udp_addresses(pid))
            if where == "udp"
            else strangers.local_flood(strangers.local_names(pid), os.getuid())
        )
        with flood:
            assert rank.wait(120) == 3, "or it hangs as long as the flood lasts"
        assert rank.stderr is not None
        assert "gpubench: error: no progress for " in rank.stderr.read()
