"""Measures a collective during computation: how much each slows the other, and which CTA limit has the shortest
step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.record import Collective, SweepRequest
from gpubench.jobs.collective.metadata import collective_metadata
from gpubench.measure.collective.cases import Case, DescribedCollective, JobFacts
from gpubench.measure.collective.report import RowCollector
from gpubench.measure.collective.sweep import Observers
from gpubench.measure.collective.variants import SweepVariant, VariantPreparation, VariantRun, finished, measure_runs
from gpubench.model.facts.health import GpuLoad, job_load, mean_load
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.overlap import OverlapRow, ShortestStepRow
from gpubench.model.results.report import (
    OVERLAP_SECTION,
    CollectiveRow,
    Metadata,
    Report,
    Table,
    Verified,
    make_record,
)
from gpubench.model.terms import overlap
from gpubench.model.terms.ranks import Phase, Progress, RankIdentity
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_size, group_by, percent, plural
from gpubench.model.terms.verdict import WRONG_DATA, Cure, Finding, Origin, Verdict
from gpubench.ports.backend import Launch, OverlapSteps
from gpubench.ports.group import Group, Listener
from gpubench.training.overlap_options import OverlapPlan

_SECONDS_A_BATCH = 0.06
_FEWEST_STEPS = 3  # Steps per batch. The first step is not counted
# Launches that a stream queues before the host must wait. A step has some launches besides its operations
_MOST_QUEUED = 900
_BESIDE_OPERATIONS = 8

_SETTLED_SHARE = 0.01
# Steps have settled if two consecutive batches agree within 1 %. At first, clocks still adapt to the power.
_MOST_SETTLING_SECONDS = 0.3
_SECONDS_BETWEEN_READINGS = 0.025


class StepPhase(NamedTuple):
    """The steps of a phase: their order, the computation, the collectives to cycle through, and the operations per
    step.
    """

    order: overlap.StepOrder
    partner: overlap.Partner
    collectives: Sequence[Launch]
    operations: int


class PhaseSample(Struct, frozen=True):
    """The measured steps of one rank, and readings of its GPU during these steps."""

    steps: list[overlap.ClockedStep]
    load: GpuLoad


class PhaseOfRanks(Struct, frozen=True):
    """The measured steps of all ranks, and readings of their GPUs."""

    steps: overlap.RankSteps
    load: GpuLoad

    @classmethod
    def of(cls, samples: Sequence[PhaseSample]) -> "PhaseOfRanks":
        """Combine the samples of all ranks, one per rank."""
        return cls(
            overlap.RankSteps([sample.steps for sample in samples]),
            job_load([sample.load for sample in samples]),
        )


class StepMeter(Struct):
    """Measures phases on this rank. Every rank must make the same calls."""

    group: Group
    steps: OverlapSteps
    progress: Progress
    read_load: Callable[[], GpuLoad]
    clock: Callable[[], float] = perf_counter
    _readings: list[GpuLoad] = field(default_factory=list)
    _read_at: float = 0.0

    def measure(self, phase: StepPhase, seconds: float) -> PhaseSample:
        """Run a phase until step times have settled, then measure it for `seconds`."""
        period, spent = self._batch(phase, _FEWEST_STEPS)[1:]
        fitting = math.ceil(_SECONDS_A_BATCH / period) if period > 0 else _FEWEST_STEPS
        count = max(_FEWEST_STEPS, min(fitting, _MOST_QUEUED // (phase.operations + _BESIDE_OPERATIONS)))
        before = math.inf
        while spent < _MOST_SETTLING_SECONDS and abs(period - before) > _SETTLED_SHARE * period:
            before = period
            _, period, took = self._batch(phase, count)
            spent += took
        self._readings.clear()
        measured, spent = list[overlap.ClockedStep](), 0.0
        while spent < seconds:
            steps, _, took = self._batch(phase, count)
            measured += steps
            spent += took
        if not self._readings:
            self._readings.append(self.read_load())
        return PhaseSample(measured, mean_load(self._readings))

    def gathered(self, sample: PhaseSample) -> PhaseOfRanks | None:
        """Return the samples of all ranks on rank 0, and None on the other ranks."""
        collected = self.group.collect(sample)
        return None if collected is None else PhaseOfRanks.of(collected)

    def _batch(self, phase: StepPhase, count: int) -> tuple[list[overlap.ClockedStep], float, float]:
        """Run `count` steps. Return the steps of this rank, and two maxima over all ranks: mean step time and time
        of the batch, in seconds.
        """
        self.group.barrier()
        start = self.clock()
        marks = self.steps.run(*phase, steps=count, look=self._look)
        steps, took = overlap.clock_steps(marks), self.clock() - start
        period, spent = self.group.largest([fmean(step.period for step in steps), took])
        return steps, period, spent

    def _look(self, completed: int) -> None:
        if completed:
            self.progress.completed(completed)
        now = self.clock()
        if now - self._read_at >= _SECONDS_BETWEEN_READINGS:
            self._read_at = now
            self._readings.append(self.read_load())


def overlap_metadata(
    plan: OverlapPlan,
    described: DescribedCollective,
    collective: Collective,
    arguments: Sequence[str],
    *,
    topology: str | None = None,
) -> Metadata:
    own = collective_metadata(described, collective, arguments, topology=topology)
    options = {
        "collective": collective.name,
        **own.options,
        "partners": [partner.value for partner in plan.partners],
        "partner_operations": {
            partner.value: overlap.describe_operation(partner, plan.gemm_side, plan.dtypes[0])
            for partner in plan.partners
        },
        "ctas": list(plan.ctas),
        "gemm_side": plan.gemm_side,
        "seconds": plan.seconds,
    }
    return replace(own, subject=OVERLAP_SECTION, collective=None, options=options)


def overlap_row(
    plan: OverlapPlan,
    size_bytes: int,
    partner: overlap.Partner,
    ctas: int | None,
    job: JobFacts,
    sample: overlap.StepSample,
) -> OverlapRow:
    times, checked = sample.times, sample.wrong is not None
    noise = (sample.step_ci95_percent or 0.0) / 100 * sample.times.step
    return make_record(
        OverlapRow,
        job,
        sample,
        times,
        collective=plan.collective,
        size_bytes=size_bytes,
        data_type=plan.dtypes[0],
        ctas=ctas,
        partner=partner,
        partner_operation=overlap.describe_operation(partner, plan.gemm_side, plan.dtypes[0]),
        partner_alone_us=_us(times.partner_alone),
        communication_alone_us=_us(times.communication_alone),
        communication_first_us=None if times.communication_first is None else _us(times.communication_first),
        together_us=_us(times.together),
        partner_together_us=_us(times.partner_together),
        communication_together_us=_us(times.communication_together),
        in_flight_us=_us(times.in_flight),
        hidden_share=None if times.communication_alone < noise else times.hidden_share,
        step_us=_us(times.step),
        sm_clock_mhz=sample.clock_mhz,
        sm_clock_alone_mhz=sample.clock_alone_mhz,
        verified=Verified.LAST if checked else Verified.NO,
        verdict=(Verdict.FAIL if sample.wrong else Verdict.PASS) if checked else None,
    )


def _us(seconds: float) -> float:
    return seconds * MICROSECONDS_PER_SECOND


AgainSteps = Mapping[tuple[str, int], float]
"""Step time with NCCL's own number of CTAs in seconds, by partner and size in bytes. It is repeated after all
limits to detect drift.
"""


def shortest_steps(rows: Sequence[OverlapRow], repeated: AgainSteps) -> Iterator[ShortestStepRow]:
    """Yield the shortest step for every partner and size that was measured with several limits. Rows with wrong
    data are ignored.
    """
    usable = [row for row in rows if not row.wrong]
    for members in group_by(usable, lambda row: (row.partner, row.size_bytes)).values():
        if len({row.ctas for row in members}) < 2:
            continue
        best = min(members, key=lambda row: row.step_us)
        own = next((row for row in members if row.ctas is None), None)
        later = repeated.get((best.partner, best.size_bytes))
        drift = None if own is None or later is None else percent(_us(later) - own.step_us, own.step_us)
        gain = None
        if own is not None:
            # Average of NCCL's own steps before and after the limits
            mean_us = own.step_us * (1 + (drift or 0.0) / 200)
            gain = 0.0 if best is own else max(0.0, 100 * (mean_us - best.step_us) / mean_us)
        noise = None if own is None else _noise(own, best, drift)
        yield make_record(
            ShortestStepRow,
            best,
            own_step_us=None if own is None else own.step_us,
            own_drift_percent=drift,
            own_compute_slowdown=None if own is None else own.compute_slowdown,
            own_communication_slowdown=None if own is None else own.communication_slowdown,
            gain_percent=gain,
            noise_percent=noise,
            beyond_noise=None if gain is None or noise is None else gain > noise,
        )


def _noise(own: OverlapRow, best: OverlapRow, drift: float | None) -> float | None:
    """Return half the 95 % confidence interval for the difference between two steps in percent, or the drift if it
    is larger.

    Return None if both are unknown.
    """
    intervals = own.step_ci95_percent, best.step_ci95_percent
    if intervals[0] is None or intervals[1] is None:
        return None if drift is None else abs(drift)
    by_chance = math.hypot(intervals[0] * own.step_us, intervals[1] * best.step_us) / own.step_us
    return max(by_chance, abs(drift or 0.0))


def add_overlap_rows(
    report: Report,
    undisturbed: Sequence[CollectiveRow],
    rows: Sequence[OverlapRow],
    refused: Sequence[RefusedRow] = (),
    repeated: AgainSteps = MappingProxyType({}),
) -> Report:
    """Add the rows during computation to the report on the collective alone, whose rows are `undisturbed`.

    `refused` has the limits that NCCL rejected. `repeated` has the repeated steps with NCCL's own number of CTAs.
    """
    sections = {
        **Table.group_by_section(
            {ShortestStepRow: list(shortest_steps(rows, repeated)), CollectiveRow: undisturbed, RefusedRow: refused}
        ),
        **report.sections,
    }
    return replace(report, sections=sections, main=OVERLAP_SECTION).add_findings(first=list(wrong_data(rows)))


def wrong_data(rows: Sequence[OverlapRow]) -> Iterator[Finding]:
    """Yield a finding if the collective delivered wrong data during computation."""
    bad = [row for row in rows if row.wrong]
    if bad:
        sizes = ", ".join(dict.fromkeys(format_size(row.size_bytes) for row in bad))
        partners = ", ".join(dict.fromkeys(row.partner for row in bad))
        yield Finding(
            id=WRONG_DATA,
            severity=Verdict.FAIL,
            subject=f"{bad[0].collective} of {sizes} during {partners}",
            seen=plural(sum(row.wrong or 0 for row in bad), "wrong element"),
            expected="no wrong elements under any load",
            cause="GPU memory, a link or a library that fails under load",
            cure=Cure.of(f"gpubench {bad[0].collective} --sizes {sizes.split(',')[0]}"),
        )


_MOST_BUFFERS = 3  # A phase has at least this many steps, so its collective uses each buffer at least once
_OPERATIONS_TO_LEARN = 8
_SHORT, _SHORTER = 0.5, 0.3  # Fractions of --seconds for phases that need less precision
_COVERED = 0.995
_LATER = 1000  # Offset of the row numbers that seed test data, so that data differs from rows of the collective alone


class _AloneRows:
    def __init__(self, listener: Listener[OverlapRow]) -> None:
        self.progress = listener.progress
        self.rows: list[CollectiveRow] = []

    def begin(self, metadata: Metadata) -> None: ...

    def end(self, report: Report) -> None: ...

    def row(self, row: CollectiveRow) -> None:
        self.rows.append(row)


class Cap(Struct, frozen=True):
    """A limit on NCCL's CTAs and the communicator to measure with it. `ctas` is None for NCCL's own number.

    `asked_by` is how the limit is set: by configuration or by environment.
    """

    ctas: int | None
    variant: SweepVariant
    asked_by: str | None = None


def measure_overlap(
    request: SweepRequest,
    plan: OverlapPlan,
    group: Group,
    caps: Sequence[Cap],
    identities: Sequence[RankIdentity],
    listener: Listener[OverlapRow],
    observers: Observers,
    steps: OverlapSteps,
    read_load: Callable[[], GpuLoad],
) -> Report:
    """Measure every size under every CTA limit with every partner.

    `caps` begins with NCCL's own number, even if it is not requested. Rank 0 passes rows to `listener` and returns the
    report with the verdict. Paths and speed are judged from the collective alone.
    """
    preparation = VariantPreparation(request, group, identities, observers)
    runs = preparation.prepare([cap.variant for cap in caps])
    undisturbed = _AloneRows(listener)
    collector, _ = measure_runs(preparation, runs[:1], undisturbed)
    meter = StepMeter(group, steps, observers.progress, read_load)
    job = JobFacts.of(caps[0].variant.opened.name, Origin.MEASURED, identities)
    bench = _OverlapBench(request, plan, meter, observers, job, collector)
    own_seconds = {row.size_bytes: row.time_us / MICROSECONDS_PER_SECOND for row in undisturbed.rows}
    by_variant = {cap.variant.setting: cap for cap in caps if cap.ctas in plan.ctas}
    shown = [run for run in runs if run.variant.setting in by_variant]
    cases = list(runs[0].cases)
    total, done, rows = len(plan.partners) * len(cases) * len(shown), 0, list[OverlapRow]()
    repeated: dict[tuple[str, int], float] = {}
    for partner in plan.partners:
        operation = bench.learn(partner)
        for case in cases:
            count = overlap.partner_operations(own_seconds[case.size_bytes], operation)
            for run in (run for run in shown if case in run.cases):
                cap = by_variant[run.variant.setting]
                listener.progress(done, total, f"{case.label}, {overlap.describe_cap(cap.ctas)}, {partner}")
                own_row = next(row for row in undisturbed.rows if row.size_bytes == case.size_bytes)
                row = bench.row(_LATER + done, case, run, cap, partner, count, own_row)
                done += 1
                if row is not None:
                    rows.append(row)
                    listener.row(row)
            if len(shown) > 1 and shown[0].variant.setting is None:
                listener.progress(done - 1, total, f"{case.label}, {overlap.describe_cap(None)} again, {partner}")
                repeated[partner, case.size_bytes] = bench.measure_again(case, shown[0], partner, count)
    report = finished(collector, observers)
    return add_overlap_rows(report, undisturbed.rows, rows, preparation.refused, repeated)


class _OverlapBench(Struct, frozen=True):
    """Measures rows on one rank. Rank 0 combines the measurements of all ranks."""

    request: SweepRequest
    plan: OverlapPlan
    meter: StepMeter
    observers: Observers
    job: JobFacts
    collector: RowCollector

    def learn(self, partner: overlap.Partner) -> float:
        self.observers.progress.enter(Phase.WARM_UP, f"{partner} alone")
        phase = StepPhase(overlap.StepOrder.COMPUTATION, partner, (), _OPERATIONS_TO_LEARN)
        sample = self.meter.measure(phase, self.plan.seconds * _SHORTER)
        (seconds,) = self.meter.group.largest([fmean(step.partner for step in sample.steps)])
        return seconds / _OPERATIONS_TO_LEARN

    def measure_again(self, case: Case, run: VariantRun, partner: overlap.Partner, count: int) -> float:
        """Repeat a step and return its time on the slowest rank in seconds. The result is the same on all ranks."""
        self.observers.progress.enter(Phase.OPERATION, f"{case.label}, {overlap.describe_cap(None)} again, {partner}")
        phase = StepPhase(overlap.StepOrder.COMPUTATION_FIRST, partner, [run.sweep.launch(case, 0)], count)
        sample = self.meter.measure(phase, self.plan.seconds * _SHORT)
        (seconds,) = self.meter.group.largest([fmean(step.period for step in sample.steps)])
        return seconds

    def row(
        self,
        number: int,
        case: Case,
        run: VariantRun,
        cap: Cap,
        partner: overlap.Partner,
        count: int,
        own_row: CollectiveRow,
    ) -> OverlapRow | None:
        """Measure all phases of a row, and verify the data of the last one. Return the row on rank 0, and None on
        other ranks.
        """
        sweep, check, seconds = run.sweep, self.request.check, self.plan.seconds
        launches = [sweep.launch(case, buffer) for buffer in range(min(sweep.count_buffers(case), _MOST_BUFFERS))]
        label = f"{case.label}, {overlap.describe_cap(cap.ctas)}, {partner}"
        self.observers.progress.enter(Phase.WARM_UP, label)
        sweep.fill(number, case, len(launches))
        self.observers.progress.enter(Phase.OPERATION, label)

        def measured(order: overlap.StepOrder, part: float) -> PhaseOfRanks | None:
            phase = StepPhase(order, partner, launches, count)
            return self.meter.gathered(self.meter.measure(phase, seconds * part))

        communication = measured(overlap.StepOrder.COMMUNICATION, _SHORTER)
        first = measured(overlap.StepOrder.COMMUNICATION_FIRST, _SHORT)
        computation = measured(overlap.StepOrder.COMPUTATION, _SHORT)
        sweep.poison(case, len(launches))
        together = measured(overlap.StepOrder.COMPUTATION_FIRST, 1.0)
        wrong = sweep.verify(number, case, launches) if check else 0
        wrong_partner = self.meter.steps.partner_wrong(partner) if check else 0
        self.observers.progress.enter(Phase.OUTPUT, label)
        counts = self.meter.group.collect((wrong, wrong_partner))
        if communication is None or first is None or computation is None or together is None or counts is None:
            return None
        times = overlap.compute_overlap_times(computation.steps, communication.steps, first.steps, together.steps)
        periods, load = together.steps.periods, together.load
        computed_wrong = sum(count for _, count in counts)
        channels = self.collector.channels(replace(case, setting=run.variant.setting), own_row)
        sample = overlap.StepSample(
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
            wrong=sum(count for count, _ in counts) + computed_wrong if check else None,
            note="; ".join(_notes(times, cap, channels, computed_wrong)) or None,
        )
        return overlap_row(self.plan, case.size_bytes, partner, cap.ctas, self.job, sample)


def _notes(times: overlap.OverlapTimes, cap: Cap, channels: int | None, computed_wrong: int) -> Iterator[str]:
    if computed_wrong:
        yield f"{computed_wrong:,} of the wrong elements are from the partner"
    if cap.ctas is not None and channels is not None and channels > cap.ctas:
        yield f"NCCL used {channels} channels, not {cap.ctas}"
    if times.in_flight > _COVERED * times.partner_together:
        yield "computation ended first, so κm includes the time of the collective after it"
    if times.compute_slowdown is None:
        yield "computation lost more than the time in flight, so there is no κc"
    if times.communication_first is None:
        yield "too short to overlap computation that begins later, so wait and share are not separated"
