"""Copies as they are measured: within one process, between ranks, with host memory, and in managed memory."""

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

_SENDER, _SENDERS = 253, 256  # The number of managed memory as a sender of data
_FIRST_ROW = 1 << 20  # Data of managed memory differ from those of every other copy of the run
Buffers = Callable[[operation.Place], tuple[Memory, Memory]]  # Of a GPU, or pinned: one to send, one for arrivals


class ManagedBench:
    """One managed allocation, made before any plain one, and the passes over it."""

    def __init__(
        self, request: P2pRequest, copies: Copies, managed: ManagedMemory, meter: Meter, buffers: Buffers
    ) -> None:
        self._request, self._copies, self._managed = request, copies, managed
        self._meter, self._buffers = meter, buffers
        self._size = request.managed_bytes or 0
        self._row = _FIRST_ROW
        self._pages = managed.allocate(self._size)

    def cell(self, copy: ManagedCopy) -> Cell:
        """Samples of one pass each after one that does not count. Raises CouldNotMeasureError."""
        pages = self._pages
        if copy.way is not operation.ManagedWay.IN_PLACE:
            return self._passes(copy)
        self._managed.advise(pages, self._home(copy), copy.by, stays=True)
        try:
            return self._passes(copy)
        finally:
            self._managed.advise(pages, self._home(copy), copy.by, stays=False)

    def _passes(self, copy: ManagedCopy) -> Cell:
        self._ready(copy)
        self._pass(copy)
        samples = []
        for _ in range(self._request.method.samples - 1):
            # Pages that shall stay were not to move: to put them back would hide that they did.
            if copy.way.is_migration:
                self._ready(copy)
            samples.append(self._pass(copy))
        if self._request.check:
            self._fresh(copy)
        self._ready(copy)
        receives = copy.source is None
        reading = self._meter.read(copy.by if copy.source is None else copy.source)
        samples.append(self._pass(copy))
        carried = self._meter.since(reading, self._size, receives=receives)
        return Cell(tuple(samples), self._wrong(copy) if self._request.check else None, carried)

    def _home(self, copy: ManagedCopy) -> operation.Place:
        """Where the pages have to be when a pass begins: where they stay, or what they leave."""
        if copy.way is operation.ManagedWay.RESIDENT:
            return copy.by
        return HOST if copy.source is None or _writes_in_place(copy) else copy.source

    def _ready(self, copy: ManagedCopy) -> None:
        if copy.way is operation.ManagedWay.RESIDENT:
            self._managed.prefetch(self._pages, HOST, copy.by)
        if copy.way.is_managed:
            self._managed.prefetch(self._pages, self._home(copy), copy.by)

    def _pass(self, copy: ManagedCopy) -> float:
        if copy.way is operation.ManagedWay.PREFETCH:
            return self._managed.prefetch(self._pages, _place(copy.destination), copy.by)
        source, destination = Region(self._source(copy), 0), Region(self._destination(copy), 0)
        stream = CopyStream(copy.by, operation.Engine.SM, source, destination, self._size)
        return self._managed.seconds(stream) if copy.way.is_managed else self._copies.seconds([stream], 1)

    def _source(self, copy: ManagedCopy) -> Memory:
        if copy.way is operation.ManagedWay.PINNED_KERNEL or _writes_in_place(copy):
            sent, _ = self._buffers(operation.HostMemory.PINNED if copy.source is None else copy.source)
            return sent
        return self._pages

    def _destination(self, copy: ManagedCopy) -> Memory:
        if copy.destination is not None:
            return self._buffers(copy.destination)[1]
        return self._pages if copy.way.is_managed else self._buffers(operation.HostMemory.PINNED)[1]

    def _fresh(self, copy: ManagedCopy) -> None:
        """Fresh data at the source, other data at the destination; GPUs fill managed memory 1,000 × faster."""
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
        gpu = copy.by if copy.source is None else copy.source
        self._managed.prefetch(self._pages, gpu, gpu)
        return self._managed.on(self._pages, gpu)

    def _wrong(self, copy: ManagedCopy) -> int:
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
"""Numbers of host memory as a sender of data; those of GPUs are their positions."""


