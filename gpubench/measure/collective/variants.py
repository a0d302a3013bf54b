"""The same sweep in several ways, side by side: the library's own choice, settings of it, other backends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from gpubench.measure.collective.cases import Case, SweepRequest, cases
from gpubench.measure.collective.logged_choices import Key, key_of
from gpubench.measure.collective.observers import NO_OBSERVERS, Observers
from gpubench.measure.collective.row_collector import RowCollector
from gpubench.measure.collective.sweep import Buffers, Issue, Sweep, job_facts
from gpubench.model.results.report import CollectiveRow, Report, Section, Table
from gpubench.model.results.winners import REFUSED_SECTION, WINNERS_SECTION, RefusedRow, WinnerRow, winners
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.nccl_choice import AGAIN
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.ports.backend import Backend
from gpubench.ports.group import Group
from gpubench.ports.listener import Listener

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepVariant:
    """One way to run a collective: a backend as it is, or with operations that are opened for it.

    `setting` is its name in rows, None of a backend's own choice. `open` returns how operations are issued, `drop`
    gives that up again; it is for cases that `fits`. `refusals` are what the library raises where it cannot do what
    it is asked to, and `explain` puts one into words. `is_heard` is whether its log names what is chosen under the
    setting.
    """

    setting: str | None
    backend: Backend
    open: Callable[[], Issue] | None = None
    fits: Callable[[Case], bool] = lambda _case: True
    drop: Callable[[Issue], None] = lambda _issue: None
    refusals: tuple[type[Exception], ...] = ()
    explain: Callable[[Exception], str] = str
    is_heard: bool = False


def measure_variants(
    request: SweepRequest,
    group: Group,
    ways: Sequence[SweepVariant],
    identities: Sequence[RankIdentity],
    listener: Listener[CollectiveRow],
    company: Observers = NO_OBSERVERS,
) -> Report:
    """Measure every case in every way, one way after the other, then the next case; the first way once more at its end.

    So all ways of a case are neighbours in time, and what the first took before and after all others says how much a
    time is worth. What cannot run is left out, with the reason, on every rank alike.
    """
    runs = _Runs(request, group, identities, company)
    runs.begin(ways)
    judge = None if company.witness is None else company.witness.judge()
    tally = RowCollector(identities, listener, judge, company.keeper, runs.refused)
    rows: list[CollectiveRow] = []
    plan = list(runs.plan())
    for number, (run, case) in enumerate(plan):
        listener.progress(number, len(plan), f"{request.collective.name} {case.label}")
        # A number of its own for every row: nothing that another way left in the buffers can pass for its result.
        measured = run.sweep.row(number, case)
        watched = run.way.backend is ways[0].backend
        rows.append(tally.take(case, measured, company.progress, watched=watched))
    report = tally.report()
    return report if group.rank != 0 else with_winners(report, rows, runs.refused)


@dataclass(frozen=True, slots=True)
class _Run:
    """A way that can run, and the cases in which it can."""

    way: SweepVariant
    sweep: Sweep
    cases: Sequence[Case]


@dataclass(slots=True)
class _Runs:
    """All ways of a sweep, once they have begun."""

    request: SweepRequest
    group: Group
    identities: Sequence[RankIdentity]
    company: Observers
    refused: list[RefusedRow] = field(default_factory=list)
    _runs: list[_Run] = field(default_factory=list)
    _buffers: dict[int, Buffers] = field(default_factory=dict)

    def begin(self, ways: Sequence[SweepVariant]) -> None:
        """Open every way, have every operation run once in it, and warm all up. The first has to work."""
        every_case = tuple(cases(self.request, self.group.size))
        own, *others = ways
        first = _Run(own, self._sweep(own, None), every_case)
        self._runs.append(first)

        def try_others() -> None:
            for way in others:
                self._join(way, every_case)

        if self.company.witness is None:
            try_others()
        else:
            self.company.witness.try_out(every_case, first.sweep.try_once, try_others)
        for run in self._runs:
            run.sweep.warm_up(run.cases)

    def plan(self) -> Iterator[tuple[_Run, Case]]:
        """Every row to be: of each case all ways that have it, then the first way again."""
        own, *others = self._runs
        for case in own.cases:
            having = [run for run in others if case in run.cases]
            for run in (own, *having):
                yield run, replace(case, setting=run.way.setting)
            if having:
                yield own, replace(case, setting=AGAIN)

    def _sweep(self, way: SweepVariant, issue: Issue | None) -> Sweep:
        """Of a way; all ways of a backend share its buffers."""
        backend = way.backend
        if id(backend) not in self._buffers:
            self._buffers[id(backend)] = Buffers.of(backend, max(self.request.sizes))
        job, buffers = job_facts(backend, self.identities), self._buffers[id(backend)]
        return Sweep(self.request, self.group, backend, job, buffers, self.company, issue)

    def _join(self, way: SweepVariant, every_case: Sequence[Case]) -> None:
        sweep, usable = self._tried(way, [case for case in every_case if way.fits(case)])
        if sweep is None or not usable:
            return
        if self.company.witness is not None and way.is_heard:
            self.company.witness.try_setting(_name(way), usable, sweep.try_once)
        self._runs.append(_Run(way, sweep, usable))

    def _tried(self, way: SweepVariant, every_case: Sequence[Case]) -> tuple[Sweep | None, Sequence[Case]]:
        """The cases of which an operation has run; after a refusal no more of its type and reduction are tried.

        A communicator that has refused something is not trusted with anything else: another one takes its place.
        """
        sweep = self._opened(way)
        usable: list[Case] = []
        tried: set[Key] = set()
        refused: set[tuple[object, object]] = set()
        for case in every_case:
            if sweep is None:
                break
            if (case.dtype, case.op) in refused:
                continue
            if key_of(case) not in tried:
                tried.add(key_of(case))
                _, reason = self._attempt(way, partial(sweep.try_once, replace(case, setting=way.setting)))
                if reason:
                    refused.add((case.dtype, case.op))
                    self._refuse(way, case, reason)
                    self._drop(way, sweep.issue)
                    sweep = self._opened(way)
                    continue
            usable.append(case)
        return sweep, usable

    def _opened(self, way: SweepVariant) -> Sweep | None:
        """The sweep of a way, None where it cannot begin."""
        if way.open is None:
            return self._sweep(way, None)
        self.company.progress.enter(Phase.CONNECTING, _name(way))
        issue, reason = self._attempt(way, way.open)
        if reason:
            self._drop(way, issue)
            self._refuse(way, None, reason)
            return None
        return self._sweep(way, issue)

    def _drop(self, way: SweepVariant, issue: Issue | None) -> None:
        if issue is not None:
            way.drop(issue)

    def _attempt(self, way: SweepVariant, action: Callable[[], T]) -> tuple[T | None, str]:
        """What it returns, and why it failed on any rank, empty where it did on none: the same answer on every rank."""
        outcome, reason = None, ""
        try:
            outcome = action()
        except way.refusals as error:
            reason = way.explain(error)
        reasons = self.group.gather(reason)
        if len(set(reasons)) == 1:
            return outcome, reason
        rank, said = next((rank, said) for rank, said in enumerate(reasons) if said)
        return outcome, f"rank {rank}: {said}"

    def _refuse(self, way: SweepVariant, case: Case | None, reason: str) -> None:
        self.refused.append(
            RefusedRow(
                collective=self.request.collective.name,
                backend=way.backend.name,
                setting=_name(way),
                dtype=None if case is None else case.dtype,
                op=None if case is None else case.op,
                size_bytes=None if case is None else case.size_bytes,
                reason=reason,
            )
        )


def _name(way: SweepVariant) -> str:
    return way.setting or way.backend.name


def with_winners(report: Report, rows: Sequence[CollectiveRow], refused: Sequence[RefusedRow]) -> Report:
    """The report of rows in several ways, with the fastest of them and those that could not run."""
    best = winners(rows)
    sections: dict[str, Section] = {
        WINNERS_SECTION: Table(WinnerRow.columns(), lambda: best),
        REFUSED_SECTION: Table(RefusedRow.columns(), lambda: refused),
    }
    return replace(report, sections={**sections, **report.sections})
