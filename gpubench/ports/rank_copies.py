"""Copies between the GPUs of several ranks."""

from typing import Protocol

from gpubench.model.terms.copies import Direction
from gpubench.ports.memory import Memory


class RankCopies(Protocol):
    """Timed copies between the GPU of this rank and those of others."""

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation on this rank's GPU, kept until `close`.

        Raises CouldNotMeasureError where there is not so much left.
        """

    def export(self, memory: Memory) -> bytes:
        """The handle by which another rank of this node can copy from and to a memory that `allocate` returned.

        Raises CouldNotMeasureError where CUDA refuses.
        """

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        """Seconds of so many copies by this rank's GPU: it writes `own` to the other rank's memory, or reads that.

        Raises CouldNotMeasureError where the memory cannot be opened here, or a copy fails.
        """

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        """Seconds in which `own` was sent to a rank of any node so often, or received; the peer does the opposite.

        Raises CouldNotMeasureError where it fails on this side.
        """

    def release(self) -> None:
        """Close other ranks' memory; every rank has to before any of them calls `close`."""

    def close(self) -> None:
        """Give all memory back."""
