"""The nccl backend: communicators whose calls return at once, and collectives, as calls into the loaded library."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, cycle, islice
from time import perf_counter
from typing import Any, cast

from gpubench.backends import timing
from gpubench.backends.cuda import CudaDevice, GatedClock
from gpubench.backends.nccl.communicator import GroupCommunicator
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.model.terms.operation import Allocator, DataType, ReduceOp
from gpubench.model.terms.ranks import UNWATCHED, Progress
from gpubench.ports.backend import BatchedLaunch, CollectiveCalls, Launch, Memory, Region
from gpubench.ports.group import Group
from gpubench.records import dataclass


@dataclass(frozen=True, slots=True)
class NcclLaunch:
    """One operation: the calls that issue it, with all their arguments."""

    entries: tuple[timing.Entry, ...]

    def __call__(self) -> None:
        """Issue it."""
        timing.CallTable(self.entries)()


def call_table(launches: Sequence[Launch]) -> timing.CallTable:
    """The calls of all launches in order, as one."""
    return timing.CallTable([entry for launch in cast("Sequence[NcclLaunch]", launches) for entry in launch.entries])


class NcclCalls:
    """NCCL's collectives on one communicator and stream, bound as calls into the loaded library."""

    def __init__(self, communicator: GroupCommunicator, library: NcclLibrary, stream: int) -> None:
        nccl = library.nccl
        self._library = library
        self._tail: tuple[int, int] = (communicator.handle, stream)
        self._rank, self._ranks = communicator.rank, communicator.ranks
        self._types = {dtype: int(nccl.DataType[dtype.name.capitalize()]) for dtype in DataType}
        self._ops = {op: int(nccl.RedOp[op.name.capitalize()]) for op in ReduceOp}

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`ncclAllReduce`."""
        return self._bind("ncclAllReduce", send, receive, count, self._types[dtype], self._ops[op])

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`ncclAllGather`."""
        return self._bind("ncclAllGather", send, receive, count, self._types[dtype])

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`ncclReduceScatter`."""
        return self._bind("ncclReduceScatter", send, receive, count, self._types[dtype], self._ops[op])

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclBroadcast`."""
        return self._bind("ncclBroadcast", send, receive, count, self._types[dtype], root)

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        """`ncclReduce`."""
        return self._bind("ncclReduce", send, receive, count, self._types[dtype], self._ops[op], root)

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`ncclAlltoAll` of NCCL 2.28 and later, else a send to and a receive from every rank in one group."""
        if self._library.has("ncclAlltoAll"):
            return self._bind("ncclAlltoAll", send, receive, count, self._types[dtype])
        pairs = [
            (self._send(send, peer, count, dtype, peer), self._receive(receive, peer, count, dtype, peer))
            for peer in range(self._ranks)
        ]
        return self._group([entry for pair in pairs for entry in pair])

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """A send to and a receive from every rank in one group, of what is not empty."""
        own, size = counts[self._rank], dtype.size_bytes
        entries: list[timing.Entry] = []
        for peer, (count, start) in enumerate(zip(counts, accumulate(counts, initial=0), strict=False)):
            part = Region(send.memory, send.offset_bytes + start * size)
            entries += [self._send(part, 0, count, dtype, peer)] if count else []
            entries += [self._receive(receive, peer, own, dtype, peer)] if own else []
        return self._group(entries)

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclGather` of NCCL 2.28 and later (1 KiB on 4 H200s: 5.8 µs), else sends and receives (7.5 µs)."""
        if self._library.has("ncclGather"):
            return self._bind("ncclGather", send, receive, count, self._types[dtype], root)
        receives = [self._receive(receive, peer, count, dtype, peer) for peer in range(self._ranks)]
        return self._group([self._send(send, 0, count, dtype, root), *(receives if self._rank == root else ())])

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclScatter` of NCCL 2.28 and later, else the root's sends and a receive on every rank in one group."""
        if self._library.has("ncclScatter"):
            return self._bind("ncclScatter", send, receive, count, self._types[dtype], root)
        sends = [self._send(send, peer, count, dtype, peer) for peer in range(self._ranks)]
        return self._group([*(sends if self._rank == root else ()), self._receive(receive, 0, count, dtype, root)])

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """`ncclSend` and `ncclRecv` in one group."""
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


class AbortedError(Exception):
    """The communicator was aborted while it worked: the stream is idle, and nothing was measured."""


class NcclBackend:
    """Collectives on one GPU: of one communicator, and of others that are opened beside it.

    `allocations` are address and bytes of what NCCL allocated for buffers, which can be registered with communicators.
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
        """The collectives of a new communicator of these ranks, on the same stream; it reads NCCL_ALGO anew."""
        return self.adopt(GroupCommunicator(self._library, group))

    def adopt(self, communicator: GroupCommunicator) -> NcclCalls:
        """The collectives of a communicator made elsewhere, on the same stream; it is watched and ended as others."""
        calls = NcclCalls(communicator, self._library, self._device.stream.ptr)
        self._communicators[id(calls)] = communicator
        return calls

    def drop(self, calls: CollectiveCalls) -> None:
        """Abort a communicator that NCCL has refused to use: to destroy it may wait for what never began."""
        self._communicators.pop(id(calls)).abort()

    def in_order(self, launches: Sequence[Launch]) -> Launch:
        """One operation made of several; the stream keeps their order."""
        return NcclLaunch(tuple(entry for launch in cast("Sequence[NcclLaunch]", launches) for entry in launch.entries))

    def libraries(self) -> Mapping[str, str]:
        """NCCL and where it was loaded from, driver, CUDA, CuPy."""
        libraries = {"NCCL": f"{self._library.version} from {self._library.path}"} | self._device.libraries()
        if timing.native_loop() is None:
            libraries["launches"] = "by Python: small sizes read high"
        return libraries

    @property
    def memory_source(self) -> object:
        """What memory is taken from: backends with the same one can share buffers."""
        return self._device if self._allocator is Allocator.CUDA else self

    def free_bytes(self) -> int:
        """Device memory that buffers may take."""
        return self._device.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        """A plain `cudaMalloc` allocation, or one of NCCL's."""
        if self._allocator is Allocator.NCCL:
            address = self._library.allocate(size_bytes)
            self.allocations.append((address, size_bytes))
            return self._device.adopt(address, size_bytes, self._library.free)
        return self._device.allocate(size_bytes)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order on the stream, or a captured graph of them."""
        # What fills and poisons the buffers runs on the same stream: neither a capture nor a timing may begin under it.
        self._device.stream.synchronize()
        if graph_replays:
            calls = partial(self._library.issue, call_table(launches))
            return self._marks.replays(launches, graph_replays, partial(self._device.capture, calls))
        groups, rest = self._marks.groups(launches), iter(launches)
        return self._marks.between([(call_table(list(islice(rest, count))), count) for count in groups])

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """All launches in order on the stream, with an event after each so many of them."""
        self._device.stream.synchronize()
        rest = iter(launches)
        batches = [tuple(islice(rest, count)) for count in self._marks.every(launches, operations)]
        # Launches go round, and so do batches of them: thousands of batches are a few tables.
        keys = [tuple(map(id, batch)) for batch in batches]
        tables = {key: call_table(batch) for key, batch in dict(zip(keys, batches, strict=True)).items()}
        return self._marks.clocked([(tables[key], len(key)) for key in keys])

    def once(self, launch: Launch) -> None:
        """Issue an operation, and wait until the stream is idle."""
        self._library.issue(launch)
        self._wait(launch)

    def seconds(self, launch: Launch) -> float:
        """Wall time until the stream is idle."""
        with timing.no_garbage_collection():
            start = perf_counter()
            self._library.issue(launch)
            return self._seconds_since(start, launch)

    def together(self, launch: Launch) -> float:
        """The same behind a barrier, with nothing between it and the first call."""
        self._device.stream.synchronize()
        behind = self._starting_line.before(launch) if isinstance(launch, timing.CallTable) else None
        if behind is None:
            self._group.barrier()
            return self.seconds(launch)
        with timing.no_garbage_collection():
            self._library.issue(behind)
            return self._seconds_since(self._starting_line.passed_at, launch)

    def _seconds_since(self, start: float, launch: Launch) -> float:
        self._issued_seconds = perf_counter() - start
        self._wait(launch)
        seconds = perf_counter() - start
        self._marks.measured(seconds)
        return seconds

    def issue(self, launch: Launch) -> None:
        """Put an operation on the stream, and return at once."""
        self._library.issue(launch)

    def _wait(self, launch: Launch) -> None:
        self.wait_for(self._device.stream, launch.look if isinstance(launch, timing.MarkedLaunch) else None)

    def wait_for(self, stream: Any, look: Callable[[], object] | None = None) -> None:
        """Until a stream is idle, polled with NCCL's asynchronous errors. Raises AbortedError after an abort."""
        in_turn = cycle(self._communicators.values())
        while not stream.done:
            next(in_turn).check_async_error()
            if look is not None:
                look()
        if self._aborted:
            raise AbortedError

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Seconds of the host to issue an operation of what was timed last; of captured graphs it is not known."""
        if isinstance(launch, timing.MarkedLaunch):
            return launch.issue_seconds
        known = isinstance(launch, timing.CallTable) and 0 < operations <= timing.MOST_QUEUED
        return self._issued_seconds / operations if known and self._issued_seconds is not None else None

    def trouble(self) -> str:
        """NCCL's asynchronous error, empty where it has none. For a thread: an operation may be under way."""
        return next(filter(None, (each.trouble() for each in list(self._communicators.values()))), "")

    def abort(self) -> None:
        """Abort the communicators, wherever they wait; they cannot be used afterwards. For a thread."""
        self._aborted = True
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def close(self) -> None:
        """Destroy the communicators, then free the buffers."""
        self._device.stream.synchronize()
        for communicator in self._communicators.values():
            communicator.destroy()
        self._device.close()


class GatedNccl(NcclBackend):
    """NCCL's collectives, timed by the GPU from the opening of a gate behind which they wait."""

    def __init__(
        self,
        group: Group,
        device: CudaDevice,
        library: NcclLibrary,
        allocator: Allocator = Allocator.CUDA,
        progress: Progress = UNWATCHED,
    ) -> None:
        super().__init__(group, device, library, allocator, progress)
        until_idle = partial(self.wait_for, device.stream)
        self._clock = GatedClock(device, group, progress, self._in_one, until_idle)

    def _in_one(self, launches: Sequence[Launch]) -> Launch:
        return partial(self.issue, call_table(launches))

    def libraries(self) -> Mapping[str, str]:
        """Those of every nccl backend, and whether there is a gate."""
        return {**super().libraries(), **self._clock.gate_words()}

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order on the stream, or a captured graph of them, which no gate holds."""
        return self._clock.bind(launches, graph_replays)

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """All launches in order on the stream, timed in batches of so many."""
        return self._clock.in_batches(launches, operations)

    def seconds(self, launch: Launch) -> float:
        """Wall time until the stream is idle."""
        return self._clock.seconds(launch)

    def together(self, launch: Launch) -> float:
        """Seconds of the GPU for all operations, each portion of them issued before it begins on any rank."""
        return self._clock.together(launch)

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Seconds of the host to issue one of the operations that were timed last."""
        return self._clock.issue_seconds(launch, operations)

    def close(self) -> None:
        """Destroy the communicators, then free buffers and gate."""
        self._device.stream.synchronize()
        self._clock.free_gate()
        super().close()
