"""Measure one collective over a range of sizes. Time and verify each row, and observe paths and GPUs."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.record import Call, Collective, SweepRequest
from gpubench.errors import UsageError, no_size_left
from gpubench.measure.collective.cases import Answer, Case, JobFacts, OwnTimes, Timer, drop_empty_sizes, rotate
from gpubench.measure.collective.report import NO_RECORDER, MeasuredRow, Recorder, RowSample
from gpubench.model.terms.operation import POISON, Block, DataPattern, Placement, ReduceOp
from gpubench.model.terms.ranks import UNWATCHED, Phase, Progress, RankIdentity
from gpubench.model.terms.units import DroppedSize, describe_dropped, plural, split_by_memory
from gpubench.ports.backend import Backend, Launch, LibraryLog, Memory, Region
from gpubench.ports.copies import LinkCounters
from gpubench.ports.group import Group

if TYPE_CHECKING:
    from gpubench.conditions.circumstances import Circumstances
    from gpubench.measure.collective.paths import Counting, LoggedChoices, PathJudge, PathObservations
    from gpubench.measure.collective.report import SpeedJudge
    from gpubench.measure.collective.variants import Soak
    from gpubench.measure.paths import IdleWindow
    from gpubench.model.facts.process import GpuCondition
    from gpubench.model.facts.traffic import IdleGpu

_GPU = 0

ReadCondition = Callable[[], "GpuCondition | None"]
"""Reads the condition of this rank's GPU, for example clocks and errors. Returns None without a GPU."""

ReadCircumstances = Callable[[], "Circumstances | None"]
"""Reads the circumstances on the first rank. Every rank must call it. Other ranks get None."""

MakeSpeedJudge = Callable[["Circumstances | None"], "SpeedJudge | None"]
"""Makes the speed judge on the first rank from the circumstances. Returns None if speed is not judged."""


class ObservationSources(Struct, frozen=True):
    """The sources from which a rank observes paths. `nodes` has the node of every rank.

    `by_design` is the reason why this backend uses host memory, or empty.
    """

    log: LibraryLog
    counters: LinkCounters
    read_circumstances: ReadCircumstances
    nodes: Sequence[int]
    window: "IdleWindow | None" = None
    by_design: str = ""
    read_waited: Callable[[], float | None] = lambda: None


class PathObserver(Struct):
    """Observes the paths of a sweep on one rank. The first rank collects the observations of all ranks."""

    request: SweepRequest
    group: Group
    sources: ObservationSources
    counting: "Counting"
    _choices_by_setting: "dict[str, LoggedChoices]" = field(default_factory=dict)
    _observations: "PathObservations | None" = None

    @classmethod
    def of(cls, request: SweepRequest, group: Group, sources: ObservationSources) -> "PathObserver":
        from gpubench.measure.collective.paths import Counting

        return cls(request, group, sources, Counting(sources.counters, request, group.rank, group.size))

    def try_out(
        self, cases: Sequence[Case], try_once: Callable[[Case], object], then: Callable[[], object] = lambda: None
    ) -> None:
        """Run every operation once before timing, to read its log and count its bytes.

        `then` is called after the log is read, to try out the settings.
        """
        from gpubench.measure.collective.paths import PathObservations

        sources = self.sources
        idle = self.look_while_idle()
        expected_bytes = self.group.collect(self.counting.expected_bytes(cases[0]))
        choices = self._read_choices(cases, try_once)
        then()
        sources.log.switch_off()
        traffic = self.group.collect(self.counting.count(cases, try_once, self.group.barrier))
        circumstances = sources.read_circumstances()
        if expected_bytes is not None and traffic is not None and circumstances is not None:
            self._observations = PathObservations(
                choices=choices,
                choices_by_setting=self._choices_by_setting,
                expected_bytes=expected_bytes,
                traffic=traffic,
                circumstances=circumstances,
                idle=idle or (),
                by_design=sources.by_design,
            )

    def look_while_idle(self, condition: "GpuCondition | None" = None) -> "tuple[IdleGpu, ...] | None":
        """Read every rank's GPU while no operation runs.

        Every rank must call it, and the first rank gets the result. After the last row, `condition` is the condition of
        this rank's GPU under load.
        """
        window, group = self.sources.window, self.group
        group.barrier()
        waited = None if condition is None else self.sources.read_waited()
        idle_gpu = None if window is None else replace(window.look([_GPU])[0], at_work=condition, waited=waited)
        group.barrier()
        collected = group.collect(idle_gpu)
        if collected is None:
            return None
        idle = tuple(gpu for gpu in collected if gpu is not None)
        return idle if len(idle) == len(collected) else ()

    def try_setting(self, setting: str, cases: Sequence[Case], try_once: Callable[[Case], object]) -> None:
        """Read the log of the same operations under a setting.

        It fills columns of rows but does not affect the verdict.
        """
        self._choices_by_setting[setting] = self._read_choices(cases, try_once)

    def _read_choices(self, cases: Sequence[Case], try_once: Callable[[Case], object]) -> "LoggedChoices":
        from gpubench.measure.collective.paths import LoggedChoices, read_choices

        nodes, log = self.sources.nodes, self.sources.log
        return read_choices(self.request, self.group, nodes, log, cases, try_once) or LoggedChoices()

    def judge(self) -> "PathJudge | None":
        """Return the judge of the observed paths after `try_out`. Ranks other than the first get None."""
        from gpubench.measure.collective.paths import PathJudge

        return None if self._observations is None else PathJudge(self.request, self._observations)


