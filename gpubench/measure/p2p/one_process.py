"""Copies between the GPUs of one process, and between GPUs and host memory, verified by their owners."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations

from gpubench.errors import CouldNotMeasureError
from gpubench.measure.p2p.managed import ManagedBench
from gpubench.measure.p2p.request import (
    Bench,
    Copy,
    HostCopy,
    ManagedCopy,
    P2pRequest,
    PairCopy,
    PatternCopy,
    random_data,
)
from gpubench.measure.paths.counters import Meter
from gpubench.measure.paths.idle_window import IdleWindow
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.paths.p2p import Carried, Cell, Pair
from gpubench.model.terms.copies import Direction, Engine, HostMemory, Place, pairs_of
from gpubench.model.terms.data_pattern import POISON
from gpubench.ports.copies import Copies, CopyStream
from gpubench.ports.link_counters import LinkCounters
from gpubench.ports.managed import ManagedMemory
from gpubench.ports.memory import Memory, Region

_IDENTITIES = {HostMemory.PINNED: 254, HostMemory.PAGEABLE: 255}
"""Numbers of host memory as a sender of data; those of GPUs are their positions."""

_SENDERS = 256


class CopyBench(Bench):
    """The buffers of a run and what is measured with them: on every GPU one that is sent from, and one for arrivals.

    Those of host memory are made when they are first needed.
    """

    def __init__(
        self,
        request: P2pRequest,
        copies: Copies,
        counters: LinkCounters,
        window: IdleWindow | None = None,
        managed: ManagedMemory | None = None,
    ) -> None:
        self._request = request
        self._window = window
        self._copies = copies
        self._meter = Meter(counters)
        self._row = 0
        self._host_rows: dict[Place, int] = {}
        self._sent: dict[Place, Memory] = {}
        self._arrived: dict[Place, Memory] = {}
        self._unusable: dict[Place, str] = {}
        slots = max(1, len(copies.gpus) - 1) if request.patterns else 1
        self._managed: ManagedBench | None = None
        if managed is not None and not all(each.lacks for each in request.managed):
            self._managed = ManagedBench(request, copies, managed, self._meter, self._buffers)
        for gpu in range(len(copies.gpus)):
            self._allocate(gpu, request.largest, max(request.largest, slots * request.pattern_bytes))

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enable it wherever CUDA says that it can be; the errors where it then fails."""
        refused = {}
        for pair in permutations(range(len(self._copies.gpus)), 2):
            if self._copies.can_reach(*pair):
                try:
                    self._copies.enable(*pair)
                except CouldNotMeasureError as error:
                    refused[pair] = error.seen
        return refused

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """One copy after another."""
        return map(self._cell, copies)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """The same copy, its samples added to those before."""
        return before.extended(self._cell(copy))

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """All GPUs at once, none of which copies."""
        return () if self._window is None else self._window.look(range(len(self._copies.gpus)))

    def _cell(self, copy: Copy) -> Cell:
        try:
            if isinstance(copy, ManagedCopy):
                return self._of_managed(copy)
            return self._measured(copy, self._streams(copy))
        except CouldNotMeasureError as error:
            return Cell(error=error.seen)

    def _of_managed(self, copy: ManagedCopy) -> Cell:
        if self._managed is None:
            raise CouldNotMeasureError("managed memory is not used here")
        return self._managed.cell(copy)

    def _buffers(self, place: Place) -> tuple[Memory, Memory]:
        """The plain buffers of a place, made where it has none yet; CouldNotMeasureError where it cannot have any."""
        if place not in {*self._sent, *self._unusable}:
            self._allocate(place, self._request.largest, self._request.largest)
        if place in self._unusable:
            raise CouldNotMeasureError(self._unusable[place])
        return self._sent[place], self._arrived[place]

    def _streams(self, copy: PairCopy | HostCopy | PatternCopy) -> list[CopyStream]:
        """Copies made at once, each stream into a place of its own at its destination."""
        if isinstance(copy, PairCopy):
            series, (source, destination) = copy.series, copy.pair
            back = [(destination, source)] if series.direction is Direction.BOTH else []
            return [
                self._stream(_issuer(series.direction, pair), series.engine, pair, series.size_bytes)
                for pair in (copy.pair, *back)
            ]
        if isinstance(copy, HostCopy):
            size_bytes = self._request.host_bytes or 0
            if copy.memory not in {*self._sent, *self._unusable}:
                self._allocate(copy.memory, size_bytes, size_bytes)
            ends = (copy.memory, copy.gpu) if copy.to_gpu else (copy.gpu, copy.memory)
            return [self._stream(copy.gpu, Engine.CE, ends, size_bytes)]
        taken: Counter[int] = Counter()
        streams = []
        for pair in pairs_of(copy.pattern, len(self._copies.gpus)):
            by, size_bytes = _issuer(copy.direction, pair), self._request.pattern_bytes
            streams.append(self._stream(by, Engine.CE, pair, size_bytes, taken[pair[1]] * size_bytes))
            taken[pair[1]] += 1
        return streams

    def _stream(
        self, by: int, engine: Engine, ends: tuple[Place, Place], size_bytes: int, offset_bytes: int = 0
    ) -> CopyStream:
        """Copies from the first end to an offset in the second.

        Raises:
            CouldNotMeasureError: an end has no buffers.
        """
        for end in ends:
            if end in self._unusable:
                raise CouldNotMeasureError(self._unusable[end])
        source, destination = Region(self._sent[ends[0]], 0), Region(self._arrived[ends[1]], offset_bytes)
        return CopyStream(by, engine, source, destination, size_bytes)

    def _allocate(self, place: Place, sent_bytes: int, arrived_bytes: int) -> None:
        try:
            self._sent[place] = self._copies.allocate(place, sent_bytes)
            self._arrived[place] = self._copies.allocate(place, arrived_bytes)
        except CouldNotMeasureError as error:
            self._unusable[place] = error.seen

    def _measured(self, copy: PairCopy | HostCopy | PatternCopy, streams: Sequence[CopyStream]) -> Cell:
        """Timed in samples; fresh data are sent in the last, and the counters of one end are read around it."""
        method = self._request.method
        first = self._copies.seconds(streams, method.warmup) / method.warmup
        repeats = method.repeats_for(first)
        samples = [self._copies.seconds(streams, repeats) / repeats for _ in range(method.samples - 1)]
        self._prepare(streams)
        counted = _counted_gpu(copy)
        reading = None if counted is None else self._meter.read(counted)
        samples.append(self._copies.seconds(streams, repeats) / repeats)
        carried = Carried()
        if reading is not None:
            receives = isinstance(copy, HostCopy) and copy.to_gpu
            carried = self._meter.since(reading, repeats * streams[0].size_bytes, receives=receives)
        return Cell(tuple(samples), self._wrong(streams), carried)

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
                memory.fill_sent(*random_data(size_bytes, self._row, _SENDERS), _identity(place))
                if isinstance(place, HostMemory):
                    self._host_rows[place] = self._row
        for stream in streams:
            memory = stream.destination.memory
            memory.fill_byte(stream.destination.offset_bytes + stream.size_bytes, POISON)

    def _wrong(self, streams: Sequence[CopyStream]) -> int | None:
        """Wrong elements at all destinations, counted by the GPUs that own them; None where nobody looked."""
        if not self._request.check:
            return None
        senders = {id(memory): place for place, memory in self._sent.items()}
        wrong = 0
        for stream in streams:
            sender = senders[id(stream.source.memory)]
            row = self._host_rows.get(sender, self._row)
            data, block = random_data(stream.size_bytes, row, _SENDERS, stream.destination.offset_bytes)
            wrong += stream.destination.memory.count_wrong(data, [(block, _identity(sender))])
        return wrong


def unreachable_pairs(copies: Copies) -> frozenset[Pair]:
    """Pairs of which CUDA says that one cannot address the other's memory."""
    pairs = permutations(range(len(copies.gpus)), 2)
    return frozenset(
        pair for one, other in pairs if not copies.can_reach(one, other) for pair in ((one, other), (other, one))
    )


def _issuer(direction: Direction, pair: Pair) -> int:
    """The GPU whose engine copies."""
    return pair[1] if direction is Direction.READ else pair[0]


def _counted_gpu(copy: PairCopy | HostCopy | PatternCopy) -> int | None:
    """The GPU whose links tell which way a copy went: of a pair the source; of many pairs none."""
    if isinstance(copy, PairCopy):
        return copy.pair[0]
    return copy.gpu if isinstance(copy, HostCopy) else None


def _identity(place: Place) -> int:
    """A number of its own for each sender, by which its data differ."""
    return _IDENTITIES[place] if isinstance(place, HostMemory) else place
