"""Computation concurrent with a collective on a fake GPU: the order of operations, and wrong results."""

import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest

from gpubench.backends import overlap
from gpubench.backends.cuda import AbortedError, open_device
from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.overlap import GpuSteps, steps_of_generator
from gpubench.errors import CouldNotMeasureError
from gpubench.machine.nvml import Driver
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.overlap import HOLD_SECONDS, Partner, StepMarks, StepOrder, TimeSpan
from gpubench.ports.backend import Region
from tests.fakes import cupy_on_numpy

GEMM_SECONDS = cupy_on_numpy.GEMM_US * 1e-6
NEAR = 1e-9


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(overlap, "COPY_BYTES", 4096)
        monkeypatch.setattr(overlap, "CHAIN_BYTES", 4096)
        self.runtime = cupy_on_numpy.Runtime(1)
        self.nccl = cupy_on_numpy.Nccl(1)
        cupy_on_numpy.install(monkeypatch, self.runtime, self.nccl)
        self.device = open_device(0, 1, "n0", Driver(version="580.1"))
        self.backend = NcclBackend(AloneGroup(), self.device, NcclLibrary())
        self.steps = GpuSteps(self.device, self.backend)
        region = Region(self.backend.allocate(64), 0)
        self.launch = self.backend.calls.all_reduce(region, region, 16, DataType.FLOAT32, ReduceOp.SUM)
        self.completed = 0

    def run(
        self, order: StepOrder, partner: Partner = Partner.GEMM, operations: int = 3, steps: int = 4
    ) -> list[StepMarks]:
        def look(completed: int) -> None:
            self.completed += completed

        collectives = [] if order is StepOrder.COMPUTATION else [self.launch]
        return self.steps.run(order, partner, collectives, operations, steps, look)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.backend.close()
    assert not made.runtime.allocations


def intervals(marks: list[StepMarks]) -> list[tuple[TimeSpan, TimeSpan]]:
    return [(each.computation, each.communication) for each in marks if each.computation and each.communication]


@pytest.mark.parametrize("dtype", [DataType.BFLOAT16, DataType.FLOAT16, DataType.FLOAT32])
def test_a_collective_may_begin_when_the_first_operation_does(bench: Bench, dtype: DataType) -> None:
    bench.steps.prepare(Partner.GEMM, 64, dtype)
    found = intervals(bench.run(StepOrder.COMPUTATION_FIRST))
    assert len(found) == bench.completed == 4
    for computation, communication in found:
        assert computation.seconds == pytest.approx(3 * GEMM_SECONDS, abs=NEAR)
        assert communication.start == pytest.approx(computation.start, abs=NEAR)
    for (earlier, communicated), (later, _) in pairwise(found):
        assert later.start >= max(earlier.end, communicated.end) - NEAR


def test_computation_is_held_back_where_the_collective_comes_first(bench: Bench) -> None:
    bench.steps.prepare(Partner.GEMM, 64, DataType.BFLOAT16)
    found = intervals(bench.run(StepOrder.COMMUNICATION_FIRST))
    for computation, communication in found:
        assert computation.start >= communication.start + HOLD_SECONDS - NEAR
        assert computation.seconds == pytest.approx(3 * GEMM_SECONDS, abs=NEAR)
    for (earlier, _), (_, later) in pairwise(found):
        assert later.start >= earlier.end - NEAR


def test_alone_is_alone(bench: Bench) -> None:
    bench.steps.prepare(Partner.GEMM, 64, DataType.BFLOAT16)
    assert all(each.communication is None for each in bench.run(StepOrder.COMPUTATION))
    assert "ncclAllReduce" not in bench.nccl.calls
    assert all(each.computation is None for each in bench.run(StepOrder.COMMUNICATION))
    assert "ncclAllReduce" in bench.nccl.calls


@pytest.mark.parametrize("partner", Partner)
def test_every_partner_gives_beside_a_collective_what_it_gives_alone(bench: Bench, partner: Partner) -> None:
    bench.steps.prepare(partner, 64, DataType.BFLOAT16)
    bench.run(StepOrder.COMPUTATION_FIRST, partner, operations=2, steps=3)
    assert bench.steps.partner_wrong(partner) == 0


@pytest.mark.parametrize("partner", Partner)
def test_a_wrong_result_is_seen(bench: Bench, partner: Partner) -> None:
    before = set(bench.runtime.allocations)
    bench.steps.prepare(partner, 64, DataType.BFLOAT16)
    bench.run(StepOrder.COMPUTATION_FIRST, partner)
    *_, last = (each for each in bench.runtime.allocations if each not in before)
    cupy_on_numpy.view(last, 16, "uint8")[4] ^= 0x40
    assert bench.steps.partner_wrong(partner) == 1


def test_a_gpu_without_bfloat16_is_told_what_to_type(bench: Bench) -> None:
    cublas = sys.modules["cupy_backends.cuda.libs.cublas"]
    cublas.lacks_bfloat16 = True  # type: ignore[attr-defined]
    with pytest.raises(CouldNotMeasureError, match="cannot multiply bfloat16") as caught:
        bench.steps.prepare(Partner.GEMM, 64, DataType.BFLOAT16)
    assert "--dtype float16" in str(caught.value.next_step)
    bench.steps.prepare(Partner.GEMM, 64, DataType.FLOAT16)


def test_an_abort_ends_the_wait(bench: Bench) -> None:
    bench.steps.prepare(Partner.GEMM, 64, DataType.BFLOAT16)
    bench.backend.abort()
    with pytest.raises(AbortedError):
        bench.run(StepOrder.COMPUTATION_FIRST)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 64, 1000])
def test_steps_of_the_generator_have_a_closed_form(steps: int) -> None:
    value = 12345
    for _ in range(steps):
        value = (value * 1664525 + 1013904223) % 2**32
    factor, term = steps_of_generator(steps)
    assert (12345 * factor + term) % 2**32 == value
