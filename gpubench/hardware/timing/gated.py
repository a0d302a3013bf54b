"""The clock of operations that wait in a stream, where the host may issue them slower than a GPU runs them.

torch.distributed takes 15 to 40 µs of Python for an operation that takes an H200 8 µs: a plain loop times the
interpreter. So operations are enqueued behind a closed gate, which opens when all ranks are ready, and events of the
GPU time them; how long the host took to issue them is a figure of its own.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from gpubench.errors import UsageError
from gpubench.hardware.cuda.gate import StreamGate
from gpubench.hardware.timing.clock import no_garbage_collection
from gpubench.hardware.timing.loops import in_order
from gpubench.hardware.timing.pace import Pace
from gpubench.hardware.timing.stream_marks import SECONDS_BETWEEN_MARKS
from gpubench.model.terms.progress import Progress
from gpubench.ports.group import Group
from gpubench.ports.launch import BatchedLaunch, Launch

MOST_HELD = 64
"""Operations behind one closed gate: each is a kernel and several events, and a stream has 1,022 places."""

_PLACES = 6
"""Of a stream that one operation may take."""


class WorkEndedError(Exception):
    """The communicator was aborted while it worked: the stream is idle, and nothing was measured."""


@dataclass(eq=False)
class GatedLaunch:
    """Operations in batches; calling it issues them all. `seconds` are those of each batch, once it was timed."""

    launches: Sequence[Launch]
    batches: Sequence[int]
    whole: Launch
    seconds: list[float] = field(default_factory=list)
    issued: float = 0.0

    def __call__(self) -> None:
        """Issue them all."""
        self.whole()

    def batch_seconds(self) -> Sequence[float]:
        """Seconds of every batch but the first."""
        return self.seconds[1:]

    def parts(self) -> Iterator[tuple[int, Sequence[Launch]]]:
        """The operations in portions that may wait together, each with the number of its batch."""
        start = 0
        for number, count in enumerate(self.batches):
            for first in range(start, start + count, MOST_HELD):
                yield number, self.launches[first : min(first + MOST_HELD, start + count)]
            start += count


class GatedClock:
    """Times operations on a stream of CuPy's from the opening of a gate, by the GPU's clock.

    `in_one` makes one launch of several; `until_idle` waits for the stream, and calls what it is given meanwhile.
    """

    def __init__(
        self,
        cupy: Any,
        stream: Any,
        group: Group,
        progress: Progress,
        in_one: Callable[[Sequence[Launch]], Launch] = in_order,
        until_idle: Callable[[Callable[[], object]], None] | None = None,
    ) -> None:
        self._cupy, self._stream = cupy, stream
        self._ranks, self._reports = group, progress
        self._in_one, self._until_idle = in_one, until_idle or self._poll
        self._gate = StreamGate(cupy.cuda.runtime)
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._pace = Pace(SECONDS_BETWEEN_MARKS)
        self._ended = False

    def in_order(self, launches: Sequence[Launch]) -> Launch:
        """One operation made of several; the stream keeps their order."""
        return in_order(launches)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> GatedLaunch:
        """All launches in order; UsageError where replays are asked for: this loop captures no graph."""
        if graph_replays:
            raise UsageError("--graph: operations behind a gate are not captured", next_step="--backend nccl")
        self._stream.synchronize()
        return GatedLaunch(launches, [len(launches)], self._in_one(launches))

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """All launches in order, timed in batches of so many."""
        self._stream.synchronize()
        starts = range(0, len(launches), operations)
        return GatedLaunch(launches, [min(operations, len(launches) - start) for start in starts], in_order(launches))

    def once(self, launch: Launch) -> None:
        """Issue an operation, and wait until the stream is idle."""
        launch()
        self._wait()

    def seconds(self, launch: Launch) -> float:
        """Wall time until the stream is idle, with what the host takes to issue operations."""
        self._pace.groups(launch.launches if isinstance(launch, GatedLaunch) else [launch])
        with no_garbage_collection():
            start = perf_counter()
            launch()
            self._wait()
            seconds = perf_counter() - start
        self._pace.measured(seconds)
        self._reports.completed(len(launch.launches) if isinstance(launch, GatedLaunch) else 1)
        return seconds

    def together(self, launch: Launch) -> float:
        """Seconds of the GPU for all operations, each portion of them issued before it begins on any rank."""
        if not isinstance(launch, GatedLaunch):
            raise TypeError("what is timed together is bound before")
        launch.seconds, launch.issued = [0.0] * len(launch.batches), 0.0
        self._stream.synchronize()
        with no_garbage_collection():
            for batch, part in launch.parts():
                launch.seconds[batch] += self._portion(launch, part)
        return sum(launch.seconds)

    def _portion(self, launch: GatedLaunch, part: Sequence[Launch]) -> float:
        """Portions are the same on every rank, which meet before each; marks in them are this rank's own."""
        begin, end = self._events
        groups, rest, marks = self._pace.groups(part), iter(part), deque[tuple[int, Any]]()
        ready = [(count, self._in_one(list(islice(rest, count)))) for count in groups]
        with self._gate.hold(self._stream.ptr) as held:
            self._stream.record(begin)
            start = perf_counter()
            for count, issue in ready:
                held.count(count * _PLACES)
                issue()
                if len(groups) > 1:
                    marks.append((count, self._cupy.cuda.Event(disable_timing=True)))
                    self._stream.record(marks[-1][1])
            launch.issued += perf_counter() - start
            self._stream.record(end)
            self._ranks.barrier()
            held.open()  # at once: what else ends a hold would keep the ranks apart
        self._wait(marks)
        milliseconds: float = self._cupy.cuda.get_elapsed_time(begin, end)
        self._reports.completed(self._pace.measured(milliseconds / 1e3))
        return milliseconds / 1e3

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Seconds of the host to issue one of the operations that were timed last."""
        known = isinstance(launch, GatedLaunch) and operations > 0
        return launch.issued / operations if known and isinstance(launch, GatedLaunch) else None

    def end_waiting(self) -> None:
        """Note that what is waited for was aborted. For a thread."""
        self._ended = True

    def gate_words(self) -> Mapping[str, str]:
        """That this driver holds no stream, for the metadata; nothing where it does."""
        with self._gate.hold(self._stream.ptr):
            works = self._gate.works
        self._stream.synchronize()
        return {} if works else {"gate": "the driver has none: what the host takes to issue operations is in times"}

    def free_gate(self) -> None:
        """Give the gate's memory back."""
        self._gate.free()

    def _wait(self, marks: "deque[tuple[int, Any]] | None" = None) -> None:
        """Until the stream is idle; marks that it has reached are progress."""

        def look() -> None:
            while marks and marks[0][1].done:
                self._reports.completed(marks.popleft()[0])

        self._until_idle(look)
        look()
        if self._ended:
            raise WorkEndedError

    def _poll(self, look: Callable[[], object]) -> None:
        while not self._stream.done:
            look()
