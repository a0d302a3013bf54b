"""Copies between the GPUs of one process, and between them and host memory, timed on the GPUs."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from gpubench import errors
from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.copies.device import ANY_DIRECTION, CopyDevice, CopyQueue, cuda_errors
from gpubench.hardware.copies.memory import CopyMemory, GpuMemory, ManagedPages, PageableMemory, PinnedMemory
from gpubench.hardware.cuda.device import identify, library_versions, load_cupy, opening
from gpubench.hardware.cuda.gate import HeldStream, StreamGate
from gpubench.hardware.node.nvml.library import Driver
from gpubench.hardware.process import free_memory as host_memory
from gpubench.hardware.timing.clock import no_garbage_collection
from gpubench.model.facts.snapshot import bus_id
from gpubench.model.terms.copies import CopyGpu, Engine, HostMemory, Place
from gpubench.model.terms.units import format_size
from gpubench.ports.copies import CopyStream
from gpubench.ports.memory import Memory, Region

_STAGED_PLACES = 4
_STAGED_PIECE_BYTES = 64 * 1024
"""A copy through host memory is several operations, and more the larger it is; how many, CUDA does not say."""

_ATTACH_GLOBAL = 1
"""cudaMemAttachGlobal: any stream of any GPU may use the memory."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Copies on one queue: `issue` enqueues one, which takes so many `places` in the stream."""

    queue: CopyQueue
    issue: Callable[[], object]
    places: int


