"""The nccl backend: communicators whose calls return at once, and collectives, of the libnccl that CuPy loaded."""

import ctypes
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

from gpubench import errors
from gpubench.hardware.cuda import CudaDevice, GatedClock
from gpubench.hardware.timing import (
    MOST_QUEUED,
    CallFailedError,
    CallTable,
    Entry,
    MarkedLaunch,
    Marks,
    StartingLine,
    native_loop,
    no_garbage_collection,
)
from gpubench.model.terms.operation import Allocator, DataType, ReduceOp, nccl_version
from gpubench.model.terms.ranks import UNWATCHED, Progress
from gpubench.ports.backend import BatchedLaunch, CollectiveCalls, Launch, Memory, Region
from gpubench.ports.group import Group
from gpubench.records import dataclass


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

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """A send to and a receive from every rank in one group, of what is not empty."""
        own, size = counts[self._rank], dtype.size_bytes
        entries: list[Entry] = []
        for peer, (count, start) in enumerate(zip(counts, accumulate(counts, initial=0), strict=False)):
            given = Region(send.memory, send.offset_bytes + start * size)
            entries += [self._send(given, 0, count, dtype, peer)] if count else []
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
        return NcclLaunch(((self._library.address(name), _address(send), _address(receive), *arguments, *self._tail),))

    def _send(self, region: Region, block: int, count: int, dtype: DataType, peer: int) -> Entry:
        address = _address(region) + block * count * dtype.size_bytes
        return (self._library.address("ncclSend"), address, count, self._types[dtype], peer, *self._tail)

    def _receive(self, region: Region, block: int, count: int, dtype: DataType, peer: int) -> Entry:
        address = _address(region) + block * count * dtype.size_bytes
        return (self._library.address("ncclRecv"), address, count, self._types[dtype], peer, *self._tail)

    def _group(self, entries: Sequence[Entry]) -> NcclLaunch:
        begin, end = self._library.address("ncclGroupStart"), self._library.address("ncclGroupEnd")
        return NcclLaunch(((begin,), *entries, (end,)))


def _address(region: Region) -> int:
    address: int = region.memory.address + region.offset_bytes  # type: ignore[attr-defined]
    return address


UNIQUE_ID_BYTES = 128
INITIALISE = "ncclCommInitRankConfig"

