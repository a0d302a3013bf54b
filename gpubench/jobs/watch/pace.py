"""The pace of a watch: the wait for the end of an interval, by a real clock or by one that leaps."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, Self

Wait = Callable[[float], bool]
"""Waits so many seconds; true where somebody asks to end the watch."""


class WatchPace(Protocol):
    """A clock, and a way to wait for a moment of it."""

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""

    def wait_until(self, moment: float) -> bool:
        """Return at that moment, or at once where it has passed; true where the watch is to end."""


class RealPace:
    """The machine's clock; `wait` listens to a keyboard meanwhile."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def now(self) -> float:
        """Of the monotonic clock."""
        return time.monotonic()

    def wait_until(self, moment: float) -> bool:
        """Sleep."""
        return self._wait(max(moment - time.monotonic(), 0.0))


class LeapingPace:
    """A clock that stands still and leaps to the moment that is waited for: of what is simulated or recorded."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Where it leapt to."""
        return self._now

    def wait_until(self, moment: float) -> bool:
        """Leap."""
        self._now = max(self._now, moment)
        return False


class RecordedPace:
    """The clock of a recording: it stands where its last reading was taken, which `elapsed` says."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
        self._elapsed = elapsed

    def now(self) -> float:
        """Since the first reading."""
        return self._elapsed()

    def wait_until(self, _moment: float) -> bool:
        """Nothing: the next reading is there."""
        return False


class Interrupts:
    """While it is entered: Ctrl-C and SIGTERM raise KeyboardInterrupt, and `asked` remembers it.

    Python drops an exception that a signal raises inside a destructor, and who typed Ctrl-C would have to do it again.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: object) -> None:
        self.asked = True
        raise KeyboardInterrupt


def sleep(seconds: float) -> bool:
    """The wait of who listens to no keyboard."""
    time.sleep(seconds)
    return False
