"""An MPI job through mpi4py: initialisation and finalisation, group operations, and collectives on buffers."""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import socket
import threading
import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar

from msgspec import Struct

from gpubench.backends.timing import CallFailedError, CallTable, Entry, join_launches
from gpubench.errors import UsageError, missing_mpi_library, separate_jobs
from gpubench.machine.host import leave_core
from gpubench.model.facts.environment import LaunchedRank
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.statistics import ClockOffset
from gpubench.ports.backend import Array, Launch, Memory, Region

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class AloneGroup:
    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def collect(self, value: T) -> list[T] | None:
        return [value]

    def broadcast(self, value: T | None, root: int = 0) -> T:  # noqa: ARG002
        if value is None:
            raise ValueError("the root of a broadcast has a value")
        return value

    def barrier(self) -> None:
        pass

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        return values

    def clock_offset(self) -> ClockOffset:
        return ClockOffset(0.0, 0.0)

    def split(self, color: int, key: int) -> Self:  # noqa: ARG002
        return self


_ROUND_TRIPS = 10
_THREAD_MULTIPLE = 3  # MPI_THREAD_MULTIPLE in Open MPI and in MPICH's ABI. The value in MPI 5's ABI differs
_STANDARD_ABI = "mpiabi"  # Part of the file name of mpi4py's extension module for the ABI of MPI 5
_IMPORTING = "gpubench-imports"  # Name of the thread that imports modules after MPI_Init
_SET_BY_NUMPY = ("OPENBLAS_MAIN_FREE", "GOTOBLAS_MAIN_FREE")  # NumPy sets and unsets these variables during its import
_SECONDS_BETWEEN_TESTS = 0.003  # One MPI_Test takes some microseconds


class MpiGroup:
    """A group of ranks with an MPI communicator."""

    def __init__(self, communicator: "MPI.Comm") -> None:
        self.communicator = communicator
        self.rank = communicator.Get_rank()
        self.size = communicator.Get_size()

    def gather(self, value: T) -> list[T]:
        gathered: list[T] = self.communicator.allgather(value)
        return gathered

    def collect(self, value: T) -> list[T] | None:
        gathered: list[T] | None = self.communicator.gather(value, 0)
        return gathered

    def broadcast(self, value: T | None, root: int = 0) -> T:
        received: T = self.communicator.bcast(value, root)
        return received

    def barrier(self) -> None:
        self.communicator.Barrier()

    def meet(self) -> None:
        """Wait for all ranks without keeping a core busy. Returns up to a few milliseconds late, because it sleeps."""
        request = self.communicator.Ibarrier()
        while not request.Test():
            sleep(_SECONDS_BETWEEN_TESTS)

    def barrier_call(self) -> tuple[int, ...] | None:
        """Return the address of `MPI_Barrier` and the handle of this communicator. None if the function is not
        found.
        """
        address = mpi_function("MPI_Barrier")
        return (address, self.communicator.handle) if address else None

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        from mpi4py import MPI

        found = array("d", values)
        self.communicator.Allreduce(MPI.IN_PLACE, [found, MPI.DOUBLE], MPI.MAX)
        return found

    def clock_offset(self) -> ClockOffset:
        return measure_clock_offset(self)

    def send(self, seconds: float, peer: int) -> None:
        self.communicator.Send(array("d", [seconds]), peer)

    def receive(self, peer: int) -> float:
        received = array("d", [0.0])
        self.communicator.Recv(received, peer)
        return received[0]

    def split(self, color: int, key: int) -> "MpiGroup":
        return MpiGroup(self.communicator.Split(color, key))


class NumberChannel(Protocol):
    """A group whose ranks can send floating-point numbers to each other."""

    rank: int
    size: int

    def send(self, seconds: float, peer: int) -> None: ...

    def receive(self, peer: int) -> float: ...


def measure_clock_offset(group: NumberChannel) -> ClockOffset:
    """Estimate the offset of rank 0's clock from this rank's clock, from the fastest round trip (F. Cristian, 1989)."""
    if group.rank == 0:
        for other in range(1, group.size):
            for _ in range(_ROUND_TRIPS):
                group.receive(other)
                group.send(perf_counter(), other)
        return ClockOffset(0.0, 0.0)
    offsets = []
    for _ in range(_ROUND_TRIPS):
        asked = perf_counter()
        group.send(asked, 0)
        answer = group.receive(0)
        arrived = perf_counter()
        offsets.append(ClockOffset(answer - (asked + arrived) / 2, (arrived - asked) / 2))
    return min(offsets, key=lambda offset: offset.uncertainty)


