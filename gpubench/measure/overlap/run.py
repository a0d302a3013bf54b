"""Measure a collective beside computation: every size alone, then under each cap beside each partner."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from gpubench.collectives.request import SweepRequest
from gpubench.measure.collective.cases import Case, JobFacts
from gpubench.measure.collective.observers import Observers
from gpubench.measure.collective.row_collector import RowCollector
from gpubench.measure.collective.sweep import job_facts
from gpubench.measure.collective.variants import SweepVariant, VariantPreparation, VariantRun, finished, measure_runs
from gpubench.measure.overlap.meter import PhaseOfRanks, StepMeter, StepPhase
from gpubench.measure.overlap.rows import StepSample, overlap_case, row_of, with_rows
from gpubench.model.facts.gpu_load import GpuLoad
from gpubench.model.results.report import CollectiveRow, Metadata, Report
from gpubench.model.results.rows.overlap import OverlapRow
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.overlap.asked import OverlapAsked, Partner, cap_name
from gpubench.model.terms.overlap.steps import StepOrder, overlap_times
from gpubench.model.terms.overlap.times import OverlapTimes, partner_operations
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND
from gpubench.ports.group import Group
from gpubench.ports.listener import Listener
from gpubench.ports.steps import OverlapSteps

_MOST_BUFFERS = 3
"""That a collective goes round in steps: a phase has at least so many."""

_OPERATIONS_TO_LEARN = 8
_SHORT, _SHORTER = 0.5, 0.3
"""The parts of --seconds for the phases of which less hangs."""

_COVERED = 0.995
_LATER = 1000
"""Added to the numbers of rows that seed test data: none is a number of a row of the collective alone."""


class _AloneRows:
    """Keeps the rows of the collective alone; they come with the report."""

    def __init__(self, listener: Listener[OverlapRow]) -> None:
        self.progress = listener.progress
        self.rows: list[CollectiveRow] = []

    def begin(self, metadata: Metadata) -> None:
        """Nothing."""

    def end(self, report: Report) -> None:
        """Nothing."""

    def row(self, row: CollectiveRow) -> None:
        """Keep it."""
        self.rows.append(row)


@dataclass(frozen=True, slots=True)
class Cap:
    """A cap on NCCL's CTAs, None for its own number, with what asks for it, and what has its communicator."""

    ctas: int | None
    variant: SweepVariant
    asked_by: str | None = None


@dataclass(frozen=True, slots=True)
class OverlapMeans:
    """The means of a rank: steps on its GPU, readings of it, and the clock around them."""

    steps: OverlapSteps
    read_load: Callable[[], GpuLoad]


def measure_overlap(
    request: SweepRequest,
    asked: OverlapAsked,
    group: Group,
    caps: Sequence[Cap],
    identities: Sequence[RankIdentity],
    listener: Listener[OverlapRow],
    observers: Observers,
    means: OverlapMeans,
) -> Report:
    """Measure every size, under every cap beside every partner; `caps` begin with NCCL's own number, asked for or not.

    Rows go to `listener` on the first rank, whose report has the verdict. What is known of paths and speed is of the
    collective alone.
    """
    preparation = VariantPreparation(request, group, identities, observers)
    runs = preparation.prepare([cap.variant for cap in caps])
    alone = _AloneRows(listener)
    collector, _ = measure_runs(preparation, runs[:1], alone)
    meter = StepMeter(group, means.steps, observers.progress, means.read_load)
    job = job_facts(caps[0].variant.opened, identities)
    bench = _OverlapBench(request, asked, meter, observers, job, collector)
    own_seconds = {row.size_bytes: row.time_us / MICROSECONDS_PER_SECOND for row in alone.rows}
    by_variant = {cap.variant.setting: cap for cap in caps if cap.ctas in asked.ctas}
    shown = [run for run in runs if run.variant.setting in by_variant]
    cases = list(runs[0].cases)
    total, done, rows = len(asked.partners) * len(cases) * len(shown), 0, list[OverlapRow]()
    again: dict[tuple[str, int], float] = {}
    for partner in asked.partners:
        operation = bench.learn(partner)
        for case in cases:
            count = asked.partner_count or partner_operations(own_seconds[case.size_bytes], operation)
            for run in (each for each in shown if case in each.cases):
                cap = by_variant[run.variant.setting]
                listener.progress(done, total, f"{case.label}, {cap_name(cap.ctas)}, {partner}")
                row = bench.row(_LATER + done, case, run, cap, partner, count, _of_size(alone.rows, case))
                done += 1
                if row is not None:
                    rows.append(row)
                    listener.row(row)
            if len(shown) > 1 and shown[0].variant.setting is None:
                listener.progress(done - 1, total, f"{case.label}, {cap_name(None)} again, {partner}")
                again[partner, case.size_bytes] = bench.again(case, shown[0], partner, count)
    report = finished(collector, observers)
    return with_rows(report, alone.rows, rows, preparation.refused, again)


