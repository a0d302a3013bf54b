"""The host backend: the same collectives with NumPy buffers over MPI, real data and real times, no GPU."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from gpubench.collectives.pattern import STORAGE, ArrayPattern, Stretch
from gpubench.errors import UsageError
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.process import free_memory as host_memory
from gpubench.hardware.timing.clock import no_garbage_collection
from gpubench.hardware.timing.loops import HostClockedLaunch, in_order
from gpubench.hardware.timing.pace import Pace
from gpubench.model.terms.data_pattern import Block, DataPattern
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.arrays import Array
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.group import Group
from gpubench.ports.launch import BatchedLaunch, Launch
from gpubench.ports.memory import Memory, Region

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_ELEMENTS = 2**30
"""Elements of one MPI call: MPI counts are 32-bit, and Open MPI 5 refuses 2**31 of them."""

_CHUNK_ELEMENTS = 2**18
"""Elements of a temporary array: a megabyte, which stays in a core's cache."""

_SECONDS_BETWEEN_REPORTS = 1e-4
"""Reporting each of many operations of 1 µs would add 8 % to them."""

_BLOCK_BYTES = 16
"""Blocks of the gather-like collectives are multiples of this, so their counts shrink by it."""


class NumpyMemory:
    """One NumPy buffer. Gigabytes take long to fill and to check: each piece is progress."""

    def __init__(self, size_bytes: int, progress: Progress = UNWATCHED) -> None:
        import numpy

        self._numpy = numpy
        self._progress = progress
        self.size_bytes = size_bytes
        self._bytes = numpy.empty(size_bytes, "uint8")

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """`count` elements from `offset_bytes` on, as a writable view."""
        width = self._numpy.dtype(dtype).itemsize
        return self._bytes[offset_bytes : offset_bytes + count * width].view(dtype)

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block, piece by piece."""
        pattern = ArrayPattern(self._numpy, data)
        for elements, stretch in self._pieces(data, block):
            elements[:] = pattern.sent(rank, stretch)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first bytes to a value."""
        self._bytes[:size_bytes] = value

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold."""
        pattern = ArrayPattern(self._numpy, data)
        return sum(
            pattern.wrong(elements, pattern.reduced(stretch) if source is None else pattern.sent(source, stretch))
            for block, source in blocks
            for elements, stretch in self._pieces(data, block)
        )

    def _pieces(self, data: DataPattern, block: Block) -> Iterator[tuple[Array, Stretch]]:
        """A block in pieces small enough for temporaries: several short buffers at once, or a part of a long one."""
        storage, seeds = STORAGE[data.dtype.size_bytes], block.seeds()
        table = self.array(0, block.buffers * block.stride, storage).reshape(block.buffers, block.stride)
        buffers_at_once = max(1, _CHUNK_ELEMENTS // block.count)
        for buffer in range(0, block.buffers, buffers_at_once):
            rows = slice(buffer, min(buffer + buffers_at_once, block.buffers))
            for first in range(0, block.count, _CHUNK_ELEMENTS):
                count = min(_CHUNK_ELEMENTS, block.count - first)
                begin = block.offset + first
                yield table[rows, begin : begin + count], Stretch(block.start + first, count, seeds[rows])
                self._progress.completed()


class HostBackend:
    """Collectives over an MPI communicator."""

    name = "host"
    buffers = 3  # Open MPI and MPICH reduce through working space of up to the size of the message

    def __init__(
        self,
        group: mpi.MpiGroup,
        ranks_on_node: int,
        most_elements: int = MOST_ELEMENTS,
        progress: Progress = UNWATCHED,
    ) -> None:
        self.calls = HostCalls(group.communicator, most_elements)
        self._group = group
        self._most_elements = most_elements
        self._ranks_on_node = ranks_on_node
        self._progress = progress
        self._pace = Pace(_SECONDS_BETWEEN_REPORTS)

    def open(self, group: Group) -> "HostCalls":
        """The collectives among the ranks of `group`, which is one of MPI's."""
        return HostCalls(cast("mpi.MpiGroup", group).communicator, self._most_elements)

    def drop(self, calls: CollectiveCalls) -> None:
        """MPI's communicators last as long as the job."""

    def in_order(self, launches: Sequence[Launch]) -> Launch:
        """One operation made of several, which block."""
        return in_order(launches)

    def libraries(self) -> dict[str, str]:
        """NumPy; MPI is named for every backend."""
        import numpy

        return {"numpy": numpy.__version__}

    def free_bytes(self) -> int:
        """This rank's share of what the host, or its control group, has left."""
        return int(host_memory.free_bytes() * host_memory.SHARE) // self._ranks_on_node

    def allocate(self, size_bytes: int) -> Memory:
        """A NumPy buffer; pages are taken as they are touched."""
        return NumpyMemory(size_bytes, self._progress)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order; UsageError where replays are asked for: there are no graphs on a CPU."""
        if graph_replays:
            raise UsageError("--graph needs GPUs: the host backend has no CUDA graphs", next_step="leave --graph out")

        groups = self._pace.groups(launches)
        return in_order(launches) if len(groups) == 1 else HostClockedLaunch(launches, groups, self._progress)

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """All launches in order, with a look at the clock after each so many of them."""
        return HostClockedLaunch(launches, self._pace.every(launches, operations), self._progress)

    def seconds(self, launch: Launch) -> float:
        """Wall time of blocking MPI calls."""
        with no_garbage_collection():
            start = perf_counter()
            launch()
            seconds = perf_counter() - start
        self._progress.completed(self._pace.measured(seconds))
        return seconds

    def once(self, launch: Launch) -> None:
        """Run one operation; it blocks."""
        launch()

    def together(self, launch: Launch) -> float:
        """The wall time behind a barrier."""
        self._group.barrier()
        return self.seconds(launch)

    def close(self) -> None:
        """NumPy's buffers go with their references."""


