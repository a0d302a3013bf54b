"""Copies between GPUs, of one process or of several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpubench.model.terms.operation import CopyGpu, Direction, Engine, Place
from gpubench.ports.memory import Memory, Region


@dataclass(frozen=True, slots=True)
class CopyStream:
    """Copies from one region to another, one after another, on a stream of the GPU at position `by`."""

    by: int
    engine: Engine
    source: Region
    destination: Region
    size_bytes: int


class Copies(Protocol):
    """Timed copies between the GPUs of one process. GPUs are named by their position."""

    @property
    def gpus(self) -> Sequence[CopyGpu]:
        """The GPUs that this process sees."""

    def can_reach(self, source: int, destination: int) -> bool:
        """True where CUDA says that one GPU may address another's memory."""

    def enable(self, source: int, destination: int) -> None:
        """Let one GPU address another's memory from now on. Raises CouldNotMeasureError where CUDA refuses."""

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        """A plain allocation on a GPU or of host memory, kept until `close`. Raises CouldNotMeasureError."""

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """Wall time from a common start until every stream copied `repeats` times. Raises CouldNotMeasureError."""

    def close(self) -> None:
        """Give all memory back, and peer access."""


class RankCopies(Protocol):
    """Timed copies between the GPU of this rank and those of others."""

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation on this rank's GPU, kept until `close`. Raises CouldNotMeasureError."""

    def export(self, memory: Memory) -> bytes:
        """The handle by which another rank of this node can copy a memory. Raises CouldNotMeasureError."""

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        """Seconds of so many copies by this GPU, to or from the other rank. Raises CouldNotMeasureError."""

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        """Seconds in which `own` was sent so often, or received by the peer. Raises CouldNotMeasureError."""

    def release(self) -> None:
        """Close other ranks' memory; every rank has to before any of them calls `close`."""

    def close(self) -> None:
        """Give all memory back."""
