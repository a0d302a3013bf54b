"""Report of a plan: layouts ranked, exposed communication, best settings, cost of faults, and a timeline."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpubench.errors import UsageError
from gpubench.measure.plan.program import MOST_BLOCKS, CollectiveTimesFound, FaultSeconds, StepJob
from gpubench.measure.plan.step import StepPrediction, predict, roughly
from gpubench.model.results.ending import LATER, SOON, last_line, part
from gpubench.model.results.plan import CurveRow, ExposedRow, FaultCostRow, LayoutRow, TimelineRow
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND
from gpubench.model.terms.verdict import Verdict
from gpubench.model.workload import MemoryNeed, ParallelLayout, TransformerModel, layouts_for, memory_need
from gpubench.records import dataclass

_MOST_THAT_DO_NOT_FIT = 4
"""Of layouts that do not fit those that come nearest are simulated too."""

_MOST_COMPARED = 40
"""Of layouts that nobody asked for; those that split the model into more parts than these communicate more."""

_MOST_WHOLE = 8
"""Of many layouts those that are simulated whole, and as ranges: as many as the terminal shows."""


@dataclass(frozen=True, slots=True)
class CandidateLayout:
    """A layout that the batch divides by, with its microbatches and its need of memory."""

    layout: ParallelLayout
    microbatches: int
    need: MemoryNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout with its predicted step and its need of memory."""

    prediction: StepPrediction
    need: MemoryNeed
    gpu_memory_bytes: int | None

    @property
    def layout(self) -> ParallelLayout:
        """The layout."""
        return self.prediction.job.layout

    @property
    def fits(self) -> bool | None:
        """Whether a GPU's memory is enough; None where it is not known."""
        return None if self.gpu_memory_bytes is None else self.need.total <= self.gpu_memory_bytes


def microbatches_of(layout: ParallelLayout, asked: int | None, sequences: int, batch: int) -> int | None:
    """Microbatches of a data-parallel rank in a step of so many sequences in all; None where they do not divide.

    An interleaved pipeline needs a multiple of its stages.
    """
    if asked is not None:
        count = asked
    else:
        whole, rest = divmod(sequences, layout.data * batch)
        if rest or not whole:
            return None
        count = whole
    if layout.stages_per_gpu > 1 and count % layout.pipeline:
        return None
    return count


def _has_buckets(job: StepJob) -> bool:
    return job.layout.gradient_ranks > 1 and not job.layout.sharding.gathers_parameters


def candidates_of(
    model: TransformerModel,
    layouts: Sequence[ParallelLayout],
    *,
    sequences: int,
    microbatches: int | None,
    optimizer_bytes: int,
) -> list[CandidateLayout]:
    """Those of the layouts that the batch divides by."""
    counts = ((layout, microbatches_of(layout, microbatches, sequences, model.batch)) for layout in layouts)
    return [
        CandidateLayout(layout, count, memory_need(model, layout, count, optimizer_bytes))
        for layout, count in counts
        if count is not None
    ]


def rank(
    job: StepJob,
    candidates: Sequence[CandidateLayout],
    *,
    gpu_memory_bytes: int | None,
    unknown: list[str] | None = None,
) -> list[RankedLayout]:
    """Candidates by the time of a token, the first eight as ranges.

    Where nobody asked for them, `unknown` is not None and gathers those whose collectives nothing is known of; only a
    few of those that do not fit are simulated; and of many only the fastest eight whole. UsageError is raised where all
    are unknown.
    """
    fitting = [each for each in candidates if gpu_memory_bytes is None or each.need.total <= gpu_memory_bytes]
    others = sorted((each for each in candidates if each not in fitting), key=lambda each: each.need.total)
    if unknown is not None:
        fitting = sorted(fitting, key=lambda each: each.layout.parts)[:_MOST_COMPARED]
        others = others[: _MOST_THAT_DO_NOT_FIT if fitting else 1]
    taken = [*fitting, *others]
    estimate = roughly if unknown is not None and len(taken) > _MOST_WHOLE else _plainly
    found, last = list[RankedLayout](), None
    for each in taken:
        own = replace(job, layout=each.layout, settings=replace(job.settings, microbatches=each.microbatches))
        try:
            found.append(RankedLayout(prediction=estimate(own), need=each.need, gpu_memory_bytes=gpu_memory_bytes))
        except UsageError as error:
            if unknown is None:
                raise
            unknown.append(f"{each.layout}: {error.seen}")
            last = error
    if not found and last is not None:
        raise last
    found.sort(key=_by_time)
    first = [
        replace(each, prediction=predict(replace(each.prediction.job, most_blocks=MOST_BLOCKS)))
        for each in found[:_MOST_WHOLE]
    ]
    return [*sorted(first, key=_by_time), *found[_MOST_WHOLE:]]