def check_types(dtypes: Sequence[DataType], ops: Sequence[ReduceOp] | None) -> None:
    """Raise UsageError where the MPI library cannot reduce one of these types; `ops` of None only move data."""
    if ops is None:
        return
    known = _mpi_types()
    for dtype in dtypes:
        if dtype not in known:
            raise UsageError(
                f"--dtype {dtype} with the host backend: this MPI library cannot reduce it",
                expected=f"one of {', '.join(known)}",
                next_step=f"--backend nccl reduces {dtype} on GPUs",
            )


def _mpi_types() -> "Mapping[DataType, MPI.Datatype]":
    """Types that can be reduced: float16 where the library has it; bfloat16 never, since NumPy cannot average it."""
    from mpi4py import MPI

    types: dict[DataType, MPI.Datatype] = {
        DataType.INT8: MPI.INT8_T,
        DataType.UINT8: MPI.UINT8_T,
        DataType.INT32: MPI.INT32_T,
        DataType.INT64: MPI.INT64_T,
        DataType.FLOAT16: MPI.FLOAT16_T,
        DataType.FLOAT32: MPI.FLOAT,
        DataType.FLOAT64: MPI.DOUBLE,
    }
    return {dtype: handle for dtype, handle in types.items() if handle != MPI.DATATYPE_NULL}


