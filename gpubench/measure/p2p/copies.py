"""Measure copies within one process, between ranks, to and from host memory, and in managed memory."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import CouldNotMeasureError
from gpubench.measure.p2p.request import (
    Bench,
    Copy,
    HostCopy,
    ManagedCopy,
    P2pRequest,
    PairCopy,
    PatternCopy,
    label,
    random_data,
)
from gpubench.measure.paths import CounterReading, IdleWindow, Meter, NcclLogListener
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.p2p import LATENCY_BYTES, Carried, Cell, Pair, Series, pairing_rounds
from gpubench.model.paths.transport import Selection, Transport
from gpubench.model.terms import operation
from gpubench.model.terms.ranks import UNWATCHED, Phase, Progress
from gpubench.ports.backend import LibraryLog, Memory, Region
from gpubench.ports.copies import HOST, Copies, CopyStream, LinkCounters, ManagedMemory, RankCopies
from gpubench.ports.group import Group

_SENDER, _SENDERS = 253, 256  # The sender ID of managed memory in the test data, and the number of sender IDs
_FIRST_ROW = 1 << 20  # Makes the test data in managed memory differ from the data of every other copy in the run
Buffers = Callable[[operation.Place], tuple[Memory, Memory]]
"""Returns a send buffer and a receive buffer on a GPU or in pinned host memory."""


class ManagedBench:
    """Measures copies in managed memory. All copies use one allocation, which is made before all other buffers."""

    def __init__(
        self, request: P2pRequest, copies: Copies, managed: ManagedMemory, meter: Meter, buffers: Buffers
    ) -> None:
        self._request, self._copies, self._managed = request, copies, managed
        self._meter, self._buffers = meter, buffers
        self._size = request.managed_bytes or 0
        self._row = _FIRST_ROW
        self._pages = managed.allocate(self._size)

    def cell(self, copy: ManagedCopy) -> Cell:
        """Measure one copy after a warm-up pass. Each sample is one pass. Raises CouldNotMeasureError."""
        if copy.way is not operation.ManagedWay.IN_PLACE:
            return self._measure_passes(copy)
        self._managed.advise(self._pages, self._home(copy), copy.by, stays=True)
        try:
            return self._measure_passes(copy)
        finally:
            self._managed.advise(self._pages, self._home(copy), copy.by, stays=False)

    def _measure_passes(self, copy: ManagedCopy) -> Cell:
        self._move_home(copy)
        self._time_pass(copy)
        samples = []
        for _ in range(self._request.method.samples - 1):
            # Move pages back only if the copy migrates them. Otherwise the move would hide an unwanted migration.
            if copy.way.is_migration:
                self._move_home(copy)
            samples.append(self._time_pass(copy))
        if self._request.check:
            self._write_fresh_data(copy)
        self._move_home(copy)
        receives = copy.source is None
        reading = self._meter.read(copy.by if copy.source is None else copy.source)
        samples.append(self._time_pass(copy))
        carried = self._meter.since(reading, self._size, receives=receives)
        return Cell(tuple(samples), self._count_wrong(copy) if self._request.check else None, carried)

    def _home(self, copy: ManagedCopy) -> operation.Place:
        """Return the GPU or host where the pages must be at the start of a pass."""
        if copy.way is operation.ManagedWay.RESIDENT:
            return copy.by
        return HOST if copy.source is None or _writes_in_place(copy) else copy.source

    def _move_home(self, copy: ManagedCopy) -> None:
        if copy.way is operation.ManagedWay.RESIDENT:
            self._managed.prefetch(self._pages, HOST, copy.by)
        if copy.way.is_managed:
            self._managed.prefetch(self._pages, self._home(copy), copy.by)

    def _time_pass(self, copy: ManagedCopy) -> float:
        if copy.way is operation.ManagedWay.PREFETCH:
            return self._managed.prefetch(self._pages, _place(copy.destination), copy.by)
        source, destination = Region(self._source(copy), 0), Region(self._destination(copy), 0)
        stream = CopyStream(copy.by, operation.Engine.SM, source, destination, self._size)
        return self._managed.seconds(stream) if copy.way.is_managed else self._copies.seconds([stream], 1)

    def _source(self, copy: ManagedCopy) -> Memory:
        if copy.way is operation.ManagedWay.PINNED_KERNEL or _writes_in_place(copy):
            return self._buffers(operation.HostMemory.PINNED if copy.source is None else copy.source)[0]
        return self._pages

    def _destination(self, copy: ManagedCopy) -> Memory:
        if copy.destination is not None:
            return self._buffers(copy.destination)[1]
        return self._pages if copy.way.is_managed else self._buffers(operation.HostMemory.PINNED)[1]

    def _write_fresh_data(self, copy: ManagedCopy) -> None:
        """Write new test data to the source, and overwrite the destination with a constant."""
        self._row += 1
        data, block = random_data(self._size, self._row, _SENDERS)
        source = self._source(copy)
        if source is self._pages:
            source = self._gpu_memory(copy)
        source.fill_sent(data, block, _SENDER)
        if copy.way is operation.ManagedWay.PREFETCH:
            return
        destination = self._destination(copy)
        destination = self._gpu_memory(copy) if destination is self._pages else destination
        destination.fill_byte(self._size, operation.POISON)

    def _gpu_memory(self, copy: ManagedCopy) -> Memory:
        """Move the pages to a GPU, because a GPU fills managed memory 1,000 times faster than the host."""
        gpu = copy.by if copy.source is None else copy.source
        self._managed.prefetch(self._pages, gpu, gpu)
        return self._managed.on(self._pages, gpu)

    def _count_wrong(self, copy: ManagedCopy) -> int:
        data, block = random_data(self._size, self._row, _SENDERS)
        if copy.way is operation.ManagedWay.PREFETCH:
            arrived = self._managed.on(self._pages, _place(copy.destination))
        else:
            arrived = self._destination(copy)
        return arrived.count_wrong(data, [(block, _SENDER)])


def _writes_in_place(copy: ManagedCopy) -> bool:
    return copy.way is operation.ManagedWay.IN_PLACE and copy.destination is None


def _place(end: int | None) -> operation.Place:
    return HOST if end is None else end


_IDENTITIES = {operation.HostMemory.PINNED: 254, operation.HostMemory.PAGEABLE: 255}
"""Sender IDs of host memory in the test data. The sender ID of a GPU is its position."""


class CopyBench(Bench):
    """Measures copies within one process. Host buffers are allocated on first use."""

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
        self._host_rows: dict[operation.Place, int] = {}
        self._sent: dict[operation.Place, Memory] = {}
        self._arrived: dict[operation.Place, Memory] = {}
        self._unusable: dict[operation.Place, str] = {}
        slots = max(1, len(copies.gpus) - 1) if request.patterns else 1
        self._managed: ManagedBench | None = None
        if managed is not None and not all(gpu.missing_feature for gpu in request.managed):
            self._managed = ManagedBench(request, copies, managed, self._meter, self._buffers)
        for gpu in range(len(copies.gpus)):
            self._allocate(gpu, request.largest, max(request.largest, slots * request.pattern_bytes))

    def enable_peer_access(self) -> dict[Pair, str]:
        refused = {}
        for pair in permutations(range(len(self._copies.gpus)), 2):
            if self._copies.can_reach(*pair):
                try:
                    self._copies.enable(*pair)
                except CouldNotMeasureError as error:
                    refused[pair] = error.seen
        return refused

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        return map(self._cell, copies)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        return before.extended(self._cell(copy))

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        return () if self._window is None else self._window.look(range(len(self._copies.gpus)))

    def _cell(self, copy: Copy) -> Cell:
        try:
            if isinstance(copy, ManagedCopy):
                if self._managed is None:
                    raise CouldNotMeasureError("managed memory is not used here")
                return self._managed.cell(copy)
            return self._measure_streams(copy, self._streams(copy))
        except CouldNotMeasureError as error:
            return Cell(error=error.seen)

    def _buffers(self, place: operation.Place) -> tuple[Memory, Memory]:
        """Return the send and receive buffers on a GPU or host, allocated on first use. Raises CouldNotMeasureError."""
        if place not in {*self._sent, *self._unusable}:
            self._allocate(place, self._request.largest, self._request.largest)
        if place in self._unusable:
            raise CouldNotMeasureError(self._unusable[place])
        return self._sent[place], self._arrived[place]

    def _streams(self, copy: PairCopy | HostCopy | PatternCopy) -> list[CopyStream]:
        if isinstance(copy, PairCopy):
            series, (source, destination) = copy.series, copy.pair
            back = [(destination, source)] if series.direction is operation.Direction.BOTH else []
            return [
                self._stream(_issuer(series.direction, pair), series.engine, pair, series.size_bytes)
                for pair in (copy.pair, *back)
            ]
        if isinstance(copy, HostCopy):
            size_bytes = self._request.host_bytes or 0
            if copy.memory not in {*self._sent, *self._unusable}:
                self._allocate(copy.memory, size_bytes, size_bytes)
            ends = (copy.memory, copy.gpu) if copy.to_gpu else (copy.gpu, copy.memory)
            return [self._stream(copy.gpu, operation.Engine.CE, ends, size_bytes)]
        taken: Counter[int] = Counter()
        streams = []
        for pair in operation.pattern_pairs(copy.pattern, len(self._copies.gpus)):
            by, size_bytes = _issuer(copy.direction, pair), self._request.pattern_bytes
            streams.append(self._stream(by, operation.Engine.CE, pair, size_bytes, taken[pair[1]] * size_bytes))
            taken[pair[1]] += 1
        return streams

    def _stream(
        self,
        by: int,
        engine: operation.Engine,
        ends: tuple[operation.Place, operation.Place],
        size_bytes: int,
        offset_bytes: int = 0,
    ) -> CopyStream:
        """Return a stream that copies from the first end to an offset in the second. Raises CouldNotMeasureError."""
        for end in ends:
            if end in self._unusable:
                raise CouldNotMeasureError(self._unusable[end])
        source, destination = Region(self._sent[ends[0]], 0), Region(self._arrived[ends[1]], offset_bytes)
        return CopyStream(by, engine, source, destination, size_bytes)

    def _allocate(self, place: operation.Place, sent_bytes: int, arrived_bytes: int) -> None:
        try:
            self._sent[place] = self._copies.allocate(place, sent_bytes)
            self._arrived[place] = self._copies.allocate(place, arrived_bytes)
        except CouldNotMeasureError as error:
            self._unusable[place] = error.seen

    def _measure_streams(self, copy: PairCopy | HostCopy | PatternCopy, streams: Sequence[CopyStream]) -> Cell:
        """Time samples of a copy. The last sample sends fresh data, and link counters are read before and after it."""
        method = self._request.method
        first = self._copies.seconds(streams, method.warmup) / method.warmup
        repeats = method.count_repeats(first)
        samples = [self._copies.seconds(streams, repeats) / repeats for _ in range(method.samples - 1)]
        self._write_fresh_data(streams)
        reading = None
        if not isinstance(copy, PatternCopy):
            reading = self._meter.read(copy.gpu if isinstance(copy, HostCopy) else copy.pair[0])
        samples.append(self._copies.seconds(streams, repeats) / repeats)
        carried = Carried()
        if reading is not None:
            receives = isinstance(copy, HostCopy) and copy.to_gpu
            carried = self._meter.since(reading, repeats * streams[0].size_bytes, receives=receives)
        return Cell(tuple(samples), self._count_wrong(streams), carried)

    def _write_fresh_data(self, streams: Sequence[CopyStream]) -> None:
        """Write new test data to the sources, and overwrite the destinations with a constant.

        Fill host memory only once, because that is slow.
        """
        if not self._request.check:
            return
        self._row += 1
        for place, memory in self._sent.items():
            size_bytes = max((stream.size_bytes for stream in streams if stream.source.memory is memory), default=0)
            if size_bytes and place not in self._host_rows:
                memory.fill_sent(*random_data(size_bytes, self._row, _SENDERS), _identity(place))
                if isinstance(place, operation.HostMemory):
                    self._host_rows[place] = self._row
        for stream in streams:
            memory = stream.destination.memory
            memory.fill_byte(stream.destination.offset_bytes + stream.size_bytes, operation.POISON)

    def _count_wrong(self, streams: Sequence[CopyStream]) -> int | None:
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
    """Return the pairs of GPUs that cannot access each other's memory according to CUDA, in both orders."""
    pairs = permutations(range(len(copies.gpus)), 2)
    return frozenset(
        pair for one, other in pairs if not copies.can_reach(one, other) for pair in ((one, other), (other, one))
    )


