"""What watches a sweep: it hears what the library chooses, counts what links carry, and draws the conclusion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpubench.causes.circumstances import Circumstances
from gpubench.measure.cases import Case, SweepRequest
from gpubench.measure.counting import Counting
from gpubench.measure.hearing import Heard, hear, key_of
from gpubench.measure.path_evidence import Observations, conclude
from gpubench.measure.path_report import Outcome
from gpubench.model.report import CollectiveRow
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
    _heard: Heard = field(default_factory=Heard)
    _around: Circumstances | None = None
    _seen: Observations = field(default_factory=Observations)
    _due: Sequence[tuple[float, float]] | None = None

    @classmethod
    def of(cls, request: SweepRequest, group: Group, senses: Senses) -> "Witness":
        """The witness of a request."""
        return cls(request, group, senses, Counting(senses.counters, request, group.rank, group.size))

    def try_out(self, cases: Sequence[Case], try_once: Callable[[Case], object]) -> None:
        """Have every operation run, and hear what is said of it and count what it moves, before any is timed.

        What machines and processes are like is gathered too; it may have to be waited for.
        """
        senses = self.senses
        self._due = self.group.collect(self.counting.due(cases[0]))
        self._heard = hear(self.request, self.group, senses.nodes, senses.log, cases, try_once) or Heard()
        traffic = self.group.collect(self.counting.count(cases, try_once, self.group.barrier))
        self._seen.traffic = traffic or ()
        self._around = senses.surroundings()

    def row(self, case: Case, row: CollectiveRow, wrong_by_rank: Sequence[int]) -> CollectiveRow:
        """The row with what is known of its paths."""
        if self.group.rank != 0:
            return row
        self._seen.take(row, wrong_by_rank)
        choice = self._heard.choices.get(key_of(case))
        return row if choice is None else choice.told(row)

    def outcome(self) -> Outcome | None:
        """What follows from all of it, on the first rank."""
        if self._around is None or self._due is None:
            return None
        return conclude(self._heard, self._seen, self._around, self._due, strict=self.senses.strict)
