"""gpubench overlap on fake H200s (fake_gpus.py) that sleep instead of computing: `python -m tests.mpi.fake_overlap`."""

import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, sleep
from typing import Any

from gpubench.__main__ import main
from gpubench.model.facts.health import GpuLoad
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.overlap import Partner, StepMarks, StepOrder, TimeSpan
from gpubench.ports.backend import Launch
from gpubench.training import overlap_rank  # noqa: F401 - it imports what is replaced
from tests.fakes.stand_in import stand_in
from tests.mpi import fake_gpus

OPERATION_SECONDS = 0.5e-3


class FakeSteps:
    """Steps in which computation takes as long as alone."""

    def __init__(self, _device: object, _backend: object) -> None:
        self.prepared: list[Partner] = []

    def prepare(self, partner: Partner, _gemm_side: int, _dtype: DataType) -> None:
        self.prepared.append(partner)

    def run(
        self,
        order: StepOrder,
        partner: Partner,
        collectives: Sequence[Launch],
        operations: int,
        steps: int,
        look: Callable[[int], object],
    ) -> list[StepMarks]:
        assert partner in self.prepared
        marks = []
        for number in range(steps):
            begin = perf_counter()
            computation = TimeSpan(begin, begin + operations * OPERATION_SECONDS)
            communication = None if order is StepOrder.COMPUTATION else TimeSpan(begin, begin)
            if order is not StepOrder.COMPUTATION and not self._loses(order):
                self._hang(order)
                collectives[number % len(collectives)]()
                communication = TimeSpan(begin, perf_counter())
            if order is StepOrder.COMMUNICATION:
                marks.append(StepMarks(None, communication))
            else:
                sleep(max(0.0, computation.end - perf_counter()))
                marks.append(StepMarks(computation, communication))
            look(1)
        return marks

    def _loses(self, order: StepOrder) -> bool:
        return order is StepOrder.COMPUTATION_FIRST and bool(os.environ.get("GPUBENCH_TEST_SPOILED_STEPS"))

    def _hang(self, order: StepOrder) -> None:
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMIX_RANK"))
        if order is StepOrder.COMPUTATION_FIRST and rank == os.environ.get("GPUBENCH_TEST_STUCK_STEPS"):
            sleep(60)

    def partner_wrong(self, _partner: Partner) -> int:
        return 0


class FakeLoad:
    """A GPU at its power limit."""

    def __init__(self, _bus_id: str) -> None:
        pass

    def read(self) -> GpuLoad:
        return GpuLoad(1695, 690.0, ("sw_power_cap",))

    def close(self) -> None:
        pass


def capped(_library: Any, group: Any, asked: Mapping[str, int]) -> tuple[Any, int]:
    """Return the group in place of its communicator, and the cap."""
    return group, asked["max_ctas"]


def install() -> None:
    fake_gpus.install()
    fake_gpus.FakeLauncher.program = "tests.mpi.fake_overlap"
    fakes = {
        "gpubench.jobs.rank.usable_driver": lambda _for_what: fake_gpus.DRIVER,
        "gpubench.backends.overlap.GpuSteps": FakeSteps,
        "gpubench.machine.traffic.NvmlLoad": FakeLoad,
        "gpubench.backends.nccl.communicator.GroupCommunicator": capped,
        "gpubench.training.overlap_steps._SECONDS_A_BATCH": OPERATION_SECONDS,
        "gpubench.training.overlap_steps._MOST_SETTLING_SECONDS": OPERATION_SECONDS,
    }
    for path, fake in fakes.items():
        stand_in(path, fake)


if __name__ == "__main__":
    install()
    main()
