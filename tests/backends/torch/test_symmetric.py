"""PyTorch's symmetric memory with torch on NumPy: both kernels, in and out of place, with and without graphs."""

import os
from typing import Any, cast

import pytest

from gpubench.backends.cuda import open_device
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.registry import backend_named
from gpubench.backends.torch import symmetric
from gpubench.backends.torch.backend import TorchGroups
from gpubench.backends.torch.distributed import TorchDistributed
from gpubench.backends.torch.symmetric import TorchSymmetric, check_operations
from gpubench.collectives.record import SweepRequest
from gpubench.collectives.registry import collective_named
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs.collective.variants import BesideBackend, VariantMaker
from gpubench.machine.nvml import Driver
from gpubench.measure.collective.variants import measure_variants
from gpubench.model.results.backends import RefusedRow, WinnerRow
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.ranks import UNWATCHED, RankIdentity
from tests.backends.torch.test_backend import Rows, request_of
from tests.fakes import cupy_on_numpy
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.fakes.torch_on_numpy import Torch

RANKS = 2
SIZES = (1024, 2**20)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    cupy = cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(RANKS), cupy_on_numpy.Nccl(RANKS))
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda _begin, _end: 0.25)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return cupy


class Node:
    """A rank's GPU with torch:symm. `refuses` is the driver's error about sharing memory."""

    def __init__(self, group: ThreadGroup, refuses: str = "") -> None:
        self.group = group
        self.device = open_device(group.rank, RANKS, "n0", Driver(version="580", cuda=13000))
        torch = cast("Any", Torch(group, cuda="13.0"))
        self.memory = torch.ops.symm_mem
        self.memory.refuses = refuses
        found = TorchDistributed(torch, "gloo")
        groups = TorchGroups(found, "torch:symm", group, one_node=True)
        self.backend = TorchSymmetric(groups, found, self.device, group, UNWATCHED)
        self.identity = RankIdentity(rank=group.rank, host="h", node=0, local_rank=group.rank, pid=1)

    def measured(
        self, request: SweepRequest, backend: Any = None, beside: tuple[BesideBackend, ...] = ()
    ) -> tuple[list[CollectiveRow], Report]:
        rows, identities = Rows(), [RankIdentity(rank=n, host="h", node=0, local_rank=n, pid=1) for n in range(RANKS)]
        maker = VariantMaker(cast("Any", self.group), self.identity, request)
        variants = maker.variants(backend or self.backend, beside=beside)
        report = measure_variants(request, self.group, variants, identities, cast("Any", rows))
        return rows.rows, report


def request(**given: Any) -> SweepRequest:
    usual: dict[str, Any] = {"sizes": SIZES, "dtypes": (DataType.FLOAT32,), "ops": (ReduceOp.SUM,)}
    return request_of(collective_named("allreduce"), **(usual | given))


@pytest.mark.parametrize("replays", [0, 3], ids=["plain", "in a graph"])
def test_every_size_is_measured_by_both_kernels_and_gives_right_data(gpus: Any, replays: int) -> None:
    def body(group: ThreadGroup) -> tuple[list[CollectiveRow], set[str]]:
        node = Node(group)
        rows, _ = node.measured(request(graph_replays=replays))
        node.backend.close()
        assert not node.backend._held, "all symmetric memory is given back"
        return rows, set(node.memory.calls)

    rows, calls = run_ranks(RANKS, body)[0]
    assert {row.wrong for row in rows} == {0}
    assert calls == {"one_shot_all_reduce_out", "one_shot_all_reduce_copy_out", "two_shot_all_reduce_"}
    ways = [(row.size_bytes, row.setting, row.algorithm) for row in rows if row.placement == "in_place"]
    assert ways == [
        (1024, None, "one-shot"),
        (1024, "two-shot", "two-shot"),
        (1024, "again", "one-shot"),
        (2**20, None, "two-shot"),
        (2**20, "one-shot", "one-shot"),
        (2**20, "again", "two-shot"),
    ]
    notes = {(row.algorithm, row.placement): row.note for row in rows}
    copied = "torch's two_shot_all_reduce_ has one buffer, so the input is copied into it first"
    assert notes["two-shot", "out_of_place"] == copied
    assert notes["one-shot", "out_of_place"] is notes["one-shot", "in_place"] is notes["two-shot", "in_place"] is None


