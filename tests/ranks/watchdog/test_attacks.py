"""Attacks by other users: the watchdog survives, is not deceived, and meets its deadlines."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from gpubench.ranks.watchdog import peers as connections
from gpubench.ranks.watchdog.peers import Address, Peers, listen_everywhere, listener_address
from tests.cli.running import ROOT, environment
from tests.fakes.progress import FakeProgress
from tests.ranks.watchdog import strangers

SECRET = bytes(32)

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
    """Start a rank and wait for its watchdog. Yield both."""
    rank = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(timeout_s), how],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    try:
        yield rank, pid
    finally:
        rank.kill()
        rank.communicate()


def known_name(pid: int) -> str:
    """Return the abstract socket whose name any user can compute."""
    deadline = time.monotonic() + 300
    while not (names := [name for name in strangers.local_names(pid) if name.startswith("gpubench-")]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return names[0]


ASK = json.dumps({"kind": "state", "rank": 0}).encode()
END = json.dumps({"kind": "end", "rank": 0}).encode()


def framed(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


WORDS = [
    b"",
    bytes(4),
    framed(END),
    framed(b"[" * 5000),
    framed(b'{"kind":"lost","host":"x","at_seconds":0,"rank":1e999}'),
    framed(b'{"kind":"end"}'),
    framed(b"x")[:-1],
    struct.pack("!i", -1) + b"\xff" * 8,
    struct.pack("!i", 2**31 - 1),
    bytes(60000),
]


@pytest.mark.parametrize("how", ["starting", "met"])
def test_no_words_end_a_watchdog(how: str) -> None:
    """Unix sockets answer only the same user, so their data come from this user."""
    with watched(1000, how) as (rank, pid):
        name = known_name(pid)
        addresses: list[tuple[str, int] | str] = [*strangers.tcp_addresses(pid), *strangers.local_names(pid)]
        for address in addresses:
            for words in WORDS:
                # it may close the connection before it has read all data
                with strangers.line_to(address) as line, suppress(OSError):
                    line.sendall(words)
        for _ in range(2):
            assert strangers.answer_to(name, ASK, os.getuid()) > 0
        assert rank.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("how", ["starting", "met"])
def test_another_user_gets_no_answer_over_the_abstract_socket(how: str) -> None:
    with watched(1000, how) as (rank, pid):
        name = known_name(pid)
        assert strangers.answer_to_stranger(name, ASK) == 0
        assert strangers.answer_to(name, ASK, os.getuid()) > 0
        assert rank.poll() is None


class Job:
    """Rank 1, which listens on a Unix socket and TCP, and rank 0 with configurable addresses."""

    def __init__(self, stack: ExitStack, secret: bytes = SECRET) -> None:
        self.listeners = [stack.enter_context(listener) for listener in [*listen_everywhere(), loopback()]]
        self.addresses: list[Address] = [listener_address(listener) for listener in self.listeners]
        self.second = Peers(1, lambda _rank: [], secret, FakeProgress(1).state, lambda: None)
        self.second.serve(self.listeners)

    def first(self, *addresses: Address, secret: bytes = SECRET) -> Peers:
        return Peers(0, lambda _rank: addresses, secret, FakeProgress(0).state, lambda: None)


def loopback() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


def test_every_address_of_a_watchdog_is_answered_and_takes_orders(job: Job) -> None:
    for address in job.addresses:
        asker = job.first(address)
        assert [state.rank for state in asker.ask([1], 60)] == [1]
        assert asker.reached == {1}
        job.second.ordered_to_end = False
        asker.order_end()
        assert job.second.ordered_to_end


@pytest.mark.parametrize("secret", [b"x" * 32, b""])
def test_without_the_secret_of_this_job_nothing_is_believed(job: Job, secret: bytes) -> None:
    for address in job.addresses:
        asker = job.first(address, secret=secret)
        assert asker.ask([1], 0.2) == []
        asker.reached.add(1)
        asker.order_end()
    assert not job.second.ordered_to_end
    assert job.second.reached == set()


def test_before_ranks_have_a_secret_nobody_can_order_an_end() -> None:
    with ExitStack() as stack:
        job = Job(stack, secret=b"")
        asker = job.first(job.addresses[0], secret=b"")
        assert len(asker.ask([1], 60)) == 1
        asker.order_end()
        assert not job.second.ordered_to_end


@contextmanager
def passing_on(target: tuple[str, int]) -> Iterator[Address]:
    """Return the address of a relay to a watchdog."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for line in (source, sink):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def serve(line: socket.socket) -> None:
        with line, socket.create_connection(target) as onward:
            back = threading.Thread(target=pump, args=(onward, line))
            back.start()
            pump(line, onward)
            back.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()

    with loopback() as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def test_a_proof_that_is_passed_on_from_another_address_is_worth_nothing(job: Job) -> None:
    """A stranger may listen at an address that every host has, such as docker0's."""
    target = job.addresses[-1]
    assert not isinstance(target, str)
    with passing_on(target) as stranger:
        asker = job.first(stranger)
        assert asker.ask([1], 0.2) == []
        asker.reached.add(1)
        asker.order_end()
        assert not job.second.ordered_to_end
        assert job.second.reached == set()
        assert len(job.first(stranger, target).ask([1], 60)) == 1


def test_whoever_connects_and_is_silent_delays_nobody(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than may authenticate concurrently."""
    monkeypatch.setattr(connections, "_MOST_UNAUTHENTICATED", 8)
    address = job.addresses[-1]
    assert not isinstance(address, str)
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(strangers.line_to(address))
        assert len(job.first(address).ask([1], 60)) == 1
        assert len(job.second._unauthenticated) <= 8


def test_whoever_begins_with_other_bytes_than_the_knock_is_hung_up_on_at_once(job: Job) -> None:
    address = job.addresses[-1]
    assert not isinstance(address, str)
    with strangers.line_to(address) as line:
        line.settimeout(60)
        line.sendall(bytes(200))
        with suppress(ConnectionResetError):
            assert line.recv(1) == b""


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_a_flood_changes_no_deadline(where: str) -> None:
    """The rank hangs from the start. tests/mpi floods ranks that query each other."""
    with watched(1.0, "met") as (rank, pid):
        known_name(pid)
        flood = (
            strangers.flood(strangers.tcp_addresses(pid))
            if where == "tcp"
            else strangers.local_flood(strangers.local_names(pid), os.getuid())
        )
        with flood:
            assert rank.wait(120) == 3, "or it hangs as long as the flood lasts"
        assert rank.stderr is not None
        assert "gpubench: error: no progress for " in rank.stderr.read()