class Observers(Struct, frozen=True, kw_only=True):
    """Everything that observes a sweep. With `soak`, all rows are repeated until the soak is over."""

    path_observer: PathObserver | None = None
    progress: Progress = UNWATCHED
    read_condition: ReadCondition = lambda: None
    recorder: Recorder = NO_RECORDER
    make_speed_judge: MakeSpeedJudge = lambda _circumstances: None
    measures_again: bool = True
    soak: "Soak | None" = None


NO_OBSERVERS = Observers()


def fitting_sizes(
    request: SweepRequest,
    group: Group,
    backend: Backend,
    identity: RankIdentity,
    memory_holders: Callable[[], str] = lambda: "",
) -> tuple[tuple[int, ...], tuple[DroppedSize, ...]]:
    """Return the sizes that fit into memory on every rank, and the dropped sizes with reasons.

    Raises CouldNotMeasureError if no size fits.
    """
    own_bytes = backend.free_bytes()
    holders = memory_holders() if max(request.sizes) * backend.buffers > own_bytes else ""
    free_bytes, tightest, holders = min(group.gather((own_bytes, str(identity), holders)))
    fitting, dropped = split_by_memory(request.sizes, backend.buffers, free_bytes, tightest, holders)
    dropped += drop_empty_sizes(request, fitting, group.size)
    return sizes_left(fitting, dropped), dropped


def sizes_left(sizes: Sequence[int], dropped: Sequence[DroppedSize]) -> tuple[int, ...]:
    """Return the sizes that were not dropped. Raises CouldNotMeasureError if no size is left."""
    dropped_bytes = {drop.size_bytes for drop in dropped}
    kept = tuple(size for size in sizes if size not in dropped_bytes)
    if not kept:
        raise no_size_left("; ".join(describe_dropped(dropped)))
    return kept


def fitting_all(
    parts: Sequence[tuple[tuple[int, ...], tuple[DroppedSize, ...]]],
) -> tuple[tuple[int, ...], tuple[DroppedSize, ...]]:
    """Return the sizes that fit in all groups of a job, and the dropped sizes.

    Raises CouldNotMeasureError if no size fits.
    """
    dropped = {drop.size_bytes: drop for _, part in parts for drop in part}
    return sizes_left(parts[0][0], tuple(dropped.values())), tuple(dropped[size] for size in sorted(dropped))


def check_root(collective: Collective, root: int, ranks: int) -> None:
    """Raise UsageError if --root is not a rank of the job."""
    if collective.rooted and not 0 <= root < ranks:
        raise UsageError(
            f"--root {root} is out of range for {plural(ranks, 'rank')}", expected=f"a rank from 0 to {ranks - 1}"
        )


_WAKING_SECONDS = 20e-3
"""On two H200s the first row took up to twice as long as the next at any size. After 5 ms of operations the
difference was gone. The SM clock was the same before and after.
"""

_MOST_WAKING_OPERATIONS = 5000


class Buffers(Struct, frozen=True):
    """A send and a receive buffer, each as large as the largest size."""

    send: Memory
    receive: Memory

    @classmethod
    def of(cls, backend: Backend, size_bytes: int) -> "Buffers":
        return cls(backend.allocate(size_bytes), backend.allocate(size_bytes))


Issue = Callable[[Call], Launch]  # Binds the arguments of one operation


