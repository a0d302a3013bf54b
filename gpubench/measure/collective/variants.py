"""Measure variants of a sweep in turn, or one sweep in several groups of ranks at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.record import SweepRequest
from gpubench.measure.collective.cases import Case, JobFacts, cases
from gpubench.measure.collective.report import MeasuredRow, RowCollector, middle, slow_unexplained
from gpubench.measure.collective.sweep import NO_OBSERVERS, Buffers, Issue, Observers, Sweep
from gpubench.model.results.compare import find_sibling_figures
from gpubench.model.results.report import CollectiveRow, RankTimeRow, Report, Table
from gpubench.model.results.speed import AMONG_SIBLINGS, ExpectedTime, Slowness, is_lost_in_noise, is_slow, judge_row
from gpubench.model.terms.ranks import Phase, RankGroup, RankIdentity
from gpubench.model.terms.settings import AGAIN
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Finding, Origin, Verdict, worst_verdict
from gpubench.ports.backend import Backend, SharedMemory
from gpubench.ports.group import Group, Listener

if TYPE_CHECKING:
    from gpubench.measure.collective.paths import OperationKey
    from gpubench.model.results.backends import RefusedRow


SECONDS_BETWEEN_LINES = 60.0


class Soak(Struct):
    """The state of a soak test on the first rank. If `cycles` is 0, it runs until `should_end` returns true."""

    cycles: int
    print_line: Callable[[str], None]
    should_end: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    wrong: int = 0
    rows: int = 0
    cycle: int = 1
    _first: dict[Case, float] = field(default_factory=dict)
    _slowest: tuple[float, str] | None = None
    _began: float | None = None
    _printed_at: float = 0.0

    def begin(self, case: Case, row: CollectiveRow) -> None:
        """Keep the time of a row in the first cycle, to compare later cycles with it."""
        if self._began is None:
            self._began = self._printed_at = self.clock()
        self._first[case] = row.time_us
        self._count(row)

    def is_over(self) -> bool:
        """True after the last cycle, or if the user stopped the run."""
        return self.should_end() or 0 < self.cycles < self.cycle

    def add(self, case: Case, row: CollectiveRow) -> None:
        """Count a row of a later cycle, and print a progress line every minute."""
        self._count(row)
        slower = row.time_us / self._first[case]
        if self._slowest is None or slower > self._slowest[0]:
            label = f"{case.label} {_time(row.time_us)}, {_time(self._first[case])} in the first cycle"
            self._slowest = slower, label
        if self.clock() - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = self.clock()
            self.print_line(self.line())
            self._slowest = None

    def line(self) -> str:
        """Return a progress line, for example 'soak: 3 min, 120 cycles, 1440 rows, 0 wrong elements'.

        It ends with the row that was slowest since the last line, relative to its time in the first cycle.
        """
        minutes = (self.clock() - (self._began or 0.0)) / 60
        slowest = "" if self._slowest is None else f"; slowest since the last line: {self._slowest[1]}"
        wrong = plural(self.wrong, "wrong element")
        done = f"{plural(self.cycle - 1, 'cycle')}, {plural(self.rows, 'row')}"
        return f"soak: {minutes:.0f} min, {done}, {wrong}{slowest}"

    def _count(self, row: CollectiveRow) -> None:
        self.rows += 1
        self.wrong += row.wrong or 0


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


T = TypeVar("T")


class NamedBackend(Struct, frozen=True):
    """The name of a backend that cannot be opened here."""

    name: str


class SweepVariant(Struct, frozen=True, kw_only=True):
    """One variant of a sweep: a backend with its defaults or with a setting.

    setting     name in rows, or None for the backend's defaults
    refused     reason why the variant cannot run, if it is known before opening, or empty
    open        prepares the library, and returns a function that binds operations
    fits        selects the cases that the variant can run
    drop        releases the library
    refusals    exceptions that the library raises if it refuses a setting
    explain     returns the text of such an exception
    registered  returns how the buffers are registered
    """

    setting: str | None
    backend: "Backend | NamedBackend"
    refused: str = ""
    open: Callable[[], Issue] | None = None
    fits: Callable[[Case], bool] = lambda _case: True
    drop: Callable[[Issue], None] = lambda _issue: None
    refusals: tuple[type[Exception], ...] = ()
    explain: Callable[[Exception], str] = str
    logs_choices: bool = False
    registered: Callable[[], str | None] = lambda: None

    @property
    def opened(self) -> Backend:
        """The opened backend. Raises TypeError if it cannot be opened here."""
        if isinstance(self.backend, NamedBackend):
            raise TypeError(f"{self.backend.name} is not available")
        return self.backend

    @property
    def name(self) -> str:
        return self.setting or self.backend.name


def measure_variants(
    request: SweepRequest,
    group: Group,
    variants: Sequence[SweepVariant],
    identities: Sequence[RankIdentity],
    listener: Listener[CollectiveRow],
    observers: Observers = NO_OBSERVERS,
) -> Report:
    """Measure each case in all variants in turn, and in the first variant once more.

    The two times of the first variant show the noise. Every rank must pass rows to `listener`. Only the first rank's
    report has a verdict on paths. If a variant cannot run on one rank, all ranks skip it and report the reason.
    """
    preparation = VariantPreparation(request, group, identities, observers)
    runs = preparation.prepare(variants)
    refused = preparation.refused if len(variants) > 1 else None
    collector, rows = measure_runs(preparation, runs, listener, refused)
    report = finished(collector, observers)
    return report if group.rank != 0 or refused is None else add_winners(report, rows, refused)


_NUMBERS_A_CYCLE = 1 << 16
"""Row numbers increase by this much per cycle, so that every row has its own test data."""


def measure_runs(
    preparation: "VariantPreparation",
    runs: "Sequence[VariantRun]",
    listener: Listener[CollectiveRow],
    refused: "Sequence[RefusedRow] | None" = None,
) -> tuple[RowCollector, list[CollectiveRow]]:
    """Measure every case of the prepared variants. Return the collector, which builds the report, and the rows."""
    request, group, observers = preparation.request, preparation.group, preparation.observers
    judge = None if observers.path_observer is None else observers.path_observer.judge()
    speed = None
    if group.rank == 0:
        speed = observers.make_speed_judge(None if judge is None else judge.observations.circumstances)
    collector = RowCollector(preparation.identities, listener, judge, observers.recorder, refused, speed)
    for run in runs:
        run.sweep.warm_up(run.cases)
    rows: list[CollectiveRow] = []
    plan = list(_plan(runs))
    soak = observers.soak
    awake: Backend | None = None
    for number, (run, case) in enumerate(plan):
        listener.progress(number, len(plan), f"{request.collective.name} {case.label}")
        observed = run.sweep.backend is runs[0].sweep.backend
        tries: list[MeasuredRow] = []
        if run.sweep.backend is not awake:
            awake = run.sweep.backend
            run.sweep.wake_up(case)
        while not tries or (
            observers.measures_again
            and group.broadcast(group.rank == 0 and collector.needs_repetition(case, tries, observed=observed))
        ):
            # Every number gives other test data, so data that another variant left in the buffers count as wrong.
            tries.append(run.sweep.row(number + len(tries) * len(plan), case))
        rows.append(collector.add(case, _middle_try(tries), observers.progress, observed=observed))
        if soak is not None:
            soak.begin(case, rows[-1])
    if soak is not None:
        _repeat(plan, runs[0], group, soak, collector, observers)
    return collector, rows


def _repeat(
    plan: "Sequence[tuple[VariantRun, Case]]",
    first: "VariantRun",
    group: Group,
    soak: Soak,
    collector: RowCollector,
    observers: Observers,
) -> None:
    """Repeat all rows until the soak is over. Keep only rows with wrong data."""
    awake: Backend | None = None
    while True:
        soak.cycle += 1
        for number, (run, case) in enumerate(plan):
            if group.broadcast(group.rank == 0 and soak.is_over()):
                return
            if run.sweep.backend is not awake:
                awake = run.sweep.backend
                run.sweep.wake_up(case)
            measured = run.sweep.row(soak.cycle * _NUMBERS_A_CYCLE + number, case)
            soak.add(case, measured.row)
            if measured.row.wrong:
                observed = run.sweep.backend is first.sweep.backend
                collector.add(case, measured, observers.progress, observed=observed)


def finished(collector: RowCollector, observers: Observers) -> Report:
    """Read idle GPUs after the last row, then return the report. Every rank must call it."""
    if observers.path_observer is not None:
        collector.after_rows(observers.path_observer.look_while_idle(observers.read_condition()))
    return collector.report()


def _middle_try(tries: Sequence[MeasuredRow]) -> MeasuredRow:
    """Return a try with wrong data if there is one, or else the median of the tries that are not lost in noise."""
    wrong = [measured for measured in tries if measured.row.wrong]
    if wrong or len(tries) == 1:
        return (wrong or tries)[0]
    known = [measured for measured in tries if not is_lost_in_noise(measured.row.ci95_percent)]
    chosen = middle(known or tries, lambda measured: measured.row.time_us)
    if chosen.sample is None:
        return chosen
    sample = replace(chosen.sample, tries=len(tries))
    note = "; ".join(filter(None, (chosen.row.note, f"measured {len(tries)} times")))
    return MeasuredRow(replace(chosen.row, note=note), sample)


class VariantRun(Struct, frozen=True):
    variant: SweepVariant
    sweep: Sweep
    cases: Sequence[Case]


def _plan(runs: Sequence[VariantRun]) -> Iterator[tuple[VariantRun, Case]]:
    """Yield the rows to measure: each case in all variants that can run it, then in the first variant again."""
    first, *others = runs
    for case in first.cases:
        further = [run for run in others if case in run.cases]
        for run in (first, *further):
            yield run, replace(case, setting=run.variant.setting, registered=run.variant.registered())
        if further:
            yield first, replace(case, setting=AGAIN)


class VariantPreparation(Struct):
    """Opens variants and finds the cases that each can run. `refused` lists the variants and cases that cannot run."""

    request: SweepRequest
    group: Group
    identities: Sequence[RankIdentity]
    observers: Observers
    refused: "list[RefusedRow]" = field(default_factory=list)
    _buffers: list[tuple[Backend, Buffers]] = field(default_factory=list)
    _unusable: "list[Backend | NamedBackend]" = field(default_factory=list)

    def prepare(self, variants: Sequence[SweepVariant]) -> list[VariantRun]:
        """Open every variant and run every operation once. Errors in the first variant are raised."""
        every_case = tuple(cases(self.request, self.group.size))
        first, *others = variants
        runs = [VariantRun(first, self._sweep(first, None), every_case)]

        def try_others() -> None:
            found = [self._run(variant, every_case) for variant in others]
            runs.extend(run for run in found if run is not None)

        if self.observers.path_observer is None:
            try_others()
        else:
            self.observers.path_observer.try_out(every_case, runs[0].sweep.try_once, try_others)
        return runs

    def _sweep(self, variant: SweepVariant, issue: Issue | None) -> Sweep:
        """Return the sweep for a variant. Variants whose backends share memory use the same buffers."""
        backend = variant.opened
        buffers = next((buffers for other, buffers in self._buffers if _shares_memory(other, backend)), None)
        if buffers is None:
            buffers = Buffers.of(backend, max(self.request.sizes))
            self._buffers.append((backend, buffers))
        job = JobFacts.of(backend.name, Origin.MEASURED, self.identities)
        return Sweep(self.request, self.group, backend, job, buffers, self.observers, issue)

    def _run(self, variant: SweepVariant, every_case: Sequence[Case]) -> VariantRun | None:
        if variant.refused:
            self._refuse(variant, None, variant.refused)
        if variant.refused or variant.backend in self._unusable:
            return None
        sweep, usable = self._try_cases(variant, [case for case in every_case if variant.fits(case)])
        if sweep is None or not usable:
            return None
        if self.observers.path_observer is not None and variant.logs_choices:
            self.observers.path_observer.try_setting(variant.name, usable, sweep.try_once)
        return VariantRun(variant, sweep, usable)

    def _try_cases(self, variant: SweepVariant, every_case: Sequence[Case]) -> tuple[Sweep | None, Sequence[Case]]:
        """Return the sweep for a variant, and the cases whose operation ran.

        After a refusal, open the variant again, and skip cases with the same data type and reduction.
        """
        from gpubench.measure.collective.paths import operation_key

        sweep = self._open(variant)
        usable: list[Case] = []
        tried: set[OperationKey] = set()
        refused: set[tuple[object, object]] = set()
        for case in every_case:
            if sweep is None:
                break
            if (case.dtype, case.op) in refused:
                continue
            if operation_key(case) not in tried:
                tried.add(operation_key(case))
                _, reason = self._attempt(variant, partial(sweep.try_once, replace(case, setting=variant.setting)))
                if reason:
                    refused.add((case.dtype, case.op))
                    self._refuse(variant, case, reason)
                    _drop(variant, sweep.issue)
                    sweep = self._open(variant)
                    continue
            usable.append(case)
        return sweep, usable

    def _open(self, variant: SweepVariant) -> Sweep | None:
        if variant.open is None:
            return self._sweep(variant, None)
        self.observers.progress.enter(Phase.CONNECTING, variant.name)
        issue, reason = self._attempt(variant, variant.open)
        if reason:
            _drop(variant, issue)
            self._refuse(variant, None, reason)
            if variant.setting is None:
                self._unusable.append(variant.backend)
            return None
        return self._sweep(variant, issue)

    def _attempt(self, variant: SweepVariant, action: Callable[[], T]) -> tuple[T | None, str]:
        """Run an action, and return its result and the reason if any rank failed. All ranks return the same reason."""
        outcome, reason = None, ""
        try:
            outcome = action()
        except variant.refusals as error:
            reason = variant.explain(error)
        reasons = self.group.gather(reason)
        if len(set(reasons)) == 1:
            return outcome, reason
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        return outcome, f"rank {rank}: {reason}"

    def _refuse(self, variant: SweepVariant, case: Case | None, reason: str) -> None:
        from gpubench.model.results.backends import RefusedRow

        self.refused.append(
            RefusedRow(
                collective=self.request.collective.name,
                backend=variant.backend.name,
                setting=variant.name,
                dtype=None if case is None else case.dtype,
                op=None if case is None else case.op,
                size_bytes=None if case is None else case.size_bytes,
                reason=reason,
            )
        )


def _shares_memory(one: Backend, other: Backend) -> bool:
    if isinstance(one, SharedMemory) and isinstance(other, SharedMemory):
        return one.memory_source is other.memory_source
    return one is other


def _drop(variant: SweepVariant, issue: Issue | None) -> None:
    if issue is not None:
        variant.drop(issue)


def add_winners(report: Report, rows: Sequence[CollectiveRow], refused: "Sequence[RefusedRow]") -> Report:
    """Add the fastest variants, the refused variants, and the comparison of backends to the report."""
    from gpubench.model.results.backends import (
        BackendRow,
        RefusedRow,
        WinnerRow,
        compare_with_first,
        find_ignored_requests,
        find_newly_staged,
        find_slower_framework,
        winners,
    )

    backends = compare_with_first(rows)
    sections = Table.group_by_section({WinnerRow: winners(rows), RefusedRow: refused})
    if backends or any(row.backend == row.setting for row in refused):
        sections |= Table.group_by_section({BackendRow: backends})
    found = (*find_newly_staged(backends), *find_slower_framework(backends), *find_ignored_requests(rows))
    verdict = worst_verdict([report.verdict, *(finding.severity for finding in found)])
    findings = (*report.findings, *found)
    return replace(report, verdict=verdict, findings=findings, sections={**sections, **report.sections})


class SynchronizedGroup:
    """A group of ranks that uses the barriers of the whole job, so that all groups start each timed loop together."""

    def __init__(self, part: Group, whole: Group) -> None:
        self.rank, self.size = part.rank, part.size
        self.gather, self.collect, self.broadcast = part.gather, part.collect, part.broadcast
        self.largest, self.clock_offset, self.split = part.largest, part.clock_offset, part.split
        self.barrier = whole.barrier


class PartReport(Struct, frozen=True):
    """The fields of a group's report that are sent to the first rank of the job."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    rank_times: tuple[RankTimeRow, ...]

    @classmethod
    def of(cls, report: Report) -> "PartReport":
        return cls(report.verdict, tuple(report.findings), tuple(report.rows(RankTimeRow)))


