"""A scan, phase after phase: what is measured next follows from what was measured before."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gpubench.measure.scan.blame import blamed
from gpubench.measure.scan.judging import CellScore, falls_behind, scores
from gpubench.measure.scan.leaves import LeafLevel, slow_leaves, with_slow_leaves
from gpubench.measure.scan.schedule import Schedule
from gpubench.measure.scan.scores import Yardstick, round_yardstick, screening_yardstick
from gpubench.model.results.scan_rounds import (
    ROUNDS,
    BeforeRounds,
    NodePair,
    NodeRail,
    PairSample,
    PlannedRound,
    RoundOutcome,
    ScanFabric,
    ScanPhase,
)


class RoundMeasurer(Protocol):
    """Measures a round on whatever the nodes are."""

    def measure(self, planned: PlannedRound) -> RoundOutcome:
        """All pairs at once, within a deadline; never raises for a node that is gone or a worker that hangs.

        Raises EndOfRoundsError where nobody is left to measure.
        """
        ...


class EndOfRoundsError(Exception):
    """There are no more rounds: what was measured is judged."""


NOTHING_BEFORE = BeforeRounds()

Keep = Callable[[PlannedRound, RoundOutcome], None]
"""Takes every round as it ends, to keep it."""


@dataclass
class ScanCourse:
    """What is known of a scan so far.

    `suspects` are the cells and nodes that confirmation looked at, `confirmed` what it found; `yardstick` is of the
    screening. `last_scores` has the newest score of every cell.
    """

    fabric: ScanFabric
    before: BeforeRounds = field(default_factory=BeforeRounds)
    outcomes: list[RoundOutcome] = field(default_factory=list)
    gone: dict[int, tuple[int, str]] = field(default_factory=dict)
    yardstick: Yardstick = field(default_factory=lambda: Yardstick({}, 0.0))
    screened: dict[NodeRail, CellScore] = field(default_factory=dict)
    suspects: set[NodeRail] = field(default_factory=set)
    suspect_leaves: list[LeafLevel] = field(default_factory=list)
    confirmed: dict[NodeRail, CellScore] = field(default_factory=dict)
    judged: dict[NodeRail, CellScore] = field(default_factory=dict)
    slow_leaves: list[LeafLevel] = field(default_factory=list)
    is_quick: bool = False

    def samples(self, phase: ScanPhase) -> list[PairSample]:
        """The figures of a phase; those that are missing are of the one node that is to blame, where it is known."""
        found = [sample for each in self.outcomes if each.phase is phase for sample in each.samples]
        if not any(each.failure for each in found):
            return found
        retired = self.retired()
        return [_with_culprit(each, retired) if each.failure else each for each in found]

    @property
    def has_confirmed(self) -> bool:
        """True where confirmation took place."""
        return any(each.phase is ScanPhase.CONFIRMATION for each in self.outcomes)

    def living(self) -> list[int]:
        """The nodes that still answer, and of which not every rail hangs."""
        hanging = Counter(cell.node for cell in self.retired())
        nodes = range(len(self.fabric.hosts))
        return [node for node in nodes if node not in self.gone and hanging[node] < self.fabric.rails]

    def phase_of(self, cell: NodeRail) -> ScanPhase | None:
        """The phase that judged a cell last; None where none did."""
        if cell not in self.judged:
            return None
        if self.judged[cell] is self.screened.get(cell):
            return ScanPhase.SCREENING
        return ScanPhase.CONFIRMATION if cell in self.suspects else ScanPhase.SUSPECTS

    def confirmation_figures(self, cell: NodeRail) -> int:
        """Figures of a suspect in the confirmation."""
        return self.judged[cell].figures if self.phase_of(cell) is ScanPhase.CONFIRMATION else 0

    def failures(self) -> Mapping[NodeRail, list[PairSample]]:
        """The figures that are missing, by every cell that may be to blame; of phase 0 they have no other node."""
        found = {
            cell: [PairSample(cell.node, cell.node, cell.rail, 0.0, seen, cell.node)]
            for cell, seen in self.before.failed.items()
        }
        for outcome in self.outcomes:
            for sample in outcome.samples:
                for node in (sample.first, sample.second):
                    if sample.failure and sample.culprit in (None, node):
                        found.setdefault(NodeRail(node, sample.rail), []).append(sample)
        return found

    def retired(self) -> dict[NodeRail, list[PairSample]]:
        """The cells that failed with several partners, or whose own supervisor saw it; they take part no more."""
        failures = self.failures()
        return {cell: failures[cell] for cell in blamed(failures)}


def _with_culprit(sample: PairSample, retired: Collection[NodeRail]) -> PairSample:
    blamed = [node for node in (sample.first, sample.second) if NodeRail(node, sample.rail) in retired]
    return sample._replace(culprit=blamed[0]) if sample.culprit is None and len(blamed) == 1 else sample


def scan(
    fabric: ScanFabric,
    seed: int,
    measurer: RoundMeasurer,
    *,
    quick: bool,
    keep: Keep,
    before: BeforeRounds = NOTHING_BEFORE,
) -> ScanCourse:
    """Three rounds of screening, three of suspects, five of confirmation; `quick` ends after the first three.

    Where rounds end before, what there is is judged. What did not work `before` takes part in none.
    """
    course = ScanCourse(fabric, before, is_quick=quick)
    course.gone |= {node: (0, seen) for node, seen in before.gone.items()}
    schedule = Schedule(fabric, seed)
    steps = _Steps(course, measurer, keep)
    with suppress(EndOfRoundsError):
        try:
            for number in range(1, ROUNDS[ScanPhase.SCREENING] + 1):
                steps.run(ScanPhase.SCREENING, schedule.screening(number, course.living()))
        finally:
            _screen(course)
        for phase in (ScanPhase.SUSPECTS, ScanPhase.CONFIRMATION):
            if quick or not (course.suspects or course.suspect_leaves):
                break
            _against_good(course, schedule, steps, phase)
    return course


class _Steps:
    def __init__(self, course: ScanCourse, measurer: RoundMeasurer, keep: Keep) -> None:
        self._course, self._measurer, self._keep = course, measurer, keep

    def run(self, phase: ScanPhase, pairs: Sequence[NodePair]) -> None:
        """One round; nodes that are gone after it take part in no other."""
        number = len(self._course.outcomes) + 1
        planned = PlannedRound(number, phase, tuple(pairs), frozenset(self._course.retired()))
        outcome = self._measurer.measure(planned)
        self._course.outcomes.append(outcome)
        self._course.gone = {node: (number, seen) for node, seen in outcome.gone.items()} | self._course.gone
        self._keep(planned, outcome)


def _screen(course: ScanCourse) -> None:
    fabric, samples = course.fabric, course.samples(ScanPhase.SCREENING)
    yardstick = screening_yardstick(fabric, samples)
    course.suspect_leaves = slow_leaves(fabric, yardstick, samples)
    course.yardstick = with_slow_leaves(yardstick, course.suspect_leaves)
    course.screened = course.judged = scores(fabric, course.yardstick, samples)
    course.suspects = set(falls_behind(ScanPhase.SCREENING, yardstick.deviation, course.screened))


def _against_good(course: ScanCourse, schedule: Schedule, steps: _Steps, phase: ScanPhase) -> None:
    suspects = _suspect_nodes(course)
    good = frozenset(range(len(course.fabric.hosts))) - suspects
    first = 0 if phase is ScanPhase.SUSPECTS else ROUNDS[ScanPhase.SUSPECTS]
    try:
        for number in range(first + 1, first + ROUNDS[phase] + 1):
            living = set(course.living())
            judged, others = schedule.against_good(number, sorted(suspects & living), sorted(good & living))
            steps.run(phase, (*judged, *others))
    finally:
        _judge(course, phase, good)


def _suspect_nodes(course: ScanCourse) -> frozenset[int]:
    slow = {each.leaf for each in course.suspect_leaves}
    of_leaves = {node for node, leaf in enumerate(course.fabric.leaves) if leaf in slow}
    return frozenset(of_leaves | {cell.node for cell in course.suspects})


def _judge(course: ScanCourse, phase: ScanPhase, good: frozenset[int]) -> None:
    """What is left of the suspects, by the figures of this phase alone."""
    fabric, samples = course.fabric, course.samples(phase)
    yardstick = round_yardstick(fabric, samples, good, course.yardstick)
    known = {(each.leaf, each.rail) for each in course.suspect_leaves}
    leaves = [each for each in slow_leaves(fabric, yardstick, samples, good) if (each.leaf, each.rail) in known]
    inside = {(each.leaf, each.rail): each.inside for each in course.suspect_leaves}
    leaves = [LeafLevel(each.leaf, each.rail, inside[each.leaf, each.rail], each.across) for each in leaves]
    found = scores(fabric, with_slow_leaves(yardstick, leaves), samples, good)
    behind = set(falls_behind(phase, yardstick.deviation, found))
    looked_at = {cell: each for cell, each in found.items() if cell in course.suspects}
    course.judged = {**course.judged, **looked_at}
    course.suspect_leaves = leaves
    if phase is ScanPhase.CONFIRMATION:
        course.confirmed = {cell: each for cell, each in looked_at.items() if cell in behind}
        course.slow_leaves = leaves
    else:
        course.suspects &= behind | (course.suspects - found.keys())