class Sweep(Struct, frozen=True):
    """Measures the rows of a sweep. If `issue` is None, operations use the backend's own calls."""

    request: SweepRequest
    group: Group
    backend: Backend
    job: JobFacts
    buffers: Buffers
    observers: Observers
    issue: Issue | None = None

    def row(self, number: int, case: Case) -> MeasuredRow:
        """Measure and verify one case. The test data depend on `number`."""
        launches = [self.launch(case, buffer) for buffer in range(self.count_buffers(case))]
        times = self._time(number * 2, case, launches)
        condition = None if times.entries is None else self.observers.read_condition()
        wrong = self.verify(number * 2, case, launches) if self.request.check else 0
        answers = self.group.collect(Answer(times.seconds, times.entries, wrong, condition, times.issue_seconds))
        sample = None if answers is None else RowSample(times, tuple(answers))
        row = None if sample is None else sample.row(self.request, case, self.job)
        return MeasuredRow(self.group.broadcast(row), sample)

    def try_once(self, case: Case) -> None:
        """Run one untimed operation of a case. The first call also connects the ranks."""
        self.observers.progress.enter(Phase.TRY_OUT, case.label, 1)
        self.backend.seconds(self.backend.bind([self.launch(case, 0)], 0))

    def warm_up(self, cases: Sequence[Case]) -> None:
        """Run every case once without timing, as nccl-tests does.

        Then measure one row with its checks, and discard it.
        """
        once = min(1, self.request.warmup)
        for number, case in enumerate(cases):
            self.observers.progress.enter(Phase.WARM_UP if number else Phase.CONNECTING, case.label, once)
            self.backend.seconds(self.backend.bind([self.launch(case, 0)] * once, 0))
        short = replace(self.request, sampling=replace(self.request.sampling, budget_seconds=0.0))
        replace(self, request=short).row(0, cases[0])

    def wake_up(self, case: Case) -> None:
        """Run operations for 20 ms on every rank, so that clocks and links leave their idle state."""
        self.observers.progress.enter(Phase.WARM_UP, case.label)
        launch = [self.launch(case, 0)] * min(1, self.request.warmup)
        (seconds,) = self.group.largest([self.backend.seconds(self.backend.bind(launch, 0))])
        count = min(_MOST_WAKING_OPERATIONS, ceil(_WAKING_SECONDS / seconds)) - 1 if launch and seconds else 0
        self.backend.seconds(self.backend.bind(rotate(launch, count), 0))

    def count_buffers(self, case: Case) -> int:
        """Return the number of buffers to rotate over.

        It is the number that fits into the allocation, but at most the minimum number of iterations.
        """
        return min(self.buffers.send.size_bytes // case.size_bytes, self.request.sampling.least_iterations)

    def launch(self, case: Case, buffer: int) -> Launch:
        """Bind one operation of a case to a buffer."""
        start = buffer * case.layout.largest
        ends = [(self.buffers.send, start), (self.buffers.receive, start)]
        if case.placement is Placement.IN_PLACE:
            steps = case.layout.in_place_send, case.layout.in_place_receive
            ends = [(self.buffers.receive, start + self.group.rank * step) for step in steps]
        send, receive = (Region(memory, element * case.dtype.size_bytes) for memory, element in ends)
        call = Call(
            send=send,
            receive=receive,
            count=case.layout.count,
            dtype=case.dtype,
            op=case.op or ReduceOp.SUM,
            root=self.request.root,
            rank=self.group.rank,
            ranks=self.group.size,
        )
        return self.request.collective.issue(self.backend.calls, call) if self.issue is None else self.issue(call)

    def _time(self, row: int, case: Case, launches: Sequence[Launch]) -> OwnTimes:
        request = self.request
        self.observers.progress.enter(Phase.WARM_UP, case.label)
        self.fill(row, case, len(launches))
        timer = Timer(request.sampling, self.group, self.backend, request.graph_replays)
        seconds = self.backend.seconds(self.backend.bind(rotate(launches, self.request.warmup), 0))
        seconds_each = timer.estimate_seconds(launches, seconds / self.request.warmup if self.request.warmup else 0.0)
        operations = (request.sampling.iterations or 0) * max(1, request.graph_replays)
        if operations and request.sampling.percentiles:
            operations += request.sampling.single_operations(seconds_each) + 1
        self.observers.progress.enter(Phase.OPERATION, case.label, operations)
        return timer.time(launches, seconds_each, lambda: self.poison(case, len(launches)))

    def poison(self, case: Case, buffers: int) -> None:
        """Fill the result buffers with data that no operation produces. In place, do nothing."""
        if self.request.check and case.placement is Placement.OUT_OF_PLACE:
            self.buffers.receive.fill_byte(buffers * case.size_bytes, POISON)

    def verify(self, row: int, case: Case, launches: Sequence[Launch]) -> int:
        """Count the wrong elements on this rank. In place, first run one more operation on fresh data."""
        rank, ranks, layout = self.group.rank, self.group.size, case.layout
        buffers, offset = len(launches), 0
        self.observers.progress.enter(Phase.VERIFICATION, case.label)
        if case.placement is Placement.IN_PLACE:
            row, buffers, offset = row + 1, 1, rank * layout.in_place_receive
            self.fill(row, case, buffers)
            self.group.barrier()
            self.backend.seconds(self.backend.bind(launches[:1], min(1, self.request.graph_replays)))
        blocks = [
            (Block(row, buffers, layout.largest, offset + block.offset, block.count, block.start), block.source)
            for block in self.request.collective.expected(layout, rank, ranks, self.request.root)
        ]
        return self.buffers.receive.count_wrong(self._pattern(case), blocks)

    def fill(self, row: int, case: Case, buffers: int) -> None:
        """Write this rank's data into the send buffers.

        In place, poison the receive buffers and write the data there.
        """
        memory, offset = self.buffers.send, 0
        if case.placement is Placement.IN_PLACE:
            memory, offset = self.buffers.receive, self.group.rank * case.layout.in_place_send
            memory.fill_byte(buffers * case.size_bytes, POISON)
        block = Block(row, buffers, case.layout.largest, offset, case.layout.send)
        memory.fill_sent(self._pattern(case), block, self.group.rank)

    def _pattern(self, case: Case) -> DataPattern:
        return DataPattern(case.dtype, case.op, self.group.size)
