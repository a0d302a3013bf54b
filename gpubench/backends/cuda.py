"""One GPU through CuPy: device selection, memory with test data, CUDA graphs, and gates that delay a stream."""

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from itertools import islice
from time import perf_counter
from typing import Any

from msgspec import Struct, field

from gpubench import errors
from gpubench.backends.timing import (
    SECONDS_BETWEEN_MARKS,
    MarkedLaunch,
    Marks,
    Pace,
    join_launches,
    no_garbage_collection,
)
from gpubench.machine.drivers import (
    MPS_ENABLED,
    CudaUnavailableError,
    device_uuid,
    format_version,
    load_cuda,
    read_attribute,
)
from gpubench.machine.host import is_mps_running
from gpubench.machine.nvml import Driver
from gpubench.model.terms.operation import WORD, Block, DataPattern, DataType, ReduceOp
from gpubench.model.terms.ranks import Progress
from gpubench.ports.backend import Array, BatchedLaunch, Launch, Memory
from gpubench.ports.group import Group

_THREADS = 256
_MOST_BLOCKS = 4096
_MOVE = -1
_REDUCTION = -1

_TYPES = {dtype: number for number, dtype in enumerate(DataType)}
_OPERATIONS = {op: number for number, op in enumerate(ReduceOp)}


