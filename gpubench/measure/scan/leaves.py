"""Leaves and their uplinks: which are slow as a whole, decided before any node behind them is judged.

A pair of nodes is as slow as its slower end. Inside a leaf both ends have the leaf's own level; the level across is
taken from figures with leaves that are not slower. What is usual is the level of most leaves; where a smaller part of
them is faster, those that are slower have no majority and no minority either.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from statistics import NormalDist, median, median_high

from gpubench.measure.scan.judging import Shares, Yardstick, screening_yardstick, shares_of
from gpubench.model.results.scan import NodeRail, PairSample, ScanFabric
from gpubench.records import dataclass

LEAST_NODES, LEAST_LEAVES = 4, 3
"""Nodes that a leaf needs to be judged as a whole, and leaves that it takes to tell whose uplink is slow."""

STANDARD_ERRORS, ERRORS_AGAIN, DOUBTFUL_ERRORS = 5.0, 3.0, 2.0
"""By so many standard errors of its level a leaf has to be slow in the screening (by chance one in three million is),
again in the rounds that follow, and to be held responsible instead of its nodes without being named."""

LEAST_LEAF_LOSS = 0.015
"""And by this much: one of 32 uplinks is 3 %."""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean, of normal values."""

_FIRST_QUANTILE = 0.8
"""Where the search for a leaf's level across starts: a fifth of its figures are with leaves as fast as it is."""

_LEAST_FIGURES = 2
"""Figures that tell whether a slow leaf is slow inside too. That it is slow takes as many as it takes nodes."""

_LEAST_GAIN, _LEAST_SHARE_OF_NODES = 0.03, 0.2
"""By how much, and how many nodes at least, are behind leaves that make the others slow by being faster."""

_MOST_RAILS_LEFT = 0.25
"""Of a leaf that is slow as a whole so many rails may not be seen to be: noise hides them."""

_MOST_HEALTHY = 0.15
"""Largest share of nodes as fast as usual behind a slow leaf; with more, its nodes are slow and not the leaf."""

_LEAST_CHANCE = 0.001
"""What is less probable is not taken for chance."""

ERROR_OF_A_SCORE = 1.08
"""The standard error of a score times the root of the number of its figures; by simulation."""


@dataclass(frozen=True, slots=True)
class LeafLevel:
    """What a rail of a leaf delivers, inside and across, as shares of what is usual; None where it is not known.

    `is_sure` is False where noise may explain it; `healthy` is the share of nodes behind leaves that are as usual;
    `error` the standard error of the level.
    """

    leaf: str
    rail: int
    inside: float | None
    across: float | None
    is_sure: bool = True
    healthy: float = 1.0
    error: float = 0.0

    @property
    def share(self) -> float:
        """What is left of the usual bandwidth, inside or across, wherever it is less."""
        return min(each for each in (self.inside, self.across, 1.0) if each is not None)

    @property
    def slow(self) -> Mapping[bool, float]:
        """The shares that are nearer to the lower one than to what is usual, by whether they are inside the leaf."""
        known = {True: self.inside, False: self.across}
        return {
            inside: share
            for inside, share in known.items()
            if share is not None and share <= (1 + self.share) / 2 and share < 1
        }

    @property
    def is_uplink(self) -> bool:
        """True where only what leaves the leaf is slow."""
        return True not in self.slow and self.across is not None


@dataclass(frozen=True, slots=True)
class _Level:
    """A share of what is usual and its standard error; `healthy` as of a `LeafLevel`."""

    share: float
    error: float
    healthy: float = 1.0

    def is_below(self, most: float, errors: float) -> bool:
        return most - self.share > max(errors * self.error, LEAST_LEAF_LOSS * most)


Partners = Mapping[str, Sequence[float]]
"""Shares of a leaf's figures by the leaf at the other end."""

Levels = Mapping[tuple[int | None, bool], Mapping[str, _Level]]
"""By rail, None of all together, whether inside leaves, and leaf."""


