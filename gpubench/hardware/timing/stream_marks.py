"""Events between the operations of a long timed loop, by which a watchdog sees how far the stream is.

An event after every operation costs 2.1 µs each on an H200, so there is one after every 20 ms of work, and none in a
loop shorter than that. What 20 ms are is known from the warm-up of the same operations.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from gpubench.hardware.timing.pace import Pace
from gpubench.model.terms.progress import Progress
from gpubench.ports.launch import Launch

SECONDS_BETWEEN_MARKS = 0.02

MOST_QUEUED = 256
"""Operations that surely find room in the queue of a stream, which has 1,022 places for launches: where it is full, the
host waits for the GPU, and the time to issue them says nothing.
"""


class Marks:
    """The marks of one stream of CuPy's: `groups` places them, from what was `measured` before."""

    def __init__(self, cupy: Any, stream: Any, progress: Progress) -> None:
        self._cupy = cupy
        self._stream = stream
        self._progress = progress
        self._pace = Pace(SECONDS_BETWEEN_MARKS)
        self.groups = self._pace.groups
        self.every = self._pace.every

    def measured(self, seconds: float) -> None:
        """Note what the last loop took in all."""
        self._progress.completed(self._pace.measured(seconds))

    def between(self, parts: Sequence[tuple[Launch, int]]) -> Launch:
        """Parts of a loop in order, each with the number of its operations, and, of several, a mark behind each."""
        if len(parts) == 1:
            return parts[0][0]
        events = [self._cupy.cuda.Event(disable_timing=True) for _ in parts]
        return MarkedLaunch(parts, events, self._stream.record, self._progress)

    def clocked(self, parts: Sequence[tuple[Launch, int]]) -> "StreamClockedLaunch":
        """As `between`, with a mark behind every part that keeps the time at which the stream reached it."""
        events = [self._cupy.cuda.Event() for _ in parts]
        return StreamClockedLaunch(parts, events, self._stream.record, self._progress, self._cupy.cuda.get_elapsed_time)


@dataclass(eq=False)
class MarkedLaunch:
    """Makes its launches, and knows which of them the stream has completed."""

    parts: Sequence[tuple[Launch, int]]
    events: Sequence[Any]
    record: Callable[[Any], object]
    progress: Progress

    def __post_init__(self) -> None:
        self._under_way: deque[tuple[int, Any]] = deque()
        self._issue_seconds: list[float] = []

    def __call__(self) -> None:
        """Make them. Where the stream is full and a part has to wait, progress made meanwhile is reported after it."""
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
        """Mean seconds to issue an operation of the parts that surely found room in the queue; None where none did.

        As in the times of batches, the first part, which has the beginning in it, counts only where it is alone.
        """
        known = list(self._surely_queued())
        counted = known[1:] or known
        operations = sum(number for _, number in counted)
        return sum(seconds for seconds, _ in counted) / operations if operations else None

    def _surely_queued(self) -> Iterator[tuple[float, int]]:
        """Seconds to issue, and number of operations, of the parts before which and with which the queue has room."""
        queued = 0
        for seconds, (_, operations) in zip(self._issue_seconds, self.parts, strict=False):
            queued += operations
            if queued > MOST_QUEUED:
                return
            yield seconds, operations

    def look(self) -> None:
        """Report the parts that are complete."""
        while self._under_way and self._under_way[0][1].done:
            self.progress.completed(self._under_way.popleft()[0])


@dataclass(eq=False)
class StreamClockedLaunch(MarkedLaunch):
    """Marks that keep the time, by the clock of the GPU."""

    elapsed_milliseconds: Callable[[Any, Any], float]

    def batch_seconds(self) -> Sequence[float]:
        """Seconds of every part but the first, once the stream is idle."""
        return [self.elapsed_milliseconds(start, end) / 1e3 for start, end in pairwise(self.events)]
