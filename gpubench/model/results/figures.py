"""The figures of a run that its last sentence tells, kept as rows come: of a million rows a few."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpubench.model.paths.p2p import JUDGED_FROM_BYTES
from gpubench.model.results.curves import HOST
from gpubench.model.results.report import CollectiveRow, PairRow, Row, Verified
from gpubench.model.results.speed import LARGE_BYTES, is_judged
from gpubench.model.terms.copies import Direction, Engine, HostMemory
from gpubench.model.terms.units import percent
from gpubench.model.terms.verdict import Verdict

PEER_COPIES, HOST_COPIES = "p2p", "host copies"
_NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sendrecv": "send and receive",
}
_BAD = (Verdict.FAIL, Verdict.WARN)
_WHOLE_PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class SpeedFigure:
    """What was measured, GB/s of it, and what was expected; `is_judged` is whether anything was expected at all.

    Of a size below 64 MiB the time tells more than the bandwidth: `time_us` and `expected_us` are known of it alone.
    `interval_percent` is half of the 95 % confidence interval of its time, where that is known.
    """

    what: str
    gb_s: float
    expected_gb_s: float | None
    limit_percent: float | None
    is_judged: bool
    hosts: tuple[str, ...] = ()
    size_bytes: int = LARGE_BYTES
    time_us: float | None = None
    expected_us: float | None = None
    interval_percent: float | None = None

    @property
    def is_small(self) -> bool:
        """True if its time tells more than its bandwidth."""
        return self.size_bytes < LARGE_BYTES

    @property
    def command(self) -> str:
        """The command that measures it."""
        return next((command for command, name in _NAMES.items() if name == self.what), self.what)

    @property
    def expected_percent(self) -> float | None:
        """Reached of what is expected."""
        return percent(self.gb_s, self.expected_gb_s)


@dataclass(slots=True)
class SpeedFigures:
    """Of each collective its best row, of copies the slowest pair at the largest size; and what is far too slow.

    Where nothing is measured between GPUs, the slowest copy between one and host memory.

    `checked` is whether the data of any row were verified, `unchecked` whether those of any were not.
    """

    slowest: SpeedFigure | None = None
    checked: bool = False
    unchecked: bool = False
    wrong: int = 0
    _best: dict[str, SpeedFigure] = field(default_factory=dict)
    _largest: dict[str, SpeedFigure] = field(default_factory=dict)
    _pairs: dict[tuple[bool, int, bool], SpeedFigure] = field(default_factory=dict)
    _host: SpeedFigure | None = None
    _backend: str | None = None

    def add(self, row: Row) -> None:
        """A row more."""
        if isinstance(row, CollectiveRow):
            self._add_collective(row)
        elif isinstance(row, PairRow):
            self._add_pair(row)

    @property
    def is_unjudged(self) -> bool:
        """True if something was measured, and the speed of a largest size was not judged."""
        every = list(self.all())
        copies = every[:1] if self._pairs or not self._largest else []
        return bool(every) and not all(each.is_judged for each in (*copies, *self._largest.values()))

    @property
    def lost_in_noise(self) -> SpeedFigure | None:
        """A collective's best figure, or that of its largest size, that nobody judged and whose interval reaches 0."""
        told = (*self._best.values(), *self._largest.values())
        unjudged = (each for each in told if not each.is_judged)
        return next((each for each in unjudged if (each.interval_percent or 0.0) >= _WHOLE_PERCENT), None)

    def all(self) -> Iterator[SpeedFigure]:
        """Copies between GPUs first, then collectives, in the order in which they came."""
        if self._pairs:
            yield self._pairs[max(self._pairs)]
        yield from self._best.values()
        if self._host is not None and not self._pairs and not self._best:
            yield self._host

    def _add_collective(self, row: CollectiveRow) -> None:
        self._note_data(are_verified=row.wrong is not None)
        self.wrong += row.wrong or 0
        self._backend = self._backend or row.backend
        if row.backend != self._backend or row.ranks == 1:
            return  # of several in one table the first is the one that is judged; one rank has no speed
        figure = SpeedFigure(
            what=_NAMES.get(row.collective, row.collective),
            gb_s=row.reached_gb_s,
            expected_gb_s=row.expected_gb_s,
            limit_percent=row.limit_percent,
            is_judged=row.expected_source is not None and is_judged(row),
            size_bytes=row.size_bytes,
            time_us=row.time_us,
            expected_us=row.expected_us,
            interval_percent=row.ci95_percent,
        )
        self._note_slow(figure, row.verdict)
        largest = self._largest.get(figure.what)
        if largest is None or (figure.size_bytes, figure.is_judged) > (largest.size_bytes, largest.is_judged):
            self._largest[figure.what] = figure
        best = self._best.get(figure.what)
        if best is None or figure.gb_s > best.gb_s:
            judged_before = best is not None and best.is_judged
            self._best[figure.what] = replace(figure, is_judged=figure.is_judged or judged_before)

    def _add_pair(self, row: PairRow) -> None:
        if row.bandwidth_gb_s is not None:
            self._note_data(are_verified=row.verified in (Verified.LAST, Verified.REPEAT))
        if HOST in (row.source, row.destination):
            self._add_host_copy(row)
            return
        if row.bandwidth_gb_s is None or row.direction == Direction.BOTH:
            return
        figure = SpeedFigure(
            what=PEER_COPIES,
            gb_s=row.bandwidth_gb_s,
            expected_gb_s=row.expected_gb_s,
            limit_percent=row.limit_percent,
            is_judged=row.verdict not in (None, Verdict.SKIP),
            hosts=tuple(dict.fromkeys((row.source_node, row.destination_node))),
            size_bytes=row.size_bytes or 0,
            time_us=row.latency_us,
            expected_us=row.expected_us,
        )
        self._note_slow(figure, row.verdict)
        is_usual = (row.engine, row.direction) == (Engine.CE, Direction.WRITE)
        key = row.peer != "off", row.size_bytes or 0, is_usual
        known = self._pairs.get(key, figure)
        slower = min(known, figure, key=lambda each: each.gb_s)
        self._pairs[key] = replace(slower, is_judged=known.is_judged and figure.is_judged)

    def _add_host_copy(self, row: PairRow) -> None:
        if row.bandwidth_gb_s is None or row.source == row.destination or not is_pinned(row):
            return
        figure = SpeedFigure(
            what=HOST_COPIES,
            gb_s=row.bandwidth_gb_s,
            expected_gb_s=row.expected_gb_s,
            limit_percent=row.limit_percent,
            is_judged=row.verdict not in (None, Verdict.SKIP),
        )
        known = self._host or figure
        slower = min(known, figure, key=lambda each: each.gb_s)
        self._host = replace(slower, is_judged=known.is_judged and figure.is_judged)

    def _note_data(self, *, are_verified: bool) -> None:
        self.checked = self.checked or are_verified
        self.unchecked = self.unchecked or not are_verified

    def _note_slow(self, figure: SpeedFigure, verdict: str | None) -> None:
        """Keep what shows best that the run is slow."""
        if verdict not in _BAD or figure.expected_percent is None:
            return
        known = self.slowest
        if known is None or _slower(figure, known):
            self.slowest = figure


def _slower(one: SpeedFigure, other: SpeedFigure) -> bool:
    return _rank(one) < _rank(other)


def _rank(figure: SpeedFigure) -> tuple[bool, bool, float]:
    """A collective says more than copies, a large size more than a small one, and then what is slowest."""
    return figure.what == PEER_COPIES, figure.is_small, figure.expected_percent or 0.0


def is_pinned(row: PairRow) -> bool:
    """True of a large copy that was measured between a GPU and pinned host memory."""
    large = (row.size_bytes or 0) >= JUDGED_FROM_BYTES
    return row.bandwidth_gb_s is not None and large and HostMemory.of_note(row.note) is HostMemory.PINNED
