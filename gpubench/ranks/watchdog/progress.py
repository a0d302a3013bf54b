"""The shared memory in which a rank reports progress to its watchdog. It imports little, because every rank loads
it first.
"""

import mmap
import os
import select
import signal
from contextlib import suppress

from msgspec import Struct

from gpubench.model.terms.ranks import PHASES, Phase

# Ends a rank with exit code 3: SIGQUIT is 3, and its handler is libc's `_exit`, which gets the signal number
END_SIGNAL = signal.SIGQUIT


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
    """Print a line on stderr. Drop the line if stderr is blocked or closed."""
    _, writable, _ = select.select([], [_STDERR], [], _SECONDS_TO_WRITE)
    if writable:
        with suppress(OSError):
            os.write(_STDERR, f"gpubench: {text}\n".encode(errors="replace"))


_STEP, _PHASE, _DONE, _TOTAL, _LABEL_BYTES, _LEAVING = range(6)
_LABEL_AT = 64
_MOST_LABEL_BYTES = 256


class ProgressReading(Struct, frozen=True):
    """A rank's progress at one moment. `step` is the number of phases that it has entered."""

    step: int
    phase: Phase
    label: str
    done: int
    total: int


class ProgressBlock:
    """A memory page that a rank writes and its watchdog reads: 64-bit counters and a label. The rank reads no clock."""

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
        """Add to the number of completed operations."""
        self._numbers[_DONE] += operations

    def leave(self) -> None:
        """Record that this rank is about to end on its own."""
        self._numbers[_LEAVING] = 1

    def left(self) -> bool:
        """True if the rank has recorded that it is about to end on its own."""
        return bool(self._numbers[_LEAVING])

    def read(self) -> ProgressReading:
        step, phase, done, total, label_bytes = self._numbers[:_LEAVING]
        label = self._page[_LABEL_AT : _LABEL_AT + label_bytes].decode(errors="replace")
        return ProgressReading(step, PHASES[phase], label, done, total)
