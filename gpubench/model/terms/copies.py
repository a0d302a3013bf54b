"""Copies between GPUs, and between GPUs and host memory: from where, to where, by what, and in which patterns."""

from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    """The engine that moves the bytes: a copy engine, or a kernel on the SMs."""

    CE = "ce"
    SM = "sm"


class Direction(StrEnum):
    """The direction of a copy: the source writes, the destination reads, or both GPUs write to each other at once."""

    WRITE = "write"
    READ = "read"
    BOTH = "both"


class HostMemory(StrEnum):
    """Host memory that the driver may copy from directly, and that which it first copies into some of its own."""

    PINNED = "pinned"
    PAGEABLE = "pageable"

    @property
    def full_name(self) -> str:
        """Its name in lists of copies; the `note` of a row begins with it."""
        return f"{self} host memory"

    @classmethod
    def of_note(cls, note: str | None) -> "HostMemory | None":
        """The kind of host memory that the row with this `note` is about; None where it is about none."""
        return next((memory for memory in cls if (note or "").startswith(memory.full_name)), None)


Place = int | HostMemory
"""A GPU by its position among those that are measured, or host memory."""


@dataclass(frozen=True, slots=True)
class CopyGpu:
    """A GPU that copies. `device` is its name in matrices (the driver's index), `index` is CUDA's."""

    device: str
    index: int
    bus_id: str
    uuid: str
    name: str


class CopyPattern(StrEnum):
    """Copies of several pairs at once."""

    RING = "ring"
    ALL_TO_ONE = "all_to_one"
    ONE_TO_ALL = "one_to_all"
    BISECTION = "bisection"
    ALL_TO_ALL = "all_to_all"


def pairs_of(pattern: CopyPattern, gpus: int, root: int = 0) -> tuple[tuple[int, int], ...]:
    """The ordered pairs that copy at once: to the next neighbour; to or from `root`; each half to the other; all."""
    everybody = range(gpus)
    if pattern is CopyPattern.RING:
        return tuple((gpu, (gpu + 1) % gpus) for gpu in everybody) if gpus > 1 else ()
    if pattern is CopyPattern.ALL_TO_ONE:
        return tuple((gpu, root) for gpu in everybody if gpu != root)
    if pattern is CopyPattern.ONE_TO_ALL:
        return tuple((root, gpu) for gpu in everybody if gpu != root)
    if pattern is CopyPattern.BISECTION:
        half = gpus // 2
        across = [(gpu, gpu + half) for gpu in range(half)]
        return tuple(across + [(second, first) for first, second in across])
    return tuple((source, destination) for source in everybody for destination in everybody if source != destination)
