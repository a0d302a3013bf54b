"""Managed memory of the GPUs of one process: where its pages are, where they shall be, and how long that takes."""

from collections.abc import Sequence
from typing import Protocol

from gpubench.model.terms.operation import HostMemory, ManagedSupport, Place
from gpubench.ports.copies import CopyStream
from gpubench.ports.memory import Memory

HOST = HostMemory.PAGEABLE
"""The host as a place of managed pages: they are ordinary memory there, whatever copies them."""


class ManagedMemory(Protocol):
    """One managed allocation, and the pages in it. GPUs are named by their position, the host is `HOST`."""

    def support(self) -> Sequence[ManagedSupport]:
        """What CUDA says of every GPU, in their order."""

    def allocate(self, size_bytes: int) -> Memory:
        """Managed memory, kept until close. Raises CouldNotMeasureError above `MOST_SHARE` of free memory."""

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
