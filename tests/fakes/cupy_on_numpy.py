"""CuPy and NCCL as NumPy and threads: the same names, real data, no GPU.

What NCCL does is written here from NCCL's documentation, apart from gpubench's own formulas, so that the two can
contradict each other. Each rank is a thread that owns one fake GPU.
"""

import ctypes
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpubench.collectives.pattern import STORAGE, Pattern, Stretch
from gpubench.model.data_pattern import Block, DataPattern
from gpubench.model.operation import DataType, ReduceOp
from tests.fakes.ranks import World

LIBRARY = "/fake/libnccl.so.2"

_TYPES = {
    "NCCL_INT8": "int8",
    "NCCL_UINT8": "uint8",
    "NCCL_INT32": "int32",
    "NCCL_INT64": "int64",
    "NCCL_FLOAT16": "float16",
    "NCCL_FLOAT32": "float32",
    "NCCL_FLOAT64": "float64",
    "NCCL_BFLOAT16": "bfloat16",
}
_TYPE_NAMES = tuple(_TYPES.values())
_OPS = ("NCCL_SUM", "NCCL_PROD", "NCCL_MAX", "NCCL_MIN", "NCCL_AVG")
_FUNCTIONS = tuple(
    f"nccl{name}" for name in ("AllReduce", "ReduceScatter", "Reduce", "AllGather", "Broadcast", "Send", "Recv")
)
_ALLOCATOR = ("ncclMemAlloc", "ncclMemFree")
_NATIVE = ("ncclAlltoAll", "ncclGather", "ncclScatter")

Array = npt.NDArray[Any]


class CudaError(RuntimeError):
    pass


class Runtime:
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = CudaError
    streamCaptureModeThreadLocal = 1

    def __init__(self, gpus: int, driver: int = 13000, runtime: int = 13020, free_bytes: int = 8 * 2**30) -> None:
        self._gpus, self._driver, self._runtime, self._free_bytes = gpus, driver, runtime, free_bytes
        self.allocations: dict[int, Array] = {}

    def driverGetVersion(self) -> int:
        return self._driver

    def runtimeGetVersion(self) -> int:
        return self._runtime

    def getDeviceCount(self) -> int:
        if self._gpus == 0:
            message = "cudaErrorNoDevice: no CUDA-capable device is detected"
            raise CudaError(message)
        return self._gpus

    def setDevice(self, index: int) -> None:
        assert 0 <= index < self._gpus

    def getDeviceProperties(self, index: int) -> dict[str, bytes]:
        return {"name": b"Fake GPU", "uuid": bytes([index] * 16)}

    def deviceGetPCIBusId(self, index: int) -> str:
        return f"0000:{index + 0xA:02X}:00.0"

    def memGetInfo(self) -> tuple[int, int]:
        return self._free_bytes, self._free_bytes

    def malloc(self, size_bytes: int) -> int:
        block = np.zeros(size_bytes + 64, "uint8")
        address = int(block.ctypes.data)
        self.allocations[address] = block
        return address

    def free(self, address: int) -> None:
        del self.allocations[address]

    def memsetAsync(self, address: int, value: int, size_bytes: int, stream: int) -> None:
        assert Stream.of(stream).capturing is None
        view(address, size_bytes, "uint8")[:] = value


class Graph:
    def __init__(self, operations: Sequence[Callable[[], None]]) -> None:
        self._operations = operations

    def upload(self, stream: "Stream") -> None:
        assert not stream.capturing

    def launch(self, stream: "Stream") -> None:
        assert not stream.capturing
        for operation in self._operations:
            operation()


class Stream:
    """Executes at once, unless it captures."""

    _streams: dict[int, "Stream"] = {}  # noqa: RUF012

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.capturing: list[Callable[[], None]] | None = None
        self.ptr = id(self)
        self._streams[self.ptr] = self

    @classmethod
    def of(cls, pointer: int) -> "Stream":
        return cls._streams[pointer]

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self.capturing is None

    @property
    def done(self) -> bool:
        return True

    def begin_capture(self, mode: int) -> None:
        assert mode == Runtime.streamCaptureModeThreadLocal
        self.capturing = []

    def end_capture(self) -> Graph:
        operations, self.capturing = self.capturing or [], None
        return Graph(operations)

    def submit(self, operation: Callable[[], None]) -> None:
        if self.capturing is None:
            operation()
        else:
            self.capturing.append(operation)


