"""Copies between GPUs and host memory, timed with CUDA events, within one process and between two ranks."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

from msgspec import Struct

from gpubench import errors
from gpubench.backends import cuda
from gpubench.backends.mpi.backends import NumpyMemory
from gpubench.backends.nccl.communicator import GroupCommunicator
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.timing import no_garbage_collection
from gpubench.errors import CouldNotMeasureError
from gpubench.machine import host as host_memory
from gpubench.machine.nvml import Driver
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.terms.operation import Block, CopyGpu, DataPattern, Direction, Engine, HostMemory, Place
from gpubench.model.terms.units import format_size
from gpubench.ports.backend import Array, Memory, Region
from gpubench.ports.copies import CopyStream
from gpubench.ports.group import Group

_THREADS = 512
_VECTOR_BYTES = 16  # Threads per block and bytes per access, as in nvbandwidth's kernel
ANY_DIRECTION = 4  # cudaMemcpyDefault: CUDA infers the direction from the addresses
_STICKY = (
    *("IllegalAddress", "IllegalInstruction", "MisalignedAddress", "InvalidAddressSpace", "InvalidPc", "LaunchFailure"),
    *("LaunchFailed", "LaunchTimeout", "HardwareStackError", "Assert", "EccUncorrectable", "NvlinkUncorrectable"),
    "Contained",
)
"""Names of errors after which a process cannot use CUDA any more.

They are in cudaError_t (driver_types.h). CUresult has the same names.
"""

_NEXT_STEPS = {
    "MemoryAllocation": "nvidia-smi shows what uses the memory, and smaller --sizes need less",
    "PeerAccess": "nvidia-smi topo -p2p r shows between which GPUs the driver allows peer access",
    "DevicesUnavailable": "nvidia-smi shows the processes on the GPU, and nvidia-smi -q its compute mode",
}


class CopyQueue(Struct):
    """A CUDA stream, and the event that marks the end of a measurement on it."""

    stream: Any
    end: Any


class CopyKernel:
    """The copy kernel in copy.cu, compiled for the current device and launched on the current stream."""

    def __init__(self, cupy: Any, multiprocessors: int) -> None:
        import numpy

        self._numpy = numpy
        self._multiprocessors = multiprocessors
        module = cupy.RawModule(code=files("gpubench.backends").joinpath("copy.cu").read_text())
        self._kernel = module.get_function("copy_bytes")

    def launch(self, destination: int, source: int, size_bytes: int) -> None:
        blocks = max(1, min(self._multiprocessors, -(-size_bytes // (_THREADS * _VECTOR_BYTES))))
        arguments = tuple(self._numpy.uint64(value) for value in (destination, source, size_bytes))
        self._kernel((blocks,), (_THREADS,), arguments)


class CopyDevice:
    """A GPU with one stream for filling and checking test data, and one queue per concurrent copy."""

    def __init__(self, cupy: Any, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._queues: list[CopyQueue] = []
        self._runtime.setDevice(index)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            self.patterns = cuda.PatternKernels(cupy, self._stream)
            self._copy = CopyKernel(cupy, self._runtime.getDeviceProperties(index)["multiProcessorCount"])
            # CUDA loads a kernel at its first launch and may then wait for the device, which a closed gate would block.
            self._copy.launch(0, 0, 0)
        self._stream.synchronize()

    def queue(self, number: int) -> CopyQueue:
        while len(self._queues) <= number:
            self._runtime.setDevice(self.index)
            stream = self._cupy.cuda.Stream(non_blocking=True)
            self._queues.append(CopyQueue(stream, self._cupy.cuda.Event(disable_timing=True)))
        return self._queues[number]

    def copy_by_kernel(self, queue: CopyQueue, destination: int, source: int, size_bytes: int) -> None:
        self._runtime.setDevice(self.index)
        with queue.stream:
            self._copy.launch(destination, source, size_bytes)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Make the device and its stream current inside the `with` block, and wait for the stream at the end.

        Raises:
            CouldNotMeasureError: A CUDA call failed.
        """
        with cuda_errors(f"filling or checking memory of {self.name}"):
            self._runtime.setDevice(self.index)
            with self._stream:
                yield
            self._stream.synchronize()


