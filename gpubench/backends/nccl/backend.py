"""The nccl backend, which calls the collectives of the loaded NCCL library directly."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, cycle
from time import perf_counter
from typing import Any, cast

from msgspec import Struct

from gpubench.backends import timing
from gpubench.backends.cuda import AbortedError, CudaDevice, GatedClock
from gpubench.backends.nccl.communicator import GroupCommunicator
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.model.terms.operation import Allocator, DataType, ReduceOp
from gpubench.model.terms.ranks import UNWATCHED, Progress
from gpubench.ports.backend import BatchedLaunch, CollectiveCalls, Launch, Memory, Region
from gpubench.ports.group import Group


class NcclLaunch(Struct, frozen=True):
    """One operation: its NCCL calls with their arguments."""

    entries: tuple[timing.Entry, ...]

    def __call__(self) -> None:
        timing.CallTable(self.entries)()


def call_table(launches: Sequence[Launch]) -> timing.CallTable:
    """Join the calls of all launches into one table."""
    return timing.CallTable([entry for launch in cast("Sequence[NcclLaunch]", launches) for entry in launch.entries])


class NcclCalls:
    """NCCL's collectives with one communicator and one stream."""

    def __init__(self, communicator: GroupCommunicator, library: NcclLibrary, stream: int) -> None:
        nccl = library.nccl
        self._library = library
        self._tail: tuple[int, int] = (communicator.handle, stream)
        self._rank, self._ranks = communicator.rank, communicator.ranks
        self._types = {dtype: int(nccl.DataType[dtype.name.capitalize()]) for dtype in DataType}
        self._ops = {op: int(nccl.RedOp[op.name.capitalize()]) for op in ReduceOp}

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        return self._bind("ncclAllReduce", send, receive, count, self._types[dtype], self._ops[op])

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        return self._bind("ncclAllGather", send, receive, count, self._types[dtype])

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        return self._bind("ncclReduceScatter", send, receive, count, self._types[dtype], self._ops[op])

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        return self._bind("ncclBroadcast", send, receive, count, self._types[dtype], root)

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        return self._bind("ncclReduce", send, receive, count, self._types[dtype], self._ops[op], root)

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`ncclAlltoAll` since NCCL 2.28, else grouped sends and receives."""
        if self._library.has("ncclAlltoAll"):
            return self._bind("ncclAlltoAll", send, receive, count, self._types[dtype])
        return self.all_to_all_v(send, receive, [count] * self._ranks, dtype)

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """Grouped sends and receives. Empty blocks are skipped."""
        own, size = counts[self._rank], dtype.size_bytes
        entries: list[timing.Entry] = []
        for peer, (count, start) in enumerate(zip(counts, accumulate(counts, initial=0), strict=False)):
            part = Region(send.memory, send.offset_bytes + start * size)
            entries += [self._send(part, 0, count, dtype, peer)] if count else []
            entries += [self._receive(receive, peer, own, dtype, peer)] if own else []
        return self._group(entries)

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclGather` since NCCL 2.28, else grouped sends and receives. 1 KiB takes 5.8 and 7.5 µs on 4 H200s."""
        if self._library.has("ncclGather"):
            return self._bind("ncclGather", send, receive, count, self._types[dtype], root)
        receives = [self._receive(receive, peer, count, dtype, peer) for peer in range(self._ranks)]
        return self._group([self._send(send, 0, count, dtype, root), *(receives if self._rank == root else ())])

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclScatter` since NCCL 2.28, else grouped sends and receives."""
        if self._library.has("ncclScatter"):
            return self._bind("ncclScatter", send, receive, count, self._types[dtype], root)
        sends = [self._send(send, peer, count, dtype, peer) for peer in range(self._ranks)]
        return self._group([*(sends if self._rank == root else ()), self._receive(receive, 0, count, dtype, root)])

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        return self._group(
            [self._send(send, 0, count, dtype, destination), self._receive(receive, 0, count, dtype, source)]
        )

    def _bind(self, name: str, send: Region, receive: Region, *arguments: int) -> NcclLaunch:
        return NcclLaunch(((self._library.address(name), send.address, receive.address, *arguments, *self._tail),))

    def _send(self, region: Region, block: int, count: int, dtype: DataType, peer: int) -> timing.Entry:
        address = region.address + block * count * dtype.size_bytes
        return (self._library.address("ncclSend"), address, count, self._types[dtype], peer, *self._tail)

    def _receive(self, region: Region, block: int, count: int, dtype: DataType, peer: int) -> timing.Entry:
        address = region.address + block * count * dtype.size_bytes
        return (self._library.address("ncclRecv"), address, count, self._types[dtype], peer, *self._tail)

    def _group(self, entries: Sequence[timing.Entry]) -> NcclLaunch:
        begin, end = self._library.address("ncclGroupStart"), self._library.address("ncclGroupEnd")
        return NcclLaunch(((begin,), *entries, (end,)))


class NcclBackend:
    """NCCL collectives on one GPU, with a main communicator and optional further communicators.

    `allocations` has the address and size in bytes of each buffer that NCCL allocated. Such buffers can be registered.
    """

    name = "nccl"
    buffers = 2

    def __init__(
        self,
        group: Group,
        device: CudaDevice,
        library: NcclLibrary,
        allocator: Allocator = Allocator.CUDA,
        progress: Progress = UNWATCHED,
    ) -> None:
        self._device = device
        self._marks = timing.Marks(device.cupy, device.stream, progress)
        self._allocator = allocator
        self._library = library
        self._communicators: dict[int, GroupCommunicator] = {}
        self.allocations: list[tuple[int, int]] = []
        self._aborted = False
        self._issued_seconds: float | None = None
        self._group = group
        self._starting_line = timing.StartingLine(group)
        self.calls = self.open(group)

    def open(self, group: Group) -> NcclCalls:
        """Open another communicator on the same stream. NCCL reads variables such as NCCL_ALGO again for it."""
        return self.adopt(GroupCommunicator(self._library, group))

    def adopt(self, communicator: GroupCommunicator) -> NcclCalls:
        """Return the collectives of a communicator that was created elsewhere. This backend also watches and
        destroys it.
        """
        calls = NcclCalls(communicator, self._library, self._device.stream.ptr)
        self._communicators[id(calls)] = communicator
        return calls

    def drop(self, calls: CollectiveCalls) -> None:
        """Abort a communicator that NCCL refuses to use. Destroying it instead could hang."""
        self._communicators.pop(id(calls)).abort()

    def chain(self, launches: Sequence[Launch]) -> Launch:
        return NcclLaunch(tuple(entry for launch in cast("Sequence[NcclLaunch]", launches) for entry in launch.entries))

    def libraries(self) -> Mapping[str, str]:
        libraries = {"NCCL": f"{self._library.version} from {self._library.path}"} | self._device.libraries()
        if timing.native_loop() is None:
            libraries["launches"] = "called from Python, so small sizes take longer"
        return libraries

    @property
    def memory_source(self) -> object:
        return self._device if self._allocator is Allocator.CUDA else self

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        if self._allocator is Allocator.NCCL:
            address = self._library.allocate(size_bytes)
            self.allocations.append((address, size_bytes))
            return self._device.adopt(address, size_bytes, self._library.free)
        return self._device.allocate(size_bytes)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        # Kernels that fill buffers run on the same stream. They must finish before a capture or a measurement begins.
        self._device.stream.synchronize()
        if graph_replays:
            calls = partial(self._library.issue, call_table(launches))
            return self._marks.replays(launches, graph_replays, partial(self._device.capture, calls))
        return self._marks.between(timing.join_groups(launches, self._marks.groups(launches), call_table))

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """Join operations into one launch, with an event after each batch."""
        self._device.stream.synchronize()
        groups = self._marks.every(launches, operations)
        return self._marks.clocked(timing.join_groups(launches, groups, call_table))

    def once(self, launch: Launch) -> None:
        self._library.issue(launch)
        self._wait(launch)

    def seconds(self, launch: Launch) -> float:
        with timing.no_garbage_collection():
            start = perf_counter()
            self._library.issue(launch)
            return self._seconds_since(start, launch)

    def together(self, launch: Launch) -> float:
        """Return the wall time from a barrier in seconds. The first call follows the barrier immediately."""
        self._device.stream.synchronize()
        behind = self._starting_line.before(launch) if isinstance(launch, timing.CallTable) else None
        if behind is None:
            self._group.barrier()
            return self.seconds(launch)
        with timing.no_garbage_collection():
            self._library.issue(behind)
            return self._seconds_since(self._starting_line.barrier_passed_s, launch)

    def _seconds_since(self, start: float, launch: Launch) -> float:
        self._issued_seconds = perf_counter() - start
        self._wait(launch)
        seconds = perf_counter() - start
        self._marks.measured(seconds)
        return seconds

    def issue(self, launch: Launch) -> None:
        self._library.issue(launch)

    def _wait(self, launch: Launch) -> None:
        self.wait_until_idle(self._device.stream, launch.look if isinstance(launch, timing.MarkedLaunch) else None)

    def wait_until_idle(self, stream: Any, look: Callable[[], object] | None = None) -> None:
        """Wait until a stream is idle, and poll NCCL's asynchronous errors meanwhile. Raise AbortedError after an
        abort.
        """
        communicators = cycle(self._communicators.values())
        while not stream.done:
            next(communicators).check_async_error()
            if look is not None:
                look()
        if self._aborted:
            raise AbortedError

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Return the host time in seconds to issue one operation of the last measurement. None for captured graphs."""
        if isinstance(launch, timing.MarkedLaunch):
            return launch.issue_seconds
        known = isinstance(launch, timing.CallTable) and 0 < operations <= timing.MOST_QUEUED
        return self._issued_seconds / operations if known and self._issued_seconds is not None else None

    def trouble(self) -> str:
        """Return NCCL's asynchronous error, or ''. Another thread may call this during an operation."""
        return next(filter(None, (communicator.trouble() for communicator in list(self._communicators.values()))), "")

    def abort(self) -> None:
        """Abort all communicators. They cannot be used any more. Another thread may call this."""
        self._aborted = True
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def close(self) -> None:
        self._device.stream.synchronize()
        for communicator in self._communicators.values():
            communicator.destroy()
        self._device.close()


class GatedNccl(NcclBackend):
    """NCCL collectives, measured in GPU time from the opening of a gate."""

    def __init__(
        self,
        group: Group,
        device: CudaDevice,
        library: NcclLibrary,
        allocator: Allocator = Allocator.CUDA,
        progress: Progress = UNWATCHED,
    ) -> None:
        super().__init__(group, device, library, allocator, progress)
        self._clock = GatedClock(device, group, progress, self._join, partial(self.wait_until_idle, device.stream))

    def _join(self, launches: Sequence[Launch]) -> Launch:
        return partial(self.issue, call_table(launches))

    def libraries(self) -> Mapping[str, str]:
        """Return the library versions, and a note if the driver has no gate."""
        return {**super().libraries(), **self._clock.gate_words()}

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """Join operations into one launch, or capture them in a CUDA graph, which needs no gate."""
        return self._clock.bind(launches, graph_replays)

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        return self._clock.batch_launches(launches, operations)

    def seconds(self, launch: Launch) -> float:
        return self._clock.seconds(launch)

    def together(self, launch: Launch) -> float:
        """Return the GPU time of all operations in seconds. No rank starts a portion before all ranks have enqueued
        it.
        """
        return self._clock.together(launch)

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        return self._clock.issue_seconds(launch, operations)

    def close(self) -> None:
        self._device.stream.synchronize()
        self._clock.free_gate()
        super().close()