def _plainly(job: StepJob) -> StepPrediction:
    return predict(job, with_range=False)


def _by_time(each: RankedLayout) -> tuple[bool, float, int]:
    return each.fits is False, _seconds_a_sequence(each.prediction), each.need.total


def first_fit(
    model: TransformerModel, gpus: int, gpus_per_node: int, gpu_memory_bytes: int, optimizer_bytes: int
) -> CandidateLayout | None:
    """The layout on so many GPUs that needs least memory; None where it does not fit."""
    candidates = candidates_of(
        model,
        layouts_for(model, gpus, gpus_per_node),
        sequences=model.batch * gpus,
        microbatches=None,
        optimizer_bytes=optimizer_bytes,
    )
    least = min(candidates, key=lambda each: each.need.total)
    return least if least.need.total <= gpu_memory_bytes else None


def _seconds_a_sequence(prediction: StepPrediction) -> float:
    job = prediction.job
    return prediction.seconds / (job.layout.data * job.settings.microbatches * job.model.batch)


def tokens_per_second(prediction: StepPrediction) -> float:
    """Of all GPUs."""
    return prediction.job.model.sequence / _seconds_a_sequence(prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """A fault: as --fault writes it, in words, who asked for it, and what it makes of a time."""

    text: str
    what: str
    source: str
    seconds: FaultSeconds
    how: str


@dataclass(frozen=True, slots=True)
class FaultCost:
    """A fault with the step that it makes."""

    case: FaultCase
    prediction: StepPrediction


def fault_costs(healthy: StepPrediction, cases: Sequence[FaultCase]) -> list[FaultCost]:
    """The same step with each fault, the costliest first."""
    found = []
    for case in cases:
        job = replace(healthy.job, times=healthy.job.times.with_fault(case.seconds))
        found.append(FaultCost(case, predict(job, with_range=False)))
    return sorted(found, key=lambda each: (-each.prediction.seconds, -each.prediction.communication_seconds))


SECTIONS = ("layouts", "exposed", "fault_costs", "curves", "timeline", "findings")

WAITING = "waiting"
"""The stream of a timeline that has what was waited for."""

_MILLISECONDS = 1e3
_MEGABYTE = 2**20
_SAME_PERCENT = 0.05
_WORTH_SAYING_PERCENT = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """All that was predicted: the first of `ranked` is the layout whose faults and timeline are shown.

    `as_expected` is its step with the collectives that `profile` expects; None where it follows from these.
    """

    ranked: Sequence[RankedLayout]
    faults: Sequence[FaultCost]
    times: CollectiveTimesFound
    as_expected: StepPrediction | None = None
    profile: str = ""

    @property
    def best(self) -> StepPrediction:
        """The step of the layout that is shown."""
        return self.ranked[0].prediction


def plan_report(outcome: PlanOutcome, origin: str) -> Report:
    """The report. It predicts and judges nothing: its verdict is SKIP."""
    layouts = [_layout_row(place, each) for place, each in enumerate(outcome.ranked, 1)]
    best = outcome.best
    return Report(
        verdict=Verdict.SKIP,
        complete=True,
        sections=Table.by_section(
            {
                LayoutRow: layouts,
                ExposedRow: lambda: exposed_rows(best),
                FaultCostRow: lambda: list(_fault_rows(best, outcome)),
                CurveRow: lambda: list(_curve_rows(outcome.times)),
                TimelineRow: lambda: _timeline_rows(best),
            }
        ),
        main=LayoutRow.section,
        sentence=_sentence(outcome, origin),
    )


def _layout_row(place: int, ranked: RankedLayout) -> LayoutRow:
    shown, need = ranked.prediction, ranked.need
    job = shown.job
    return LayoutRow(
        place=place,
        layout=str(ranked.layout),
        gpus=ranked.layout.gpus,
        microbatches=job.settings.microbatches,
        step_ms=shown.seconds * _MILLISECONDS,
        step_least_ms=shown.least * _MILLISECONDS,
        step_most_ms=shown.most * _MILLISECONDS,
        compute_ms=shown.times.compute * _MILLISECONDS,
        slowed_ms=shown.times.slowed * _MILLISECONDS,
        exposed_ms=shown.exposed * _MILLISECONDS,
        bubble_ms=shown.times.bubble * _MILLISECONDS,
        tokens_per_second=tokens_per_second(shown),
        bucket_mb=job.bucket_bytes / _MEGABYTE if _has_buckets(job) else None,
        memory_bytes=need.total,
        gpu_memory_bytes=ranked.gpu_memory_bytes,
        fits=ranked.fits,
        weights_bytes=need.weights,
        gradients_bytes=need.gradients,
        optimizer_bytes=need.optimizer,
        activations_bytes=need.activations,
        host_ms=shown.host * _MILLISECONDS if job.compute.host_seconds else None,
    )


def exposed_rows(prediction: StepPrediction) -> list[ExposedRow]:
    """What each kind of communication costs, the costliest first."""
    alone_of: dict[str, float] = defaultdict(float)
    for (source, _), each in prediction.communications.items():
        alone_of[source] += each.seconds
    rows = []
    for (source, collective), each in prediction.communications.items():
        # What is waited for is told by source; several collectives of one share it by their time.
        exposed = prediction.times.exposed.get(source, 0.0) * each.seconds / alone_of[source]
        rows.append(
            ExposedRow(
                source=source,
                collective=collective,
                operations=round(each.operations),
                bytes=round(each.size_bytes),
                alone_ms=each.seconds * _MILLISECONDS,
                exposed_ms=exposed * _MILLISECONDS,
                hidden_percent=100 * max(0.0, 1 - exposed / each.seconds),
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_ms)


def _fault_rows(healthy: StepPrediction, outcome: PlanOutcome) -> Iterator[FaultCostRow]:
    expected = outcome.as_expected
    if expected is not None:
        yield FaultCostRow(
            fault="none",
            what="the fabric as its profile expects it",
            source=outcome.profile,
            step_ms=expected.seconds * _MILLISECONDS,
            slower_percent=_slower(expected, healthy),
            exposed_ms=expected.exposed * _MILLISECONDS,
            how=f"collectives as profile {outcome.profile} expects them",
            communication_ms=expected.communication_seconds * _MILLISECONDS,
            slowed_ms=expected.times.slowed * _MILLISECONDS,
        )
    for each in outcome.faults:
        yield FaultCostRow(
            fault=each.case.text,
            what=each.case.what,
            source=each.case.source,
            step_ms=each.prediction.seconds * _MILLISECONDS,
            slower_percent=_slower(each.prediction, healthy),
            exposed_ms=each.prediction.exposed * _MILLISECONDS,
            how=each.case.how,
            communication_ms=each.prediction.communication_seconds * _MILLISECONDS,
            slowed_ms=each.prediction.times.slowed * _MILLISECONDS,
            note=_why_no_slower(each.prediction, healthy),
        )


def _why_no_slower(faulty: StepPrediction, healthy: StepPrediction) -> str | None:
    if _slower(faulty, healthy) > 0:
        return None
    alone = healthy.communication_seconds
    ratio = faulty.communication_seconds / alone if alone else 1.0
    if ratio < 1 + _SAME_PERCENT / 100:
        return (
            f"no collective of {healthy.job.layout} takes longer: none uses what is broken, or all are as slow already"
        )
    return f"communication takes {ratio:.1f} times as long, all of it beside computation"


def _slower(one: StepPrediction, other: StepPrediction) -> float:
    """Percent; what differs by rounding alone is the same."""
    percent = 100 * (one.seconds / other.seconds - 1) if other.seconds else 0.0
    return 0.0 if abs(percent) < _SAME_PERCENT else percent


def _curve_rows(times: CollectiveTimesFound) -> Iterator[CurveRow]:
    for name, group in times.used:
        curve = times.curve(name, group)
        for point in curve.points:
            yield CurveRow(
                collective=name,
                ranks=group.ranks,
                nodes=group.nodes,
                size_bytes=point.size_bytes,
                time_us=point.seconds * MICROSECONDS_PER_SECOND,
                spread_percent=100 * point.spread,
                origin=curve.origin,
                source=curve.source,
                note=curve.note or None,
            )


def _timeline_rows(prediction: StepPrediction) -> list[TimelineRow]:
    """Spans by time; computation of one block that follows without a gap is one."""
    timeline = prediction.timeline
    rows: list[TimelineRow] = []
    computing: int | None = None
    for span in timeline.spans:
        task = timeline.tasks[span.task]
        if span.end <= span.start:
            continue
        name = task.name.partition(".")[0] if task.computes else task.name
        name = f"block {name}" if name.isdigit() else name
        row = TimelineRow(
            device=prediction.device,
            stream=task.stream,
            name=name,
            start_us=span.start * MICROSECONDS_PER_SECOND,
            end_us=span.end * MICROSECONDS_PER_SECOND,
            exposed=not task.computes
            and any(each.source == task.source and span.start <= each.start < span.end for each in timeline.idle),
        )
        if not task.computes:
            rows.append(row)
        elif computing is not None and rows[computing].name == name and row.start_us - rows[computing].end_us < 1e-3:
            rows[computing] = replace(row, start_us=rows[computing].start_us)
        else:
            computing = len(rows)
            rows.append(row)
    rows += [
        TimelineRow(
            device=prediction.device,
            stream=WAITING,
            name=idle.source,
            start_us=idle.start * MICROSECONDS_PER_SECOND,
            end_us=idle.end * MICROSECONDS_PER_SECOND,
            exposed=True,
        )
        for idle in timeline.idle
    ]
    return sorted(rows, key=lambda row: row.start_us)


def _sentence(outcome: PlanOutcome, origin: str) -> str:
    best = outcome.best
    cost = best.exposed + best.times.slowed
    took = f"a step of {outcome.ranked[0].layout} takes {_spanned(best.least, best.most)}"
    fabric = f"of which communication costs {100 * cost / best.seconds:.0f} %"
    lost = 0.0 if outcome.as_expected is None else _slower(best, outcome.as_expected)
    slower = f"{lost:.0f} % slower than on the fabric that {outcome.profile} expects"
    waits = f"{_spanned(best.host)} of it waits for the host, which issues a step in {_spanned(best.job.host_seconds)}"
    worst: tuple[str, ...] = ()
    if outcome.faults:
        case, prediction = outcome.faults[0].case, outcome.faults[0].prediction
        more, percent = prediction.seconds - best.seconds, _slower(prediction, best)
        worst = (f"{case.what} would cost nothing", f"{case.text} would cost nothing")
        if _why_no_slower(prediction, best) is None:
            worst = (
                f"{case.what} would cost {_spanned(more)} more (+{percent:.0f} %)",
                f"{case.what} would cost +{percent:.0f} %",
                f"{case.text} would cost +{percent:.0f} %",
            )
    parts = [
        part(f"{took}, {fabric}"),
        part(waits if best.host > 0 else "", importance=LATER),
        part(slower if lost > _WORTH_SAYING_PERCENT else "", importance=SOON),
        part(*worst, importance=SOON),
    ]
    return last_line(Verdict.SKIP, origin, parts)


def _spanned(least: float, most: float | None = None) -> str:
    """A time as a range, or as one number where both ends read alike: '355 to 418 ms', '12.3 ms', '21.9 to 29.3 s'."""
    most = least if most is None else most
    scale, unit = (1.0, "s") if most >= _LONG_SECONDS else (_MILLISECONDS, "ms")
    low, high = (f"{each * scale:,.{0 if most * scale >= 100 else 1}f}" for each in (least, most))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


_LONG_SECONDS = 10.0