def start(launch: LaunchedRank, imports: Sequence[str] = ()) -> MpiGroup:
    """Initialise MPI, start a thread that imports the modules `imports`, and return the group of all ranks.

    No module is imported during MPI_Init. MPI's setenv made a concurrent getenv in OpenBLAS crash (glibc 2.36).

    Raises:
        CouldNotMeasureError: There is no MPI library, or the launcher's processes do not form one job.
    """
    import mpi4py

    for name in _SET_BY_NUMPY if imports else ():
        os.environ.setdefault(name, "1")
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    with warnings.catch_warnings():
        # mpi4py warns if another MPI's launcher started it. The check below raises an error with a next step instead.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            _initialise()
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise missing_mpi_library(str(error).splitlines()[0]) from error
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    # Not a daemon thread. Python could end one while it loads a library, which may then call abort().
    if imports:
        threading.Thread(target=_import, args=(imports,), name=_IMPORTING).start()
    group = MpiGroup(MPI.COMM_WORLD)
    if group.size == 1 and launch.size > 1:
        raise separate_jobs(launch.launcher, launch.size)
    return group


def _initialise() -> None:
    """Call MPI_Init_thread through ctypes, if mpi4py's library can be found without importing mpi4py.

    mpi4py holds Python's global lock while it waits for other ranks. ctypes releases it, so other threads keep running.
    """
    found = importlib.util.find_spec("mpi4py.MPI")
    path = found.origin if found is not None else None
    if path is None or _STANDARD_ABI in Path(path).name:
        return
    try:
        # A handle of an extension module also resolves symbols of the libraries that it links.
        initialise = ctypes.CDLL(path).MPI_Init_thread
    except (OSError, AttributeError):
        return
    initialise(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))


def _import(names: Sequence[str]) -> None:
    leave_core()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def nodes(group: MpiGroup) -> tuple[list[int], int]:
    """Return the node number of every rank, and this rank's local rank. Nodes are numbered by their lowest rank."""
    from mpi4py import MPI

    local = group.communicator.Split_type(MPI.COMM_TYPE_SHARED, key=group.rank)
    leaders: list[int] = group.gather(local.bcast(group.rank, 0))
    order = {leader: number for number, leader in enumerate(dict.fromkeys(leaders))}
    return [order[leader] for leader in leaders], local.Get_rank()


def library_version() -> str:
    """Return the name and version of the MPI library, for example 'Open MPI v5.0.11'."""
    from mpi4py import MPI

    first = MPI.Get_library_version().rstrip("\0").strip().splitlines()[0]
    return " ".join(first.split(",")[0].split())


def memory_kinds() -> str:
    """Return the memory kinds that MPI supports, from MPI 4.1's mpi_memory_alloc_kinds. '' if MPI does not report
    them.
    """
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    return kinds or ""


def thread_level() -> str:
    """Return MPI's thread support: 'single', 'funneled', 'serialized' or 'multiple'. gpubench needs only 'single'."""
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    return levels.get(MPI.Query_thread(), "multiple")


def load() -> str:
    """Load mpi4py's MPI library without initialising MPI, and return the library's name and version."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    return library_version()


def host_name() -> str:
    """Return this host's name without its domain."""
    return socket.gethostname().split(".")[0]


def finish() -> None:
    """Finalise MPI after all ranks are done. Wait for the importing thread first, for the same reason as in `start`."""
    from mpi4py import MPI

    for importing in (thread for thread in threading.enumerate() if thread.name == _IMPORTING):
        importing.join()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def abort(group: MpiGroup | None, exit_code: int) -> NoReturn:
    """Abort all ranks. Before MPI is initialised, end only this process."""
    if group is not None and group.size > 1:
        group.communicator.Abort(exit_code)
    os._exit(exit_code)


MOST_ELEMENTS = 2**30  # Most elements per MPI call. MPI's counts are 32-bit integers, and Open MPI 5 refuses 2**31
# All-gather and similar collectives count in units of 16 bytes, which keeps their counts below MPI's limit
_BLOCK_BYTES = 16


def check_types(backend: str, dtypes: Sequence[DataType], ops: Sequence[ReduceOp] | None) -> None:
    """Raise UsageError if MPI cannot reduce one of these types. Without a reduction (`ops` is None), all types are
    valid.
    """
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
    """Return the types that MPI can reduce. bfloat16 is missing, because NumPy cannot divide it for an average."""
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


@cache
def mpi_function(name: str) -> int | None:
    """Return the address of a function in mpi4py's MPI library. None if it is not found."""
    from mpi4py import MPI

    try:
        # A handle of an extension module also resolves symbols of the libraries that it links.
        function = getattr(ctypes.CDLL(MPI.__file__), name)
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