def view(address: int, count: int, dtype: str) -> Array:
    size_bytes = count * np.dtype(dtype).itemsize
    block: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
    return block.view(dtype)


class Native:
    """libnccl: C functions at real addresses, which call back into the fake. Raises into a status, as C would."""

    def __init__(self, functions: dict[str, Callable[..., None]]) -> None:
        for name, function in functions.items():
            count = len(inspect.signature(function).parameters)
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_ssize_t] * count)
            setattr(self, name, kind(self._with_status(function)))

    def _with_status(self, function: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001
                self.error = error
                return 1
            return 0

        return call


class Nccl(ModuleType):
    """`cupy.cuda.nccl` of one job, whose communicators are threads."""

    def __init__(self, ranks: int, version: int = 22809) -> None:
        super().__init__("cupy.cuda.nccl")
        self.available = True
        self._version = version
        self._world = World(ranks)
        self._groups = threading.local()
        self.calls: set[str] = set()
        self.allocations: dict[int, Array] = {}
        for number, name in enumerate((*_TYPES, *_OPS)):
            setattr(self, name, number if name in _TYPES else number - len(_TYPES))
        functions: dict[str, Callable[..., None]] = {
            "ncclGetVersion": lambda _version: None,
            "ncclGroupStart": self._group_start,
            "ncclGroupEnd": self._group_end,
        }
        functions |= {name: getattr(self, f"_{name}") for name in _FUNCTIONS}
        functions |= {name: getattr(self, f"_{name}") for name in _ALLOCATOR if version >= 21900}
        functions |= {name: getattr(self, f"_{name}") for name in _NATIVE if version >= 22800}
        self.native = Native(functions)
        self.NcclCommunicator = lambda size, unique_id, rank: Communicator(self, self._world, size, unique_id, rank)

    def get_version(self) -> int:
        return self._version

    def get_unique_id(self) -> bytes:
        return b"\x01" * 128

    def check_status(self, status: int) -> None:
        if status:
            message = f"NCCL error {status}"
            raise RuntimeError(message) from getattr(self.native, "error", None)

    def _group_start(self) -> None:
        assert self.pending is None
        self._groups.pending = []

    def _group_end(self) -> None:
        pending, self._groups.pending = self.pending, None
        assert pending
        communicator, stream = pending[0][0], pending[0][1]
        stream.submit(lambda: communicator.exchange([entry[2] for entry in pending]))

    @property
    def pending(self) -> list[Any] | None:
        found: list[Any] | None = getattr(self._groups, "pending", None)
        return found

    def _submit(self, name: str, communicator: int, stream: int, run: Callable[["Communicator"], None]) -> None:
        self.calls.add(name)
        found = Communicator.of(communicator)
        Stream.of(stream).submit(lambda: run(found))

    def _ncclAllReduce(self, send: int, receive: int, count: int, dtype: int, op: int, comm: int, stream: int) -> None:
        self._submit("ncclAllReduce", comm, stream, lambda c: c.all_reduce(send, receive, count, dtype, op))

    def _ncclReduceScatter(
        self, send: int, receive: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        self._submit("ncclReduceScatter", comm, stream, lambda c: c.reduce_scatter(send, receive, count, dtype, op))

    def _ncclReduce(
        self, send: int, receive: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int
    ) -> None:
        self._submit("ncclReduce", comm, stream, lambda c: c.reduce(send, receive, count, dtype, op, root))

    def _ncclAllGather(self, send: int, receive: int, count: int, dtype: int, comm: int, stream: int) -> None:
        self._submit("ncclAllGather", comm, stream, lambda c: c.all_gather(send, receive, count, dtype))

    def _ncclBroadcast(
        self, send: int, receive: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> None:
        self._submit("ncclBroadcast", comm, stream, lambda c: c.broadcast(send, receive, count, dtype, root))

    def _ncclSend(self, buffer: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        self._queue("send", buffer, count, dtype, peer, comm, stream)

    def _ncclRecv(self, buffer: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        self._queue("recv", buffer, count, dtype, peer, comm, stream)

    def _queue(self, kind: str, buffer: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        assert self.pending is not None, "gpubench sends and receives in groups"
        self.pending.append((Communicator.of(comm), Stream.of(stream), (kind, buffer, count, dtype, peer)))

    def _ncclAlltoAll(self, send: int, receive: int, count: int, dtype: int, comm: int, stream: int) -> None:
        self._submit("ncclAlltoAll", comm, stream, lambda c: c.all_to_all(send, receive, count, dtype))

    def _ncclGather(self, send: int, receive: int, count: int, dtype: int, root: int, comm: int, stream: int) -> None:
        self._submit("ncclGather", comm, stream, lambda c: c.gather(send, receive, count, dtype, root))

    def _ncclScatter(self, send: int, receive: int, count: int, dtype: int, root: int, comm: int, stream: int) -> None:
        self._submit("ncclScatter", comm, stream, lambda c: c.scatter(send, receive, count, dtype, root))

    def _ncclMemAlloc(self, pointer: int, size_bytes: int) -> None:
        block = np.zeros(size_bytes, "uint8")
        self.allocations[int(block.ctypes.data)] = block
        ctypes.c_size_t.from_address(pointer).value = int(block.ctypes.data)
        self.calls.add("ncclMemAlloc")

    def _ncclMemFree(self, address: int) -> None:
        del self.allocations[address]


class Communicator:
    """What each rank does in a collective, from NCCL's documentation."""

    _communicators: dict[int, "Communicator"] = {}  # noqa: RUF012

    def __init__(self, nccl: Nccl, world: World, size: int, unique_id: bytes, rank: int) -> None:
        assert size == world.size
        assert unique_id == nccl.get_unique_id()
        self._world, self._rank = world, rank
        self.comm = id(self)
        self._communicators[self.comm] = self

    @classmethod
    def of(cls, handle: int) -> "Communicator":
        return cls._communicators[handle]

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def check_async_error(self) -> None:
        pass

    def destroy(self) -> None:
        del self._communicators[self.comm]

    def all_reduce(self, send: int, receive: int, count: int, dtype: int, op: int) -> None:
        self._reduce_to(receive, self._all(send, count, dtype), dtype, op)

    def reduce_scatter(self, send: int, receive: int, count: int, dtype: int, op: int) -> None:
        everything = self._all(send, count * self.size(), dtype)
        self._reduce_to(receive, [each[self._own(count)] for each in everything], dtype, op)

    def reduce(self, send: int, receive: int, count: int, dtype: int, op: int, root: int) -> None:
        everything = self._all(send, count, dtype)
        if self._rank == root:
            self._reduce_to(receive, everything, dtype, op)

    def all_gather(self, send: int, receive: int, count: int, dtype: int) -> None:
        _write(receive, np.concatenate(self._all(send, count, dtype)))

    def broadcast(self, send: int, receive: int, count: int, dtype: int, root: int) -> None:
        _write(receive, self._all(send, count, dtype)[root])

    def all_to_all(self, send: int, receive: int, count: int, dtype: int) -> None:
        everything = self._all(send, count * self.size(), dtype)
        _write(receive, np.concatenate([each[self._own(count)] for each in everything]))

    def gather(self, send: int, receive: int, count: int, dtype: int, root: int) -> None:
        everything = self._all(send, count, dtype)
        if self._rank == root:
            _write(receive, np.concatenate(everything))

    def scatter(self, send: int, receive: int, count: int, dtype: int, root: int) -> None:
        given = _read(send, count * self.size(), dtype) if self._rank == root else np.empty(0)
        _write(receive, self._world.exchange(self._rank, given)[root][self._own(count)])

    def exchange(self, operations: Sequence[tuple[str, int, int, int, int]]) -> None:
        sent = {peer: _read(buffer, count, dtype) for kind, buffer, count, dtype, peer in operations if kind == "send"}
        everything = self._world.exchange(self._rank, sent)
        for kind, buffer, _, _, peer in operations:
            if kind == "recv":
                _write(buffer, everything[peer][self._rank])

    def _own(self, count: int) -> slice:
        return slice(self._rank * count, (self._rank + 1) * count)

    def _all(self, address: int, count: int, dtype: int) -> list[Array]:
        return self._world.exchange(self._rank, _read(address, count, dtype))

    def _reduce_to(self, receive: int, values: Sequence[Array], dtype: int, op: int) -> None:
        function = (np.add, np.multiply, np.maximum, np.minimum, np.add)[op]
        wide = [_to_wide(each, dtype) for each in values]
        total = wide[0]
        with np.errstate(all="ignore"):
            for each in wide[1:]:
                total = function(total, each)
            if _OPS[op] == "NCCL_AVG":
                total = total / len(values) if total.dtype.kind == "f" else total // len(values)
        _write(receive, _from_wide(total, dtype))


def _storage(dtype: int) -> str:
    return "uint16" if _TYPE_NAMES[dtype] == "bfloat16" else _TYPE_NAMES[dtype]


def _read(address: int, count: int, dtype: int) -> Array:
    return view(address, count, _storage(dtype)).copy()


def _write(address: int, values: Array) -> None:
    view(address, len(values), str(values.dtype))[:] = values


def _to_wide(values: Array, dtype: int) -> Array:
    return (values.astype("uint32") << 16).view("float32") if _TYPE_NAMES[dtype] == "bfloat16" else values


def _from_wide(values: Array, dtype: int) -> Array:
    if _TYPE_NAMES[dtype] == "bfloat16":
        return (values.astype("float32").view("uint32") >> 16).astype("uint16")
    return values.astype(_TYPE_NAMES[dtype])


class RawModule:
    """The kernels of pattern.cu, by what they are to compute."""

    def __init__(self, code: str) -> None:
        assert 'extern "C" __global__ void fill_sent' in code

    def get_function(self, name: str) -> Callable[..., None]:
        return {"fill_sent": self._fill, "count_wrong": self._count}[name]

    def _fill(self, _grid: object, _block: object, arguments: Sequence[Any]) -> None:
        pattern, elements, stretch, rank = self._read(arguments)
        elements[:] = pattern.sent(rank, stretch)

    def _count(self, _grid: object, _block: object, arguments: Sequence[Any]) -> None:
        pattern, elements, stretch, rank = self._read(arguments[:-1])
        expected = pattern.reduced(stretch) if rank < 0 else pattern.sent(rank, stretch)
        arguments[-1][0] += np.uint64(pattern.wrong(elements, expected))

    def _read(self, arguments: Sequence[Any]) -> tuple[Pattern, Array, Stretch, int]:
        assert all(isinstance(argument, np.generic) for argument in arguments), "CUDA takes no Python integers"
        dtype, op, ranks, contributors, lowest, neutral, ulp, width = (int(value) for value in arguments[:8])
        address, stride, count, start, row, buffers, rank = (int(value) for value in arguments[8:])
        data = DataPattern(tuple(DataType)[dtype], None if op < 0 else tuple(ReduceOp)[op], ranks)
        derived = (data.contributors, data.lowest, data.neutral, data.tolerance_ulp, data.dtype.size_bytes)
        assert derived == (contributors, lowest, neutral, ulp, width)
        whole = view(address, (buffers - 1) * stride + count, STORAGE[width])
        elements = np.lib.stride_tricks.as_strided(whole, (buffers, count), (stride * width, width))
        return Pattern(np, data), elements, Stretch(start, count, Block(row, buffers, 0, 0, count).seeds()), rank


class HostCopy(np.ndarray):
    """An array that, like CuPy's, is fetched with `get`."""

    def get(self) -> Array:
        return np.asarray(self)


class Cupy(ModuleType):
    """`cupy`: NumPy's functions, and memory by address."""

    __version__ = "14.2.0"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__("cupy")
        self.cuda = ModuleType("cupy.cuda")
        self.cuda.runtime = runtime  # type: ignore[attr-defined]
        self.cuda.Stream = Stream  # type: ignore[attr-defined]
        self.cuda.UnownedMemory = lambda address, _size, _owner: address  # type: ignore[attr-defined]
        self.cuda.MemoryPointer = lambda address, offset: address + offset  # type: ignore[attr-defined]
        self.RawModule = RawModule
        self.ndarray = lambda shape, dtype, pointer: view(pointer, shape[0], dtype)

    def zeros(self, count: int, dtype: str) -> Array:
        return np.zeros(count, dtype).view(HostCopy)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def install(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, nccl: Nccl | None = None) -> Cupy:
    """Have `import cupy` find the fake, and gpubench's NCCL adapter the fake library."""
    from gpubench.hardware import cuda as cuda_adapter
    from gpubench.hardware import nccl as nccl_adapter

    cupy = Cupy(runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setattr(cuda_adapter, "find_spec", lambda _name: object())
    if nccl is not None:
        cupy.cuda.nccl = nccl  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
        monkeypatch.setattr(nccl_adapter, "_load", lambda *_arguments: nccl.native)
        monkeypatch.setattr(nccl_adapter, "_origin_of_nccl", lambda: LIBRARY)
    return cupy