class CudaCopies:
    """The GPUs that this process sees, at the positions that CUDA counts them by."""

    def __init__(self, cupy: Any, driver: Driver, device_names: Mapping[str, str]) -> None:
        self._cupy = cupy
        self._driver = driver
        self._runtime = cupy.cuda.runtime
        self._enabled: set[tuple[int, int]] = set()
        self._memories: list[CopyMemory] = []
        self._unusable: dict[int, CouldNotMeasureError] = {}
        with opening(self._runtime):
            self.gpus = tuple(self._identify(each, device_names) for each in range(self._runtime.getDeviceCount()))
        self._devices = {position: each for position in range(len(self.gpus)) if (each := self._open(position))}
        if not self._devices:
            raise self._unusable[0]
        with opening(self._runtime):
            self._gate = StreamGate(self._runtime)

    def libraries(self) -> dict[str, str]:
        """Driver, CUDA and CuPy versions."""
        return library_versions(self._cupy, self._driver)

    def can_reach(self, source: int, destination: int) -> bool:
        """True where, for CUDA, one GPU may address another's memory."""
        with cuda_errors(f"asking whether {self._name(source)} can address {self._name(destination)}"):
            return bool(self._runtime.deviceCanAccessPeer(self.gpus[source].index, self.gpus[destination].index))

    def enable(self, source: int, destination: int) -> None:
        """Let one GPU address another's memory from now on; once is enough.

        Copy engines then copy directly between the two in both directions, whichever GPU issues it (seen on H200);
        SMs only those of this one GPU.
        """
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
        """A plain allocation of a GPU or of the host, kept until `close`."""
        if isinstance(place, HostMemory):
            self._memories.append(self._allocate_host(place, size_bytes))
        else:
            self._memories.append(self._allocate_gpu(place, size_bytes))
        return self._memories[-1]

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """Wall time, by the first stream's GPU, from a common start until every stream has made its copies.

        The start waits until all copies, but no more than a stream holds, are enqueued. To and from pageable memory
        the host itself copies, one stream after another, from the time that it begins to.
        """
        with cuda_errors(self._describe(streams)):
            work = self._bind(streams)
            try:
                with no_garbage_collection():
                    gated = not any(
                        _memory(end).pageable for each in streams for end in (each.source, each.destination)
                    )
                    return self._time(streams[0].by, work, repeats, gated=gated)
            except BaseException:
                # The next measurement must not run beside what was enqueued before something failed.
                for each in work:
                    with contextlib.suppress(RuntimeError):
                        each.queue.stream.synchronize()
                raise

    def free_bytes(self) -> dict[str, int]:
        """Free memory of every usable GPU, by its name."""
        found = {}
        for position, device in self._devices.items():
            with cuda_errors(f"asking {device.name} for its free memory"):
                self._runtime.setDevice(device.index)
                found[self.gpus[position].device] = self._runtime.memGetInfo()[0]
        return found

    def allocate_managed(self, size_bytes: int) -> ManagedPages:
        """Managed memory that every GPU may use, kept until `close`."""
        with cuda_errors(f"allocating {format_size(size_bytes)} of managed memory"):
            self._runtime.setDevice(next(iter(self._devices.values())).index)
            address = self._runtime.mallocManaged(size_bytes, _ATTACH_GLOBAL)
        pages = ManagedPages(address, size_bytes, self._runtime.free)
        self._memories.append(pages)
        return pages

    def view(self, position: int, pages: ManagedPages) -> GpuMemory:
        """Managed memory as a GPU fills and checks it; it stays the owner's to give back."""
        return GpuMemory(self._device(position), position, pages.address, pages.size_bytes, lambda _address: None)

    def time_call(self, by: int, doing: str, issue: Callable[[int], object]) -> float:
        """Seconds on a stream of a GPU from before what a call enqueues there until it is done."""
        with cuda_errors(doing):
            queue = self._device(by).queue(0)
            return self._time(by, [_Work(queue, partial(issue, queue.stream.ptr), 1)], 1, gated=False)

    def close(self) -> None:
        """Free all memory and disable peer access. Errors are ignored: after some of them every call fails."""
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
        identity = identify(self._runtime, index)
        address = bus_id(identity.bus_id)
        device = device_names.get(address, f"GPU{index}")
        return CopyGpu(device=device, index=index, bus_id=address, uuid=identity.uuid, name=identity.name)

    def _open(self, position: int) -> CopyDevice | None:
        """The GPU at a position; one that CUDA does not give us costs its own pairs, not everybody's."""
        gpu = self.gpus[position]
        with opening(self._runtime):
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
        available = int(host_memory.free_bytes() * host_memory.SHARE)
        if size_bytes > available:
            raise CouldNotMeasureError(
                f"{format_size(size_bytes)} of {kind.full_name} do not fit: {available / 2**30:.1f} GiB may be taken",
                next_step="smaller --sizes, or a larger memory limit for this job",
            )
        if kind is HostMemory.PAGEABLE:
            return PageableMemory(size_bytes)
        with cuda_errors(f"allocating {format_size(size_bytes)} of {kind.full_name}"):
            address = self._runtime.hostAlloc(size_bytes, self._runtime.hostAllocPortable)
        return PinnedMemory(address, size_bytes, self._runtime.freeHost)

    def _describe(self, streams: Sequence[CopyStream]) -> str:
        """The copies in words, for an error: the first of them, and the number of the others."""
        first = streams[0]
        ends = " → ".join(self._name(_memory(end).gpu) for end in (first.source, first.destination))
        more = f", at once with {len(streams) - 1} more," if len(streams) > 1 else ""
        engine = "copy engine" if first.engine is Engine.CE else "SMs"
        return f"copying {ends} ({engine} of {self._name(first.by)}, {first.size_bytes} bytes){more}"

    def _bind(self, streams: Sequence[CopyStream]) -> list[_Work]:
        """Every stream's copies on a queue of their own."""
        used: dict[int, int] = {}
        work = []
        for each in streams:
            number = used.get(each.by, 0)
            used[each.by] = number + 1
            work.append(self._bind_one(each, self._device(each.by).queue(number)))
        return work

    def _bind_one(self, stream: CopyStream, queue: CopyQueue) -> _Work:
        source, destination = _memory(stream.source), _memory(stream.destination)
        read = source.address + stream.source.offset_bytes
        write = destination.address + stream.destination.offset_bytes
        if stream.engine is Engine.SM:
            if not all(self._addresses(stream.by, each) for each in (source, destination)):
                raise CouldNotMeasureError(
                    f"{self._describe([stream])}: its SMs cannot address one end",
                    expected=f"peer access, enabled before, or {HostMemory.PINNED.full_name}",
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
        """True where a GPU can address a memory itself."""
        if memory.gpu is None:
            return not memory.pageable
        return memory.gpu == gpu or (gpu, memory.gpu) in self._enabled

    def _time(self, timer: int, work: Sequence[_Work], repeats: int, *, gated: bool) -> float:
        """Enqueue everything between two events of the first queue, which belongs to GPU `timer`."""
        self._runtime.setDevice(self._device(timer).index)
        event = self._cupy.cuda.Event
        start, stop = event(), event()
        first, others = work[0].queue.stream, [each.queue for each in work[1:]]
        with self._gate.hold(first.ptr) if gated else contextlib.nullcontext(HeldStream()) as hold:
            first.record(start)
            for other in others:
                other.stream.wait_event(start)
            for _ in range(repeats):
                for each in work:
                    hold.count(each.places)
                    each.issue()
            for other in others:
                other.stream.record(other.end)
                first.wait_event(other.end)
            first.record(stop)
        stop.synchronize()
        milliseconds: float = self._cupy.cuda.get_elapsed_time(start, stop)
        return milliseconds / 1e3


def open_copies(driver: Driver, device_names: Mapping[str, str] = MappingProxyType({})) -> CudaCopies:
    """The GPUs of this process, named in matrices by `device_names` (bus id as sysfs spells it → name), else by CUDA.

    A GPU that CUDA does not give to this process raises when memory of it is asked for.
    Raises CouldNotMeasureError for no driver, no usable GPU, no CuPy, one of another CUDA, or one without NVRTC.
    """
    return CudaCopies(load_cupy(driver), driver, device_names)


def _memory(region: Region) -> CopyMemory:
    """The memory of a region, which `allocate` returned."""
    return cast("CopyMemory", region.memory)
