"""What watches a sweep: it hears what the library chooses, counts what links carry, and draws the conclusion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpubench.causes.circumstances import Circumstances
from gpubench.measure.cases import Case, SweepRequest
from gpubench.measure.counting import Counting
from gpubench.measure.hearing import Choice, Heard, hear, key_of
from gpubench.measure.path_evidence import Observations, conclude
from gpubench.measure.path_report import Outcome
from gpubench.model.busbw_limit import Work, busbw_limit, exchange_limit
from gpubench.model.report import CollectiveRow
from gpubench.model.selection import Used, without_idle
from gpubench.model.setting import AGAIN, taken_name
from gpubench.model.topology import Limit
from gpubench.model.winners import took_another
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
    _under: dict[str, Heard] = field(default_factory=dict)
    _around: Circumstances | None = None
    _seen: Observations = field(default_factory=Observations)
    _due: Sequence[tuple[float, float]] | None = None
    _limits: dict[tuple[str | None, int], Limit] = field(default_factory=dict)

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
        self._due = self.group.collect(self.counting.due(cases[0]))
        self._heard = self._hear(cases, try_once)
        then()
        senses.log.switch_off()
        traffic = self.group.collect(self.counting.count(cases, try_once, self.group.barrier))
        self._seen.traffic = traffic or ()
        self._around = senses.surroundings()

    def try_setting(self, setting: str, cases: Sequence[Case], try_once: Callable[[Case], object]) -> None:
        """Hear what is said of the same operations under a setting: its rows have it, paths are not judged by it."""
        self._under[setting] = self._hear(cases, try_once)

    def _hear(self, cases: Sequence[Case], try_once: Callable[[Case], object]) -> Heard:
        return hear(self.request, self.group, self.senses.nodes, self.senses.log, cases, try_once) or Heard()

    def row(self, case: Case, row: CollectiveRow, wrong_by_rank: Sequence[int]) -> CollectiveRow:
        """The row with what is known of its paths."""
        if self.group.rank != 0:
            return row
        if case.setting is None:
            self._seen.take(row, wrong_by_rank)
        heard = self._heard if case.setting in (None, AGAIN) else self._under.get(str(case.setting), Heard())
        choice = heard.choices.get(key_of(case))
        return row if choice is None else _remarked(limited(choice.told(row), self._limit(choice)))

    def _limit(self, choice: Choice) -> Limit:
        """The ceiling of busbw; found out once for all operations that are done alike."""
        algorithm = None if choice.tuning is None else choice.tuning.algorithm
        key = algorithm, id(choice.used)
        if key not in self._limits:
            self._limits[key] = self._limit_of(algorithm, choice.used)
        return self._limits[key]

    def _limit_of(self, algorithm: str | None, used: Used) -> Limit:
        if self._around is None or self._due is None:
            return Limit(None, "nothing described these GPUs")
        collective, wiring = self.request.collective, self._around.wiring
        if collective.point_to_point:
            work = Work(collective.busbw_factor(self.group.size), self._due)
            return exchange_limit(work, used.pairs, wiring)
        if algorithm is None:
            return Limit(None, f"the algorithm is not known: {self._heard.no_tuning or 'NCCL named none'}")
        return busbw_limit(algorithm, without_idle(used.pairs, self._due), wiring)

    def outcome(self) -> Outcome | None:
        """What follows from all of it, on the first rank."""
        if self._around is None or self._due is None:
            return None
        return conclude(self._heard, self._seen, self._around, self._due, strict=self.senses.strict)


def _remarked(row: CollectiveRow) -> CollectiveRow:
    """The row with a word about it, where the library did not do as it was told."""
    if not took_another(row):
        return row
    taken = taken_name(row.algorithm, row.protocol)
    return replace(row, note="; ".join(filter(None, (f"asked for {row.setting}, NCCL took {taken}", row.note))))


def limited(row: CollectiveRow, limit: Limit) -> CollectiveRow:
    """A row with the ceiling of its busbw, or why that is not known."""
    if limit.gb_s is None:
        return replace(row, note=limit.note)
    return replace(row, limit_gb_s=limit.gb_s, limit_percent=100 * row.busbw_gb_s / limit.gb_s)
