"""The verdict on the speed of a row: its time compared with the expected time, and values above the links' limit."""

import math
from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.terms.operation import ManagedWay, algbw_gb_s
from gpubench.model.terms.settings import AGAIN
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_bandwidth, format_size, format_time, plural
from gpubench.model.terms.verdict import DOUBTED_FACTOR, Verdict, describe_doubt, worst_verdict

_NEAR_SHARE = 0.1  # Repeat rows whose time is within this share of the slowest acceptable time
_ALONE_US = 25.0  # Extra time if the host's clock times each operation separately: 13 µs on H200, 5 to 20 µs elsewhere

_JUDGED_FROM_BYTES = 2**10

_WHOLE_PERCENT = 100.0


def is_lost_in_noise(interval_percent: float | None) -> bool:
    """Return whether half of the 95 % confidence interval is at least as long as the time. Such a row is
    INCONCLUSIVE.
    """
    return (interval_percent or 0.0) >= _WHOLE_PERCENT


ONE_RANK = "one rank: there is no communication"  # Why such rows are SKIP: they only copy within the rank's memory
LARGE_BYTES = 64 * 2**20  # Reports show bandwidth from this size on, and time below it

_FEW_US = 8.0
"""Extra time in microseconds for a fixed number of iterations. nccl-tests runs 20 iterations, and its ranks start
up to 50 µs apart. This adds 2.5 µs per operation. Times below 1 MiB vary by half from run to run.
"""

_SMALL_BYTES = 2**20  # Smaller operations take about as long as the smallest ones: 10 to 18 µs on 4 H200s


class Tolerance(Struct, frozen=True):
    """How much slower than expected a healthy machine may be. A row fails above (1 + `fail`) × expected +
    `microseconds`.

    Rows of at least `warned_from` bytes warn in the same way by `warn`. None means no warnings. H200 machines differ by
    3 % from 16 MiB on, and by half below. If `is_least` is set, the time is not expected, but the slowest of any
    healthy machine. A row that is `doubted_from` times faster than expected makes the expectation doubtful.
    """

    fail: float
    warn: float | None = None
    microseconds: float = 7.0
    warned_from: int = 16 * 2**20
    is_least: bool = False
    doubted_from: float = DOUBTED_FACTOR

    def allow_slower(self, times: float) -> "Tolerance":
        """Return a tolerance that fails only rows that are slower than this factor times the limit for warnings."""
        return self if self.warn is None else replace(self, fail=max(self.fail, times * (1 + self.warn) - 1))

    def scale_to_faster(self, times: float) -> "Tolerance":
        """Adjust the shares to an expected time that is shorter by this factor, so that the bounds stay the same."""
        warn = None if self.warn is None else times * (1 + self.warn) - 1
        return replace(self, fail=times * (1 + self.fail) - 1, warn=warn)


MEASURED = Tolerance(0.25, warn=0.11)
"""For expectations measured on the same machine type with the same NCCL version. Below 80 % of the bus bandwidth a
row fails, and below 90 % it warns. Hosts differ by 7 µs: a broadcast of 1 KiB took 5.2 µs on one host with 4
H200s and 9.2 µs on another.
"""

# Another NCCL version may select other algorithms, so rows fail only below two thirds of the expected speed
OF_ANOTHER_NCCL = Tolerance(0.5, microseconds=10.0)

MODELLED = Tolerance(2 / 3, warn=0.4, microseconds=15.0, warned_from=32 * 2**20)
"""For expectations from a model, for example for another number of ranks. Rows fail below 60 %, and from 32 MiB on
they warn below 71 %. Published healthy machines took up to 1.4 times as long (tests/published/collectives.csv).
A link at half its speed fails both as a copy and as an all-reduce.
"""

MODELLED_SMALL_BYTES = 16 * 2**20
MODELLED_SMALL = Tolerance(3.0, microseconds=15.0)
"""For expectations from a model below 16 MiB, where host and NCCL version matter. 8 A100s with an old NCCL took 1.4
to 2.6 times as long as the model, and up to 4.6 times for all-to-all.
"""

