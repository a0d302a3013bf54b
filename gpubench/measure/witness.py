"""What watches a sweep: it hears what the library chooses, counts what links carry, and knows the surroundings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpubench.causes.circumstances import Circumstances
from gpubench.measure.cases import Case, SweepRequest
from gpubench.measure.counting import Counting
from gpubench.measure.hearing import Heard, hear
from gpubench.measure.judge import Judge, Testimony
from gpubench.ports import Group, LibraryLog, LinkCounters

Surroundings = Callable[[], Circumstances | None]
"""Machines, processes and settings of all ranks, on the first rank; every rank has to call it."""


@dataclass(frozen=True, slots=True)
class Senses:
    """What a rank hears and sees: the library's log, its GPU's counters, the surroundings, every rank's node.

    `strict` is whether paths are judged.
    """

    log: LibraryLog
    counters: LinkCounters
    surroundings: Surroundings
    nodes: Sequence[int]
    strict: bool


@dataclass(slots=True)
class Witness:
    """One rank's part in watching a sweep. What it knows in the end, the first rank knows."""

    request: SweepRequest
    group: Group
    senses: Senses
    counting: Counting
    _under: dict[str, Heard] = field(default_factory=dict)
    _testimony: Testimony | None = None

    @classmethod
    def of(cls, request: SweepRequest, group: Group, senses: Senses) -> "Witness":
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
            self._testimony = Testimony(heard=heard, under=self._under, due=due, traffic=traffic, around=around)

    def try_setting(self, setting: str, cases: Sequence[Case], try_once: Callable[[Case], object]) -> None:
        """Hear what is said of the same operations under a setting: its rows have it, paths are not judged by it."""
        self._under[setting] = self._hear(cases, try_once)

    def _hear(self, cases: Sequence[Case], try_once: Callable[[Case], object]) -> Heard:
        return hear(self.request, self.group, self.senses.nodes, self.senses.log, cases, try_once) or Heard()

    def judge(self) -> Judge | None:
        """Who says what follows from it, on the first rank, once all was tried out."""
        if self._testimony is None:
            return None
        return Judge(self.request, self._testimony, strict=self.senses.strict)