def _issuer(direction: operation.Direction, pair: Pair) -> int:
    return pair[1] if direction is operation.Direction.READ else pair[0]


def _identity(place: operation.Place) -> int:
    """Return the sender ID, which makes the sender's data differ from all other data."""
    return _IDENTITIES[place] if isinstance(place, operation.HostMemory) else place


T = TypeVar("T")

_OWN_GPU = 0  # Each rank reads the counters of its only GPU
_STEPS = 6  # Steps of a round: estimate, samples, fresh data, last sample, counters, verification


class _Offer(Struct, frozen=True):
    """IPC handles of a rank's two buffers, for use by other ranks, or the reason why there are none.

    `unusable` means that the buffers could not be allocated, `refused` that they could not be exported.
    """

    sent: bytes = b""
    arrived: bytes = b""
    unusable: str = ""
    refused: str = ""


class RankBench(Bench):
    """Measures copies between ranks. Every rank must call every method in the same order."""

    def __init__(
        self,
        request: P2pRequest,
        group: Group,
        copies: RankCopies,
        counters: LinkCounters,
        log: LibraryLog | None = None,
        progress: Progress = UNWATCHED,
        window: IdleWindow | None = None,
    ) -> None:
        self.request = request
        self._window = window
        self.group = group
        self.copies = copies
        self.progress = progress
        self.row = 0
        self.buffers: tuple[Memory, Memory] | None = None
        self.meter = Meter(counters)
        self._log = log
        self._chosen: Mapping[Pair, tuple[Transport, ...]] | None = None
        self.offers = group.gather(self._offer())

    def enable_peer_access(self) -> dict[Pair, str]:
        """Do nothing, because CUDA enables peer access when the first copy opens another process's memory."""
        return {}

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """Measure a matrix in as few rounds as possible. In a round, disjoint pairs of ranks copy at the same time."""
        if not copies:
            return iter(())
        asked = cast("Sequence[PairCopy]", copies)  # Copies of other types need all GPUs in one process
        series, pairs = asked[0].series, [copy.pair for copy in asked]
        if series.network and self._chosen is None:
            self._chosen = self._connect(series, pairs)
        cells = self._matrix(series, pairs)
        chosen = self._chosen if series.network and self._chosen is not None else {}
        return (replace(cells[pair], transports=chosen.get(pair, ())) for pair in pairs)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """Measure one pair again while all other ranks wait."""
        asked = cast("PairCopy", copy)
        more = self._measure_round("one pair again", asked.series, (asked.pair,))[asked.pair]
        return before.extended(more)

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        if self._window is None:
            return ()
        self.group.barrier()
        (gpu,) = self._window.look([0])
        self.group.barrier()
        return tuple(self.group.gather(gpu))

    def _connect(self, series: Series, pairs: Sequence[Pair]) -> Mapping[Pair, tuple[Transport, ...]]:
        """Copy once without timing, so that NCCL connects each pair, and read the transports from its log."""
        if self._log is None:
            return {}
        listener = NcclLogListener(self._log)
        self._matrix(replace(series, size_bytes=LATENCY_BYTES), pairs, Phase.CONNECTING)
        listener.listen()
        self._log.switch_off()
        return Selection(self.group.gather(listener.selection()), ()).send_connections(pairs).pairs

    def _matrix(self, series: Series, pairs: Sequence[Pair], phase: Phase = Phase.OPERATION) -> dict[Pair, Cell]:
        cells: dict[Pair, Cell] = {}
        wanted, met = set(pairs), pairing_rounds(self.group.size)
        for number, met_now in enumerate(met, 1):
            for pairs_now in (met_now, tuple((other, one) for one, other in met_now)):
                active = tuple(pair for pair in pairs_now if pair in wanted)
                if active:
                    cells |= self._measure_round(f"round {number} of {len(met)}", series, active, phase)
        return cells

    def unusable(self, series: Series, rank: int) -> str:
        """Return the reason why a rank's buffers cannot be used for a series, or an empty string."""
        offer = self.offers[rank]
        return offer.unusable or ("" if series.network else offer.refused)

    def close(self) -> None:
        """Release all memory when no rank uses another rank's memory any longer."""
        self.copies.release()
        self.group.barrier()
        self.copies.close()

    def _offer(self) -> _Offer:
        try:
            sent, arrived = (self.copies.allocate(self.request.largest) for _ in range(2))
        except CouldNotMeasureError as error:
            return _Offer(unusable=_error_text(error))
        self.buffers = (sent, arrived)
        try:
            return _Offer(self.copies.export(sent), self.copies.export(arrived))
        except CouldNotMeasureError as error:
            return _Offer(refused=_error_text(error))

    def _measure_round(
        self, title: str, series: Series, pairs: Sequence[Pair], phase: Phase = Phase.OPERATION
    ) -> dict[Pair, Cell]:
        self.row += 1
        named = ", ".join(f"{source} → {destination}" for source, destination in pairs)
        self.progress.enter(phase, f"{title} ({label(series)}; {named})", _STEPS)
        return _Round(self, series, pairs).cells()