@contextmanager
def cuda_errors(doing: str) -> Iterator[None]:
    """Turn CUDA and CuPy errors into a CouldNotMeasureError that names the failed step."""
    try:
        yield
    except RuntimeError as error:
        raise cuda_failed(doing, str(error)) from error


def cuda_failed(doing: str, error: str) -> CouldNotMeasureError:
    """Return the error for a failed CUDA call. It warns if later calls will fail too, and suggests a next step."""
    code = error.partition(":")[0].replace("_", "").casefold()
    sticky = any(code.endswith(name.casefold()) for name in _STICKY)
    steps = [step for name, step in _NEXT_STEPS.items() if name.casefold() in code]
    lasting = "after this error every further CUDA call of this process fails, so no later copy is measured"
    return CouldNotMeasureError(
        f"{doing} failed: {error}",
        reason=lasting if sticky else "",
        next_step="dmesg | grep Xid shows the GPU's error. Run again" if sticky else "".join(steps[:1]),
    )


class GpuMemory(cuda.CudaMemory):
    """An allocation on one GPU, outside of CuPy's pool. Filling and checking it block until the GPU has finished."""

    pageable = False

    def __init__(self, device: CopyDevice, gpu: int, address: int, size_bytes: int, free: Callable[[int], object]):
        super().__init__(device.patterns, address, size_bytes, free)
        self.gpu: int | None = gpu
        self._device = device

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        with self._device.settled():
            return super().array(offset_bytes, count, dtype)

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        with self._device.settled():
            super().fill_sent(data, block, rank)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        with self._device.settled():
            super().fill_byte(size_bytes, value)

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        with self._device.settled():
            return super().count_wrong(data, blocks)


class PageableMemory(NumpyMemory):
    """Pageable host memory. The constructor writes every page, because Linux allocates pages at the first write."""

    gpu: int | None = None
    pageable = True

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.address: int = self._bytes.ctypes.data
        self.fill_byte(size_bytes, 0)

    def free(self) -> None:
        """Do nothing, because NumPy frees the memory."""


class PinnedMemory(NumpyMemory):
    """Pinned host memory from `cudaHostAlloc`. Copy engines and SMs can access it directly."""

    gpu: int | None = None
    pageable = False

    def __init__(self, address: int, size_bytes: int, free: Callable[[int], object]) -> None:
        super().__init__(0)
        self.size_bytes = size_bytes
        self.address = address
        self._free = free
        self._bytes = self._numpy.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def free(self) -> None:
        self._free(self.address)


class ManagedPages(PinnedMemory):
    """CUDA managed memory, which has the same address on the host and on all GPUs. The host fills and checks it."""


CopyMemory = GpuMemory | PageableMemory | PinnedMemory

_STAGED_PLACES = 4
# A guess: CUDA splits a copy through host memory into an undocumented number of operations
_STAGED_PIECE_BYTES = 64 * 1024
_ATTACH_GLOBAL = 1  # cudaMemAttachGlobal: any stream on any GPU may use the memory


class _Work(Struct, frozen=True):
    """Copies on one queue. `issue` enqueues one copy, which occupies `places` entries of the stream's hardware
    queue.
    """

    queue: CopyQueue
    issue: Callable[[], object]
    places: int


def _time(
    cupy: Any, gate: cuda.StreamGate | None, work: Sequence[_Work], repeats: int, *, sleeps: bool = False
) -> float:
    """Return the time in seconds that the GPUs take for all work, from two events on the first queue.

    The device of the first queue must be current. A closed `gate` delays the work until all of it is enqueued. With
    `sleeps`, the host thread blocks while it waits, so that other threads can use its core.
    """
    start, stop = cupy.cuda.Event(), cupy.cuda.Event(block=sleeps)
    first, others = work[0].queue.stream, [copies.queue for copies in work[1:]]
    with gate.hold(first.ptr) if gate else contextlib.nullcontext(cuda.HeldStream()) as hold:
        first.record(start)
        for other in others:
            other.stream.wait_event(start)
        for _ in range(repeats):
            for copies in work:
                hold.count(copies.places)
                copies.issue()
        for other in others:
            other.stream.record(other.end)
            first.wait_event(other.end)
        first.record(stop)
    stop.synchronize()
    milliseconds: float = cupy.cuda.get_elapsed_time(start, stop)
    return milliseconds / 1e3