def name_group(row: CollectiveRow, part: RankGroup) -> CollectiveRow:
    """Return the row with its group's name. The slowest rank becomes its rank in the whole job."""
    slowest = None if row.slowest_rank is None else part.ranks[row.slowest_rank]
    return replace(row, group=part.name, slowest_rank=slowest)


def merge_parts(parts: Sequence[PartReport]) -> Report:
    rank_times = [line for part in parts for line in part.rank_times]
    return Report(
        verdict=worst_verdict(part.verdict for part in parts),
        complete=True,
        findings=tuple(finding for part in parts for finding in part.findings),
        sections=Table.group_by_section({RankTimeRow: rank_times}),
    )


class SiblingJudge:
    """Judges rows without an expected time by comparing them with the same row of other groups."""

    def __init__(self) -> None:
        self._slow: list[CollectiveRow] = []

    def judge(self, rows: Sequence[CollectiveRow]) -> Iterator[CollectiveRow]:
        """Yield every group's row for one case, with expected values."""
        for row, sibling in zip(rows, find_sibling_figures(rows), strict=True):
            if row.expected_us is not None or sibling is None:
                yield row
                continue
            shown = judge_row(row, ExpectedTime(sibling.time_us, sibling.source, AMONG_SIBLINGS))
            self._slow += [shown] if is_slow(shown) else []
            yield shown

    def report(self, report: Report) -> Report:
        """Return the report with a finding on slow rows, if there are any."""
        if not self._slow:
            return report
        found = slow_unexplained(Slowness.of(self._slow), f"group {self._slow[0].group}")
        return replace(
            report, verdict=worst_verdict([report.verdict, found.severity]), findings=(*report.findings, found)
        )