def leaf_levels(fabric: ScanFabric, yardstick: Yardstick, samples: Sequence[PairSample]) -> list[LeafLevel]:
    """The leaves that are slow or may be, on all rails or some, by the screening."""
    members = members_of(fabric)
    if len(members) < LEAST_LEAVES - 1:
        return []
    plain = replace(yardstick, slow_leaves={})
    measured = [each for each in samples if not each.failure]
    levels: dict[tuple[int | None, bool], Mapping[str, _Level]] = {}
    for inside in (True, False) if len(members) >= LEAST_LEAVES else (True,):
        by_rail = _figures(fabric, plain, measured, members, inside=inside)
        for rail, by_leaf in by_rail.items():
            levels[rail, inside] = _beside_each_other(by_leaf, members, yardstick.deviation)
    of_class = {
        inside: shares_of(fabric, plain, [each for each in measured if fabric.inside(*each[:2]) == inside])
        for inside in (True, False)
    }
    found: list[LeafLevel] = []
    for leaf, nodes in members.items():
        own = list(_of_leaf(leaf, fabric.rails, levels))
        together = len(own) == fabric.rails and all(each.is_sure for each in own)
        for group in [own] if together else [[each] for each in own]:
            slow, is_sure = group[0].slow, group[0].is_sure
            if True in slow and _carries_more_across(group, nodes, of_class, plain):
                if False not in slow:
                    continue
                is_sure = False
            healthy = _healthy_nodes(group, nodes, of_class[False not in slow], plain)
            if not is_sure or healthy.may_be_whole:
                found += (replace(each, is_sure=is_sure and healthy.is_whole) for each in group)
    return found


def members_of(fabric: ScanFabric) -> dict[str, list[int]]:
    """The nodes of every leaf that has enough of them to be judged as a whole."""
    members: dict[str, list[int]] = {}
    for node, leaf in enumerate(fabric.leaves):
        if leaf is not None:
            members.setdefault(leaf, []).append(node)
    return {leaf: nodes for leaf, nodes in members.items() if len(nodes) >= LEAST_NODES}


def _figures(
    fabric: ScanFabric, yardstick: Yardstick, samples: Iterable[PairSample], members: Collection[str], *, inside: bool
) -> Mapping[int | None, Mapping[str, Partners]]:
    """Shares by rail, leaf and leaf at the other end; with rail None those of all rails, where there are several."""
    found: dict[int | None, dict[str, dict[str, list[float]]]] = {}
    rails: tuple[int | None, ...]
    for sample in samples:
        first, second = fabric.leaves[sample.first], fabric.leaves[sample.second]
        if first is None or second is None or (first == second) != inside:
            continue
        share = yardstick.share(fabric, sample)
        rails = (sample.rail, None) if fabric.rails > 1 else (sample.rail,)
        for rail in rails:
            for leaf, other in {(first, second), (second, first)}:
                if leaf in members:
                    found.setdefault(rail, {}).setdefault(leaf, {}).setdefault(other, []).append(share)
    return found


def _beside_each_other(
    figures: Mapping[str, Partners], members: Mapping[str, Sequence[int]], deviation: float
) -> Mapping[str, _Level]:
    """The level of every leaf with enough figures, as a share of the usual one."""
    own = _own_levels(figures, deviation)
    if len(own) < LEAST_LEAVES - 1:
        return {}
    nodes = {leaf: len(members[leaf]) for leaf in own}
    usual = median_high(level.share for level in own.values())
    faster = {
        leaf: level.share
        for leaf, level in own.items()
        if level.share > usual * (1 + max(STANDARD_ERRORS * level.error, _LEAST_GAIN))
    }
    if sum(nodes[leaf] for leaf in faster) >= _LEAST_SHARE_OF_NODES * sum(nodes.values()):
        usual = median_high(faster.values())
    if not usual > 0:
        return {}
    error_of_usual = MEDIAN_ERROR * median(level.error for level in own.values()) / math.sqrt(len(own))
    found = {leaf: _Level(level.share / usual, math.hypot(level.error, error_of_usual)) for leaf, level in own.items()}
    slow = [leaf for leaf, level in found.items() if level.is_below(1.0, STANDARD_ERRORS)]
    healthy = 1 - sum(nodes[leaf] for leaf in slow) / sum(nodes.values())
    return {leaf: replace(level, healthy=healthy) for leaf, level in found.items()}


def _own_levels(figures: Mapping[str, Partners], deviation: float) -> Mapping[str, _Level]:
    """The medians of figures with partners that are not slower; inside a leaf its partner is the leaf itself."""
    values = {leaf: sorted(share for own in each.values() for share in own) for leaf, each in figures.items()}
    values = {leaf: own for leaf, own in values.items() if len(own) >= _LEAST_FIGURES}
    known = {leaf: len(own) >= LEAST_NODES for leaf, own in values.items()}
    levels = {leaf: own[int(_FIRST_QUANTILE * (len(own) - 1))] for leaf, own in values.items()}
    for _ in range(2):
        before = dict(levels)
        for leaf in values:
            least = before[leaf] * (1 - deviation)
            own = [
                share
                for other, shares in figures[leaf].items()
                if other == leaf or before.get(other, 0.0) >= least
                for share in shares
            ]
            if own:
                values[leaf], levels[leaf] = own, median(own)
    return {
        leaf: _Level(level, MEDIAN_ERROR * deviation / math.sqrt(len(values[leaf])) if known[leaf] else math.inf)
        for leaf, level in levels.items()
    }


