"""The ranks of torchrun's job, with torch on threads."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpubench.backends.torch import distributed
from gpubench.backends.torch.distributed import TorchDistributed, TorchGroup, torch_refused
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs import rank as ranks_of_jobs
from gpubench.model.facts.environment import TORCHRUN, LaunchedRank
from gpubench.model.terms.ranks import RankIdentity
from gpubench.ports.group import NativeBarrier
from tests.fakes.ranks import ThreadGroup, World, run_ranks
from tests.fakes.torch_on_numpy import Torch

GLOO_LOST_A_RANK = "[gloo/transport/tcp/pair.cc:1] Read error [::1]:9: Connection reset by peer"
OF_TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40321", "LOCAL_RANK": "0"}


def of(threads: ThreadGroup, monkeypatch: pytest.MonkeyPatch | None = None) -> tuple[Any, TorchGroup]:
    torch = cast("Any", Torch(threads))
    torch.distributed.init_process_group("gloo", init_method="env://", timeout=None)
    return torch, TorchGroup(torch, torch.distributed.group.WORLD, range(threads.size))


def test_a_group_hands_values_around() -> None:
    def body(threads: ThreadGroup) -> list[Any]:
        _, group = of(threads)
        assert (group.rank, group.size) == (threads.rank, threads.size)
        assert not isinstance(group, NativeBarrier), "no table of C calls can have this barrier"
        group.barrier()
        offset = group.clock_offset()
        assert abs(offset.seconds) <= offset.uncertainty, "threads have one clock"
        largest = group.largest([float(group.rank), -float(group.rank)])
        return [group.gather(group.rank), group.collect(group.rank), group.broadcast(group.rank, 1), largest]

    first, second, third = run_ranks(3, body)
    assert first == [[0, 1, 2], [0, 1, 2], 1, [2.0, -0.0]]
    assert second[:2] == third[:2] == [[0, 1, 2], None]
    assert third[2:] == [1, [2.0, -0.0]]


def test_parts_of_a_job_have_backends_of_their_own() -> None:
    def body(threads: ThreadGroup) -> tuple[int, int, Any, int]:
        torch, group = of(threads)
        part = group.split(group.rank // 2, group.rank)
        found = TorchDistributed(torch, "gloo")
        own = distributed.open_group(found, part, one_node=True)
        every = distributed.open_group(found, group, one_node=True)
        return part.rank, part.size, part.broadcast(group.rank, 1), own.size() * 10 + every.size()

    assert run_ranks(4, body) == [(0, 2, 1, 24), (1, 2, 1, 24), (0, 2, 3, 24), (1, 2, 3, 24)]


def test_ranks_that_torchrun_started_meet_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = cast("Any", Torch(ThreadGroup(World(1), 0)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    monkeypatch.setattr(distributed, "find_spec", lambda _name: object())
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    rendezvous = ranks_of_jobs.choose_rendezvous(LaunchedRank(TORCHRUN, 0, 1), 5.0)
    assert rendezvous.place == "torch.distributed at 127.0.0.1:40321"
    group = rendezvous.start(LaunchedRank(TORCHRUN, 0, 1), ())
    identity, nodes = ranks_of_jobs.read_identity(group)
    assert (identity.rank, identity.local_rank, nodes) == (0, 0, [0])
    rendezvous.finish()
    assert not torch.distributed.is_initialized()
    rendezvous.finish()
    with monkeypatch.context() as patch:
        left: list[int] = []
        patch.setattr("gpubench.backends.torch.distributed.os._exit", left.append)
        cast("Any", rendezvous).abort(group, 3)
        assert left == [3]
    torch.distributed._lacks = ("gloo",)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: True)
    torch.distributed.init_process_group = lambda *_given, **_more: (_ for _ in ()).throw(RuntimeError("no route"))
    with pytest.raises(CouldNotMeasureError, match="cannot start with gloo: no route"):
        rendezvous.start(LaunchedRank(TORCHRUN, 0, 1), ())


def test_a_rank_that_the_job_does_not_have_is_refused_before_it_waits_for_others() -> None:
    launch = LaunchedRank(TORCHRUN, 5, 2)
    with pytest.raises(UsageError, match="rank 5 of 2, according to torchrun"):
        ranks_of_jobs.run(
            lambda *_: cast("Any", None), launch, 5.0, {}, (), ranks_of_jobs.choose_rendezvous(launch, 5.0)
        )


def test_a_port_in_use_is_told_from_hosts_that_do_not_meet() -> None:
    used = torch_refused("gloo", "The server socket has failed to listen. port: 29500, name: EADDRINUSE")
    assert "MASTER_PORT" in str(used.reason)
    assert "GLOO_SOCKET_IFNAME" in str(torch_refused("gloo", "no route").next_step)


def test_what_needs_mpi_is_refused() -> None:
    assert ranks_of_jobs.choose_rendezvous(LaunchedRank("Open MPI's mpirun", 0, 2), 5.0) is ranks_of_jobs.BY_MPI
    with pytest.raises(UsageError, match="this command under torchrun") as refused:
        ranks_of_jobs.run(lambda _group, _progress: cast("Any", None), LaunchedRank(TORCHRUN, 0, 4), 60, {})
    assert str(refused.value.next_step).startswith(
        "mpirun -n 4 gpubench ...; run the same command without the launcher"
    )
    assert "env -u LOCAL_RANK" in str(refused.value.next_step)


@pytest.mark.parametrize(
    ("broken", "sm_percent", "waited", "told"),
    [
        (RuntimeError(GLOO_LOST_A_RANK), None, [3.0], "is gone"),
        (RuntimeError("an illegal memory access"), None, [], "RuntimeError: an illegal memory access"),
        (RuntimeError("an illegal memory access"), 50.0, [3.0], "RuntimeError: an illegal memory access"),
    ],
)
def test_a_rank_that_lost_a_connection_lets_the_watchdog_of_the_lost_one_speak_first(
    monkeypatch: pytest.MonkeyPatch, broken: Exception, sm_percent: float | None, waited: list[float], told: str
) -> None:
    done: list[object] = []
    said: list[str] = []
    monkeypatch.setattr(ranks_of_jobs, "time", SimpleNamespace(sleep=done.append))
    monkeypatch.setattr(ranks_of_jobs, "_tell", lambda error, _channel: said.append(str(error)))
    progress = SimpleNamespace(
        enter=lambda *_: None,
        exchange_addresses=lambda _group: None,
        is_ending=False,
        leave=lambda: done.append("left"),
    )
    monkeypatch.setattr("gpubench.ranks.watchdog.rank.start", lambda *_: progress)
    monkeypatch.setattr(ranks_of_jobs, "agree_on_defaults", lambda *_: None)

    def run(_channel: object) -> int:
        raise broken

    def abort(_group: object, code: int) -> None:
        raise SystemExit(code)

    job = SimpleNamespace(
        identity=RankIdentity(rank=0, host="n0", node=0, local_rank=0, pid=1, sm_percent=sm_percent), run=run
    )
    rendezvous = ranks_of_jobs.Rendezvous(lambda *_: None, lambda: None, cast("Any", abort))
    with pytest.raises(SystemExit, match="3"):
        ranks_of_jobs.run(lambda *_: cast("Any", job), LaunchedRank(TORCHRUN, 0, 2), 5.0, {}, (), rendezvous)
    assert done[: done.index("left")] == waited
    assert len(said) == 1
    assert told in said[0]
