"""The verdict on the speed of a row: its time against what is expected, and figures above what links carry."""

import math
from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.terms.operation import ManagedWay, algbw_gb_s
from gpubench.model.terms.settings import AGAIN
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_size, format_time, plural
from gpubench.model.terms.verdict import DOUBTED_FACTOR, Verdict, describe_doubt, worst_verdict

_NEAR_SHARE = 0.1  # Of the slowest time that is not slow: nearer rows are measured again
_ALONE_US = 25.0  # Beyond among others, alone by the host's clock: 13 µs on H200, from 5 to 20 on others

_JUDGED_FROM_BYTES = 2**10

_WHOLE_PERCENT = 100.0


def is_lost_in_noise(interval_percent: float | None) -> bool:
    """True if half of the 95 % interval of a time is as long as the time: a row of any kind is then INCONCLUSIVE."""
    return (interval_percent or 0.0) >= _WHOLE_PERCENT


ONE_RANK = "one rank: nothing is communicated"  # Why such rows are SKIP: a copy in its own memory
LARGE_BYTES = 64 * 2**20  # From this size on a row is told by its bandwidth, below by its time

_FEW_US = 8.0
"""More than with iterations until the mean is known, few of them may take: the 20 of nccl-tests' loop begin up to 50 µs
apart on different ranks, which is 2.5 µs an operation, and vary by half from run to run below 1 MiB."""

_SMALL_BYTES = 2**20  # Below, an operation takes about as long as the smallest: 10 to 18 µs on 4 H200s


class Tolerance(Struct, frozen=True):
    """How much slower than expected healthy machines may be: `fail` and `warn` as parts of the time, and µs beside.

    `warn` is None where nothing between as expected and slow is worth a word, and `warned_from` the size in bytes from
    which it counts: from 16 MiB on H200s differ by 3 % from machine to machine, smaller operations by a half.
    `is_least` is that of a time that is no expectation, but the longest of any healthy machine. A row that is
    `doubted_from` times as fast as expected is a doubt about the expectation.
    """

    fail: float
    warn: float | None = None
    microseconds: float = 7.0
    warned_from: int = 16 * 2**20
    is_least: bool = False
    doubted_from: float = DOUBTED_FACTOR

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

MODELLED = Tolerance(2 / 3, warn=0.4, microseconds=15.0, warned_from=32 * 2**20)
"""Of one that follows from a model, as that of another number of ranks: below 60 % fails, and below 71 % warns from 32
MiB on. Published healthy machines took up to 1.4 times as long (tests/published/collectives.csv). A link at half its
speed, which fails as a copy, fails as an all-reduce too."""

MODELLED_SMALL_BYTES = 16 * 2**20
MODELLED_SMALL = Tolerance(3.0, microseconds=15.0)
"""The same below 16 MiB, where host and release decide: 8 A100s with an old NCCL took 1.4 to 2.6 times as long as the
model says, their all-to-all up to 4.6 times."""

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


_WHOLE_LINK = 2.0
"""Sockets are expected to reach 52 % of a link, so a full link is 1.9 times as fast as expected."""

OVER_ETHERNET = Tolerance(3.0, warn=0.8, microseconds=50.0, warned_from=2**26, doubted_from=_WHOLE_LINK)
"""That of nodes that plain Ethernet joins: what sockets reach depends on cores, MTU and cloud as much as on the NIC.
Two healthy ones are known, and both are as expected: so FAIL is far off."""

OVER_LINKS = Tolerance(3.0, warn=0.8, microseconds=1000.0, warned_from=4 * 2**20, doubted_from=_WHOLE_LINK)
"""That of CPU buffers that MPI sends between nodes: its algorithms send up to twice what a ring does, and TCP needs
cores. Eight hosts with links of 200 Mb/s took 1.3 times as long as expected for 8 MiB, and 2.6 times for 1 MiB."""

OF_THE_PAST = Tolerance(0.25)  # Of what this machine reached before, and more where it varies
AMONG_SIBLINGS = Tolerance(1.0, microseconds=15.0)  # At the same time: below half of theirs fails
LEAST_KNOWN = Tolerance(0.1, microseconds=15.0, is_least=True)  # The least of any healthy machine on record


class ExpectedTime(Struct, frozen=True):
    """The time that an operation takes on healthy machines, where that is from, and how far off they may be."""

    time_us: float
    source: str
    tolerance: Tolerance

    def doubt(self, row: CollectiveRow) -> str:
        """In words that the expectation does not fit: a row is far faster, or large, far slower and passes; else ''."""
        slowest_us = row.time_us * (1 + (row.ci95_percent or 0.0) / 100) + self.tolerance.microseconds
        is_late = row.size_bytes >= LARGE_BYTES and row.time_us > DOUBTED_FACTOR * self.time_us
        is_fast = self.time_us > self.tolerance.doubted_from * slowest_us
        if self.tolerance.is_least or not (is_fast or (is_late and self.verdict(row) is Verdict.PASS)):
            return ""
        return describe_doubt(self.time_us / row.time_us, self.source)

    def doubted(self, assumed: str) -> "ExpectedTime":
        """The same where something of it is assumed, and says so: what is slow is a warning, and no failure."""
        own = self.tolerance
        least = own.warned_from if own.warn is not None else 0
        warned = replace(own, fail=math.inf, warn=own.fail if own.warn is None else own.warn, warned_from=least)
        return replace(self, source=f"{self.source}; {assumed}", tolerance=warned)

    def launched_in_turn(self, gpus: int, launch_us: float) -> "ExpectedTime":
        """The same with room for a thread that launches on several GPUs, one after another."""
        own = self.tolerance
        return replace(self, tolerance=replace(own, microseconds=own.microseconds + gpus * launch_us))

    def most_us(self, row: CollectiveRow) -> float:
        """The longest time of a row that is not slow."""
        more = _ALONE_US if row.mode == Mode.LATENCY else 0.0
        more += _FEW_US if row.ci95_percent is None else 0.0
        return self.time_us * (1 + self.tolerance.fail) + self.tolerance.microseconds + more

    def verdict(self, row: CollectiveRow) -> Verdict:
        """PASS, WARN, FAIL, or INCONCLUSIVE: slow with an interval that reaches what is not, or lost in noise."""
        if is_lost_in_noise(row.ci95_percent):
            return Verdict.INCONCLUSIVE
        least_us = row.time_us * (1 - (row.ci95_percent or 0.0) / 100)
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


