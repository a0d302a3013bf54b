"""The figures of a run: the verdict on the speed of a row, what the last sentence tells, what checks judge."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES, Pair
from gpubench.model.paths.topology import Topology
from gpubench.model.results.compare import HOST
from gpubench.model.results.report import CollectiveRow, EvidenceRow, PairRow, Row, Verified
from gpubench.model.terms.operation import Direction, Engine, HostMemory, ManagedWay, algbw_gb_s
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.settings import AGAIN
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, counted, format_size, grouped, percent
from gpubench.model.terms.verdict import Finding, Origin, Verdict, overall

_NEAR_SHARE = 0.1  # Of the slowest time that is not slow: nearer rows are measured again
_ALONE_US = 25.0  # Beyond among others, alone by the host's clock: 13 µs on H200, from 5 to 20 on others
_JUDGED_FROM_BYTES = 2**10

ONE_RANK = "one rank: nothing is communicated"  # Why such rows are SKIP: a copy in its own memory
LARGE_BYTES = 64 * 2**20  # From this size on a row is told by its bandwidth, below by its time
_FEW_US = 8.0
"""More than with iterations until the mean is known, few of them may take: the 20 of nccl-tests' loop begin up to 50 µs
apart on different ranks, which is 2.5 µs an operation, and vary by half from run to run below 1 MiB."""

_SMALL_BYTES = 2**20  # Below, an operation takes about as long as the smallest: 10 to 18 µs on 4 H200s


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much slower than expected healthy machines may be: `fail` and `warn` as parts of the time, and µs beside.

    `warn` is None where nothing between as expected and slow is worth a word, and `warned_from` the size in bytes from
    which it counts: from 16 MiB on H200s differ by 3 % from machine to machine, smaller operations by a half.
    `is_least` is that of a time that is no expectation, but the longest of any healthy machine.
    """

    fail: float
    warn: float | None = None
    microseconds: float = 7.0
    warned_from: int = 16 * 2**20
    is_least: bool = False

    def of_slower(self, times: float) -> "Tolerance":
        """The same warnings; to fail, a time must be longer than one that is so many times longer may be unwarned."""
        return self if self.warn is None else replace(self, fail=max(self.fail, times * (1 + self.warn) - 1))

    def of_faster(self, times: float) -> "Tolerance":
        """The same bounds as parts of a time that is so many times shorter."""
        warn = None if self.warn is None else times * (1 + self.warn) - 1
        return replace(self, fail=times * (1 + self.fail) - 1, warn=warn)


MEASURED = Tolerance(0.25, warn=0.11)
"""Of a figure measured on such machines with this NCCL: below 80 % of the busbw fails, below 90 % warns. The 7 µs are
what hosts differ by: broadcast of 1 KiB took 5.2 µs on one host with 4 H200s and 9.2 on another."""

OF_ANOTHER_NCCL = Tolerance(0.5, microseconds=10.0)  # Its algorithms may differ: below two thirds fails
MODELLED = Tolerance(1.0, warn=0.4, microseconds=15.0, warned_from=256 * 2**20)
"""Of one that follows from a model, as that of another number of ranks: below half fails, and below 71 % warns from 256
MiB on. From 4 H200s to 2 the model is wrong by a fifth, of medium sizes by half."""

MODELLED_SENDS = Tolerance(5.0, warn=0.4, microseconds=15.0, warned_from=256 * 2**20)
"""Of sends to one peer that follow from a model: of 16 to 128 MiB NCCL uses few of its channels for a peer, how few
depends on its release and on the number of ranks. On 8 H200s 64 MiB took 4.2 times as long as the largest sizes let
expect."""

_BETWEEN_NODES = {
    2**29: Tolerance(0.7, warn=0.35, microseconds=15.0),
    2**26: Tolerance(2.0, warn=0.6, microseconds=15.0, warned_from=2**26),
    0: Tolerance(4.0, microseconds=15.0),
}


def between_nodes(size_bytes: int) -> Tolerance:
    """That of the model of nodes that NICs join, by size.

    Published healthy machines took 0.8 to 1.5 times as long as it says from 512 MiB on, up to 2.2 times from 64 MiB
    on and up to 2.8 below; two nodes of which one was slow 1.9 (tests/published/collectives.csv). So FAIL is what none
    of the healthy ones was, and WARN what few were.
    """
    return next(tolerance for least, tolerance in _BETWEEN_NODES.items() if size_bytes >= least)