class HostCalls:
    """NCCL's collectives on NumPy buffers; every launch blocks until the data are there."""

    def __init__(self, communicator: "MPI.Comm", most_elements: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._ranks = communicator.Get_size()
        self._most_elements = most_elements
        self._types = _mpi_types()
        self._block = MPI.BYTE.Create_contiguous(_BLOCK_BYTES).Commit()
        self._ops = {op: MPI.SUM if op is ReduceOp.AVG else getattr(MPI, op.name) for op in ReduceOp}

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`MPI_Allreduce`, an average divided by hand."""
        launches: list[Launch] = [
            partial(
                self._communicator.Allreduce,
                self._input(send, receive, piece, dtype),
                self._typed(receive, piece, dtype),
                self._ops[op],
            )
            for piece in self._pieces(count)
        ]
        return in_order([*launches, *self._divide(receive, count, dtype, op)])

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`MPI_Allgather`."""
        own = Region(receive.memory, receive.offset_bytes + self._rank * count * dtype.size_bytes)
        given = self._mpi.IN_PLACE if send == own else self._blocks(send, count, dtype)
        return partial(self._communicator.Allgather, given, self._blocks(receive, count * self._ranks, dtype))

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`MPI_Reduce_scatter_block`; where all blocks pass the count limit, one `MPI_Reduce` a block and piece."""
        divide = self._divide(receive, count, dtype, op)
        if count * self._ranks > self._most_elements:
            return in_order([*self._reduce_blocks(send, receive, count, dtype, op), *divide])
        whole = self._typed(send, slice(0, count * self._ranks), dtype)
        if send.memory is not receive.memory:
            taken = self._typed(receive, slice(0, count), dtype)
            return in_order([partial(self._communicator.Reduce_scatter_block, whole, taken, self._ops[op]), *divide])
        # MPI leaves the in-place result in the first block, NCCL in the rank's own.
        reduce = partial(self._communicator.Reduce_scatter_block, self._mpi.IN_PLACE, whole, self._ops[op])
        return in_order([reduce, self._copy(send, receive, count, dtype), *divide])

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`MPI_Bcast` in the receive buffer, into which the root first copies what it sends."""
        launches: list[Launch] = []
        if self._rank == root and send != receive:
            launches.append(self._copy(send, receive, count, dtype))
        pieces = self._pieces(count * dtype.size_bytes)
        launches += [partial(self._communicator.Bcast, self._bytes(receive, piece), root) for piece in pieces]
        return in_order(launches)

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        """`MPI_Reduce`, an average divided by hand on the root."""
        launches: list[Launch] = []
        for piece in self._pieces(count):
            if self._rank == root:
                given, taken = self._input(send, receive, piece, dtype), self._typed(receive, piece, dtype)
            else:
                given, taken = self._typed(send, piece, dtype), None
            launches.append(partial(self._communicator.Reduce, given, taken, self._ops[op], root))
        return in_order([*launches, *(self._divide(receive, count, dtype, op) if self._rank == root else ())])

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`MPI_Alltoall`."""
        elements = count * self._ranks
        return partial(
            self._communicator.Alltoall, self._blocks(send, elements, dtype), self._blocks(receive, elements, dtype)
        )

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`MPI_Gather`."""
        own = Region(receive.memory, receive.offset_bytes + self._rank * count * dtype.size_bytes)
        given = self._mpi.IN_PLACE if self._rank == root and send == own else self._blocks(send, count, dtype)
        taken = self._blocks(receive, count * self._ranks, dtype) if self._rank == root else None
        return partial(self._communicator.Gather, given, taken, root)

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`MPI_Scatter`."""
        own = Region(send.memory, send.offset_bytes + self._rank * count * dtype.size_bytes)
        given = self._blocks(send, count * self._ranks, dtype) if self._rank == root else None
        taken = self._mpi.IN_PLACE if self._rank == root and receive == own else self._blocks(receive, count, dtype)
        return partial(self._communicator.Scatter, given, taken, root)

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """Both at once: `MPI_Sendrecv` for every piece."""
        send_and_receive = partial(self._communicator.Sendrecv, dest=destination, source=source)
        return in_order(
            [
                partial(send_and_receive, self._bytes(send, piece), recvbuf=self._bytes(receive, piece))
                for piece in self._pieces(count * dtype.size_bytes)
            ]
        )

    def _reduce_blocks(
        self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp
    ) -> Iterator[Launch]:
        for owner in range(self._ranks):
            block = Region(send.memory, send.offset_bytes + owner * count * dtype.size_bytes)
            yield self.reduce(block, receive, count, dtype, ReduceOp.SUM if op is ReduceOp.AVG else op, owner)

    def _pieces(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._most_elements):
            yield slice(start, min(start + self._most_elements, count))

    def _input(self, send: Region, receive: Region, piece: slice, dtype: DataType) -> Any:
        return self._mpi.IN_PLACE if send == receive else self._typed(send, piece, dtype)

    def _typed(self, region: Region, piece: slice, dtype: DataType) -> tuple[Array, "MPI.Datatype"]:
        offset = region.offset_bytes + piece.start * dtype.size_bytes
        size_bytes = (piece.stop - piece.start) * dtype.size_bytes
        return region.memory.array(offset, size_bytes, "uint8"), self._types[dtype]

    def _bytes(self, region: Region, piece: slice) -> tuple[Array, "MPI.Datatype"]:
        return region.memory.array(region.offset_bytes + piece.start, piece.stop - piece.start, "uint8"), self._mpi.BYTE

    def _blocks(self, region: Region, elements: int, dtype: DataType) -> tuple[Array, "MPI.Datatype"]:
        return region.memory.array(region.offset_bytes, elements * dtype.size_bytes, "uint8"), self._block

    def _copy(self, source: Region, destination: Region, count: int, dtype: DataType) -> Launch:
        size_bytes = count * dtype.size_bytes
        given = source.memory.array(source.offset_bytes, size_bytes, "uint8")
        taken = destination.memory.array(destination.offset_bytes, size_bytes, "uint8")
        return partial(taken.__setitem__, slice(None), given)

    def _divide(self, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> tuple[Launch, ...]:
        """The division of a sum for `ReduceOp.AVG`, nothing for any other; integers are rounded down."""
        if op is not ReduceOp.AVG:
            return ()
        values = receive.memory.array(receive.offset_bytes, count, dtype.value)
        is_float = dtype in (DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64)
        return (partial(values.__itruediv__ if is_float else values.__ifloordiv__, self._ranks),)
