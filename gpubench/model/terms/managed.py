"""Managed (unified) memory: what a GPU can do with it, and the ways in which its bytes get to a GPU or to the host."""

from dataclasses import dataclass
from enum import StrEnum

MOST_SHARE = 0.25
"""Of what is free on any GPU and on the host: more managed memory than that is never taken, for memory that does not
fit is evicted page by page, which can hang a GPU."""


class ManagedWay(StrEnum):
    """How bytes get from one end to the other; the word stands as `engine` in rows."""

    PINNED_KERNEL = "sm"
    """A kernel reads or writes pinned host memory: what access in place compares with."""

    PREFETCH = "prefetch"
    """The driver migrates the pages when asked to (cuMemPrefetchAsync)."""

    RESIDENT = "resident"
    """A kernel reads pages that were prefetched to its GPU: as slow as by faults, where the prefetch did nothing."""

    FAULTS = "faults"
    """The pages migrate while a kernel reads them, fault by fault."""

    IN_PLACE = "in place"
    """A kernel reads or writes pages that shall stay where they are (preferred location, accessed by)."""

    @property
    def is_migration(self) -> bool:
        """True where every pass needs the pages back first: they move in it, or, of RESIDENT, just before it."""
        return self in (ManagedWay.PREFETCH, ManagedWay.RESIDENT, ManagedWay.FAULTS)

    @property
    def is_managed(self) -> bool:
        """True where managed memory takes part."""
        return self is not ManagedWay.PINNED_KERNEL


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedSupport:
    """What CUDA says of a GPU's managed memory. None is unknown: the driver does not know the attribute.

    `concurrent` is concurrentManagedAccess, without which there are neither prefetch, nor advice, nor page faults;
    `pageable` is pageableMemoryAccess: kernels read memory of malloc (HMM, or hardware that translates addresses,
    which `host_page_tables` says).
    """

    device: str
    managed: bool | None = None
    concurrent: bool | None = None
    pageable: bool | None = None
    host_page_tables: bool | None = None

    @property
    def lacks(self) -> str:
        """The reason why nothing can be asked of its managed memory; empty where it can."""
        if self.managed is False:
            return f"{self.device} has no managed memory (managedMemory 0)"
        if self.concurrent is False:
            return f"{self.device} takes neither prefetch nor advice (concurrentManagedAccess 0)"
        return ""
