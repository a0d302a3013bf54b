"""Collectives of a job as NCCL's Inspector recorded them: the time of each on every rank, and what follows by size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median

from gpubench.model.terms.operation import algbw_gb_s, all_but_own_factor, ring_allreduce_factor, whole_factor
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND
from gpubench.records import dataclass

INSPECTED: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "AllReduce": ("allreduce", ring_allreduce_factor),
    "AllGather": ("allgather", all_but_own_factor),
    "ReduceScatter": ("reducescatter", all_but_own_factor),
    "Broadcast": ("broadcast", whole_factor),
    "Reduce": ("reduce", whole_factor),
}
"""gpubench's name and factor by NCCL's name, of the collectives whose bandwidth the Inspector knows."""

_FACTORS = dict(INSPECTED.values())


@dataclass(frozen=True, slots=True)
class InspectedOperation:
    """One operation of a communicator: nccl-tests' size, and how long its kernel ran on each rank, in microseconds.

    A rank that comes late has the shortest time: the kernels of the others wait for it.
    """

    communicator: str
    collective: str
    size_bytes: int
    ranks: int
    nodes: int
    times: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class InspectedSize:
    """What all operations of a size took once every rank was there: the median of the shortest times."""

    collective: str
    size_bytes: int
    ranks: int
    nodes: int
    operations: int
    time_us: float

    @property
    def algbw_gb_s(self) -> float:
        """Size over time."""
        return algbw_gb_s(self.size_bytes, self.time_us / MICROSECONDS_PER_SECOND)

    @property
    def busbw_gb_s(self) -> float | None:
        """None of one rank."""
        return None if self.ranks == 1 else self.algbw_gb_s * _FACTORS[self.collective](self.ranks)


def by_size(operations: Iterable[InspectedOperation]) -> Iterator[InspectedSize]:
    """By collective, ranks, nodes and size."""
    found: dict[tuple[str, int, int, int], list[float]] = {}
    for each in operations:
        key = each.collective, each.ranks, each.nodes, each.size_bytes
        found.setdefault(key, []).append(min(each.times.values()))
    for (collective, ranks, nodes, size), times in sorted(found.items()):
        yield InspectedSize(collective, size, ranks, nodes, len(times), median(times))