OVER_ETHERNET = Tolerance(3.0, warn=0.8, microseconds=50.0, warned_from=2**26)
"""That of nodes that plain Ethernet joins: what sockets reach depends on cores, MTU and cloud as much as on the NIC.
Two healthy ones are known, and both are as expected: so FAIL is far off."""

OVER_LINKS = Tolerance(3.0, warn=0.8, microseconds=1000.0, warned_from=4 * 2**20)
"""That of CPU buffers that MPI sends between nodes: its algorithms send up to twice what a ring does, and TCP needs
cores. Eight hosts with links of 200 Mb/s took 1.3 times as long as expected for 8 MiB, and 2.6 times for 1 MiB."""

OF_THE_PAST = Tolerance(0.25)  # Of what this machine reached before, and more where it varies
AMONG_SIBLINGS = Tolerance(1.0, microseconds=15.0)  # At the same time: below half of theirs fails
LEAST_KNOWN = Tolerance(0.1, microseconds=15.0, is_least=True)  # The least of any healthy machine on record


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """The time that an operation takes on healthy machines, where that is from, and how far off they may be."""

    time_us: float
    source: str
    tolerance: Tolerance

    def doubted(self, assumed: str) -> "ExpectedTime":
        """The same where something of it is assumed, and says so: what is slow is a warning, and no failure."""
        own = self.tolerance
        least = own.warned_from if own.warn is not None else 0
        warned = replace(own, fail=math.inf, warn=own.fail if own.warn is None else own.warn, warned_from=least)
        return replace(self, source=f"{self.source}; {assumed}", tolerance=warned)

    def most_us(self, row: CollectiveRow) -> float:
        """The longest time of a row that is not slow."""
        more = _ALONE_US if row.mode == Mode.LATENCY else 0.0
        more += _FEW_US if row.ci95_percent is None else 0.0
        return self.time_us * (1 + self.tolerance.fail) + self.tolerance.microseconds + more

    def verdict(self, row: CollectiveRow) -> Verdict:
        """PASS, WARN, FAIL, or INCONCLUSIVE for a time that is slow, and whose 95 % interval reaches what is not."""
        least_us = row.time_us * (1 - min(row.ci95_percent or 0.0, 100.0) / 100)
        if row.time_us > self.most_us(row):
            return Verdict.FAIL if least_us > self.most_us(row) else Verdict.INCONCLUSIVE
        tolerance = self.tolerance
        if tolerance.warn is None or row.size_bytes < tolerance.warned_from or row.mode == Mode.LATENCY:
            return Verdict.PASS
        late = least_us > self.time_us * (1 + tolerance.warn) + tolerance.microseconds
        return Verdict.WARN if late else Verdict.PASS

    def wants_another(self, row: CollectiveRow) -> bool:
        """True if a row should be measured again before it is judged: it is slow, or nearly."""
        return self.verdict(row) is not Verdict.PASS or row.time_us > (1 - _NEAR_SHARE) * self.most_us(row)


def is_judged(row: CollectiveRow) -> bool:
    """True if something is expected of a row from 1 KiB on, and no setting is compared."""
    return row.size_bytes >= _JUDGED_FROM_BYTES and row.setting in (None, AGAIN)


def compared(row: CollectiveRow, expected: ExpectedTime) -> CollectiveRow:
    """The row with what is expected of it, not judged; of a least that is no percentage."""
    factor = row.reached_gb_s / row.algbw_gb_s if row.algbw_gb_s else 0.0
    return replace(
        row,
        expected_us=expected.time_us,
        expected_gb_s=factor * algbw_gb_s(row.size_bytes, expected.time_us / MICROSECONDS_PER_SECOND),
        expected_percent=None if expected.tolerance.is_least else 100 * expected.time_us / row.time_us,
        expected_source=expected.source,
    )


def judged(row: CollectiveRow, expected: ExpectedTime) -> CollectiveRow:
    """The row with what is expected of it, and the verdict on its speed beside that on its data."""
    speed = expected.verdict(row)
    before = [] if row.verdict is None else [Verdict(row.verdict)]
    return replace(compared(row, expected), verdict=overall([*before, speed]))


