"""Readings of this node: its GPUs by a child, its NICs and processes by this process."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from gpubench.hardware.traffic.gpus import GpuChild
from gpubench.hardware.traffic.nics import NicCounters
from gpubench.hardware.traffic.tasks import Settings, Tasks
from gpubench.model.facts.traffic import NodeReading, TaskFacts


class NodeTraffic:
    """Reads a node at one moment after the other; `indices` are the GPUs to watch, None for all.

    Its driver has `start_seconds` for the first answer, and for each of the others `deadline_seconds`.
    """

    def __init__(
        self,
        host: str,
        environment: Mapping[str, str],
        settings: Settings,
        start_seconds: float,
        deadline_seconds: float,
        indices: Sequence[int] | None = None,
        *,
        root: Path = Path("/"),
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._clock = host, clock
        self._gpus = GpuChild(environment, start_seconds, deadline_seconds, indices, command)
        self._nics = NicCounters(root)
        self._tasks = Tasks(host, settings, root)

    def read(self) -> NodeReading:
        """The node now."""
        gpus, silent = self._gpus.read()
        pids = [process.pid for gpu in gpus for process in gpu.processes or ()]
        # The driver may have taken a while, and NICs count on: their moment is after it, as is the clock's.
        nics, seconds = self._nics.read(), self._clock()
        return NodeReading(
            host=self._host,
            seconds=seconds,
            gpus=gpus,
            nics=nics,
            tasks=self._tasks.read(pids) if silent is None else self._tasks.tasks(),
            driver_silent=silent,
        )

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:
        """All processes anew, with what NCCL has in these; None where nothing was looked at again."""
        return self._tasks.tasks() if self._tasks.look_closely(pids, self._clock()) else None

    def close(self) -> None:
        """End the child."""
        self._gpus.close()
