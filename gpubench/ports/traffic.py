"""What a measurement needs to read the traffic on a node's links and the other users of its GPUs."""

from collections.abc import Collection
from typing import Protocol

from gpubench.model.facts.traffic import GpuUse, NodeReading, TaskFacts


class TrafficReader(Protocol):
    def read(self) -> NodeReading | None:
        """Read the node's current state. None at the end of a recording."""

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:
        """Read the NCCL communicators of these processes, and return all processes. None if nothing new was read."""

    def close(self) -> None: ...


class GpuUsers(Protocol):
    """Detect processes outside this job that use its GPUs."""

    def read(self, gpu: int) -> GpuUse:
        """Return how other processes use GPU number `gpu`. Call this while the job is idle."""


class NoUsers:
    """`GpuUsers` for machines on which other users cannot be detected."""

    def read(self, gpu: int) -> GpuUse:  # noqa: ARG002 - the same for every GPU
        return GpuUse()
