"""Datagrams between watchdogs: who is asked, who is believed."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.hardware.watchdog.peers import Peers, WatchdogAddress, job_name, local_name, own_addresses
from gpubench.hardware.watchdog.process import _batches
from tests.fakes.progress import FakeProgress


def bound() -> socket.socket:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    return datagrams


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    every = [bound() for _ in range(3)]
    yield every
    for each in every:
        each.close()


def peers(sockets: list[socket.socket], rank: int, secret: str = "s") -> Peers:
    addresses = {number: [each.getsockname()] for number, each in enumerate(sockets)}
    return Peers(sockets[rank], rank, addresses, secret, FakeProgress(rank).state)


def answering(every: list[Peers]) -> threading.Event:
    over = threading.Event()

    def answer() -> None:
        while not over.wait(0.01):
            for each in every:
                each.receive()

    threading.Thread(target=answer).start()
    return over


def test_states_are_asked_and_told(sockets: list[socket.socket]) -> None:
    asker = peers(sockets, 0)
    over = answering([peers(sockets, 1), peers(sockets, 2)])
    assert [state.rank for state in asker.ask(range(3), 10)] == [1, 2]
    assert asker.reached == {1, 2}
    assert len(asker.ask([1, 2], 10, enough=1)) >= 1
    assert asker.ask([0], 10) == []
    over.set()


def test_without_the_secret_nothing_is_believed(sockets: list[socket.socket]) -> None:
    asker, other = peers(sockets, 0, "wrong"), peers(sockets, 1)
    over = answering([other])
    assert asker.ask([1], 0.3) == []
    asker.order_end()
    assert asker.ask([1], 0.3) == []
    assert not other.ordered_to_end
    sockets[2].sendto(b"no message", sockets[1].getsockname())
    sockets[2].sendto(b'{"secret": "s", "rank": 2, "kind": "state", "state": {}}', sockets[1].getsockname())
    assert asker.ask([1], 0.3) == []
    over.set()


def test_an_order_to_end_arrives_but_is_not_obeyed_without_a_secret(sockets: list[socket.socket]) -> None:
    for secret, obeyed in (("s", True), ("", False)):
        orderer, other = peers(sockets, 0, secret), peers(sockets, 1, secret)
        orderer.order_end()
        over = answering([other])
        orderer.ask([1], 5)
        over.set()
        assert other.ordered_to_end == obeyed


def test_nobody_there_is_no_answer(sockets: list[socket.socket]) -> None:
    asker = peers(sockets, 0)
    sockets[1].close()
    assert asker.ask([1], 0.5) == []


def test_names_of_jobs_and_ranks() -> None:
    assert job_name({"PMIX_NAMESPACE": "prterun-vm-7@1"}) == "prterun-vm-7@1"
    assert job_name({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}) == "7-1"
    assert job_name({}) == str(os.getppid())
    assert local_name("x" * 300, 1)[0] == "\0"
    assert len(local_name("x" * 300, 1)) <= 107
    assert local_name("x" * 300, 1) != local_name("x" * 300, 2)


def test_addresses_of_this_host() -> None:
    assert all(socket.inet_aton(address) for address in own_addresses())
    assert not [address for address in own_addresses() if address.startswith("127.")]
    card = WatchdogAddress("rank 1 on n1", "n1", 5, ["10.0.0.1"])
    assert card.addresses_from("n1") == [("127.0.0.1", 5), ("10.0.0.1", 5)]
    assert card.addresses_from("n0") == [("10.0.0.1", 5)]


@given(st.integers(0, 5000))
def test_lower_ranks_are_asked_once_each_in_a_few_batches(rank: int) -> None:
    batches = list(_batches(rank))
    assert [each for batch in batches for each in batch] == list(range(rank))
    assert len(batches) <= 6
