"""Copies between GPUs that are NumPy arrays. Data really move, times are made up, and faults can be planted."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpubench.backends.mpi.backends import NumpyMemory
from gpubench.errors import CouldNotMeasureError
from gpubench.model.terms.operation import CopyGpu, Engine, Place
from gpubench.ports.backend import Memory
from gpubench.ports.copies import CopyStream, LinkBytes

DIRECT_GB_S, STAGED_GB_S, HOST_GB_S = 400.0, 38.0, 55.0
DIRECT_SECONDS, STAGED_SECONDS = 2e-8, 15e-8

Pair = tuple[int, int]


@dataclass
class Broken:
    """Faults of the machine by ordered pair of positions."""

    unreachable: set[Pair] = field(default_factory=set)
    refused: set[Pair] = field(default_factory=set)
    staged: set[Pair] = field(default_factory=set)
    slow: dict[Pair, float] = field(default_factory=dict)
    wrong: set[Pair] = field(default_factory=set)
    wrong_with_host: bool = False
    failing: set[Pair] = field(default_factory=set)
    full: set[int] = field(default_factory=set)
    noise: dict[Pair, list[float]] = field(default_factory=dict)


PCIE_SENT, PCIE_RECEIVED = 1.094, 1.079
"""Bytes that PCIe counters of H200s count per payload byte, including headers"""


class FakeCopies:
    """`ports.Copies` and `ports.LinkCounters` together: the counters count what goes over NVLink."""

    def __init__(self, gpus: int, broken: Broken | None = None, *, counts: bool = True) -> None:
        self.gpus = tuple(CopyGpu(f"GPU{n}", n, f"0000:0{n}:00.0", f"GPU-{n}", "NVIDIA H200") for n in range(gpus))
        self.broken = broken or Broken()
        self.enabled: set[Pair] = set()
        self.closed = False
        self.calls: list[tuple[tuple[tuple[Place, Place], ...], int]] = []
        self._places: dict[int, Place] = {}
        self._counted: dict[str, Counter[int]] = defaultdict(Counter)
        self._counts = counts

    def can_reach(self, source: int, destination: int) -> bool:
        return (source, destination) not in self.broken.unreachable

    @property
    def taken(self) -> int:
        return len(self._places)

    def enable(self, source: int, destination: int) -> None:
        if (source, destination) in self.broken.refused:
            raise CouldNotMeasureError("cudaErrorPeerAccessUnsupported")
        self.enabled.add((source, destination))

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        if place in self.broken.full:
            raise CouldNotMeasureError("out of memory")
        memory = NumpyMemory(size_bytes)
        self._places[id(memory)] = place
        return memory

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        pairs = tuple((self._place(each.source.memory), self._place(each.destination.memory)) for each in streams)
        self.calls.append((pairs, repeats))
        lasted = 0.0
        for stream, pair in zip(streams, pairs, strict=True):
            lasted = max(lasted, repeats * self._copy(stream, pair))
        return lasted

    def close(self) -> None:
        self.closed = True

    def read(self, gpu: int) -> LinkBytes:
        if not self._counts:
            return LinkBytes()
        pcie = [int(self._counted[way][gpu]) % 2**32 for way in ("pcie sent", "pcie received")]
        return LinkBytes(self._counted["nvlink sent"][gpu], self._counted["nvlink received"][gpu], *pcie)

    def tick(self, link: str, ends: tuple[Place, Place], size_bytes: int) -> None:
        headers = PCIE_SENT, PCIE_RECEIVED
        for end, way, share in zip(ends, ("sent", "received"), headers if link == "pcie" else (1, 1), strict=True):
            if isinstance(end, int):
                self._counted[f"{link} {way}"][end] += int(size_bytes * self.calls[-1][1] * share)

    def _place(self, memory: Memory) -> Place:
        return self._places[id(memory)]

    def _copy(self, stream: CopyStream, pair: tuple[Place, Place]) -> float:
        source, destination = pair
        size = stream.size_bytes
        data = stream.source.memory.array(stream.source.offset_bytes, size, "uint8")
        stream.destination.memory.array(stream.destination.offset_bytes, size, "uint8")[:] = data
        if not isinstance(source, int) or not isinstance(destination, int):
            self.tick("pcie", pair, size)
            stream.destination.memory.array(stream.destination.offset_bytes, 1, "uint8")[:] ^= (
                self.broken.wrong_with_host
            )
            return size / (HOST_GB_S * 1e9)
        ends = (source, destination)
        if ends in self.broken.failing:
            raise CouldNotMeasureError(f"GPU{source} → GPU{destination}: cudaErrorIllegalAddress")
        if ends in self.broken.wrong:
            stream.destination.memory.array(stream.destination.offset_bytes + size - 1, 1, "uint8")[:] ^= 1
        return self._lasts(stream, ends)

    def _lasts(self, stream: CopyStream, ends: Pair) -> float:
        size = stream.size_bytes
        if ends not in self.enabled or ends in self.broken.staged:
            self.tick("pcie", ends, size)
            return STAGED_SECONDS + size / (STAGED_GB_S * 1e9)
        self.tick("nvlink", ends, size)
        share = self.broken.slow.get(ends, 1.0) * (0.93 if stream.engine is Engine.SM else 1.0)
        noise = self.broken.noise.get(ends)
        if noise:
            share *= noise[0]
            noise.append(noise.pop(0))
        return DIRECT_SECONDS + size / (DIRECT_GB_S * share * 1e9)
