"""MPI's collectives on buffers of NumPy and CuPy alike."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpubench.errors import UsageError
from gpubench.hardware.timing.loops import in_order
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.ports.arrays import Array
from gpubench.ports.launch import Launch
from gpubench.ports.memory import Region

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_ELEMENTS = 2**30
"""Elements of one MPI call: MPI counts are 32-bit, and Open MPI 5 refuses 2**31 of them."""

_BLOCK_BYTES = 16
"""Blocks of the gather-like collectives are multiples of this, so their counts shrink by it."""


def check_types(backend: str, dtypes: Sequence[DataType], ops: Sequence[ReduceOp] | None) -> None:
    """Raise UsageError where the MPI library cannot reduce one of these types; `ops` of None only move data."""
    if ops is None:
        return
    known = _mpi_types()
    for dtype in dtypes:
        if dtype not in known:
            raise UsageError(
                f"--dtype {dtype} with the {backend} backend: this MPI library cannot reduce it",
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


class MpiCalls:
    """NCCL's collectives on arrays that MPI is handed; every launch blocks until the data are there.

    `settle` waits for what a copy or a division, which MPI is not asked for, has put on a stream; None where nothing
    has one.
    """

    def __init__(
        self, communicator: "MPI.Comm", most_elements: int = MOST_ELEMENTS, settle: Launch | None = None
    ) -> None:
        from mpi4py import MPI

        self._settle = () if settle is None else (settle,)

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
        return in_order([partial(taken.__setitem__, slice(None), given), *self._settle])

    def _divide(self, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> tuple[Launch, ...]:
        """The division of a sum for `ReduceOp.AVG`, nothing for any other; integers are rounded down."""
        if op is not ReduceOp.AVG:
            return ()
        values = receive.memory.array(receive.offset_bytes, count, dtype.value)
        is_float = dtype in (DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64)
        return (partial(values.__itruediv__ if is_float else values.__ifloordiv__, self._ranks), *self._settle)
