"""What a measurement needs to read traffic on the links of a node, and other users of its GPUs."""

from collections.abc import Collection
from typing import Protocol

from gpubench.model.facts.traffic import GpuUse, NodeReading, TaskFacts


class TrafficReader(Protocol):
    def read(self) -> NodeReading | None:
        """Read the node now. None at the end of a recording."""

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:
        """Read all processes again, these with their NCCL communicators. None in a recording without them."""

    def close(self) -> None: ...


class GpuUsers(Protocol):
    """Detects processes outside of this job that use its GPUs."""

    def read(self, gpu: int) -> GpuUse:
        """Return the use of the GPU at this position, while this job is idle."""


class NoUsers:
    """For machines on which other users cannot be detected."""

    def read(self, gpu: int) -> GpuUse:  # noqa: ARG002 - the same for every GPU
        return GpuUse()