MODELLED_SENDS = Tolerance(5.0, warn=0.4, microseconds=15.0, warned_from=256 * 2**20)
"""For expectations from a model of sends to a single peer. From 16 to 128 MiB, NCCL uses few channels per peer.
Their number depends on the NCCL version and the number of ranks. On 8 H200s, 64 MiB took 4.2 times as long as
the largest sizes suggest.
"""

_BETWEEN_NODES = {
    2**29: Tolerance(0.7, warn=0.35, microseconds=15.0),
    2**26: Tolerance(2.0, warn=0.6, microseconds=15.0, warned_from=2**26),
    0: Tolerance(4.0, microseconds=15.0),
}


def between_nodes(size_bytes: int) -> Tolerance:
    """Return the tolerance for expectations from the model of several nodes, by size.

    Compared with the model, published healthy machines took 0.8 to 1.5 times as long from 512 MiB on. They took up to
    2.2 times as long from 64 MiB on, and up to 2.8 times below. Two nodes, one of them slow, took 1.9 times as long
    (tests/published/collectives.csv). So FAIL is above all healthy machines, and WARN above most.
    """
    return next(tolerance for least, tolerance in _BETWEEN_NODES.items() if size_bytes >= least)


_WHOLE_LINK = 2.0
"""The expected bandwidth of sockets is 52 % of the link, so a full link is 1.9 times as fast as expected."""

OVER_ETHERNET = Tolerance(3.0, warn=0.8, microseconds=50.0, warned_from=2**26, doubted_from=_WHOLE_LINK)
"""For nodes connected by plain Ethernet. The speed of sockets depends on CPU cores, MTU and cloud provider as much
as on the NIC. Only two healthy measurements are known. Both are as fast as expected, so FAIL has a wide margin.
"""

OVER_LINKS = Tolerance(3.0, warn=0.8, microseconds=1000.0, warned_from=4 * 2**20, doubted_from=_WHOLE_LINK)
"""For CPU buffers that MPI sends between nodes. MPI's algorithms send up to twice as much data as a ring, and TCP
needs CPU cores. Eight hosts with links of 200 Mb/s took 1.3 times as long as expected for 8 MiB, and 2.6 times
for 1 MiB.
"""

OF_THE_PAST = Tolerance(0.25)  # For expectations from earlier results of this machine. Noise widens it
# For groups of ranks measured at the same time. A group fails below half the speed of the others
AMONG_SIBLINGS = Tolerance(1.0, microseconds=15.0)
LEAST_KNOWN = Tolerance(0.1, microseconds=15.0, is_least=True)  # For the slowest healthy machine on record


class ExpectedTime(Struct, frozen=True):
    """The expected time of an operation on healthy machines in microseconds, with its source and tolerance."""

    time_us: float
    source: str
    tolerance: Tolerance

    def doubt(self, row: CollectiveRow) -> str:
        """Return why the expectation does not fit a row, or ''.

        It does not fit if the row is much faster, or if it passes although it is much slower.
        """
        slowest_us = row.time_us * (1 + (row.ci95_percent or 0.0) / 100) + self.tolerance.microseconds
        slack_us = 0.0 if row.size_bytes >= LARGE_BYTES else self.tolerance.microseconds
        is_late = row.time_us > DOUBTED_FACTOR * self.time_us + slack_us
        is_fast = self.time_us > self.tolerance.doubted_from * slowest_us
        if self.tolerance.is_least or not (is_fast or (is_late and self.verdict(row) is Verdict.PASS)):
            return ""
        return describe_doubt(self.time_us / row.time_us, self.source)

    def doubted(self, assumed: str) -> "ExpectedTime":
        """Return a copy whose source mentions an assumption. Slow rows then warn instead of failing."""
        own = self.tolerance
        least = own.warned_from if own.warn is not None else 0
        warned = replace(own, fail=math.inf, warn=own.fail if own.warn is None else own.warn, warned_from=least)
        return replace(self, source=f"{self.source}; {assumed}", tolerance=warned)

    def add_launch_time(self, gpus: int, launch_us: float) -> "ExpectedTime":
        """Return a copy that allows for a single thread that launches on several GPUs, one after another."""
        own = self.tolerance
        return replace(self, tolerance=replace(own, microseconds=own.microseconds + gpus * launch_us))

    def most_us(self, row: CollectiveRow) -> float:
        """Return the longest time in microseconds that does not fail."""
        more = _ALONE_US if row.mode == Mode.LATENCY else 0.0
        more += _FEW_US if row.ci95_percent is None else 0.0
        return self.time_us * (1 + self.tolerance.fail) + self.tolerance.microseconds + more

    def verdict(self, row: CollectiveRow) -> Verdict:
        """Return PASS, WARN, FAIL or INCONCLUSIVE.

        INCONCLUSIVE means that noise hides the time, or that the confidence interval of a slow row includes acceptable
        times.
        """
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

    def needs_repetition(self, row: CollectiveRow) -> bool:
        """Return whether to repeat a row before it is judged, because it is slow or nearly slow."""
        return self.verdict(row) is not Verdict.PASS or row.time_us > (1 - _NEAR_SHARE) * self.most_us(row)


