"""The job as MPI sees it: group operations, start and end. With calls.py the only importers of mpi4py."""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import socket
import threading
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, NoReturn, TypeVar

from gpubench.errors import missing_mpi_library, separate_jobs
from gpubench.hardware.process.cores import leave_core
from gpubench.model.facts.launched_by import LaunchedBy
from gpubench.model.terms.statistics.lateness import ClockOffset

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_ROUND_TRIPS = 10
_THREAD_MULTIPLE = 3
"""MPI_THREAD_MULTIPLE in the headers of Open MPI, MPICH and what has MPICH's ABI; in that of MPI 5 it is another."""

_STANDARD_ABI = "mpiabi"
"""In the name of mpi4py's library that is bound to an MPI by the ABI of MPI 5."""

_IMPORTING = "gpubench-imports"
"""The thread that imports modules beside what a rank does once MPI has started."""

_SET_BY_NUMPY = ("OPENBLAS_MAIN_FREE", "GOTOBLAS_MAIN_FREE")
"""NumPy sets those that are not there while it is imported, and takes them back."""

_SECONDS_BETWEEN_TESTS = 0.003
"""A look whether the others are there takes some microseconds."""


class MpiGroup:
    """A group over an MPI communicator."""

    def __init__(self, communicator: "MPI.Comm") -> None:
        self.communicator = communicator
        self.rank = communicator.Get_rank()
        self.size = communicator.Get_size()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        gathered: list[T] = self.communicator.allgather(value)
        return gathered

    def collect(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on the first rank; None on the others."""
        gathered: list[T] | None = self.communicator.gather(value, 0)
        return gathered

    def broadcast(self, value: T | None, root: int = 0) -> T:
        """Root's value, on every rank."""
        received: T = self.communicator.bcast(value, root)
        return received

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.communicator.Barrier()

    def meet(self) -> None:
        """A barrier that sleeps: every rank has called it, some milliseconds ago. Others keep a core busy meanwhile."""
        request = self.communicator.Ibarrier()
        while not request.Test():
            sleep(_SECONDS_BETWEEN_TESTS)

    def barrier_call(self) -> tuple[int, ...] | None:
        """`MPI_Barrier` of the library that mpi4py is bound to, and this communicator's handle."""
        from mpi4py import MPI

        try:
            # A library of Python's finds what the libraries that it depends on define.
            function = ctypes.CDLL(MPI.__file__).MPI_Barrier
        except (OSError, AttributeError):
            return None
        return ctypes.cast(function, ctypes.c_void_p).value or 0, self.communicator.handle

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Each of the values as it is on the rank where it is largest."""
        from mpi4py import MPI

        found = array("d", values)
        self.communicator.Allreduce(MPI.IN_PLACE, [found, MPI.DOUBLE], MPI.MAX)
        return found

    def clock_offset(self) -> ClockOffset:
        """The difference of this rank's clock to the first rank's, by messages to and fro, one rank after another.

        The first rank's answer was read between question and arrival, most likely in the middle, and the quickest of
        some round trips says it best (F. Cristian, Probabilistic clock synchronization, 1989).
        """
        if self.rank == 0:
            for other in range(1, self.size):
                for _ in range(_ROUND_TRIPS):
                    self.communicator.Recv(array("d", [0.0]), other)
                    self.communicator.Send(array("d", [perf_counter()]), other)
            return ClockOffset(0.0, 0.0)
        return min((self._round_trip() for _ in range(_ROUND_TRIPS)), key=lambda offset: offset.uncertainty)

    def _round_trip(self) -> ClockOffset:
        answer = array("d", [0.0])
        asked = perf_counter()
        self.communicator.Send(array("d", [asked]), 0)
        self.communicator.Recv(answer, 0)
        arrived = perf_counter()
        return ClockOffset(answer[0] - (asked + arrived) / 2, (arrived - asked) / 2)

    def split(self, color: int, key: int) -> "MpiGroup":
        """The group of the ranks with the same color, ordered by key."""
        return MpiGroup(self.communicator.Split(color, key))


def start(launched_by: LaunchedBy, imports: Sequence[str] = ()) -> MpiGroup:
    """Initialise MPI and return the group of the whole job; then import modules, as far as they are there.

    Whoever needs such a module waits for it by importing it. None is imported earlier: MPI_Init calls setenv, under
    which a getenv of libraries that are loaded beside it (OpenBLAS) may crash (seen with glibc 2.36). For the same
    reason an import beside this rank's next steps must set no variable: nvmlInit crashed in getenv under NumPy's.

    Raises CouldNotMeasureError for no MPI library, or a launcher whose processes do not form one job.
    """
    import mpi4py

    for name in _SET_BY_NUMPY if imports else ():
        os.environ.setdefault(name, "1")
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    with warnings.catch_warnings():
        # mpi4py warns of a launcher of another MPI; the check below is for the same, with what to do.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            _initialise()
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise missing_mpi_library(str(error).splitlines()[0]) from error
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    # No daemon: Python ends those wherever they are, which libraries that are being loaded may answer with abort().
    if imports:
        threading.Thread(target=_import, args=(imports,), name=_IMPORTING).start()
    group = MpiGroup(MPI.COMM_WORLD)
    if group.size == 1 and launched_by.size > 1:
        raise separate_jobs(launched_by.launcher, launched_by.size)
    return group


def _initialise() -> None:
    """Call MPI_Init_thread of the library that mpi4py is bound to, where that can be found without importing it.

    mpi4py holds Python's lock in that call, most of which is waiting for other ranks; ctypes does not, so that the
    watchdog goes on.
    """
    found = importlib.util.find_spec("mpi4py.MPI")
    path = found.origin if found is not None else None
    if path is None or _STANDARD_ABI in Path(path).name:
        return
    try:
        # A library of Python's finds what the libraries that it depends on define.
        initialise = ctypes.CDLL(path).MPI_Init_thread
    except (OSError, AttributeError):
        return
    initialise(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))


def _import(names: Sequence[str]) -> None:
    """Import modules, on any core; whoever needs one that cannot be says so when it does."""
    leave_core()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def nodes(group: MpiGroup) -> tuple[list[int], int]:
    """Each rank's node, numbered by its first rank, and this rank's place within its node."""
    from mpi4py import MPI

    local = group.communicator.Split_type(MPI.COMM_TYPE_SHARED, key=group.rank)
    leaders: list[int] = group.gather(local.bcast(group.rank, 0))
    order = {leader: number for number, leader in enumerate(dict.fromkeys(leaders))}
    return [order[leader] for leader in leaders], local.Get_rank()


def library_version() -> str:
    """The MPI library's name and version: 'Open MPI v5.0.11', 'MPICH Version: 4.2.0'."""
    from mpi4py import MPI

    first = MPI.Get_library_version().rstrip("\0").strip().splitlines()[0]
    return " ".join(first.split(",")[0].split())


def memory_kinds() -> str:
    """The kinds of memory that the library says it takes (MPI 4.1's mpi_memory_alloc_kinds); '' where it is silent."""
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    return kinds or ""


def thread_level() -> str:
    """The threads that may call the library: 'single', 'funneled', 'serialized', 'multiple'. gpubench needs one."""
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    return levels.get(MPI.Query_thread(), "multiple")


def load() -> str:
    """Load the MPI library that mpi4py is bound to without starting it; its version."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    return library_version()


def host_name() -> str:
    """This host's name, without its domain."""
    return socket.gethostname().split(".")[0]


def finish() -> None:
    """End MPI after a run that every rank brought to its end; modules are imported no longer then, as in `start`."""
    from mpi4py import MPI

    for importing in (thread for thread in threading.enumerate() if thread.name == _IMPORTING):
        importing.join()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def abort(group: MpiGroup | None, exit_code: int) -> NoReturn:
    """End every rank of the job at once, this process too; without a group, MPI never started, or failed to.

    There, and alone, leaving with an error is all there is: a launcher then ends the other ranks. MPI_Abort in an MPI
    that failed to start hangs (Open MPI 5).
    """
    if group is not None and group.size > 1:
        group.communicator.Abort(exit_code)
    os._exit(exit_code)
