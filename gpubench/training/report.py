"""Builds the report of `gpubench plan`: ranked layouts, exposed communication, and the cost of faults."""

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.results.ending import LATER, SOON, last_line, part
from gpubench.model.results.plan import ExposedRow, FaultCostRow, LayoutRow
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.verdict import Verdict
from gpubench.training.program import FaultSeconds
from gpubench.training.step import StepPrediction, predict


def tokens_per_second(prediction: StepPrediction) -> float:
    """Return the number of tokens per second that all GPUs process together."""
    job = prediction.job
    return job.layout.data * job.settings.microbatches * job.model.tokens / prediction.seconds


class FaultCase(Struct, frozen=True, kw_only=True):
    """A changed fabric: the --fault text, a description, where the fault comes from, and its effect on times."""

    text: str
    what: str
    source: str
    seconds: FaultSeconds


FaultCost = tuple[FaultCase, StepPrediction]
"""A fault and the predicted step with this fault."""


def fault_costs(healthy: StepPrediction, cases: Sequence[FaultCase]) -> list[FaultCost]:
    """Predict the step with each fault, and return the most expensive fault first."""
    found = []
    for case in cases:
        job = replace(healthy.job, times=replace(healthy.job.times, fault=case.seconds))
        found.append((case, predict(job, with_range=False)))
    return sorted(found, key=lambda each: (-each[1].seconds, -each[1].communication_seconds))


NO_FAULT = "none"
"""The text of a FaultCase without a fault: the fabric that the profile expects."""

SECTIONS = ("layouts", "exposed", "fault_costs", "findings")

_MILLISECONDS = 1e3
_MEGABYTE = 2**20
_SAME_PERCENT = 0.05
_WORTH_SAYING_PERCENT = 3.0


class PlanOutcome(Struct, frozen=True, kw_only=True):
    """The complete prediction. The first layout in `ranked` is the one whose faults are shown.

    `as_expected` is the step of this layout with the collectives that the profile expects. It is None if the prediction
    already uses them.
    """

    ranked: Sequence[StepPrediction]
    faults: Sequence[FaultCost]
    as_expected: FaultCost | None = None
    gpu_memory_bytes: int | None = None

    @property
    def best(self) -> StepPrediction:
        """The predicted step of the first layout."""
        return self.ranked[0]


def plan_report(outcome: PlanOutcome, origin: str) -> Report:
    """Build the report. Its verdict is SKIP, because a prediction judges nothing."""
    best = outcome.best
    others = [*([] if outcome.as_expected is None else [outcome.as_expected]), *outcome.faults]
    return Report(
        verdict=Verdict.SKIP,
        complete=True,
        sections=Table.group_by_section(
            {
                LayoutRow: [
                    _make_layout_row(place, each, outcome.gpu_memory_bytes)
                    for place, each in enumerate(outcome.ranked, 1)
                ],
                ExposedRow: lambda: exposed_rows(best),
                FaultCostRow: lambda: [_make_fault_row(*other, best) for other in others],
            }
        ),
        main=LayoutRow.section,
        sentence=_sentence(outcome, origin),
    )


def _make_layout_row(place: int, shown: StepPrediction, gpu_memory_bytes: int | None) -> LayoutRow:
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
        states_bytes=job.states_bytes,
        gpu_memory_bytes=gpu_memory_bytes,
        host_ms=shown.host * _MILLISECONDS if job.compute.host_seconds else None,
    )


def exposed_rows(prediction: StepPrediction) -> list[ExposedRow]:
    """Return the cost of each kind of communication, most exposed time first."""
    alone_of: dict[str, float] = defaultdict(float)
    for (source, _), each in prediction.communications.items():
        alone_of[source] += each.seconds
    rows = []
    for (source, collective), each in prediction.communications.items():
        # Exposed time is known only per source, so divide it among the collectives of a source in proportion to their
        # times.
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


def _make_fault_row(case: FaultCase, shown: StepPrediction, healthy: StepPrediction) -> FaultCostRow:
    return FaultCostRow(
        fault=case.text,
        what=case.what,
        source=case.source,
        step_ms=shown.seconds * _MILLISECONDS,
        slower_percent=_slower(shown, healthy),
        exposed_ms=shown.exposed * _MILLISECONDS,
        communication_ms=shown.communication_seconds * _MILLISECONDS,
        slowed_ms=shown.times.slowed * _MILLISECONDS,
        note=None if case.text == NO_FAULT else _why_no_slower(shown, healthy),
    )


def _why_no_slower(faulty: StepPrediction, healthy: StepPrediction) -> str | None:
    if _slower(faulty, healthy) > 0:
        return None
    healthy_seconds = healthy.communication_seconds
    ratio = faulty.communication_seconds / healthy_seconds if healthy_seconds else 1.0
    if ratio < 1 + _SAME_PERCENT / 100:
        return (
            f"no collective of {healthy.job.layout} takes longer, because none uses the broken part, or all are "
            "already as slow"
        )
    return f"communication takes {ratio:.1f} times as long, but all of it overlaps computation"


def _slower(one: StepPrediction, other: StepPrediction) -> float:
    """Return how much longer one step takes than the other, in percent. Rounding differences count as 0."""
    percent = 100 * (one.seconds / other.seconds - 1) if other.seconds else 0.0
    return 0.0 if abs(percent) < _SAME_PERCENT else percent


def _sentence(outcome: PlanOutcome, origin: str) -> str:
    best = outcome.best
    cost = best.exposed + best.times.slowed
    took = f"a step of {best.job.layout} takes {_spanned(best.least, best.most)}"
    fabric = f"of which communication costs {100 * cost / best.seconds:.0f} %"
    lost, slower = 0.0, ""
    if outcome.as_expected is not None:
        lost = _slower(best, outcome.as_expected[1])
        slower = f"{lost:.0f} % slower than on the fabric that {outcome.as_expected[0].source} expects"
    waits = f"{_spanned(best.host)} of it waits for the host, which issues a step in {_spanned(best.job.host_seconds)}"
    worst: tuple[str, ...] = ()
    if outcome.faults:
        case, prediction = outcome.faults[0]
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
    """Format a time as a range, or as a single number if both ends look the same.

    Examples: '355 to 418 ms', '12.3 ms' and '21.9 to 29.3 s'.
    """
    most = least if most is None else most
    scale, unit = (1.0, "s") if most >= _LONG_SECONDS else (_MILLISECONDS, "ms")
    low, high = (f"{each * scale:,.{0 if most * scale >= 100 else 1}f}" for each in (least, most))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


_LONG_SECONDS = 10.0