def test_beside_nccl_one_table_names_the_fastest_kernel_by_size(gpus: Any) -> None:
    def body(group: ThreadGroup) -> tuple[list[CollectiveRow], Report]:
        node = Node(group)
        nccl = NcclBackend(group, node.device, NcclLibrary())
        beside = (BesideBackend(backend_named("torch:symm"), node.backend),)
        return node.measured(request(graph_replays=2), nccl, beside)

    rows, report = run_ranks(RANKS, body)[0]
    assert {row.wrong for row in rows} == {0}
    here = [(row.backend, row.setting) for row in rows if (row.size_bytes, row.placement) == (1024, "in_place")]
    assert here == [("nccl", None), ("torch:symm", None), ("torch:symm", "two-shot"), ("nccl", "again")]
    names = {row.fastest for row in report.rows(WinnerRow)}
    assert names <= {"nccl", "torch:symm one-shot", "torch:symm two-shot"}
    assert {row.candidates for row in report.rows(WinnerRow)} == {3}


def test_gpus_that_share_no_memory_are_left_out_once_with_the_drivers_words(gpus: Any) -> None:
    def body(group: ThreadGroup) -> tuple[list[CollectiveRow], Report]:
        node = Node(group, refuses="CUDA driver error: operation not supported")
        nccl = NcclBackend(group, node.device, NcclLibrary())
        return node.measured(request(), nccl, (BesideBackend(backend_named("torch:symm"), node.backend),))

    rows, report = run_ranks(RANKS, body)[0]
    assert {row.backend for row in rows} == {"nccl"}
    (refused,) = report.rows(RefusedRow)
    assert (refused.backend, refused.size_bytes) == ("torch:symm", None)
    expected = "PyTorch shares no memory between these GPUs: CUDA driver error: operation not supported"
    assert refused.reason == expected


def test_alone_it_says_so_before_anything_is_measured(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ThreadGroup) -> None:
        with pytest.raises(CouldNotMeasureError, match="not supported") as refused:
            _ = Node(group, refuses="not supported").backend.calls
        assert "gpubench topo" in refused.value.next_step
        with pytest.raises(CouldNotMeasureError, match="not only 2 of them"):
            Node(group).backend.open(group)
        monkeypatch.setattr(symmetric, "host_name", lambda: f"node{group.rank}")

    run_ranks(RANKS, body)


def test_ranks_on_several_hosts_are_refused(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(("node0", "node1"))
    monkeypatch.setattr(symmetric, "host_name", lambda: next(hosts))

    def body(group: ThreadGroup) -> None:
        with pytest.raises(CouldNotMeasureError, match="the ranks are on 2 hosts"):
            _ = Node(group).backend.calls

    run_ranks(RANKS, body)


@pytest.mark.parametrize(
    ("dtypes", "ops", "seen"),
    [
        ((DataType.FLOAT16,), (ReduceOp.SUM,), "--dtype float16 with --backend torch:symm"),
        ((DataType.FLOAT32, DataType.BFLOAT16), (ReduceOp.SUM, ReduceOp.AVG), "--op avg with --backend torch:symm"),
    ],
)
def test_types_and_reductions_that_the_kernels_lack_are_refused(
    dtypes: tuple[DataType, ...], ops: tuple[ReduceOp, ...], seen: str
) -> None:
    with pytest.raises(UsageError, match=seen) as refused:
        backend_named("torch:symm").check_types(dtypes, ops)
    assert "a sum of float32 or bfloat16" in refused.value.expected


def test_a_torch_without_the_operations_is_named() -> None:
    def body(group: ThreadGroup) -> None:
        torch = cast("Any", Torch(group, cuda="12.4"))
        check_operations(TorchDistributed(torch, "gloo"))
        torch.ops.symm_mem = object()
        with pytest.raises(CouldNotMeasureError, match=r"without torch\.ops\.symm_mem\.one_shot_all_reduce_out"):
            check_operations(TorchDistributed(torch, "gloo"))

    run_ranks(1, body)
