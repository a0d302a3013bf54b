"""Measure copies between the GPUs of every ordered pair of ranks, disjoint pairs at once, verified by their owners."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, cast

from gpubench.errors import CouldNotMeasureError
from gpubench.measure.p2p.bench import P2pRequest, label
from gpubench.measure.p2p.rows import IPC, NETWORK, RankMachine
from gpubench.measure.p2p.run import MatrixRun
from gpubench.measure.paths.counters import CounterReading, Meter
from gpubench.measure.paths.nccl_log_listener import NcclLogListener
from gpubench.model.paths.p2p import LATENCY_BYTES, Carried, Cell, Pair, Series, rounds
from gpubench.model.paths.selection import Selection
from gpubench.model.paths.transport import Transport
from gpubench.model.results.report import PairRow, Report
from gpubench.model.terms.copies import Direction
from gpubench.model.terms.data_pattern import POISON, Block, DataPattern
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.group import Group
from gpubench.ports.library_log import LibraryLog
from gpubench.ports.link_counters import LinkCounters
from gpubench.ports.listener import Listener
from gpubench.ports.memory import Memory
from gpubench.ports.rank_copies import RankCopies

T = TypeVar("T")

_OWN_GPU = 0
"""Each rank counts what its one GPU carries."""

_STEPS = 6
"""Of a round: copies to learn how long one takes, samples, fresh data, the last sample, its counters, its check."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the others of its two buffers: how to open them, or why nobody can use or open them."""

    sent: bytes = b""
    arrived: bytes = b""
    unusable: str = ""
    refused: str = ""


class Rounds(Protocol):
    """What measures the cells of a run between ranks: the ranks, or a recording of them."""

    def measure(self, series: Series, pairs: Sequence[Pair]) -> dict[Pair, Cell]:
        """One matrix."""

    def measure_again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """More samples of a cell, for one that is near a threshold."""


