"""Steps of a collective and computation on two streams of a GPU, clocked by events on both.

An event costs no SM, so that none is taken from what is clocked. Each step begins when the one before it is done on
both streams, without the host: computation first waits for the collective before, and the collective for the event with
which computation begins. A whole batch is enqueued ahead.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from gpubench.hardware.cuda.device import CudaDevice
from gpubench.hardware.nccl.backend import NcclBackend
from gpubench.hardware.overlap.partners import PartnerWork, load_kernels, open_partner
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.overlap.asked import Partner
from gpubench.model.terms.overlap.steps import HOLD_SECONDS, StepMarks, StepOrder, TimeSpan
from gpubench.ports.launch import Launch

_NANOSECONDS = 1e9
_MILLISECONDS = 1e-3


class _Events(NamedTuple):
    """The events of a step: begin and end of computation and of the collective."""

    computation: tuple[Any, Any] | None
    communication: tuple[Any, Any] | None

    @property
    def end(self) -> Any:
        """One that ends the step, or nearly."""
        return (self.communication or self.computation or (None, None))[1]


class GpuSteps:
    """The steps of one rank: collectives on the stream of a backend, computation on one beside it."""

    def __init__(self, device: CudaDevice, backend: NcclBackend) -> None:
        import numpy

        self._device, self._backend = device, backend
        cuda = device.cupy.cuda
        self._elapsed: Callable[[Any, Any], float] = cuda.get_elapsed_time
        self._event = cuda.Event
        self._compute = cuda.Stream(non_blocking=True)
        self._works: dict[Partner, PartnerWork] = {}
        hold = load_kernels(device.cupy).get_function("hold_back")
        nanoseconds = numpy.uint64(round(HOLD_SECONDS * _NANOSECONDS))
        self._hold: Callable[[], object] = lambda: hold((1,), (1,), (nanoseconds,))

    def prepare(self, partner: Partner, gemm_side: int, dtype: DataType) -> None:
        """Take the memory of a partner, and compute once what its results are held against."""
        with self._compute:
            self._works[partner] = open_partner(partner, self._device, self._compute, gemm_side, dtype)
            self._hold()
            self._compute.synchronize()

    def run(
        self,
        order: StepOrder,
        partner: Partner,
        collectives: Sequence[Launch],
        operations: int,
        steps: int,
        look: Callable[[int], object],
    ) -> list[StepMarks]:
        """Enqueue all steps, and wait for them."""
        in_turn, events = cycle(collectives or (None,)), list[_Events]()
        with self._compute:
            for _ in range(steps):
                before = events[-1] if events else None
                events.append(self._enqueue(order, self._works[partner], next(in_turn), operations, before))
        waiting = deque(each.end for each in events)

        def report() -> None:
            before = len(waiting)
            while waiting and waiting[0].done:
                waiting.popleft()
            look(before - len(waiting))

        for stream in (self._compute, self._device.stream):
            self._backend.wait_for(stream, report)
        report()
        return self._marks(events)

    def partner_wrong(self, partner: Partner) -> int:
        """Wrong elements of its results."""
        with self._compute:
            return self._works[partner].wrong()

    def _enqueue(
        self, order: StepOrder, work: PartnerWork, collective: Launch | None, operations: int, before: _Events | None
    ) -> _Events:
        if order is StepOrder.COMPUTATION or collective is None:
            return _Events(self._compute_between(work, operations, lambda: None), None)
        if order is StepOrder.COMMUNICATION:
            return _Events(None, self._communicate(collective))
        if before is not None and before.communication is not None:
            self._compute.wait_event(before.communication[1])
        if order is StepOrder.COMPUTATION_FIRST:
            communication: list[tuple[Any, Any]] = []
            begin = self._event()

            def communicate() -> None:
                self._device.stream.wait_event(begin)
                communication.append(self._communicate(collective))

            return _Events(self._compute_between(work, operations, communicate, begin), communication[0])
        if before is not None and before.computation is not None:
            self._device.stream.wait_event(before.computation[1])
        marks = self._communicate(collective)
        self._compute.wait_event(marks[0])
        self._hold()
        return _Events(self._compute_between(work, operations, lambda: None), marks)

    def _compute_between(
        self, work: PartnerWork, operations: int, then: Callable[[], object], begin: Any = None
    ) -> tuple[Any, Any]:
        """Operations with an event before and one behind; `then` enqueues what comes once the first is there."""
        start, end = begin or self._event(), self._event()
        self._compute.record(start)
        work.issue()
        then()
        for _ in range(operations - 1):
            work.issue()
        self._compute.record(end)
        return start, end

    def _communicate(self, collective: Launch) -> tuple[Any, Any]:
        """A collective with an event before and one behind."""
        start, end = self._event(), self._event()
        self._device.stream.record(start)
        self._backend.issue(collective)
        self._device.stream.record(end)
        return start, end

    def _marks(self, events: Sequence[_Events]) -> list[StepMarks]:
        first = (events[0].computation or events[0].communication or (None, None))[0]

        def interval(pair: tuple[Any, Any] | None) -> TimeSpan | None:
            if pair is None:
                return None
            return TimeSpan(*(self._elapsed(first, each) * _MILLISECONDS for each in pair))

        return [StepMarks(interval(each.computation), interval(each.communication)) for each in events]
