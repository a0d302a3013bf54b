"""The cases of a sweep, the timing of each case, and the times on every rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from statistics import fmean
from time import perf_counter
from typing import Annotated

from msgspec import Meta, field
from msgspec.structs import replace

from gpubench.collectives.record import Asked, SweepRequest
from gpubench.model.facts.process import GpuCondition
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.results.report import CollectiveRow, RankTimeRow, Section, Table, Verified, make_record
from gpubench.model.results.speed import ONE_RANK
from gpubench.model.terms.operation import (
    DataType,
    Layout,
    Placement,
    ReduceOp,
    algbw_gb_s,
    choose_kernel,
    describe_composition,
)
from gpubench.model.terms.plain import Count, MeasuredSeconds, Seconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.ranks import RankGroup, RankIdentity, count_nccl_hosts, ranks_per_gpu
from gpubench.model.terms.statistics import (
    FIRST_BATCHES,
    INTERVAL,
    BatchTimes,
    ClockOffset,
    Effort,
    EntryTimes,
    Mode,
    Percentiles,
    RankTimes,
    Sampling,
    Spread,
    Straggler,
    convert_to_rank0_clock,
    find_straggler,
    operations_per_batch,
)
from gpubench.model.terms.units import (
    MICROSECONDS_PER_SECOND,
    DroppedSize,
    compress_names,
    format_ranges,
    format_size,
    format_time,
)
from gpubench.model.terms.verdict import STRAGGLER, Cure, Finding, Origin, Verdict
from gpubench.ports.backend import IssueClock, Launch, LaunchTimer
from gpubench.ports.group import Group


class Case(Struct, frozen=True):
    """One row to measure. `setting` is the variant's name, and `registered` how the library registered the buffers."""

    dtype: DataType
    op: ReduceOp | None
    placement: Placement
    layout: Layout
    setting: str | None = None
    registered: str | None = None

    @property
    def size_bytes(self) -> int:
        """The size as nccl-tests counts it: the larger of a rank's two buffers, after rounding."""
        return self.layout.largest * self.dtype.size_bytes

    @property
    def label(self) -> str:
        placed = f"{format_size(self.size_bytes)} {self.placement.replace('_', ' ')}"
        return placed if self.setting is None else f"{placed}, {self.setting}"


class JobFacts(Struct, frozen=True):
    """The columns that are the same in every row of a job. `ranks_per_gpu` is None without GPUs."""

    backend: str
    origin: Origin
    ranks: int
    nodes: int
    ranks_per_gpu: int | None = None

    @classmethod
    def of(cls, backend: str, origin: Origin, ranks: Sequence[RankIdentity]) -> "JobFacts":
        """Return the facts of a group of ranks. Nodes are counted by the host names that NCCL uses."""
        return cls(backend, origin, len(ranks), count_nccl_hosts(ranks), ranks_per_gpu(ranks))


def cases(request: SweepRequest, ranks: int) -> Iterator[Case]:
    """Yield the cases in the order in which they are measured."""
    ops: tuple[ReduceOp | None, ...] = request.ops if request.collective.reduces else (None,)
    for dtype in request.dtypes:
        for op in ops:
            for size in request.sizes:
                laid_out = layout(request, size, dtype, ranks)
                for placement in request.placements:
                    yield Case(dtype, op, placement, laid_out)


