"""Computation concurrent with a collective on one GPU, in steps on two streams.

A batch of steps is enqueued in advance. Each step waits on the GPU for the previous step on both streams, so the host
is not involved.
"""

from collections import deque
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import cycle
from typing import Any, NamedTuple, Protocol

from gpubench.backends.copies import ANY_DIRECTION
from gpubench.backends.cuda import CudaDevice
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.errors import CouldNotMeasureError
from gpubench.model.terms.operation import Block, DataPattern, DataType, ReduceOp
from gpubench.model.terms.overlap import (
    CHAIN_BYTES,
    CHAIN_KERNELS,
    COPY_BYTES,
    HOLD_SECONDS,
    Partner,
    StepMarks,
    StepOrder,
    TimeSpan,
    gemm_type,
)
from gpubench.ports.backend import Launch

_WORD_BYTES = 4
_THREADS = 256

_CUDA_TYPES = {DataType.FLOAT16: 2, DataType.BFLOAT16: 14}  # cudaDataType in library_types.h
_COMPUTE_IN_FLOAT32, _DEFAULT_ALGORITHM, _NOT_TRANSPOSED = 68, -1, 0
"""CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT and CUBLAS_OP_N in cublas_api.h."""

_FACTOR, _TERM, _WORDS = 1664525, 1013904223, 2**32  # Constants of the generator in overlap.cu (Numerical Recipes)


class PartnerWork(Protocol):
    """A computation that runs concurrently with a collective, on the current stream."""

    def issue(self) -> None:
        """Enqueue one operation."""

    def wrong(self) -> int:
        """Return how many elements differ from the expected result. The stream must be idle."""


def _open_partner(partner: Partner, device: CudaDevice, stream: Any, gemm_side: int, dtype: DataType) -> PartnerWork:
    """Allocate memory for a computation, and compute its expected result."""
    if partner is Partner.GEMM:
        return GemmWork(device, gemm_side, gemm_type(dtype))
    if partner is Partner.COPY:
        return CopyWork(device, stream)
    return ChainWork(device, stream)


class GemmWork:
    """C = A × B on Tensor Cores: n × n matrices of small integers in 16 bits, accumulated in float32."""

    def __init__(self, device: CudaDevice, side: int, dtype: DataType) -> None:
        import numpy
        from cupy_backends.cuda.libs import cublas

        self._cupy = device.cupy
        self._side, self._type = side, _CUDA_TYPES[dtype]
        self._gemm: Any = cublas.gemmEx
        self._one, self._zero = numpy.ones(1, "float32"), numpy.zeros(1, "float32")
        count, data = side * side, DataPattern(dtype, ReduceOp.SUM, 2)
        self._memories = [device.allocate(count * dtype.size_bytes) for _ in range(3)]
        for number, memory in enumerate(self._memories[:2]):
            memory.fill_sent(data, Block(number, 1, count, 0, count), 0)
        self._result = self._memories[2].array(0, count, "uint16")
        self._result[:] = 0
        try:
            self.issue()
        except cublas.CUBLASError as error:
            raise CouldNotMeasureError(
                f"cuBLAS cannot multiply {dtype} matrices of {side} × {side} on this GPU: {error}",
                expected="a type of its Tensor Cores: bfloat16 (compute capability 8.0 or newer) or float16 (7.0)",
                next_step="--dtype float16, or --partner copy",
            ) from error
        self._alone = self._result.copy()

    def issue(self) -> None:
        first, second, result = (memory.address for memory in self._memories)
        side, kind = self._side, self._type
        self._gemm(
            *(self._cupy.cuda.device.get_cublas_handle(), _NOT_TRANSPOSED, _NOT_TRANSPOSED, side, side, side),
            *(self._one.ctypes.data, first, kind, side, second, kind, side),
            *(self._zero.ctypes.data, result, kind, side, _COMPUTE_IN_FLOAT32, _DEFAULT_ALGORITHM),
        )

    def wrong(self) -> int:
        # Sums of products of integers up to 15 are exact in float32, in any order and for all sizes used here.
        return int(self._cupy.count_nonzero(self._result != self._alone))


