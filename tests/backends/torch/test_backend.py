"""All collectives of torch.distributed backends, with torch on NumPy."""

from typing import Any, cast

import pytest

from gpubench.backends.cuda import AbortedError, open_device
from gpubench.backends.torch.backend import (
    NEVER_RUN,
    TorchGlooOnCuda,
    TorchGroups,
    TorchNccl,
    TorchOnCpu,
    TorchOnDevice,
)
from gpubench.backends.torch.distributed import TorchDistributed
from gpubench.collectives.alltoall import skewed
from gpubench.collectives.record import Collective, SweepRequest
from gpubench.collectives.registry import COLLECTIVES
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.machine.nvml import Driver
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.ranks import UNWATCHED, RankIdentity
from gpubench.model.terms.statistics import Mode, Sampling
from tests.fakes import cupy_on_numpy
from tests.fakes.one_variant import measure
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.fakes.torch_on_numpy import Torch

RANKS = 3


class Rows:
    def __init__(self) -> None:
        self.rows: list[CollectiveRow] = []

    def begin(self, metadata: object) -> None: ...

    def progress(self, done: int, total: int, label: str) -> None: ...

    def row(self, row: CollectiveRow) -> None:
        self.rows.append(row)

    def end(self, report: object) -> None: ...


def request_of(collective: Collective, **given: Any) -> SweepRequest:
    asked: dict[str, Any] = {
        "sizes": (192, 3072),
        "dtypes": (DataType.FLOAT32, DataType.INT8, DataType.FLOAT16),
        "ops": tuple(ReduceOp) if collective.reduces else (ReduceOp.SUM,),
        "placements": tuple(Placement) if collective.in_place else (Placement.OUT_OF_PLACE,),
        "root": 1,
        "sampling": Sampling(iterations=4),
        "warmup": 1,
    }
    return SweepRequest(collective=collective, **(asked | given))


def opened(name: str, group: ThreadGroup, device: Any = None) -> Any:
    torch = Torch(group, cuda=None if device is None else "13.0")
    found = TorchDistributed(torch, name.removeprefix("torch:"))
    groups = TorchGroups(found, name, group, one_node=True)
    if device is None:
        return TorchOnCpu(groups, group, group.size, UNWATCHED)
    kind = TorchNccl if name == "torch:nccl" else TorchGlooOnCuda
    return kind(groups, found, device, group, UNWATCHED)


def rows_of(backend: Any, group: ThreadGroup, request: SweepRequest) -> list[CollectiveRow]:
    rows = Rows()
    identities = [RankIdentity(rank=rank, host="h", node=0, local_rank=rank, pid=1) for rank in range(group.size)]
    report = measure(request, group, backend, identities, cast("Any", rows))
    assert report.verdict != "FAIL", "a rank of a busy machine may be late, which is a WARN"
    return rows.rows


@pytest.mark.parametrize("collective", [*COLLECTIVES, skewed(0.5)], ids=lambda each: each.row_name or each.name)
def test_every_collective_of_gloo_on_cpus_gives_right_data(collective: Collective) -> None:
    def body(group: ThreadGroup) -> list[CollectiveRow]:
        backend = opened("torch:gloo", group)
        found = rows_of(backend, group, request_of(collective, sizes=(3072,)))
        backend.close()
        return found

    rows = run_ranks(RANKS, body)[0]
    assert {row.backend for row in rows} == {"torch:gloo"}
    assert {row.wrong for row in rows} == {0}
    copied = {row.note for row in rows if row.placement == Placement.OUT_OF_PLACE and row.op in (None, "sum")}
    assert copied <= {
        None,
        "torch's all_reduce has one buffer, so the input is copied into it first",
        "torch's broadcast has one buffer, so the input is copied into it first",
        "torch's reduce has one buffer, so the input is copied into it first",
        "Gloo cannot send CUDA tensors, so data from GPUs are copied to host tensors",
    }
    if collective.reduces:
        divided = {str(row.note) for row in rows if row.op == "avg" and row.dtype == "int8"}
        assert all("torch:gloo has no average of int8, so a sum is divided afterwards" in each for each in divided)


