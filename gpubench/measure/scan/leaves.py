"""Judge leaf switches and their uplinks as a whole, before the nodes behind them.

A pair is as slow as its slower end. So the level of a leaf, its typical bandwidth, is the median of the measurements
inside it. Between leaves, it is the median of the measurements with leaves that are not slower. The level of most
leaves is normal.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median, median_high

from msgspec import Struct
from msgspec.structs import replace

from gpubench.measure.scan.judging import ALARM_DEVIATIONS, LEAST_COMPARED, LEAST_LOSS, Shares, Yardstick, shares_of
from gpubench.model.results.scan import NodeRail, PairSample, ScanFabric, ScanPhase

LEAST_NODES = 4
"""The fewest nodes behind a leaf that is judged as a whole. With fewer nodes, one bad node determines the median."""

DOUBTFUL_ERRORS = 2.0
"""A leaf may be slow if its level is this many standard errors below normal (by chance one in 44). Its slow nodes
are then reported as uncertain. From `ALARM_DEVIATIONS` on, the leaf is slow.
"""

MOST_HEALTHY_SHARE = 0.25
"""If more than this share of a leaf's nodes are healthy, its nodes are slow instead. By chance, one in five looks
healthy.
"""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""The standard error of a median relative to the standard error of a mean, for normally distributed values."""


class LeafLevel(Struct, frozen=True):
    """The bandwidth of one rail behind a leaf, inside the leaf and across to other leaves.

    Both are shares of the normal bandwidth, or None if unknown. `is_sure` is false if noise may explain a low level.
    `healthy` is the share of all nodes that are behind leaves with a normal level. `error` is the standard error.
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
        """The lower of the two shares, but at most 1."""
        return min(share for share in (self.inside, self.across, 1.0) if share is not None)

    @property
    def slow(self) -> Mapping[bool, float]:
        """The slow shares: those nearer to the lower share than to normal.

        The key is true for traffic inside the leaf.
        """
        known = {True: self.inside, False: self.across}
        return {
            inside: share
            for inside, share in known.items()
            if share is not None and share <= (1 + self.share) / 2 and share < 1
        }

    @property
    def is_uplink(self) -> bool:
        """True if only traffic that leaves the leaf is slow."""
        return True not in self.slow and self.across is not None


class _Level(Struct, frozen=True):
    """The level of a leaf as a share of the normal bandwidth, with its standard error.

    `healthy` is the share of all nodes that are behind healthy leaves. `delivered` can be compared between traffic
    inside a leaf and across.
    """

    share: float
    error: float
    delivered: float = 0.0
    healthy: float = 1.0

    def is_slow(self, errors: float) -> bool:
        return 1 - self.share > max(errors * self.error, LEAST_LOSS[ScanPhase.SCREENING])


Partners = Mapping[str, Sequence[float]]
"""A leaf's measurements as shares of the normal bandwidth, by the leaf at the other end."""


def members_of(fabric: ScanFabric) -> dict[str, list[int]]:
    """Return the nodes behind every leaf that has enough nodes to be judged as a whole."""
    members: dict[str, list[int]] = {}
    for node, leaf in enumerate(fabric.leaves):
        if leaf is not None:
            members.setdefault(leaf, []).append(node)
    return {leaf: nodes for leaf, nodes in members.items() if len(nodes) >= LEAST_NODES}


def leaf_levels(fabric: ScanFabric, yardstick: Yardstick, samples: Sequence[PairSample]) -> list[LeafLevel]:
    """Return the leaves that are slow, or may be slow, in the screening. Each entry is one rail of a leaf."""
    members = members_of(fabric)
    if len(members) < LEAST_COMPARED - 1:
        return []
    plain = replace(yardstick, slow_leaves={})
    measured = [sample for sample in samples if not sample.failure]
    sides = (True, False) if len(members) >= LEAST_COMPARED else (True,)
    levels = {
        (rail, inside): _levels(by_leaf, members, yardstick.deviation)
        for inside in sides
        for rail, by_leaf in _figures(fabric, plain, measured, members, inside=inside).items()
    }
    of_side = {
        inside: shares_of(fabric, plain, [sample for sample in measured if fabric.inside(*sample[:2]) == inside])
        for inside in (True, False)
    }
    found: list[LeafLevel] = []
    for leaf, nodes in members.items():
        node_figures = {
            rail: {
                inside: level
                for inside in (True, False)
                if (level := levels.get((rail, inside), {}).get(leaf)) is not None
            }
            for rail in (None, *range(fabric.rails))
        }
        for group in _slow_groups(leaf, node_figures):
            if _is_whole(group, nodes, of_side, yardstick):
                found += group
    return found


def _is_whole(
    levels: Sequence[LeafLevel], nodes: Sequence[int], of_side: Mapping[bool, Shares], yardstick: Yardstick
) -> bool:
    """True unless more than a quarter of the nodes behind a slow leaf are healthy.

    A node counts as healthy if its score is above the middle between the leaf's level and normal.
    """
    sides = [inside for inside in (True, False) if inside in levels[0].slow]
    by_node = [
        [share for side in sides for level in levels for share in of_side[side].get(NodeRail(node, level.rail), ())]
        for node in nodes
    ]
    share = median(level.share for level in levels)
    middle = median(value for shares in by_node for value in shares) * (1 + share) / (2 * share)
    scores = [yardstick.score(shares) for shares in by_node if shares]
    return sum(score > middle for score in scores) <= MOST_HEALTHY_SHARE * len(scores)


