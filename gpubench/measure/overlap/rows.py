"""The rows of an overlap, and of each size the cap with the shortest step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpubench.measure.collective.cases import Case, JobFacts
from gpubench.model.results.report import (
    OVERLAP_SECTION,
    ROWS_SECTION,
    CollectiveRow,
    Report,
    Section,
    Table,
    Verified,
)
from gpubench.model.results.rows.overlap import SHORTEST_STEPS_SECTION, OverlapRow, ShortestStepRow
from gpubench.model.results.winners import REFUSED_SECTION, RefusedRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.overlap.asked import OverlapAsked, Partner
from gpubench.model.terms.overlap.partners import operation_words
from gpubench.model.terms.overlap.times import OverlapTimes
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_size, percent
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict, overall


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCase:
    """One row to measure: a size of a collective under a cap of its CTAs, beside a partner."""

    collective: str
    size_bytes: int
    dtype: DataType
    ctas: int | None
    partner: Partner
    partner_operation: str


def overlap_case(case: Case, collective: str, asked: OverlapAsked, partner: Partner, ctas: int | None) -> OverlapCase:
    """A case of a sweep under a cap, beside a partner."""
    return OverlapCase(
        collective=collective,
        size_bytes=case.size_bytes,
        dtype=case.dtype,
        ctas=ctas,
        partner=partner,
        partner_operation=operation_words(partner, asked, case.dtype),
    )


def overlap_cases(cases: Sequence[Case], collective: str, asked: OverlapAsked) -> Iterator[OverlapCase]:
    """Every row, in the order in which it is measured: the caps of a size are neighbours in time."""
    for partner in asked.partners:
        for case in cases:
            for ctas in asked.ctas:
                yield overlap_case(case, collective, asked, partner, ctas)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """The samples of a row, put together over all ranks: times, and what was read of GPUs meanwhile.

    `wrong` of None: data were not checked.
    """

    times: OverlapTimes
    partner_count: int
    steps: int
    step_ci95_percent: float | None = None
    clock_mhz: int | None = None
    clock_alone_mhz: int | None = None
    power_w: float | None = None
    throttled_by: str | None = None
    channels: int | None = None
    capped_by: str | None = None
    wrong: int | None = None
    note: str | None = None


def row_of(case: OverlapCase, job: JobFacts, sample: StepSample) -> OverlapRow:
    """The row of a case."""
    times, checked = sample.times, sample.wrong is not None
    return OverlapRow(
        collective=case.collective,
        backend=job.backend,
        origin=job.origin,
        ranks=job.ranks,
        nodes=job.nodes,
        size_bytes=case.size_bytes,
        data_type=case.dtype,
        ctas=case.ctas,
        channels=sample.channels,
        capped_by=sample.capped_by,
        partner=case.partner,
        partner_operation=case.partner_operation,
        partner_count=sample.partner_count,
        partner_alone_us=_us(times.partner_alone),
        communication_alone_us=_us(times.communication_alone),
        communication_first_us=None if times.communication_first is None else _us(times.communication_first),
        together_us=_us(times.together),
        partner_together_us=_us(times.partner_together),
        communication_together_us=_us(times.communication_together),
        in_flight_us=_us(times.in_flight),
        compute_slowdown=times.compute_slowdown,
        communication_slowdown=times.communication_slowdown,
        waiting_slowdown=times.waiting_slowdown,
        sharing_slowdown=times.sharing_slowdown,
        hidden_share=_hidden_share(sample),
        step_us=_us(times.step),
        step_ci95_percent=sample.step_ci95_percent,
        steps=sample.steps,
        sm_clock_mhz=sample.clock_mhz,
        sm_clock_alone_mhz=sample.clock_alone_mhz,
        power_w=sample.power_w,
        throttled_by=sample.throttled_by,
        wrong=sample.wrong,
        verified=Verified.LAST if checked else Verified.NO,
        verdict=(Verdict.FAIL if sample.wrong else Verdict.PASS) if checked else None,
        note=sample.note,
    )


def _hidden_share(sample: StepSample) -> float | None:
    """What computation hides of the collective; None where it is shorter than what steps differ by."""
    noise = (sample.step_ci95_percent or 0.0) / 100 * sample.times.step
    return None if sample.times.communication_alone < noise else sample.times.hidden_share


def _us(seconds: float) -> float:
    return seconds * MICROSECONDS_PER_SECOND


AgainSteps = Mapping[tuple[str, int], float]
"""Seconds of a step with NCCL's own number of CTAs once all caps have had their turn, by partner and size in bytes."""


