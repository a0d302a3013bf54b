"""Queries between watchdogs, and their addresses."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.ranks.watchdog import peers as connections
from gpubench.ranks.watchdog.main import _batches
from gpubench.ranks.watchdog.peers import (
    Peers,
    WatchdogAddress,
    is_inner_bridge,
    job_name,
    listen_everywhere,
    listen_locally,
    listener_address,
    local_name,
    offered_addresses,
)
from tests.fakes.progress import FakeProgress

SECRET = bytes(32)


@pytest.fixture
def three() -> Iterator[list[Peers]]:
    with ExitStack() as stack:
        listeners = [[stack.enter_context(line) for line in listen_everywhere()] for _ in range(3)]
        addresses = [[listener_address(line) for line in lines] for lines in listeners]
        every = [
            Peers(rank, addresses.__getitem__, SECRET, FakeProgress(rank).state, lambda: None) for rank in range(3)
        ]
        for peers, lines in zip(every, listeners, strict=True):
            peers.serve(lines)
        yield every


def test_states_are_asked_and_told(three: list[Peers]) -> None:
    asker = three[0]
    assert [state.rank for state in asker.ask(range(3), 60)] == [1, 2]
    assert asker.reached == {1, 2}
    assert three[1].reached == {0}
    assert len(asker.ask([1, 2], 60, enough=1)) >= 1
    assert asker.ask([0], 60) == []


def test_an_order_goes_to_those_that_were_heard_of_and_is_obeyed(three: list[Peers]) -> None:
    orderer, other, silent = three
    orderer.ask([1], 60)
    orderer.order_end()
    assert other.ordered_to_end
    assert not silent.ordered_to_end


def test_a_lost_claim_finds_the_first_rank_before_they_have_spoken(three: list[Peers]) -> None:
    first, other, later = three
    assert other.is_first_lost(1.0)
    assert first.first_lost == 1
    assert not later.is_first_lost(2.0)
    assert not first.is_first_lost(0.5)


def test_nobody_there_is_no_answer() -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        address = gone.getsockname()
    asker = Peers(0, lambda _rank: [address, "\0gpubench-nobody"], SECRET, FakeProgress(0).state, lambda: None)
    assert asker.ask([1], 60) == []


def test_a_rank_that_is_asked_late_has_its_full_time_too(three: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first watchdog accepts connections and is silent, like a stopped one."""
    monkeypatch.setattr(connections, "_MOST_CALLS", 1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("")
        silent.listen()
        address_of_two = three[0]._addresses(2)
        three[0]._addresses = lambda rank: [listener_address(silent)] if rank == 1 else address_of_two
        assert [state.rank for state in three[0].ask([1, 2], 0.5)] == [2]


def test_a_taken_name_is_left_to_its_owner() -> None:
    first, second = (listen_locally(f"taken-{os.getpid()}", 0) for _ in range(2))
    assert first is not None
    assert second is None
    first.close()


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
    card = WatchdogAddress("rank 1 on n1", "n1", ["\0abcde", ("10.0.0.1", 5)])
    assert card.addresses_from("n1") == ["\0abcde", ("10.0.0.1", 5)]
    assert card.addresses_from("n0") == [("10.0.0.1", 5)]


def test_sockets_hear_this_host_and_the_offered_addresses_alone() -> None:
    every = listen_everywhere()
    here, *others = [listener_address(line) for line in every]
    assert str(here).startswith("\0")
    assert [address[0] for address in others] == offered_addresses()
    for line in every:
        line.close()


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
    batches = list(_batches(range(rank)))
    assert [each for batch in batches for each in batch] == list(range(rank))
    assert len(batches) <= 6