def _figures(
    fabric: ScanFabric, yardstick: Yardstick, samples: Iterable[PairSample], members: Iterable[str], *, inside: bool
) -> Mapping[int | None, Mapping[str, Partners]]:
    """Return measurements as shares of the rail's bandwidth, by rail, leaf, and leaf at the other end.

    The key None contains the measurements on all rails.
    """
    found: dict[int | None, dict[str, dict[str, list[float]]]] = {}
    for sample in samples:
        first, second = fabric.leaves[sample.first], fabric.leaves[sample.second]
        if first is None or second is None or (first == second) != inside:
            continue
        usual = max(yardstick.centres.get((sample.rail, side), 0.0) for side in (True, False))
        share = sample.gb_s / usual if usual > 0 else 0.0
        for leaf, other in {(first, second), (second, first)}:
            for rail in (sample.rail, None) if leaf in members else ():
                found.setdefault(rail, {}).setdefault(leaf, {}).setdefault(other, []).append(share)
    return found


def _levels(
    figures: Mapping[str, Partners], members: Mapping[str, Sequence[int]], deviation: float
) -> Mapping[str, _Level]:
    """Return the level of every leaf with enough measurements, relative to the level of most leaves."""
    values = {leaf: sorted(chain.from_iterable(partners.values())) for leaf, partners in figures.items()}
    values = {leaf: shares for leaf, shares in values.items() if len(shares) >= 2}
    level = {leaf: shares[int(0.8 * (len(shares) - 1))] for leaf, shares in values.items()}
    for _ in range(2):
        before = dict(level)
        for leaf in values:
            least = before[leaf] * (1 - deviation)
            comparable = [
                share
                for other, shares in figures[leaf].items()
                if other == leaf or before.get(other, 0.0) >= least
                for share in shares
            ]
            if comparable:
                values[leaf], level[leaf] = comparable, median(comparable)
    if len(level) < LEAST_COMPARED - 1 or not max(level.values()) > 0:
        return {}
    errors = {leaf: MEDIAN_ERROR * deviation / math.sqrt(len(shares)) for leaf, shares in values.items()}
    of_usual = MEDIAN_ERROR * median(errors.values()) / math.sqrt(len(errors))
    usual, fastest = median_high(level.values()), sorted(level.values())[-math.ceil(len(level) / 4)]
    if _Level(usual / fastest, median(errors.values())).is_slow(ALARM_DEVIATIONS):
        # Most leaves are slower than the fastest quarter, so the majority does not show the normal level
        usual = fastest
    found = {leaf: _Level(share / usual, math.hypot(errors[leaf], of_usual), share) for leaf, share in level.items()}
    slow = sum(len(members[leaf]) for leaf, leaf_level in found.items() if leaf_level.is_slow(ALARM_DEVIATIONS))
    healthy = 1 - slow / sum(len(members[leaf]) for leaf in found)
    return {leaf: replace(leaf_level, healthy=healthy) for leaf, leaf_level in found.items()}


def _slow_groups(leaf: str, levels: Mapping[int | None, Mapping[bool, _Level]]) -> list[list[LeafLevel]]:
    """Return the slow rails of a leaf.

    They form one group if the leaf is slow as a whole, or else one group per rail.
    """
    rails = {rail: sides for rail, sides in levels.items() if rail is not None}
    whole = _slow_level(leaf, 0, levels[None])
    if whole is not None:
        slow, middle = (not whole.is_uplink, (1 + whole.share) / 2)
        healthy = sum(slow not in sides or sides[slow].share > middle for sides in rails.values())
        if healthy <= MOST_HEALTHY_SHARE * len(rails):
            return [[replace(whole, rail=rail) for rail in rails]]
    return [[level] for rail, sides in rails.items() if (level := _slow_level(leaf, rail, sides)) is not None]


def _slow_level(leaf: str, rail: int, levels: Mapping[bool, _Level]) -> LeafLevel | None:
    """Return the level of a leaf that is or may be slow.

    Return None if it is healthy, or if its nodes are slow instead. A slow leaf switch also slows down traffic that
    leaves the leaf. If that traffic is faster, the nodes are slow.
    """
    for errors in (ALARM_DEVIATIONS, DOUBTFUL_ERRORS):
        for level in levels.values():
            middle = level.delivered * (1 + 1 / level.share) / 2 if level.share else 0.0
            if level.is_slow(errors) and levels.get(False, level).delivered <= middle:
                shares = [levels[side].share if side in levels else None for side in (True, False)]
                is_sure = errors == ALARM_DEVIATIONS
                return LeafLevel(leaf, rail, shares[0], shares[1], is_sure, level.healthy, level.error)
    return None


def adjust_to_slow_leaves(yardstick: Yardstick, levels: Iterable[LeafLevel]) -> Yardstick:
    """Return a yardstick with which cells behind a slow leaf are compared with each other."""
    offsets = {(level.leaf, level.rail, inside): share for level in levels for inside, share in level.slow.items()}
    return replace(yardstick, slow_leaves=offsets)


def correct_slow_leaves(yardstick: Yardstick, fabric: ScanFabric, samples: Iterable[PairSample]) -> list[PairSample]:
    """Return the measurements as they would be if the slow leaves in the yardstick were healthy."""
    if not yardstick.slow_leaves:
        return list(samples)
    plain = replace(yardstick, slow_leaves={})
    found = []
    for sample in samples:
        share = yardstick.share(fabric, sample)
        found.append(sample._replace(gb_s=sample.gb_s * share / plain.share(fabric, sample)) if share else sample)
    return found
