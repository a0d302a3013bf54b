"""Measure copies between every ordered pair of GPUs, and between GPUs and host memory, verified by their owners."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Protocol

from gpubench.errors import CouldNotMeasureError
from gpubench.measure.paths.counters import Meter
from gpubench.model.paths.p2p import LATENCY_BYTES, Carried, Cell, Pair, Series
from gpubench.model.terms.copies import CopyPattern, Direction, Engine, HostMemory, Place, pairs_of
from gpubench.model.terms.data_pattern import POISON, Block, DataPattern
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.units import format_size
from gpubench.ports.copies import Copies, CopyStream
from gpubench.ports.link_counters import LinkCounters
from gpubench.ports.memory import Memory, Region

_WORD = DataType.INT64
_BYTE = DataType.UINT8


@dataclass(frozen=True, slots=True)
class Method:
    """How long to copy: `repeats` copies a sample, or as many as last `sample_seconds`; the median of `samples`."""

    warmup: int = 4
    samples: int = 3
    repeats: int | None = None
    sample_seconds: float = 0.01

    def repeats_for(self, seconds: float) -> int:
        """How many copies of that duration a sample makes."""
        if self.repeats is not None:
            return self.repeats
        return max(1, min(_MOST_REPEATS, round(self.sample_seconds / seconds)))


_MOST_REPEATS = 100
"""Enough for a mean of microseconds, and as many as p2pBandwidthLatencyTest makes."""

NVBANDWIDTH = Method(warmup=4, samples=3, repeats=16)
"""nvbandwidth 0.8: 4 copies to warm up, 16 timed in one go, the median of 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pRequest:
    """What to measure. `pairs` are positions of GPUs; `series` come in this order, those without peer access first."""

    pairs: tuple[Pair, ...]
    series: tuple[Series, ...]
    host_bytes: int | None
    patterns: tuple[CopyPattern, ...]
    pattern_bytes: int
    method: Method
    check: bool

    @property
    def largest(self) -> int:
        """Bytes of the largest copy."""
        return max([each.size_bytes for each in self.series] + ([self.host_bytes] if self.host_bytes else []))


@dataclass(frozen=True, slots=True)
class PatternResult:
    """Copies of several pairs at once: bytes of all of them over the time until the last was made."""

    pattern: CopyPattern
    direction: Direction
    cell: Cell
    pairs: tuple[Pair, ...]


class Bench(Protocol):
    """What measures the cells of a run in one process: GPUs, or a recording of them."""

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enable it for every pair of which CUDA says that it can; why it failed, where it did."""

    def can_reach(self, pair: Pair) -> bool:
        """Whether both may address each other's memory, as CUDA says."""

    def measure(self, series: Series, pair: Pair) -> Cell:
        """One cell of a matrix; what goes wrong with this pair is in the cell."""

    def measure_again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """More samples of a cell, for one that is near a threshold."""

    def measure_host(self, memory: HostMemory, gpu: int, *, to_gpu: bool) -> Cell:
        """A copy between host memory and a GPU."""

    def measure_pattern(self, pattern: CopyPattern, direction: Direction) -> PatternResult:
        """Several pairs at once."""


