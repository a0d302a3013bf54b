"""Readings of what the links of a node carry, one after the other."""

from collections.abc import Collection
from typing import Protocol

from gpubench.model.facts.traffic import NodeReading, TaskFacts


class TrafficReader(Protocol):
    """Reads one node at one moment after the other."""

    def read(self) -> NodeReading | None:
        """The node now; None where a recording has no more."""

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:
        """All processes anew, with what NCCL has in these; None where nothing was looked at again."""

    def close(self) -> None:
        """End what reads."""
