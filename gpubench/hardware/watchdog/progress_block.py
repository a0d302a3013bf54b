"""The page of memory in which a rank writes its progress for its watchdog."""

import mmap
import os
from dataclasses import dataclass

from gpubench.model.terms.hang import PHASES, Phase

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
    """The page, a new one, or that of an inherited `descriptor`.

    A rank calls `enter`, `completed` and `leave`; the process that it hands the descriptor to calls `read` and `left`.

    It holds numbers of eight bytes, which processors write whole, and no time: a watchdog notes itself when it sees
    something change, so that a rank pays for a number and never for a clock.
    """

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