def shortest_steps(rows: Sequence[OverlapRow], again: AgainSteps) -> Iterator[ShortestStepRow]:
    """The shortest step of every partner and size that was measured under more than one cap.

    The two steps with NCCL's own number show how much a step varies while nothing is changed. Rows with
    wrong data take no part: a step that does not do its work is none.
    """
    usable = [row for row in rows if not row.wrong]
    for members in grouped(usable, lambda row: (row.partner, row.size_bytes)).values():
        if len({row.ctas for row in members}) < 2:
            continue
        best = min(members, key=lambda row: row.step_us)
        own = next((row for row in members if row.ctas is None), None)
        later = again.get((best.partner, best.size_bytes))
        drift = None if own is None or later is None else percent(_us(later) - own.step_us, own.step_us)
        gain = None if own is None else _gain(own.step_us * (1 + (drift or 0.0) / 200), best, own)
        noise = None if own is None else _noise(own, best, drift)
        yield ShortestStepRow(
            collective=best.collective,
            partner=best.partner,
            size_bytes=best.size_bytes,
            ctas=best.ctas,
            step_us=best.step_us,
            own_step_us=None if own is None else own.step_us,
            own_drift_percent=drift,
            own_compute_slowdown=None if own is None else own.compute_slowdown,
            own_communication_slowdown=None if own is None else own.communication_slowdown,
            gain_percent=gain,
            noise_percent=noise,
            beyond_noise=None if gain is None or noise is None else gain > noise,
            origin=best.origin,
        )


def _gain(own_us: float, best: OverlapRow, own: OverlapRow) -> float:
    """By how much the best step is shorter than NCCL's own, percent of that; 0 where that is the best."""
    return 0.0 if best is own else max(0.0, 100 * (own_us - best.step_us) / own_us)


def _noise(own: OverlapRow, best: OverlapRow, drift: float | None) -> float | None:
    """The half of a 95 % interval of the difference of two steps, or the drift where that is more; None: not known."""
    intervals = own.step_ci95_percent, best.step_ci95_percent
    if intervals[0] is None or intervals[1] is None:
        return None if drift is None else abs(drift)
    by_chance = math.hypot(intervals[0] * own.step_us, intervals[1] * best.step_us) / own.step_us
    return max(by_chance, abs(drift or 0.0))


def with_rows(
    report: Report,
    alone: Sequence[CollectiveRow],
    rows: Sequence[OverlapRow],
    refused: Sequence[RefusedRow] = (),
    again: AgainSteps = MappingProxyType({}),
) -> Report:
    """The report on a collective alone, `alone` its rows, as one on a collective beside computation.

    `refused` are the caps that NCCL would not take, `again` the steps with its own number once more.
    """
    found = list(shortest_steps(rows, again))
    wrong = list(wrong_data(rows))
    sections: dict[str, Section] = {
        SHORTEST_STEPS_SECTION: Table(ShortestStepRow.columns(), lambda: found),
        ROWS_SECTION: Table(CollectiveRow.columns(), lambda: alone),
        REFUSED_SECTION: Table(RefusedRow.columns(), lambda: refused),
        **report.sections,
    }
    return replace(
        report,
        verdict=overall([report.verdict, *(each.severity for each in wrong)]),
        findings=(*wrong, *report.findings),
        sections=sections,
        main=OVERLAP_SECTION,
    )


def wrong_data(rows: Sequence[OverlapRow]) -> Iterator[Finding]:
    """A finding on rows whose data were wrong beside computation."""
    bad = [row for row in rows if row.wrong]
    if bad:
        sizes = ", ".join(dict.fromkeys(format_size(row.size_bytes) for row in bad))
        partners = ", ".join(dict.fromkeys(row.partner for row in bad))
        yield Finding(
            id=WRONG_DATA,
            severity=Verdict.FAIL,
            subject=f"{bad[0].collective} of {sizes} beside {partners}",
            seen=f"{sum(row.wrong or 0 for row in bad)} wrong elements",
            expected="none, whatever else the GPUs do",
            cause="memory, a link or a library that fails under load",
            next_command=f"gpubench {bad[0].collective} --sizes {sizes.split(',')[0]}",
        )
