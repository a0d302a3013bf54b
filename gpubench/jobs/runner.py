"""Run a command in this process, on a real, simulated or recorded machine, or as one rank of a job.

A command has two functions: `open` prepares the measurement, and `measure` returns the report. Options are in `plans`.
`rank` starts and ends a rank.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from gpubench.errors import DONE, unwritable_output
from gpubench.formats.delivery import delivering
from gpubench.formats.registry import BASELINE, DATED, Output, Presentation
from gpubench.jobs.sources import Here, refuse_under_launcher
from gpubench.model.facts.environment import LaunchedRank, detect_launcher
from gpubench.model.terms.ranks import Phase

if TYPE_CHECKING:
    from gpubench.backends.mpi.group import MpiGroup
    from gpubench.formats.presenter import Presenter
    from gpubench.model.results.kv import KvRow
    from gpubench.model.results.report import CollectiveRow, Metadata, PairRow, Report, Row
    from gpubench.model.terms.ranks import RankIdentity
    from gpubench.ranks.watchdog.rank import RankProgress

Opened = TypeVar("Opened")


@contextmanager
def presenting(shown: Presentation, *, is_rank: bool = False, progress: bool = False) -> Iterator["Presenter"]:
    """Check that outputs are writable, and yield a presenter on stdout. The stdout of a rank never counts as a
    terminal.
    """
    from gpubench.formats.presenter import Presenter

    check_writable(shown.outputs)
    presenter = Presenter(shown, progress=progress and shown.show_progress, is_rank=is_rank)
    with delivering(presenter):
        yield presenter


def check_writable(outputs: Sequence[Output], recording: Path | None = None) -> None:
    """Raise UsageError if an output cannot be written. Existing files are not changed."""
    for output in outputs:
        try:
            if output.format is BASELINE:
                output.path.parent.mkdir(parents=True, exist_ok=True)
            if output.format is not DATED:
                _try_file(output.path)
                continue
            # Create a temporary file, because permission bits are not conclusive for root or on a read-only file
            # system.
            output.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output.path):
                pass
        except OSError as error:
            raise unwritable_output(output.path, error) from error
    if recording is not None:
        from gpubench.machine.recorded import check_recordable

        check_recordable(recording)


def check_file_writable(path: Path) -> None:
    """Raise UsageError if a file cannot be written. An existing file is not changed."""
    try:
        _try_file(path)
    except OSError as error:
        raise unwritable_output(path, error) from error


def _try_file(path: Path) -> None:
    if path.is_fifo():  # Its reader would see the end of the data if it were opened and closed
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()


class NullListener:
    """A listener that ignores all events, for all ranks except the first."""

    def begin(self, metadata: "Metadata", columns: Sequence[str] | None = None) -> None: ...

    def progress(self, done: int, total: int, label: str) -> None: ...

    def row(self, row: "Row") -> None: ...

    def end(self, report: "Report") -> None: ...


class ReportCollector(NullListener):
    """A listener that stores metadata, rows and report, for a command that measures as part of another command."""

    def __init__(self) -> None:
        self.metadata: Metadata | None = None
        self.pairs: list[PairRow] = []
        self.collectives: list[CollectiveRow] = []
        self.transfers: list[KvRow] = []
        self.report: Report | None = None

    def begin(self, metadata: "Metadata", columns: Sequence[str] | None = None) -> None:  # noqa: ARG002
        self.metadata = metadata

    def row(self, row: "Row") -> None:
        from gpubench.model.results.kv import KvRow
        from gpubench.model.results.report import CollectiveRow, PairRow

        if isinstance(row, PairRow):
            self.pairs.append(row)
        elif isinstance(row, CollectiveRow):
            self.collectives.append(row)
        elif isinstance(row, KvRow):
            self.transfers.append(row)

    def end(self, report: "Report") -> None:
        self.report = report


class Place:
    """Where a command runs: alone in this process, or as a rank of a job. Then `rank` is set."""

    def __init__(self, plan: Any, arguments: Sequence[str], *, shows_progress: bool, is_launched: bool) -> None:
        self.plan, self.arguments = plan, arguments
        self._shows_progress, self.is_launched = shows_progress, is_launched

    rank: "RankPlace | None" = None
    is_first = True

    @property
    def is_here(self) -> bool:
        """True if this machine is measured, rather than a simulated or recorded one."""
        return isinstance(self.plan.source, Here)

    @cached_property
    def presenter(self) -> "Presenter":
        """The presenter. It is created on first use, because its import takes as long as the start of reading a
        machine.
        """
        from gpubench.formats.presenter import Presenter

        shown = self.plan.presentation
        progress = self._shows_progress and shown.show_progress and self.is_here
        return Presenter(shown, progress=progress, is_rank=self.is_launched)

    @property
    def listener(self) -> "Presenter | NullListener":
        """The presenter on the first rank, and a listener that ignores all events on the other ranks."""
        return self.presenter if self.is_first else NullListener()

    def check_writable(self) -> None:
        """Raise UsageError if an output or the recording cannot be written."""
        check_writable(self.plan.presentation.outputs, self.plan.recording.record)

    @property
    def rows(self) -> int:
        """The number of rows that were delivered so far."""
        return self.presenter.rows if self._has_presenter else 0

    @property
    def code_so_far(self) -> int:
        """The exit code if the reader of stdout closes its end of the pipe."""
        return self.presenter.code_so_far if self._has_presenter else DONE

    @property
    def stored_result(self) -> str:
        """The output file that `gpubench report` can read, or an empty text if there is none."""
        return self.presenter.stored_result if self._has_presenter else ""

    def cut_short(self) -> None:
        """Mark the outputs as incomplete, unless the report was already delivered."""
        if self._has_presenter:
            self.presenter.cut_short()

    @property
    def _has_presenter(self) -> bool:
        return "presenter" in vars(self)


class RankPlace(Place):
    """One rank of a job, with its process group and watchdog. The first rank shows the report."""

    def __init__(
        self, plan: Any, arguments: Sequence[str], group: "MpiGroup", progress: "RankProgress", *, shows_progress: bool
    ) -> None:
        from gpubench.jobs.rank import read_identity

        super().__init__(plan, arguments, shows_progress=shows_progress, is_launched=True)
        self.group, self.progress, self.rank = group, progress, self
        self.identity, self.node_by_rank = read_identity(group)
        self.is_first = group.rank == 0


class Steps(NamedTuple, Generic[Opened]):
    """The two functions of a command, `open` and `measure`. `measure` returns None on ranks that have no report.

    If `any_source_in_ranks` is true, ranks of a launcher may show a simulated or recorded machine.
    """

    name: str
    open: Callable[[Place], AbstractContextManager[Opened]]
    measure: Callable[[Place, Opened], "Report | None"]
    shows_progress: bool = False
    any_source_in_ranks: bool = False


def run(steps: Steps[Any], plan: Any, arguments: Sequence[str], timeout_s: float | None = None) -> int:
    """Run a command and return the exit code. A job of several ranks is aborted after `timeout_s` seconds without
    progress.

    Raises GpubenchError if nothing can be measured, or an output cannot be written.
    """
    launch = detect_launcher(os.environ)
    if launch is None or launch.size == 1:
        return run_alone(steps, plan, arguments, launch)
    if not steps.any_source_in_ranks:
        refuse_under_launcher(steps.name, plan.source, launch)
    from gpubench.jobs import rank

    def make_job(group: "MpiGroup", progress: "RankProgress") -> CommandRankJob:
        return CommandRankJob(steps, plan, arguments, group, progress)

    return rank.run(make_job, launch, timeout_s or plan.timeout_s, plan.presentation.job_defaults)


def run_alone(steps: Steps[Any], plan: Any, arguments: Sequence[str], launch: LaunchedRank | None = None) -> int:
    """Run a command in this process and return the exit code. `launch` is set if this is the only rank of a
    launcher.
    """
    place = Place(plan, arguments, shows_progress=steps.shows_progress, is_launched=launch is not None)
    place.check_writable()
    with delivering(place), steps.open(place) as opened:
        report = steps.measure(place, opened)
        if report is not None:
            place.presenter.end(report)
        return place.presenter.exit_code


class CommandRankJob:
    """Runs a command as one rank of a job."""

    def __init__(
        self, steps: Steps[Any], plan: Any, arguments: Sequence[str], group: "MpiGroup", progress: "RankProgress"
    ) -> None:
        self._steps = steps
        self.place = RankPlace(plan, arguments, group, progress, shows_progress=steps.shows_progress)

    @property
    def identity(self) -> "RankIdentity":
        """The identity of the rank. It includes the GPU once that is open."""
        return self.place.identity

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - these commands do not launch themselves
        """Measure together with the other ranks, and show the report on the first rank.

        Return the exit code, which is the same on all ranks. Raises AgreedError.
        """
        from gpubench.jobs.rank import agree

        place = self.place
        agree(place.group, place.check_writable if place.is_first else lambda: None)
        with self._steps.open(place) as opened:
            report = self._steps.measure(place, opened)
        place.progress.enter(Phase.OUTPUT)
        code = None
        if place.is_first and report is not None:
            place.presenter.end(report)
            code = place.presenter.exit_code
        return place.group.broadcast(code)