class CudaCopies:
    """Copies between all GPUs that this process sees, numbered in CUDA's order."""

    def __init__(self, cupy: Any, driver: Driver, device_names: Mapping[str, str]) -> None:
        self._cupy = cupy
        self._driver = driver
        self._runtime = cupy.cuda.runtime
        self._enabled: set[tuple[int, int]] = set()
        self._memories: list[CopyMemory] = []
        self._unusable: dict[int, CouldNotMeasureError] = {}
        with cuda.opening(self._runtime):
            self.gpus = tuple(self._identify(index, device_names) for index in range(self._runtime.getDeviceCount()))
        self._devices = {position: gpu for position in range(len(self.gpus)) if (gpu := self._open(position))}
        if not self._devices:
            raise self._unusable[0]
        with cuda.opening(self._runtime):
            self._gate = cuda.StreamGate(self._runtime)

    def libraries(self) -> dict[str, str]:
        return cuda.library_versions(self._cupy, self._driver)

    def can_reach(self, source: int, destination: int) -> bool:
        with cuda_errors(f"asking whether {self._name(source)} can address {self._name(destination)}"):
            return bool(self._runtime.deviceCanAccessPeer(self.gpus[source].index, self.gpus[destination].index))

    def enable(self, source: int, destination: int) -> None:
        """Enable peer access. On an H200 this affects only the source's SMs, but copy engines in both directions."""
        if (source, destination) in self._enabled:
            return
        with cuda_errors(f"letting {self._name(source)} address the memory of {self._name(destination)}"):
            self._runtime.setDevice(self._device(source).index)
            try:
                self._runtime.deviceEnablePeerAccess(self.gpus[destination].index)
            except self._runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
        self._enabled.add((source, destination))

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        if isinstance(place, HostMemory):
            self._memories.append(self._allocate_host(place, size_bytes))
        else:
            self._memories.append(self._allocate_gpu(place, size_bytes))
        return self._memories[-1]

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """Return the time in seconds from a common start until all streams have finished, by the first stream's GPU."""
        with cuda_errors(self._describe(streams)):
            work = self._bind(streams)
            try:
                with no_garbage_collection():
                    gated = not any(
                        _memory(end).pageable for stream in streams for end in (stream.source, stream.destination)
                    )
                    self._runtime.setDevice(self._device(streams[0].by).index)
                    return _time(self._cupy, self._gate if gated else None, work, repeats)
            except BaseException:
                # Copies that were enqueued before the failure must not overlap with the next measurement.
                for copies in work:
                    with contextlib.suppress(RuntimeError):
                        copies.queue.stream.synchronize()
                raise

    def free_bytes(self) -> dict[str, int]:
        found = {}
        for position, device in self._devices.items():
            with cuda_errors(f"asking {device.name} for its free memory"):
                self._runtime.setDevice(device.index)
                found[self.gpus[position].device] = self._runtime.memGetInfo()[0]
        return found

    def allocate_managed(self, size_bytes: int) -> ManagedPages:
        """Allocate managed memory that every GPU may use. `close` frees it."""
        with cuda_errors(f"allocating {format_size(size_bytes)} of managed memory"):
            self._runtime.setDevice(next(iter(self._devices.values())).index)
            address = self._runtime.mallocManaged(size_bytes, _ATTACH_GLOBAL)
        pages = ManagedPages(address, size_bytes, self._runtime.free)
        self._memories.append(pages)
        return pages

    def view(self, position: int, pages: ManagedPages) -> GpuMemory:
        """Return a view through which a GPU fills and checks managed memory. Freeing the view does not free the
        memory.
        """
        return GpuMemory(self._device(position), position, pages.address, pages.size_bytes, lambda _address: None)

    def time_call(self, by: int, doing: str, issue: Callable[[int], object]) -> float:
        """Call `issue` with a stream of GPU `by`. Return the GPU time in seconds for the work that it enqueues."""
        with cuda_errors(doing):
            queue = self._device(by).queue(0)
            self._runtime.setDevice(self._device(by).index)
            return _time(self._cupy, None, [_Work(queue, partial(issue, queue.stream.ptr), 1)], 1)

    def close(self) -> None:
        """Free all memory and disable peer access. Ignore errors, because after a sticky error every CUDA call
        fails.
        """
        while self._memories:
            with contextlib.suppress(RuntimeError):
                self._memories.pop().free()
        for source, destination in sorted(self._enabled):
            with contextlib.suppress(RuntimeError):
                self._runtime.setDevice(self.gpus[source].index)
                self._runtime.deviceDisablePeerAccess(self.gpus[destination].index)
        self._enabled.clear()
        with contextlib.suppress(RuntimeError):
            self._gate.free()

    def _identify(self, index: int, device_names: Mapping[str, str]) -> CopyGpu:
        identity = cuda.identify(self._runtime, index)
        address = normalize_bus_id(identity.bus_id)
        device = device_names.get(address, f"GPU{index}")
        return CopyGpu(device=device, index=index, bus_id=address, uuid=identity.uuid, name=identity.name)

    def _open(self, position: int) -> CopyDevice | None:
        """Open a GPU. If CUDA refuses it, only the pairs with this GPU cannot be measured."""
        gpu = self.gpus[position]
        with cuda.opening(self._runtime):
            try:
                return CopyDevice(self._cupy, gpu.index, gpu.device)
            except self._runtime.CUDARuntimeError as error:
                self._unusable[position] = errors.no_gpu(f"{gpu.device} ({gpu.bus_id}): {error}")
        return None

    def _device(self, position: int) -> CopyDevice:
        if position in self._unusable:
            raise self._unusable[position]
        return self._devices[position]

    def _name(self, place: int | None) -> str:
        return "host memory" if place is None else self.gpus[place].device

    def _allocate_gpu(self, position: int, size_bytes: int) -> GpuMemory:
        device = self._device(position)
        with cuda_errors(f"allocating {format_size(size_bytes)} on {device.name}"):
            self._runtime.setDevice(device.index)
            address = self._runtime.malloc(size_bytes)
        return GpuMemory(device, position, address, size_bytes, self._runtime.free)

    def _allocate_host(self, kind: HostMemory, size_bytes: int) -> PageableMemory | PinnedMemory:
        available = int(host_memory.free_bytes() * host_memory.USABLE_SHARE)
        if size_bytes > available:
            raise CouldNotMeasureError(
                f"{format_size(size_bytes)} of {kind.full_name} do not fit: {available / 2**30:.1f} GiB are available",
                next_step="use smaller --sizes, or raise the memory limit of this job",
            )
        if kind is HostMemory.PAGEABLE:
            return PageableMemory(size_bytes)
        with cuda_errors(f"allocating {format_size(size_bytes)} of {kind.full_name}"):
            address = self._runtime.hostAlloc(size_bytes, self._runtime.hostAllocPortable)
        return PinnedMemory(address, size_bytes, self._runtime.freeHost)

    def _describe(self, streams: Sequence[CopyStream]) -> str:
        first = streams[0]
        ends = " → ".join(self._name(_memory(end).gpu) for end in (first.source, first.destination))
        more = f", at once with {len(streams) - 1} more," if len(streams) > 1 else ""
        engine = "copy engine" if first.engine is Engine.CE else "SMs"
        return f"copying {ends} ({engine} of {self._name(first.by)}, {first.size_bytes} bytes){more}"

    def _bind(self, streams: Sequence[CopyStream]) -> list[_Work]:
        used: dict[int, int] = {}
        work = []
        for stream in streams:
            number = used.get(stream.by, 0)
            used[stream.by] = number + 1
            work.append(self._bind_one(stream, self._device(stream.by).queue(number)))
        return work

    def _bind_one(self, stream: CopyStream, queue: CopyQueue) -> _Work:
        source, destination = _memory(stream.source), _memory(stream.destination)
        read = source.address + stream.source.offset_bytes
        write = destination.address + stream.destination.offset_bytes
        if stream.engine is Engine.SM:
            if not all(self._addresses(stream.by, end) for end in (source, destination)):
                raise CouldNotMeasureError(
                    f"{self._describe([stream])}: its SMs cannot address one end",
                    expected=f"peer access enabled beforehand, or {HostMemory.PINNED.full_name}",
                )
            device = self._device(stream.by)
            return _Work(queue, partial(device.copy_by_kernel, queue, write, read, stream.size_bytes), 1)
        if source.gpu is None or destination.gpu is None or source.gpu == destination.gpu:
            copy = partial(self._runtime.memcpyAsync, write, read, stream.size_bytes, ANY_DIRECTION, queue.stream.ptr)
            return _Work(queue, copy, 1)
        to, origin = self.gpus[destination.gpu].index, self.gpus[source.gpu].index
        peer = partial(self._runtime.memcpyPeerAsync, write, to, read, origin, stream.size_bytes, queue.stream.ptr)
        staged = self._enabled.isdisjoint({(source.gpu, destination.gpu), (destination.gpu, source.gpu)})
        return _Work(queue, peer, _STAGED_PLACES + stream.size_bytes // _STAGED_PIECE_BYTES if staged else 1)

    def _addresses(self, gpu: int, memory: CopyMemory) -> bool:
        if memory.gpu is None:
            return not memory.pageable
        return memory.gpu == gpu or (gpu, memory.gpu) in self._enabled


def open_copies(driver: Driver, device_names: Mapping[str, str] = MappingProxyType({})) -> CudaCopies:
    """Open all GPUs that this process sees. `device_names` maps PCI bus IDs to names for reports.

    Raises:
        CouldNotMeasureError: CuPy or the driver is missing, or no GPU can be opened.
    """
    return CudaCopies(cuda.load_cupy(driver), driver, device_names)


def _memory(region: Region) -> CopyMemory:
    return cast("CopyMemory", region.memory)


_BLOCK_BYTES = 2 * 2**20
"""Granularity of allocations that are shared through CUDA IPC.

cudaMalloc carves smaller allocations from shared blocks, and an IPC handle then exposes the whole block. Multiples of 2
MiB get a block of their own (CUDA C++ Programming Guide, "Interprocess Communication").
"""

_REFUSALS = {
    "PeerAccess": "these two GPUs have no peer access, which CUDA IPC between GPUs needs",
    "": "ranks in different containers or PID namespaces cannot share CUDA memory, and neither can those under WSL",
}
"""Likely reason why CUDA IPC fails, by a substring of the error's name. The empty string matches all other errors."""


class Network:
    """An NCCL communicator over all ranks of a job, for copies between nodes."""

    def __init__(self, group: Group, library: NcclLibrary) -> None:
        self.described = f"{library.version} from {library.path}"
        self.aborted = False
        with cuda_errors("connecting the ranks through NCCL"):
            self._communicator = GroupCommunicator(library, group)
        self.transfer, self.trouble = self._communicator.transfer, self._communicator.trouble

    def abort(self) -> None:
        """Abort the communicator. It cannot be used any more."""
        self.aborted = True
        self._communicator.abort()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._communicator.destroy()


class CudaRankCopies:
    """Copies between the GPUs of two ranks, through CUDA IPC or, between nodes, through the `network`."""

    def __init__(self, opened: cuda.CudaDevice, network: Network | None = None) -> None:
        self._opened = opened
        self._cupy = opened.cupy
        self._runtime: Any = opened.cupy.cuda.runtime
        self._network = network
        self._memories: list[GpuMemory] = []
        self._addresses: dict[bytes, int] = {}
        with cuda.opening(self._runtime):
            self._device = CopyDevice(opened.cupy, opened.identity.index, f"GPU {opened.identity.bus_id}")
            self._gate = cuda.StreamGate(self._runtime)

    def libraries(self) -> Mapping[str, str]:
        return self._opened.libraries() | ({"NCCL": self._network.described} if self._network else {})

    def allocate(self, size_bytes: int) -> Memory:
        with cuda_errors(f"allocating {format_size(size_bytes)} on {self._device.name}"):
            self._runtime.setDevice(self._device.index)
            address = self._runtime.malloc(-(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        self._memories.append(GpuMemory(self._device, 0, address, size_bytes, self._runtime.free))
        return self._memories[-1]

    def export(self, memory: Memory) -> bytes:
        """Return the CUDA IPC handle of an allocation."""
        with _sharing("sharing memory through CUDA IPC"):
            handle: bytes = self._runtime.ipcGetMemHandle(cast("GpuMemory", memory).address)
        return handle

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        """Copy `repeats` times with this rank's copy engine. Return the total time in seconds.

        A gate keeps the first copy from starting before all copies are enqueued.
        """
        self._runtime.setDevice(self._device.index)
        theirs, mine = self._address(other), cast("GpuMemory", own).address
        to, origin = (theirs, mine) if direction is Direction.WRITE else (mine, theirs)
        queue = self._device.queue(0)
        copy = partial(self._runtime.memcpyAsync, to, origin, size_bytes, ANY_DIRECTION, queue.stream.ptr)
        with cuda_errors(f"copying {size_bytes} bytes through CUDA IPC ({direction} by {self._device.name})"):
            return self._seconds(queue, copy, repeats, gated=True)

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        """Send or receive `own` through NCCL, `repeats` times. Return the total time in seconds.

        No gate is used, because NCCL's threads need the stream.
        """
        if self._network is None:
            raise CouldNotMeasureError("NCCL was not started: all ranks are on one node")
        self._runtime.setDevice(self._device.index)
        queue, address = self._device.queue(0), cast("GpuMemory", own).address
        send = partial(self._network.transfer, address, size_bytes, peer, queue.stream.ptr, sends=sends)
        with cuda_errors(
            f"{'sending to' if sends else 'receiving from'} rank {peer} through NCCL ({size_bytes} bytes)"
        ):
            seconds = self._seconds(queue, send, repeats, gated=False)
        if self._network.aborted:
            raise cuda.AbortedError
        return seconds

    def release(self) -> None:
        """Unmap the memory of other ranks. Ignore errors, because after a sticky error every CUDA call fails."""
        for address in self._addresses.values():
            with contextlib.suppress(RuntimeError):
                self._runtime.ipcCloseMemHandle(address)
        self._addresses.clear()

    def close(self) -> None:
        if self._network is not None:
            self._network.close()
        while self._memories:
            with contextlib.suppress(RuntimeError):
                self._memories.pop().free()
        with contextlib.suppress(RuntimeError):
            self._gate.free()

    def _address(self, handle: bytes) -> int:
        if handle not in self._addresses:
            with _sharing("opening another rank's memory through CUDA IPC"):
                self._addresses[handle] = self._runtime.ipcOpenMemHandle(handle)
        return self._addresses[handle]

    def _seconds(self, queue: CopyQueue, issue: Callable[[], object], repeats: int, *, gated: bool) -> float:
        # Block the host thread instead of polling, because NCCL's threads need its core.
        with no_garbage_collection():
            gate = self._gate if gated else None
            return _time(self._cupy, gate, [_Work(queue, issue, 1)], repeats, sleeps=True)


@contextlib.contextmanager
def _sharing(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        meaning = next(text for name, text in _REFUSALS.items() if name in str(error))
        raise CouldNotMeasureError(f"{doing} failed: {error}", reason=meaning) from error
