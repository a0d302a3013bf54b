"""The page of progress that a rank shares with its watchdog, and what both print about it; few imports."""

import mmap
import os
import select
import signal
from contextlib import suppress

from gpubench.model.terms.ranks import PHASES, Phase
from gpubench.records import dataclass

END_SIGNAL = signal.SIGQUIT  # Exit code 3: its handler is C's `_exit`, called with the signal's number, 3


@dataclass(frozen=True, slots=True)
class Watched:
    """The rank that a watchdog belongs to."""

    rank: int
    ranks: int
    place: str
    host: str
    pid: int
    timeout_s: float


_SECONDS_TO_WRITE = 2.0
_STDERR = 2


def write_stderr_line(text: str) -> None:
    """Print it as gpubench's, unless stderr is full and nobody reads it."""
    _, writable, _ = select.select([], [_STDERR], [], _SECONDS_TO_WRITE)
    if writable:
        with suppress(OSError):
            os.write(_STDERR, f"gpubench: {text}\n".encode(errors="replace"))


_STEP, _PHASE, _DONE, _TOTAL, _LABEL_BYTES, _LEAVING = range(6)
_LABEL_AT = 64
_MOST_LABEL_BYTES = 256


@dataclass(frozen=True, slots=True)
class ProgressReading:
    """The page at one moment. `step` counts the phases entered so far."""

    step: int
    phase: Phase
    label: str
    done: int
    total: int


class ProgressBlock:
    """The page of progress that a rank writes and its watchdog reads: numbers of eight bytes, no clock."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("gpubench-progress")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._numbers = memoryview(self._page).cast("q")

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Begin another phase."""
        text = label.encode()[:_MOST_LABEL_BYTES]
        self._page[_LABEL_AT : _LABEL_AT + len(text)] = text
        numbers = self._numbers
        numbers[_LABEL_BYTES] = len(text)
        numbers[_PHASE] = PHASES.index(phase)
        numbers[_DONE] = 0
        numbers[_TOTAL] = operations
        numbers[_STEP] += 1

    def completed(self, operations: int = 1) -> None:
        """Count so many more completed operations."""
        self._numbers[_DONE] += operations

    def leave(self) -> None:
        """Note that this rank ends on its own."""
        self._numbers[_LEAVING] = 1

    def left(self) -> bool:
        """True where the rank ends, or ended, on its own."""
        return bool(self._numbers[_LEAVING])

    def read(self) -> ProgressReading:
        """The page as it is now."""
        step, phase, done, total, label_bytes = self._numbers[:_LEAVING]
        label = self._page[_LABEL_AT : _LABEL_AT + label_bytes].decode(errors="replace")
        return ProgressReading(step, PHASES[phase], label, done, total)