class _Round:
    """Copies of disjoint pairs at the same time. All ranks finish a step before any rank starts the next one."""

    def __init__(self, bench: RankBench, series: Series, pairs: Sequence[Pair]) -> None:
        self._bench = bench
        self._series = series
        self._pairs = pairs
        self._own = next((pair for pair in pairs if bench.group.rank in pair), None)
        unusable = {pair: [bench.unusable(series, rank) for rank in pair] for pair in pairs}
        self._errors = {pair: next(filter(None, texts)) for pair, texts in unusable.items() if any(texts)}
        self._reading: CounterReading | None = None

    def cells(self) -> dict[Pair, Cell]:
        """Return the cell for each pair. Every rank returns the same cells. The last sample sends fresh data."""
        method = self._bench.request.method
        first = self._step(lambda pair: self._copies(pair, method.warmup, 1))
        repeats = {pair: method.count_repeats(_slower(first, pair)[0]) for pair in self._unbroken()}
        samples = self._step(lambda pair: self._copies(pair, repeats[pair], method.samples - 1))
        self._step(self._prepare)
        last = self._step(lambda pair: self._copies(pair, repeats[pair], 1))
        carried = self._step(lambda pair: self._carried(pair, repeats[pair]))
        wrong = self._step(self._wrong)
        cells = {pair: Cell(error=error) for pair, error in self._errors.items()}
        for pair in self._unbroken():
            seconds = (*_slower(samples, pair), *_slower(last, pair))
            cells[pair] = Cell(seconds, wrong[pair[1]], carried[pair[0]] or Carried())
        return cells

    def _unbroken(self) -> list[Pair]:
        return [pair for pair in self._pairs if pair not in self._errors]

    def _step(self, action: Callable[[Pair], T]) -> list[T | None]:
        """Return the result of `action` on each rank. It is None for a rank without a pair, or whose pair failed."""
        answer: T | None = None
        error = ""
        if self._own is not None and self._own not in self._errors:
            try:
                answer = action(self._own)
            except CouldNotMeasureError as raised:
                error = _error_text(raised)
        # Count the step before waiting, so that a watchdog sees which rank the others wait for.
        self._bench.progress.completed()
        answers = self._bench.group.gather((answer, error))
        for pair in self._unbroken():
            error = answers[pair[0]][1] or answers[pair[1]][1]
            if error:
                self._errors[pair] = error
        return [answer for answer, _ in answers]

    def _copies(self, pair: Pair, repeats: int, samples: int) -> tuple[float, ...]:
        copies, series, (source, destination) = self._bench.copies, self._series, pair
        is_source = self._bench.group.rank == source
        buffer = self._buffers[0 if is_source else 1]
        if series.network:
            peer = destination if is_source else source
            copy = partial(copies.exchange, buffer, peer, series.size_bytes, repeats, sends=is_source)
        elif is_source == (series.direction is operation.Direction.WRITE):
            other = self._bench.offers[destination].arrived if is_source else self._bench.offers[source].sent
            copy = partial(copies.copy, buffer, other, series.direction, series.size_bytes, repeats)
        else:
            return ()
        return tuple(copy() / repeats for _ in range(samples))

    def _prepare(self, pair: Pair) -> None:
        (sent, arrived), is_source = self._buffers, self._bench.group.rank == pair[0]
        if self._bench.request.check and is_source:
            sent.fill_sent(*self._data(), pair[0])
        elif self._bench.request.check:
            arrived.fill_byte(self._series.size_bytes, operation.POISON)
        if is_source and not self._series.network:
            self._reading = self._bench.meter.read(_OWN_GPU)

    def _carried(self, pair: Pair, repeats: int) -> Carried | None:
        if self._bench.group.rank != pair[0] or self._reading is None:
            return None
        return self._bench.meter.since(self._reading, repeats * self._series.size_bytes)

    def _wrong(self, pair: Pair) -> int | None:
        if self._bench.group.rank != pair[1] or not self._bench.request.check:
            return None
        data, block = self._data()
        return self._buffers[1].count_wrong(data, [(block, pair[0])])

    @property
    def _buffers(self) -> tuple[Memory, Memory]:
        return cast("tuple[Memory, Memory]", self._bench.buffers)

    def _data(self) -> tuple[operation.DataPattern, operation.Block]:
        return random_data(self._series.size_bytes, self._bench.row, self._bench.group.size)


def _slower(samples: Sequence[tuple[float, ...] | None], pair: Pair) -> tuple[float, ...]:
    """Return each sample of a pair as measured by its slower rank. Ranks without samples are ignored."""
    both = [found for found in (samples[rank] for rank in pair) if found]
    return tuple(max(pair) for pair in zip(*both, strict=True))


def _error_text(error: CouldNotMeasureError) -> str:
    return "; ".join(filter(None, (error.seen, error.reason)))
