"""Questions and answers between watchdogs: who is asked, who is believed."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.ranks.watchdog import peers as datagrams_module
from gpubench.ranks.watchdog.main import _batches
from gpubench.ranks.watchdog.messages import (
    MessageKind,
    WatchdogAddress,
    WatchdogMessage,
    bound_sockets,
    is_inner_bridge,
    job_name,
    local_name,
    offered_addresses,
)
from gpubench.ranks.watchdog.peers import Peers, SealedDatagrams
from tests.fakes.progress import FakeProgress

SECRET, OTHER_SECRET = "5e" * 32, "0f" * 32


def bound() -> socket.socket:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    return datagrams


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    every = [bound() for _ in range(4)]
    yield every
    for each in every:
        each.close()


def sealed(sockets: list[socket.socket], rank: int, secret: str = SECRET, job: str = "j") -> SealedDatagrams:
    """Of one of three ranks; the fourth socket is a stranger's."""
    addresses = {number: [each.getsockname()] for number, each in enumerate(sockets[:3])}
    return SealedDatagrams([sockets[rank]], rank, addresses, secret, job)


def peers(sockets: list[socket.socket], rank: int, secret: str = SECRET, job: str = "j") -> Peers:
    return Peers(sealed(sockets, rank, secret, job), rank, FakeProgress(rank).state)


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


@pytest.mark.parametrize(("secret", "job"), [(OTHER_SECRET, "j"), (SECRET, "another job")])
def test_without_the_secret_of_this_job_nothing_is_believed(
    sockets: list[socket.socket], secret: str, job: str
) -> None:
    asker, other = peers(sockets, 0, secret, job), peers(sockets, 1)
    over = answering([other])
    assert asker.ask([1], 0.1) == []
    asker._datagrams.send(WatchdogMessage(MessageKind.END, 0, 1, 1), asker._datagrams.candidates(1)[0])
    assert asker.ask([1], 0.1) == []
    assert not other.ordered_to_end
    assert other.reached == set()
    over.set()


def test_an_order_goes_to_those_that_were_heard_of_and_is_obeyed(sockets: list[socket.socket]) -> None:
    orderer, other, silent = (peers(sockets, rank) for rank in range(3))
    over = answering([other])
    orderer.ask([1], 10)
    orderer.order_end()
    orderer.ask([1], 10)
    over.set()
    assert other.ordered_to_end
    silent.receive()
    assert not silent.ordered_to_end


def test_an_address_that_nobody_answered_at_gets_questions_alone(sockets: list[socket.socket]) -> None:
    """A card with an address where a stranger listens, as docker0's, which every host has."""
    stranger = sockets[3]
    addresses = {1: [stranger.getsockname(), sockets[1].getsockname()]}
    asker = Peers(SealedDatagrams([sockets[0]], 0, addresses, SECRET, "j"), 0, FakeProgress(0).state)
    over = answering([peers(sockets, 1)])
    assert len(asker.ask([1], 10)) == 1
    for _ in range(2):
        asker.ask([1], 10)
        asker.order_end()
    over.set()
    stranger.settimeout(0.2)
    caught = stranger.recv(1 << 16)
    assert bytes.fromhex(SECRET) not in caught
    assert SECRET.encode() not in caught
    with pytest.raises(TimeoutError):
        stranger.recv(1 << 16)


def test_a_lost_claim_finds_the_first_rank_before_they_have_spoken(sockets: list[socket.socket]) -> None:
    first, other = peers(sockets, 0), peers(sockets, 1)
    over = answering([first])
    assert other.is_first_lost(1.0)
    assert first._first_lost == 1
    over.set()


def test_nobody_there_is_no_answer(sockets: list[socket.socket]) -> None:
    asker = peers(sockets, 0)
    sockets[1].close()
    assert asker.ask([1], 0.1) == []


def test_a_kernel_without_filters_is_done_without(
    sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datagrams_module, "_SO_ATTACH_FILTER", 0x7FFF)
    asker, other = peers(sockets, 0), peers(sockets, 1)
    sockets[3].sendto(b"x" * 100, sockets[1].getsockname())
    over = answering([other])
    assert len(asker.ask([1], 10)) == 1
    over.set()


def test_names_of_jobs_and_ranks() -> None:
    assert job_name({"PMIX_NAMESPACE": "prterun-vm-7@1"}) == "prterun-vm-7@1"
    assert job_name({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}) == "7-1"
    assert job_name({}) == str(os.getppid())
    assert local_name("x" * 300, 1)[0] == "\0"
    assert len(local_name("x" * 300, 1)) <= 107
    assert local_name("x" * 300, 1) != local_name("x" * 300, 2)


def test_addresses_of_this_host() -> None:
    offered = offered_addresses()
    assert all(socket.inet_aton(address) for address in offered)
    assert not [address for address in offered if address.startswith(("127.", "169.254.", "0."))]
    card = WatchdogAddress("rank 1 on n1", "n1", [("127.0.0.1", 4), ("10.0.0.1", 5)])
    assert card.addresses_from("n1") == [("127.0.0.1", 4), ("10.0.0.1", 5)]
    assert card.addresses_from("n0") == [("10.0.0.1", 5)]


def test_sockets_hear_loopback_and_the_offered_addresses_alone() -> None:
    every = bound_sockets()
    assert [each.getsockname()[0] for each in every] == ["127.0.0.1", *offered_addresses()]
    for each in every:
        each.close()


def test_bridges_with_a_card_are_the_host_s_and_others_are_not(tmp_path: Path) -> None:
    def port(name: str, inside: str = "") -> None:
        (tmp_path / name / inside).mkdir(parents=True)

    for bridge, ports in {"docker0": ["veth1"], "br0": ["eth1"], "br1": ["bond0"], "virbr0": []}.items():
        for name in ("bridge", "brif", *(f"brif/{each}" for each in ports)):
            (tmp_path / bridge / name).mkdir(parents=True)
    port("veth1")
    port("eth1", "device")
    port("bond0", "lower_eth2")
    port("eth0", "device")
    inner = [name for name in ("docker0", "br0", "br1", "virbr0", "eth0") if is_inner_bridge(tmp_path / name)]
    assert inner == ["docker0", "virbr0"]


@given(st.integers(0, 5000))
def test_lower_ranks_are_asked_once_each_in_a_few_batches(rank: int) -> None:
    batches = list(_batches(rank))
    assert [each for batch in batches for each in batch] == list(range(rank))
    assert len(batches) <= 6
