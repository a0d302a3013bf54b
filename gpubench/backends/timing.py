"""Timed loops in Python and in native code, clocks, and event marks that show the progress of a stream.

A Python loop made operations up to 16 KiB 0.4 to 1.2 µs slower than nccl-tests (medians of five collectives on 4
H200s). So machine code runs through a table of calls and their arguments. The code is this C function, compiled for the
two processors of GPU servers. On other processors, or if the system forbids such code, Python makes the calls.

    long run(const long *call, long count) {
        for (long i = 1; i <= count; ++i, call += 9) {
            int status = ((int (*)(long, long, long, long, long, long, long, long))call[0])(
                call[1], call[2], call[3], call[4], call[5], call[6], call[7], call[8]);
            if (status) return i << 32 | (unsigned)status;
        }
        return 0;
    }

An event costs 2.1 µs on an H200, so one is recorded every 20 ms.
"""

import ctypes
import gc
import mmap
import os
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice, pairwise
from time import CLOCK_MONOTONIC, perf_counter
from typing import Any

from msgspec import Struct

from gpubench.errors import UsageError
from gpubench.model.terms.ranks import Progress
from gpubench.ports.backend import BatchedLaunch, Launch
from gpubench.ports.group import Group, NativeBarrier


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector during a timed loop, because a collection takes milliseconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def copy_seconds(size_bytes: int, samples: int) -> list[float]:
    """Return the times in seconds of host memory copies by this thread. All pages exist before the first copy."""
    source, destination = bytearray(b"\1") * size_bytes, bytearray(b"\2") * size_bytes
    into = memoryview(destination)
    seconds = []
    with no_garbage_collection():
        for _ in range(samples):
            started = perf_counter()
            into[:] = source
            seconds.append(perf_counter() - started)
    return seconds


def join_launches(launches: Sequence[Launch]) -> Launch:
    """Join launches into one. A single launch is returned unchanged, so that no call is added to its time."""
    if len(launches) == 1:
        return launches[0]

    def launch_all() -> None:
        for launch in launches:
            launch()

    return launch_all


class HostClockedLaunch(Struct, eq=False, dict=True):
    """The parts of a loop, each with its number of operations. A call reads the clock after each part."""

    parts: Sequence[tuple[Launch, int]]
    progress: Progress

    def __call__(self) -> None:
        self._times: list[float] = []
        for part, operations in self.parts:
            part()
            self._times.append(perf_counter())
            self.progress.completed(operations)

    def batch_seconds(self) -> Sequence[float]:
        """Return the time in seconds of every part except the first, which has no start time."""
        return [end - start for start, end in pairwise(self._times)]


def join_groups(
    launches: Sequence[Launch], groups: Sequence[int], join: Callable[[Sequence[Launch]], Launch]
) -> list[tuple[Launch, int]]:
    """Join the launches of each group into one launch. Return these with the number of operations in each group.

    Loops repeat the same few buffers, so equal groups share one joined launch.
    """
    rest = iter(launches)
    parts = [tuple(islice(rest, count)) for count in groups]
    keys = [tuple(map(id, part)) for part in parts]
    joined = {key: join(part) for key, part in dict(zip(keys, parts, strict=True)).items()}
    return [(joined[key], len(key)) for key in keys]