class MpiLaunch(Struct, frozen=True, eq=False):
    """One operation: its MPI calls with arguments, and the memory that they use.

    `then` moves the result to where NCCL would write it. It is not timed, because it is not part of MPI's operation.
    """

    entries: tuple[Entry, ...]
    memories: tuple[Memory, ...]
    then: Launch | None = None

    def __call__(self) -> None:
        """Make the MPI calls, then move the result."""
        loop = MpiLoop([self])
        with raising_mpi_errors():
            loop()
        loop.complete()


class MpiLoop(CallTable):
    """Independent operations whose MPI calls are made without Python in between."""

    def __init__(self, launches: Sequence[MpiLaunch]) -> None:
        super().__init__([entry for launch in launches for entry in launch.entries])
        self._launches = dict.fromkeys(launches)

    def complete(self) -> None:
        for launch in self._launches:
            if launch.then is not None:
                launch.then()


@contextlib.contextmanager
def raising_mpi_errors() -> Iterator[None]:
    """Convert the status of a failed call to MPI's exception, as mpi4py does."""
    try:
        yield
    except CallFailedError as error:
        from mpi4py import MPI

        raise MPI.Exception(error.status) from error


def join_mpi_launches(launches: Sequence[Launch]) -> Launch:
    """Join operations into one. Each operation needs the result of the previous one."""
    calls = [launch for launch in launches if isinstance(launch, MpiLaunch)]
    if not calls or len(calls) < len(launches) or any(launch.then for launch in calls[:-1]):
        return join_launches(launches)
    memories = tuple(memory for launch in calls for memory in launch.memories)
    return MpiLaunch(tuple(entry for launch in calls for entry in launch.entries), memories, calls[-1].then)