class CopyWork:
    """A CUDA copy within one GPU, limited by memory bandwidth. On an H200, CUDA uses a kernel on all SMs."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        cupy = device.cupy
        self._cupy, self._stream = cupy, stream
        self._source, self._destination = device.allocate(COPY_BYTES), device.allocate(COPY_BYTES)
        count = COPY_BYTES // _WORD_BYTES
        self._words = [memory.array(0, count, "uint32") for memory in (self._source, self._destination)]
        self._words[0][:] = cupy.arange(count, dtype="uint32")
        self._words[1][:] = 0
        self.issue()

    def issue(self) -> None:
        copy = self._cupy.cuda.runtime.memcpyAsync
        copy(self._destination.address, self._source.address, COPY_BYTES, ANY_DIRECTION, self._stream.ptr)

    def wrong(self) -> int:
        return int(self._cupy.count_nonzero(self._words[0] != self._words[1]))


class ChainWork:
    """A captured graph of small kernels. Each kernel needs the result of the previous one."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        import numpy

        self._cupy, self._stream = device.cupy, stream
        count = CHAIN_BYTES // _WORD_BYTES
        module = _load_kernels(device.cupy)
        kernel = module.get_function("next_value")
        self._memory = device.allocate(CHAIN_BYTES)
        self._values = self._memory.array(0, count, "uint32")
        self._first = device.cupy.arange(count, dtype="uint32")
        self._values[:] = self._first
        arguments = numpy.uint64(self._memory.address), numpy.uint32(count)
        self._operations = 0

        def chain() -> None:
            for _ in range(CHAIN_KERNELS):
                kernel((-(-count // _THREADS),), (_THREADS,), arguments)

        # CUDA loads a kernel at its first launch, which must not happen during a capture.
        kernel((1,), (_THREADS,), (numpy.uint64(self._memory.address), numpy.uint32(0)))
        stream.synchronize()
        stream.begin_capture(device.cupy.cuda.runtime.streamCaptureModeThreadLocal)
        chain()
        self._graph = stream.end_capture()
        self._graph.upload(stream)

    def issue(self) -> None:
        self._graph.launch(self._stream)
        self._operations += 1

    def wrong(self) -> int:
        factor, term = steps_of_generator(self._operations * CHAIN_KERNELS)
        number = self._cupy.uint32
        return int(self._cupy.count_nonzero(self._values != self._first * number(factor) + number(term)))


def _load_kernels(cupy: Any) -> Any:
    return cupy.RawModule(code=files("gpubench.backends").joinpath("overlap.cu").read_text())


def steps_of_generator(steps: int) -> tuple[int, int]:
    """Return the factor and term that advance the random generator by `steps` steps, modulo 2**32."""
    factor, term, base_factor, base_term = 1, 0, _FACTOR, _TERM
    while steps:
        if steps & 1:
            factor, term = factor * base_factor % _WORDS, (term * base_factor + base_term) % _WORDS
        base_factor, base_term = base_factor * base_factor % _WORDS, (base_factor + 1) * base_term % _WORDS
        steps >>= 1
    return factor, term


_NANOSECONDS = 1e9
_MILLISECONDS = 1e-3


class _Events(NamedTuple):
    computation: tuple[Any, Any] | None
    communication: tuple[Any, Any] | None

    @property
    def end(self) -> Any:
        return (self.communication or self.computation or (None, None))[1]


class GpuSteps:
    """The steps of one rank. Collectives run on the backend's stream, and the computation on a second stream."""

    def __init__(self, device: CudaDevice, backend: NcclBackend) -> None:
        import numpy

        self._device, self._backend = device, backend
        cuda = device.cupy.cuda
        self._elapsed: Callable[[Any, Any], float] = cuda.get_elapsed_time
        self._event = cuda.Event
        self._compute = cuda.Stream(non_blocking=True)
        self._works: dict[Partner, PartnerWork] = {}
        hold = _load_kernels(device.cupy).get_function("hold_back")
        nanoseconds = numpy.uint64(round(HOLD_SECONDS * _NANOSECONDS))
        self._hold: Callable[[], object] = lambda: hold((1,), (1,), (nanoseconds,))

    def prepare(self, partner: Partner, gemm_side: int, dtype: DataType) -> None:
        with self._compute:
            self._works[partner] = _open_partner(partner, self._device, self._compute, gemm_side, dtype)
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
        next_collective, events = cycle(collectives or (None,)), list[_Events]()
        with self._compute:
            for _ in range(steps):
                before = events[-1] if events else None
                events.append(self._enqueue(order, self._works[partner], next(next_collective), operations, before))
        waiting = deque(event.end for event in events)

        def report() -> None:
            before = len(waiting)
            while waiting and waiting[0].done:
                waiting.popleft()
            look(before - len(waiting))

        for stream in (self._compute, self._device.stream):
            self._backend.wait_until_idle(stream, report)
        report()
        return self._marks(events)

    def partner_wrong(self, partner: Partner) -> int:
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
        """Enqueue computations between two events. Call `then` after the first computation."""
        start, end = begin or self._event(), self._event()
        self._compute.record(start)
        work.issue()
        then()
        for _ in range(operations - 1):
            work.issue()
        self._compute.record(end)
        return start, end

    def _communicate(self, collective: Launch) -> tuple[Any, Any]:
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
            return TimeSpan(*(self._elapsed(first, event) * _MILLISECONDS for event in pair))

        return [StepMarks(interval(event.computation), interval(event.communication)) for event in events]