class CopyBench(Bench):
    """The buffers of a run and what is measured with them; those of host memory are made when first needed."""

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
        if managed is not None and not all(each.missing_feature for each in request.managed):
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
                if self._managed is None:
                    raise CouldNotMeasureError("managed memory is not used here")
                return self._managed.cell(copy)
            return self._measured(copy, self._streams(copy))
        except CouldNotMeasureError as error:
            return Cell(error=error.seen)

    def _buffers(self, place: operation.Place) -> tuple[Memory, Memory]:
        """The plain buffers of a place, made where it has none yet; CouldNotMeasureError where it cannot have any."""
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
        """Copies from the first end to an offset in the second. Raises CouldNotMeasureError: no buffers."""
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
        """Fresh data to send, and other data where it is to arrive; host memory is filled once, as it is slow."""
        if not self._request.check:
            return
        self._row += 1
        for place, memory in self._sent.items():
            size_bytes = max((each.size_bytes for each in streams if each.source.memory is memory), default=0)
            if size_bytes and place not in self._host_rows:
                memory.fill_sent(*random_data(size_bytes, self._row, _SENDERS), _identity(place))
                if isinstance(place, operation.HostMemory):
                    self._host_rows[place] = self._row
        for stream in streams:
            memory = stream.destination.memory
            memory.fill_byte(stream.destination.offset_bytes + stream.size_bytes, operation.POISON)

    def _wrong(self, streams: Sequence[CopyStream]) -> int | None:
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


def _issuer(direction: operation.Direction, pair: Pair) -> int:
    return pair[1] if direction is operation.Direction.READ else pair[0]


def _counted_gpu(copy: PairCopy | HostCopy | PatternCopy) -> int | None:
    if isinstance(copy, PairCopy):
        return copy.pair[0]
    return copy.gpu if isinstance(copy, HostCopy) else None


def _identity(place: operation.Place) -> int:
    """A number of its own for each sender, by which its data differ."""
    return _IDENTITIES[place] if isinstance(place, operation.HostMemory) else place


T = TypeVar("T")

_OWN_GPU = 0  # Each rank counts what its one GPU carries
_STEPS = 6  # Of a round: copies to learn, samples, fresh data, last sample, its counters, its check


class _Offer(Struct, frozen=True):
    """The two buffers of a rank, as the others get them: handles, or the reason why they cannot be used."""

    sent: bytes = b""
    arrived: bytes = b""
    unusable: str = ""
    refused: str = ""


