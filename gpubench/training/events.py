"""Simulates a training step on one GPU as streams of tasks that wait for each other, with contention.

A stream runs its tasks one at a time, in the order of issue. A task starts when its stream is free and all tasks that
it depends on have ended, like CUDA streams with events.

A communication that starts during computation first waits for multiprocessors. While both run, computation progresses
at 1/κ_c of its full speed, and communication at 1/κ_m.

At any time, a GPU either computes at full speed, computes more slowly, or waits for communication. This waiting time is
called *exposed* communication, and is reported by source. A pipeline adds idle time, called *bubbles*.

The κ_c of a measured row is the slowdown of computation while a collective is in flight. This includes the time for
which the collective waits for multiprocessors. In the simulation, only a running collective slows computation. Its
factor is therefore 1 + (κ_c - 1)·κ_m/(1 + sharing), which costs the same time per operation.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

COMPUTE = "compute"


class Contention(Struct, frozen=True):
    """How computation and communication slow each other.

    - `compute` and `communication` are slowdown factors while both run.
    - `wait_seconds` is how long a communication waited for multiprocessors, while kernels of `kernel_seconds` ran. It
      waits until a running kernel ends, so shorter kernels delay it less. If `kernel_seconds` is 0, the wait is always
      the same.
    - `alone_seconds` is the time of the measured communication without computation, or 0 if unknown.
    """

    compute: float = 1.0
    communication: float = 1.0
    wait_seconds: float = 0.0
    kernel_seconds: float = 0.0
    alone_seconds: float = 0.0

    def lasting(self, seconds: float) -> "Contention":
        """Return the contention for a communication that takes `seconds` without computation.

        A communication that takes longer than the measured one slows computation less, so that both cost computation
        the same total time.
        """
        if self.alone_seconds <= 0 or seconds <= self.alone_seconds:
            return self
        return replace(self, compute=1 + (self.compute - 1) * self.alone_seconds / seconds)


NO_CONTENTION = Contention()


class StreamTask(Struct, frozen=True, kw_only=True):
    """Work on a stream that takes `seconds`. It starts when the tasks whose numbers are in `after` have ended.

    - `stream` is `compute` for computation, and any other name for communication.
    - `source` is the purpose of the task in the report.
    - `kernel_seconds` is the time of each kernel in a computation.
    """

    seconds: float
    stream: str = COMPUTE
    after: tuple[int, ...] = ()
    source: str = ""
    collective: str = ""
    size_bytes: float = 0.0
    contention: Contention = NO_CONTENTION
    kernel_seconds: float = 0.0

    @property
    def computes(self) -> bool:
        """True if the task is computation, and false if it is communication."""
        return self.stream == COMPUTE


class GpuTimes(Struct, frozen=True, kw_only=True):
    """The time of a step on one GPU in seconds, divided by cause.

    - `compute` is computation at full speed.
    - `slowed` is the time that concurrent communication adds to computation.
    - `exposed` is the time of waiting for communication, by source.
    - `bubble` is the time of waiting for other pipeline stages.
    """

    compute: float
    slowed: float
    exposed: Mapping[str, float]
    bubble: float

    @property
    def total(self) -> float:
        """The total time of the step in seconds."""
        return self.compute + self.slowed + sum(self.exposed.values()) + self.bubble


class _Running(Struct):
    """A running task: the seconds of work that remain, and the seconds that it still waits for multiprocessors
    before that.
    """

    task: int
    work: float
    wait: float = 0.0


def simulate(tasks: Sequence[StreamTask]) -> GpuTimes:
    """Run all tasks and return the times of the GPU. Raises ValueError if tasks depend on each other in a cycle."""
    return _Simulation(tasks).run()


class _Simulation:
    def __init__(self, tasks: Sequence[StreamTask]) -> None:
        self._tasks = tasks
        self._queues: dict[str, list[int]] = {}
        for number, task in enumerate(tasks):
            self._queues.setdefault(task.stream, []).append(number)
        for queue in self._queues.values():
            queue.reverse()
        self._missing = [len(set(task.after)) for task in tasks]
        self._followers: dict[int, list[int]] = defaultdict(list)
        for number, task in enumerate(tasks):
            for each in set(task.after):
                self._followers[each].append(number)
        self._ready = list(self._queues)
        self._running: dict[str, _Running] = {}
        self._done: set[int] = set()
        self._compute = self._slowed = 0.0
        self._exposed: dict[str, float] = defaultdict(float)

    def run(self) -> GpuTimes:
        self._start()
        while self._running:
            self._advance()
            self._start()
        if len(self._done) < len(self._tasks):
            raise ValueError("tasks that wait for each other")
        return GpuTimes(compute=self._compute, slowed=self._slowed, exposed=dict(self._exposed), bubble=0.0)

    def _start(self) -> None:
        """Start all tasks that can start. Tasks without duration end at once, so that further tasks may start.

        Tasks wait for multiprocessors only if computation runs, so `wait` is set after all tasks were started.
        """
        begun: list[_Running] = []
        while self._ready:
            stream = self._ready.pop()
            queue = self._queues[stream]
            if not queue or stream in self._running or self._missing[queue[-1]]:
                continue
            number = queue.pop()
            task = self._tasks[number]
            if task.seconds <= 0:
                self._end(number)
                continue
            self._running[stream] = _Running(number, task.seconds)
            begun.append(self._running[stream])
        for each in begun:
            each.wait = self._wait(self._tasks[each.task])

    def _wait(self, task: StreamTask) -> float:
        met = self._running.get(COMPUTE)
        if task.computes or met is None:
            return 0.0
        contention, kernel = task.contention, self._tasks[met.task].kernel_seconds
        if contention.kernel_seconds <= 0 or kernel <= 0:
            return contention.wait_seconds
        begun = (self._tasks[met.task].seconds - met.work) % kernel
        return contention.wait_seconds * (kernel - begun) / contention.kernel_seconds

    def _end(self, number: int) -> None:
        self._done.add(number)
        self._ready.append(self._tasks[number].stream)
        for each in self._followers[number]:
            self._missing[each] -= 1
            if not self._missing[each]:
                self._ready.append(self._tasks[each].stream)

    def _advance(self) -> None:
        computing = self._running.get(COMPUTE)
        if len(self._running) == 1:
            self._finish_alone()
            return
        rates = {stream: self._rate(each, is_beside=computing is not None) for stream, each in self._running.items()}
        waiting = {stream for stream, each in self._running.items() if each.wait > 0 and computing is not None}
        step = min(
            each.wait if stream in waiting else each.work / rates[stream] for stream, each in self._running.items()
        )
        if computing is not None:
            self._compute += step * rates[COMPUTE]
            self._slowed += step * (1 - rates[COMPUTE])
        else:
            self._exposed[self._source()] += step
        for stream, each in list(self._running.items()):
            if stream in waiting:
                each.wait = max(0.0, each.wait - step)
                continue
            each.work -= step * rates[stream]
            if each.work <= 1e-15 + 1e-12 * self._tasks[each.task].seconds:
                del self._running[stream]
                self._end(each.task)

    def _finish_alone(self) -> None:
        """Advance to the end of the only running task. No other task can start before."""
        ((stream, each),) = self._running.items()
        if stream == COMPUTE:
            self._compute += each.work
        else:
            self._exposed[self._source()] += each.work
        del self._running[stream]
        self._end(each.task)

    def _rate(self, each: _Running, *, is_beside: bool) -> float:
        """Return the current speed of a task as a fraction of its full speed. `is_beside` is true if computation
        runs.
        """
        task = self._tasks[each.task]
        if not task.computes:
            return 1.0 / task.contention.communication if is_beside else 1.0
        others = (self._tasks[other.task] for other in self._running.values() if other.wait <= 0)
        return 1.0 / max((other.contention.compute for other in others if not other.computes), default=1.0)

    def _source(self) -> str:
        queue = self._queues.get(COMPUTE)
        seen: set[int] = set()
        waiting = [queue[-1]] if queue else []
        while waiting:
            current = waiting.pop()
            if current in seen or current in self._done:
                continue
            seen.add(current)
            task = self._tasks[current]
            running = self._running.get(task.stream)
            if running is not None and running.task == current:
                return task.source
            waiting += task.after
            if running is not None:
                waiting.append(running.task)
            elif self._queues[task.stream][-1] != current:
                waiting.append(self._queues[task.stream][-1])
        return self._tasks[next(iter(self._running.values())).task].source


class MeasuredContention(Struct, frozen=True, kw_only=True):
    """One measurement of a collective while a partner, such as a GEMM, computes.

    - `compute_slowdown` is κ_c, and `communication_slowdown` is κ_m.
    - `sharing_slowdown` is the part of κ_m that the collective loses while it runs. The rest is waiting. If it is None,
      all of κ_m is waiting.
    - `kernel_seconds` is the time of one operation of the partner.
    - `ctas` is the limit on NCCL's thread blocks (CTAs), or None for NCCL's own choice.
    """

    collective: str
    size_bytes: int
    partner: str
    compute_slowdown: float
    communication_slowdown: float
    alone_seconds: float
    sharing_slowdown: float | None = None
    kernel_seconds: float = 0.0
    ctas: int | None = None

    @property
    def contention(self) -> Contention:
        """The measurement as contention for the simulation, which separates waiting from running."""
        sharing = min(max(0.0, self.sharing_slowdown or 0.0), max(0.0, self.communication_slowdown - 1))
        running = 1 + sharing
        return Contention(
            compute=1 + max(0.0, self.compute_slowdown - 1) * max(1.0, self.communication_slowdown) / running,
            communication=running,
            wait_seconds=max(0.0, self.communication_slowdown - running) * self.alone_seconds,
            kernel_seconds=self.kernel_seconds,
            alone_seconds=self.alone_seconds,
        )


USUAL_CONTENTION = Contention(compute=1.45, communication=1.1)
"""Contention without a measurement: a collective takes 10 % longer, and computation loses 0.34 of the collective's
time alone. On two H200s, all-reduces of 1 GiB took 1.10 to 1.20 times as long during GEMMs. The GEMMs lost 0.23
to 0.41 of the collective's time.
"""


class ContentionTable(Struct, frozen=True, dict=True):
    """Measured contention by collective and size. Without measurements, `assumed` applies to all collectives."""

    measured: Sequence[MeasuredContention] = ()
    assumed: Contention = NO_CONTENTION

    @cached_property
    def _found(self) -> dict[tuple[str, float], Contention]:
        """A cache, because a step uses few different sizes but looks each size up once per layer."""
        return {}

    def of(self, collective: str, size_bytes: float) -> Contention:
        """Return the contention of a collective at a size. Values are interpolated over the logarithm of the size.

        Beyond the measured sizes, the nearest value is used. If this collective was not measured, use the others. With
        several partners, use their average.
        """
        if not self.measured or size_bytes <= 0:
            return self.assumed
        asked = collective, size_bytes
        if asked not in self._found:
            same = [each for each in self.measured if each.collective == collective] or self.measured
            partners = [
                [each for each in same if each.partner == name] for name in {each.partner: None for each in same}
            ]
            self._found[asked] = _weighted([(_interpolate(size_bytes, own), 1.0) for own in partners])
        return self._found[asked]


def _interpolate(size_bytes: float, measured: Sequence[MeasuredContention]) -> Contention:
    by_size: dict[int, list[Contention]] = {}
    for each in measured:
        by_size.setdefault(each.size_bytes, []).append(each.contention)
    points = [(size, _weighted([(each, 1.0) for each in found])) for size, found in sorted(by_size.items())]
    after = bisect_left([size for size, _ in points], size_bytes)
    if after == 0:
        return points[0][1]
    if after == len(points):
        largest, last = points[-1]
        return replace(last, alone_seconds=last.alone_seconds * size_bytes / largest)
    (low, first), (high, second) = points[after - 1], points[after]
    part = math.log(size_bytes / low) / math.log(high / low)
    return _weighted([(first, 1 - part), (second, part)])


def _weighted(parts: Sequence[tuple[Contention, float]]) -> Contention:
    whole = sum(weight for _, weight in parts)
    return Contention(
        *(sum(getattr(each, name) * weight for each, weight in parts) / whole for name in Contention.__struct_fields__)
    )