class Pace:
    """Splits loops into groups of about equal duration, from the time per operation in the previous loop.

    The previous loop is usually the warm-up. It only counts if it starts with the same launch.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._first: Launch | None = None
        self._operations = 0
        self._single = True
        self._known: tuple[Launch | None, float] = (None, 0.0)

    def groups(self, launches: Sequence[Launch], replays: int = 0) -> list[int]:
        """Return the number of launches in each group. With `replays`, return the number of graph replays instead."""
        self._first = launches[0] if launches else None
        count, size = (replays, len(launches)) if replays else (len(launches), 1)
        self._operations = count * size
        known, seconds = self._known
        self._single = self._first is None or known is not self._first or seconds * self._operations <= self._seconds
        if self._single:
            return [count]
        together = max(1, int(self._seconds / (seconds * size)))
        return [min(together, count - start) for start in range(0, count, together)]

    def every(self, launches: Sequence[Launch], operations: int) -> list[int]:
        """Return the sizes of groups with this many launches. The last group may have fewer."""
        self._first, self._operations, self._single = launches[0], len(launches), False
        return [min(operations, len(launches) - start) for start in range(0, len(launches), operations)]

    def measured(self, seconds: float) -> int:
        """Record the time of the last loop. Return how many of its operations have not been reported as progress
        yet.
        """
        if self._operations:
            self._known = (self._first, seconds / self._operations)
        return self._operations if self._single else 0


_SECONDS_BETWEEN_REPORTS = 1e-4  # Reporting every operation would make operations of 1 µs 8 % slower


class BlockingClock:
    """Measure launches that block until their operation is done, in host time."""

    def __init__(self, group: Group, progress: Progress, no_graphs: str) -> None:
        self._ranks = group
        self._reports = progress
        self._no_graphs = no_graphs
        self._pace = Pace(_SECONDS_BETWEEN_REPORTS)

    def chain(self, launches: Sequence[Launch]) -> Launch:
        return join_launches(launches)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """Join operations into one launch. Raise UsageError for graph replays, which need a CUDA stream."""
        if graph_replays:
            raise UsageError(f"--graph needs GPUs: {self._no_graphs}", next_step="leave --graph out")
        parts = join_groups(launches, self._pace.groups(launches), self._loop)
        return parts[0][0] if len(parts) == 1 else HostClockedLaunch(parts, self._reports)

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """Join operations into one launch that reads the clock after each batch."""
        return HostClockedLaunch(
            join_groups(launches, self._pace.every(launches, operations), self._loop), self._reports
        )

    def seconds(self, launch: Launch) -> float:
        with no_garbage_collection():
            start = perf_counter()
            launch()
            return self._seconds_since(start)

    def _loop(self, launches: Sequence[Launch]) -> Launch:
        return join_launches(launches)

    def _seconds_since(self, start: float) -> float:
        """Return the time in seconds since `start`, and report the operations of that time as progress."""
        seconds = perf_counter() - start
        self._reports.completed(self._pace.measured(seconds))
        return seconds

    def once(self, launch: Launch) -> None:
        launch()

    def together(self, launch: Launch) -> float:
        """Return the wall time of a launch in seconds, measured from a barrier."""
        self._ranks.barrier()
        return self.seconds(launch)


MOST_ARGUMENTS = 8

# Address of a C function that returns 0 for success, and up to eight integer or pointer arguments
Entry = tuple[int, ...]
_X86_64 = """
4154 4989f4 55 bd01000000 53 4889fb 4c39e5 7f3a 488b4b20 488b5318 488b7310 488b7b08 ff7340 ff7338 4c8b4b30 4c8b4328 ff13
5a 59 85c0 740b 48c1e520 89c0 4809e8 eb0b 48ffc5 4883c348 ebc1 31c0 5b 5d 415c c3
"""
_AARCH64 = """
a9bd7bfd 910003fd a90153f3 aa0003f3 d2800034 f90013f5 aa0103f5 eb15029f 5400006d d2800000 1400000a a9400268 a9410a61
a9421263 a9431a65 f9402267 d63f0100 340000e0 2a0003e0 aa148000 a94153f3 f94013f5 a8c37bfd d65f03c0 91000694 91012273
17ffffed
"""

_Loop = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
_Call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * MOST_ARGUMENTS)


class CallFailedError(Exception):
    """A call in a table did not return 0. The calls after it were not made."""

    def __init__(self, position: int, status: int) -> None:
        super().__init__(f"call {position} returned {status}")
        self.position = position
        self.status = status


class CallTable:
    """A sequence of native calls. Calling the table makes all of them without Python's global lock."""

    def __init__(self, entries: Sequence[Entry], *, native: bool = True) -> None:
        self._entries = entries
        words = [word for entry in entries for word in (*entry, *[0] * (1 + MOST_ARGUMENTS - len(entry)))]
        self._table = (ctypes.c_int64 * len(words))(*words)
        self._address = ctypes.addressof(self._table)
        self._count = len(entries)
        self._loop = native_loop() if native else None

    def after(self, entries: Sequence[Entry]) -> "CallTable":
        """Return a table that makes `entries` first, and then the calls of this table."""
        return CallTable([*entries, *self._entries], native=self._loop is not None)

    def __call__(self) -> None:
        """Make the calls. Raise CallFailedError if one fails."""
        result = self._loop(self._address, self._count) if self._loop else self._run_in_python()
        if result:
            raise CallFailedError((result >> 32) - 1, result & 0xFFFFFFFF)

    def _run_in_python(self) -> int:
        for position in range(self._count):
            address, *arguments = self._table[position * 9 : position * 9 + 9]
            status: int = _Call(address)(*arguments)
            if status:
                return (position + 1) << 32 | status
        return 0


@cache
def native_loop() -> "Callable[[int, int], int] | None":
    """Return the compiled `run` as a function of table address and call count.

    None if the processor is unknown or the system forbids executable memory.
    """
    code = machine_code(platform.machine())
    address = _map_executable(code) if code else None
    return _Loop(address) if address else None


def machine_code(machine: str) -> bytes | None:
    """Return the machine code of `run` for a processor, by its `uname -m` name. None for other processors."""
    if machine == "x86_64":
        return bytes.fromhex(_X86_64)
    if machine == "aarch64":
        return b"".join(int(word, 16).to_bytes(4, "little") for word in _AARCH64.split())
    return None


def _map_executable(code: bytes) -> int | None:
    """Map the code until this process ends, and return its address. None if the system refuses.

    The code is written to an in-memory file and mapped from that file. So no page is writable and executable at once,
    and the kernel updates the instruction cache, which aarch64 needs.
    """
    try:
        descriptor = os.memfd_create("gpubench-loop")
    except OSError:
        return None
    try:
        os.write(descriptor, code)
        function = ctypes.CDLL(None).mmap
        function.restype = ctypes.c_ssize_t
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)
        address: int = function(None, len(code), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, descriptor, 0)
    finally:
        os.close(descriptor)
    return None if address == -1 else address


