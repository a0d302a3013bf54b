"""The report of a recorded collective, made of its raw samples as it is of measured ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpubench.collectives.record import Collective
from gpubench.collectives.request import SweepRequest
from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.errors import UsageError, advising
from gpubench.measure.collective.cases import JobFacts
from gpubench.measure.collective.path_evidence import simulated
from gpubench.measure.collective.path_judge import PathJudge
from gpubench.measure.collective.recording import RecordedCollective, RecordedRow, RecordingLine, file_of
from gpubench.measure.collective.recording_rules import check_idle, check_recorded, check_row
from gpubench.measure.collective.row_collector import MeasuredRow, RowCollector
from gpubench.measure.collective.simulated import simulate
from gpubench.measure.collective.speed_judge import SpeedJudge
from gpubench.measure.collective.split_groups import NamedRows, PartReport, SiblingJudge, together
from gpubench.measure.collective.variants import with_winners
from gpubench.measure.paths.report import unwatched
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.progress import UNWATCHED
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import Finding, Verdict, overall
from gpubench.ports.listener import Listener
from gpubench.readers.documents.json_lines import read_json_line

CUT_SHORT = "recording-cut-short"

_Lines = Sequence[tuple[str, str]]

SpeedJudgeOf = Callable[[Sequence[RankIdentity]], SpeedJudge | None]
"""Makes the judge of the speed of what some ranks measured; None where nobody judges it."""


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """All lines but the first; `is_whole` is whether the run came to its end, `idle` what GPUs then were like."""

    rows: tuple[RecordedRow, ...]
    is_whole: bool
    idle: tuple[IdleGpu, ...] = ()


def read_recorded(lines: _Lines, collective: Collective, name: str) -> tuple[RecordedCollective, RecordedRows]:
    """A recording from its lines, each with its place; `name` is what to call it.

    Raises UsageError: it is empty, from a newer gpubench, no recording of this collective, or contradicts itself.
    """
    again = f"record it again: gpubench {collective.name} --record DIR"
    with advising(reason="the recording was edited by hand, or is of a newer gpubench", next_step=again):
        if not lines:
            file = file_of(collective.name)
            raise UsageError(f"{name}, {file}: empty", expected=f"a recorded run of {collective.name}")
        found = read_json_line(RecordedCollective, *lines[0])
        by_group = check_recorded(found, collective, lines[0][1])
        rows: list[RecordedRow] = []
        for text, where in lines[1:]:
            line = read_json_line(RecordingLine, text, where)
            if line.row is None:
                _check_end(line, len(rows), where, is_last=(text, where) == lines[-1])
                check_idle(line.idle, found, where)
                return found, RecordedRows(tuple(rows), is_whole=True, idle=line.idle)
            check_row(line.row, found, by_group, where)
            rows.append(line.row)
        return found, RecordedRows(tuple(rows), is_whole=False)


def _check_end(line: RecordingLine, rows: int, where: str, *, is_last: bool) -> None:
    if line.rows != rows:
        counted = "no row, and does not count them" if line.rows is None else f"the end of {line.rows} rows"
        raise UsageError(f"{where}: {counted}", expected=f"the {rows} that come before it")
    if not is_last:
        raise UsageError(f"{where}: more lines after the last one", expected="the recording of one run")


def replay(
    found: RecordedCollective,
    recorded: RecordedRows,
    collective: Collective,
    circumstances: Circumstances,
    listener: Listener[CollectiveRow],
    speed_judge_of: SpeedJudgeOf,
) -> Report:
    """Hand the rows to the listener as if they were measured now; the report is the same as then.

    `circumstances` are the nodes and processes of the recording.
    """
    request, rows = found.asked.request(collective), recorded.rows
    if found.model is not None:
        seconds = [[answer.seconds for answer in row.sample.answers] for row in rows]
        staged = [(source, destination) for source, destination in found.model.staged]
        node_of = circumstances.wiring.nodes.__getitem__
        outcome = simulated(staged, found.ranks, node_of, found.model.source)
        ranks, nodes = len(found.ranks), len(found.hosts)
        speed = speed_judge_of(found.ranks)
        report = simulate(
            request, ranks, nodes, lambda _, row, _try: seconds[row], listener, outcome, speed, most_rows=len(rows)
        )
    else:
        judge = None
        if found.testimony is not None:
            observations = found.testimony.restored(circumstances).with_idle(recorded.idle)
            judge = PathJudge(request, observations, origin=Origin.RECORDED)
        report = _measured(found, rows, request, listener, judge, speed_judge_of)
    return report if recorded.is_whole else _cut_short(report, rows, collective)


def _measured(
    found: RecordedCollective,
    rows: Sequence[RecordedRow],
    request: SweepRequest,
    listener: Listener[CollectiveRow],
    judge: PathJudge | None,
    speed_judge_of: SpeedJudgeOf,
) -> Report:
    groups = {None if part is None else part.name: part for part in found.groups}
    siblings = _RowsOfCases(listener, len(groups))
    collectors = {
        name: RowCollector(
            found.ranks_of(part),
            listener if part is None else NamedRows(part, siblings),
            judge,
            speed=speed_judge_of(found.ranks_of(part)),
        )
        for name, part in groups.items()
    }
    shown = []
    for row in rows:
        ranks = found.ranks_of(groups[row.group])
        job = JobFacts.of(row.backend, Origin.RECORDED, ranks)
        measured = MeasuredRow(row.sample.row(request, row.case, job), row.sample)
        observed = row.backend == found.backend
        shown.append(collectors[row.group].add(row.case, measured, UNWATCHED, observed=observed))
    reports = [each.report() for each in collectors.values()]
    report = siblings.report([PartReport.of(each) for each in reports]) if found.parts else reports[0]
    if found.refused is not None:
        report = with_winners(report, shown, found.refused)
    return report if judge is not None else unwatched(report, found.unwatched, Origin.RECORDED)


class _RowsOfCases:
    """A listener that hands rows on once all groups have one of the same case: they are held against each other."""

    def __init__(self, listener: Listener[CollectiveRow], groups: int) -> None:
        self._listener, self._groups = listener, groups
        self.begin, self.progress, self.end = listener.begin, listener.progress, listener.end
        self._siblings = SiblingJudge()
        self._waiting: list[CollectiveRow] = []

    def row(self, row: CollectiveRow) -> None:
        """A row of one group."""
        self._waiting.append(row)
        if len(self._waiting) == self._groups:
            self._hand_on()

    def report(self, parts: Sequence[PartReport]) -> Report:
        """The report on all groups; a run that was cut short may have rows of some groups alone."""
        self._hand_on()
        return self._siblings.report(together(parts))

    def _hand_on(self) -> None:
        for row in self._siblings.judged(self._waiting):
            self._listener.row(row)
        self._waiting.clear()


def _cut_short(report: Report, rows: Sequence[RecordedRow], collective: Collective) -> Report:
    """The report of a run that did not come to its end."""
    last = f"the last of them {rows[-1].case.label}" if rows else "for it ended before the first"
    finding = Finding(
        id=CUT_SHORT,
        severity=Verdict.ERROR,
        subject="the recording",
        seen=f"{counted(len(rows), 'row')}, {last}, and no line that says that these are all",
        expected="a run that came to its end",
        cause="the run was ended before: a rank died, hung, or Ctrl-C; or the copy of the recording is not whole",
        next_command=f"gpubench {collective.name} --record DIR once more",
    )
    verdict = overall([report.verdict, Verdict.ERROR])
    return replace(report, verdict=verdict, complete=False, findings=(*report.findings, finding))
