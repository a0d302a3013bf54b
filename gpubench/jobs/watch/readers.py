"""Where the readings of a watch come from: this node, simulated nodes, or a recording."""

import os
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.hardware import recorded
from gpubench.hardware.simulated.traffic import SimulatedTraffic
from gpubench.hardware.traffic.here import NodeTraffic
from gpubench.jobs.metadata import recorded_settings
from gpubench.jobs.simulation import Simulation
from gpubench.jobs.watch.plan import NAME, SAMPLES, WatchPlan
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.facts.traffic import NodeReading, TaskFacts
from gpubench.readers.documents.json_lines import read_json_line


def reader_here(plan: WatchPlan, host: str) -> NodeTraffic:
    """Readings of this node. Its driver has --timeout for the first answer, then an interval."""
    deadline = min(plan.timeout_s, max(plan.interval_s, 1.0))
    return NodeTraffic(host, os.environ, recorded_settings, plan.timeout_s, deadline, plan.gpus)


def simulated_readers(
    simulation: Simulation, nodes: Sequence[Snapshot], clock: Callable[[], float]
) -> list[SimulatedTraffic]:
    """One a node of the simulated machine."""
    return [
        SimulatedTraffic(
            node,
            simulation.machine.profile,
            [fault for fault in simulation.faults if fault.node_number == number],
            simulation.seed,
            clock,
            several=len(nodes) > 1,
        )
        for number, node in enumerate(nodes)
    ]


class RecordedTraffic:
    """The readings that --record kept, of one host; `elapsed` is the time of the last that was read since the first."""

    def __init__(self, readings: Sequence[NodeReading]) -> None:
        self._readings = iter(readings)
        self._began = readings[0].seconds
        self.elapsed = 0.0
        between = sorted(after.seconds - before.seconds for before, after in pairwise(readings))
        self.interval_s = between[len(between) // 2] if between else 0.0

    def read(self) -> NodeReading | None:
        """The next one; None where there are no more."""
        reading = next(self._readings, None)
        if reading is not None:
            self.elapsed = reading.seconds - self._began
        return reading

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:  # noqa: ARG002
        """What was looked at then is in the recording."""
        return None

    def close(self) -> None:
        """Nothing is open."""


def recorded_readers(directory: Path) -> list[RecordedTraffic]:
    """One a host of a recording. Raises UsageError where it holds no readings, or damaged ones."""
    by_host: dict[str, list[NodeReading]] = {}
    for line, where in recorded.read_samples(directory, SAMPLES, NAME):
        reading = read_json_line(NodeReading, line, where)
        by_host.setdefault(reading.host, []).append(reading)
    if not by_host:
        raise UsageError(
            f"--replay {directory} holds no readings",
            expected=f"lines in {SAMPLES}, one a node and interval",
            reason="the watch ended before its first interval did",
            next_step=f"gpubench watch --for 10s --record {directory}-again",
        )
    return [RecordedTraffic(each) for each in by_host.values()]
