"""Managed memory on GPUs that are NumPy arrays: pages have a place, data really move, and times are made up."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpubench.backends.mpi.backends import NumpyMemory
from gpubench.errors import CouldNotMeasureError
from gpubench.model.terms.operation import ManagedSupport, Place
from gpubench.ports.backend import Memory
from gpubench.ports.copies import HOST, CopyStream
from tests.fakes.copies import DIRECT_GB_S, HOST_GB_S, FakeCopies

LOCAL_GB_S, PREFETCH_SHARE, FAULTS_SHARE, KERNEL_SHARE = 1000.0, 0.8, 0.2, 0.93


@dataclass
class Driver:
    """What the driver does instead of what it should do."""

    ignores_prefetch: bool = False
    moves_anyway: bool = False
    through_host: bool = False
    refuses: bool = False
    corrupts: bool = False
    full: bool = False
    lacking: dict[int, str] = field(default_factory=dict)


class FakeManaged:
    """`ports.copies.ManagedMemory` on fake copies with counters."""

    def __init__(self, copies: FakeCopies, driver: Driver | None = None) -> None:
        self.copies, self.driver = copies, driver or Driver()
        self.location: Place = HOST
        self.stays = False
        self.allocated: list[int] = []
        self.advice: list[tuple[Place, int, bool]] = []

    def support(self) -> Sequence[ManagedSupport]:
        return [
            ManagedSupport(
                device=gpu.device,
                managed=self.driver.lacking.get(position) != "managed",
                concurrent=position not in self.driver.lacking,
                pageable=False,
            )
            for position, gpu in enumerate(self.copies.gpus)
        ]

    def allocate(self, size_bytes: int) -> Memory:
        assert not self.copies.taken, "plain memory was taken before anybody looked whether managed memory fits"
        if self.driver.full:
            raise CouldNotMeasureError("more than a quarter")
        self.allocated.append(size_bytes)
        return NumpyMemory(size_bytes)

    def on(self, memory: Memory, place: Place) -> Memory:
        assert place == self.location or self.driver.ignores_prefetch, "looked at where the pages are not"
        return memory

    def prefetch(self, memory: Memory, place: Place, by: int) -> float:
        assert isinstance(by, int)
        if self.driver.refuses:
            raise CouldNotMeasureError("cuMemPrefetchAsync answered 101")
        if self.driver.corrupts:
            memory.array(0, 1, "uint8")[:] += 1
        source, self.location = self.location, place
        if self.driver.ignores_prefetch and place is not HOST:
            self.location = source
        return self._moved(source, place, memory.size_bytes) / PREFETCH_SHARE

    def advise(self, memory: Memory, place: Place, accessor: int, *, stays: bool) -> None:
        assert memory.size_bytes
        self.stays = stays
        self.advice.append((place, accessor, stays))

    def seconds(self, stream: CopyStream) -> float:
        size = stream.size_bytes
        data = stream.source.memory.array(0, size, "uint8")
        stream.destination.memory.array(0, size, "uint8")[:] = data
        source, by = self.location, stream.by
        if source == by:
            return size / (LOCAL_GB_S * 1e9)
        lasted = self._moved(source, by, size)
        if self.stays and not self.driver.moves_anyway:
            return lasted / KERNEL_SHARE
        self.location = by
        return lasted / FAULTS_SHARE

    def _moved(self, source: Place, destination: Place, size: int) -> float:
        """Return the seconds of a copy between two places, and count its bytes."""
        ends = tuple(place if isinstance(place, int) else HOST for place in (source, destination))
        both = isinstance(source, int) and isinstance(destination, int) and source != destination
        direct = both and not self.driver.through_host
        self.copies.calls.append(((), 1))
        self.copies.tick("nvlink" if direct else "pcie", (ends[0], ends[1]), size)
        return size / ((DIRECT_GB_S if direct else HOST_GB_S) * 1e9)
