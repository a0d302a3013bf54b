"""The store at which torchrun's ranks meet, and errors about missing ranks."""

import socket
from typing import Any, cast

import pytest

from gpubench.backends.torch import distributed
from gpubench.backends.torch.distributed import RanksMissingError, lost_connection, meet, why_silent
from gpubench.errors import CouldNotMeasureError
from gpubench.model.facts.environment import TORCHRUN, LaunchedRank
from tests.fakes.ranks import ThreadGroup, World, run_ranks
from tests.fakes.torch_on_numpy import Store, Torch

ENVIRONMENT = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Store.kept.clear()
    monkeypatch.setattr(distributed, "why_silent", lambda *_: "")


def arrive(rank: int, size: int, seconds: float = 0.3, **more: Any) -> Any:
    distributed = cast("Any", Torch(ThreadGroup(World(size), rank))).distributed
    return meet(distributed, LaunchedRank(TORCHRUN, rank, size), {**ENVIRONMENT, **more}, seconds)


def test_ranks_that_all_come_have_one_store() -> None:
    def body(group: ThreadGroup) -> bool:
        return bool(arrive(group.rank, group.size, 20.0).check(["0", "1", "2"]))

    assert run_ranks(3, body) == [True] * 3


def test_those_who_did_not_come_are_named_with_the_store_and_the_next_command() -> None:
    with pytest.raises(RanksMissingError) as alone:
        arrive(0, 2)
    said = str(alone.value)
    assert said.startswith("1 of 2 ranks came to the store at node0:29500 within 0.3 s")
    assert "missing:  rank 1" in said
    assert "arrived:  rank 0 on " in said
    assert "torchrun --standalone --nproc-per-node 2 -m gpubench ... (--timeout S waits longer)" in said
    assert alone.value.speaker == 0


def test_where_the_first_rank_is_missing_the_lowest_that_came_speaks() -> None:
    def body(group: ThreadGroup) -> tuple[int, str]:
        with pytest.raises(RanksMissingError) as missing:
            arrive(group.rank + 2, 6, TORCHELASTIC_USE_AGENT_STORE="True")
        return missing.value.speaker, str(missing.value.details[0])

    assert run_ranks(2, body) == [(2, "  missing:  rank 0-1,4-5")] * 2


def test_a_store_that_does_not_answer_is_named_by_the_first_rank_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "why_silent", lambda *_: "Connection refused")
    for rank, place, speaker in ((4, "0", 4), (5, "1", -1)):
        with pytest.raises(RanksMissingError) as silent:
            arrive(rank, 8, LOCAL_RANK=place)
        assert silent.value.seen == (
            "no answer from the store of rank 0 at node0:29500 within 0.3 s: Connection refused"
        )
        assert silent.value.speaker == speaker


def test_who_listens_is_found_and_who_does_not_is_told_in_the_systems_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert why_silent("127.0.0.1", port, 5.0) == ""
    assert why_silent("127.0.0.1", port, 0.3) == "Connection refused"
    assert why_silent("no.such.host.invalid", port, 0.3) != ""


def test_a_port_in_use_is_no_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = cast("Any", Torch(ThreadGroup(World(2), 0)))

    def in_use(*_given: object, **_more: object) -> None:
        raise RuntimeError("The server socket has failed to listen on any local network address. EADDRINUSE")

    monkeypatch.setattr(torch.distributed, "TCPStore", in_use)
    with pytest.raises(CouldNotMeasureError) as used:
        meet(torch.distributed, LaunchedRank(TORCHRUN, 0, 2), ENVIRONMENT, 0.3)
    assert not isinstance(used.value, RanksMissingError)
    assert "MASTER_PORT belongs to another job" in used.value.reason


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (
            "[/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:29058: Connection reset by peer.",
            "the rank at [127.0.0.1]:29058 is gone. Gloo reports: Connection reset by peer",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [fe80::1%eth0]:4021",
            "the rank at [fe80::1%eth0]:4021 is gone. Gloo reports: Connection closed by peer",
        ),
    ],
)
def test_a_connection_that_gloo_lost_is_no_error_of_the_rank_that_lost_it(said: str, seen: str) -> None:
    found = lost_connection(RuntimeError(said))
    assert found is not None
    assert found.seen == seen
    assert "its last output" in found.next_step


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access"), ValueError("gloo [1]:2: Broken pipe"), RuntimeError("")],
)
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    assert lost_connection(error) is None
