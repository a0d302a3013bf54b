"""The nccl backend: communicators by `cupy.cuda.nccl`, collectives as calls into the library that it loaded."""

import ctypes
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from gpubench import errors
from gpubench.hardware.clock import no_garbage_collection
from gpubench.hardware.cuda import CudaDevice
from gpubench.hardware.native_loop import CallFailedError, CallTable, Entry, native_loop
from gpubench.model.operation import DataType, ReduceOp
from gpubench.ports import Group, Launch, Memory, Region

_RESET_LOG = "ncclResetDebugInit"
_LAST_ERROR = "ncclGetLastError"


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
                _load(asked, ctypes.RTLD_GLOBAL).ncclGetVersion  # noqa: B018
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
        self._native = _load(self.path)
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
        if not self.has("ncclMemAlloc"):
            raise errors.no_nccl_allocator(self.version)
        address = ctypes.c_void_p()
        self.issue(CallTable([(self.address("ncclMemAlloc"), ctypes.addressof(address), size_bytes)]))
        return address.value or 0

    def free(self, address: int) -> None:
        """Give memory back that `allocate` took."""
        self.issue(CallTable([(self.address("ncclMemFree"), address)]))

    def issue(self, launch: Launch) -> None:
        """Make the calls of a launch; what NCCL says of one that failed is raised as CuPy's NcclError."""
        try:
            launch()
        except CallFailedError as error:
            self.nccl.check_status(error.status)
            raise

    @property
    def error(self) -> type[Exception]:
        """What is raised when a call of NCCL's fails."""
        failed: type[Exception] = self.nccl.NcclError
        return failed

    @property
    def can_reset_log(self) -> bool:
        """Whether NCCL can read NCCL_DEBUG and its like again: since 2.24.3."""
        return self.has(_RESET_LOG)

    def reset_log(self) -> None:
        """Have NCCL read those variables again, at its next line at the latest."""
        ctypes.CFUNCTYPE(None)(self.address(_RESET_LOG))()

    def last_error(self) -> str:
        """The text of the last warning of NCCL's in this process, whatever it logs; '' before NCCL 2.13, or of none."""
        if not self.has(_LAST_ERROR):
            return ""
        text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(self.address(_LAST_ERROR))(None)
        return (text or b"").decode(errors="replace").strip()

    def has(self, name: str) -> bool:
        """Whether this version has a function of that C name."""
        return hasattr(self._native, name)

    def address(self, name: str) -> int:
        """The address of a function by its C name."""
        return ctypes.cast(getattr(self._native, name), ctypes.c_void_p).value or 0


def _load(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    return ctypes.CDLL(path, mode)


def _origin_of_nccl() -> str:
    """The file that `ncclGetVersion`, as CuPy's extension calls it, comes from."""
    from cupy_backends.cuda.libs import nccl as extension

    function = _load(extension.__file__).ncclGetVersion
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
        libraries = {"NCCL": f"{self._library.version} from {self._library.path}"} | self._device.libraries()
        if native_loop() is None:
            libraries["launches"] = "by Python: small sizes read high"
        return libraries

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
        table = CallTable([entry for launch in cast("Sequence[NcclLaunch]", launches) for entry in launch.entries])
        # What fills and poisons the buffers runs on the same stream: neither a capture nor a timing may begin under it.
        self._device.stream.synchronize()
        return self._device.capture(partial(self._library.issue, table), graph_replays) if graph_replays else table

    def seconds(self, launch: Launch) -> float:
        """Wall time until the stream is idle, polled as nccl-tests polls it, NCCL's asynchronous errors included."""
        stream, communicator = self._device.stream, self._communicator
        with no_garbage_collection():
            start = perf_counter()
            self._library.issue(launch)
            while not stream.done:
                communicator.check_async_error()
            return perf_counter() - start

    def close(self) -> None:
        """Destroy the communicator, then free the buffers."""
        self._device.stream.synchronize()
        self._communicator.destroy()
        self._device.close()


@dataclass(frozen=True, slots=True)
class NcclLaunch:
    """One operation: the calls that issue it, with all their arguments."""

    entries: tuple[Entry, ...]

    def __call__(self) -> None:
        """Issue it."""
        CallTable(self.entries)()


class NcclCalls:
    """NCCL's collectives on one communicator and stream, bound as calls into the loaded library."""

    def __init__(self, communicator: Any, library: NcclLibrary, stream: int) -> None:
        nccl = library.nccl
        self._library = library
        self._tail: tuple[int, int] = (communicator.comm, stream)
        self._rank: int = communicator.rank_id()
        self._ranks: int = communicator.size()
        self._types: dict[DataType, int] = {
            DataType.INT8: nccl.NCCL_INT8,
            DataType.UINT8: nccl.NCCL_UINT8,
            DataType.INT32: nccl.NCCL_INT32,
            DataType.INT64: nccl.NCCL_INT64,
            DataType.FLOAT16: nccl.NCCL_FLOAT16,
            DataType.BFLOAT16: nccl.NCCL_BFLOAT16,
            DataType.FLOAT32: nccl.NCCL_FLOAT32,
            DataType.FLOAT64: nccl.NCCL_FLOAT64,
        }
        self._ops: dict[ReduceOp, int] = {
            ReduceOp.SUM: nccl.NCCL_SUM,
            ReduceOp.PROD: nccl.NCCL_PROD,
            ReduceOp.MAX: nccl.NCCL_MAX,
            ReduceOp.MIN: nccl.NCCL_MIN,
            ReduceOp.AVG: nccl.NCCL_AVG,
        }

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