LAUNCH_US, LAUNCH_OF_SENDS_US = 6.0, 11.0
"""The longest published launch time per GPU in microseconds if one thread launches on all GPUs (nccl-tests -g N).
It was 3.3 to 5.9 µs on 4 V100s and H100s, 8 A100s and RTX 5090s, and 5.3 to 10.9 µs for sends.
"""

_ALLTOALLV = "alltoallv"  # Not judged, because no published times exist for any skew


def is_judged(row: CollectiveRow) -> bool:
    """Return whether the speed of a row can be judged: not below 1 KiB, for settings under comparison, or for
    alltoallv.
    """
    return row.size_bytes >= _JUDGED_FROM_BYTES and row.setting in (None, AGAIN) and row.collective != _ALLTOALLV


def add_expectation(row: CollectiveRow, expected: ExpectedTime) -> CollectiveRow:
    """Add the expected time and bandwidth to a row, without a verdict.

    If the expected time is the slowest on record, add no percentage.
    """
    factor = row.reached_gb_s / row.algbw_gb_s if row.algbw_gb_s else 0.0
    return replace(
        row,
        expected_us=expected.time_us,
        expected_gb_s=factor * algbw_gb_s(row.size_bytes, expected.time_us / MICROSECONDS_PER_SECOND),
        expected_percent=None if expected.tolerance.is_least else 100 * expected.time_us / row.time_us,
        expected_source=expected.source,
    )


def judge_row(row: CollectiveRow, expected: ExpectedTime) -> CollectiveRow:
    """Add the expected time to a row, and merge the verdict on its speed with the one on its data.

    If the expectation does not fit the row, only add a note.
    """
    doubted = expected.doubt(row)
    if doubted:
        return replace(row, note="; ".join(filter(None, (row.note, doubted))))
    speed = expected.verdict(row)
    before = [] if row.verdict is None else [Verdict(row.verdict)]
    return replace(add_expectation(row, expected), verdict=worst_verdict([*before, speed]))


def is_slow(row: CollectiveRow) -> bool:
    """Return whether a row fails or warns because of its speed, not because of its data."""
    return row.expected_us is not None and not row.wrong and row.verdict in (Verdict.FAIL, Verdict.WARN)


