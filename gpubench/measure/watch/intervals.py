"""From readings to intervals: each node's own part, with a closer look where it is needed, and that of all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpubench.measure.watch.course import Course, Observed, needs_closer_look, observe
from gpubench.measure.watch.selection import WatchedJobs
from gpubench.measure.watch.signals import Joined
from gpubench.model.facts.traffic import NodeReading, TaskFacts
from gpubench.model.facts.traffic_rates import NodeRates, rates
from gpubench.ports.traffic import TrafficReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """All nodes over one interval, which ended `seconds` after the watch began: their rates and their jobs."""

    seconds: float
    nodes: tuple[tuple[NodeRates, tuple[Observed, ...]], ...]


class NodeWatch:
    """One node's part: reads it, and looks closely at processes whose traffic asks for it."""

    def __init__(self, reader: TrafficReader, joined: Joined, selection: WatchedJobs) -> None:
        self._reader, self._joined, self._selection = reader, joined, selection
        self._before: NodeReading | None = None

    def read(self) -> NodeReading | None:
        """The node now; None where there is no more."""
        reading = self._reader.read()
        if reading is None:
            return None
        tasks = self._looked_at_closely(reading)
        if tasks is not None:
            reading = replace(reading, tasks=tasks)
        if reading.driver_silent is None:
            self._before = reading
        return self._selection.of(reading)

    def _looked_at_closely(self, reading: NodeReading) -> tuple[TaskFacts, ...] | None:
        """The processes with what NCCL has in them, where that has to be known; None where nothing was read anew."""
        if self._before is None or reading.driver_silent is not None:
            return None
        if all(task.communicators for task in reading.tasks):
            return None
        pids = needs_closer_look(observe(rates(self._before, self._selection.of(reading)), self._joined))
        return self._reader.look_closely(pids) if pids else None

    def close(self) -> None:
        """End what reads."""
        self._reader.close()


class Intervals:
    """Rates of all nodes between their readings, counted in the course. `keep` is handed every reading."""

    def __init__(self, course: Course, keep: Callable[[NodeReading], None] = lambda _: None) -> None:
        self.course = course
        self._keep = keep
        self._before: dict[str, NodeReading] = {}
        self._began: dict[str, float] = {}

    def add(self, readings: Sequence[NodeReading]) -> Interval | None:
        """The interval that these readings end; None for the first ones."""
        nodes = []
        now = 0.0
        for reading in readings:
            self._keep(reading)
            began = self._began.setdefault(reading.host, reading.seconds)
            before = self._before.get(reading.host)
            if before is not None:
                between = rates(before, reading)
                now = max(now, reading.seconds - began)
                observed = () if reading.driver_silent is not None else self.course.observe(between)
                nodes.append((between, observed))
            if reading.driver_silent is None:
                self._before[reading.host] = reading
            else:
                if before is None:
                    self.course.silent(reading.host, reading.driver_silent)
                self._before.setdefault(reading.host, reading)
        for between, observed in nodes:
            self.course.add(between, observed, now)
        return Interval(seconds=now, nodes=tuple(nodes)) if nodes else None