class MpiCalls:
    """NCCL's collectives as MPI calls. Launches block. `settle` waits for the stream on which results are copied."""

    def __init__(
        self, communicator: "MPI.Comm", most_elements: int = MOST_ELEMENTS, settle: Launch | None = None
    ) -> None:
        from mpi4py import MPI

        self._settle = () if settle is None else (settle,)
        self._bytes = MPI.BYTE
        self._communicator = communicator
        self._in_place = int(MPI.IN_PLACE)
        self._rank = communicator.Get_rank()
        self._ranks = communicator.Get_size()
        self._most_elements = most_elements
        self._types = _mpi_types()
        self._block = MPI.BYTE.Create_contiguous(_BLOCK_BYTES).Commit()
        self._ops = {op: (MPI.SUM if op is ReduceOp.AVG else getattr(MPI, op.name)).handle for op in ReduceOp}

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`MPI_Allreduce`. MPI has no average, so a sum is divided afterwards."""
        how = self._types[dtype].handle, self._ops[op]
        launches = [
            self._bind("MPI_Allreduce", self._in_place if source == taken else source, taken, elements, *how)
            for elements, source, taken in self._pieces(count, dtype.size_bytes, send, receive)
        ]
        return join_mpi_launches([*launches, *self._divide(receive, count, dtype, op)])

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        block = self._blocks(count, dtype)
        source = self._in_place if send == _behind(receive, self._rank * count * dtype.size_bytes) else send
        return self._bind("MPI_Allgather", source, *block, receive, *block)

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`MPI_Reduce_scatter_block`, or several `MPI_Reduce` if the count exceeds MPI's limit."""
        divide = self._divide(receive, count, dtype, op)
        if count * self._ranks > self._most_elements:
            op = ReduceOp.SUM if op is ReduceOp.AVG else op
            blocks = [_behind(send, owner * count * dtype.size_bytes) for owner in range(self._ranks)]
            launches = [self.reduce(block, receive, count, dtype, op, owner) for owner, block in enumerate(blocks)]
            return join_mpi_launches([*launches, *divide])
        how = count, self._types[dtype].handle, self._ops[op]
        if send.memory is not receive.memory:
            launch = self._bind("MPI_Reduce_scatter_block", send, receive, *how)
        else:
            # In place, MPI writes the result to the first block, but NCCL writes it to the rank's own block.
            copy = None if send == receive else self._copy(send, receive, count, dtype)
            launch = self._bind("MPI_Reduce_scatter_block", self._in_place, send, *how, then=copy)
        return join_mpi_launches([launch, *divide])

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`MPI_Bcast`, which has a single buffer. The root's copy to its receive buffer is not timed."""
        buffer, then = receive, None
        if self._rank == root and send != receive:
            buffer, then = send, self._copy(send, receive, count, dtype)
        pieces = list(self._pieces(count * dtype.size_bytes, 1, buffer))
        last = len(pieces) - 1
        return join_mpi_launches(
            [
                self._bind("MPI_Bcast", piece, size, self._bytes.handle, root, then=then if number == last else None)
                for number, (size, piece) in enumerate(pieces)
            ]
        )

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        """`MPI_Reduce`. For an average, the root divides the sum."""
        is_root = self._rank == root
        how = self._types[dtype].handle, self._ops[op], root
        launches = [
            self._bind("MPI_Reduce", self._in_place if is_root and source == taken else source, taken, elements, *how)
            for elements, source, taken in self._pieces(count, dtype.size_bytes, send, receive)
        ]
        return join_mpi_launches([*launches, *(self._divide(receive, count, dtype, op) if is_root else ())])

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        block = self._blocks(count, dtype)
        return self._bind("MPI_Alltoall", send, *block, receive, *block)

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """`MPI_Alltoallv`. Python calls it, because it takes nine arguments and the call table has room for eight."""
        whole = [count * dtype.size_bytes // _BLOCK_BYTES for count in counts]
        own = [whole[self._rank]] * self._ranks
        source = _array(send, sum(counts) * dtype.size_bytes)
        taken = _array(receive, counts[self._rank] * self._ranks * dtype.size_bytes)
        return partial(
            self._communicator.Alltoallv,
            (source, (whole, [*accumulate(whole, initial=0)][:-1]), self._block),
            (taken, (own, [*accumulate(own, initial=0)][:-1]), self._block),
        )

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        block = self._blocks(count, dtype)
        own = _behind(receive, self._rank * count * dtype.size_bytes)
        source = self._in_place if self._rank == root and send == own else send
        return self._bind("MPI_Gather", source, *block, receive, *block, root)

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        block = self._blocks(count, dtype)
        own = _behind(send, self._rank * count * dtype.size_bytes)
        taken = self._in_place if self._rank == root and receive == own else receive
        return self._bind("MPI_Scatter", send, *block, taken, *block, root)

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """One `MPI_Sendrecv` per piece. Python calls it, because it takes twelve arguments."""
        send_and_receive = partial(self._communicator.Sendrecv, dest=destination, source=source)
        return join_launches(
            [
                partial(
                    send_and_receive, (_array(outgoing, size), self._bytes), recvbuf=(_array(into, size), self._bytes)
                )
                for size, outgoing, into in self._pieces(count * dtype.size_bytes, 1, send, receive)
            ]
        )

    def _pieces(self, count: int, element_bytes: int, *regions: Region) -> Iterator[tuple[Any, ...]]:
        """Split a message into pieces within MPI's limit. Yield the element count and one region per input region."""
        for start in range(0, count, self._most_elements):
            elements = min(self._most_elements, count - start)
            yield elements, *(_behind(region, start * element_bytes) for region in regions)

    def _blocks(self, count: int, dtype: DataType) -> tuple[int, int]:
        return count * dtype.size_bytes // _BLOCK_BYTES, self._block.handle

    def _bind(self, name: str, *arguments: Region | int, then: Launch | None = None) -> MpiLaunch:
        """Bind an MPI call to its arguments and the communicator. Raise CouldNotMeasureError if MPI lacks the
        function.
        """
        address = mpi_function(name)
        if address is None:
            raise missing_mpi_library(f"{name} is not found in it")
        words = (argument.address if isinstance(argument, Region) else argument for argument in arguments)
        memories = tuple(argument.memory for argument in arguments if isinstance(argument, Region))
        return MpiLaunch(((address, *words, self._communicator.handle),), memories, then)

    def _copy(self, source: Region, destination: Region, count: int, dtype: DataType) -> Launch:
        origin, taken = (_array(region, count * dtype.size_bytes) for region in (source, destination))
        return join_launches([partial(taken.__setitem__, slice(None), origin), *self._settle])

    def _divide(self, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> tuple[Launch, ...]:
        """Return the division of a sum for `ReduceOp.AVG`, or nothing for other operations. Integers are rounded
        down.
        """
        if op is not ReduceOp.AVG:
            return ()
        values = receive.memory.array(receive.offset_bytes, count, dtype.value)
        is_float = dtype in (DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64)
        return (partial(values.__itruediv__ if is_float else values.__ifloordiv__, self._ranks), *self._settle)


def _behind(region: Region, size_bytes: int) -> Region:
    return Region(region.memory, region.offset_bytes + size_bytes)


def _array(region: Region, size_bytes: int) -> Array:
    return region.memory.array(region.offset_bytes, size_bytes, "uint8")
