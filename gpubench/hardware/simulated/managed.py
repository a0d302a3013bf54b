"""Managed memory of a machine that does not exist: a model of its times, never a measurement.

Each way reaches a share of what a plain copy between the same ends does: those of two H200s with 64 MiB.
"""

from collections.abc import Sequence

from gpubench.hardware.simulated.copies import SimulatedCopies
from gpubench.model.terms.copies import Engine, HostMemory, Place
from gpubench.model.terms.managed import ManagedSupport
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.ports.copies import CopyStream
from gpubench.ports.managed import HOST
from gpubench.ports.memory import Memory, Region

_TO_GPU_SHARE, _TO_HOST_SHARE, _BETWEEN_SHARE = 0.84, 0.29, 0.36
"""Of the copy engine's bandwidth, by a prefetch: 46.5 and 16 of 55.3 GB/s with the host, 139 of 388 between GPUs."""

_FAULTS_SHARE, _FAULTS_BETWEEN_SHARE = 0.205, 0.031
"""Of it, by page faults: 11.4 of 55.3 GB/s from the host, 12.1 of 388 from another GPU."""

_LOCAL_GB_S = 1000.0
"""What a kernel copies within the memory of its GPU, which no link limits: H200 1080. Kind: derived."""


class SimulatedManaged:
    """`ports.managed.ManagedMemory` on a simulated node."""

    def __init__(self, copies: SimulatedCopies) -> None:
        self._copies = copies
        self._location: Place = HOST
        self._stays = False

    def support(self) -> Sequence[ManagedSupport]:
        """What CUDA says of GPUs under Linux, without HMM."""
        return [
            ManagedSupport(device=gpu.device, managed=True, concurrent=True, pageable=False, host_page_tables=False)
            for gpu in self._copies.gpus
        ]

    def allocate(self, size_bytes: int) -> Memory:
        """Memory without contents."""
        return self._copies.allocate(HostMemory.PINNED, size_bytes)

    def on(self, memory: Memory, place: Place) -> Memory:  # noqa: ARG002
        """The same."""
        return memory

    def prefetch(self, memory: Memory, place: Place, by: int) -> float:
        """A share of the time of the copy engine's copy between where the pages are and where they go."""
        source, self._location = self._location, place
        if source == place:
            return 0.0
        share = _BETWEEN_SHARE if HOST not in (source, place) else _TO_HOST_SHARE if place is HOST else _TO_GPU_SHARE
        return self._plain(source, place, by, memory.size_bytes) / share

    def advise(self, memory: Memory, place: Place, accessed_by: int, *, stays: bool) -> None:  # noqa: ARG002
        """Pages stay from now on, or move to whoever uses them."""
        self._stays = stays

    def seconds(self, stream: CopyStream) -> float:
        """A kernel's pass over all pages, which come to its GPU where they may."""
        source, by = self._location, stream.by
        if source == by:
            return stream.size_bytes / (_LOCAL_GB_S * BYTES_PER_GB)
        if self._stays:
            return self._plain(source, by, by, stream.size_bytes, Engine.SM)
        plain = self._plain(source, by, by, stream.size_bytes)
        self._location = by
        return plain / (_FAULTS_SHARE if source is HOST else _FAULTS_BETWEEN_SHARE)

    def _plain(self, source: Place, destination: Place, by: int, size_bytes: int, engine: Engine = Engine.CE) -> float:
        ends = [
            self._copies.allocate(HostMemory.PINNED if place is HOST else place, size_bytes)
            for place in (source, destination)
        ]
        stream = CopyStream(by, engine, Region(ends[0], 0), Region(ends[1], 0), size_bytes)
        return self._copies.seconds([stream], 1)
