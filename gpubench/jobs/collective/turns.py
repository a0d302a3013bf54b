"""Measure settings that NCCL reads once per process. Each setting runs in two separate jobs, called turns.

The jobs run in the order A B C C B A, so drift affects the two jobs of a setting in opposite ways. The difference
between both jobs is the noise, which the advantage of a winner must exceed.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import GpubenchError, InterruptedRunError, UsageError
from gpubench.formats.delivery import delivering
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.machine.environment import nccl_settings
from gpubench.measure.collective.variants import add_winners
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.report import CollectiveRow, Metadata, Report, Row
from gpubench.model.terms.settings import AGAIN, NcclSetting, repeated_name
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.collective.job import RankStart
    from gpubench.model.facts.environment import LaunchedRank


_LOG = "NCCL_DEBUG"


class Turn(Struct, frozen=True):
    """One job of a sweep. `setting` has the variables of its processes. `is_second` is true for the second job of a
    setting.
    """

    setting: NcclSetting
    is_second: bool

    def name(self, in_job: str | None) -> str | None:
        """Return the name of a row in the whole sweep. `in_job` is its name in this job."""
        words = [in_job, self.setting.name if self.setting.values else None]
        name = " ".join(filter(None, words)) or None
        return repeated_name(name) if self.is_second else name


class TurnedSweep(Struct):
    """The results of a sweep from all jobs so far."""

    plan: CollectivePlan
    presenter: "Presenter"
    turns: int
    rows: list[CollectiveRow] = field(default_factory=list)
    refused: list[RefusedRow] = field(default_factory=list)
    wrong: list[Finding] = field(default_factory=list)
    own: Report | None = None

    @property
    def report(self) -> Report:
        """The report on NCCL's own choice, together with the winners of all jobs and wrong data from any job."""
        own = self.own or Report(verdict=Verdict.ERROR, complete=False)
        return add_winners(own.add_findings(first=self.wrong), self.rows, self.refused)

    def refuse(self, turn: Turn, reason: str) -> None:
        """Add the setting of a job that could not be measured to the refused settings."""
        self.refused.append(
            RefusedRow(
                collective=self.plan.collective.name,
                backend="nccl",
                setting=turn.setting.name,
                dtype=None,
                op=None,
                size_bytes=None,
                reason=f"the second time: {reason}" if turn.is_second else reason,
            )
        )


class TurnListener:
    """Listens to one job, and presents its rows with their names in the whole sweep."""

    exit_code = 0

    def __init__(self, sweep: TurnedSweep, turn: Turn, number: int) -> None:
        self._sweep, self._turn, self._number = sweep, turn, number
        self._is_first = number == 0
        self.rows = 0
        self.report: Report | None = None

    def note(self, text: str) -> None:
        """Show a line that the job printed, unless it may be NCCL's log, which the setting turned on."""
        if _LOG not in self._turn.setting.variables:
            self._sweep.presenter.note(text)

    def begin(self, metadata: Metadata) -> None:
        """Present the metadata of the first job. All other jobs have the same ranks, libraries and sizes."""
        if self._is_first:
            names = self._sweep.plan.setting_names(str(metadata.backend))
            self._sweep.presenter.begin(
                replace(metadata, options={**metadata.options, "settings": names, "turns": self._sweep.turns})
            )

    def progress(self, done: int, total: int, label: str) -> None:
        """Show the progress of the sweep, over all jobs."""
        name = self._turn.name(None)
        label = label if name is None else f"{label}, {name}"
        self._sweep.presenter.progress(self._number * total + done, self._sweep.turns * total, label)

    def row(self, row: Row) -> None:
        """Present a row. Skip rows that repeat NCCL's own choice within one job, because the sweep has a second job
        for it.
        """
        if not isinstance(row, CollectiveRow) or row.setting == AGAIN:
            return
        self.rows += 1
        row = replace(row, setting=self._turn.name(row.setting))
        if self._turn.setting.values:
            row = self._drop_expectation(row)
        self._sweep.rows.append(row)
        self._sweep.presenter.row(row)

    def _drop_expectation(self, row: CollectiveRow) -> CollectiveRow:
        """Remove the expected values. Settings are compared with each other, so only NCCL's own choice has expected
        values.
        """
        note = "; ".join(filter(None, (row.note, *self._turn.setting.remarks))) or None
        verdict = row.verdict
        if not row.wrong and verdict is not None:
            verdict = Verdict.SKIP if row.ranks == 1 else None if row.wrong is None else Verdict.PASS
        return replace(
            row,
            note=note,
            verdict=verdict,
            expected_gb_s=None,
            expected_us=None,
            expected_percent=None,
            expected_source=None,
        )

    def end(self, report: Report) -> None:
        """Store the report on NCCL's own choice. From the other jobs, store wrong data and refused settings."""
        self.report = report
        self._sweep.wrong += [finding for finding in report.findings if finding.id == WRONG_DATA and not self._is_first]
        for line in report.rows(RefusedRow):
            setting = self._turn.name(line.setting)
            self._sweep.refused += [] if setting is None or self._turn.is_second else [replace(line, setting=setting)]
        if self._is_first:
            self._sweep.own = report

    def cut_short(self) -> None:
        """Mark the sweep as incomplete if NCCL's own choice fails, because settings are compared with it."""
        if self._is_first:
            self._sweep.presenter.cut_short()


def measure_in_turns(plan: CollectivePlan, start: "RankStart") -> int:
    """Measure every setting of a plan in separate jobs, and present them as one sweep. Return the exit code.

    Raises GpubenchError if a variable is already set, NCCL's own choice cannot be measured, or the run is interrupted.
    """
    plan.check_unset(nccl_settings(os.environ))
    settings = (NcclSetting(), *plan.processes)
    turns = [Turn(setting, is_second=False) for setting in settings]
    turns += [Turn(setting, is_second=True) for setting in reversed(settings)]
    with start.announced(plan) as take_back:
        presenter = start.presenter(plan, take_back)
        sweep = TurnedSweep(plan, presenter, len(turns))
        with delivering(presenter):
            failed: set[NcclSetting] = set()
            for number, turn in enumerate(turns):
                if turn.setting in failed:
                    continue
                reason = _measure(sweep, turn, number, start, take_back)
                if reason:
                    failed.add(turn.setting)
                    sweep.refuse(turn, reason)
            presenter.end(sweep.report)
    return presenter.exit_code


def _measure(sweep: TurnedSweep, turn: Turn, number: int, start: "RankStart", take_back: Callable[[], None]) -> str:
    """Measure one job. Return why it could not be measured, or an empty text if it was."""
    plan = sweep.plan
    of_job = dataclasses.replace(plan, turn=turn.setting.name, checks_sets=number == 0)
    listener = TurnListener(sweep, turn, number)
    try:
        start.measure(of_job, lambda: listener, take_back, turn.setting.variables)
    except InterruptedRunError:
        raise
    except GpubenchError as error:
        if not turn.setting.values and not turn.is_second:
            raise
        return error.lines()[0]
    return ""


def refuse_turns_under_launcher(settings: Sequence[NcclSetting], launch: "LaunchedRank") -> None:
    """Raise UsageError, because ranks that a launcher started cannot measure settings that need separate jobs."""
    first = settings[0].values[0]
    raise UsageError(
        f"--set {first[0]} under {launch.launcher}",
        expected="one process that starts a job for every setting, because NCCL reads this variable once per process",
        reason="ranks of a launcher are one job, in which only NCCL_ALGO and NCCL_PROTO can change",
        next_step=f"{first[0]}={first[1]} in one job but not in another, each with --output, then gpubench compare",
    )
