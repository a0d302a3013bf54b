"""Measure copies between the GPUs of every ordered pair of ranks, disjoint pairs at once, verified by their owners."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from gpubench.errors import CouldNotMeasureError
from gpubench.measure.p2p.request import Bench, Copy, P2pRequest, PairCopy, label, random_data
from gpubench.measure.paths.counters import CounterReading, Meter
from gpubench.measure.paths.idle_window import IdleWindow
from gpubench.measure.paths.nccl_log_listener import NcclLogListener
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.paths.p2p import LATENCY_BYTES, Carried, Cell, Pair, Series, rounds
from gpubench.model.paths.selection import Selection
from gpubench.model.paths.transport import Transport
from gpubench.model.terms.copies import Direction
from gpubench.model.terms.data_pattern import POISON, Block, DataPattern
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.group import Group
from gpubench.ports.library_log import LibraryLog
from gpubench.ports.link_counters import LinkCounters
from gpubench.ports.memory import Memory
from gpubench.ports.rank_copies import RankCopies

T = TypeVar("T")

_OWN_GPU = 0
"""Each rank counts what its one GPU carries."""

_STEPS = 6
"""Of a round: copies to learn how long one takes, samples, fresh data, the last sample, its counters, its check."""


@dataclass(frozen=True, slots=True)
class _Offer:
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
        return Selection(self.group.gather(listener.selection()), ()).of_sends(pairs).pairs

    def _matrix(self, series: Series, pairs: Sequence[Pair], phase: Phase = Phase.OPERATION) -> dict[Pair, Cell]:
        cells: dict[Pair, Cell] = {}
        wanted, met = set(pairs), rounds(self.group.size)
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
        """The cells of each pair, the same on every rank.

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
        """Seconds a copy in each sample, on the rank that makes them; on its partner nothing, but over a network."""
        copies, series, (source, destination) = self._bench.copies, self._series, pair
        is_source = self._bench.group.rank == source
        own = self._buffers[0 if is_source else 1]
        if series.network:
            peer = destination if is_source else source
            copy = partial(copies.exchange, own, peer, series.size_bytes, repeats, sends=is_source)
        elif is_source == (series.direction is Direction.WRITE):
            other = self._bench.offers[destination].arrived if is_source else self._bench.offers[source].sent
            copy = partial(copies.copy, own, other, series.direction, series.size_bytes, repeats)
        else:
            return ()
        return tuple(copy() / repeats for _ in range(samples))

    def _prepare(self, pair: Pair) -> None:
        """Fresh data to send, and nothing that could pass for it where it is to arrive."""
        (sent, arrived), is_source = self._buffers, self._bench.group.rank == pair[0]
        if self._bench.request.check and is_source:
            sent.fill_sent(*self._data(), pair[0])
        elif self._bench.request.check:
            arrived.fill_byte(self._series.size_bytes, POISON)
        if is_source and not self._series.network:
            self._reading = self._bench.meter.read(_OWN_GPU)

    def _carried(self, pair: Pair, repeats: int) -> Carried | None:
        """The count of the source's links, on its rank; none of what NCCL sends its own way."""
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
        return random_data(self._series.size_bytes, self._bench.row, self._bench.group.size)


def _slower(samples: Sequence[tuple[float, ...] | None], pair: Pair) -> tuple[float, ...]:
    """Each sample by the rank of a pair that took longer, where both have one."""
    both = [found for found in (samples[rank] for rank in pair) if found]
    return tuple(max(each) for each in zip(*both, strict=True))


def _words(error: CouldNotMeasureError) -> str:
    return "; ".join(filter(None, (error.seen, error.reason)))
