"""Computation beside a collective that ranks believe in: time that passes, beside real MPI."""

import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, sleep
from typing import Any

from gpubench.model.facts.health import GpuLoad
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.overlap import Partner, StepMarks, StepOrder, TimeSpan
from gpubench.ports.backend import Launch

OPERATION_SECONDS = 0.5e-3


class BelievedSteps:
    """Steps of a rank whose GPU computes on its own, as long as it takes alone."""

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


class BelievedLoad:
    """A GPU that draws all it may."""

    def __init__(self, _bus_id: str) -> None:
        pass

    def read(self) -> GpuLoad:
        return GpuLoad(1695, 690.0, ("sw_power_cap",))

    def close(self) -> None:
        pass


def capped(_library: Any, group: Any, asked: Mapping[str, int]) -> tuple[Any, int]:
    """In the place of a communicator: the group of it, and its cap."""
    return group, asked["max_ctas"]
