"""CuPy and NCCL on NumPy and threads: the same names and real data, without a GPU.

NCCL's operations are written from its documentation, independent of gpubench's own formulas. Each rank is a thread with
one fake GPU.
"""

import ctypes
import inspect
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gpubench.collectives.pattern import STORAGE, ArrayPattern, Stretch
from gpubench.machine.drivers import MPS_ENABLED
from gpubench.model.terms.operation import Block, DataPattern, DataType, ReduceOp
from tests.fakes.ranks import SECONDS_TO_MEET, World

if TYPE_CHECKING:
    import pytest

LIBRARY = "/fake/libnccl.so.2"
SEND_US = 25.0
KERNEL_US, GEMM_US, COLLECTIVE_US = 3.0, 100.0, 0.0

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
T = TypeVar("T")


class CudaError(RuntimeError):
    pass


class Runtime:
    """`cupy.cuda.runtime`. `fail` holds the errors of functions, `current` is the current device.

    Time is counted in microseconds: every copy and launch costs the host `HOST_US`, and its stream `cost_us`.
    """

    CUDARuntimeError = CudaError
    streamCaptureModeThreadLocal = 1
    hostAllocPortable, hostAllocMapped = 1, 2
    HOST_US = 5.0

    def __init__(self, gpus: int, driver: int = 13000, runtime: int = 13020, free_bytes: int = 8 * 2**30) -> None:
        self._gpus, self._driver, self._runtime, self._free_bytes = gpus, driver, runtime, free_bytes
        self.allocations: dict[int, Array] = {}
        self.pinned: dict[int, Array] = {}
        self.owners: dict[int, int | None] = {}
        self.peers: set[tuple[int, int]] = set()
        self.opened: list[int] = []
        self.fail: dict[str, str] = {}
        self.current = 0
        self.host_us = 0.0
        self.staged_bytes = self.direct_bytes = 0

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
        self.check(f"setDevice {index}")
        self.current = index

    def check(self, function: str) -> None:
        if function in self.fail:
            raise CudaError(self.fail[function])

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": b"Fake GPU", "multiProcessorCount": 132}

    def deviceGetPCIBusId(self, index: int) -> str:
        return f"0000:{index + 0xA:02X}:00.0"

    def memGetInfo(self) -> tuple[int, int]:
        return self._free_bytes, self._free_bytes

    def malloc(self, size_bytes: int) -> int:
        self.check("malloc")
        block = np.zeros(size_bytes + 64, "uint8")
        address = int(block.ctypes.data)
        self.allocations[address] = block
        self.owners[address] = self.current
        return address

    def mallocManaged(self, size_bytes: int, flags: int) -> int:
        assert flags == 1
        address = self.malloc(size_bytes)
        self.owners[address] = None
        return address

    def free(self, address: int) -> None:
        self.check("free")
        del self.allocations[address]

    def hostAlloc(self, size_bytes: int, flags: int) -> int:
        self.check("hostAlloc")
        assert flags & self.hostAllocPortable
        block = np.full(size_bytes + 64, 0xEE, "uint8")
        self.pinned[int(block.ctypes.data)] = block
        return int(block.ctypes.data)

    def freeHost(self, address: int) -> None:
        del self.pinned[address]

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        self.check("deviceCanAccessPeer")
        return int(device != peer)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        self.check("deviceEnablePeerAccess")
        if (self.current, peer) in self.peers:
            message = "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled"
            raise CudaError(message)
        self.peers.add((self.current, peer))

    def deviceDisablePeerAccess(self, peer: int) -> None:
        self.check("deviceDisablePeerAccess")
        self.peers.remove((self.current, peer))

    def owner(self, address: int) -> int | None:
        """Return the GPU of an address, or None for host memory."""
        for start, block in self.allocations.items():
            if start <= address < start + len(block):
                return self.owners[start]
        return None

    def ipcGetMemHandle(self, address: int) -> bytes:
        self.check("ipcGetMemHandle")
        assert address in self.allocations, "a handle names a whole allocation"
        return address.to_bytes(8, "big").rjust(64, b"h")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        self.check("ipcOpenMemHandle")
        address = int.from_bytes(handle[-8:], "big")
        assert self.owners[address] != self.current, "memory of this very process"
        self.opened.append(address)
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        self.check("ipcCloseMemHandle")
        self.opened.remove(address)

    def memcpyPeerAsync(self, to: int, to_gpu: int, origin: int, from_gpu: int, size: int, stream: int) -> None:
        assert (self.owner(to), self.owner(origin)) == (to_gpu, from_gpu)
        assert to_gpu != from_gpu
        assert Stream.of(stream).device_id in (to_gpu, from_gpu)
        direct = not self.peers.isdisjoint({(to_gpu, from_gpu), (from_gpu, to_gpu)})
        self.direct_bytes += size * direct
        self.staged_bytes += size * (not direct)
        self.copy("memcpyPeerAsync", to, origin, size, stream, gb_s=400 if direct else 40)

    def memcpyAsync(self, to: int, origin: int, size: int, kind: int, stream: int) -> None:
        assert kind == 4
        owners = {self.owner(to), self.owner(origin)}
        assert owners & {Stream.of(stream).device_id}, "a copy of GPUs that are not the stream's"
        self.copy("memcpyAsync", to, origin, size, stream, gb_s=50)

    def copy(self, function: str, to: int, origin: int, size: int, stream: int, gb_s: float) -> None:
        self.host_us += self.HOST_US
        self.check(function)
        Stream.of(stream).submit(lambda: ctypes.memmove(to, origin, size), 2 + size / gb_s / 1e3, self)  # type: ignore[arg-type]

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