@pytest.mark.parametrize("name", ["torch:nccl", "torch:gloo"])
@pytest.mark.parametrize("collective", [*COLLECTIVES, skewed(0.5)], ids=lambda each: each.row_name or each.name)
def test_every_collective_on_gpus_gives_right_data(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, name: str
) -> None:
    cupy = cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(RANKS), cupy_on_numpy.Nccl(RANKS))
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda _begin, _end: 0.25)

    def body(group: ThreadGroup) -> tuple[list[CollectiveRow], Any]:
        backend = opened(name, group, open_device(group.rank, RANKS, "n0", Driver(version="580", cuda=13000)))
        found = rows_of(backend, group, request_of(collective, dtypes=(DataType.FLOAT32,), ops=(ReduceOp.SUM,)))
        libraries = backend.libraries()
        backend.close()
        return found, libraries

    rows, libraries = run_ranks(RANKS, body)[0]
    assert {row.wrong for row in rows} == {0}
    assert {row.backend for row in rows} == {name}
    assert libraries["torch"] == "2.11.0 (CUDA 13.0)"
    assert libraries["torch's NCCL"].startswith("2.28.9 from ")
    if name == "torch:nccl":
        assert all(row.issue_us is not None for row in rows), "what Python takes is a figure of its own"


def test_groups_of_some_ranks_and_a_second_backend_come_beside_the_first() -> None:
    def body(group: ThreadGroup) -> tuple[int, list[str], bool]:
        torch = Torch(group)
        first, second = (
            TorchGroups(TorchDistributed(torch, word), f"torch:{word}", group, one_node=True)
            for word in ("gloo", "nccl")
        )
        assert not torch.distributed.is_initialized(), "ranks are connected at first use"
        assert first.calls is first.calls
        assert second.calls is not None
        first.open(group)
        second.abort()
        aborted = torch.distributed.opened[1].aborted
        backends = [each.backend for each in torch.distributed.opened]
        first.end()
        first.end()
        assert not torch.distributed.is_initialized()
        return len(torch.distributed.opened), backends, aborted

    assert run_ranks(2, body) == [(3, ["gloo", "nccl", "gloo"], True)] * 2


def test_nccl_that_was_never_connected_has_nothing_to_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), cupy_on_numpy.Nccl(1))

    def body(group: ThreadGroup) -> None:
        backend = opened("torch:nccl", group, open_device(0, 1, "n0", Driver(version="580")))
        assert backend.trouble() == ""
        backend.abort()
        with pytest.raises(AbortedError):
            backend.once(lambda: None)

    run_ranks(1, body)


def test_torch_that_cannot_begin_says_so_in_its_own_words() -> None:
    def body(group: ThreadGroup) -> None:
        torch = Torch(group, lacks=("gloo",))
        groups = TorchGroups(TorchDistributed(torch, "gloo"), "torch:gloo", group, one_node=True)
        with pytest.raises(CouldNotMeasureError, match=r"cannot start with gloo: gloo does not begin\n") as refused:
            _ = groups.calls
        assert "GLOO_SOCKET_IFNAME=lo" in refused.value.next_step

    run_ranks(1, body)


def test_graphs_of_gloo_are_refused() -> None:
    def body(group: ThreadGroup) -> None:
        with pytest.raises(UsageError, match="--graph"):
            opened("torch:gloo", group).bind([], 3)

    run_ranks(1, body)


def test_a_device_that_only_torch_drives_is_filled_and_checked_by_way_of_the_host() -> None:
    """The tensors are those of the fake, because no author has such a GPU."""

    def body(group: ThreadGroup) -> list[CollectiveRow]:
        torch = cast("Any", Torch(group))
        waited: list[int] = []
        torch.xpu = type("Xpu", (), {})()
        torch.xpu.synchronize = lambda: waited.append(1)
        torch.xpu.mem_get_info = lambda _device: (2**30, 2**31)
        found = TorchDistributed(torch, "xccl")
        groups = TorchGroups(found, "torch:xccl", group, one_node=True)
        backend = TorchOnDevice(groups, found, torch.device("xpu", 0), group, UNWATCHED)
        assert backend.libraries()["this backend"] == NEVER_RUN
        assert backend.free_bytes() == 2**30 * 7 // 8
        assert backend.allocate(64).array(0, 4, "uint8").tolist() == [0xEE] * 4
        rows = rows_of(backend, group, request_of(COLLECTIVES[0], ops=(ReduceOp.SUM,)))
        backend.close()
        assert waited, "every operation is waited for"
        return rows

    rows = run_ranks(2, body)[0]
    assert {(row.backend, row.wrong) for row in rows} == {("torch:xccl", 0)}


def test_operations_alone_are_timed_with_their_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(2), cupy_on_numpy.Nccl(2))

    def body(group: ThreadGroup) -> list[CollectiveRow]:
        backend = opened("torch:nccl", group, open_device(group.rank, 2, "n0", Driver(version="580")))
        sampling = Sampling(mode=Mode.LATENCY, iterations=3)
        return rows_of(backend, group, request_of(COLLECTIVES[0], ops=(ReduceOp.SUM,), sampling=sampling))

    rows = run_ranks(2, body)[0]
    assert all(row.p50_us is not None and row.issue_us is None for row in rows)
