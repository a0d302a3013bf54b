"""A collective beside computation on ranks that are threads, with a fake NCCL and steps of a model."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpubench.backends import overlap as computation
from gpubench.backends.cuda import open_device
from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclError, NcclLibrary
from gpubench.backends.overlap import GpuSteps
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.record import SweepRequest
from gpubench.machine.nvml import Driver
from gpubench.measure.collective.sweep import Issue, Observers
from gpubench.measure.collective.variants import SweepVariant
from gpubench.model.facts.health import GpuLoad
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.overlap import OverlapRow, ShortestStepRow
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms import overlap
from gpubench.model.terms.operation import DataType, Placement
from gpubench.model.terms.overlap import (
    HOLD_SECONDS,
    Partner,
    StepMarks,
    StepOrder,
    TimeSpan,
    describe_cap,
    partner_operations,
)
from gpubench.model.terms.ranks import UNWATCHED
from gpubench.model.terms.statistics import Sampling
from gpubench.model.terms.verdict import WRONG_DATA, Verdict
from gpubench.ports.backend import Launch
from gpubench.training import overlap_steps
from gpubench.training.overlap_options import OverlapPlan
from gpubench.training.overlap_steps import Cap, measure_overlap
from tests.fakes import cupy_on_numpy
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.measure.collective.test_sweep import identity

GEMM, ALONE, SHARED = 1.0e-3, 2.0e-3, 2.5e-3
REQUEST = SweepRequest(
    collective=ALLREDUCE,
    sizes=(4096,),
    dtypes=(DataType.BFLOAT16,),
    placements=(Placement.OUT_OF_PLACE,),
    sampling=Sampling(iterations=2),
)
ASKED = OverlapPlan(ctas=(None, 8), seconds=0.005)


@dataclass
class ModelledSteps:
    """Steps whose times are a model's: the collective waits one operation and is a quarter slower, which costs 1 ms.

    The collectives are issued really, so that their data are there to be verified. With 8 CTAs they take twice as long.
    """

    backend: NcclBackend
    wrong: int = 0
    orders: list[StepOrder] = field(default_factory=list)
    prepared: list[tuple[Partner, int, DataType]] = field(default_factory=list)
    issue: Callable[[Launch], object] | None = None

    def prepare(self, partner: Partner, gemm_side: int, dtype: DataType) -> None:
        self.prepared.append((partner, gemm_side, dtype))

    def run(
        self,
        order: StepOrder,
        partner: Partner,
        collectives: Sequence[Launch],
        operations: int,
        steps: int,
        look: Callable[[int], object],
    ) -> list[StepMarks]:
        self.orders.append(order)
        marks, at = list[StepMarks](), 0.0
        assert collectives or order is StepOrder.COMPUTATION
        for number in range(steps):
            if order is not StepOrder.COMPUTATION:
                (self.issue or self.backend.issue)(collectives[number % len(collectives)])
            computed, communicated = operations * GEMM, ALONE
            first, begins = 0.0, 0.0
            if order is StepOrder.COMPUTATION_FIRST:
                computed, communicated = computed + 1e-3, GEMM + SHARED
            elif order is StepOrder.COMMUNICATION_FIRST:
                computed, communicated, first = computed + 1e-3, SHARED, HOLD_SECONDS
            computation = TimeSpan(at + first, at + first + computed)
            communication = TimeSpan(at + begins, at + begins + communicated)
            marks.append(
                StepMarks(
                    None if order is StepOrder.COMMUNICATION else computation,
                    None if order is StepOrder.COMPUTATION else communication,
                )
            )
            at = marks[-1].end
            look(1)
        return marks

    def partner_wrong(self, _partner: Partner) -> int:
        return self.wrong


@dataclass
class Received:
    rows: list[OverlapRow] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def begin(self, _metadata: object) -> None:
        raise AssertionError

    def progress(self, done: int, total: int, label: str) -> None:
        assert done < total
        self.labels.append(label)

    def row(self, row: OverlapRow) -> None:
        self.rows.append(row)

    def end(self, _report: object) -> None:
        raise AssertionError


def cap_of(ctas: int, group: ThreadGroup, backend: NcclBackend, *, refused: bool) -> Cap:
    def open_() -> Issue:
        if refused:
            raise NcclError("invalid argument")
        return partial(ALLREDUCE.issue, backend.open(group))

    variant = SweepVariant(
        setting=describe_cap(ctas), backend=backend, open=open_, refusals=(NcclError,), logs_choices=True
    )
    return Cap(ctas, variant, "configuration")


def run(
    monkeypatch: pytest.MonkeyPatch,
    asked: OverlapPlan = ASKED,
    request: SweepRequest = REQUEST,
    change: Callable[[ModelledSteps, int], object] = lambda _steps, _rank: None,
    *,
    refused: bool = False,
    operations: int | None = 4,
) -> tuple[Report, list[OverlapRow], ModelledSteps]:
    monkeypatch.setattr(overlap_steps, "_SECONDS_A_BATCH", 0.012)
    if operations is not None:
        monkeypatch.setattr(overlap, "partner_operations", lambda *_: operations)
    nccl, runtime = cupy_on_numpy.Nccl(2), cupy_on_numpy.Runtime(2)
    cupy_on_numpy.install(monkeypatch, runtime, nccl)

    def body(group: ThreadGroup) -> tuple[Report, list[OverlapRow], ModelledSteps]:
        device = open_device(group.rank, 2, "n0", Driver(version="580.1"))
        backend = NcclBackend(group, device, NcclLibrary())
        steps, received = ModelledSteps(backend), Received()
        change(steps, group.rank)
        caps = [Cap(None, SweepVariant(setting=None, backend=backend))]
        caps += [cap_of(cta, group, backend, refused=refused) for cta in asked.ctas if cta is not None]
        load = GpuLoad(1755, 690.0, ("sw_power_cap",))
        observers = Observers(progress=UNWATCHED)
        identities = [identity(rank) for rank in range(2)]
        report = measure_overlap(
            request, asked, cast("Any", group), caps, identities, received, observers, steps, lambda: load
        )
        backend.close()
        return report, received.rows, steps

    return run_ranks(2, body)[0]


def test_every_size_has_a_row_under_every_cap_with_the_parts_of_its_slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows, steps = run(monkeypatch, request=replace(REQUEST, sizes=(1024, 4096)))
    assert report.verdict is Verdict.PASS
    assert [(row.size_bytes, row.ctas) for row in rows] == [(1024, None), (1024, 8), (4096, None), (4096, 8)]
    assert [row.capped_by for row in rows] == [None, "configuration"] * 2
    assert {(row.wrong, row.verified, row.verdict, row.origin) for row in rows} == {(0, "last", "PASS", "measured")}
    assert {(row.sm_clock_mhz, row.power_w, row.throttled_by) for row in rows} == {(1755, 690.0, "sw_power_cap")}
    assert set(steps.orders) == set(StepOrder)
    assert len(report.rows(ShortestStepRow)) == 2
    for row in rows:
        assert row.partner_count == 4
        assert row.partner_alone_us == pytest.approx(4000)
        assert row.communication_alone_us == pytest.approx(2000)
        assert row.communication_slowdown == pytest.approx(1.75)
        assert row.waiting_slowdown == pytest.approx(0.5)
        assert row.sharing_slowdown == pytest.approx(0.25)
        assert row.compute_slowdown == pytest.approx(3.5 / 2.5)
        assert row.step_us == pytest.approx(5000)
        assert row.hidden_share == pytest.approx(0.5)


def test_the_steps_of_a_row_follow_from_the_collective_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows, _ = run(monkeypatch, request=replace(REQUEST, sizes=(1024, 4096)), operations=None)
    alone = {row.size_bytes: row.time_us / 1e6 for row in report.rows(CollectiveRow)}
    assert alone.keys() == {1024, 4096}
    for row in rows:
        assert row.partner_count == partner_operations(alone[row.size_bytes], GEMM) >= 2


def test_caps_without_nccl_s_own_number_are_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows, _ = run(monkeypatch, dataclasses.replace(ASKED, ctas=(8,)))
    assert {row.ctas for row in rows} == {8}
    assert report.rows(ShortestStepRow) == []


def test_a_cap_that_nccl_refuses_is_left_out_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows, _ = run(monkeypatch, refused=True)
    assert {row.ctas for row in rows} == {None}
    (refused,) = report.rows(RefusedRow)
    assert (refused.setting, refused.reason) == ("8 CTAs", "invalid argument")


def test_wrong_data_beside_computation_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses(steps: ModelledSteps, _rank: int) -> None:
        together = StepOrder.COMPUTATION_FIRST
        steps.issue = lambda launch: None if steps.orders[-1] is together else steps.backend.issue(launch)

    report, rows, _ = run(monkeypatch, change=loses)
    assert {row.verdict for row in rows} == {"FAIL"}
    assert {row.wrong for row in rows} == {4096}
    assert report.verdict is Verdict.FAIL
    assert report.findings[0].id == WRONG_DATA
    assert report.rows(ShortestStepRow) == [], "a step that does not do its work is none"


def test_a_partner_s_wrong_results_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(steps: ModelledSteps, rank: int) -> None:
        steps.wrong = 3 if rank == 1 else 0

    report, rows, _ = run(monkeypatch, change=change)
    assert {row.wrong for row in rows} == {3}
    assert "3 of the wrong elements are from the partner" in str(rows[0].note)
    assert report.verdict is Verdict.FAIL


def test_without_a_check_nothing_is_said_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows, _ = run(monkeypatch, request=replace(REQUEST, check=False))
    assert {(row.wrong, row.verified, row.verdict) for row in rows} == {(None, "no", None)}


def test_real_steps_on_a_fake_gpu_make_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose collective is a copy: everything that is enqueued on streams, and every partner's results."""
    monkeypatch.setattr(overlap_steps, "_SECONDS_A_BATCH", 0.002)
    monkeypatch.setattr(overlap, "partner_operations", lambda *_: 3)
    monkeypatch.setattr(cupy_on_numpy, "COLLECTIVE_US", 150.0)
    monkeypatch.setattr(computation, "COPY_BYTES", 4096)
    monkeypatch.setattr(computation, "CHAIN_BYTES", 4096)
    runtime = cupy_on_numpy.Runtime(1)
    cupy_on_numpy.install(monkeypatch, runtime, cupy_on_numpy.Nccl(1))
    device = open_device(0, 1, "n0", Driver(version="580.1"))
    backend = NcclBackend(AloneGroup(), device, NcclLibrary())
    steps, received = GpuSteps(device, backend), Received()
    asked = dataclasses.replace(ASKED, ctas=(None,), partners=tuple(Partner), gemm_side=64, seconds=0.001)
    for each in asked.partners:
        steps.prepare(each, asked.gemm_side, DataType.BFLOAT16)
    caps = [Cap(None, SweepVariant(setting=None, backend=backend))]
    request = replace(REQUEST, sizes=(1024, 4096))
    report = measure_overlap(
        request, asked, AloneGroup(), caps, [identity(0)], received, Observers(progress=UNWATCHED), steps, GpuLoad
    )
    backend.close()
    assert not runtime.allocations
    assert report.verdict is Verdict.SKIP, "one rank: there is no communication"
    assert [(row.partner, row.size_bytes) for row in received.rows] == [
        (partner, size) for partner in Partner for size in (1024, 4096)
    ]
    assert {(row.wrong, row.verified) for row in received.rows} == {(0, "last")}
    of_gemms = received.rows[0]
    assert of_gemms.communication_alone_us == pytest.approx(150)
    assert of_gemms.communication_first_us == pytest.approx(150)
    assert of_gemms.waiting_slowdown == pytest.approx(0)
    assert of_gemms.sharing_slowdown == pytest.approx(0)
    assert of_gemms.partner_alone_us == pytest.approx(of_gemms.partner_count * cupy_on_numpy.GEMM_US)