class Event:
    """An event that is done once its stream has reached it."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.blocks = block
        self.timed = not disable_timing
        self.time_us: float | None = None

    @property
    def done(self) -> bool:
        Stream.go_on()
        return self.time_us is not None

    def synchronize(self) -> None:
        Stream.go_on()
        assert self.time_us is not None, "a deadlock: the event is behind a closed gate"


def elapsed_milliseconds(start: Event, stop: Event) -> float:
    assert start.timed
    assert stop.timed
    assert start.time_us is not None
    assert stop.time_us is not None
    return (stop.time_us - start.time_us) / 1e3


class Stream:
    """A stream that executes immediately, unless it captures, or waits for a gate or an event."""

    _streams: dict[int, "Stream"] = {}  # noqa: RUF012
    _waiting: list["Stream"] = []  # noqa: RUF012
    PLACES = 1024

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.capturing: list[Callable[[], None]] | None = None
        self.device_id = Cupy.current_device()
        self.queue: deque[Callable[[], bool]] = deque()
        self.time_us = 0.0
        self.most_queued = 0
        self.ptr = id(self)
        self._streams[self.ptr] = self

    @classmethod
    def of(cls, pointer: int) -> "Stream":
        return cls._streams[pointer]

    @classmethod
    def go_on(cls) -> None:
        """Run all operations that no longer wait."""
        progress = True
        while progress:
            progress = False
            for stream in list(cls._waiting):
                while stream.queue and stream.queue[0]():
                    stream.queue.popleft()
                    progress = True
                if not stream.queue:
                    cls._waiting.remove(stream)

    def use(self) -> None:
        pass

    def __enter__(self) -> "Stream":
        assert self.device_id == Cupy.current_device(), "CuPy refuses a stream of another device"
        Cupy.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert Cupy.streams.pop() is self

    def synchronize(self) -> None:
        assert self.capturing is None
        self.go_on()
        assert not self.queue, "a deadlock: the stream is behind a closed gate"

    @property
    def done(self) -> bool:
        self.go_on()
        return not self.queue

    def begin_capture(self, mode: int) -> None:
        assert mode == Runtime.streamCaptureModeThreadLocal
        self.capturing = []

    def end_capture(self) -> Graph:
        operations, self.capturing = self.capturing or [], None
        return Graph(operations)

    def submit(self, operation: Callable[[], None], cost_us: float = 0, runtime: Runtime | None = None) -> None:
        """Enqueue an operation. With a clock, it takes `cost_us` from when the host issued it, or later."""
        if self.capturing is not None:
            self.capturing.append(operation)
            return
        issued_us = runtime.host_us if runtime else 0.0

        def run() -> bool:
            operation()
            self.time_us = max(self.time_us, issued_us) + cost_us
            return True

        self.enqueue(run)

    def enqueue(self, step: Callable[[], bool]) -> None:
        """Enqueue a step. If it returns False, it has to wait."""
        if self._waiting:
            self.go_on()
        if not self.queue and step():
            return
        if not self.queue:
            self._waiting.append(self)
        self.queue.append(step)
        self.most_queued = max(self.most_queued, len(self.queue))
        assert len(self.queue) <= self.PLACES, "the stream is full: the host would wait here"

    def record(self, event: Event) -> None:
        event.time_us = None

        def note() -> bool:
            event.time_us = self.time_us
            return True

        self.enqueue(note)

    def wait_event(self, event: Event) -> None:
        def arrived() -> bool:
            if event.time_us is None:
                return False
            self.time_us = max(self.time_us, event.time_us)
            return True

        self.enqueue(arrived)


class CudaDriver:
    """libcuda's functions for a GPU's UUID: 16 bytes, each with the GPU's index. `fail` is the status of `cuInit`.

    `attributes` are those of every GPU, by number.
    """

    attributes: ClassVar[dict[int, int]] = {MPS_ENABLED: 0}

    def __init__(self, fail: int = 0) -> None:
        self.fail = fail
        self.started = False

    def cuInit(self, _flags: int) -> int:
        self.started = True
        return self.fail

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        assert self.started
        device._obj.value = ordinal
        return 0

    def cuDeviceGetUuid(self, found: Any, device: int) -> int:
        found.raw = self.uuid(device)
        return 0

    def cuGetErrorName(self, _status: int, _name: Any) -> int:
        return 1

    def cuDeviceGetUuid_v2(self, found: Any, device: int) -> int:
        found.raw = self.instance(device)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _device: int) -> int:
        value._obj.value = self.attributes.get(attribute, 0)
        return 0 if attribute in self.attributes else 1

    def uuid(self, device: int) -> bytes:
        return bytes([device] * 16)

    def instance(self, device: int) -> bytes:
        """Return the UUID of the MIG instance with this CUDA index. A whole GPU returns its own."""
        return self.uuid(device)


class ManagedDriver:
    """libcuda's functions for managed memory. `attributes` are a GPU's by number, `calls` records calls."""

    def __init__(self, attributes: dict[int, int], status: int = 0) -> None:
        self.attributes, self.status = attributes, status
        self.calls: list[tuple[object, ...]] = []

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _device: int) -> int:
        value._obj.value = self.attributes.get(attribute, 0)
        return 0 if attribute in self.attributes else 1

    def cuGetErrorName(self, _status: int, _name: Any) -> int:
        return 1

    def cuMemPrefetchAsync(self, address: Any, size: Any, place: Any, stream: Any) -> int:
        assert Stream.of(stream.value).device_id == Cupy.current_device()
        self.calls.append(("prefetch", size.value, place.value))
        Stream.of(stream.value).submit(lambda: None, size.value / 47e3)
        return self.status

    def cuMemAdvise(self, address: Any, size: Any, advice: Any, place: Any) -> int:
        self.calls.append((advice.value, size.value, place.value))
        return self.status


class Cuda:
    """libcuda's functions for a gate, whose `argtypes` the caller may set."""

    def __init__(self, runtime: Runtime, status: int = 0) -> None:
        self.waits: list[int] = []

        def wait(stream: int, address: int, value: int, flags: int) -> int:
            assert flags == 0
            assert address in runtime.pinned
            if status == 0:
                self.waits.append(value)
                waiting = Stream.of(stream)

                def opened() -> bool:
                    flag = ctypes.c_uint32.from_address(address).value
                    if (flag - value) & 0x80000000:
                        return False
                    waiting.time_us = max(waiting.time_us, runtime.host_us)
                    return True

                waiting.enqueue(opened)
            return status

        self.cuStreamWaitValue32_v2 = wait