@dataclass(frozen=True, slots=True)
class _OverlapBench:
    """The rows of one rank, which the first puts together."""

    request: SweepRequest
    asked: OverlapAsked
    meter: StepMeter
    observers: Observers
    job: JobFacts
    collector: RowCollector

    def learn(self, partner: Partner) -> float:
        """Seconds of one operation of a partner with nothing beside, on the slowest rank."""
        self.observers.progress.enter(Phase.WARM_UP, f"{partner} alone")
        phase = StepPhase(StepOrder.COMPUTATION, partner, (), _OPERATIONS_TO_LEARN)
        sample = self.meter.measure(phase, self.asked.seconds * _SHORTER)
        (seconds,) = self.meter.group.largest([fmean(step.partner for step in sample.steps)])
        return seconds / _OPERATIONS_TO_LEARN

    def again(self, case: Case, run: VariantRun, partner: Partner, count: int) -> float:
        """Seconds of a step once more, on the slowest rank; every rank has the same."""
        self.observers.progress.enter(Phase.OPERATION, f"{case.label}, {cap_name(None)} again, {partner}")
        phase = StepPhase(StepOrder.COMPUTATION_FIRST, partner, [run.sweep.launch(case, 0)], count)
        sample = self.meter.measure(phase, self.asked.seconds * _SHORT)
        (seconds,) = self.meter.group.largest([fmean(step.period for step in sample.steps)])
        return seconds

    def row(
        self, number: int, case: Case, run: VariantRun, cap: Cap, partner: Partner, count: int, alone: CollectiveRow
    ) -> OverlapRow | None:
        """Measure the phases of a row, and verify the data of its last one; the row, on the first rank."""
        sweep, check, seconds = run.sweep, self.request.check, self.asked.seconds
        launches = [sweep.launch(case, buffer) for buffer in range(min(sweep.rotated(case), _MOST_BUFFERS))]
        label = f"{case.label}, {cap_name(cap.ctas)}, {partner}"
        self.observers.progress.enter(Phase.WARM_UP, label)
        sweep.fill(number, case, len(launches))
        self.observers.progress.enter(Phase.OPERATION, label)

        def measured(order: StepOrder, part: float) -> PhaseOfRanks | None:
            phase = StepPhase(order, partner, launches, count)
            return self.meter.gathered(self.meter.measure(phase, seconds * part))

        communication = measured(StepOrder.COMMUNICATION, _SHORTER)
        first = measured(StepOrder.COMMUNICATION_FIRST, _SHORT)
        computation = measured(StepOrder.COMPUTATION, _SHORT)
        sweep.poison(case, len(launches))
        together = measured(StepOrder.COMPUTATION_FIRST, 1.0)
        wrong = sweep.verify(number, case, launches) if check else 0
        wrong_partner = self.meter.steps.partner_wrong(partner) if check else 0
        self.observers.progress.enter(Phase.OUTPUT, label)
        counts = self.meter.group.collect((wrong, wrong_partner))
        if communication is None or first is None or computation is None or together is None or counts is None:
            return None
        times = overlap_times(computation.steps, communication.steps, first.steps, together.steps)
        periods, load = together.steps.periods, together.load
        computed_wrong = sum(each for _, each in counts)
        channels = self.collector.channels(replace(case, setting=run.variant.setting), alone)
        sample = StepSample(
            times=times,
            partner_count=count,
            steps=together.steps.count,
            step_ci95_percent=None if periods.interval is None else 100 * periods.interval,
            clock_mhz=load.clock_mhz,
            clock_alone_mhz=computation.load.clock_mhz,
            power_w=load.power_w,
            throttled_by=", ".join(load.throttle_reasons) or None,
            channels=channels,
            capped_by=cap.asked_by,
            wrong=sum(each for each, _ in counts) + computed_wrong if check else None,
            note="; ".join(_notes(times, cap, channels, computed_wrong)) or None,
        )
        return row_of(overlap_case(case, self.request.collective.name, self.asked, partner, cap.ctas), self.job, sample)


def _notes(times: OverlapTimes, cap: Cap, channels: int | None, computed_wrong: int) -> Iterator[str]:
    if computed_wrong:
        yield f"{computed_wrong} of the wrong elements are the partner's"
    if cap.ctas is not None and channels is not None and channels > cap.ctas:
        yield f"NCCL took {channels} channels, not {cap.ctas}"
    if times.in_flight > _COVERED * times.partner_together:
        yield "computation was over first: κm is of the collective beside it and after it"
    if times.compute_slowdown is None:
        yield "computation lost more than the time in flight: no κc"
    if times.communication_first is None:
        yield "too short to be met by computation that begins later: wait and share are not told apart"


def _of_size(rows: Sequence[CollectiveRow], case: Case) -> CollectiveRow:
    return next(row for row in rows if row.size_bytes == case.size_bytes)
