"""The use that others make of GPUs."""

from typing import Protocol

from gpubench.model.facts.traffic import GpuUse


class GpuUsers(Protocol):
    """The use that processes of nobody in this job make of GPUs."""

    def read(self, gpu: int) -> GpuUse:
        """The use of the GPU at that position, while this job is idle."""


class NoUsers:
    """Knows of no use."""

    def read(self, gpu: int) -> GpuUse:  # noqa: ARG002 - it is asked for any
        """Nothing."""
        return GpuUse()
