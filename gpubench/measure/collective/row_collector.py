"""The rows of a sweep: handed on as they are measured, and in the end the report on all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpubench.collectives.request import SweepRequest
from gpubench.measure.collective.cases import Case, JobFacts, describe
from gpubench.measure.collective.rank_timings import RankTimings
from gpubench.measure.collective.timing import OwnTimes
from gpubench.model.facts.gpu_condition import GpuCondition
from gpubench.model.results.above_limit import refused_above_limit, times_limit
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.progress import Progress
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.statistics.lateness import EntryTimes
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, counted, format_size, some_of
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict, overall
from gpubench.ports.listener import Listener

if TYPE_CHECKING:
    from gpubench.measure.collective.path_evidence import PathObservations
    from gpubench.measure.collective.path_judge import PathJudge
    from gpubench.measure.collective.speed_judge import SpeedJudge
    from gpubench.model.facts.idle_gpu import IdleGpu
    from gpubench.model.results.winners import RefusedRow


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's part of a row: its seconds an operation, when it entered them, and its wrong elements.

    `condition` is that of its GPU, read only where it is known when it entered operations; `issue_seconds` are those
    that its host takes to issue an operation, where that is known.
    """

    seconds: float
    entries: EntryTimes | None = None
    wrong: int = 0
    condition: GpuCondition | None = None
    issue_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RowSample:
    """The sample behind a row: the times of its first rank, and each rank's answer, in rank order.

    `tries` is how often the row was measured; this is the one that counts.
    """

    own: OwnTimes
    answers: tuple[Answer, ...]
    tries: int = 1

    def row(self, request: SweepRequest, case: Case, job: JobFacts) -> CollectiveRow:
        """The row of a case."""
        times = self.own.with_others([answer.seconds for answer in self.answers])
        row = describe(request, case, job, times, sum(answer.wrong for answer in self.answers))
        if self.tries > 1:
            row = replace(row, note="; ".join(filter(None, (row.note, f"measured {self.tries} times"))))
        issued = [answer.issue_seconds for answer in self.answers if answer.issue_seconds is not None]
        return replace(row, issue_us=MICROSECONDS_PER_SECOND * max(issued)) if issued else row


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A row, on every rank, with its sample on the first."""

    row: CollectiveRow
    sample: RowSample | None


class Recorder:
    """Writes down what rows and verdicts are made of; every rank has to call it alike. This one writes nothing."""

    def begin(self, observations: "PathObservations | None", refused: "Sequence[RefusedRow] | None") -> None:
        """Record what is known before the first row: observations of paths, on the first rank, and what was refused.

        `refused` is None where the sweep has one variant.
        """

    def row(self, case: Case, measured: MeasuredRow) -> None:
        """Record a row."""

    def end(self, idle: "Sequence[IdleGpu]") -> None:
        """Record what was seen of the ranks' GPUs after the last row, while no operation ran."""


NO_RECORDER = Recorder()