class PatternKernels:
    """The kernels in pattern.cu on one stream. NVRTC compiles them once, and CuPy caches them on disk."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        import numpy

        self.cupy = cupy
        self.stream = stream
        self._numpy = numpy
        module = cupy.RawModule(code=files("gpubench.backends").joinpath("pattern.cu").read_text())
        self._fill = module.get_function("fill_sent")
        self._count = module.get_function("count_wrong")

    def fill(self, address: int, data: DataPattern, block: Block, rank: int) -> None:
        """Write the data that `rank` sends into a block of the memory at `address`."""
        self._launch(self._fill, address, data, block, rank)

    def count(self, address: int, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Return the number of wrong elements in blocks of the memory at `address`."""
        total = self.cupy.zeros(1, "uint64")
        for block, source in blocks:
            self._launch(self._count, address, data, block, _REDUCTION if source is None else source, total)
        return int(total.get()[0])

    def _launch(self, kernel: Any, address: int, data: DataPattern, block: Block, rank: int, *more: Any) -> None:
        number, width = self._numpy, data.dtype.size_bytes
        pattern = (
            _TYPES[data.dtype],
            _MOVE if data.op is None else _OPERATIONS[data.op],
            data.ranks,
            data.contributors,
            data.lowest,
            data.neutral,
            data.tolerance_ulp,
            width,
        )
        arguments = (
            *(number.int32(value) for value in pattern),
            number.uint64(address + block.offset * width),
            number.int64(block.stride),
            number.int64(block.count),
            number.uint32(block.start & WORD),
            number.uint32(block.row),
            number.int32(block.buffers),
            number.int32(rank),
            *more,
        )
        grid = (min(_MOST_BLOCKS, -(-block.count // _THREADS)), min(_MOST_BLOCKS, block.buffers))
        kernel(grid, (_THREADS,), arguments)


class CudaMemory:
    """GPU memory outside of CuPy's pool, without peer mappings. Kernels on the device's stream fill and check it."""

    def __init__(self, kernels: PatternKernels, address: int, size_bytes: int, free: Callable[[int], object]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._kernels = kernels
        self._free = free

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        cupy = self._kernels.cupy
        memory = cupy.cuda.UnownedMemory(self.address, self.size_bytes, self)
        return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, offset_bytes))

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        self._kernels.fill(self.address, data, block, rank)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        self._kernels.cupy.cuda.runtime.memsetAsync(self.address, value, size_bytes, self._kernels.stream.ptr)

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        return self._kernels.count(self.address, data, blocks)

    def free(self) -> None:
        self._free(self.address)


_HEADROOM_BYTES = 2 * 2**30  # Left for other processes, and for the buffers that NCCL allocates in the first collective
_REFUSED_BY_MPS = ("cudaErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE", "cudaErrorMps", "CUDA_ERROR_MPS")
"""Errors that a process gets if the MPS server refuses it as a client.

The first two also occur if another process uses a GPU in exclusive compute mode.
"""


class GpuIdentity(Struct, frozen=True):
    """Identity of a GPU. `index` is CUDA's index in this process. `mps` is true if the process is an MPS client."""

    name: str
    index: int
    bus_id: str
    uuid: str
    mps: bool = False


class CudaDevice:
    """The GPU of this rank and a non-blocking stream. The constructor makes both current."""

    def __init__(self, cupy: Any, index: int, driver: Driver) -> None:
        self.cupy = cupy
        self._driver = driver
        self._runtime = cupy.cuda.runtime
        self._runtime.setDevice(index)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._kernels = PatternKernels(cupy, self.stream)
        self._memories: list[CudaMemory] = []
        self.sharing = 1  # Number of ranks on this GPU, including this one
        self.identity = identify(self._runtime, index)

    @property
    def driver_cuda(self) -> int:
        """The newest CUDA version that the driver supports, for example 13000 for 13.0."""
        return self._driver.cuda

    def libraries(self) -> dict[str, str]:
        return library_versions(self.cupy, self._driver)

    def free_bytes(self) -> int:
        """Return how many bytes buffers may use: the free memory minus 2 GiB, but at least half of the free memory."""
        free: int = self._runtime.memGetInfo()[0] // self.sharing
        return max(free - _HEADROOM_BYTES, free // 2)

    def allocate(self, size_bytes: int) -> CudaMemory:
        return self.adopt(self._runtime.malloc(size_bytes), size_bytes, self._runtime.free)

    def adopt(self, address: int, size_bytes: int, free: Callable[[int], object]) -> CudaMemory:
        """Wrap memory that was allocated elsewhere. `close` frees it with `free(address)`."""
        memory = CudaMemory(self._kernels, address, size_bytes, free)
        self._memories.append(memory)
        return memory

    def capture(self, launch: Launch, replays: int) -> Launch:
        """Capture a launch in a CUDA graph. Return a launch that replays the graph `replays` times.

        The capture mode is thread-local, because NCCL's threads may allocate memory during the capture.
        """
        self.stream.begin_capture(self._runtime.streamCaptureModeThreadLocal)
        try:
            launch()
        except BaseException:
            with contextlib.suppress(Exception):
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        self.stream.synchronize()
        replay = partial(graph.launch, self.stream)
        if replays == 1:
            return replay

        def replay_all() -> None:
            for _ in range(replays):
                replay()

        return replay_all

    def close(self) -> None:
        while self._memories:
            self._memories.pop().free()


class GpuBuffers:
    """Base class for backends whose buffers are on the GPU of this rank."""

    _device: CudaDevice

    @property
    def memory_source(self) -> object:
        return self._device

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        return self._device.allocate(size_bytes)


def check_installed(driver: Driver) -> None:
    """Raise CouldNotMeasureError if CuPy is missing. The error names the CuPy extra that matches the driver."""
    if find_spec("cupy") is None:
        raise errors.missing_cupy(driver.cuda // 1000 or None)


def load_cupy(driver: Driver) -> Any:
    """Import CuPy.

    Raises:
        CouldNotMeasureError: CuPy or the driver is missing, or the driver is too old for CuPy's CUDA version.
    """
    check_installed(driver)
    try:
        import cupy
    except ImportError as error:
        raise errors.unusable_cupy(str(error).splitlines()[0]) from error
    runtime = cupy.cuda.runtime
    runs, built_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if runs == 0:
        raise errors.no_gpu(driver.absent or "CUDA finds no driver")
    if built_for // 1000 > runs // 1000:
        raise errors.cupy_of_wrong_cuda(format_version(built_for), format_version(runs))
    return cupy


@contextlib.contextmanager
def opening(runtime: Any) -> Iterator[None]:
    """Convert errors from opening a GPU, or from CuPy without NVRTC, into CouldNotMeasureError."""
    try:
        yield
    except (runtime.CUDARuntimeError, CudaUnavailableError) as error:
        if any(name in str(error) for name in _REFUSED_BY_MPS) and is_mps_running(os.environ):
            raise errors.mps_refuses_clients(str(error)) from error
        raise errors.no_gpu(str(error)) from error
    except (RuntimeError, ImportError, OSError) as error:
        raise errors.no_kernels(str(error).strip().splitlines()[0]) from error


def open_device(local_rank: int, ranks_on_host: int, host: str, driver: Driver, *, shared: bool = False) -> CudaDevice:
    """Open the GPU for a rank: the only visible GPU, or else the one whose index is the rank's local rank.

    If the ranks may share GPUs (`shared`), local ranks wrap around.

    Raises:
        CouldNotMeasureError: The GPU is unusable.
        UsageError: The node has more ranks than GPUs, and `shared` is false.
    """
    cupy = load_cupy(driver)
    runtime = cupy.cuda.runtime
    with opening(runtime):
        visible = runtime.getDeviceCount()
        if visible > 1 and local_rank >= visible and not shared:
            raise errors.fewer_gpus_than_ranks(ranks_on_host, visible, host)
        return CudaDevice(cupy, local_rank % visible if visible > 1 else 0, driver)


def identify(runtime: Any, index: int) -> GpuIdentity:
    """Read the identity of the GPU with this CUDA index. Raise CudaUnavailableError."""
    library = load_cuda()
    uuid, mps = device_uuid(library, index), read_attribute(library, MPS_ENABLED, index)
    return GpuIdentity(
        name=runtime.getDeviceProperties(index)["name"].decode(),
        index=index,
        bus_id=runtime.deviceGetPCIBusId(index).lower(),
        uuid=uuid,
        # Old drivers lack the attribute. With such a driver, look for the MPS server's socket instead.
        mps=is_mps_running(os.environ) if mps is None else bool(mps),
    )


def library_versions(cupy: Any, driver: Driver) -> dict[str, str]:
    """Return the versions of the driver, CUDA and CuPy for a result's metadata."""
    runtime = format_version(cupy.cuda.runtime.runtimeGetVersion())
    runs = format_version(cupy.cuda.runtime.driverGetVersion())
    return {"driver": f"{driver.version} (runs CUDA {runs})", "CuPy": f"{cupy.__version__} (CUDA {runtime})"}


MOST_WAITING = 500
"""Maximum number of operations that wait behind a closed gate.

A stream's queue has about 1024 entries. If the queue is full while the gate is closed, the next enqueue blocks forever.
"""

_LONGEST_SECONDS = 0.5
"""Time after which a gate opens by itself, to prevent a deadlock.

The driver may split a copy into many operations, or wait for the GPU when it loads a kernel. Issuing `MOST_WAITING`
operations takes a few milliseconds.
"""

_FLAG_BYTES = 4
_WORD = 0xFFFFFFFF
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ in cuda.h, a comparison that allows wrap-around
_Wait = Callable[[int, int, int, int], int]


class HeldStream:
    """A stream that waits at a closed gate until the host or a timer opens it."""

    def __init__(self, address: int = 0, turn: int = 0) -> None:
        self._address = address
        self._turn = turn
        self._waiting = 0

    def count(self, places: int) -> None:
        """Count operations before they are enqueued. Open the gate if more than `MOST_WAITING` would wait."""
        self._waiting += places
        if self._waiting > MOST_WAITING:
            self.open()

    def open(self) -> None:
        if self._address:
            ctypes.c_uint32.from_address(self._address).value = self._turn


class StreamGate:
    """A gate that delays streams. They wait for a number in pinned host memory, through `cuStreamWaitValue32`.

    If the driver lacks this function, the gate is always open.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._wait = _find_wait()
        self._turn = 0
        self._address = 0
        if self._wait is not None:
            flags = runtime.hostAllocPortable | runtime.hostAllocMapped
            self._address = runtime.hostAlloc(_FLAG_BYTES, flags)
            ctypes.c_uint32.from_address(self._address).value = 0

    @property
    def works(self) -> bool:
        """False if the driver lacks `cuStreamWaitValue32` or has refused a call."""
        return self._wait is not None

    @contextmanager
    def hold(self, stream: int) -> Iterator[HeldStream]:
        """Delay everything that is enqueued on a stream inside the `with` block until the block ends."""
        hold = self._close(stream)
        timer = threading.Timer(_LONGEST_SECONDS, hold.open)
        timer.daemon = True
        try:
            timer.start()
            yield hold
        finally:
            timer.cancel()
            hold.open()

    def free(self) -> None:
        """Free the gate's memory. From then on the gate is always open."""
        self._wait = None
        if self._address:
            self._runtime.freeHost(self._address)
            self._address = 0

    def _close(self, stream: int) -> HeldStream:
        if self._wait is None:
            return HeldStream()
        turn = (self._turn + 1) & _WORD
        if self._wait(stream, self._address, turn, _AT_LEAST):
            self._wait = None
            return HeldStream()
        self._turn = turn
        return HeldStream(self._address, turn)


def _find_wait() -> _Wait | None:
    """Look up `cuStreamWaitValue32` in the driver. Prefer version 2, because version 1 is disabled by default."""
    try:
        library = load_cuda()
    except CudaUnavailableError:
        return None
    for name in ("cuStreamWaitValue32_v2", "cuStreamWaitValue32"):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
            found: _Wait = function
            return found
    return None


# Operations behind a closed gate. Each is a kernel and several events, and a stream's queue has 1,022 entries
MOST_HELD = 64
_PLACES = 6  # Maximum number of queue entries per operation


class AbortedError(Exception):
    """The communicator was aborted during an operation. The stream is idle, and the measurement has no result."""


class GatedLaunch(Struct, eq=False):
    """Operations in batches. A call issues all of them. `seconds` has the measured time of each batch."""

    launches: Sequence[Launch]
    batches: Sequence[int]
    whole: Launch
    seconds: list[float] = field(default_factory=list)
    issued: float = 0.0

    def __call__(self) -> None:
        self.whole()

    def batch_seconds(self) -> Sequence[float]:
        return self.seconds[1:]

    def parts(self) -> Iterator[tuple[int, Sequence[Launch]]]:
        """Split the operations into portions that fit behind the gate. Yield each portion with the number of its
        batch.
        """
        start = 0
        for number, count in enumerate(self.batches):
            for first in range(start, start + count, MOST_HELD):
                yield number, self.launches[first : min(first + MOST_HELD, start + count)]
            start += count


class GatedClock:
    """Measure operations in GPU time, from the opening of a gate. CUDA graphs are measured in host time."""

    def __init__(
        self,
        device: CudaDevice,
        group: Group,
        progress: Progress,
        join: Callable[[Sequence[Launch]], Launch] = join_launches,
        wait_until_idle: Callable[[Callable[[], object]], None] | None = None,
    ) -> None:
        self._cupy, self._stream, self._capture = device.cupy, device.stream, device.capture
        self._ranks, self._reports = group, progress
        self._join, self._wait_until_idle = join, wait_until_idle or self._poll
        self._gate = StreamGate(self._cupy.cuda.runtime)
        self._events = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        self._pace = Pace(SECONDS_BETWEEN_MARKS)
        self._marks = Marks(self._cupy, self._stream, progress)
        self._aborted = False

    def chain(self, launches: Sequence[Launch]) -> Launch:
        return join_launches(launches)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """Join operations into one launch, or capture them in a CUDA graph.

        A graph needs no gate, because its operations do not wait for the host.
        """
        self._stream.synchronize()
        if graph_replays:
            return self._marks.replays(launches, graph_replays, partial(self._capture, self._join(launches)))
        return GatedLaunch(launches, [len(launches)], self._join(launches))

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        self._stream.synchronize()
        starts = range(0, len(launches), operations)
        return GatedLaunch(
            launches, [min(operations, len(launches) - start) for start in starts], join_launches(launches)
        )

    def once(self, launch: Launch) -> None:
        launch()
        self._wait()

    def seconds(self, launch: Launch) -> float:
        """Return the wall time in seconds until the stream is idle, including the time to issue the operations."""
        with no_garbage_collection():
            start = perf_counter()
            launch()
            self._wait(launch.look if isinstance(launch, MarkedLaunch) else None)
            seconds = perf_counter() - start
        if not isinstance(launch, GatedLaunch):
            self._marks.measured(seconds)
            return seconds
        self._pace.groups(launch.launches)
        self._pace.measured(seconds)
        self._reports.completed(len(launch.launches))
        return seconds

    def together(self, launch: Launch) -> float:
        """Return the GPU time of all operations in seconds. No rank starts a portion before all ranks have enqueued
        it.
        """
        if not isinstance(launch, GatedLaunch):
            self._stream.synchronize()
            self._ranks.barrier()
            return self.seconds(launch)
        launch.seconds, launch.issued = [0.0] * len(launch.batches), 0.0
        self._stream.synchronize()
        with no_garbage_collection():
            for batch, part in launch.parts():
                launch.seconds[batch] += self._portion(launch, part)
        return sum(launch.seconds)

    def _portion(self, launch: GatedLaunch, part: Sequence[Launch]) -> float:
        """Return the GPU time of one portion in seconds. All ranks have the same portions and meet in a barrier for
        each one.
        """
        begin, end = self._events
        groups, rest, marks = self._pace.groups(part), iter(part), deque[tuple[int, Any]]()
        ready = [(count, self._join(list(islice(rest, count)))) for count in groups]
        with self._gate.hold(self._stream.ptr) as held:
            self._stream.record(begin)
            start = perf_counter()
            for count, issue in ready:
                held.count(count * _PLACES)
                issue()
                if len(groups) > 1:
                    marks.append((count, self._cupy.cuda.Event(disable_timing=True)))
                    self._stream.record(marks[-1][1])
            launch.issued += perf_counter() - start
            self._stream.record(end)
            self._ranks.barrier()
            # Open the gate right after the barrier, because any work in between would delay ranks differently.
            held.open()
        self._wait(partial(self._report, marks))
        milliseconds: float = self._cupy.cuda.get_elapsed_time(begin, end)
        self._reports.completed(self._pace.measured(milliseconds / 1e3))
        return milliseconds / 1e3

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        return launch.issued / operations if isinstance(launch, GatedLaunch) and operations else None

    def gate_words(self) -> Mapping[str, str]:
        """Return a note for the metadata if the driver has no gate, else an empty mapping."""
        with self._gate.hold(self._stream.ptr):
            works = self._gate.works
        self._stream.synchronize()
        return {} if works else {"gate": "the driver has none, so times include the host's time to issue operations"}

    def free_gate(self) -> None:
        self._gate.free()

    def _report(self, marks: deque[tuple[int, Any]]) -> None:
        while marks and marks[0][1].done:
            self._reports.completed(marks.popleft()[0])

    def _wait(self, look: Callable[[], object] | None = None) -> None:
        look = look or (lambda: None)
        self._wait_until_idle(look)
        look()
        if self._aborted:
            raise AbortedError

    def _poll(self, look: Callable[[], object]) -> None:
        while not self._stream.done:
            look()
