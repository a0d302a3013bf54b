"""The nccl backend: communicators by `cupy.cuda.nccl`, collectives as calls into the library that it loaded."""

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from gpubench import errors
from gpubench.hardware.cuda.device import CudaDevice
from gpubench.hardware.nccl.calls import NcclCalls, NcclLaunch, call_table
from gpubench.hardware.timing.clock import no_garbage_collection
from gpubench.hardware.timing.native_loop import CallFailedError, CallTable, native_loop
from gpubench.hardware.timing.starting_line import StartingLine
from gpubench.hardware.timing.stream_marks import MOST_QUEUED, MarkedLaunch, Marks
from gpubench.model.terms.allocator import Allocator
from gpubench.model.terms.nccl_choice import nccl_version
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.group import Group
from gpubench.ports.launch import BatchedLaunch, Launch
from gpubench.ports.memory import Memory

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
    """The libnccl that CuPy uses, which is the one asked for, if one was.

    `version` is '2.28.9', `version_code` 22809, `error` the exception of a failed call.
    """

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
        """The address of memory that NCCL allocated, as nccl-tests has it do.

        Raises UsageError where this NCCL has no allocator (2.19 is the first that does).
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
    """Collectives on one GPU: of one communicator, and of others that are opened beside it."""

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
            return self._device.adopt(self._library.allocate(size_bytes), size_bytes, self._library.free)
        return self._device.allocate(size_bytes)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order on the stream, or a captured graph of them."""
        # What fills and poisons the buffers runs on the same stream: neither a capture nor a timing may begin under it.
        self._device.stream.synchronize()
        groups = self._marks.groups(launches, graph_replays)
        if graph_replays:
            calls = partial(self._library.issue, call_table(launches))
            graphs = {replays: self._device.capture(calls, replays) for replays in set(groups)}
            return self._marks.between([(graphs[replays], replays * len(launches)) for replays in groups])
        rest = iter(launches)
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
        """Until a stream is idle, polled as nccl-tests polls it, NCCL's asynchronous errors included.

        Raises AbortedError where the communicators were aborted meanwhile.
        """
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
