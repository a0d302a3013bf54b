"""The steps of a scan: measure inside each node, then in rounds between pairs of nodes, then a ring of all nodes.

All nodes measure at the same time. judging.py and leaves.py judge the measurements after each phase.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from statistics import median, median_high
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.measure.scan import judging
from gpubench.measure.scan.leaves import (
    DOUBTFUL_ERRORS,
    LEAST_NODES,
    MEDIAN_ERROR,
    LeafLevel,
    adjust_to_slow_leaves,
    correct_slow_leaves,
    leaf_levels,
    members_of,
)
from gpubench.model.results.scan import (
    ROUNDS,
    BeforeRounds,
    LocalFigure,
    LocalQuantity,
    NodePair,
    NodeRail,
    PairSample,
    PlannedRound,
    RingOutcome,
    RoundOutcome,
    ScanFabric,
    ScanPhase,
)

_FEW_NODES = 64
"""Up to this many nodes, random pairings often repeat a pair, so repeated pairs are exchanged."""


def _circle_round(number: int, places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs in one round of a round-robin tournament (circle method).

    With an even number n, everyone meets everyone else once in n - 1 rounds. With an odd number, one sits out per
    round.
    """
    order: list[int | None] = [*places, *([None] if len(places) % 2 else [])]
    turning = len(order) - 1
    if turning < 1:
        return []
    meetings = [(order[-1], order[number % turning])]
    meetings += [
        (order[(number + step) % turning], order[(number - step) % turning]) for step in range(1, len(order) // 2)
    ]
    return [(one, other) for one, other in meetings if one is not None and other is not None]


class Schedule(Struct, frozen=True):
    """Chooses the pairs of nodes in each round. With an odd number of nodes, a different node sits out each time."""

    fabric: ScanFabric
    seed: int

    def screening(self, number: int, living: Sequence[int]) -> tuple[NodePair, ...]:
        """Return the pairs in a screening round.

        The first round pairs nodes inside known leaves, later rounds between leaves.
        """
        return tuple(self._matching(number, living, inside=number == 1))

    def against_good(
        self, number: int, suspects: Sequence[int], good: Sequence[int], others: Sequence[int] = ()
    ) -> tuple[tuple[NodePair, ...], tuple[NodePair, ...]]:
        """Pair each suspect with a different good node in each round, and pair the remaining nodes with each other.

        If there are more suspects than good nodes, the suspects take turns.
        """
        order = self._shuffled("suspects", suspects)
        partners = self._shuffled("good", good)
        most = min(len(order), len(partners))
        turn = 0 if most == len(order) else number * most
        chosen = [order[(turn + i) % len(order)] for i in range(most)]
        taken = [partners[(number + i) % len(partners)] for i in range(most)]
        judged = tuple(NodePair(one, other) for one, other in zip(chosen, taken, strict=True))
        left = sorted({*suspects, *good, *others} - set(chosen) - set(taken))
        return judged, tuple(self._matching(number, left, inside=number % 2 == 1))

    def _matching(self, number: int, nodes: Sequence[int], *, inside: bool) -> list[NodePair]:
        if len({self.fabric.leaves[node] for node in nodes}) < 2 or any(
            self.fabric.leaves[node] is None for node in nodes
        ):
            return [NodePair(one, other) for one, other in _circle_round(number, self._shuffled("circle", nodes))]
        even = self._make_even(number, nodes)
        return self._inside(number, even) if inside else self._across(number, even)

    def _inside(self, number: int, nodes: Sequence[int]) -> list[NodePair]:
        """Pair nodes inside leaves. If leaves have an odd number of nodes, pair the remaining nodes between leaves."""
        members: dict[str | None, list[int]] = {}
        for node in self._shuffled(f"inside{number}", nodes):
            members.setdefault(self.fabric.leaves[node], []).append(node)
        left = [member.pop() for member in members.values() if len(member) % 2]
        groups = [*members.values(), left]
        return [NodePair(group[i], group[i + 1]) for group in groups for i in range(0, len(group) - 1, 2)]

    def _across(self, number: int, nodes: Sequence[int]) -> list[NodePair]:
        """Pair nodes behind different leaves at random. Among few nodes, avoid pairs from earlier rounds.

        If both nodes of a pair are behind one leaf, it exchanges partners with another pair. That is possible if no
        leaf has more than half of all nodes.
        """
        before = set[frozenset[int]]()
        if len(nodes) <= _FEW_NODES:
            before = {frozenset(pair) for pair in self._inside(1, nodes)}
            for earlier in range(2, number):
                before |= {frozenset(pair) for pair in self._between(earlier, nodes, before)}
        return self._between(number, nodes, before)

    def _between(self, number: int, nodes: Sequence[int], before: Set[frozenset[int]]) -> list[NodePair]:
        order = self._shuffled(f"across{number}", nodes)
        pairs = [NodePair(order[place], order[place + 1]) for place in range(0, len(order) - 1, 2)]
        for place in range(len(pairs)):
            for known in (before, frozenset[frozenset[int]]()):
                if not self._is_poor(pairs[place], known) or self._mend(pairs, place, known):
                    break
        return pairs

    def _mend(self, pairs: list[NodePair], place: int, before: Set[frozenset[int]]) -> bool:
        """Exchange partners with another pair so that both new pairs are allowed.

        Return False if no pair makes that possible.
        """
        one, other = pairs[place]
        for step in range(1, len(pairs)):
            elsewhere = (place + step) % len(pairs)
            for third, fourth in (pairs[elsewhere], pairs[elsewhere][::-1]):
                changed = NodePair(one, third), NodePair(other, fourth)
                if not (self._is_poor(changed[0], before) or self._is_poor(changed[1], before)):
                    pairs[place], pairs[elsewhere] = changed
                    return True
        return False

    def _is_poor(self, pair: NodePair, before: Set[frozenset[int]]) -> bool:
        return self.fabric.inside(*pair) or (bool(before) and frozenset(pair) in before)

    def _make_even(self, number: int, nodes: Sequence[int]) -> Sequence[int]:
        """Return an even number of nodes. If the number is odd, a different node sits out each round."""
        if len(nodes) % 2 == 0:
            return nodes
        idle = self._shuffled("idle", nodes)[number % len(nodes)]
        return [node for node in nodes if node != idle]

    def _shuffled(self, name: str, nodes: Sequence[int]) -> list[int]:
        order = sorted(nodes)
        random.Random(f"{self.seed}/{name}").shuffle(order)
        return order


FAILURES_THAT_RETIRE = 2
"""After failures with this many partners, a cell is not measured again, because each failure costs a whole deadline."""


def blamed(failures: Mapping[NodeRail, Sequence[PairSample]]) -> list[NodeRail]:
    """Return the cells that caused the failures.

    These are cells that their own node's supervisor reported, or that failed with several partners. A healthy cell can
    meet two hanging cells, one after the other. So first choose cells that are the only explanation for a partner's
    failure. If the failures form no cycle, the result is the smallest set that explains all failures.
    """
    reported = [cell for cell, samples in failures.items() if any(sample.culprit == cell.node for sample in samples)]
    partners = {
        cell: {NodeRail(sample.partner(cell.node), cell.rail) for sample in samples if sample.culprit is None}
        for cell, samples in failures.items()
    }
    found = dict.fromkeys(reported)
    left = {cell: met - found.keys() for cell, met in partners.items() if cell not in found}
    while True:
        candidates = [cell for cell, met in left.items() if len(met) >= FAILURES_THAT_RETIRE]
        sole_suspects = [cell for cell in candidates if any(len(left[partner]) == 1 for partner in left[cell])]
        if not candidates:
            return list(found)
        worst = max(sole_suspects or candidates, key=lambda cell: (len(left[cell]), -cell.node, -cell.rail))
        found[worst] = None
        for partner in left.pop(worst):
            left[partner] = left[partner] - {worst}


class RingMeasurer(Protocol):
    """Measures rings of rails."""

    def rings(
        self, rings: Sequence[Sequence[NodeRail]], *, all_reduce: bool = False, repeats_failures: bool = False
    ) -> list[RingOutcome]:
        """Measure all rings at the same time, within a deadline. Workers that die or hang do not raise an exception."""
        ...


class InsideNodes:
    """Measures between the GPUs inside each node (phase 0). A rail is excluded if it fails twice or its worker dies."""

    def __init__(self, measurer: RingMeasurer, nodes: Sequence[int], rails: int) -> None:
        self._measurer, self._nodes, self._rails = measurer, nodes, rails
        self._out: set[NodeRail] = set()
        self._failed: dict[NodeRail, list[LocalFigure]] = {}

    def figures(self) -> list[LocalFigure]:
        """Measure all nodes. Rails that are no longer measured keep their earlier failures."""
        if self._rails < 2:
            return []
        found = [pair for number in range(self._rails - 1 + self._rails % 2) for pair in self._pairs(number)]
        found += self._all_reduce()
        known = {figure.place for figure in found}
        return [*found, *(figure for figure in self._given_up() if figure.place not in known)]

    def _pairs(self, number: int) -> Iterator[LocalFigure]:
        pairs = [
            (NodeRail(node, min(pair)), NodeRail(node, max(pair)))
            for node in self._nodes
            for pair in _circle_round(number, range(self._rails))
        ]
        for pair, outcome in self._measured([pair for pair in pairs if self._out.isdisjoint(pair)], all_reduce=False):
            (node, one), (_, other) = pair
            failure = next(iter(outcome.failures.values())).seen if outcome.failures else ""
            figure = LocalFigure(node, one, LocalQuantity.PAIR, outcome.gb_s, other, failure)
            yield figure
            for cell in pair if failure else ():
                self._failed.setdefault(cell, []).append(figure)
                if len({figure.place for figure in self._failed[cell]}) >= FAILURES_THAT_RETIRE:
                    self._out.add(cell)

    def _all_reduce(self) -> Iterator[LocalFigure]:
        rings = [[NodeRail(node, rail) for rail in range(self._rails)] for node in self._nodes]
        whole = [ring for ring in rings if self._out.isdisjoint(ring)]
        for ring, outcome in self._measured(whole, all_reduce=True):
            failure = next(iter(outcome.failures.values())).seen if outcome.failures else ""
            yield LocalFigure(ring[0].node, 0, LocalQuantity.ALL_REDUCE, outcome.gb_s, None, failure)

    def _measured(
        self, rings: Sequence[Sequence[NodeRail]], *, all_reduce: bool
    ) -> Iterator[tuple[Sequence[NodeRail], RingOutcome]]:
        """Yield the outcome of each ring.

        Skip rings with a dead worker, because the first round between nodes reports it.
        """
        if not rings:
            return
        for ring, outcome in zip(
            rings, self._measurer.rings(rings, all_reduce=all_reduce, repeats_failures=True), strict=True
        ):
            dead = {cell for cell, failure in outcome.failures.items() if failure.is_own}
            self._out |= dead
            if not dead:
                yield ring, outcome

    def _given_up(self) -> Iterator[LocalFigure]:
        return (figure for cell in sorted(self._out & self._failed.keys()) for figure in self._failed[cell])


class RoundMeasurer(Protocol):
    """Measures rounds on real, simulated or recorded nodes."""

    def measure(self, planned: PlannedRound) -> RoundOutcome:
        """Measure all pairs at the same time, within a deadline.

        Lost nodes and hanging workers do not raise an exception. Raises EndOfRoundsError if no node is left.
        """
        ...


class EndOfRoundsError(Exception):
    """Raised if no further round can be measured. The scan then judges the finished rounds."""


NOTHING_BEFORE = BeforeRounds()

_SURE_LOSSES = 2.0
"""A loss this many times the surely detected loss is so large that noise cannot hide which nodes of a leaf are slow."""

Keep = Callable[[PlannedRound, RoundOutcome], None]
"""Stores a round when it has finished."""


class ScanCourse(Struct):
    """The state of a scan: its rounds, and the results of each phase.

    yardstick        normal bandwidth and noise, from the screening
    suspects         cells that the next phase measures again
    confirmed        slow cells, found in the confirmation
    suspect_leaves   slow leaves, until the confirmation
    slow_leaves      slow leaves, found in the confirmation
    doubtful_leaves  leaves that are slower than others, perhaps because of noise
    gone             lost nodes, with the number of the round and the reason
    """

    fabric: ScanFabric
    before: BeforeRounds = field(default_factory=BeforeRounds)
    outcomes: list[RoundOutcome] = field(default_factory=list)
    gone: dict[int, tuple[int, str]] = field(default_factory=dict)
    yardstick: judging.Yardstick = field(default_factory=lambda: judging.Yardstick({}, 0.0))
    screened: dict[NodeRail, judging.CellScore] = field(default_factory=dict)
    suspects: set[NodeRail] = field(default_factory=set)
    suspect_leaves: list[LeafLevel] = field(default_factory=list)
    doubtful_leaves: list[LeafLevel] = field(default_factory=list)
    confirmed: dict[NodeRail, judging.CellScore] = field(default_factory=dict)
    judged: dict[NodeRail, judging.CellScore] = field(default_factory=dict)
    slow_leaves: list[LeafLevel] = field(default_factory=list)
    is_quick: bool = False

    def samples(self, phase: ScanPhase) -> list[PairSample]:
        """Return the measurements in a phase.

        If it is known which node caused a failure, it is the sample's `culprit`.
        """
        found = [sample for outcome in self.outcomes if outcome.phase is phase for sample in outcome.samples]
        if not any(sample.failure for sample in found):
            return found
        retired = self.retired()
        return [_name_culprit(sample, retired) if sample.failure else sample for sample in found]

    @property
    def has_confirmed(self) -> bool:
        """True if at least one round of the confirmation took place."""
        return any(outcome.phase is ScanPhase.CONFIRMATION for outcome in self.outcomes)

    def living(self) -> list[int]:
        """Return the nodes that still answer and have at least one rail that does not hang."""
        hanging = Counter(cell.node for cell in self.retired())
        nodes = range(len(self.fabric.hosts))
        return [node for node in nodes if node not in self.gone and hanging[node] < self.fabric.rails]

    def phase_of(self, cell: NodeRail) -> ScanPhase | None:
        """Return the last phase that judged a cell, or None."""
        if cell not in self.judged:
            return None
        if self.judged[cell] is self.screened.get(cell):
            return ScanPhase.SCREENING
        return ScanPhase.CONFIRMATION if cell in self.suspects else ScanPhase.SUSPECTS

    def confirmation_figures(self, cell: NodeRail) -> int:
        """Return the number of measurements of a suspect in the confirmation."""
        return self.judged[cell].figures if self.phase_of(cell) is ScanPhase.CONFIRMATION else 0

    def unjudged_leaves(self) -> Iterator[LeafLevel]:
        """Yield leaves that may be slow but cannot be judged.

        They have too few nodes, or there are too few leaves. Each entry is one rail of a leaf. At least two nodes, and
        a third of the leaf's nodes, are slow. Their loss is too small to separate slow nodes from healthy ones. Behind
        a small leaf, one slow node is enough if the median node is slow too.
        """
        leaves, judged = self.fabric.leaves, members_of(self.fabric)
        living = Counter(leaves[node] for node in self.living())
        slow: dict[tuple[str, int], list[float]] = {}
        for cell, score in self.confirmed.items():
            leaf = leaves[cell.node]
            if leaf is not None and (leaf not in judged or len(judged) < judging.LEAST_COMPARED):
                slow.setdefault((leaf, cell.rail), []).append(score.score)
        least = 1 - _SURE_LOSSES * judging.smallest_sure_loss(self.yardstick.deviation)
        for (leaf, rail), losses in slow.items():
            if len(losses) >= max(2, living[leaf] / 3) and median(losses) > least:
                yield LeafLevel(leaf, rail, median(losses), None, is_sure=False)
            elif leaf not in judged and living[leaf] > 1:
                yield from self._slow_middle(leaf, rail)

    def _slow_middle(self, leaf: str, rail: int) -> Iterator[LeafLevel]:
        """Yield the level of a small leaf if its median score is slow, on this rail or over all rails."""
        members = {cell: score for cell, score in self.judged.items() if self.fabric.leaves[cell.node] == leaf}
        for scores in ([score for cell, score in members.items() if cell.rail == rail], [*members.values()]):
            level, figures = median_high(score.score for score in scores), sum(score.figures for score in scores)
            error = MEDIAN_ERROR * self.yardstick.deviation / math.sqrt(figures)
            if 1 - level > DOUBTFUL_ERRORS * error:
                yield LeafLevel(leaf, rail, level, None, is_sure=False, error=error)
                return

    def failures(self) -> Mapping[NodeRail, list[PairSample]]:
        """Return the failures by every cell that may have caused them.

        Failures before the first round have no partner.
        """
        found = {
            cell: [PairSample(cell.node, cell.node, cell.rail, 0.0, seen, cell.node)]
            for cell, seen in self.before.failed.items()
        }
        for outcome in self.outcomes:
            for sample in (sample for sample in outcome.samples if sample.failure):
                for node in (sample.first, sample.second):
                    if sample.culprit in (None, node):
                        found.setdefault(NodeRail(node, sample.rail), []).append(sample)
        return found

    def retired(self) -> dict[NodeRail, list[PairSample]]:
        """Return the cells that caused failures and are no longer measured, with these failures."""
        failures = self.failures()
        return {cell: failures[cell] for cell in blamed(failures)}


def _name_culprit(sample: PairSample, retired: Collection[NodeRail]) -> PairSample:
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
    """Run three rounds of screening, three with suspects, and five of confirmation.

    With `quick`, run only the screening. If the scan stops early, judge the rounds that finished. Exclude nodes that
    had already failed `before` it began.
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
        """Run one round. Nodes that are lost in it are not measured again."""
        number = len(self._course.outcomes) + 1
        planned = PlannedRound(number, phase, tuple(pairs), frozenset(self._course.retired()))
        outcome = self._measurer.measure(planned)
        self._course.outcomes.append(outcome)
        self._course.gone = {node: (number, seen) for node, seen in outcome.gone.items()} | self._course.gone
        self._keep(planned, outcome)


_MOST_LOOKS_AT_LEAVES = 4
"""Limit on how often leaves are judged. Slow leaves lower the estimate of the normal bandwidth, so judge again
without them until the result is stable. Four passes are enough for leaves of three different speeds.
"""


def _screen(course: ScanCourse) -> None:
    fabric, samples = course.fabric, course.samples(ScanPhase.SCREENING)
    yardstick, levels, known = judging.screening_yardstick(fabric, samples), list[LeafLevel](), set[tuple[str, int]]()
    for _ in range(_MOST_LOOKS_AT_LEAVES):
        levels = leaf_levels(fabric, yardstick, samples)
        sure = {(level.leaf, level.rail): level for level in levels if level.is_sure}
        if sure.keys() == known:
            break
        known = set(sure)
        yardstick = adjust_to_slow_leaves(yardstick, sure.values())
        yardstick = judging.screening_yardstick(fabric, correct_slow_leaves(yardstick, fabric, samples))
    course.suspect_leaves = [level for level in levels if level.is_sure]
    course.doubtful_leaves = [level for level in levels if not level.is_sure]
    course.yardstick = adjust_to_slow_leaves(yardstick, course.suspect_leaves)
    course.screened = course.judged = judging.scores(fabric, course.yardstick, samples)
    course.suspects = set(judging.falls_behind(ScanPhase.SCREENING, yardstick.deviation, course.screened))


def _against_good(course: ScanCourse, schedule: Schedule, steps: _Steps, phase: ScanPhase) -> None:
    suspects = _suspect_nodes(course)
    good = frozenset(range(len(course.fabric.hosts))) - suspects
    first = 0 if phase is ScanPhase.SUSPECTS else ROUNDS[ScanPhase.SUSPECTS]
    try:
        for number in range(first + 1, first + ROUNDS[phase] + 1):
            living = set(course.living())
            judged, others = schedule.against_good(number, *_partners(course, suspects & living, good & living))
            steps.run(phase, (*judged, *others))
    finally:
        _judge(course, phase, good)


def _partners(course: ScanCourse, suspects: Set[int], good: Set[int]) -> tuple[list[int], list[int], list[int]]:
    slow = {leaf.leaf for leaf in course.suspect_leaves}
    best = {node for node in good if course.fabric.leaves[node] not in slow}
    partners = best if len(best) >= len(suspects) else good
    return sorted(suspects), sorted(partners), sorted(good - partners)


def _suspect_nodes(course: ScanCourse) -> frozenset[int]:
    """Return the nodes with a suspect cell, and a sample of nodes behind each slow leaf.

    It is a sample so that about half of all nodes remain as partners.
    """
    nodes = {cell.node for cell in course.suspects}
    slow = {leaf.leaf for leaf in course.suspect_leaves}
    for leaf in slow:
        members = [node for node, other in enumerate(course.fabric.leaves) if other == leaf]
        most = max(LEAST_NODES, len(course.fabric.hosts) // (4 * len(slow)))
        nodes.update(members[:: max(1, len(members) // most)])
    return frozenset(nodes)


def _judge(course: ScanCourse, phase: ScanPhase, good: frozenset[int]) -> None:
    """Judge the suspects by the measurements in this phase alone."""
    fabric, samples = course.fabric, course.samples(phase)
    yardstick = course.yardstick
    as_healthy = correct_slow_leaves(yardstick, fabric, samples)
    yardstick = judging.round_yardstick(fabric, as_healthy, good, yardstick)
    leaves = [level for level in course.suspect_leaves if _is_slow_again(fabric, yardstick, samples, good, level)]
    kept = {(leaf.leaf, leaf.rail) for leaf in leaves}
    course.doubtful_leaves += [leaf for leaf in course.suspect_leaves if (leaf.leaf, leaf.rail) not in kept]
    found = judging.scores(fabric, adjust_to_slow_leaves(yardstick, leaves), samples, good)
    behind = set(judging.falls_behind(phase, yardstick.deviation, found))
    if phase is ScanPhase.CONFIRMATION:
        behind -= _cells_like_leaf(fabric, yardstick.deviation, found, leaves)
    looked_at = {cell: score for cell, score in found.items() if cell in course.suspects}
    course.judged = {**course.judged, **looked_at}
    course.suspect_leaves = leaves
    if phase is ScanPhase.CONFIRMATION:
        course.confirmed = {cell: score for cell, score in looked_at.items() if cell in behind}
        course.slow_leaves = leaves
    else:
        course.suspects &= behind | (course.suspects - found.keys())


def _is_slow_again(
    fabric: ScanFabric, yardstick: judging.Yardstick, samples: Sequence[PairSample], good: Set[int], level: LeafLevel
) -> bool:
    """True if a leaf that was slow across is still slow when measured with good nodes behind other leaves."""
    plain = replace(yardstick, slow_leaves={})
    shares = [
        plain.share(fabric, sample)
        for sample in samples
        if sample.rail == level.rail
        and not sample.failure
        and (sample.first in good) != (sample.second in good)
        and (fabric.leaves[sample.first] == level.leaf) != (fabric.leaves[sample.second] == level.leaf)
    ]
    return False not in level.slow or len(shares) < LEAST_NODES or median(shares) <= (1 + level.share) / 2


def _cells_like_leaf(
    fabric: ScanFabric, deviation: float, found: Mapping[NodeRail, judging.CellScore], leaves: Sequence[LeafLevel]
) -> set[NodeRail]:
    least = 1 - judging.threshold(ScanPhase.CONFIRMATION, deviation)
    errors = {(leaf.leaf, leaf.rail): DOUBTFUL_ERRORS * leaf.error for leaf in leaves}
    return {
        cell
        for cell, score in found.items()
        if score.score >= least - errors.get((fabric.leaves[cell.node] or "", cell.rail), 0.0)
    }


_LEAST_NODES, _LEAST_SCORE = 4, 0.1
"""The fewest nodes for which a ring is split into halves, and the lowest score of a cell that does not stall a ring."""


class CollectiveOfNodes(Struct, frozen=True):
    """A ring of nodes, with measured and predicted bandwidth.

    The bandwidth is what each node sends and receives on all rails, in GB/s.
    """

    name: str
    nodes: tuple[int, ...]
    gb_s: float | None
    predicted_gb_s: float
    least_share: float
    failure: str = ""

    @property
    def share(self) -> float:
        """Measured bandwidth relative to the predicted bandwidth, or 0 if not measured."""
        return (self.gb_s or 0.0) / self.predicted_gb_s if self.predicted_gb_s else 0.0

    @property
    def falls_short(self) -> bool:
        """True if the ring is slower than its cells allow, or was not measured."""
        return self.gb_s is None or self.share < self.least_share


MeasureCollective = Callable[[Sequence[int]], tuple[float | None, str]]
"""Returns the bandwidth of a ring of nodes in GB/s, or None and the reason."""


def predicted_gb_s(course: ScanCourse, nodes: Sequence[int]) -> float:
    """Predict the bandwidth of a ring of these nodes over all rails, in GB/s.

    Every rail carries the same share of the data, and a ring is as slow as its slowest node. So the prediction is the
    smallest score of all cells times the sum of the rails' normal bandwidths.
    """
    rails = course.fabric.rails
    usual = [gb_s for rail in range(rails) for gb_s in [_usual(course, rail)] if gb_s]
    taking_part = set(nodes)
    confirmed = [score.score for cell, score in course.confirmed.items() if cell.node in taking_part]
    slow_leaves = [
        level.across
        for level in course.slow_leaves
        if level.across is not None and any(course.fabric.leaves[node] == level.leaf for node in nodes)
    ]
    return sum(usual) * min([1.0, *confirmed, *slow_leaves])


def collectives(course: ScanCourse, seed: int, measure: MeasureCollective) -> Iterator[CollectiveOfNodes]:
    """Measure a ring of all nodes. If it is too slow, measure rings of both halves and of two random halves.

    Nodes that hang, or have a rail with almost no bandwidth, are left out, because they would stall all other nodes.
    """
    left_out = {cell.node for cell in course.retired()}
    left_out |= {cell.node for cell, score in course.confirmed.items() if score.score < _LEAST_SCORE}
    nodes = [node for node in course.living() if node not in left_out]
    whole = _measured(course, "all", nodes, measure)
    yield whole
    if not whole.falls_short or len(nodes) < _LEAST_NODES:
        return
    half = len(nodes) // 2
    mixed = list(nodes)
    random.Random(f"{seed}/halves").shuffle(mixed)
    for name, members in (
        ("first half", nodes[:half]),
        ("second half", nodes[half:]),
        ("mixed half", sorted(mixed[:half])),
        ("other mixed half", sorted(mixed[half:])),
    ):
        yield _measured(course, name, members, measure)


def _measured(course: ScanCourse, name: str, nodes: Sequence[int], measure: MeasureCollective) -> CollectiveOfNodes:
    gb_s, failure = measure(nodes)
    least = 1 - max(judging.ALARM_DEVIATIONS * course.yardstick.deviation, judging.LEAST_ALARM_LOSS)
    return CollectiveOfNodes(name, tuple(nodes), gb_s, predicted_gb_s(course, nodes), least, failure)


def _usual(course: ScanCourse, rail: int) -> float | None:
    centres = course.yardstick.centres
    return centres.get((rail, False), centres.get((rail, True)))
