"""Copies between GPUs of one process or of several ranks, managed memory, and the counters of links."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from gpubench.model.terms.operation import CopyGpu, Direction, Engine, HostMemory, ManagedSupport, Place
from gpubench.ports.backend import Memory, Region


class CopyStream(Struct, frozen=True):
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


HOST = HostMemory.PAGEABLE  # The host as a place of managed pages: they are ordinary memory there, whatever copies them


class ManagedMemory(Protocol):
    """One managed allocation, and the pages in it. GPUs are named by their position, the host is `HOST`."""

    def support(self) -> Sequence[ManagedSupport]:
        """What CUDA says of every GPU, in their order."""

    def allocate(self, size_bytes: int) -> Memory:
        """Managed memory, kept until close. Raises CouldNotMeasureError above `MANAGED_MEMORY_SHARE` of free memory."""

    def on(self, memory: Memory, place: Place) -> Memory:
        """The same memory, filled and checked by a place itself: a GPU's kernels, or the host."""

    def prefetch(self, memory: Memory, place: Place, by: int) -> float:
        """Seconds in which the driver moved all pages, on a stream of the GPU `by`. Raises CouldNotMeasureError."""

    def advise(self, memory: Memory, place: Place, accessed_by: int, *, stays: bool) -> None:
        """Advise that pages stay at a place, mapped for a GPU, or take that back. Raises CouldNotMeasureError."""

    def seconds(self, stream: CopyStream) -> float:
        """Seconds in which a kernel copied once, from managed memory or to it.

        Raises CouldNotMeasureError where CUDA fails.
        """


class LinkBytes(Struct, frozen=True):
    """Bytes that a GPU's NVLinks together and its PCIe link (wraps at 2^32) carried; None where not counted."""

    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None


class LinkCounters(Protocol):
    """Byte counters of the links of GPUs."""

    def read(self, gpu: int) -> LinkBytes:
        """The counters of the GPU at that position."""
