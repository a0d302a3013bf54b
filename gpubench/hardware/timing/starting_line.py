"""A barrier of all ranks and the time at which this one left it, as the first calls of a table of calls.

With Python between a barrier and the first call behind it, ranks began 20 operations on an H200 up to 50 µs apart.
"""

import ctypes
from time import CLOCK_MONOTONIC

from gpubench.hardware.timing.native_loop import CallTable
from gpubench.ports.group import Group, NativeBarrier

_NANOSECONDS = 1e-9


class StartingLine:
    """Puts a group's barrier, and the clock of `perf_counter` behind it, in front of calls."""

    def __init__(self, group: Group) -> None:
        barrier = group.barrier_call() if isinstance(group, NativeBarrier) else None
        self._time = (ctypes.c_int64 * 2)()
        clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
        read = (clock, CLOCK_MONOTONIC, ctypes.addressof(self._time))
        self._entries = [] if barrier is None else [barrier, read]

    def before(self, table: CallTable) -> CallTable | None:
        """The calls behind the barrier; None where the group has none that a table can call."""
        return table.after(self._entries) if self._entries else None

    @property
    def passed_at(self) -> float:
        """When this rank left the last barrier, in seconds of `perf_counter`."""
        return self._time[0] + self._time[1] * _NANOSECONDS
