"""The nccl backend: collectives by `cupy.cuda.nccl`, and by ctypes where CuPy wraps none."""

import ctypes
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from operator import call
from pathlib import Path
from time import perf_counter
from typing import Any

from gpubench import errors
from gpubench.hardware.clock import no_garbage_collection
from gpubench.hardware.cuda import CudaDevice
from gpubench.model.operation import DataType, ReduceOp
from gpubench.ports import Group, Launch, Memory, Region


class Allocator(StrEnum):
    """Who allocates the buffers: CUDA, as frameworks do, or NCCL, as nccl-tests does.

    In CUDA graphs NCCL registers its own allocations and copies directly from and to them; elsewhere they are alike.
    """

    CUDA = "cuda"
    NCCL = "nccl"


class _SymbolOrigin(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class NcclLibrary:
    """The libnccl that CuPy uses, which is the one asked for, if one was."""

    def __init__(self, asked: str | None = None) -> None:
        if asked is not None:
            # Loaded first and globally, it is the libnccl.so.2 that CuPy's extension is then bound to.
            try:
                ctypes.CDLL(asked, mode=ctypes.RTLD_GLOBAL).ncclGetVersion  # noqa: B018
            except (OSError, AttributeError) as error:
                raise errors.unreadable_nccl_library(asked, str(error)) from error
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from cupy.cuda import nccl
        if not nccl.available:
            detail = str(caught[-1].message).strip().splitlines()[0] if caught else "libnccl.so.2 is not found"
            raise errors.missing_nccl(detail)
        self.nccl: Any = nccl
        self.path = _origin_of_nccl()
        self.native = ctypes.CDLL(self.path)
        if asked is not None and Path(asked).resolve() != Path(self.path).resolve():
            raise errors.nccl_library_not_used(asked, self.path)

    @property
    def version(self) -> str:
        """'2.28.9', from NCCL's number: 22809, and 2708 before NCCL 2.9."""
        number = self.nccl.get_version()
        thousand = 10_000 if number >= 10_000 else 1_000
        return f"{number // thousand}.{number % thousand // 100}.{number % 100}"

    def allocate(self, size_bytes: int) -> int:
        """The address of memory that NCCL allocated, as nccl-tests has it do.

        Raises:
            UsageError: this NCCL has no allocator (2.19 is the first that does).
        """
        function = self.function("ncclMemAlloc")
        if function is None:
            raise errors.no_nccl_allocator(self.version)
        address = ctypes.c_void_p()
        self.nccl.check_status(function(ctypes.byref(address), ctypes.c_size_t(size_bytes)))
        return address.value or 0

    def free(self, address: int) -> None:
        """Give memory back that `allocate` took."""
        self.nccl.check_status(self.native.ncclMemFree(ctypes.c_void_p(address)))

    def function(self, name: str) -> Callable[..., int] | None:
        """A function of the library by its C name, or None where this version has none."""
        found: Callable[..., int] | None = getattr(self.native, name, None)
        return found


def _origin_of_nccl() -> str:
    """The file that `ncclGetVersion`, as CuPy's extension calls it, comes from."""
    from cupy_backends.cuda.libs import nccl as extension

    function = ctypes.CDLL(extension.__file__).ncclGetVersion
    origin = _SymbolOrigin()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(origin))
    return (origin.file or b"").decode()


class NcclBackend:
    """Collectives of one communicator on one GPU."""

    name = "nccl"
    buffers = 2

    def __init__(
        self, group: Group, device: CudaDevice, library: NcclLibrary, allocator: Allocator = Allocator.CUDA
    ) -> None:
        self._device = device
        self._allocator = allocator
        self._library = library
        unique_id = group.broadcast(library.nccl.get_unique_id() if group.rank == 0 else None)
        self._communicator = library.nccl.NcclCommunicator(group.size, unique_id, group.rank)
        self.calls = NcclCalls(self._communicator, library, device.stream.ptr)

    def libraries(self) -> Mapping[str, str]:
        """NCCL and where it was loaded from, driver, CUDA, CuPy."""
        return {"NCCL": f"{self._library.version} from {self._library.path}"} | self._device.libraries()

    def free_bytes(self) -> int:
        """Device memory that buffers may take."""
        return self._device.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        """A plain `cudaMalloc` allocation, or one of NCCL's."""
        if self._allocator is Allocator.NCCL:
            return self._device.adopt(self._library.allocate(size_bytes), size_bytes, self._library.free)
        return self._device.allocate(size_bytes)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order on the stream, or a captured graph of them."""

        def launch_all() -> None:
            # A loop in C: at small sizes the host's time for a launch is what is measured.
            deque(map(call, launches), maxlen=0)

        # What fills and poisons the buffers runs on the same stream: a capture must not begin under it, nor a timing.
        self._device.stream.synchronize()
        return self._device.capture(launch_all, graph_replays) if graph_replays else launch_all

    def seconds(self, launch: Launch) -> float:
        """Wall time until the stream is idle, polled as nccl-tests polls it, NCCL's asynchronous errors included."""
        stream, communicator = self._device.stream, self._communicator
        with no_garbage_collection():
            start = perf_counter()
            launch()
            while not stream.done:
                communicator.check_async_error()
            return perf_counter() - start

    def close(self) -> None:
        """Destroy the communicator, then free the buffers."""
        self._device.stream.synchronize()
        self._communicator.destroy()
        self._device.close()


