"""NCCL's collectives as calls into the library that CuPy loaded, with all their arguments bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from gpubench.hardware.timing.native_loop import CallTable, Entry
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.ports.launch import Launch
from gpubench.ports.memory import Region

if TYPE_CHECKING:
    from gpubench.hardware.nccl.backend import NcclLibrary


@dataclass(frozen=True, slots=True)
class NcclLaunch:
    """One operation: the calls that issue it, with all their arguments."""

    entries: tuple[Entry, ...]

    def __call__(self) -> None:
        """Issue it."""
        CallTable(self.entries)()


def call_table(launches: Sequence[Launch]) -> CallTable:
    """The calls of all launches in order, as one."""
    return CallTable([entry for launch in cast("Sequence[NcclLaunch]", launches) for entry in launch.entries])


class NcclCalls:
    """NCCL's collectives on one communicator and stream, bound as calls into the loaded library."""

    def __init__(self, communicator: Any, library: "NcclLibrary", stream: int) -> None:
        nccl = library.nccl
        self._library = library
        self._tail: tuple[int, int] = (communicator.comm, stream)
        self._rank: int = communicator.rank_id()
        self._ranks: int = communicator.size()
        self._types: dict[DataType, int] = {dtype: getattr(nccl, f"NCCL_{dtype.name}") for dtype in DataType}
        self._ops: dict[ReduceOp, int] = {op: getattr(nccl, f"NCCL_{op.name}") for op in ReduceOp}

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

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclGather` of NCCL 2.28 and later, else a send from every rank and the root's receives in one group.

        On 4 H200s the native call takes 5.8 µs for 1 KiB, the group 7.5 µs.
        """
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
        return NcclLaunch(((self._library.address(name), _address(send), _address(receive), *arguments, *self._tail),))

    def _send(self, region: Region, block: int, count: int, dtype: DataType, peer: int) -> Entry:
        """`ncclSend` of one block of a region."""
        address = _address(region) + block * count * dtype.size_bytes
        return (self._library.address("ncclSend"), address, count, self._types[dtype], peer, *self._tail)

    def _receive(self, region: Region, block: int, count: int, dtype: DataType, peer: int) -> Entry:
        """`ncclRecv` into one block of a region."""
        address = _address(region) + block * count * dtype.size_bytes
        return (self._library.address("ncclRecv"), address, count, self._types[dtype], peer, *self._tail)

    def _group(self, entries: Sequence[Entry]) -> NcclLaunch:
        begin, end = self._library.address("ncclGroupStart"), self._library.address("ncclGroupEnd")
        return NcclLaunch(((begin,), *entries, (end,)))


def _address(region: Region) -> int:
    """The device address of a region in memory of this backend."""
    address: int = region.memory.address + region.offset_bytes  # type: ignore[attr-defined]
    return address
