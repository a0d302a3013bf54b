"""What a measurement needs for copies between GPUs, for managed memory, and for counting bytes on links."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from gpubench.model.terms.operation import CopyGpu, Direction, Engine, HostMemory, ManagedSupport, Place
from gpubench.ports.backend import Memory, Region


class CopyStream(Struct, frozen=True):
    """Copies from one region to another, one after another, on a stream of GPU `by`."""

    by: int
    engine: Engine
    source: Region
    destination: Region
    size_bytes: int


class Copies(Protocol):
    """Timed copies between GPUs of one process. GPUs are identified by their position in `gpus`."""

    @property
    def gpus(self) -> Sequence[CopyGpu]: ...

    def can_reach(self, source: int, destination: int) -> bool:
        """True if CUDA reports that peer access between these GPUs is possible."""

    def enable(self, source: int, destination: int) -> None:
        """Enable peer access. Raise CouldNotMeasureError if CUDA refuses it."""

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        """Allocate memory on a GPU or the host, which is freed by `close`. Raise CouldNotMeasureError if that fails."""

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """Return the time in seconds from a common start until all streams have completed `repeats` copies.

        Raise CouldNotMeasureError if a copy fails.
        """

    def close(self) -> None:
        """Free all memory and disable peer access."""


class RankCopies(Protocol):
    """Timed copies between this rank's GPU and GPUs of other ranks. All methods may raise CouldNotMeasureError."""

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate memory on this rank's GPU, which is freed by `close`."""

    def export(self, memory: Memory) -> bytes:
        """Return a handle with which other ranks on this node can access this memory."""

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        """Copy between this GPU and another rank's memory, and return the time in seconds. `other` is a handle from
        `export`.
        """

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        """Send `own` to the peer, or receive it from the peer, and return the time in seconds."""

    def release(self) -> None:
        """Close the handles of other ranks' memory. Every rank must call this before any rank calls `close`."""

    def close(self) -> None: ...


HOST = HostMemory.PAGEABLE  # Pages of managed memory that are on the host are ordinary, pageable host memory


class ManagedMemory(Protocol):
    """Managed memory, whose pages are on a GPU, identified by its position, or on `HOST`.

    All methods may raise CouldNotMeasureError.
    """

    def support(self) -> Sequence[ManagedSupport]:
        """Return CUDA's attributes for managed memory, one entry per GPU."""

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate managed memory, which is freed by `close`. The limit is `MANAGED_MEMORY_SHARE` of free memory."""

    def on(self, memory: Memory, place: Place) -> Memory:
        """Return a view of managed memory that is filled and verified by kernels on a GPU, or by the host."""

    def prefetch(self, memory: Memory, place: Place, by: int) -> float:
        """Prefetch all pages to `place` on a stream of GPU `by`, and return the time in seconds."""

    def advise(self, memory: Memory, place: Place, accessor: int, *, stays: bool) -> None:
        """Advise the driver to keep pages at `place` and map them on GPU `accessor`. Remove this advice if `stays`
        is false.
        """

    def seconds(self, stream: CopyStream) -> float:
        """Run one copy by a kernel from or to managed memory, and return the time in seconds."""


class LinkBytes(Struct, frozen=True):
    """Bytes counted on all NVLinks of a GPU and on its PCIe link. None if not counted. PCIe counters wrap at 2^32."""

    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None


class LinkCounters(Protocol):
    """Byte counters for the links of several GPUs."""

    def read(self, gpu: int) -> LinkBytes: ...