class RowCollector:
    """Hands rows on as they are measured, and makes the report on all of them.

    Only the first rank has judges, of paths and of speed. `refused` are the variants that could not run, None where
    there is one.
    """

    def __init__(
        self,
        identities: Sequence[RankIdentity],
        listener: Listener[CollectiveRow],
        judge: "PathJudge | None",
        recorder: Recorder = NO_RECORDER,
        refused: "Sequence[RefusedRow] | None" = None,
        speed: "SpeedJudge | None" = None,
    ) -> None:
        self._identities, self._listener, self._judge, self._recorder = identities, listener, judge, recorder
        self._speed = speed
        self._rank_timings = RankTimings(identities)
        self._verdicts: list[Verdict] = []
        self._above: list[CollectiveRow] = []
        self._failures: list[tuple[CollectiveRow, Sequence[int]]] = []
        recorder.begin(None if judge is None else judge.observations, refused)

    def wants_another(self, case: Case, tries: Sequence[MeasuredRow], *, observed: bool = True) -> bool:
        """True if a case should be measured once more: its speed is near the threshold, or two tries disagree."""
        if self._speed is None:
            return False
        rows = [each.row for each in tries]
        if self._judge is not None and (observed or self._judge.heard(rows[0].backend)):
            rows = [self._judge.described(case, row) for row in rows]
        return self._speed.wants_another(rows)

    def add(self, case: Case, measured: MeasuredRow, progress: Progress, *, observed: bool = True) -> CollectiveRow:
        """Add a row; return it as the listener gets it: with what is known of its paths, if these are observed."""
        row, answers = measured.row, () if measured.sample is None else measured.sample.answers
        wrong_by_rank = [answer.wrong for answer in answers]
        if answers:
            self._rank_timings.add_row(row, [(answer.seconds, answer.entries) for answer in answers])
            self._rank_timings.add_conditions([answer.condition for answer in answers])
        progress.enter(Phase.OUTPUT, case.label)
        self._recorder.row(case, measured)
        if self._judge is not None and observed:
            row = self._judge.row(case, row, wrong_by_rank)
        elif self._judge is not None and self._judge.heard(row.backend):
            row = self._judge.described(case, row)
        row = refused_above_limit(row)
        if times_limit(row) is not None:
            self._above.append(row)
        elif self._speed is not None:
            row = self._speed.row(row)
        self._listener.row(row)
        self._verdicts.append(Verdict(row.verdict) if row.verdict else Verdict.SKIP)
        if row.wrong and answers:
            self._failures.append((row, wrong_by_rank))
        return row

    def channels(self, case: Case, row: CollectiveRow) -> int | None:
        """The channels that the library took for a case, as it logged them; None where nobody listened, or knows."""
        if self._judge is None:
            return None
        return self._judge.described(case, replace(row, channels=None)).channels

    def after_rows(self, idle: "Sequence[IdleGpu] | None") -> None:
        """Take what was seen of the ranks' GPUs after the last row; None on ranks but the first."""
        if idle and self._judge is not None:
            self._judge.add_idle(idle)
            self._recorder.end(idle)

    def report(self) -> Report:
        """Verdict, findings and sections."""
        from gpubench.measure.paths.report import PathOutcome

        wrong = (wrong_data(self._failures, self._identities),) if self._failures else ()
        above: tuple[Finding, ...] = ()
        if self._above:
            from gpubench.conditions.measured import impossible

            above = impossible(collectives=self._above)
        paths = (
            PathOutcome({}, ())
            if self._judge is None
            else self._judge.outcome([] if self._speed is None else self._speed.slow)
        )
        found = paths.findings if self._speed is None else self._speed.findings(paths.findings, paths.explained)
        verdict = overall([*self._verdicts, *(finding.severity for finding in found)])
        late = self._rank_timings.findings()
        return Report(
            verdict=overall([verdict, *(finding.severity for finding in late)]),
            complete=True,
            findings=(*wrong, *above, *found, *late),
            sections={**paths.sections, **self._rank_timings.sections()},
        )


def wrong_data(failures: Sequence[tuple[CollectiveRow, Sequence[int]]], identities: Sequence[RankIdentity]) -> Finding:
    """The finding on rows with wrong elements, each with how many every rank has; none where that is not known."""
    row, wrong_by_rank = failures[0]
    ranks = [str(identities[rank]) for rank, wrong in enumerate(wrong_by_rank) if wrong]
    total = sum(failure.wrong or 0 for failure, _ in failures)
    wrong, first = counted(total, "wrong element"), counted(row.wrong or 0, "wrong element")
    return Finding(
        id=WRONG_DATA,
        severity=Verdict.FAIL,
        subject=some_of(ranks) or counted(len(identities), "rank"),
        seen=f"{wrong} in {counted(len(failures), 'row')}, first in {row.dtype} {format_size(row.size_bytes)} "
        f"{row.placement}: {first}",
        expected="every element as computed from what the ranks sent",
        cause="data damaged on the way: a GPU, a link, ACS or IOMMU between peers, or a bug in the library",
        next_command=f"gpubench {row.collective} --sizes {row.size_bytes} --dtype {row.dtype} "
        "again, then with NCCL_P2P_DISABLE=1: if that is clean, peer-to-peer copies are at fault",
    )
