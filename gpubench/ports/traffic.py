"""Readings of what the links of a node carry, one after the other, and who uses its GPUs."""

from collections.abc import Collection
from typing import Protocol

from gpubench.model.facts.traffic import GpuUse, NodeReading, TaskFacts


class TrafficReader(Protocol):
    """Reads one node at one moment after the other."""

    def read(self) -> NodeReading | None:
        """The node now; None where a recording has no more."""

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:
        """All processes anew, with what NCCL has in these; None where nothing was looked at again."""

    def close(self) -> None:
        """End what reads."""


class GpuUsers(Protocol):
    """The use that processes of nobody in this job make of GPUs."""

    def read(self, gpu: int) -> GpuUse:
        """The use of the GPU at that position, while this job is idle."""


class NoUsers:
    """Knows of no use."""

    def read(self, gpu: int) -> GpuUse:  # noqa: ARG002 - it is asked for any
        """Nothing."""
        return GpuUse()