def _of_leaf(leaf: str, rails: int, levels: Levels) -> Iterator[LeafLevel]:
    """The slow rails of a leaf: all of them where all together are slow and most are seen to be."""
    together = {
        inside: own_class[leaf] for inside in (True, False) if leaf in (own_class := levels.get((None, inside), {}))
    }
    by_rail = [
        {inside: own_class[leaf] for inside in (True, False) if leaf in (own_class := levels.get((rail, inside), {}))}
        for rail in range(rails)
    ]
    whole = _judged(together)
    is_whole = (
        whole is not None
        and sum(
            (own[inside].share if (inside := whole[0]) in own else 1.0) > (1 + together[inside].share) / 2
            for own in by_rail
        )
        <= _MOST_RAILS_LEFT * rails
    )
    for rail, own in enumerate(by_rail):
        judged = _judged(own)
        if whole is not None and is_whole and (judged is None or whole[1] or not judged[1]):
            used = {
                inside: level if (own_level := own.get(inside)) is None else _nearer(own_level, level)
                for inside, level in together.items()
            }
            yield _level_of(leaf, rail, used, whole)
        elif judged is not None:
            yield _level_of(leaf, rail, own, judged)


def _nearer(own: _Level, whole: _Level) -> _Level:
    """The level of one rail where it is surely below that of all rails, else theirs, which is known better."""
    return own if own.is_below(whole.share, STANDARD_ERRORS) else whole


def _judged(levels: Mapping[bool, _Level]) -> tuple[bool, bool] | None:
    """Whether inside or across is slow, and whether for sure; None where neither may be."""
    for errors in (STANDARD_ERRORS, DOUBTFUL_ERRORS):
        slow = [inside for inside in (True, False) if inside in levels and levels[inside].is_below(1.0, errors)]
        if slow:
            return slow[-1], errors == STANDARD_ERRORS
    return None


def _level_of(leaf: str, rail: int, levels: Mapping[bool, _Level], judged: tuple[bool, bool]) -> LeafLevel:
    shares = {inside: level.share for inside, level in levels.items()}
    slow_inside, is_sure = judged
    slow = levels[slow_inside]
    return LeafLevel(leaf, rail, shares.get(True), shares.get(False), is_sure, slow.healthy, slow.error)


def _carries_more_across(
    levels: Sequence[LeafLevel], nodes: Sequence[int], of_class: Mapping[bool, Shares], yardstick: Yardstick
) -> bool:
    """True where what leaves the leaf passes its switch faster than what stays inside: the switch is not slow."""
    gb_s: dict[bool, list[float]] = {}
    for inside, shares in of_class.items():
        gb_s[inside] = [
            share * yardstick.centres.get((each.rail, inside), 0.0)
            for each in levels
            for node in nodes
            for share in shares.get(NodeRail(node, each.rail), ())
        ]
    left = median(each.inside or 1.0 for each in levels)
    return all(gb_s.values()) and median(gb_s[False]) > median(gb_s[True]) * (1 + 1 / left) / 2


@dataclass(frozen=True, slots=True)
class _HealthyNodes:
    """Of some nodes behind a slow leaf those that seem as fast as usual; by chance each does with a `probability`."""

    seen: int
    nodes: int
    probability: float

    @property
    def is_whole(self) -> bool:
        deviation = math.sqrt(self.nodes * self.probability * (1 - self.probability))
        return self.seen <= self.nodes * (_MOST_HEALTHY + self.probability) + deviation

    @property
    def may_be_whole(self) -> bool:
        """True where chance may explain so many."""
        more = self.seen - int(_MOST_HEALTHY * self.nodes)
        left, right = self.probability, 1 - self.probability
        by_chance = sum(
            math.comb(self.nodes, count) * left**count * right ** (self.nodes - count)
            for count in range(max(0, more), self.nodes + 1)
        )
        return by_chance > _LEAST_CHANCE


