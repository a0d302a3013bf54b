"""The request for a run of copies: series between pairs of GPUs, copies with host memory, many pairs at once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.paths.p2p import LATENCY_BYTES, Cell, Pair, Series
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.copies import CopyPattern, Direction, Engine, HostMemory
from gpubench.model.terms.data_pattern import Block, DataPattern
from gpubench.model.terms.managed import ManagedSupport, ManagedWay
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.units import format_size

_MOST_REPEATS = 100
"""Enough for a mean of microseconds, and as many as p2pBandwidthLatencyTest makes."""

_TO_HOST = (ManagedWay.PINNED_KERNEL, ManagedWay.PREFETCH, ManagedWay.IN_PLACE)
"""A kernel's page faults fetch; to the host it only writes."""

_BETWEEN_GPUS = (ManagedWay.PREFETCH, ManagedWay.FAULTS, ManagedWay.IN_PLACE)
"""What a kernel does with plain memory of another GPU is a series of its own."""


@dataclass(frozen=True, slots=True)
class Method:
    """The length of samples: `repeats` copies, or as many as last `sample_seconds`; the median of `samples` counts."""

    warmup: int = 4
    samples: int = 3
    repeats: int | None = None
    sample_seconds: float = 0.01

    def repeats_for(self, seconds: float) -> int:
        """The number of copies in a sample, where one takes so many seconds."""
        if self.repeats is not None:
            return self.repeats
        return max(1, min(_MOST_REPEATS, round(self.sample_seconds / seconds)))


NVBANDWIDTH = Method(warmup=4, samples=3, repeats=16)
"""nvbandwidth 0.8: 4 copies to warm up, 16 timed in one go, the median of 3."""


@dataclass(frozen=True, slots=True)
class PairCopy:
    """A copy from one GPU to another; as text, its name in a recording, as for the other kinds of copies."""

    series: Series
    pair: Pair

    def __str__(self) -> str:
        return f"{self.series.name} {self.series.size_bytes} {self.pair[0]}-{self.pair[1]}"


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy between host memory and a GPU."""

    memory: HostMemory
    gpu: int
    to_gpu: bool

    @property
    def label(self) -> str:
        """The copy for a progress line, which ends with the name of the GPU."""
        return f"{self.memory} host memory {'to' if self.to_gpu else 'from'}"

    def __str__(self) -> str:
        return f"{self.label} {self.gpu}"


@dataclass(frozen=True, slots=True)
class PatternCopy:
    """Copies of several pairs at once: their bytes together count, over the time until the last is made."""

    pattern: CopyPattern
    direction: Direction

    def __str__(self) -> str:
        return f"{self.pattern} {self.direction}"


@dataclass(frozen=True, slots=True)
class ManagedCopy:
    """Bytes of managed memory, or what they compare with, from one end to another; an end of None is the host."""

    way: ManagedWay
    source: int | None
    destination: int | None

    @property
    def by(self) -> int:
        """The GPU that fetches the bytes, or that brings them to the host."""
        return cast("int", self.source if self.destination is None else self.destination)

    def __str__(self) -> str:
        ends = ("host" if end is None else str(end) for end in (self.source, self.destination))
        return f"managed {self.way} {'-'.join(ends)}"


Copy = PairCopy | HostCopy | PatternCopy | ManagedCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pRequest:
    """A request. `pairs` are positions of GPUs; `series` come in this order, those without peer access first.

    `managed_bytes` is the size of managed memory that moves, `managed` what CUDA says of it for every GPU.
    """

    pairs: tuple[Pair, ...]
    series: tuple[Series, ...]
    host_bytes: int | None = None
    patterns: tuple[CopyPattern, ...] = ()
    pattern_bytes: int
    method: Method
    check: bool
    managed_bytes: int | None = None
    managed: tuple[ManagedSupport, ...] = ()

    @property
    def largest(self) -> int:
        """Bytes of the largest copy."""
        sizes = (*(each.size_bytes for each in self.series), self.host_bytes, self.managed_bytes)
        return max(filter(None, sizes), default=0)

    @property
    def pattern_copies(self) -> list[PatternCopy]:
        """Every pattern, written and read."""
        return [PatternCopy(each, way) for each in self.patterns for way in (Direction.WRITE, Direction.READ)]

    def host_copies(self, gpus: int) -> Iterator[HostCopy]:
        """Both kinds of host memory to and from every GPU, where that was asked for."""
        for memory in HostMemory if self.host_bytes else ():
            for to_gpu in (True, False):
                for gpu in range(gpus):
                    yield HostCopy(memory, gpu, to_gpu)

    def managed_copies(self, gpus: int) -> Iterator[ManagedCopy]:
        """Every way to every GPU and back to the host, and between the pairs, where that was asked for."""
        if not self.managed_bytes:
            return
        for gpu in range(gpus) if self.host_bytes else ():
            yield from (ManagedCopy(way, None, gpu) for way in ManagedWay)
            yield from (ManagedCopy(way, gpu, None) for way in _TO_HOST)
        for source, destination in self.pairs:
            yield from (ManagedCopy(way, source, destination) for way in _BETWEEN_GPUS)

    def steps(self, gpus: int) -> int:
        """The number of copies, each of which is a step of the progress."""
        alone = len(list(self.host_copies(gpus))) + len(list(self.managed_copies(gpus)))
        return alone + len(self.series) * len(self.pairs) + len(self.pattern_copies)


class Bench(Protocol):
    """Times copies and verifies what arrived: on GPUs of one process, between ranks, or from a recording."""

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enable peer access wherever CUDA says that it can be; the errors of pairs for which it then fails."""
        ...

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """Measure copies of one kind, pairs of one series; a cell for each, in their order, errors included."""
        ...

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """Measure one of them again: the cell with all samples, or with the error."""
        ...

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """The GPUs while nothing of this run is copied, in their order; empty where nobody can look."""
        return ()


