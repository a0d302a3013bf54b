"""What a measurement needs to copy between GPUs, to use managed memory, and to count bytes on links."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from gpubench.model.terms.operation import CopyGpu, Direction, Engine, HostMemory, ManagedSupport, Place
from gpubench.ports.backend import Memory, Region


class CopyStream(Struct, frozen=True):
    """Consecutive copies from one region to another, on a stream of the GPU at position `by`."""

    by: int
    engine: Engine
    source: Region
    destination: Region
    size_bytes: int


class Copies(Protocol):
    """Timed copies between the GPUs of one process. GPUs are named by their position."""

    @property
    def gpus(self) -> Sequence[CopyGpu]: ...

    def can_reach(self, source: int, destination: int) -> bool:
        """True if CUDA allows peer access between these GPUs."""

    def enable(self, source: int, destination: int) -> None:
        """Enable peer access. Raise CouldNotMeasureError if CUDA refuses."""

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        """Allocate memory on a GPU or the host, kept until `close`. Raise CouldNotMeasureError."""

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """Return the seconds from a common start until every stream made its copies. Raise CouldNotMeasureError."""

    def close(self) -> None:
        """Free all memory and disable peer access."""


class RankCopies(Protocol):
    """Timed copies between the GPU of this rank and the GPUs of others. All methods may raise CouldNotMeasureError."""

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate memory on this rank's GPU, kept until `close`."""

    def export(self, memory: Memory) -> bytes:
        """Return a handle by which other ranks of this node can copy this memory."""

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        """Return the seconds of copies by this GPU to or from another rank's memory."""

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        """Return the seconds in which `own` was sent to the peer, or received from it."""

    def release(self) -> None:
        """Close other ranks' memory. Every rank has to call it before any rank calls `close`."""

    def close(self) -> None: ...


HOST = HostMemory.PAGEABLE  # The host as a place of managed pages, which are ordinary host memory there


class ManagedMemory(Protocol):
    """Managed memory and the place of its pages: a GPU's position, or `HOST`. Methods raise CouldNotMeasureError."""

    def support(self) -> Sequence[ManagedSupport]:
        """Return CUDA's attributes of every GPU, in their order."""

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate managed memory, kept until `close`. At most `MANAGED_MEMORY_SHARE` of free memory is available."""

    def on(self, memory: Memory, place: Place) -> Memory:
        """Return a view of the memory that is filled and checked by a GPU's kernels, or by the host."""

    def prefetch(self, memory: Memory, place: Place, by: int) -> float:
        """Return the seconds in which the driver moved all pages, on a stream of the GPU `by`."""

    def advise(self, memory: Memory, place: Place, accessor: int, *, stays: bool) -> None:
        """Advise the driver to keep pages at a place and map them for a GPU, or remove this advice."""

    def seconds(self, stream: CopyStream) -> float:
        """Return the seconds of one copy by a kernel, from or to managed memory."""


class LinkBytes(Struct, frozen=True):
    """Bytes on a GPU's NVLinks together, and on its PCIe link (wraps at 2^32). None if not counted."""

    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None


class LinkCounters(Protocol):
    """Byte counters of the links of GPUs."""

    def read(self, gpu: int) -> LinkBytes: ...