def _healthy_nodes(
    levels: Sequence[LeafLevel], nodes: Sequence[int], shares: Shares, yardstick: Yardstick
) -> _HealthyNodes:
    share = median(each.share for each in levels)
    by_node = [[value for each in levels for value in shares.get(NodeRail(node, each.rail), ())] for node in nodes]
    by_node = [own for own in by_node if own]
    usual = median([value for own in by_node for value in own] or [0.0]) / share if share else 1.0
    errors = [ERROR_OF_A_SCORE * yardstick.deviation / math.sqrt(len(own)) for own in by_node]
    return _HealthyNodes(
        sum(yardstick.score(own) > usual * (1 + share) / 2 for own in by_node),
        len(nodes),
        sum(NormalDist().cdf((share - 1) / 2 / error) for error in errors if error) / len(nodes),
    )


def still_slow_leaves(
    fabric: ScanFabric,
    yardstick: Yardstick,
    samples: Iterable[PairSample],
    good: Set[int],
    suspects: Sequence[LeafLevel],
) -> list[LeafLevel]:
    """Those of some leaves that are slow across with good nodes again; of those slow inside only, nothing is asked."""
    plain = replace(yardstick, slow_leaves={})
    slow = {(each.leaf, each.rail) for each in suspects if False in each.slow}
    found: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        if not sample.failure and (sample.first in good) != (sample.second in good):
            node, partner = sample[:2] if sample.second in good else sample[1::-1]
            if (fabric.leaves[partner], sample.rail) not in slow:
                found.setdefault((fabric.leaves[node] or "", sample.rail), []).append(plain.share(fabric, sample))
    by_leaf: dict[str, list[LeafLevel]] = {}
    for each in suspects:
        by_leaf.setdefault(each.leaf, []).append(each)
    left: list[LeafLevel] = []
    for leaf, own in by_leaf.items():
        whole = len(own) == fabric.rails
        for group in [own] if whole else [[each] for each in own]:
            figures = [share for each in group for share in found.get((leaf, each.rail), ())]
            if False not in group[0].slow or len(figures) < LEAST_NODES:
                left += group
                continue
            level = _Level(median(figures), MEDIAN_ERROR * yardstick.deviation / math.sqrt(len(figures)))
            if level.is_below(1.0, ERRORS_AGAIN):
                left += (_again(each, level, found.get((leaf, each.rail), ()), yardstick) for each in group)
    return left


def _again(level: LeafLevel, whole: _Level, figures: Sequence[float], yardstick: Yardstick) -> LeafLevel:
    own = whole
    if len(figures) >= LEAST_NODES:
        own = _nearer(_Level(median(figures), MEDIAN_ERROR * yardstick.deviation / math.sqrt(len(figures))), whole)
    return replace(level, across=own.share, error=own.error)


def with_slow_leaves(yardstick: Yardstick, levels: Iterable[LeafLevel]) -> Yardstick:
    """The yardstick that holds cells of slow leaves against the others of their leaf."""
    offsets = {(each.leaf, each.rail, inside): share for each in levels for inside, share in each.slow.items()}
    return replace(yardstick, slow_leaves=offsets)


def without_slow_leaves(yardstick: Yardstick, fabric: ScanFabric, samples: Iterable[PairSample]) -> list[PairSample]:
    """The figures as they would be if the slow leaves of a yardstick were not."""
    if not yardstick.slow_leaves:
        return list(samples)
    plain = replace(yardstick, slow_leaves={})
    found = []
    for each in samples:
        share = yardstick.share(fabric, each)
        found.append(each._replace(gb_s=each.gb_s * share / plain.share(fabric, each)) if share else each)
    return found


_LEAST_OF_A_PLACE = 8
"""Figures between two leaves, or inside one, from which their median is known well enough to compare them with it."""

_LEAST_OF_ALL = 0.5
"""So many of all figures need such places: else cells have one or two of their three."""


def deviation_between_leaves(fabric: ScanFabric, samples: Iterable[PairSample]) -> float:
    """The deviation of a figure from others between the same leaves on the same rail: no slow leaf raises it.

    0 where too few figures are between the same leaves.
    """
    by_place: dict[tuple[str | None, str | None, int], list[PairSample]] = {}
    for each in (each for each in samples if not each.failure):
        one, other = sorted((fabric.leaves[each.first] or "", fabric.leaves[each.second] or ""))
        by_place.setdefault((one, other, each.rail), []).append(each)
    flat: list[PairSample] = []
    measured = 0
    for own in by_place.values():
        measured += len(own)
        usual = median(each.gb_s for each in own) if len(own) >= _LEAST_OF_A_PLACE else 0.0
        flat += (each._replace(gb_s=each.gb_s / usual) for each in own) if usual else ()
    if len(flat) <= _LEAST_OF_ALL * measured:
        return 0.0
    return screening_yardstick(replace(fabric, leaves=(None,) * len(fabric.leaves)), flat).deviation
