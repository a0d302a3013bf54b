"""NCCL and torch.distributed timed from the same gate, with verified data."""

from typing import Any, cast

import pytest

from gpubench.backends.cuda import AbortedError, open_device
from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.nccl.backend import GatedNccl, NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.registry import BackendSetup, backend_named
from gpubench.collectives.alltoall import skewed
from gpubench.collectives.registry import COLLECTIVES
from gpubench.machine.nvml import Driver
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.ranks import Phase
from gpubench.model.terms.statistics import Sampling
from gpubench.ports.backend import Launch, Region
from tests.backends.torch.test_backend import request_of, rows_of
from tests.fakes import cupy_on_numpy
from tests.fakes.progress import FakeProgress
from tests.fakes.ranks import ThreadGroup, run_ranks

OPERATION_US = 8.0
SAMPLINGS = [Sampling(iterations=5), Sampling(iterations=None, budget_seconds=0.01)]


class Bench:
    """A GPU on which an all-reduce takes 8 µs, with a driver that has a gate or refuses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gate: bool = True) -> None:
        monkeypatch.setattr(cupy_on_numpy, "COLLECTIVE_US", OPERATION_US)
        runtime = cupy_on_numpy.Runtime(1)
        cuda = cupy_on_numpy.Cuda(runtime, status=0 if gate else 801)
        cupy_on_numpy.install(monkeypatch, runtime, cupy_on_numpy.Nccl(1), cuda)
        self.runtime, self.waits = runtime, cuda.waits
        self.progress = FakeProgress()
        setup = BackendSetup(
            group=cast("Any", AloneGroup()),
            ranks_on_node=1,
            progress=cast("Any", self.progress),
            device=open_device(0, 1, "n0", Driver(version="580.1")),
            library=NcclLibrary(),
            gated=True,
        )
        self.backend: Any = backend_named("nccl").open(setup)
        self.progress.enter(Phase.OPERATION, "", 100)

    def launches(self, count: int) -> list[Launch]:
        send, receive = (Region(self.backend.allocate(64), 0) for _ in range(2))
        return [self.backend.calls.all_reduce(send, receive, 16, DataType.FLOAT32, ReduceOp.SUM)] * count


def test_the_time_is_the_gpus_from_the_opening_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    assert type(bench.backend) is GatedNccl
    launch = bench.backend.bind(bench.launches(20), 0)
    assert bench.backend.together(launch) == pytest.approx(20 * OPERATION_US / 1e6)
    assert bench.waits == [1], "20 operations wait behind one gate"
    issued = bench.backend.issue_seconds(launch, 20)
    assert issued is not None
    assert 0 < issued < 1e-3
    batches: Any = bench.backend.batch_launches(bench.launches(30), 10)
    assert bench.backend.together(batches) == pytest.approx(30 * OPERATION_US / 1e6)
    assert batches.batch_seconds() == [pytest.approx(10 * OPERATION_US / 1e6)] * 2
    assert bench.progress.state().done == 50
    assert bench.backend.seconds(launch) > 0
    bench.backend.once(bench.launches(1)[0])
    bench.backend.close()
    assert not bench.runtime.pinned
    assert not bench.runtime.allocations


def test_a_driver_without_a_gate_is_named_and_its_times_are_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gate" not in Bench(monkeypatch).backend.libraries()
    bench = Bench(monkeypatch, gate=False)
    assert "times include the host's time to issue operations" in bench.backend.libraries()["gate"]
    assert bench.backend.together(bench.backend.bind(bench.launches(4), 0)) > 0


def test_a_watchdog_ends_what_waits_behind_the_gate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    launch = bench.backend.bind(bench.launches(4), 0)
    bench.progress.help[1]()
    with pytest.raises(AbortedError):
        bench.backend.together(launch)


def test_alone_nccl_keeps_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), cupy_on_numpy.Nccl(1))
    setup = BackendSetup(
        group=cast("Any", AloneGroup()),
        ranks_on_node=1,
        progress=cast("Any", FakeProgress()),
        device=open_device(0, 1, "n0", Driver(version="580.1")),
        library=NcclLibrary(),
    )
    assert type(backend_named("nccl").open(setup)) is NcclBackend


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["counted", "batches"])
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "sendrecv", "alltoallv"])
def test_data_are_right_and_the_host_is_a_figure_of_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, sampling: Sampling
) -> None:
    """Without a gate, because the ranks are threads of one process that would open each other's."""
    collective = skewed(0.75) if name == "alltoallv" else next(each for each in COLLECTIVES if each.name == name)
    cupy = cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(2), cupy_on_numpy.Nccl(2))
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda _begin, _end: 0.25)

    def body(group: ThreadGroup) -> list[CollectiveRow]:
        device = open_device(group.rank, 2, "n0", Driver(version="580", cuda=13000))
        backend = GatedNccl(group, device, NcclLibrary())
        request = request_of(collective, dtypes=(DataType.FLOAT32,), ops=(ReduceOp.SUM,), sampling=sampling)
        found = rows_of(backend, group, request)
        backend.close()
        return found

    rows = run_ranks(2, body)[0]
    assert {(row.wrong, row.backend) for row in rows} == {(0, "nccl")}
    assert all(row.issue_us is not None for row in rows)
