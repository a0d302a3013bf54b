"""Run a collective: launch ranks on this host, run as one rank, simulate, or replay a recording."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from gpubench.errors import (
    GpubenchError,
    UsageError,
    launcher_failed,
    more_ranks_than_gpus,
    no_gpu,
    no_rank_started,
    ranks_ended_early,
    rows_kept,
)
from gpubench.formats.delivery import announced, delivering
from gpubench.jobs.collective.plan import SOAK_ENDS, CollectivePlan
from gpubench.jobs.runner import check_writable
from gpubench.jobs.sources import Here, Replayed, refuse_under_launcher
from gpubench.machine.host import cost_of_turns, count_gpus, is_mps_running, sharing_settings
from gpubench.machine.nvml import Driver, read_driver
from gpubench.model.facts.environment import PLAN_VARIABLE, detect_launcher
from gpubench.model.terms.operation import HOST, TORCH
from gpubench.model.terms.options import plan_from
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.ranks import LostRank, Phase, RankState, first_lost, killed_before, limit_seconds
from gpubench.model.terms.units import plural
from gpubench.ranks import launch
from gpubench.ranks.channel import ChannelReceiver, Message, read_report

if TYPE_CHECKING:
    from subprocess import Popen

    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.rank import RankJob
    from gpubench.model.facts.environment import LaunchedRank
    from gpubench.model.results.report import Metadata, Report, Row
    from gpubench.ports.group import Group
    from gpubench.ranks.watchdog.rank import RankProgress

_TORCH = ("torch", "torch.distributed")
ON_GPUS = ("cupy", "gpubench.jobs.collective.opening_gpu")
ON_HOSTS = ("numpy", "gpubench.backends.mpi.backends")  # Backend modules, imported after MPI has started


def run_launched(typed: Mapping[str, Any], launch: "LaunchedRank") -> int:
    """Run as a rank, with the option values that the launching process has parsed. Return the exit code."""
    return run_as_rank(plan_from(CollectivePlan, typed, typed["command"]), sys.argv[1:], launch)


def run_as_rank(
    plan: CollectivePlan,
    arguments: Sequence[str],
    launch: "LaunchedRank",
    make: "Callable[[Group, RankProgress], RankJob] | None" = None,
) -> int:
    """Run as one rank of a collective, or of the job that `make` returns. Return the exit code."""
    from gpubench.jobs import rank

    if plan.scales:
        raise UsageError(
            f"--np {','.join(map(str, plan.rank_counts))} under {launch.launcher}",
            expected="one process that starts one job per number of ranks",
            reason=f"{launch.launcher} has started one job of {launch.size} ranks",
            next_step=launch.advice_without_launcher,
        )

    def make_job(group: "Group", progress: "RankProgress") -> "RankJob":
        from gpubench.jobs.collective.rank_job import CollectiveRankJob

        return CollectiveRankJob(group, progress, plan, arguments)

    imports: tuple[str, ...] = ON_GPUS if plan.backend != HOST and count_gpus() else ON_HOSTS
    # A process uses the first libnccl.so.2 that it loads. torch is imported first, so that all backends use its
    # library.
    measures_torch = plan.nccl_library is None and any(name.startswith(TORCH) for name in plan.backends)
    defaults, rendezvous = plan.presentation.job_defaults, rank.choose_rendezvous(launch, plan.timeout_s)
    imports = (*_TORCH, *imports) if measures_torch else imports
    return rank.run(make or make_job, launch, plan.timeout_s, defaults, imports, rendezvous)


HOST_RANKS = 2
_MOST_KEPT_LINES = 20
_SECONDS_TO_END = 5.0
_SECONDS_FOR_PYTHON = 30.0
"""Time for ranks to start Python from a network file system or on a busy host. The launcher's timeout includes this
time, so that the watchdogs of the ranks expire first and name a missing rank.
"""

_SECONDS_TO_FINALIZE = 30.0
_OWN_NAME = "gpubench: "
_OWN_NOTE = f"{_OWN_NAME}note: "
# mpirun prints this message about the rank that ended first.
_ENDED_FIRST = re.compile(r"noticed that process rank (\d+) with PID")


def launch_ranks(plan: CollectivePlan, arguments: Sequence[str]) -> int:
    """Launch ranks with `arguments` on this host, and present what they measure. Return the exit code.

    Raises GpubenchError if nothing can be measured, or if the measurement fails. Rows that were measured before are
    still written.
    """
    start = RankStart.of(plan, arguments)
    if plan.processes:
        from gpubench.jobs.collective.turns import measure_in_turns

        return measure_in_turns(plan, start)
    if plan.scales:
        from gpubench.jobs.collective.scaling import launch_counts

        return launch_counts(plan, start)
    with start.announced(plan) as take_back, ExitStack() as stack:

        def present() -> "Presenter":
            presenter = start.presenter(plan, take_back)
            stack.enter_context(delivering(presenter))
            return presenter

        return start.measure(plan, present, take_back)


class RankListener(Protocol):
    """Receives the results of a job: a presenter, or the listener for one job in a sweep over settings."""

    rows: int
    report: "Report | None"

    def begin(self, metadata: "Metadata") -> None: ...

    def progress(self, done: int, total: int, label: str) -> None: ...

    def row(self, row: "Row") -> None: ...

    def end(self, report: "Report") -> None: ...

    def note(self, text: str) -> None:
        """Show a line that a rank or its launcher printed."""

    def cut_short(self) -> None:
        """Mark the outputs as incomplete, because the job ended without a report."""

    @property
    def exit_code(self) -> int: ...


class RankStart(Struct, frozen=True, kw_only=True):
    """The verified inputs to launch ranks on this host. `sharing` has environment variables for ranks that share a
    GPU.
    """

    arguments: Sequence[str]
    mpirun: launch.Launcher
    ranks: int
    driver: Driver
    sharing: Mapping[str, str]

    @classmethod
    def of(cls, plan: CollectivePlan, arguments: Sequence[str]) -> "RankStart":
        """Check outputs, ranks and launcher, and return the inputs. Raises GpubenchError if nothing can be measured
        here.
        """
        driver = read_driver(os.environ)
        ranks = max(choose_ranks(one, driver) for one in plan.each_count)
        sharing = sharing_settings(plan.ranks_per_gpu, plan.kernels_at_once)
        check_writable(plan.presentation.outputs, plan.recording.record)
        mpirun = launch.find_launcher()
        return cls(arguments=arguments, mpirun=mpirun, ranks=ranks, driver=driver, sharing=sharing)

    def announced(self, plan: CollectivePlan) -> AbstractContextManager[Callable[[], None]]:
        """Show on a terminal that ranks are starting, until the function that it yields is called."""
        shows = plan.presentation.show_progress and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        most = limit_seconds(Phase.LAUNCH, plan.timeout_s)
        text = f"starting {plural(self.ranks, 'rank')} on this host, for {most:g} s at most ..."
        return announced(text, sys.stderr if shows else None)

    def presenter(self, plan: CollectivePlan, take_back: Callable[[], None]) -> "Presenter":
        """Return the presenter. Call this while ranks start, because its import takes as long as they do."""
        from gpubench.formats.presenter import Presenter

        shown = plan.presentation
        presenter = Presenter(shown, progress=shown.show_progress)
        if plan.backend is None and self.driver.hidden_gpus():
            take_back()
            presenter.note(f"no GPU is measured: {self.driver.hidden_gpus()}")
        if self.sharing and not is_mps_running({**os.environ, **self.sharing}):
            take_back()
            presenter.note(cost_of_turns(plan.ranks_per_gpu))
        return presenter

    def measure(
        self,
        plan: CollectivePlan,
        listen: Callable[[], RankListener],
        take_back: Callable[[], None],
        variables: Mapping[str, str] | None = None,
    ) -> int:
        """Launch the ranks with additional environment `variables`, and read their messages until the job ends.
        Return the exit code.

        `listen` is called after the ranks were started. Raises GpubenchError if the measurement fails.
        """
        with ChannelReceiver() as channel:
            measures_mpi = not all(kind.logs_to_nccl for kind in plan.kinds(gpus=self.driver.visible > 0))
            also = {**self.sharing, **(variables or {})}
            environment = self.mpirun.environment(os.environ, channel.path, also, measures_mpi=measures_mpi)
            environment[PLAN_VARIABLE] = plan.for_ranks()
            command = self.mpirun.command(self.ranks, self.arguments)

            def heard(listener: RankListener, started: "Popen[bytes]") -> _LaunchedJob:
                job = _LaunchedJob(listener, started, take_back, is_soak=plan.cycles == 0)
                channel.expect_end(limit_seconds(Phase.LAUNCH, plan.timeout_s) + _SECONDS_FOR_PYTHON)
                job.listen(channel)
                return job

            first = launch.start(command, environment)
            with _ended(first):
                listener = listen()
                job = heard(listener, first)
                if job.started_nothing:
                    job = heard(listener, launch.start(command, environment))
                return job.exit_code()


@contextmanager
def _ended(job: "Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        launch.stop(job)


def choose_ranks(plan: CollectivePlan, driver: Driver) -> int:
    """Return the number of ranks to launch. This is --np if used, else one per visible GPU, else two CPU ranks.

    Raises GpubenchError if the backends or GPUs do not allow it.
    """
    plan.check_any_gpu([driver.visible])
    ranks = plan.ranks or driver.visible * plan.ranks_per_gpu or HOST_RANKS
    kinds = plan.kinds(gpus=driver.visible > 0)
    for kind in kinds:
        kind.check_installed()
    needing = next((kind.name for kind in kinds if kind.takes_gpus(seen=driver.visible > 0)), None)
    if needing is not None:
        if not driver.visible:
            why = driver.hidden_gpus() or driver.absent or "the driver finds none on this host"
            raise no_gpu(why, for_what=plan.needs_gpus or f"--backend {needing}")
        from gpubench.backends.cuda import check_installed

        check_installed(driver)
        if ranks > driver.visible * plan.ranks_per_gpu:
            from gpubench.backends.mpi.group import host_name

            raise more_ranks_than_gpus(ranks, driver.visible, host_name(), plan.ranks_per_gpu)
    else:
        plan.refuse_gpu_options("this host shows none")
    if plan.collective.rooted:
        from gpubench.measure.collective.sweep import check_root

        check_root(plan.collective, plan.root, ranks)
    return ranks


class _LaunchedJob:
    """A launched job and the messages of its ranks. `take_back` erases the line that announced the start."""

    def __init__(
        self, presenter: RankListener, job: "Popen[bytes]", take_back: Callable[[], None], *, is_soak: bool = False
    ) -> None:
        self._presenter, self._job, self._take_back, self._is_soak = presenter, job, take_back, is_soak
        self._error: GpubenchError | None = None
        self._error_at = 0.0
        self._ranks_spoke = False
        self._lost: list[LostRank] = []
        self._ended_first: int | None = None
        self._kept_lines: list[str] = []
        self._launcher_code = 0
        self._is_late = False
        self._row_kind: Any = None

    def listen(self, ranks: ChannelReceiver) -> None:
        """Present messages until the job ends, then stop the remaining processes."""
        try:
            for message in ranks.messages(self._job):
                if isinstance(message, str):
                    self._take_line(message)
                else:
                    self._take(message)
                    self._set_deadline(ranks)
        finally:
            self._is_late = ranks.is_late
            self._launcher_code = launch.stop(self._job)

    @property
    def started_nothing(self) -> bool:
        """True if mpirun could not start its own daemon, and therefore started no rank."""
        spoke = self._presenter.report is not None or self._ranks_spoke or self._lost or self._error is not None
        return not spoke and self._launcher_code == launch.DAEMON_FAILED

    def exit_code(self) -> int:
        """Return the exit code of a job that has ended. Raises GpubenchError if there is no report."""
        if self._presenter.report is None:
            self._presenter.cut_short()
            killed = killed_before(self._lost, self._error_at, self._ended_first)
            raise self._died() if killed is not None or self._error is None else self._error
        first = first_lost(self._lost, self._ended_first)
        after = self._error or (first.error("") if first is not None else None)
        if after is not None:
            self._presenter.note(f"{after.lines()[0]}, after everything had been measured")
        return self._presenter.exit_code

    def _set_deadline(self, ranks: ChannelReceiver) -> None:
        """Set the timeout for the end of the job.

        Once a rank has sent a message, only the watchdogs of the ranks have timeouts. After an error or a lost rank,
        the job must end within _SECONDS_TO_END. After the report, it must end within _SECONDS_TO_FINALIZE.
        """
        if self._error is not None or self._lost:
            ranks.expect_end(_SECONDS_TO_END)
        elif self._presenter.report is not None:
            ranks.expect_end(_SECONDS_TO_FINALIZE)
        elif self._ranks_spoke:
            ranks.expect_no_end()

    def _take(self, message: Message) -> None:
        from gpubench.model.results.report import Metadata
        from gpubench.model.results.result_file import TABLES

        kind = message["kind"]
        if not self._ranks_spoke and kind != "lost":
            self._ranks_spoke = True
            self._show_kept_lines()
        if kind != "hello":
            self._take_back()
        if kind == "begin":
            metadata = from_plain(Metadata, message["metadata"])
            self._row_kind = TABLES[metadata.rows_section]
            if self._is_soak:
                self._end_in_order(metadata.ranks[0].pid)
            self._presenter.begin(metadata)
        elif kind == "progress":
            self._presenter.progress(message["done"], message["total"], message["label"])
        elif kind == "row":
            self._presenter.row(self._row_kind(**message["row"]))
        elif kind == "end":
            self._presenter.end(read_report(message))
        elif kind == "lost":
            state = RankState.from_record(message["state"])
            self._lost.append(LostRank(state, message["at_seconds"], message["status"]))
        elif kind == "error" and self._error is None:
            self._error, self._error_at = GpubenchError.from_record(message["error"]), message["at_seconds"]

    def _end_in_order(self, pid: int) -> None:
        """Let the first Ctrl-C or SIGTERM end a soak test with a report, and the second one abort it at once."""
        numbers = (signal.SIGINT, signal.SIGTERM)

        def ask(*_: object) -> None:
            for number in numbers:
                signal.signal(number, signal.default_int_handler)
            self._presenter.note("the soak ends after this row. Press Ctrl-C again to end it now")
            with suppress(ProcessLookupError):
                os.kill(pid, SOAK_ENDS)

        for number in numbers:
            signal.signal(number, ask)

    def _take_line(self, line: str) -> None:
        """Show a line that a rank or mpirun printed.

        - Lines before the first message of a rank are kept. If no rank ever sends a message, they are the only
          explanation.
        - Lines after an error, a lost rank or the report are dropped, because mpirun would only repeat the cause.
        - Notes of gpubench itself are always shown.
        """
        if not line.strip(" -"):
            return
        if match := _ENDED_FIRST.search(line):
            self._ended_first = int(match[1])
        if not self._ranks_spoke:
            self._kept_lines.append(line)
        elif line.startswith(_OWN_NOTE) or (self._error is None and self._presenter.report is None and not self._lost):
            self._take_back()
            self._presenter.note(line.removeprefix(_OWN_NAME))

    def _died(self) -> GpubenchError:
        first = first_lost(self._lost, self._ended_first)
        if first is None and self._ranks_spoke:
            return ranks_ended_early(self._launcher_code, self._presenter.rows)
        if not self._ranks_spoke:
            self._kept_lines = self._kept_lines[-_MOST_KEPT_LINES:]
            self._show_kept_lines()
        if first is not None and (self._ranks_spoke or not first.exited):
            return first.error(rows_kept(self._presenter.rows))
        return no_rank_started() if self._is_late else launcher_failed(self._launcher_code)

    def _show_kept_lines(self) -> None:
        for line in self._kept_lines:
            self._take_back()
            self._presenter.note(line)
        self._kept_lines.clear()


def run(plan: CollectivePlan, arguments: Sequence[str]) -> int:
    """Run a collective and return the exit code.

    Raises GpubenchError if nothing is measured, the measurement fails, or an output cannot be written.
    """
    launch, source = detect_launcher(os.environ), plan.source
    refuse_under_launcher(plan.collective.name, source, launch)
    if not isinstance(source, Here):
        from gpubench.jobs import runner
        from gpubench.jobs.collective import simulated
        from gpubench.jobs.collective.scaling import in_counts, recorded_counts

        command: runner.Steps[Any] = simulated.SIMULATION
        if isinstance(source, Replayed):
            command, plan = simulated.REPLAY, replace(plan, rank_counts=recorded_counts(source.directory))
        return runner.run_alone(in_counts(command, plan), plan, arguments)
    if launch is None:
        return launch_ranks(plan, arguments)
    if plan.processes:
        from gpubench.jobs.collective.turns import refuse_turns_under_launcher

        refuse_turns_under_launcher(plan.processes, launch)
    return run_as_rank(plan, arguments, launch)