class NamedRows:
    """Adds the group's name to every row, and passes the row to the listener."""

    def __init__(self, part: RankGroup, listener: Listener[CollectiveRow]) -> None:
        self._part = part
        self._listener = listener
        self.begin, self.progress, self.end = listener.begin, listener.progress, listener.end

    def row(self, row: CollectiveRow) -> None:
        self._listener.row(name_group(row, self._part))


class GroupRows(NamedRows):
    """Collects rows from all groups, which measure at the same time, on the first rank of the job."""

    def __init__(self, part: RankGroup, own: Group, whole: Group, listener: Listener[CollectiveRow]) -> None:
        super().__init__(part, listener)
        self._own = own
        self._whole = whole
        self._siblings = SiblingJudge()

    def row(self, row: CollectiveRow) -> None:
        """Collect one row from every group, and pass them to the listener. Every rank must call it."""
        collected = self._whole.collect(name_group(row, self._part) if self._own.rank == 0 else None) or ()
        for row in self._siblings.judge([row for row in collected if row is not None]):
            self._listener.row(row)

    def merged(self, report: Report) -> Report:
        """Return the report of the whole job on its first rank. Other ranks return `report`."""
        collected = self._whole.collect(PartReport.of(report) if self._own.rank == 0 else None)
        if collected is None:
            return report
        return self._siblings.report(merge_parts([part for part in collected if part is not None]))