class RankBench(Rounds):
    """This rank's buffers, and its part in what all ranks measure together. Every rank calls every method alike."""

    def __init__(
        self,
        request: P2pRequest,
        group: Group,
        copies: RankCopies,
        counters: LinkCounters,
        log: LibraryLog | None = None,
        progress: Progress = UNWATCHED,
    ) -> None:
        self.request = request
        self.group = group
        self.copies = copies
        self.progress = progress
        self.row = 0
        self.buffers: tuple[Memory, Memory] | None = None
        self.meter = Meter(counters)
        self._log = log
        self._chosen: Mapping[Pair, tuple[Transport, ...]] | None = None
        self.offers = group.gather(self._offer())

    def measure(self, series: Series, pairs: Sequence[Pair]) -> dict[Pair, Cell]:
        """One matrix: in as few rounds as can be, in each one way, then back."""
        if not series.network:
            return self._matrix(series, pairs)
        if self._chosen is None:
            self._chosen = self._hear(series, pairs)
        cells = self._matrix(series, pairs)
        return {pair: replace(cell, transports=self._chosen.get(pair, ())) for pair, cell in cells.items()}

    def _hear(self, series: Series, pairs: Sequence[Pair]) -> Mapping[Pair, tuple[Transport, ...]]:
        """What NCCL connects each pair over, of which it speaks while they send for the first time, untimed."""
        if self._log is None:
            return {}
        ear = NcclLogListener(self._log)
        self._matrix(replace(series, size_bytes=LATENCY_BYTES), pairs, Phase.CONNECTING)
        ear.listen()
        self._log.switch_off()
        return Selection(self.group.gather(ear.selection()), ()).of_sends(pairs).pairs

    def _matrix(self, series: Series, pairs: Sequence[Pair], phase: Phase = Phase.OPERATION) -> dict[Pair, Cell]:
        cells: dict[Pair, Cell] = {}
        met = rounds(self.group.size)
        for number, pairs_of_round in enumerate(met, 1):
            for way in (pairs_of_round, tuple((other, one) for one, other in pairs_of_round)):
                active = tuple(pair for pair in way if pair in pairs)
                if active:
                    cells |= self._together(f"round {number} of {len(met)}", series, active, phase)
        return {pair: cells[pair] for pair in pairs}

    def measure_again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """One pair again while all other ranks wait."""
        more = self._together("one pair again", series, (pair,))[pair]
        if more.error:
            return more
        return replace(more, seconds=(*before.seconds, *more.seconds), transports=before.transports)

    def unusable(self, series: Series, rank: int) -> str:
        """Why a rank's buffers cannot be used for this; empty where they can."""
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
        """What was measured of each pair, the same on every rank.

        Fresh data are sent in the last sample, into a destination that was overwritten before.
        """
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
        """What `action` returned on each rank; None where a rank has no pair, or one that is broken."""
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
        """Seconds a copy in each sample, on the rank that makes them; on its partner nothing, but over a network."""
        bench, series, rank = self._bench, self._series, self._bench.group.rank
        source, destination = pair
        sent, arrived = self._buffers
        if series.network:
            own, peer = (sent, destination) if rank == source else (arrived, source)
            return tuple(
                bench.copies.exchange(own, peer, series.size_bytes, repeats, sends=rank == source) / repeats
                for _ in range(samples)
            )
        if rank != (source if series.direction is Direction.WRITE else destination):
            return ()
        own, other = (
            (sent, bench.offers[destination].arrived) if rank == source else (arrived, bench.offers[source].sent)
        )
        return tuple(
            bench.copies.copy(own, other, series.direction, series.size_bytes, repeats) / repeats
            for _ in range(samples)
        )

    def _prepare(self, pair: Pair) -> None:
        """Fresh data to send, and nothing that could pass for it where it is to arrive."""
        sent, arrived = self._buffers
        if self._bench.request.check:
            if self._bench.group.rank == pair[0]:
                data, block = self._data()
                sent.fill_sent(data, block, pair[0])
            else:
                arrived.fill_byte(self._series.size_bytes, POISON)
        if self._bench.group.rank == pair[0] and not self._series.network:
            self._reading = self._bench.meter.read(_OWN_GPU)

    def _carried(self, pair: Pair, repeats: int) -> Carried | None:
        """What the links of the source counted, on its rank; nothing of what NCCL sends its own way."""
        if self._bench.group.rank != pair[0] or self._reading is None:
            return None
        return self._bench.meter.since(self._reading, repeats * self._series.size_bytes)

    def _wrong(self, pair: Pair) -> int | None:
        """Wrong elements, on the destination's rank."""
        if self._bench.group.rank != pair[1] or not self._bench.request.check:
            return None
        data, block = self._data()
        return self._buffers[1].count_wrong(data, [(block, pair[0])])

    @property
    def _buffers(self) -> tuple[Memory, Memory]:
        return cast("tuple[Memory, Memory]", self._bench.buffers)

    def _data(self) -> tuple[DataPattern, Block]:
        """Random bits over the copied bytes, as words where they divide them."""
        word = DataType.INT64 if self._series.size_bytes % DataType.INT64.size_bytes == 0 else DataType.UINT8
        count = self._series.size_bytes // word.size_bytes
        return DataPattern(word, None, self._bench.group.size), Block(self._bench.row, 1, count, 0, count)


def _slower(samples: Sequence[tuple[float, ...] | None], pair: Pair) -> tuple[float, ...]:
    """Each sample by the rank of a pair that took longer, where both have one."""
    both = [found for found in (samples[rank] for rank in pair) if found]
    return tuple(max(each) for each in zip(*both, strict=True))


def _words(error: CouldNotMeasureError) -> str:
    return "; ".join(filter(None, (error.seen, error.reason)))


class RankRun(MatrixRun):
    """Measures a request between ranks and tells a listener; every rank runs it and comes to the same report."""

    def __init__(self, request: P2pRequest, bench: Rounds, machine: RankMachine, listener: Listener[PairRow]) -> None:
        super().__init__(request, machine, listener)
        self._everything = request
        self._ranks = bench
        self._wiring = machine
        self._measured: Mapping[Pair, Cell] = {}

    def run(self, *, strict: bool) -> Report:
        """All of it: each series between the pairs that it is for, on one node or across."""
        for series in self._everything.series:
            scope = NETWORK if series.network else IPC
            pairs = tuple(pair for pair in self._everything.pairs if self._wiring.scope(pair) == scope)
            if pairs:
                reachable = [pair for pair in pairs if self._wiring.can_reach(pair)]
                self._measured = self._ranks.measure(series, reachable)
                self._request = replace(self._everything, pairs=pairs)
                self._matrix(series)
        return self._report(strict=strict)

    def _cell(self, series: Series, pair: Pair) -> Cell:  # noqa: ARG002 - that of the series being shown
        return self._measured.get(pair, Cell())

    def _again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        return self._ranks.measure_again(series, pair, before)