_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT: NCCL's own value
_BYTES_OF_2_14, _BYTES_OF_2_17 = 24, 40


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is handed over by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class CommunicatorConfig(ctypes.Structure):
    """`ncclConfig_t` as NCCL 2.27 had it; later ones take what it lacks from their defaults (init.cc).

    A null network or name is NCCL_CONFIG_UNDEF_PTR. `size` says how much of it counts.
    """

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cluster_size", ctypes.c_int),
        ("least_ctas", ctypes.c_int),
        ("most_ctas", ctypes.c_int),
        ("network", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("collnet", ctypes.c_int),
        ("policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    )


def capped(most_ctas: int | None) -> CommunicatorConfig:
    """Of a communicator whose kernels have no more CTAs than that; None leaves it to NCCL. As NCCL 2.17 had it."""
    most = _UNDEFINED if most_ctas is None else most_ctas
    return CommunicatorConfig(_BYTES_OF_2_17, _MAGIC, 21700, _UNDEFINED, _UNDEFINED, _UNDEFINED, most, None)


def with_policy(policy: int, most_ctas: int | None) -> CommunicatorConfig:
    """Of a communicator with a policy for CTAs; as NCCL 2.27 had it."""
    config = capped(most_ctas)
    config.size, config.version = ctypes.sizeof(CommunicatorConfig), 22700
    for name in ("split_share", "traffic_class", "collnet", "shrink_share", "nvls_ctas"):
        setattr(config, name, _UNDEFINED)
    config.policy = policy
    return config


_SUCCESS, _IN_PROGRESS = 0, 7  # ncclSuccess and ncclInProgress in nccl.h
_INT64, _SUM = 4, 0  # ncclInt64 and ncclSum in nccl.h
_SECONDS_BETWEEN_LOOKS = 20e-6


class CFunctions(Protocol):
    """The functions of a C library by name, all of which return `ncclResult_t`."""

    def function(self, name: str, *types: Any) -> Callable[..., int]:
        """One that takes arguments of these types of ctypes'."""


class CommunicatorError(OSError):
    """NCCL could not connect ranks, or carry data between them."""


def new_unique_id(library: CFunctions) -> bytes:
    """What all ranks of a communicator have to know. Raises CommunicatorError."""
    made = UniqueId()
    status = library.function("ncclGetUniqueId", ctypes.c_void_p)(ctypes.addressof(made))
    if status:
        raise CommunicatorError(f"ncclGetUniqueId returned {status}")
    return bytes(made)


class BoundedCommunicator:
    """A communicator that raises TimeoutError at its deadline and CommunicatorError where NCCL fails, then aborts."""

    def __init__(self, library: CFunctions, unique_id: bytes, rank: int, ranks: int, deadline: float) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        # Its calls return at once; as long as NCCL 2.14 had it.
        config = CommunicatorConfig(_BYTES_OF_2_14, _MAGIC, 21400, 0)
        begin = library.function(INITIALISE, ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int, ctypes.c_void_p)
        handle, settings = ctypes.addressof(self._handle), ctypes.addressof(config)
        self._settle(begin(handle, ranks, UniqueId.from_buffer_copy(unique_id), rank, settings), deadline)

    def exchange(
        self, addresses: tuple[int, int], peers: tuple[int, int], size_bytes: int, stream: int, deadline: float
    ) -> None:
        """Put an exchange on a stream: so many bytes of the first address to the first peer, and from the second."""
        (send, receive), (to, source) = addresses, peers
        types = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
        calls: Sequence[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = (
            ("ncclGroupStart", (), ()),
            ("ncclSend", types, (send, size_bytes, 0, to, self._handle, stream)),
            ("ncclRecv", types, (receive, size_bytes, 0, source, self._handle, stream)),
        )
        answers = (self._library.function(name, *kinds)(*arguments) for name, kinds, arguments in calls)
        refused = next((status for status in answers if status not in (_SUCCESS, _IN_PROGRESS)), _SUCCESS)
        # A group that is left open takes up whatever this process begins next.
        ended = self._library.function("ncclGroupEnd")()
        self._settle(refused or ended, deadline)

    def all_reduce(self, addresses: tuple[int, int], count: int, stream: int, deadline: float) -> None:
        """Put the sum of so many 64-bit integers of all ranks on a stream, from the first address to the second."""
        types = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p
        reduce = self._library.function("ncclAllReduce", *types, ctypes.c_void_p)
        self._settle(reduce(*addresses, count, _INT64, _SUM, self._handle, stream), deadline)

    def check(self) -> None:
        """Raise CommunicatorError where NCCL has noticed an error meanwhile."""
        self._settle(_SUCCESS, float("inf"))

    def close(self, deadline: float) -> None:
        """End it together with the other ranks."""
        self._settle(self._library.function("ncclCommFinalize", ctypes.c_void_p)(self._handle), deadline)
        self._library.function("ncclCommDestroy", ctypes.c_void_p)(self._handle)
        self._handle = ctypes.c_void_p()

    def abort(self) -> None:
        """Give it up, whatever is under way."""
        if self._handle.value:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._library.function("ncclCommAbort", ctypes.c_void_p)(handle)

    def _settle(self, status: int, deadline: float) -> None:
        state = ctypes.c_int(status)
        ask = self._library.function("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.c_void_p)
        while status in (_SUCCESS, _IN_PROGRESS):
            if self._handle.value:
                status = ask(self._handle, ctypes.addressof(state)) or state.value
            if status != _IN_PROGRESS:
                break
            if time.monotonic() > deadline:
                self.abort()
                raise TimeoutError
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if status not in (_SUCCESS, _IN_PROGRESS):
            self.abort()
            raise CommunicatorError(f"NCCL: ncclResult_t {status}")


_RESET_LOG = "ncclResetDebugInit"
_LAST_ERROR = "ncclGetLastError"


class _SymbolOrigin(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class NcclLibrary:
    """The libnccl that CuPy uses: `version` '2.28.9', `version_code` 22809, `error` the exception of a failed call."""

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
        self.version_code: int = nccl.get_version()
        self.version = nccl_version(self.version_code)
        self.error: type[Exception] = nccl.NcclError
        self.path = _origin_of_nccl()
        self._native = _load(self.path)
        if asked is not None and Path(asked).resolve() != Path(self.path).resolve():
            raise errors.nccl_library_not_used(asked, self.path)

    def allocate(self, size_bytes: int) -> int:
        """The address of memory that NCCL allocated. Raises UsageError where NCCL has no allocator (before 2.19)."""
        if not self.has("ncclMemAlloc"):
            raise errors.no_nccl_allocator(self.version)
        address = ctypes.c_void_p()
        self.issue(CallTable([(self.address("ncclMemAlloc"), ctypes.addressof(address), size_bytes)]))
        return address.value or 0

    def free(self, address: int) -> None:
        """Give memory back that `allocate` took."""
        self.issue(CallTable([(self.address("ncclMemFree"), address)]))

    def issue(self, launch: Launch) -> None:
        """Make the calls of a launch; NCCL's word for one that failed is raised as CuPy's NcclError."""
        try:
            launch()
        except CallFailedError as error:
            self.nccl.check_status(error.status)
            raise

    @property
    def can_reset_log(self) -> bool:
        """True where NCCL can read NCCL_DEBUG and its like again: since 2.24.3."""
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
        """True where this version has a function of that C name."""
        return hasattr(self._native, name)

    def function(self, name: str, *types: Any) -> Callable[..., int]:
        """A function by its C name that takes arguments of these types of ctypes'; it lets other threads run."""
        made: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *types)(self.address(name))
        return made

    def address(self, name: str) -> int:
        """The address of a function by its C name."""
        return ctypes.cast(getattr(self._native, name), ctypes.c_void_p).value or 0


def trouble(nccl: Any, communicator: Any) -> str:
    """The asynchronous error of a communicator in words, empty where it has none."""
    try:
        communicator.check_async_error()
    except (nccl.NcclError, KeyError) as error:  # CuPy has no words for ncclInProgress
        return f"NCCL's asynchronous error: {error}"
    return ""


def _load(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    return ctypes.CDLL(path, mode)


def _origin_of_nccl() -> str:
    """The file that `ncclGetVersion`, as CuPy's extension calls it, comes from."""
    from cupy_backends.cuda.libs import nccl as extension

    function = _load(extension.__file__).ncclGetVersion
    origin = _SymbolOrigin()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(origin))
    return (origin.file or b"").decode()


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
        self._marks = Marks(device.cupy, device.stream, progress)
        self._allocator = allocator
        self._library = library
        self._communicators: dict[int, Any] = {}
        self.allocations: list[tuple[int, int]] = []
        self._aborted = False
        self._issued_seconds: float | None = None
        self._group = group
        self._starting_line = StartingLine(group)
        self.calls = self.open(group)

    def open(self, group: Group) -> NcclCalls:
        """The collectives of a new communicator of these ranks, on the same stream; it reads NCCL_ALGO anew."""
        nccl = self._library.nccl
        unique_id = group.broadcast(nccl.get_unique_id() if group.rank == 0 else None)
        return self.adopt(nccl.NcclCommunicator(group.size, unique_id, group.rank))

    def adopt(self, communicator: Any) -> NcclCalls:
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
        if native_loop() is None:
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
        with no_garbage_collection():
            start = perf_counter()
            self._library.issue(launch)
            return self._seconds_since(start, launch)

    def together(self, launch: Launch) -> float:
        """The same behind a barrier, with nothing between it and the first call."""
        self._device.stream.synchronize()
        behind = self._starting_line.before(launch) if isinstance(launch, CallTable) else None
        if behind is None:
            self._group.barrier()
            return self.seconds(launch)
        with no_garbage_collection():
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
        self.wait_for(self._device.stream, launch.look if isinstance(launch, MarkedLaunch) else None)

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
        if isinstance(launch, MarkedLaunch):
            return launch.issue_seconds
        known = isinstance(launch, CallTable) and 0 < operations <= MOST_QUEUED
        return self._issued_seconds / operations if known and self._issued_seconds is not None else None

    def trouble(self) -> str:
        """NCCL's asynchronous error, empty where it has none. For a thread: an operation may be under way."""
        found = (trouble(self._library.nccl, each) for each in list(self._communicators.values()))
        return next(filter(None, found), "")

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
