"""A stream gate (`cuStreamWaitValue32`): operations behind it start together, however long enqueueing them took."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpubench.hardware.node.cuda_driver import CudaUnavailableError, load_cuda

MOST_WAITING = 500
"""Operations that may wait behind a closed gate. A stream takes about 1024; enqueueing one more waits for a place, and
never ends where all of them wait for the gate."""

_LONGEST_SECONDS = 0.5
"""A gate that is still closed then is opened: the driver splits some copies into more operations than can be foreseen,
and may wait for the GPU when it loads a kernel. To issue `MOST_WAITING` takes a few milliseconds."""

_FLAG_BYTES = 4
_WORD = 0xFFFFFFFF
_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ in cuda.h, compared as numbers that wrap around."""

_Wait = Callable[[int, int, int, int], int]


class HeldStream:
    """A stream that waits at the closed gate. It is opened once, by the host or by the timer."""

    def __init__(self, address: int = 0, turn: int = 0) -> None:
        self._address = address
        self._turn = turn
        self._waiting = 0

    def count(self, places: int) -> None:
        """Count operations that are about to be enqueued, and open the gate where too many would wait."""
        self._waiting += places
        if self._waiting > MOST_WAITING:
            self.open()

    def open(self) -> None:
        """Start the operations that wait."""
        if self._address:
            ctypes.c_uint32.from_address(self._address).value = self._turn


class StreamGate:
    """A number in pinned host memory that streams wait for (`cuStreamWaitValue32`); a gate that is always open where
    the driver has no such operation, or refuses it.

    A spinning kernel, as nvbandwidth uses, would take an SM from what is measured and has to be compiled.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._wait = _find_wait()
        self._turn = 0
        self._address = 0
        if self._wait is not None:
            flags = runtime.hostAllocPortable | runtime.hostAllocMapped
            self._address = runtime.hostAlloc(_FLAG_BYTES, flags)
            ctypes.c_uint32.from_address(self._address).value = 0

    @property
    def works(self) -> bool:
        """False where the driver has no such operation, or refused it."""
        return self._wait is not None

    @contextmanager
    def hold(self, stream: int) -> Iterator[HeldStream]:
        """Keep a stream of the current device from starting what is enqueued inside the `with`, until its end."""
        hold = self._close(stream)
        timer = threading.Timer(_LONGEST_SECONDS, hold.open)
        timer.daemon = True
        try:
            timer.start()
            yield hold
        finally:
            timer.cancel()
            hold.open()

    def free(self) -> None:
        """Give the memory back; the gate stays open."""
        self._wait = None
        if self._address:
            self._runtime.freeHost(self._address)
            self._address = 0

    def _close(self, stream: int) -> HeldStream:
        if self._wait is None:
            return HeldStream()
        turn = (self._turn + 1) & _WORD
        if self._wait(stream, self._address, turn, _AT_LEAST):
            self._wait = None
            return HeldStream()
        self._turn = turn
        return HeldStream(self._address, turn)


def _find_wait() -> _Wait | None:
    """The operation of the driver library. The first version of it is off by default, the second is not."""
    try:
        library = load_cuda()
    except CudaUnavailableError:
        return None
    for name in ("cuStreamWaitValue32_v2", "cuStreamWaitValue32"):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
            found: _Wait = function
            return found
    return None
