"""What watches a sweep: it hears what the library chooses, counts what links carry, and knows the surroundings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpubench.conditions.circumstances import Circumstances
from gpubench.measure.collective.cases import Case, SweepRequest
from gpubench.measure.collective.counting import Counting
from gpubench.measure.collective.logged_choices import LoggedChoices, hear
from gpubench.measure.collective.path_judge import PathJudge, PathObservations
from gpubench.ports.group import Group
from gpubench.ports.library_log import LibraryLog
from gpubench.ports.link_counters import LinkCounters

Surroundings = Callable[[], Circumstances | None]
"""Machines, processes and settings of all ranks, on the first rank; every rank has to call it."""


@dataclass(frozen=True, slots=True)
class ObservationSources:
    """What a rank hears and sees: the library's log, its GPU's counters, the surroundings, every rank's node.

    `strict` is whether paths are judged.
    """

    log: LibraryLog
    counters: LinkCounters
    surroundings: Surroundings
    nodes: Sequence[int]
    strict: bool


@dataclass(slots=True)
class PathObserver:
    """One rank's part in watching a sweep. What it knows in the end, the first rank knows."""

    request: SweepRequest
    group: Group
    senses: ObservationSources
    counting: Counting
    _under: dict[str, LoggedChoices] = field(default_factory=dict)
    _testimony: PathObservations | None = None

    @classmethod
    def of(cls, request: SweepRequest, group: Group, senses: ObservationSources) -> "PathObserver":
        """The witness of a request."""
        return cls(request, group, senses, Counting(senses.counters, request, group.rank, group.size))

    def try_out(
        self, cases: Sequence[Case], try_once: Callable[[Case], object], then: Callable[[], object] = lambda: None
    ) -> None:
        """Have every operation run, and hear what is said of it and count what it moves, before any is timed.

        What is to be heard besides is tried out by `then`, before the log is over. What machines and processes are
        like is gathered too; it may have to be waited for.
        """
        senses = self.senses
        due = self.group.collect(self.counting.due(cases[0]))
        heard = self._hear(cases, try_once)
        then()
        senses.log.switch_off()
        traffic = self.group.collect(self.counting.count(cases, try_once, self.group.barrier))
        around = senses.surroundings()
        if due is not None and traffic is not None and around is not None:
            self._testimony = PathObservations(heard=heard, under=self._under, due=due, traffic=traffic, around=around)

    def try_setting(self, setting: str, cases: Sequence[Case], try_once: Callable[[Case], object]) -> None:
        """Hear what is said of the same operations under a setting: its rows have it, paths are not judged by it."""
        self._under[setting] = self._hear(cases, try_once)

    def _hear(self, cases: Sequence[Case], try_once: Callable[[Case], object]) -> LoggedChoices:
        return hear(self.request, self.group, self.senses.nodes, self.senses.log, cases, try_once) or LoggedChoices()

    def judge(self) -> PathJudge | None:
        """Who says what follows from it, on the first rank, once all was tried out."""
        if self._testimony is None:
            return None
        return PathJudge(self.request, self._testimony, strict=self.senses.strict)
