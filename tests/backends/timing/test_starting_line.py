"""A barrier in front of calls, as C functions without MPI."""

import ctypes
from time import perf_counter

from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.timing import CallTable, Entry, StartingLine


class Barred(AloneGroup):
    """A group of one process whose barrier is a C function."""

    def __init__(self, barrier: Entry | None) -> None:
        self._barrier = barrier

    def barrier_call(self) -> Entry | None:
        return self._barrier


def recorder(calls: list[tuple[str, float]], name: str) -> tuple[object, Entry]:
    """Return a C function that records when it is called. The first element keeps it alive."""

    def note(_argument: int) -> int:
        calls.append((name, perf_counter()))
        return 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(note)
    return function, (ctypes.cast(function, ctypes.c_void_p).value or 0, 7)


def test_the_clock_is_read_between_the_barrier_and_the_first_call() -> None:
    calls: list[tuple[str, float]] = []
    (kept, barrier), (kept_too, call) = recorder(calls, "barrier"), recorder(calls, "call")
    line = StartingLine(Barred(barrier))
    table = line.before(CallTable([call, call]))
    assert table is not None
    for _ in range(2):
        calls.clear()
        table()
        assert [name for name, _ in calls] == ["barrier", "call", "call"]
        assert calls[0][1] <= line.barrier_passed_s <= calls[1][1]
    assert kept is not kept_too