class RankBench(Bench):
    """This rank's buffers, and its part in what all ranks measure together. Every rank calls every method alike."""

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
        """Nothing to do: CUDA enables it with memory of another process, which is opened for the first copy."""
        return {}

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """One matrix: in as few rounds of disjoint pairs as can be, in each one way, then back."""
        if not copies:
            return iter(())
        asked = cast("Sequence[PairCopy]", copies)  # the other kinds of copies are for one process
        series, pairs = asked[0].series, [each.pair for each in asked]
        if series.network and self._chosen is None:
            self._chosen = self._connect(series, pairs)
        cells = self._matrix(series, pairs)
        chosen = self._chosen if series.network and self._chosen is not None else {}
        return (replace(cells[pair], transports=chosen.get(pair, ())) for pair in pairs)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """One pair again while all other ranks wait."""
        asked = cast("PairCopy", copy)
        more = self._together("one pair again", asked.series, (asked.pair,))[asked.pair]
        return before.extended(more)

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """Every rank its own GPU, while all of them wait."""
        if self._window is None:
            return ()
        self.group.barrier()
        (own,) = self._window.look([0])
        self.group.barrier()
        return tuple(self.group.gather(own))

    def _connect(self, series: Series, pairs: Sequence[Pair]) -> Mapping[Pair, tuple[Transport, ...]]:
        """Send untimed for the first time, when NCCL connects each pair and its log names the transport."""
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
            for way in (met_now, tuple((other, one) for one, other in met_now)):
                active = tuple(pair for pair in way if pair in wanted)
                if active:
                    cells |= self._together(f"round {number} of {len(met)}", series, active, phase)
        return cells

    def unusable(self, series: Series, rank: int) -> str:
        """The reason why a rank's buffers cannot be used for this; empty where they can."""
        offer = self.offers[rank]
        return offer.unusable or ("" if series.network else offer.refused)

    def close(self) -> None:
        """Give everything back, once no rank uses another's memory any more."""
        self.copies.release()
        self.group.barrier()
        self.copies.close()

    def _offer(self) -> _Offer:
        try:
            sent, arrived = (self.copies.allocate(self.request.largest) for _ in range(2))
        except CouldNotMeasureError as error:
            return _Offer(unusable=_words(error))
        self.buffers = (sent, arrived)
        try:
            return _Offer(self.copies.export(sent), self.copies.export(arrived))
        except CouldNotMeasureError as error:
            return _Offer(refused=_words(error))

    def _together(
        self, title: str, series: Series, pairs: Sequence[Pair], phase: Phase = Phase.OPERATION
    ) -> dict[Pair, Cell]:
        self.row += 1
        named = ", ".join(f"{source} → {destination}" for source, destination in pairs)
        self.progress.enter(phase, f"{title} ({label(series)}; {named})", _STEPS)
        return _Round(self, series, pairs).cells()


class _Round:
    """Copies of disjoint pairs at the same time. Ranks go step by step, and each step ends when all have made it."""

    def __init__(self, bench: RankBench, series: Series, pairs: Sequence[Pair]) -> None:
        self._bench = bench
        self._series = series
        self._pairs = pairs
        self._own = next((pair for pair in pairs if bench.group.rank in pair), None)
        unusable = {pair: [bench.unusable(series, rank) for rank in pair] for pair in pairs}
        self._errors = {pair: next(filter(None, texts)) for pair, texts in unusable.items() if any(texts)}
        self._reading: CounterReading | None = None

    def cells(self) -> dict[Pair, Cell]:
        """The cells of each pair, the same on every rank; the last sample sends fresh data."""
        method = self._bench.request.method
        first = self._step(lambda pair: self._copies(pair, method.warmup, 1))
        repeats = {pair: method.repeats_for(_slower(first, pair)[0]) for pair in self._unbroken()}
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
        """The result of `action` on each rank; None where a rank has no pair, or one that is broken."""
        answer: T | None = None
        error = ""
        if self._own is not None and self._own not in self._errors:
            try:
                answer = action(self._own)
            except CouldNotMeasureError as raised:
                error = _words(raised)
        # Ranks that have done their part are ahead of those that have not: so a watchdog sees for whom all wait.
        self._bench.progress.completed()
        answers = self._bench.group.gather((answer, error))
        for pair in self._unbroken():
            error = answers[pair[0]][1] or answers[pair[1]][1]
            if error:
                self._errors[pair] = error
        return [each for each, _ in answers]

    def _copies(self, pair: Pair, repeats: int, samples: int) -> tuple[float, ...]:
        copies, series, (source, destination) = self._bench.copies, self._series, pair
        is_source = self._bench.group.rank == source
        own = self._buffers[0 if is_source else 1]
        if series.network:
            peer = destination if is_source else source
            copy = partial(copies.exchange, own, peer, series.size_bytes, repeats, sends=is_source)
        elif is_source == (series.direction is operation.Direction.WRITE):
            other = self._bench.offers[destination].arrived if is_source else self._bench.offers[source].sent
            copy = partial(copies.copy, own, other, series.direction, series.size_bytes, repeats)
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
    """Each sample by the rank of a pair that took longer, where both have one."""
    both = [found for found in (samples[rank] for rank in pair) if found]
    return tuple(max(each) for each in zip(*both, strict=True))


def _words(error: CouldNotMeasureError) -> str:
    return "; ".join(filter(None, (error.seen, error.reason)))
