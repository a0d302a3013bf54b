"""The shared memory in which a rank reports progress to its watchdog. It imports little: every rank starts with it."""

import mmap
import os
import select
import signal
from contextlib import suppress

from msgspec import Struct

from gpubench.model.terms.ranks import PHASES, Phase

END_SIGNAL = signal.SIGQUIT  # Gives exit code 3: its handler is libc's `_exit`, called with the signal's number, 3


class Watched(Struct, frozen=True):
    rank: int
    ranks: int
    place: str
    host: str
    pid: int
    timeout_s: float


_SECONDS_TO_WRITE = 2.0
_STDERR = 2


def write_stderr_line(text: str) -> None:
    """Print a line on stderr. Drop it if nobody reads stderr."""
    _, writable, _ = select.select([], [_STDERR], [], _SECONDS_TO_WRITE)
    if writable:
        with suppress(OSError):
            os.write(_STDERR, f"gpubench: {text}\n".encode(errors="replace"))


_STEP, _PHASE, _DONE, _TOTAL, _LABEL_BYTES, _LEAVING = range(6)
_LABEL_AT = 64
_MOST_LABEL_BYTES = 256


class ProgressReading(Struct, frozen=True):
    """The progress of a rank at one moment. `step` counts the phases that it has entered."""

    step: int
    phase: Phase
    label: str
    done: int
    total: int


class ProgressBlock:
    """One page that a rank writes and its watchdog reads: 64-bit counters and a label. The rank reads no clock."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("gpubench-progress")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._numbers = memoryview(self._page).cast("q")

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Begin a phase."""
        text = label.encode()[:_MOST_LABEL_BYTES]
        self._page[_LABEL_AT : _LABEL_AT + len(text)] = text
        numbers = self._numbers
        numbers[_LABEL_BYTES] = len(text)
        numbers[_PHASE] = PHASES.index(phase)
        numbers[_DONE] = 0
        numbers[_TOTAL] = operations
        numbers[_STEP] += 1

    def completed(self, operations: int = 1) -> None:
        """Count completed operations."""
        self._numbers[_DONE] += operations

    def leave(self) -> None:
        """Record that this rank is about to end by itself."""
        self._numbers[_LEAVING] = 1

    def left(self) -> bool:
        """True if the rank has recorded that it ends by itself."""
        return bool(self._numbers[_LEAVING])

    def read(self) -> ProgressReading:
        """Return the current progress."""
        step, phase, done, total, label_bytes = self._numbers[:_LEAVING]
        label = self._page[_LABEL_AT : _LABEL_AT + label_bytes].decode(errors="replace")
        return ProgressReading(step, PHASES[phase], label, done, total)