def is_slow(row: CollectiveRow) -> bool:
    """True if the verdict on a row is one on its speed: its data are right, or were not checked."""
    return row.expected_us is not None and not row.wrong and row.verdict in (Verdict.FAIL, Verdict.WARN)


@dataclass(frozen=True, slots=True)
class Slowness:
    """Rows of one collective that are slow, and the one that shows it best: `worst`."""

    rows: tuple[CollectiveRow, ...]
    worst: CollectiveRow

    @classmethod
    def of(cls, rows: Sequence[CollectiveRow]) -> "Slowness":
        """The slowest beside what is expected stands for all, a large one where there is any."""
        large = [row for row in rows if row.size_bytes >= LARGE_BYTES]
        return cls(tuple(rows), min(large or rows, key=_percent))

    @property
    def severity(self) -> Verdict:
        """The gravest of all rows."""
        return overall(Verdict(row.verdict or Verdict.SKIP) for row in self.rows)

    @property
    def seen(self) -> str:
        """Bandwidth of a large size, time of a small one, and how much of what is expected that is."""
        size = format_size(self.worst.size_bytes)
        return f"{self._figures[0]} ({_percent(self.worst):.0f} % of what is expected) at {size}"

    @property
    def expected(self) -> str:
        """The same of a healthy machine, with its source."""
        return f"{self._figures[1]}, {self.worst.expected_source}"

    @property
    def is_of_small(self) -> bool:
        """True if small sizes, which consist of launches, are slower beside what is expected than large ones."""
        return min(self.rows, key=_percent).size_bytes < _SMALL_BYTES

    def subject(self, where: str) -> str:
        """What is slow: the sizes, the ranks, and where they are."""
        sizes = sorted({row.size_bytes for row in self.rows})
        span = format_size(sizes[0]) if len(sizes) == 1 else f"{format_size(sizes[0])} to {format_size(sizes[-1])}"
        return f"{self.worst.collective} of {span}, {counted(self.worst.ranks, 'rank')} on {where}"

    def __str__(self) -> str:
        return f"{self.worst.collective}: {self.seen}"

    @property
    def _figures(self) -> tuple[str, str]:
        row = self.worst
        if row.size_bytes >= LARGE_BYTES:
            return f"{row.busbw_gb_s:.4g} GB/s", f"{row.expected_gb_s:.4g} GB/s"
        return f"{row.time_us:.4g} µs", f"{row.expected_us:.4g} µs"


def _percent(row: CollectiveRow) -> float:
    return 100 * (row.expected_us or 0.0) / row.time_us


MOST_PERCENT = 110.0
"""Of the limit. NVLink carries 25 GB/s of data a link at a signalling rate of 26.56, which is 106 %; clocks of hosts
and GPUs differ by less than 1 %. No figure of a healthy machine in tests/results or tests/published is above 100 %."""

ABOVE_LIMIT = "above-limit"  # The finding on such figures
_NOTE = "above the limit: a fact of the links or the time is wrong"

LimitedRow = TypeVar("LimitedRow", CollectiveRow, PairRow)


def times_limit(row: CollectiveRow | PairRow) -> float | None:
    """How many times its limit a figure is, where that is well above it; None where it is not, or has no limit.

    Of a collective the low end of the 95 % interval counts. Switches that reduce (SHARP) double what a node's NICs
    allow: an all-reduce between nodes whose algorithm is not known has no limit here. Managed memory moves to the GPU
    that reads it, and is read there.
    """
    if isinstance(row, CollectiveRow):
        may_be_in_switches = row.algorithm is None and row.nodes > 1 and row.collective == "allreduce"
        gb_s = None if may_be_in_switches else row.reached_gb_s / (1 + (row.ci95_percent or 0.0) / 100)
    else:
        gb_s = None if row.engine in _MANAGED else row.bandwidth_gb_s
    if gb_s is None or not row.limit_gb_s:
        return None
    return gb_s / row.limit_gb_s if 100 * gb_s > MOST_PERCENT * row.limit_gb_s else None


_MANAGED = frozenset(each.value for each in ManagedWay if each.is_managed)


def refused_above_limit(row: LimitedRow) -> LimitedRow:
    """The row as an ERROR where its figure is well above its limit: it says nothing of the links; wrong data stay."""
    if times_limit(row) is None:
        return row
    verdicts = [Verdict.ERROR, *([] if row.verdict is None else [Verdict(row.verdict)])]
    return replace(row, verdict=overall(verdicts), note="; ".join(filter(None, (row.note, _NOTE))))


