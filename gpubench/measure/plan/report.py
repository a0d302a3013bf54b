"""Report of a plan: layouts ranked, exposed communication, and the cost of faults."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpubench.errors import UsageError
from gpubench.measure.plan.program import MOST_BLOCKS, CollectiveTimesFound, FaultSeconds, StepJob
from gpubench.measure.plan.step import StepPrediction, predict, roughly
from gpubench.model.results.ending import LATER, SOON, last_line, part
from gpubench.model.results.plan import CurveRow, ExposedRow, FaultCostRow, LayoutRow
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND
from gpubench.model.terms.verdict import Verdict
from gpubench.model.workload import MemoryNeed, ParallelLayout, TransformerModel, memory_need
from gpubench.records import dataclass

_MOST_THAT_DO_NOT_FIT = 4
"""Of layouts that do not fit those that come nearest are simulated too."""

_MOST_COMPARED = 40
"""Of layouts that nobody asked for; those that split the model into more parts than these communicate more."""

_MOST_WHOLE = 8
"""Of many layouts those that are simulated whole, and as ranges: as many as the terminal shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateLayout:
    """A layout that the batch divides by; `fits` of None: the memory of a GPU is not known."""

    layout: ParallelLayout
    microbatches: int
    need: MemoryNeed
    fits: bool | None


@dataclass(frozen=True, slots=True)
class RankedLayout:
    """A layout with its predicted step."""

    candidate: CandidateLayout
    prediction: StepPrediction


def microbatches_of(layout: ParallelLayout, asked: int | None, sequences: int, batch: int) -> int | None:
    """Microbatches of a data-parallel rank in a step of so many sequences in all; None where they do not divide.

    An interleaved pipeline needs a multiple of its stages.
    """
    count, rest = (asked, 0) if asked is not None else divmod(sequences, layout.data * batch)
    if rest or not count or (layout.stages_per_gpu > 1 and count % layout.pipeline):
        return None
    return count


def candidates_of(
    model: TransformerModel,
    layouts: Sequence[ParallelLayout],
    *,
    sequences: int,
    optimizer_bytes: int,
    microbatches: int | None = None,
    gpu_memory_bytes: int | None = None,
) -> list[CandidateLayout]:
    """Those of the layouts that the batch divides by."""
    found = []
    for layout in layouts:
        count = microbatches_of(layout, microbatches, sequences, model.batch)
        if count is not None:
            need = memory_need(model, layout, count, optimizer_bytes)
            fits = None if gpu_memory_bytes is None else need.total <= gpu_memory_bytes
            found.append(CandidateLayout(layout=layout, microbatches=count, need=need, fits=fits))
    return found


def rank(job: StepJob, candidates: Sequence[CandidateLayout], unknown: list[str] | None = None) -> list[RankedLayout]:
    """Candidates by the time of a token, the first eight as ranges.

    Where nobody asked for them, `unknown` is not None and gathers those whose collectives nothing is known of; only a
    few of those that do not fit are simulated; and of many only the fastest eight whole. UsageError is raised where all
    are unknown.
    """
    taken = list(candidates)
    if unknown is not None:
        fitting = sorted((each for each in taken if each.fits is not False), key=lambda each: each.layout.parts)
        others = sorted((each for each in taken if each.fits is False), key=lambda each: each.need.total)
        taken = [*fitting[:_MOST_COMPARED], *others[: _MOST_THAT_DO_NOT_FIT if fitting else 1]]
    is_rough = unknown is not None and len(taken) > _MOST_WHOLE
    found, last = list[RankedLayout](), None
    for each in taken:
        own = replace(job, layout=each.layout, settings=replace(job.settings, microbatches=each.microbatches))
        try:
            found.append(RankedLayout(each, roughly(own) if is_rough else predict(own, with_range=False)))
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


def _by_time(each: RankedLayout) -> tuple[bool, float, int]:
    return each.candidate.fits is False, -tokens_per_second(each.prediction), each.candidate.need.total


def tokens_per_second(prediction: StepPrediction) -> float:
    """Of all GPUs."""
    job = prediction.job
    return job.layout.data * job.settings.microbatches * job.model.tokens / prediction.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """Another fabric: as --fault writes it, in words, who asked for it, what it makes of a time, and how."""

    text: str
    what: str
    source: str
    how: str
    seconds: FaultSeconds


@dataclass(frozen=True, slots=True)
class FaultCost:
    """A fault with the step that it makes."""

    case: FaultCase
    prediction: StepPrediction