class NcclCalls:
    """NCCL's collectives on one communicator and stream, every argument bound beforehand.

    A timed loop then costs one C call an iteration: 5 to 7 µs of host time on an H200 machine, as nccl-tests needs.
    """

    def __init__(self, communicator: Any, library: NcclLibrary, stream: int) -> None:
        nccl = library.nccl
        self._nccl = nccl
        self._communicator = communicator
        self._library = library
        self._stream = stream
        self._rank: int = communicator.rank_id()
        self._ranks: int = communicator.size()
        self._types = {
            DataType.INT8: nccl.NCCL_INT8,
            DataType.UINT8: nccl.NCCL_UINT8,
            DataType.INT32: nccl.NCCL_INT32,
            DataType.INT64: nccl.NCCL_INT64,
            DataType.FLOAT16: nccl.NCCL_FLOAT16,
            DataType.BFLOAT16: nccl.NCCL_BFLOAT16,
            DataType.FLOAT32: nccl.NCCL_FLOAT32,
            DataType.FLOAT64: nccl.NCCL_FLOAT64,
        }
        self._ops = {
            ReduceOp.SUM: nccl.NCCL_SUM,
            ReduceOp.PROD: nccl.NCCL_PROD,
            ReduceOp.MAX: nccl.NCCL_MAX,
            ReduceOp.MIN: nccl.NCCL_MIN,
            ReduceOp.AVG: nccl.NCCL_AVG,
        }

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`ncclAllReduce`."""
        arguments = (_address(send), _address(receive), count, self._types[dtype], self._ops[op], self._stream)
        return partial(self._communicator.allReduce, *arguments)

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`ncclAllGather`."""
        arguments = (_address(send), _address(receive), count, self._types[dtype], self._stream)
        return partial(self._communicator.allGather, *arguments)

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`ncclReduceScatter`."""
        arguments = (_address(send), _address(receive), count, self._types[dtype], self._ops[op], self._stream)
        return partial(self._communicator.reduceScatter, *arguments)

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclBroadcast`."""
        arguments = (_address(send), _address(receive), count, self._types[dtype], root, self._stream)
        return partial(self._communicator.broadcast, *arguments)

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        """`ncclReduce`."""
        arguments = (_address(send), _address(receive), count, self._types[dtype], self._ops[op], root, self._stream)
        return partial(self._communicator.reduce, *arguments)

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`ncclAlltoAll` of NCCL 2.28 and later, else a send to and a receive from every rank in one group."""
        native = self._native("ncclAlltoAll", send, receive, count, dtype)
        block = count * dtype.size_bytes
        return native or self._grouped(
            partial(operation, _address(region) + peer * block, count, self._types[dtype], peer, self._stream)
            for peer in range(self._ranks)
            for operation, region in ((self._communicator.send, send), (self._communicator.recv, receive))
        )

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclGather` of NCCL 2.28 and later, else a send from every rank and the root's receives in one group."""
        native = self._native("ncclGather", send, receive, count, dtype, root)
        if native:
            return native
        block, tail = count * dtype.size_bytes, (self._stream,)
        sends = [partial(self._communicator.send, _address(send), count, self._types[dtype], root, *tail)]
        receives = [
            partial(self._communicator.recv, _address(receive) + peer * block, count, self._types[dtype], peer, *tail)
            for peer in range(self._ranks)
        ]
        return self._grouped([*sends, *(receives if self._rank == root else ())])

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclScatter` of NCCL 2.28 and later, else the root's sends and a receive on every rank in one group."""
        native = self._native("ncclScatter", send, receive, count, dtype, root)
        if native:
            return native
        block, tail = count * dtype.size_bytes, (self._stream,)
        sends = [
            partial(self._communicator.send, _address(send) + peer * block, count, self._types[dtype], peer, *tail)
            for peer in range(self._ranks)
        ]
        receives = [partial(self._communicator.recv, _address(receive), count, self._types[dtype], root, *tail)]
        return self._grouped([*(sends if self._rank == root else ()), *receives])

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """`ncclSend` and `ncclRecv` in one group."""
        kind = self._types[dtype]
        return self._grouped(
            (
                partial(self._communicator.send, _address(send), count, kind, destination, self._stream),
                partial(self._communicator.recv, _address(receive), count, kind, source, self._stream),
            )
        )

    def _native(
        self, name: str, send: Region, receive: Region, count: int, dtype: DataType, *root: int
    ) -> Launch | None:
        """A function that CuPy does not wrap, by ctypes; None where this NCCL has none.

        On 4 H200s it takes 5.8 µs for a 1 KiB gather, grouped sends and receives 7.5 µs.
        """
        function = self._library.function(name)
        if function is None:
            return None
        arguments = (
            ctypes.c_void_p(_address(send)),
            ctypes.c_void_p(_address(receive)),
            ctypes.c_size_t(count),
            *(ctypes.c_int(value) for value in (self._types[dtype], *root)),
            ctypes.c_void_p(self._communicator.comm),
            ctypes.c_void_p(self._stream),
        )
        check_status = self._nccl.check_status

        def launch() -> None:
            status = function(*arguments)
            if status:
                check_status(status)

        return launch

    def _grouped(self, launches: Any) -> Launch:
        begin, end, operations = self._nccl.groupStart, self._nccl.groupEnd, tuple(launches)

        def launch() -> None:
            begin()
            for operation in operations:
                operation()
            end()

        return launch


def _address(region: Region) -> int:
    """The device address of a region in memory of this backend."""
    address: int = region.memory.address + region.offset_bytes  # type: ignore[attr-defined]
    return address