PEER_COPIES, HOST_COPIES = "p2p", "host copies"
COLLECTIVE_NAMES = {
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
    """What was measured, GB/s of it, and what was expected; below 64 MiB `time_us` and `expected_us` tell more.

    `interval_percent` is half of the 95 % confidence interval of its time.
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
    shares_gpus: bool = False
    """Whether its ranks share GPUs, so that nothing can be expected of it."""

    @property
    def is_small(self) -> bool:
        """True if its time tells more than its bandwidth."""
        return self.size_bytes < LARGE_BYTES

    @property
    def command(self) -> str:
        """The command that measures it."""
        return next((command for command, name in COLLECTIVE_NAMES.items() if name == self.what), self.what)

    @property
    def expected_percent(self) -> float | None:
        """Reached of what is expected."""
        return percent(self.gb_s, self.expected_gb_s)


@dataclass(slots=True)
class SpeedFigures:
    """Of each collective its best row, of copies the slowest pair at the largest size; and what is far too slow."""

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
        """True if something was measured and the speed of a largest size was not judged, but for shared GPUs."""
        every = list(self.all())
        collectives = [each for each in self._largest.values() if not each.shares_gpus]
        copies = every[:1] if self._pairs or not collectives else []
        return bool(every) and not all(each.is_judged for each in (*copies, *collectives))

    @property
    def lost_in_noise(self) -> SpeedFigure | None:
        """A collective's best figure, or that of its largest size, that nobody judged and whose interval reaches 0."""
        told = (*self._best.values(), *self._largest.values())
        unjudged = (each for each in told if not each.is_judged)
        return next((each for each in unjudged if (each.interval_percent or 0.0) >= _WHOLE_PERCENT), None)

    def all(self) -> Iterator[SpeedFigure]:
        """Copies between GPUs, else with host memory where no rank has its own GPU; then collectives, as they came."""
        if self._pairs:
            yield self._pairs[max(self._pairs)]
        elif self._host is not None and all(each.shares_gpus for each in self._best.values()):
            yield self._host
        yield from self._best.values()

    def _add_collective(self, row: CollectiveRow) -> None:
        self._note_data(are_verified=row.wrong is not None)
        self.wrong += row.wrong or 0
        self._backend = self._backend or row.backend
        if row.backend != self._backend or row.ranks == 1:
            return  # of several in one table the first is the one that is judged; one rank has no speed
        figure = SpeedFigure(
            what=COLLECTIVE_NAMES.get(row.collective, row.collective),
            gb_s=row.reached_gb_s,
            expected_gb_s=row.expected_gb_s,
            limit_percent=row.limit_percent,
            is_judged=row.expected_source is not None and is_judged(row),
            size_bytes=row.size_bytes,
            time_us=row.time_us,
            expected_us=row.expected_us,
            interval_percent=row.ci95_percent,
            shares_gpus=(row.ranks_per_gpu or 1) > 1,
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
        if verdict not in _BAD or figure.expected_percent is None:
            return
        known = self.slowest
        if known is None or _rank(figure) < _rank(known):
            self.slowest = figure


def _rank(figure: SpeedFigure) -> tuple[bool, bool, float]:
    """A collective says more than copies, a large size more than a small one, and then what is slowest."""
    return figure.what == PEER_COPIES, figure.is_small, figure.expected_percent or 0.0


def is_pinned(row: PairRow) -> bool:
    """True of a large copy that was measured between a GPU and pinned host memory."""
    large = (row.size_bytes or 0) >= JUDGED_FROM_BYTES
    return row.bandwidth_gb_s is not None and large and HostMemory.of_note(row.note) is HostMemory.PINNED


class Need(StrEnum):
    """The input of a check: facts alone, or something that has to be measured."""

    FACTS = "facts"
    PEER_COPIES = "peer copies"
    HOST_COPIES = "host copies"
    HOST_MEMORY = "host memory"
    ALL_REDUCE = "all-reduce"
    VERIFIED_DATA = "verified data"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOnNode:
    """Something that could not be measured on one node of several, and why."""

    node: str
    need: Need
    reason: str


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of a run. `findings` are what measuring itself found out: wrong data, copies that failed,
    host-staged paths with their causes.

    `left_out` says why something was not to be measured (--quick, a single GPU), `failed` why it could not be;
    `failed_on` the same where other nodes were measured.
    """

    pairs: tuple[PairRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    ranks: tuple[RankIdentity, ...] = ()
    evidence: tuple[EvidenceRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    left_out: Mapping[Need, str] = field(default_factory=dict)
    failed: Mapping[Need, str] = field(default_factory=dict)
    failed_on: tuple[FailedOnNode, ...] = ()

    def pairs_from(self, host: str) -> Sequence[PairRow]:
        """The copies out of a node, within it or to another: each of many nodes asks several times."""
        return self._pairs_by_node.get(host, ())

    @cached_property
    def _pairs_by_node(self) -> Mapping[str, Sequence[PairRow]]:
        return grouped(self.pairs, lambda row: row.source_node)

    @cached_property
    def staged(self) -> frozenset[tuple[str, str | None, str | None]]:
        """Pairs that go through host memory: node, and the bus ids of both ends."""
        return frozenset(
            (row.source_node, row.source_bus_id, row.destination_bus_id) for row in self.evidence if row.host_staged
        )


QUICK = Measurements(left_out=dict.fromkeys([need for need in Need if need is not Need.FACTS], "--quick"))
"""Nothing was measured, on purpose."""


BY_CPU = "cpu"  # The engine of copies within host memory


def peer_rows(measured: Measurements, node: Topology) -> dict[Pair, PairRow]:
    """Large copies between two GPUs of a node, by positions, without GPUs that somebody else uses."""
    positions = {gpu.bus_id: position for position, gpu in enumerate(node.gpus) if gpu.bus_id and not is_busy(gpu)}
    staged = measured.staged
    host = node.snapshot.host
    return {
        (positions[row.source_bus_id], positions[row.destination_bus_id]): row
        for row in measured.pairs_from(host)
        if row.destination_node == host
        and row.source_bus_id in positions
        and row.destination_bus_id in positions
        and (row.engine, row.direction) == (Engine.CE, Direction.WRITE)
        and row.bandwidth_gb_s is not None
        and (row.size_bytes or 0) >= JUDGED_FROM_BYTES
        and (is_by_design(row) or row.peer == "on")
        and (is_by_design(row) or (host, row.source_bus_id, row.destination_bus_id) not in staged)
    }


def is_by_design(row: PairRow) -> bool:
    """True of a copy without peer access that is judged: healthy machines have no other way between these GPUs."""
    return row.peer == "off" and row.verdict is not None


def host_rows(measured: Measurements, node: Topology, *, to_gpu: bool) -> list[tuple[GpuFacts, PairRow]]:
    """Large copies between pinned host memory and GPUs of a node that nobody else uses."""
    gpus = {gpu.bus_id: gpu for gpu in node.gpus if gpu.bus_id and not is_busy(gpu)}
    found = []
    for row in measured.pairs_from(node.snapshot.host):
        own, other = (
            (row.destination_bus_id, row.source_bus_id) if to_gpu else (row.source_bus_id, row.destination_bus_id)
        )
        if other is not None or own not in gpus or not is_pinned(row):
            continue
        found.append((gpus[own], row))
    return found


def of_host_memory(host: str, size_bytes: int, seconds: float) -> PairRow:
    """A copy of so many bytes from host memory to host memory of a node, which took so long."""
    return PairRow(
        source=HOST,
        destination=HOST,
        source_bus_id=None,
        destination_bus_id=None,
        source_node=host,
        destination_node=host,
        scope="process",
        origin=Origin.MEASURED,
        engine=BY_CPU,
        size_bytes=size_bytes,
        bandwidth_gb_s=size_bytes / seconds / BYTES_PER_GB,
        latency_us=seconds * MICROSECONDS_PER_SECOND,
        limit_gb_s=None,
        path_class=None,
    )


def memory_row(measured: Measurements, host: str) -> PairRow | None:
    """The copy in the host memory of a node; None where nobody made one."""
    return next((row for row in measured.pairs_from(host) if row.engine == BY_CPU), None)


def is_busy(gpu: GpuFacts) -> bool:
    """True where somebody else uses a GPU: what is measured on it is no fault of it."""
    return bool(gpu.processes) and gpu.idle is not True
