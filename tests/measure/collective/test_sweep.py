"""Sweeps on threads with a fake CuPy and NCCL: formulas, layouts, verification and rows."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from msgspec.structs import replace

from gpubench.backends.cuda import open_device
from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.nccl.backend import NcclBackend, NcclLaunch
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.record import Collective, SweepRequest
from gpubench.collectives.registry import COLLECTIVES
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.machine.nvml import Driver
from gpubench.measure.collective.sweep import Observers, check_root, fitting_sizes
from gpubench.model.facts.process import GpuCondition
from gpubench.model.results.report import CollectiveRow, Metadata, Report
from gpubench.model.results.speed import ONE_RANK
from gpubench.model.terms.operation import Allocator, DataType, Layout, Placement, ReduceOp, Segment
from gpubench.model.terms.ranks import Phase, RankIdentity
from gpubench.model.terms.statistics import Mode, Sampling
from gpubench.model.terms.verdict import STRAGGLER, Verdict
from gpubench.ports.backend import Backend, BatchedLaunch, Launch
from gpubench.ports.group import Group
from tests.fakes import cupy_on_numpy, faults
from tests.fakes.one_variant import measure
from tests.fakes.progress import FakeProgress
from tests.fakes.ranks import ThreadGroup, run_ranks

BOTH = (Placement.OUT_OF_PLACE, Placement.IN_PLACE)


SIZES = (4096, 65536)
"""Operations of the smaller size rotate over several buffers."""


def request_for(collective: Collective, **changes: object) -> SweepRequest:
    request = SweepRequest(
        collective=collective,
        sizes=(4096,),
        dtypes=(DataType.FLOAT32,),
        ops=(ReduceOp.SUM,),
        placements=BOTH if collective.in_place else BOTH[:1],
        root=0,
        sampling=Sampling(iterations=3),
        warmup=1,
        graph_replays=0,
        check=True,
    )
    return replace(request, **changes)


class ReceivedRows:
    def __init__(self) -> None:
        self.rows: list[CollectiveRow] = []
        self.labels: list[str] = []

    def begin(self, metadata: Metadata) -> None:
        raise AssertionError

    def progress(self, done: int, total: int, label: str) -> None:
        assert done < total
        self.labels.append(label)

    def row(self, row: CollectiveRow) -> None:
        self.rows.append(row)

    def end(self, report: Report) -> None:
        raise AssertionError


def identity(rank: int) -> RankIdentity:
    return RankIdentity(rank=rank, host="n0", node=0, local_rank=rank, pid=1, gpu_index=rank, gpu_bus_id=f"0000:{rank}")


def run_sweep(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    request: SweepRequest,
    wrap: Callable[[Backend, Group], Backend] = lambda backend, _group: backend,
    version: int = 22809,
    allocator: Allocator = Allocator.CUDA,
) -> tuple[Report, list[CollectiveRow], cupy_on_numpy.Nccl]:
    nccl = cupy_on_numpy.Nccl(ranks, version)
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(ranks), nccl)

    def body(group: ThreadGroup) -> tuple[Report, list[CollectiveRow]]:
        device = open_device(group.rank, ranks, "n0", Driver(version="580.1"))
        backend = NcclBackend(group, device, NcclLibrary(), allocator)
        recorder = ReceivedRows()
        identities = [identity(rank) for rank in range(ranks)]
        report = measure(request, group, wrap(backend, group), identities, recorder)
        backend.close()
        assert len(recorder.labels) == len(recorder.rows)
        return report, recorder.rows

    report, rows = run_ranks(ranks, body)[0]
    return report, rows, nccl


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_every_collective_is_right_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, ranks: int
) -> None:
    report, rows, _ = run_sweep(monkeypatch, ranks, request_for(collective, root=ranks - 1, sizes=SIZES))
    assert report.verdict is (Verdict.SKIP if ranks == 1 else Verdict.PASS)
    assert {row.busbw_gb_s is None for row in rows} == {ranks == 1}, "one rank has no bus"
    assert {ONE_RANK in (row.note or "") for row in rows} == {ranks == 1}
    assert [row.wrong for row in rows] == [0] * len(rows)
    assert {row.verified for row in rows if row.placement == "out_of_place"} == {"last"}
    assert {row.verified for row in rows if row.placement == "in_place"} <= {"repeat"}


NARROW = (DataType.INT8, DataType.UINT8, DataType.FLOAT16, DataType.BFLOAT16)


@pytest.mark.parametrize(("ranks", "dtypes", "sizes"), [(3, tuple(DataType), (4096,)), (13, NARROW, (1024,))])
def test_every_type_and_reduction_is_exact(
    monkeypatch: pytest.MonkeyPatch, ranks: int, dtypes: tuple[DataType, ...], sizes: tuple[int, ...]
) -> None:
    ops, once = tuple(ReduceOp), Sampling(iterations=1)
    request = request_for(ALLREDUCE, dtypes=dtypes, ops=ops, sizes=sizes, sampling=once, warmup=0, placements=BOTH[:1])
    report, rows, _ = run_sweep(monkeypatch, ranks, request)
    assert {(row.dtype, row.op) for row in rows} == set(product(dtypes, ops))
    assert [row for row in rows if row.wrong != 0] == []
    assert len(rows) == len(dtypes) * len(ops)
    assert report.verdict is Verdict.PASS


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("fault", "skip"),
    [(faults.wrong_block, False), (faults.swapped_blocks, False), (faults.one_bit, False), (None, True)],
    ids=["wrong block", "swapped blocks", "one bit", "stale"],
)
def test_spoiled_data_are_caught(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, fault: faults.Fault | None, skip: bool
) -> None:
    def wrap(backend: Backend, group: Group) -> Backend:
        if skip or group.rank == 0:
            return faults.FaultyBackend(backend, fault, skip=skip, timed=1 if in_place else 3)
        return backend

    for placement in request_for(collective).placements:
        in_place = placement is Placement.IN_PLACE
        request = request_for(collective, placements=(placement,), sizes=(65536,), warmup=2)
        report, rows, _ = run_sweep(monkeypatch, 3, request, wrap)
        assert report.verdict is Verdict.FAIL
        assert rows[0].wrong
        assert rows[0].verdict == "FAIL"
        assert report.findings[0].id == "wrong-data"
        assert ("on n0 (GPU" if skip else "rank 0 on n0 (GPU 0, 0000:0)") in report.findings[0].subject


def test_a_wrong_formula_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for collective in COLLECTIVES:
        report, _, _ = run_sweep(monkeypatch, 3, request_for(shifted(collective), sizes=(4096,)))
        assert report.verdict is Verdict.FAIL, collective.name


def shifted(collective: Collective) -> Collective:
    def expected(layout: Layout, rank: int, ranks: int, root: int) -> Sequence[Segment]:
        segments = collective.expected(layout, rank, ranks, root)
        return [replace(segment, start=segment.start + 4) for segment in segments]

    return replace(collective, expected=expected)


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_an_older_nccl_gets_grouped_sends_and_receives(monkeypatch: pytest.MonkeyPatch, collective: Collective) -> None:
    report, _, nccl = run_sweep(monkeypatch, 3, request_for(collective, root=1), version=22703)
    assert report.verdict is Verdict.PASS
    assert not nccl.calls & {"ncclAlltoAll", "ncclGather", "ncclScatter"}


@pytest.mark.parametrize(
    ("name", "function"), [("alltoall", "ncclAlltoAll"), ("gather", "ncclGather"), ("scatter", "ncclScatter")]
)
def test_native_calls_are_used_if_nccl_has_them(monkeypatch: pytest.MonkeyPatch, name: str, function: str) -> None:
    collective = next(each for each in COLLECTIVES if each.name == name)
    _, _, nccl = run_sweep(monkeypatch, 2, request_for(collective))
    assert nccl.calls == {function}


@pytest.mark.parametrize("replays", [1, 3])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_graphs_are_captured_and_replayed(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, replays: int
) -> None:
    report, rows, _ = run_sweep(monkeypatch, 3, request_for(collective, sizes=SIZES, graph_replays=replays))
    assert report.verdict is Verdict.PASS
    assert {row.graph for row in rows} == {replays}


@pytest.mark.parametrize("sampling", [Sampling(iterations=None, budget_seconds=0.002), Sampling(Mode.LATENCY, 12)])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_every_timed_buffer_is_verified_in_every_mode(
    monkeypatch: pytest.MonkeyPatch, collective: Collective, sampling: Sampling
) -> None:
    report, rows, _ = run_sweep(monkeypatch, 3, request_for(collective, sizes=SIZES, sampling=sampling))
    # Ranks are threads here, so one may really be late.
    assert {finding.id for finding in report.findings} <= {STRAGGLER}
    for row in rows:
        assert (row.wrong, row.verdict) == (0, "PASS")
        assert row.mode == sampling.mode
        assert (row.iterations or 0) >= sampling.least_iterations
        percentiles = [each for each in (row.p50_us, row.p95_us, row.p99_us) if each is not None]
        assert len(percentiles) == (3 if sampling.mode is Mode.LATENCY else 0)
        assert percentiles == sorted(percentiles)
        assert (row.batch_median_us is not None) == (row.batch_cv is not None) == (sampling.mode is Mode.THROUGHPUT)


@pytest.mark.parametrize("sampling", [Sampling(iterations=None, budget_seconds=0), Sampling(Mode.LATENCY, 9)])
def test_operations_before_timing_cannot_replace_timed_operations(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    class Lazy(faults.FaultyBackend):
        """A backend that skips the operations of batches, or single operations."""

        def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
            return super().batch_launches([NcclLaunch(())] * len(launches), operations)

        def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
            alone = sampling.mode is Mode.LATENCY and len(launches) == 1
            return super().bind([NcclLaunch(())] if alone else launches, graph_replays)

    request = request_for(ALLREDUCE, sampling=sampling, sizes=SIZES, placements=BOTH[:1], warmup=2)

    def wrap(backend: Backend, _group: Group) -> Backend:
        return Lazy(backend, None, timed=-1)

    report, rows, _ = run_sweep(monkeypatch, 2, request, wrap)
    assert report.verdict is Verdict.FAIL
    assert all(row.wrong for row in rows)


def test_nccl_may_allocate_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for(ALLREDUCE)
    report, _, nccl = run_sweep(monkeypatch, 2, request, allocator=Allocator.NCCL)
    assert report.verdict is Verdict.PASS
    assert "ncclMemAlloc" in nccl.calls
    assert not nccl.allocations
    with pytest.raises(UsageError, match=r"NCCL 2\.18\.3 has no ncclMemAlloc"):
        run_sweep(monkeypatch, 1, request, version=21803, allocator=Allocator.NCCL)


class Room:
    name = "room"
    buffers = 2

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes


def test_sizes_that_do_not_fit_on_one_rank_are_dropped() -> None:
    request = request_for(ALLREDUCE, sizes=(1024, 2048, 4096))

    def body(group: ThreadGroup) -> tuple[Sequence[int], Sequence[str]]:
        backend = Room(4096 if group.rank == 1 else 10**9)
        sizes, dropped = fitting_sizes(request, group, backend, identity(group.rank))  # type: ignore[arg-type]
        return sizes, [each.reason for each in dropped]

    for sizes, reasons in run_ranks(3, body):
        assert sizes == (1024, 2048)
        assert reasons == ["2 buffers of that size do not fit, because rank 1 on n0 (GPU 1, 0000:1) has 4.0 KiB free"]


def test_sizes_that_leave_a_rank_no_element_are_dropped() -> None:
    request = request_for(COLLECTIVES[1], sizes=(8, 48, 1024))

    def body(group: ThreadGroup) -> tuple[Sequence[int], Sequence[str]]:
        sizes, dropped = fitting_sizes(request, group, Room(10**9), identity(group.rank))  # type: ignore[arg-type]
        return sizes, [f"{each.size_bytes} {each.reason}" for each in dropped]

    sizes, reasons = run_ranks(3, body)[0]
    assert sizes == (48, 1024)
    assert reasons == ["8 a rank's share rounds down to 0 elements of float32 on 3 ranks"]


def test_no_remaining_size_is_an_error() -> None:
    with pytest.raises(CouldNotMeasureError, match="no size is left"):
        fitting_sizes(request_for(ALLREDUCE), AloneGroup(), Room(10), identity(0))  # type: ignore[arg-type]


def test_a_root_outside_the_job_is_refused() -> None:
    broadcast = next(collective for collective in COLLECTIVES if collective.name == "broadcast")
    check_root(broadcast, 3, 4)
    check_root(ALLREDUCE, 9, 4)
    with pytest.raises(UsageError, match="--root 4 is out of range for 4 ranks"):
        check_root(broadcast, 4, 4)


@pytest.mark.parametrize("mode", Mode)
def test_gpus_are_read_after_each_row_in_latency_mode(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(2), cupy_on_numpy.Nccl(2))
    phases: list[list[Phase]] = []

    def body(group: ThreadGroup) -> Report:
        progress = FakeProgress(group.rank)

        def look() -> GpuCondition:
            if group.rank == 0:
                phases.append(list(progress.phases[-2:]))
            return GpuCondition()

        identities = [identity(rank) for rank in range(2)]
        request = request_for(ALLREDUCE, sampling=Sampling(mode, 5), sizes=SIZES)
        device = open_device(group.rank, 2, "n0", Driver(version="580.1"))
        backend = NcclBackend(group, device, NcclLibrary(), Allocator.CUDA)
        observers = Observers(progress=progress, read_condition=look)
        report = measure(request, group, backend, identities, ReceivedRows(), observers)
        backend.close()
        return report

    run_ranks(2, body)
    expected = [[Phase.WARM_UP, Phase.OPERATION]] * 5 if mode is Mode.LATENCY else []
    assert phases == expected
