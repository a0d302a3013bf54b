"""The observers of a sweep, which take no part in what is timed; of its paths before anything is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpubench.collectives.request import SweepRequest
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.row_collector import NO_RECORDER, Recorder
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.group import Group
from gpubench.ports.library_log import LibraryLog
from gpubench.ports.link_counters import LinkCounters

if TYPE_CHECKING:
    # What observes paths is loaded by the ranks that do: without GPUs it is half of a rank's start.
    from gpubench.conditions.definition.circumstances import Circumstances
    from gpubench.measure.collective.counting import Counting
    from gpubench.measure.collective.logged_choices import LoggedChoices
    from gpubench.measure.collective.path_evidence import PathObservations
    from gpubench.measure.collective.path_judge import PathJudge
    from gpubench.measure.collective.speed_judge import SpeedJudge
    from gpubench.measure.paths.idle_window import IdleWindow
    from gpubench.model.facts.gpu_condition import GpuCondition
    from gpubench.model.facts.idle_gpu import IdleGpu

_GPU = 0

ReadCondition = Callable[[], "GpuCondition | None"]
"""Reads the condition of this rank's GPU; None where there is no GPU."""

ReadCircumstances = Callable[[], "Circumstances | None"]
"""Machines, processes and settings of all ranks, on the first rank; every rank has to call it."""


MakeSpeedJudge = Callable[["Circumstances | None"], "SpeedJudge | None"]
"""Makes the judge of speed on the first rank, from what is known of machines; None where nobody judges."""


def _judging_no_speed(_circumstances: "Circumstances | None") -> None:
    return None


@dataclass(frozen=True, slots=True)
class ObservationSources:
    """The sources of a rank: the library's log, its GPU's counters, the circumstances, and every rank's node.

    `window` looks at the rank's GPU while nothing of this job runs; `by_design` is why what is measured goes through
    host memory on any machine; `read_waited` is the share of its time that the rank waited for a CPU since its first
    operation.
    """

    log: LibraryLog
    counters: LinkCounters
    read_circumstances: ReadCircumstances
    nodes: Sequence[int]
    window: "IdleWindow | None" = None
    by_design: str = ""
    read_waited: Callable[[], float | None] = lambda: None


@dataclass(slots=True)
class PathObserver:
    """One rank's part in observing the paths of a sweep; the first rank has the observations."""

    request: SweepRequest
    group: Group
    sources: ObservationSources
    counting: "Counting"
    _choices_by_setting: "dict[str, LoggedChoices]" = field(default_factory=dict)
    _observations: "PathObservations | None" = None

    @classmethod
    def of(cls, request: SweepRequest, group: Group, sources: ObservationSources) -> "PathObserver":
        """The observer of a request."""
        from gpubench.measure.collective.counting import Counting

        return cls(request, group, sources, Counting(sources.counters, request, group.rank, group.size))

    def try_out(
        self, cases: Sequence[Case], try_once: Callable[[Case], object], then: Callable[[], object] = lambda: None
    ) -> None:
        """Run every operation, read what is logged of it and count what it moves, before any is timed.

        `then` tries out settings, before the log is over. Machines and processes are read too, which may take a while.
        """
        from gpubench.measure.collective.path_evidence import PathObservations

        sources = self.sources
        idle = self.look_while_idle()
        expected_bytes = self.group.collect(self.counting.expected_bytes(cases[0]))
        choices = self._read_choices(cases, try_once)
        then()
        sources.log.switch_off()
        traffic = self.group.collect(self.counting.count(cases, try_once, self.group.barrier))
        circumstances = sources.read_circumstances()
        if expected_bytes is not None and traffic is not None and circumstances is not None:
            self._observations = PathObservations(
                choices=choices,
                choices_by_setting=self._choices_by_setting,
                expected_bytes=expected_bytes,
                traffic=traffic,
                circumstances=circumstances,
                idle=idle or (),
                by_design=sources.by_design,
            )

    def look_while_idle(self, at_work: "GpuCondition | None" = None) -> "tuple[IdleGpu, ...] | None":
        """Every rank's GPU, on the first rank, while none of them runs an operation; empty where nobody can look.

        Before the first operation and after the last row, when `at_work` is the condition of this rank's GPU. Every
        rank has to call it.
        """
        window, group = self.sources.window, self.group
        group.barrier()
        waited = None if at_work is None else self.sources.read_waited()
        own = None if window is None else replace(window.look([_GPU])[0], at_work=at_work, waited=waited)
        group.barrier()
        collected = group.collect(own)
        if collected is None:
            return None
        idle = tuple(each for each in collected if each is not None)
        return idle if len(idle) == len(collected) else ()

    def try_setting(self, setting: str, cases: Sequence[Case], try_once: Callable[[Case], object]) -> None:
        """Read what is logged of the same operations under a setting, for its rows; paths are not judged by it."""
        self._choices_by_setting[setting] = self._read_choices(cases, try_once)

    def _read_choices(self, cases: Sequence[Case], try_once: Callable[[Case], object]) -> "LoggedChoices":
        from gpubench.measure.collective.logged_choices import LoggedChoices, read_choices

        nodes, log = self.sources.nodes, self.sources.log
        return read_choices(self.request, self.group, nodes, log, cases, try_once) or LoggedChoices()

    def judge(self) -> "PathJudge | None":
        """The judge of what was observed, on the first rank, once all was tried out."""
        from gpubench.measure.collective.path_judge import PathJudge

        if self._observations is None:
            return None
        return PathJudge(self.request, self._observations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """The observers of a sweep, each with a stand-in that does nothing.

    `path_observer` finds out over which paths the bytes go, `progress` is told of every phase, so that a hang is seen,
    `read_condition` is called between rows, `recorder` gets the samples that rows and verdicts are made of. The first
    rank makes a judge of speed; a row that it doubts is measured again, where `measures_again`: not where groups have
    to keep in step.
    """

    path_observer: PathObserver | None = None
    progress: Progress = UNWATCHED
    read_condition: ReadCondition = lambda: None
    recorder: Recorder = NO_RECORDER
    make_speed_judge: MakeSpeedJudge = _judging_no_speed
    measures_again: bool = True


NO_OBSERVERS = Observers()