_NANOSECONDS = 1e-9


class StartingLine:
    """Adds a barrier and a read of `perf_counter`'s clock in front of a table of calls."""

    def __init__(self, group: Group) -> None:
        barrier = group.barrier_call() if isinstance(group, NativeBarrier) else None
        self._time = (ctypes.c_int64 * 2)()
        clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
        read = (clock, CLOCK_MONOTONIC, ctypes.addressof(self._time))
        self._entries = [] if barrier is None else [barrier, read]

    def before(self, table: CallTable) -> CallTable | None:
        """Return the table with the barrier in front. None if the group's barrier is not a native call."""
        return table.after(self._entries) if self._entries else None

    @property
    def barrier_passed_s(self) -> float:
        """The time at which this rank left the last barrier, on `perf_counter`'s clock."""
        return self._time[0] + self._time[1] * _NANOSECONDS


SECONDS_BETWEEN_MARKS = 0.02

MOST_QUEUED = 256
"""Number of operations that always fit into a stream's queue, which has 1,022 entries for launches.

If the queue is full, the host waits for the GPU. The time to issue operations then means nothing.
"""


class Marks:
    """Events on one CuPy stream that mark its progress, about every 20 ms."""

    def __init__(self, cupy: Any, stream: Any, progress: Progress) -> None:
        self._cupy = cupy
        self._stream = stream
        self._progress = progress
        self._pace = Pace(SECONDS_BETWEEN_MARKS)
        self.groups = self._pace.groups
        self.every = self._pace.every

    def measured(self, seconds: float) -> None:
        self._progress.completed(self._pace.measured(seconds))

    def replays(self, launches: Sequence[Launch], replays: int, capture: Callable[[int], Launch]) -> Launch:
        """Return a launch that replays a captured graph of all launches. `capture(n)` returns a launch with n
        replays.
        """
        groups = self.groups(launches, replays)
        graphs = {count: capture(count) for count in set(groups)}
        return self.between([(graphs[count], count * len(launches)) for count in groups])

    def between(self, parts: Sequence[tuple[Launch, int]]) -> Launch:
        """Join the parts of a loop into one launch. If there are several parts, record an event after each one."""
        if len(parts) == 1:
            return parts[0][0]
        events = [self._cupy.cuda.Event(disable_timing=True) for _ in parts]
        return MarkedLaunch(parts, events, self._stream.record, self._progress)

    def clocked(self, parts: Sequence[tuple[Launch, int]]) -> "StreamClockedLaunch":
        """Join the parts of a loop into one launch, with events that record when the GPU has finished each part."""
        events = [self._cupy.cuda.Event() for _ in parts]
        return StreamClockedLaunch(parts, events, self._stream.record, self._progress, self._cupy.cuda.get_elapsed_time)


class MarkedLaunch(Struct, eq=False, dict=True):
    """Parts of a loop with an event after each. The events show how many operations the GPU has completed."""

    parts: Sequence[tuple[Launch, int]]
    events: Sequence[Any]
    record: Callable[[Any], object]
    progress: Progress

    def __post_init__(self) -> None:
        self._under_way: deque[tuple[int, Any]] = deque()
        self._issue_seconds: list[float] = []

    def __call__(self) -> None:
        """Make the launches. If the stream's queue is full, progress is reported once there is room again."""
        self._issue_seconds = []
        for (part, operations), event in zip(self.parts, self.events, strict=True):
            start = perf_counter()
            part()
            self._issue_seconds.append(perf_counter() - start)
            self.record(event)
            self._under_way.append((operations, event))
            self.look()

    @property
    def issue_seconds(self) -> float | None:
        """Mean time to issue an operation, in seconds, while the queue had room. None if the first part filled the
        queue.
        """
        known = list(self._surely_queued())
        counted = known[1:] or known
        operations = sum(number for _, number in counted)
        return sum(seconds for seconds, _ in counted) / operations if operations else None

    def _surely_queued(self) -> Iterator[tuple[float, int]]:
        queued = 0
        for seconds, (_, operations) in zip(self._issue_seconds, self.parts, strict=False):
            queued += operations
            if queued > MOST_QUEUED:
                return
            yield seconds, operations

    def look(self) -> None:
        while self._under_way and self._under_way[0][1].done:
            self.progress.completed(self._under_way.popleft()[0])


class StreamClockedLaunch(MarkedLaunch, eq=False):
    """A launch whose events record GPU time."""

    elapsed_milliseconds: Callable[[Any, Any], float]

    def batch_seconds(self) -> Sequence[float]:
        """Wait until the stream is idle. Return the GPU time in seconds of every part except the first."""
        return [self.elapsed_milliseconds(start, end) / 1e3 for start, end in pairwise(self.events)]