def view(address: int, count: int, dtype: str) -> Array:
    size_bytes = count * np.dtype(dtype).itemsize
    block: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
    return block.view(dtype)


class Native:
    """libnccl: C functions at real addresses that call the fake, and return a status for an exception."""

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


class NCCLError(Exception):
    """nccl4py's exception for a status other than success and in progress."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL error {status}")
        self.status = status


class UniqueId:
    """`ncclUniqueId`: 128 bytes at an address."""

    def __init__(self, content: bytes) -> None:
        assert len(content) == 128
        self.content = content
        self._held = ctypes.create_string_buffer(content, 128)
        self.ptr = ctypes.addressof(self._held)

    @classmethod
    def from_buffer(cls, buffer: bytes) -> "UniqueId":
        return cls(bytes(buffer))


_enum: Any = IntEnum
_NUMBERS_OF_TYPES = _enum("_NUMBERS_OF_TYPES", [each.capitalize() for each in _TYPE_NAMES], start=0)
_NUMBERS_OF_OPS = _enum("_NUMBERS_OF_OPS", [each[5:].capitalize() for each in _OPS], start=0)


class Config(SimpleNamespace):
    """`ncclConfig_t`. Unset fields are undefined."""


class Nccl(ModuleType):
    """`nccl.bindings.nccl` of one job, whose communicators are threads."""

    def __init__(self, ranks: int, version: int = 22809) -> None:
        super().__init__("nccl.bindings.nccl")
        self.NCCLError, self.UniqueId, self.Config = NCCLError, UniqueId, Config
        self.Comm = lambda handle: handle
        self.said = ""
        self.DataType, self.RedOp = _NUMBERS_OF_TYPES, _NUMBERS_OF_OPS
        self._version = version
        self._ranks = ranks
        self._worlds: dict[bytes, World] = {}
        self._making = threading.Lock()
        self.made: list[Communicator] = []
        self._groups = threading.local()
        self.calls: set[str] = set()
        self.allocations: dict[int, Array] = {}
        functions: dict[str, Callable[..., None]] = {
            "ncclGetVersion": lambda _version: None,
            "ncclGroupStart": self._group_start,
            "ncclGroupEnd": self._group_end,
        }
        functions |= {name: getattr(self, f"_{name}") for name in _FUNCTIONS}
        functions |= {name: self._not_by_address for name in _ALLOCATOR if version >= 21900}
        functions |= {name: getattr(self, f"_{name}") for name in _NATIVE if version >= 22800}
        self.native = Native(functions)

    def get_version(self) -> int:
        return self._version

    def get_library_path(self) -> str:
        return LIBRARY

    def get_last_error(self, _communicator: object) -> str:
        return self.said

    def get_unique_id(self) -> UniqueId:
        return UniqueId(secrets.token_bytes(128))

    def comm_init_rank(self, size: int, unique_id: UniqueId, rank: int) -> "Communicator":
        made = Communicator(self._world_of(unique_id.content, size), rank)
        self.made.append(made)
        return made

    def comm_init_rank_config(self, size: int, unique_id: UniqueId, rank: int, config: Config) -> "Communicator":
        made = self.comm_init_rank(size, unique_id, rank)
        made.config = config
        return made

    def comm_get_async_error(self, communicator: "Communicator") -> int:
        return communicator.state

    def comm_abort(self, communicator: "Communicator") -> None:
        communicator.aborted = True

    def comm_destroy(self, communicator: "Communicator") -> None:
        communicator.destroy()

    def mem_alloc(self, size_bytes: int) -> int:
        block = np.zeros(size_bytes, "uint8")
        self.allocations[int(block.ctypes.data)] = block
        self.calls.add("ncclMemAlloc")
        return int(block.ctypes.data)

    def mem_free(self, address: int) -> None:
        del self.allocations[address]

    def send(self, address: int, count: int, dtype: int, peer: int, communicator: "Communicator", stream: int) -> None:
        communicator.send(address, count, dtype, peer, stream)

    def recv(self, address: int, count: int, dtype: int, peer: int, communicator: "Communicator", stream: int) -> None:
        communicator.recv(address, count, dtype, peer, stream)

    def _world_of(self, unique_id: bytes, size: int) -> World:
        assert size <= self._ranks
        with self._making:
            return self._worlds.setdefault(unique_id, World(size))

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
        if found.algorithm == "tree" and name != "ncclAllReduce":
            raise NCCLError(5)
        Stream.of(stream).submit(lambda: run(found), COLLECTIVE_US)

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

    def _not_by_address(self) -> None:
        raise AssertionError("the bindings have it")

    def _ncclAlltoAll(self, send: int, receive: int, count: int, dtype: int, comm: int, stream: int) -> None:
        self._submit("ncclAlltoAll", comm, stream, lambda c: c.all_to_all(send, receive, count, dtype))

    def _ncclGather(self, send: int, receive: int, count: int, dtype: int, root: int, comm: int, stream: int) -> None:
        self._submit("ncclGather", comm, stream, lambda c: c.gather(send, receive, count, dtype, root))

    def _ncclScatter(self, send: int, receive: int, count: int, dtype: int, root: int, comm: int, stream: int) -> None:
        self._submit("ncclScatter", comm, stream, lambda c: c.scatter(send, receive, count, dtype, root))


class Once(Generic[T]):
    """A value that all ranks share, made by the first rank that needs it."""

    def __init__(self) -> None:
        self._lock, self._made = threading.Lock(), list[T]()

    def get(self, make: Callable[[], T]) -> T:
        with self._lock:
            if not self._made:
                self._made.append(make())
        return self._made[0]


_messages: dict[tuple[int, int, int], Queue[Array]] = {}
"""Messages that were sent and not received yet, by world, sender and receiver"""


class Communicator:
    """What each rank does in a collective, from NCCL's documentation."""

    _communicators: dict[int, "Communicator"] = {}  # noqa: RUF012

    def __init__(self, world: World, rank: int) -> None:
        self.algorithm: str | None = None
        self._world, self._rank = world, rank
        self.handle = id(self)
        self.config = Config()
        self.state = 0
        self.aborted = False
        self._communicators[self.handle] = self

    @classmethod
    def of(cls, handle: int) -> "Communicator":
        return cls._communicators[handle]

    def size(self) -> int:
        return self._world.size

    def destroy(self) -> None:
        del self._communicators[self.handle]

    def send(self, buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        on_its_way = _messages.setdefault((id(self._world), self._rank, peer), Queue())
        Stream.of(stream).submit(lambda: on_its_way.put(_read(buffer, count, dtype)), SEND_US)

    def recv(self, buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        on_its_way = _messages.setdefault((id(self._world), peer, self._rank), Queue())
        Stream.of(stream).submit(lambda: _write(buffer, on_its_way.get(timeout=SECONDS_TO_MEET)[:count]), SEND_US)

    def all_reduce(self, send: int, receive: int, count: int, dtype: int, op: int) -> None:
        everything = self._world.exchange(self._rank, (_read(send, count, dtype), Once[Array]()))
        total = everything[0][1]
        _write(receive, total.get(lambda: _reduced([values for values, _ in everything], dtype, op)))

    def reduce_scatter(self, send: int, receive: int, count: int, dtype: int, op: int) -> None:
        everything = self._all(send, count * self.size(), dtype)
        _write(receive, _reduced([each[self._own(count)] for each in everything], dtype, op))

    def reduce(self, send: int, receive: int, count: int, dtype: int, op: int, root: int) -> None:
        everything = self._all(send, count, dtype)
        if self._rank == root:
            _write(receive, _reduced(everything, dtype, op))

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


def _reduced(values: Sequence[Array], dtype: int, op: int) -> Array:
    function = (np.add, np.multiply, np.maximum, np.minimum, np.add)[op]
    wide = [_to_wide(each, dtype) for each in values]
    total = wide[0]
    with np.errstate(all="ignore"):
        for each in wide[1:]:
            total = function(total, each)
        if _OPS[op] == "NCCL_AVG":
            total = total / len(values) if total.dtype.kind == "f" else total // len(values)
    return _from_wide(total, dtype)


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
    return values.astype(_TYPE_NAMES[dtype], copy=False)


_EXPECTING = threading.Lock()


@lru_cache(maxsize=16)
def _expected(data: DataPattern, stretch: Stretch, rank: int) -> Array:
    """Return what every rank should have received. All ranks share the result."""
    pattern = ArrayPattern(np, data)
    expected: Array = pattern.reduced(stretch) if rank < 0 else pattern.sent(rank, stretch)
    return expected


class RawModule:
    """The kernels of pattern.cu, copy.cu and overlap.cu in NumPy."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._device = Cupy.current_device()

    def get_function(self, name: str) -> Callable[..., None]:
        assert f'extern "C" __global__ void {name}' in self._code
        kernels = {"fill_sent": self._fill, "count_wrong": self._count, "copy_bytes": self._copy}
        return (kernels | {"next_value": self._next_value, "hold_back": self._hold_back})[name]

    def _next_value(self, grid: tuple[int], block: tuple[int], arguments: Sequence[Any]) -> None:
        address, count = (int(value) for value in arguments)
        assert grid[0] * block[0] >= count

        def run() -> None:
            values = view(address, count, "uint32")
            values[:] = values * np.uint32(1664525) + np.uint32(1013904223)

        Cupy.streams[-1].submit(run, KERNEL_US, Cupy.runtimes[-1])

    def _hold_back(self, _grid: object, _block: object, arguments: Sequence[Any]) -> None:
        Cupy.streams[-1].submit(lambda: None, int(arguments[0]) / 1e3, Cupy.runtimes[-1])

    def _copy(self, grid: tuple[int], block: tuple[int], arguments: Sequence[Any]) -> None:
        assert all(isinstance(argument, np.uint64) for argument in arguments), "CUDA takes no Python integers"
        assert self._device == Cupy.current_device(), "a kernel of another device"
        assert 1 <= grid[0] <= 132
        assert block == (512,)
        to, origin, size = (int(value) for value in arguments)
        stream, runtime = Cupy.streams[-1], Cupy.runtimes[-1]
        for owner in (runtime.owner(to), runtime.owner(origin)) if size else ():
            assert owner in (None, self._device) or (self._device, owner) in runtime.peers, "an illegal address"
        runtime.copy("launchKernel", to, origin, size, stream.ptr, gb_s=370)

    def _fill(self, _grid: object, _block: object, arguments: Sequence[Any]) -> None:
        pattern, elements, stretch, rank = self._read(arguments)
        elements[:] = pattern.sent(rank, stretch)

    def _count(self, _grid: object, _block: object, arguments: Sequence[Any]) -> None:
        pattern, elements, stretch, rank = self._read(arguments[:-1])
        with _EXPECTING:
            expected = _expected(pattern.data, stretch, rank)
        arguments[-1][0] += np.uint64(pattern.wrong(elements, expected))

    def _read(self, arguments: Sequence[Any]) -> tuple[ArrayPattern, Array, Stretch, int]:
        assert all(isinstance(argument, np.generic) for argument in arguments), "CUDA takes no Python integers"
        dtype, op, ranks, contributors, lowest, neutral, ulp, width = (int(value) for value in arguments[:8])
        address, stride, count, start, row, buffers, rank = (int(value) for value in arguments[8:])
        data = DataPattern(tuple(DataType)[dtype], None if op < 0 else tuple(ReduceOp)[op], ranks)
        derived = (data.contributors, data.lowest, data.neutral, data.tolerance_ulp, data.dtype.size_bytes)
        assert derived == (contributors, lowest, neutral, ulp, width)
        whole = view(address, (buffers - 1) * stride + count, STORAGE[width])
        elements = np.lib.stride_tricks.as_strided(whole, (buffers, count), (stride * width, width))
        return ArrayPattern(np, data), elements, Stretch(start, count, Block(row, buffers, 0, 0, count).seeds()), rank


class HostCopy(np.ndarray):
    """An array with CuPy's method `get`."""

    def get(self) -> Array:
        return np.asarray(self)


class Cupy(ModuleType):
    """`cupy`: NumPy's functions, and memory by address."""

    __version__ = "14.2.0"
    runtimes: list[Runtime] = []  # noqa: RUF012
    streams: list[Stream] = []  # noqa: RUF012

    def __init__(self, runtime: Runtime) -> None:
        super().__init__("cupy")
        self.runtimes[:] = [runtime]
        self.streams.clear()
        Stream._waiting.clear()
        self.cuda = ModuleType("cupy.cuda")
        self.cuda.runtime = runtime  # type: ignore[attr-defined]
        self.cuda.Stream = Stream  # type: ignore[attr-defined]
        self.cuda.Event = Event  # type: ignore[attr-defined]
        self.cuda.get_elapsed_time = elapsed_milliseconds  # type: ignore[attr-defined]
        self.cuda.UnownedMemory = lambda address, _size, _owner: address  # type: ignore[attr-defined]
        self.cuda.MemoryPointer = lambda address, offset: address + offset  # type: ignore[attr-defined]
        self.cuda.device = SimpleNamespace(get_cublas_handle=lambda: BLAS_HANDLE)  # type: ignore[attr-defined]
        self.RawModule = RawModule
        self.ndarray = lambda shape, dtype, pointer: view(pointer, shape[0], dtype)

    @classmethod
    def current_device(cls) -> int:
        return cls.runtimes[-1].current

    def zeros(self, count: int, dtype: str) -> Array:
        return np.zeros(count, dtype).view(HostCopy)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class CublasError(RuntimeError):
    pass


class Cublas(ModuleType):
    """`cupy_backends.cuda.libs.cublas`: GEMMs of 16-bit matrices on the current stream."""

    def __init__(self) -> None:
        super().__init__("cupy_backends.cuda.libs.cublas")
        self.CUBLASError = CublasError
        self.lacks_bfloat16 = False

    def gemmEx(self, handle: int, *arguments: int) -> None:
        assert handle == BLAS_HANDLE
        _, _, side, columns, depth, one, first, kind, _, second, _, _, zero, result, _, _, compute, _ = arguments
        assert side == columns == depth
        assert compute == 68
        if kind == 14 and self.lacks_bfloat16:
            raise CublasError("CUBLAS_STATUS_NOT_SUPPORTED")
        assert (view(one, 1, "float32")[0], view(zero, 1, "float32")[0]) == (1.0, 0.0)

        def matrix(address: int) -> Array:
            bits = view(address, side * side, "uint16")
            values = bits.view("float16") if kind == 2 else (bits.astype("uint32") << 16).view("float32")
            return values.astype("float32").reshape(side, side)

        def run() -> None:
            product = (matrix(first) @ matrix(second)).reshape(-1)
            bits = product.astype("float16").view("uint16") if kind == 2 else (product.view("uint32") >> 16)
            view(result, side * side, "uint16")[:] = bits.astype("uint16")

        Cupy.streams[-1].submit(run, GEMM_US, Cupy.runtimes[-1])


BLAS_HANDLE = 77


class ForGood:
    """A replacement for pytest's MonkeyPatch in a separate process, because loading pytest takes 0.3 s."""

    def setattr(self, target: object, name: str, value: object) -> None:
        setattr(target, name, value)

    def setitem(self, items: Any, name: str, value: object) -> None:
        items[name] = value


def install(
    monkeypatch: "pytest.MonkeyPatch | ForGood", runtime: Runtime, nccl: Nccl | None = None, cuda: Cuda | None = None
) -> Cupy:
    """Make `import cupy` and gpubench's NCCL and CUDA adapters use the fakes."""
    from gpubench.backends import cuda as cuda_adapter
    from gpubench.backends.nccl import library as nccl_adapter

    cupy = Cupy(runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    cublas, backends = Cublas(), [ModuleType(f"cupy_backends{each}") for each in ("", ".cuda", ".cuda.libs")]
    backends[-1].cublas = cublas  # type: ignore[attr-defined]
    for module in (*backends, cublas):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cuda_adapter, "find_spec", lambda _name: object())

    def load_cuda() -> CudaDriver:
        driver: Any = CudaDriver()
        for name in ("cuStreamWaitValue32_v2", "cuStreamWaitValue32"):
            if hasattr(cuda, name):
                setattr(driver, name, getattr(cuda, name))
        return cast("CudaDriver", driver)

    monkeypatch.setattr(cuda_adapter, "load_cuda", load_cuda)
    if nccl is not None:
        bindings = ModuleType("nccl.bindings")
        bindings.nccl = nccl  # type: ignore[attr-defined]
        for name, module in {"nccl": ModuleType("nccl"), "nccl.bindings": bindings, nccl.__name__: nccl}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(nccl_adapter, "_load", lambda *_arguments: nccl.native)
    return cupy