def layout(request: SweepRequest, size_bytes: int, dtype: DataType, ranks: int) -> Layout:
    return request.collective.layout(size_bytes // dtype.size_bytes, dtype, ranks)


def drop_empty_sizes(request: SweepRequest, sizes: Sequence[int], ranks: int) -> tuple[DroppedSize, ...]:
    """Return the sizes that are too small to give every rank an element, with the reason."""
    empty = {size: dtype for size in sizes for dtype in request.dtypes if not layout(request, size, dtype, ranks).count}
    return tuple(
        DroppedSize(size, f"a rank's share rounds down to 0 elements of {dtype} on {ranks} ranks")
        for size, dtype in empty.items()
    )


def describe(
    request: SweepRequest, case: Case, job: JobFacts, times: "OwnTimes", ranks: RankTimes, wrong: int
) -> CollectiveRow:
    """Return the row for a case from this rank's times and the times of all ranks.

    Wrong elements count even if the request does not check data, because a recording can contain them.
    """
    collective = request.collective
    algbw = algbw_gb_s(case.size_bytes, ranks.mean_seconds)
    if not request.check:
        verified = Verified.NO
    else:
        verified = Verified.REPEAT if case.placement is Placement.IN_PLACE else Verified.LAST
    batches, percentiles = times.batches, times.percentiles
    kernel = choose_kernel(job.backend, case.size_bytes, case.setting)
    parts = describe_composition(job.backend, collective.name, case.dtype, case.op, case.placement, kernel)
    return CollectiveRow(
        collective=collective.row_name or collective.name,
        backend=job.backend,
        origin=job.origin,
        ranks=job.ranks,
        nodes=job.nodes,
        size_bytes=case.size_bytes,
        count=case.layout.count,
        dtype=case.dtype,
        op=case.op,
        root=request.root if collective.rooted else None,
        placement=case.placement,
        mode=request.sampling.mode,
        graph=request.graph_replays,
        iterations=times.iterations,
        time_us=ranks.mean_seconds * MICROSECONDS_PER_SECOND,
        time_us_fastest_rank=ranks.fastest_seconds * MICROSECONDS_PER_SECOND,
        time_us_slowest_rank=ranks.slowest_seconds * MICROSECONDS_PER_SECOND,
        slowest_rank=ranks.slowest_rank,
        algbw_gb_s=algbw,
        busbw_gb_s=None if job.ranks == 1 else algbw * collective.busbw_factor(job.ranks),
        wrong=wrong if request.check or wrong else None,
        verified=verified,
        verdict=_verdict(request, job, wrong),
        note="; ".join(filter(None, (ONE_RANK if job.ranks == 1 else None, times.note, parts))) or None,
        ranks_per_gpu=job.ranks_per_gpu,
        setting=case.setting,
        algorithm=kernel,
        registered=case.registered,
        skew=request.skew,
        ci95_percent=None if times.interval is None else 100 * times.interval,
        batch_median_us=None if batches is None else batches.median_seconds * MICROSECONDS_PER_SECOND,
        batch_cv=None if batches is None else batches.variation,
        p50_us=None if percentiles is None else percentiles.p50_seconds * MICROSECONDS_PER_SECOND,
        p95_us=None if percentiles is None else percentiles.p95_seconds * MICROSECONDS_PER_SECOND,
        p99_us=None if percentiles is None else percentiles.p99_seconds * MICROSECONDS_PER_SECOND,
    )


def _verdict(request: SweepRequest, job: JobFacts, wrong: int) -> Verdict | None:
    if wrong:
        return Verdict.FAIL
    return Verdict.SKIP if job.ranks == 1 else Verdict.PASS if request.check else None


RECORDING_VERSION = 1


class RunOptions(Struct, frozen=True, kw_only=True):
    """Options that appear in the metadata but do not change the sweep. `settings` are the names of variants."""

    allocator: str
    timeout_s: float
    evidence: EvidenceUse
    strict: bool
    settings: tuple[str, ...] = ()
    split: str | None = None


class Model(Struct, frozen=True, kw_only=True):
    """The source of simulated times, and the pairs of ranks that the simulated faults make host-staged."""

    source: str
    seed: int
    profile: Mapping[str, str]
    staged: tuple[tuple[int, ...], ...] = ()


class DescribedCollective(Struct, frozen=True, kw_only=True):
    """The description of a run before its first measurement.

    `parts` are the groups of --split. `unwatched` is the reason why paths are not observed, or empty.
    """

    schema_version: int
    collective: str
    backend: str
    origin: Origin
    asked: Asked
    options: RunOptions
    ranks: tuple[RankIdentity, ...]
    hosts: tuple[str, ...] = ()
    parts: tuple[RankGroup, ...] = ()
    dropped_sizes: tuple[DroppedSize, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unwatched: str = ""
    model: Model | None = None

    @property
    def groups(self) -> tuple[RankGroup | None, ...]:
        """The groups of ranks that measure rows. The only group is None if all ranks measure together."""
        return self.parts or (None,)

    def identities(self, part: RankGroup | None) -> tuple[RankIdentity, ...]:
        return self.ranks if part is None else tuple(self.ranks[rank] for rank in part.ranks)


_SECONDS_TO_ESTIMATE = 2e-3  # The first operation of a short warm-up is slow, so time about 2 ms of operations
_MOST_TO_ESTIMATE = 1000

_FIRST_ALONE = 100  # Operations that latency mode times before it first checks the confidence interval
_MOST_SAMPLES = 10_000  # Samples kept per row, so that the recording of a sweep stays below the size limit for reading


class OwnTimes(Struct, frozen=True):
    """A row's times on this rank. `seconds` is the mean per operation, and `samples` are the first samples.

    The fields `batches`, `percentiles`, `interval` and `note` are the same on every rank.
    """

    seconds: float
    iterations: Annotated[int, Meta(ge=1)]
    batches: BatchTimes | None = None
    percentiles: Percentiles | None = None
    interval: float | None = None
    note: str | None = None
    entries: EntryTimes | None = None
    samples: tuple[float, ...] = ()
    issue_seconds: float | None = None


class Timer(Struct, frozen=True):
    """Times the operations of a row. Every rank must call every method in the same order."""

    sampling: Sampling
    group: Group
    backend: LaunchTimer
    graph_replays: int

    def estimate_seconds(self, launches: Sequence[Launch], warm_seconds: float) -> float:
        """Estimate the seconds per operation on the slowest rank, to choose the batch size.

        `warm_seconds` is the time per operation during the warm-up, or 0 without a warm-up.
        """
        if not self._runs_batches:
            return warm_seconds
        (seconds,) = self.group.largest([warm_seconds])
        if seconds < _SECONDS_TO_ESTIMATE:
            count = min(_MOST_TO_ESTIMATE, max(1, int(_SECONDS_TO_ESTIMATE / seconds))) if seconds else 1
            timed = self.backend.together(self.backend.bind(rotate(launches, count), 0)) / count
            (seconds,) = self.group.largest([timed])
        return seconds

    def time(self, launches: Sequence[Launch], seconds_each: float, clean: Callable[[], None]) -> OwnTimes:
        """Time operations that rotate over `launches`.

        `clean` prepares the buffers just before the timed operations.
        """
        times = self._time_row(launches, seconds_each, clean)
        if not self.sampling.percentiles:
            return times
        return replace(times, percentiles=self._time_single(launches, times.seconds))

    def _time_row(self, launches: Sequence[Launch], seconds_each: float, clean: Callable[[], None]) -> OwnTimes:
        if self.sampling.mode is Mode.LATENCY:
            clean()
            return self._time_alone(launches)
        if self._runs_batches:
            clean()
            return self._time_batches(launches, operations_per_batch(seconds_each))
        # As in nccl-tests: run one operation, wait at a barrier, then time all operations together.
        iterations = self.sampling.least_iterations
        timed = self.backend.bind(rotate(launches, iterations), self.graph_replays)
        operations = iterations * max(1, self.graph_replays)
        self.backend.once(launches[0])
        clean()
        seconds = self.backend.together(timed) / operations
        return OwnTimes(seconds, iterations, issue_seconds=self._issue_seconds(timed, operations))

    def _time_single(self, launches: Sequence[Launch], seconds: float) -> Percentiles:
        """Time operations back to back with a clock reading after each, as nccl-tests does with -I.

        This is a loop of its own, because on an H200 these readings add 2.1 µs to each operation.
        """
        count = self.sampling.single_operations(*self.group.largest([seconds]))
        timed = self.backend.batch_launches(rotate(launches, count + 1), 1)
        self.backend.together(timed)
        return Percentiles.of(self.group.largest(timed.batch_seconds()))

    def _issue_seconds(self, timed: Launch, operations: int) -> float | None:
        """Return the CPU time in seconds to issue one operation, or None if the backend cannot measure it."""
        clock = self.backend
        return clock.issue_seconds(timed, operations) if isinstance(clock, IssueClock) else None

    @property
    def _runs_batches(self) -> bool:
        return self.sampling.mode is Mode.THROUGHPUT and self.sampling.iterations is None

    def _time_batches(self, launches: Sequence[Launch], batch_size: int) -> OwnTimes:
        seconds, operations, values, issued = 0.0, 0, list[float](), list[float]()
        more = FIRST_BATCHES
        while True:
            count = (more + 1) * batch_size
            timed = self.backend.batch_launches(rotate(launches, count), batch_size)
            seconds += self.backend.together(timed)
            operations += count
            values += timed.batch_seconds()
            issue_seconds = self._issue_seconds(timed, count)
            issued += [] if issue_seconds is None else [issue_seconds]
            collected = self.group.collect((Spread.of(values), seconds))
            decision = None
            if collected is not None:
                spreads = [spread for spread, _ in collected]
                batches = BatchTimes.of(spreads, batch_size)
                slowest = max(spent for _, spent in collected)
                mean = max(spread.mean for spread in spreads)
                decision = batches, Effort(len(values), mean, batches.interval, slowest)
            batches, effort = self.group.broadcast(decision)
            more = effort.needed_values(self.sampling.budget_seconds)
            if not more:
                return OwnTimes(
                    seconds / operations,
                    operations,
                    batches,
                    interval=batches.interval,
                    note=self._note(effort),
                    samples=tuple(values[:_MOST_SAMPLES]),
                    issue_seconds=min(issued, default=None),
                )

    def _time_alone(self, launches: Sequence[Launch]) -> OwnTimes:
        bound = [self.backend.bind([launch], self.graph_replays) for launch in launches]
        divisor = max(1, self.graph_replays)
        seconds, values = list[float](), list[float]()
        more = _FIRST_ALONE if self.sampling.iterations is None else self.sampling.iterations
        entered, before, start = list[float](), self.group.clock_offset(), perf_counter()
        while True:
            fresh = []
            for launch in islice(cycle(bound), more):
                self.group.barrier()
                entered.append(perf_counter())
                fresh.append(self.backend.seconds(launch) / divisor)
            seconds += fresh
            values += self.group.largest(fresh)
            spread = Spread.of(values)
            effort = Effort(len(values), spread.mean * divisor, spread.interval, sum(values) * divisor)
            more = 0 if self.sampling.iterations else effort.needed_values(self.sampling.budget_seconds)
            if not more:
                return OwnTimes(
                    seconds=fmean(seconds),
                    iterations=len(seconds),
                    percentiles=Percentiles.of(values),
                    interval=spread.interval,
                    note=self._note(effort),
                    entries=self._entries(entered, before, start),
                    samples=tuple(values[:_MOST_SAMPLES]),
                )

    def _entries(self, entered: Sequence[float], before: ClockOffset, start: float) -> EntryTimes:
        """Return how late this rank entered operations, compared with the other ranks.

        `before` is the clock offset measured at the local time `start`.
        """
        end, after = perf_counter(), self.group.clock_offset()
        times = convert_to_rank0_clock(entered, before, after, start, end)
        last = self.group.largest(times)
        first = [-seconds for seconds in self.group.largest([-seconds for seconds in times])]
        return EntryTimes.of(times, first, last, max(before.uncertainty, after.uncertainty))

    def _note(self, effort: Effort) -> str | None:
        interval = effort.interval
        if self.sampling.iterations is not None or (interval is not None and interval <= INTERVAL):
            return None
        if interval is None:
            return f"95 % interval unknown after {effort.count} values"
        needed = f"±{100 * INTERVAL:g} % takes about {effort.seconds_needed():.2g} s"
        return f"95 % interval ±{100 * interval:.1f} %, budget {self.sampling.budget_seconds:g} s; {needed}"


def rotate(launches: Sequence[Launch], count: int) -> list[Launch]:
    return list(islice(cycle(launches), count))


class Answer(Struct, frozen=True):
    """One rank's contribution to a row: its time, wrong elements and GPU condition."""

    seconds: MeasuredSeconds
    entries: EntryTimes | None = None
    wrong: Count = 0
    condition: GpuCondition | None = None
    issue_seconds: Seconds | None = None


class RankTimings:
    """Collects the times on every rank over the rows of a sweep."""

    def __init__(self, identities: Sequence[RankIdentity]) -> None:
        self._identities = identities
        self._rows: list[tuple[CollectiveRow, Sequence[Answer]]] = []
        self._conditions: dict[int, GpuCondition] = {}

    def add(self, row: CollectiveRow, answers: Sequence[Answer]) -> None:
        """Add a row with the contributions of all ranks, in rank order."""
        self._rows.append((row, answers))
        for rank, answer in enumerate(answers):
            if answer.condition is not None:
                before = self._conditions.get(rank)
                self._conditions[rank] = answer.condition if before is None else before.combine(answer.condition)

    def sections(self) -> dict[str, Section]:
        """Return the section with one line per rank and row."""
        return Table.group_by_section({RankTimeRow: lambda: list(self._rank_rows())}) if self._rows else {}

    def findings(self) -> tuple[Finding, ...]:
        """Return a finding if the same ranks usually enter operations last.

        Return nothing if ranks share a GPU, because they wait for each other.
        """
        if (ranks_per_gpu(self._identities) or 1) > 1:
            return ()
        known = []
        for row, answers in self._rows:
            entries = [answer.entries for answer in answers if answer.entries is not None]
            if len(entries) == len(self._identities):
                known.append((entries, row.time_us / MICROSECONDS_PER_SECOND))
        found = find_straggler(known, [identity.node for identity in self._identities])
        return () if found is None else (self._finding(found),)

    def _rank_rows(self) -> Iterator[RankTimeRow]:
        for row, answers in self._rows:
            for identity, answer in zip(self._identities, answers, strict=True):
                entries = answer.entries
                yield make_record(
                    RankTimeRow,
                    row,
                    identity,
                    time_us=answer.seconds * MICROSECONDS_PER_SECOND,
                    late_us=None if entries is None else entries.late_seconds * MICROSECONDS_PER_SECOND,
                    clock_uncertainty_us=None if entries is None else entries.uncertainty * MICROSECONDS_PER_SECOND,
                    last_percent=None if entries is None else 100 * entries.last / entries.operations,
                )

    def _finding(self, found: Straggler) -> Finding:
        late = [self._identities[rank] for rank in found.ranks]
        subject = str(late[0])
        if len(late) > 1:
            hosts = compress_names(sorted({identity.host for identity in late}))
            subject = f"ranks {format_ranges([identity.rank for identity in late])} on {hosts}"
        usual = len(late) / len(self._identities)
        return Finding(
            id=STRAGGLER,
            severity=Verdict.WARN,
            subject=subject,
            seen=(
                f"last to enter {found.last} of {found.operations} operations, "
                f"{format_time(found.late_seconds * MICROSECONDS_PER_SECOND)} after the others (median row); an "
                f"operation takes {format_time(found.operation_seconds * MICROSECONDS_PER_SECOND)}"
            )
            + "".join(f"; {remark}" for remark in self._remarks(late)),
            expected=f"{usual:.0%} of them, like any other rank (probability by chance: at most {found.chance:.0e})",
            cause="a slower CPU, GPU or host, or other work on them",
            cure=Cure.of(
                "gpubench topo",
                comment="Run it on that host to see throttling, errors and other users of its GPU. Then run `top`.",
            ),
            subjects=tuple(map(str, late)),
            places=tuple(identity.place for identity in late),
        )

    def _remarks(self, late: Sequence[RankIdentity]) -> Iterator[str]:
        for identity in late:
            condition = self._conditions.get(identity.rank)
            if condition is None:
                continue
            gpu = f"its GPU {identity.gpu_index}" if len(late) == 1 else f"GPU {identity.gpu_index} of {identity}"
            if remarks := list(condition.remarks()):
                yield f"{gpu} {', and '.join(remarks)}"
            if condition.not_read:
                yield f"not read on {gpu}: {condition.not_read}"