LAUNCH_US, LAUNCH_OF_SENDS_US = 6.0, 11.0
"""The longest published launch on one of several GPUs of one thread (nccl-tests -g N), whose ranks start one after
another: 3.3 to 5.9 µs per GPU (4 V100s and H100s, 8 A100s and RTX 5090s), of sends 5.3 to 10.9."""

_ALLTOALLV = "alltoallv"  # nobody has published what it takes at which skew


def is_judged(row: CollectiveRow) -> bool:
    """True if something is expected of a row from 1 KiB on, and no setting is compared."""
    return row.size_bytes >= _JUDGED_FROM_BYTES and row.setting in (None, AGAIN) and row.collective != _ALLTOALLV


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
    """The row with what is expected of it, and the verdict on its speed beside that on its data.

    A row that no expectation fits stays as it is, with a note: nobody knows what to expect of it.
    """
    doubted = expected.doubt(row)
    if doubted:
        return replace(row, note="; ".join(filter(None, (row.note, doubted))))
    speed = expected.verdict(row)
    before = [] if row.verdict is None else [Verdict(row.verdict)]
    return replace(compared(row, expected), verdict=worst_verdict([*before, speed]))


def is_slow(row: CollectiveRow) -> bool:
    """True if the verdict on a row is one on its speed: its data are right, or were not checked."""
    return row.expected_us is not None and not row.wrong and row.verdict in (Verdict.FAIL, Verdict.WARN)


class Slowness(Struct, frozen=True):
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
        return worst_verdict(Verdict(row.verdict or Verdict.SKIP) for row in self.rows)

    @property
    def percent(self) -> float:
        """The share of the expected speed that the worst row reaches."""
        return _percent(self.worst)

    @property
    def seen(self) -> str:
        """Bandwidth of a large size, time of a small one, and how much of what is expected that is."""
        size = format_size(self.worst.size_bytes)
        return f"{self._figures[0]} ({self.percent:.0f} % of what is expected) at {size}"

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
        return f"{self.worst.collective} of {span}, {plural(self.worst.ranks, 'rank')} on {where}"

    def __str__(self) -> str:
        return f"{self.worst.collective}: {self.seen}"

    @property
    def _figures(self) -> tuple[str, str]:
        row = self.worst
        if row.size_bytes >= LARGE_BYTES:
            return f"{row.busbw_gb_s:.4g} GB/s", f"{row.expected_gb_s:.4g} GB/s"
        return format_time(row.time_us), format_time(row.expected_us or 0.0)


def _percent(row: CollectiveRow) -> float:
    return 100 * (row.expected_us or 0.0) / row.time_us


MOST_PERCENT = 110.0
"""Of the limit. NVLink carries 25 GB/s of data a link at a signalling rate of 26.56, which is 106 %; clocks of hosts
and GPUs differ by less than 1 %. No figure of a healthy machine in tests/results or tests/published is above 100 %."""

ABOVE_LIMIT = "above-limit"  # The finding on such figures
TOO_NOISY = "figures-too-noisy"  # The finding on rows that noise hides
SLOW_RANGE = "slow-range"  # The finding on neighbouring sizes that are slower than the others

_NOTE = "above the limit: a fact of the links or the time is wrong"

LimitedRow = TypeVar("LimitedRow", CollectiveRow, PairRow)


def times_limit(row: CollectiveRow | PairRow) -> float | None:
    """How many times its limit a figure is, where that is well above it; None where it is not, or has no limit.

    Of a collective the low end of the 95 % interval counts. Switches that reduce (SHARP) double what a node's NICs
    allow: an all-reduce between nodes whose algorithm is not known has no limit here. Managed memory moves to the GPU
    that reads it, and is read there.
    """
    if isinstance(row, PairRow):
        return copies_times_limit(row.bandwidth_gb_s, row.limit_gb_s, row.engine)
    may_be_in_switches = row.algorithm is None and row.nodes > 1 and row.collective == "allreduce"
    gb_s = None if may_be_in_switches else row.reached_gb_s / (1 + (row.ci95_percent or 0.0) / 100)
    return copies_times_limit(gb_s, row.limit_gb_s)


def copies_times_limit(gb_s: float | None, limit_gb_s: float | None, engine: str | None = None) -> float | None:
    """As `times_limit`, of the columns of a pair."""
    if gb_s is None or not limit_gb_s or 100 * gb_s <= MOST_PERCENT * limit_gb_s or engine in _MANAGED:
        return None
    return gb_s / limit_gb_s


_MANAGED = frozenset(each.value for each in ManagedWay if each.is_managed)


def refused_above_limit(row: LimitedRow) -> LimitedRow:
    """The row as an ERROR where its figure is well above its limit: it says nothing of the links; wrong data stay."""
    if times_limit(row) is None:
        return row
    verdicts = [Verdict.ERROR, *([] if row.verdict is None else [Verdict(row.verdict)])]
    return replace(row, verdict=worst_verdict(verdicts), note="; ".join(filter(None, (row.note, _NOTE))))