class Slowness(Struct, frozen=True):
    """The slow rows of one collective. `worst` is the row that shows the problem best."""

    rows: tuple[CollectiveRow, ...]
    worst: CollectiveRow

    @classmethod
    def of(cls, rows: Sequence[CollectiveRow]) -> "Slowness":
        """Select the slowest row relative to its expectation as `worst`, from large sizes if there are any."""
        large = [row for row in rows if row.size_bytes >= LARGE_BYTES]
        return cls(tuple(rows), min(large or rows, key=_percent))

    @property
    def severity(self) -> Verdict:
        """The worst verdict of the rows."""
        return worst_verdict(Verdict(row.verdict or Verdict.SKIP) for row in self.rows)

    @property
    def percent(self) -> float:
        """The speed of the worst row as a percentage of the expected speed."""
        return _percent(self.worst)

    @property
    def seen(self) -> str:
        """The measured bandwidth of a large size, or time of a small one, with the percentage of the expected speed."""
        size = format_size(self.worst.size_bytes)
        return f"{self._figures[0]} ({self.percent:.0f} % of expected) at {size}"

    @property
    def expected(self) -> str:
        """The expected bandwidth of a large size, or time of a small one, with its source."""
        return f"{self._figures[1]}, {self.worst.expected_source}"

    @property
    def is_of_small(self) -> bool:
        """Whether the row furthest from its expectation is so small that launches dominate its time."""
        return min(self.rows, key=_percent).size_bytes < _SMALL_BYTES

    def subject(self, where: str) -> str:
        """Return the subject of a finding: the collective, its sizes, the ranks and the place."""
        sizes = sorted({row.size_bytes for row in self.rows})
        span = format_size(sizes[0]) if len(sizes) == 1 else f"{format_size(sizes[0])} to {format_size(sizes[-1])}"
        return f"{self.worst.collective} of {span}, {plural(self.worst.ranks, 'rank')} on {where}"

    def __str__(self) -> str:
        return f"{self.worst.collective}: {self.seen}"

    @property
    def _figures(self) -> tuple[str, str]:
        row = self.worst
        if row.size_bytes >= LARGE_BYTES:
            return format_bandwidth(row.busbw_gb_s or 0.0, 4), format_bandwidth(row.expected_gb_s or 0.0, 4)
        return format_time(row.time_us), format_time(row.expected_us or 0.0)


def _percent(row: CollectiveRow) -> float:
    return 100 * (row.expected_us or 0.0) / row.time_us


MOST_PERCENT = 110.0
"""Percent of the limit above which a value is impossible. NVLink carries 25 GB/s of data per link at a signalling
rate of 26.56 GB/s, which is 106 %. Host and GPU clocks differ by less than 1 %. No healthy machine in
tests/results or tests/published exceeds 100 %.
"""

ABOVE_LIMIT = "above-limit"  # ID of the finding on values above the limit
TOO_NOISY = "figures-too-noisy"  # ID of the finding on rows that noise hides
SLOW_RANGE = "slow-range"  # ID of the finding on adjacent sizes that are slower than the others

_NOTE = "above the limit: the links' facts or the time is wrong"

LimitedRow = TypeVar("LimitedRow", CollectiveRow, PairRow)


def times_limit(row: CollectiveRow | PairRow) -> float | None:
    """Return the bandwidth divided by its limit if that is clearly above 1. Return None otherwise, or without a
    limit.

    For collectives, use the lower end of the 95 % confidence interval. Switches that reduce (SHARP) double the
    bandwidth that a node's NICs allow. So an all-reduce between nodes has no limit if its algorithm is unknown. Managed
    memory has no limit, because it migrates to the GPU that reads it.
    """
    if isinstance(row, PairRow):
        return copies_times_limit(row.bandwidth_gb_s, row.limit_gb_s, row.engine)
    may_be_in_switches = row.algorithm is None and row.nodes > 1 and row.collective == "allreduce"
    gb_s = None if may_be_in_switches else row.reached_gb_s / (1 + (row.ci95_percent or 0.0) / 100)
    return copies_times_limit(gb_s, row.limit_gb_s)


def copies_times_limit(gb_s: float | None, limit_gb_s: float | None, engine: str | None = None) -> float | None:
    """Do the same as `times_limit`, for the columns of a pair."""
    if gb_s is None or not limit_gb_s or 100 * gb_s <= MOST_PERCENT * limit_gb_s or engine in _MANAGED:
        return None
    return gb_s / limit_gb_s


_MANAGED = frozenset(way.value for way in ManagedWay if way.is_managed)


def refuse_above_limit(row: LimitedRow) -> LimitedRow:
    """Set the verdict of a row clearly above its limit to ERROR, unless its data is wrong."""
    if times_limit(row) is None:
        return row
    verdicts = [Verdict.ERROR, *([] if row.verdict is None else [Verdict(row.verdict)])]
    return replace(row, verdict=worst_verdict(verdicts), note="; ".join(filter(None, (row.note, _NOTE))))