def default_series(size_bytes: int, *, sm: bool = True) -> tuple[Series, ...]:
    """The series of p2pBandwidthLatencyTest and nvbandwidth: peer access off, then on, and a 16-byte copy with each."""
    write, read, both = Direction.WRITE, Direction.READ, Direction.BOTH
    off = [Series(Engine.CE, write, peer=False, size_bytes=size) for size in (size_bytes, LATENCY_BYTES)]
    on = [Series(Engine.CE, way, peer=True, size_bytes=size_bytes) for way in (write, read, both)]
    kernels = [Series(Engine.SM, write, peer=True, size_bytes=size_bytes)] if sm else []
    return (*off, *on, *kernels, Series(Engine.CE, write, peer=True, size_bytes=LATENCY_BYTES))


def sweep_series(sizes: Sequence[int]) -> tuple[Series, ...]:
    """A matrix for each size: written by copy engines, with peer access off, then on."""
    return tuple(
        Series(Engine.CE, Direction.WRITE, peer=peer, size_bytes=size) for peer in (False, True) for size in sizes
    )


def with_latency(series: Sequence[Series], pairs: Iterable[Pair], wiring: Wiring) -> tuple[Series, ...]:
    """The series, with 16 bytes copied too, peer access off and on, where bandwidths would not tell a pair's path."""
    write = partial(Series, Engine.CE, Direction.WRITE, size_bytes=LATENCY_BYTES)
    off, on = write(peer=False), write(peer=True)
    if not series or all(wiring.outruns_host(pair) for pair in pairs):
        return tuple(series)
    return tuple(dict.fromkeys((*series, off, on)))


def label(series: Series) -> str:
    """A series for a progress line."""
    return f"{series.name} {format_size(series.size_bytes)}"


def random_data(size_bytes: int, row: int, senders: int, offset_bytes: int = 0) -> tuple[DataPattern, Block]:
    """Random bits over that many bytes from an offset on, other ones for each row; as words where they divide both."""
    words = size_bytes % DataType.INT64.size_bytes == 0 and offset_bytes % DataType.INT64.size_bytes == 0
    dtype = DataType.INT64 if words else DataType.UINT8
    offset, count = offset_bytes // dtype.size_bytes, size_bytes // dtype.size_bytes
    return DataPattern(dtype, None, senders), Block(row, 1, offset + count, offset, count)