class CopyBench(Bench):
    """The buffers of a run and what is measured with them: on every GPU one that is sent from, and one for arrivals."""

    def __init__(self, request: P2pRequest, copies: Copies, counters: LinkCounters) -> None:
        self._request = request
        self._copies = copies
        self._meter = Meter(counters)
        self._row = 0
        self._host_rows: dict[Place, int] = {}
        self._sent: dict[Place, Memory] = {}
        self._arrived: dict[Place, Memory] = {}
        self.unusable: dict[int, str] = {}
        slots = max(1, len(copies.gpus) - 1) if request.patterns else 1
        for gpu in range(len(copies.gpus)):
            try:
                self._sent[gpu] = copies.allocate(gpu, request.largest)
                self._arrived[gpu] = copies.allocate(gpu, max(request.largest, slots * request.pattern_bytes))
            except CouldNotMeasureError as error:
                self.unusable[gpu] = error.seen

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enable it wherever CUDA says that it can be; why it failed, where it did."""
        refused = {}
        for pair in permutations(range(len(self._copies.gpus)), 2):
            if self._copies.can_reach(*pair):
                try:
                    self._copies.enable(*pair)
                except CouldNotMeasureError as error:
                    refused[pair] = error.seen
        return refused

    def can_reach(self, pair: Pair) -> bool:
        """Whether CUDA says so of both."""
        return self._copies.can_reach(*pair) and self._copies.can_reach(*reversed(pair))

    def measure(self, series: Series, pair: Pair) -> Cell:
        """Copy between two GPUs, or both ways at once."""
        source, destination = pair
        broken = next((self.unusable[gpu] for gpu in pair if gpu in self.unusable), None)
        if broken:
            return Cell(error=broken)
        directions = [(source, destination)]
        if series.direction is Direction.BOTH:
            directions.append((destination, source))
        streams = [
            CopyStream(
                by=end if series.direction is Direction.READ else start,
                engine=series.engine,
                source=Region(self._sent[start], 0),
                destination=Region(self._arrived[end], 0),
                size_bytes=series.size_bytes,
            )
            for start, end in directions
        ]
        return self._measured(streams, counted=source)

    def measure_again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """The same copies again, added to what was measured."""
        more = self.measure(series, pair)
        return more if more.error else replace(more, seconds=(*before.seconds, *more.seconds))

    def measure_host(self, memory: HostMemory, gpu: int, *, to_gpu: bool) -> Cell:
        """Copy between a GPU and buffers that are made when they are first needed."""
        size_bytes = self._request.host_bytes or 0
        if gpu in self.unusable:
            return Cell(error=self.unusable[gpu])
        try:
            for buffers in (self._sent, self._arrived):
                if memory not in buffers:
                    buffers[memory] = self._copies.allocate(memory, size_bytes)
        except CouldNotMeasureError as error:
            return Cell(error=error.seen)
        source, destination = (memory, gpu) if to_gpu else (gpu, memory)
        stream = CopyStream(
            gpu, Engine.CE, Region(self._sent[source], 0), Region(self._arrived[destination], 0), size_bytes
        )
        return self._measured([stream], counted=gpu, receives=to_gpu)

    def measure_pattern(self, pattern: CopyPattern, direction: Direction) -> PatternResult:
        """Copy between several pairs at once, each into a place of its own at its destination."""
        size_bytes = self._request.pattern_bytes
        pairs = pairs_of(pattern, len(self._copies.gpus))
        if self.unusable:
            return PatternResult(pattern, direction, Cell(error=next(iter(self.unusable.values()))), pairs)
        taken: dict[int, int] = {}
        streams = []
        for source, destination in pairs:
            slot = taken[destination] = taken.get(destination, -1) + 1
            streams.append(
                CopyStream(
                    by=destination if direction is Direction.READ else source,
                    engine=Engine.CE,
                    source=Region(self._sent[source], 0),
                    destination=Region(self._arrived[destination], slot * size_bytes),
                    size_bytes=size_bytes,
                )
            )
        return PatternResult(pattern, direction, self._measured(streams, counted=None), pairs)

    def _measured(self, streams: Sequence[CopyStream], counted: int | None, *, receives: bool = False) -> Cell:
        method = self._request.method
        try:
            first = self._copies.seconds(streams, method.warmup) / method.warmup
            repeats = method.repeats_for(first)
            samples = [self._copies.seconds(streams, repeats) / repeats for _ in range(method.samples - 1)]
            self._prepare(streams)
            reading = None if counted is None else self._meter.read(counted)
            samples.append(self._copies.seconds(streams, repeats) / repeats)
            due_bytes = repeats * streams[0].size_bytes
            carried = Carried() if reading is None else self._meter.since(reading, due_bytes, receives=receives)
            wrong = self._wrong(streams)
        except CouldNotMeasureError as error:
            return Cell(error=error.seen)
        return Cell(tuple(samples), wrong, carried)

    def _prepare(self, streams: Sequence[CopyStream]) -> None:
        """Fresh data to send, and nothing that could pass for it where it is to arrive.

        Host memory is filled once: the host takes a second for what a GPU does in a millisecond.
        """
        if not self._request.check:
            return
        self._row += 1
        for place, memory in self._sent.items():
            size_bytes = max((each.size_bytes for each in streams if each.source.memory is memory), default=0)
            if size_bytes and place not in self._host_rows:
                data, block = _data(size_bytes, self._row, 0)
                memory.fill_sent(data, block, _identity(place))
                if isinstance(place, HostMemory):
                    self._host_rows[place] = self._row
        for stream in streams:
            memory = stream.destination.memory
            memory.fill_byte(stream.destination.offset_bytes + stream.size_bytes, POISON)

    def _wrong(self, streams: Sequence[CopyStream]) -> int | None:
        """Wrong elements at all destinations, counted by the GPUs that own them."""
        if not self._request.check:
            return None
        senders = {id(memory): place for place, memory in self._sent.items()}
        wrong = 0
        for stream in streams:
            sender = senders[id(stream.source.memory)]
            row = self._host_rows.get(sender, self._row)
            data, block = _data(stream.size_bytes, row, stream.destination.offset_bytes)
            wrong += stream.destination.memory.count_wrong(data, [(block, _identity(sender))])
        return wrong


_IDENTITIES = {HostMemory.PINNED: 254, HostMemory.PAGEABLE: 255}


def _identity(place: Place) -> int:
    """A number of its own for each sender, by which its data differ."""
    return _IDENTITIES[place] if isinstance(place, HostMemory) else place


def _data(size_bytes: int, row: int, offset_bytes: int) -> tuple[DataPattern, Block]:
    """Random bits over that many bytes, as words where they divide it."""
    dtype = _WORD if size_bytes % _WORD.size_bytes == 0 and offset_bytes % _WORD.size_bytes == 0 else _BYTE
    width = dtype.size_bytes
    offset, count = offset_bytes // width, size_bytes // width
    return DataPattern(dtype, None, 256), Block(row, 1, offset + count, offset, count)


def default_series(size_bytes: int, *, sm: bool = True) -> tuple[Series, ...]:
    """What p2pBandwidthLatencyTest and nvbandwidth measure: peer access off, then on, and a 16-byte copy with each."""
    write, read, both = Direction.WRITE, Direction.READ, Direction.BOTH
    off = [Series(Engine.CE, write, peer=False, size_bytes=size) for size in (size_bytes, LATENCY_BYTES)]
    on = [Series(Engine.CE, way, peer=True, size_bytes=size_bytes) for way in (write, read, both)]
    kernels = [Series(Engine.SM, write, peer=True, size_bytes=size_bytes)] if sm else []
    return (*off, *on, *kernels, Series(Engine.CE, write, peer=True, size_bytes=LATENCY_BYTES))


def sweep_series(sizes: Sequence[int]) -> tuple[Series, ...]:
    """A size a matrix: written by copy engines, with peer access off, then on."""
    return tuple(
        Series(Engine.CE, Direction.WRITE, peer=peer, size_bytes=size) for peer in (False, True) for size in sizes
    )


def label(series: Series) -> str:
    """A series for a progress line."""
    return f"{series.name} {format_size(series.size_bytes)}"


def steps(request: P2pRequest, gpus: int) -> int:
    """How many cells a run has."""
    host = 2 * len(HostMemory) * gpus if request.host_bytes else 0
    return host + len(request.series) * len(request.pairs) + 2 * len(request.patterns)


def host_copies(gpus: int) -> Iterator[tuple[HostMemory, int, bool]]:
    """Every copy between host memory and a GPU: the memory, the GPU, and whether it goes to the GPU."""
    for memory in HostMemory:
        for to_gpu in (True, False):
            for gpu in range(gpus):
                yield memory, gpu, to_gpu