def fault_costs(healthy: StepPrediction, cases: Sequence[FaultCase]) -> list[FaultCost]:
    """The same step with each fault, the costliest first."""
    found = []
    for case in cases:
        job = replace(healthy.job, times=replace(healthy.job.times, fault=case.seconds))
        found.append(FaultCost(case, predict(job, with_range=False)))
    return sorted(found, key=lambda each: (-each.prediction.seconds, -each.prediction.communication_seconds))


NO_FAULT = "none"
"""In the place of a fault: the fabric that the profile expects."""

SECTIONS = ("layouts", "exposed", "fault_costs", "curves", "findings")

_MILLISECONDS = 1e3
_MEGABYTE = 2**20
_SAME_PERCENT = 0.05
_WORTH_SAYING_PERCENT = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """All that was predicted: the first of `ranked` is the layout whose faults are shown.

    `as_expected` is its step with the collectives that the profile expects; None where it follows from these.
    """

    ranked: Sequence[RankedLayout]
    faults: Sequence[FaultCost]
    times: CollectiveTimesFound
    as_expected: FaultCost | None = None
    gpu_memory_bytes: int | None = None

    @property
    def best(self) -> StepPrediction:
        """The step of the layout that is shown."""
        return self.ranked[0].prediction


def plan_report(outcome: PlanOutcome, origin: str) -> Report:
    """The report. It predicts and judges nothing: its verdict is SKIP."""
    best = outcome.best
    others = [*([] if outcome.as_expected is None else [outcome.as_expected]), *outcome.faults]
    return Report(
        verdict=Verdict.SKIP,
        complete=True,
        sections=Table.by_section(
            {
                LayoutRow: [
                    _layout_row(place, each, outcome.gpu_memory_bytes) for place, each in enumerate(outcome.ranked, 1)
                ],
                ExposedRow: lambda: exposed_rows(best),
                FaultCostRow: lambda: [_fault_row(each, best) for each in others],
                CurveRow: lambda: list(_curve_rows(outcome.times)),
            }
        ),
        main=LayoutRow.section,
        sentence=_sentence(outcome, origin),
    )


def _layout_row(place: int, ranked: RankedLayout, gpu_memory_bytes: int | None) -> LayoutRow:
    shown, need = ranked.prediction, ranked.candidate.need
    job = shown.job
    has_buckets = job.layout.gradient_ranks > 1 and not job.layout.sharding.gathers_parameters
    return LayoutRow(
        place=place,
        layout=str(job.layout),
        gpus=job.layout.gpus,
        microbatches=job.settings.microbatches,
        step_ms=shown.seconds * _MILLISECONDS,
        step_least_ms=shown.least * _MILLISECONDS,
        step_most_ms=shown.most * _MILLISECONDS,
        compute_ms=shown.times.compute * _MILLISECONDS,
        slowed_ms=shown.times.slowed * _MILLISECONDS,
        exposed_ms=shown.exposed * _MILLISECONDS,
        bubble_ms=shown.times.bubble * _MILLISECONDS,
        tokens_per_second=tokens_per_second(shown),
        bucket_mb=job.bucket_bytes / _MEGABYTE if has_buckets else None,
        memory_bytes=need.total,
        gpu_memory_bytes=gpu_memory_bytes,
        fits=ranked.candidate.fits,
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


def _fault_row(cost: FaultCost, healthy: StepPrediction) -> FaultCostRow:
    shown = cost.prediction
    return FaultCostRow(
        fault=cost.case.text,
        what=cost.case.what,
        source=cost.case.source,
        step_ms=shown.seconds * _MILLISECONDS,
        slower_percent=_slower(shown, healthy),
        exposed_ms=shown.exposed * _MILLISECONDS,
        how=cost.case.how,
        communication_ms=shown.communication_seconds * _MILLISECONDS,
        slowed_ms=shown.times.slowed * _MILLISECONDS,
        note=None if cost.case.text == NO_FAULT else _why_no_slower(shown, healthy),
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
    for (name, group), curve in times.curves.items():
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


def _sentence(outcome: PlanOutcome, origin: str) -> str:
    best = outcome.best
    cost = best.exposed + best.times.slowed
    took = f"a step of {best.job.layout} takes {_spanned(best.least, best.most)}"
    fabric = f"of which communication costs {100 * cost / best.seconds:.0f} %"
    lost, slower = 0.0, ""
    if outcome.as_expected is not None:
        lost = _slower(best, outcome.as_expected.prediction)
        slower = f"{lost:.0f} % slower than on the fabric that {outcome.as_expected.case.source} expects"
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
