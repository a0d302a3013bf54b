"""Which part is bad, from the cells, leaves and GPUs that are slow: NIC or cable, node, rail of a leaf, uplink, GPU."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gpubench.measure.scan.judging import smallest_sure_loss
from gpubench.measure.scan.leaves import LeafLevel
from gpubench.measure.scan.levels import DEVIATIONS, LEAST_GAIN, faster_cells, usual_by_rail
from gpubench.measure.scan.local_parts import local_parts
from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.results.rows.scan import PartKind as PartKind
from gpubench.model.results.scan_rounds import LocalFigure, NodeRail, PairSample, ScanFabric, ScanPhase
from gpubench.model.terms.statistics.noise import robust_deviation
from gpubench.model.terms.units import counted

LEAST_NODES_OF_A_RAIL = 8
"""Of fewer, one bad node is a large part of what is usual of its rail, which then has to be slow by more."""

_OF_NICS = (PartKind.NIC, PartKind.NODE)

LEAF_SHARE = 0.9
"""A leaf whose inside, on a slow rail, is below this share of the best leaf's is what slows it."""

RAIL_SHARE = 0.95
"""A rail whose usual figure is below this share of the other rails' is slow on every node."""


@dataclass(frozen=True, slots=True)
class FaultyPart:
    """A part that is bad. `share` is what it delivers of what is usual, None where it delivers nothing.

    `nodes` are all that it slows; `rail`, `leaf` and `gpu` are None where it is not of one, and `partner` is the other
    GPU of a pair. `seen` says what was seen beyond the share.
    """

    kind: PartKind
    nodes: tuple[int, ...]
    share: float | None = None
    rail: int | None = None
    leaf: str | None = None
    gpu: int | None = None
    partner: int | None = None
    seen: str = ""
    cells: frozenset[NodeRail] = frozenset()


@dataclass
class _Cells:
    """What is not explained yet."""

    fabric: ScanFabric
    scores: dict[NodeRail, float]
    local: dict[LocalFigure, float]
    parts: list[FaultyPart] = field(default_factory=list)

    def explain(self, part: FaultyPart) -> None:
        self.parts.append(part)
        for cell in part.cells:
            self.scores.pop(cell, None)


def decode(course: ScanCourse, local: Mapping[LocalFigure, float]) -> list[FaultyPart]:
    """The parts that are bad, the gravest first; each confirmed cell, leaf and GPU belongs to one of them."""
    left = _Cells(course.fabric, {cell: each.score for cell, each in course.confirmed.items()}, dict(local))
    _gone(course, left)
    _hanging(course, left)
    faster = {(course.fabric.leaves[cell.node], cell.rail) for cell in faster_cells(course)}
    slow = [each for each in course.slow_leaves if (each.leaf, each.rail) not in faster]
    left.parts += leaf_parts(course.fabric, slow)
    _cells_of_leaves(course, left)
    _whole_nodes(course, left)
    _inside(left)
    _nics(left)
    _one_of_two_leaves(course, left)
    _rails(course, left)
    return left.parts


def _gone(course: ScanCourse, left: _Cells) -> None:
    for node, (number, seen) in sorted(course.gone.items()):
        cells = _cells([node], range(left.fabric.rails))
        when = f"in round {number}" if number else "in phase 0"
        left.explain(FaultyPart(PartKind.NODE_GONE, (node,), seen=f"{seen} {when}", cells=cells))
        left.local = {figure: share for figure, share in left.local.items() if figure.node != node}


def _hanging(course: ScanCourse, left: _Cells) -> None:
    """Cells that failed with several partners; all rails of a node are the node."""
    by_node: dict[int, dict[int, list[PairSample]]] = {}
    for cell, own in course.retired().items():
        if cell.node not in course.gone:
            by_node.setdefault(cell.node, {})[cell.rail] = own
    for node, rails in sorted(by_node.items()):
        whole = len(rails) == left.fabric.rails
        for rail, own in [(None, next(iter(rails.values())))] if whole else list(rails.items()):
            kind = PartKind.NODE_HANGS if rail is None else PartKind.RAIL_HANGS
            cells = _cells([node], range(left.fabric.rails) if rail is None else [rail])
            left.explain(FaultyPart(kind, (node,), rail=rail, seen=_failed(left.fabric, node, own), cells=cells))


def _failed(fabric: ScanFabric, node: int, own: Sequence[PairSample]) -> str:
    seen = next((each.failure for each in own if each.culprit == node), own[0].failure)
    partners = list(dict.fromkeys(fabric.hosts[each.partner(node)] for each in own if each.partner(node) != node))
    return f"{seen}, with {' and '.join(partners[:3])}" if partners else seen


def leaf_parts(fabric: ScanFabric, levels: Iterable[LeafLevel]) -> Iterator[FaultyPart]:
    """Leaves that are slow as a whole; all rails of one alike are the leaf, and what only leaves it is the uplink."""
    by_leaf: dict[tuple[str, bool], list[LeafLevel]] = {}
    for level in levels:
        by_leaf.setdefault((level.leaf, level.is_uplink), []).append(level)
    for (leaf, is_uplink), own in sorted(by_leaf.items()):
        whole = len(own) == fabric.rails and fabric.rails > 1
        for group in [own] if whole else [[each] for each in own]:
            share = median(each.across if each.across is not None else each.inside or 0.0 for each in group)
            kind = PartKind.UPLINK if is_uplink else PartKind.LEAF if whole else PartKind.LEAF_RAIL
            yield FaultyPart(kind, _members(fabric, leaf), share, None if whole else group[0].rail, leaf)


def _cells_of_leaves(course: ScanCourse, left: _Cells) -> None:
    """Slow cells that are all that a leaf of few nodes has on a rail."""
    for leaf in dict.fromkeys(filter(None, left.fabric.leaves)):
        nodes = [node for node in _members(left.fabric, leaf) if node not in course.gone]
        if len(nodes) < 2 or len(nodes) == len(course.living()):
            continue
        slow = {rail for rail in range(left.fabric.rails) if all(NodeRail(node, rail) in left.scores for node in nodes)}
        whole = len(slow) == left.fabric.rails and left.fabric.rails > 1
        for rails in [sorted(slow)] if whole else [[rail] for rail in sorted(slow)]:
            cells = _cells(nodes, rails)
            share = median(left.scores[cell] for cell in cells)
            kind = PartKind.LEAF if whole else PartKind.LEAF_RAIL
            left.explain(FaultyPart(kind, tuple(nodes), share, None if whole else rails[0], leaf, cells=cells))


def _whole_nodes(course: ScanCourse, left: _Cells) -> None:
    """Most rails of a node that are slow are the node, where all its rails together are as slow."""
    by_node: dict[int, list[NodeRail]] = {}
    for cell in left.scores:
        by_node.setdefault(cell.node, []).append(cell)
    for node, own in sorted(by_node.items()):
        everything = [NodeRail(node, rail) for rail in range(left.fabric.rails)]
        known = [left.scores.get(cell, course.judged[cell].score) for cell in everything if cell in course.judged]
        slow = median(left.scores[cell] for cell in own)
        if len(own) * 2 > len(everything) and (len(everything) == 1 or median(known) < (1 + slow) / 2):
            left.explain(FaultyPart(PartKind.NODE, (node,), slow, cells=frozenset(everything)))


def _inside(left: _Cells) -> None:
    """What phase 0 saw: GPUs, each with its rail where that is slow as well, ways between two, whole nodes."""
    for part in local_parts(left.local, left.fabric.rails):
        own = [cell for cell in left.scores if cell.node == part.node and part.gpu in (None, cell.rail)]
        cells = frozenset(() if part.partner is not None else own)
        kind = PartKind.NODE if part.gpu is None else PartKind.GPU if part.partner is None else PartKind.GPU_PAIR
        figure, share = min(part.figures.items(), key=lambda each: each[1])
        ends = "" if figure.partner is None else f" between GPU{figure.gpu} and GPU{figure.partner}"
        more = len(part.figures) - 1
        seen = f"{figure.quantity.value}{ends}: {figure.failure or f'{figure.gb_s:.4g} GB/s'}"
        seen += f", and {counted(more, 'more figure')}" if more else ""
        left.explain(
            FaultyPart(
                kind,
                (part.node,),
                None if figure.failure else share,
                rail=next((cell.rail for cell in cells), None) if part.gpu is not None else None,
                gpu=part.gpu,
                partner=part.partner,
                seen=seen,
                cells=cells,
            )
        )


def _nics(left: _Cells) -> None:
    """Every cell that is left, rails with one NIC together."""
    by_nic: dict[tuple[int, str | int], list[NodeRail]] = {}
    for cell in sorted(left.scores):
        by_nic.setdefault((cell.node, left.fabric.nic(cell.rail) or cell.rail), []).append(cell)
    for (node, _), cells in by_nic.items():
        share = median(left.scores[cell] for cell in cells)
        left.explain(FaultyPart(PartKind.NIC, (node,), share, cells[0].rail, cells=frozenset(cells)))


def _rails(course: ScanCourse, left: _Cells) -> None:
    """Rails that are slow on every node, which no comparison between nodes shows."""
    usual, faster = usual_by_rail(course), {cell.rail for cell in faster_cells(course)}
    few = len(course.living()) < LEAST_NODES_OF_A_RAIL
    least = 1 - smallest_sure_loss(course.yardstick.deviation) if few else RAIL_SHARE
    named = Counter(cell.rail for part in left.parts for cell in part.cells if part.kind in _OF_NICS)
    if not course.has_confirmed:
        named = Counter(cell.rail for cell in course.suspects if course.screened[cell].score < least)
    most_named = len(course.living()) // LEAST_NODES_OF_A_RAIL
    for rail, gb_s in usual.items():
        others = [each for other, each in usual.items() if other != rail]
        if len(others) < 2 or gb_s >= least * median(others):
            continue
        if part := _slow_leaf_inside(course, rail):
            if not any(each.leaf == part.leaf and each.rail in (None, rail) for each in left.parts):
                left.explain(part)
        elif rail not in faster and named[rail] <= most_named:
            nodes = tuple(course.living())
            seen = f"{gb_s:.4g} GB/s on every node, {median(others):.4g} on the other rails"
            left.explain(FaultyPart(PartKind.RAIL, nodes, gb_s / median(others), rail, seen=seen))


def _one_of_two_leaves(course: ScanCourse, left: _Cells) -> None:
    """The leaf that is slow inside on all rails, where there are two: half of all is no odd one out."""
    leaves = set(filter(None, course.fabric.leaves))
    if len(leaves) != 2 or any(part.leaf in leaves for part in left.parts):
        return
    found = [_slow_leaf_inside(course, rail) for rail in range(course.fabric.rails)]
    slow = [part for part in found if part is not None]
    if len(slow) == len(found) and len({part.leaf for part in slow}) == 1:
        kind = PartKind.LEAF if len(slow) > 1 else PartKind.LEAF_RAIL
        rail = None if len(slow) > 1 else slow[0].rail
        left.explain(FaultyPart(kind, slow[0].nodes, median(part.share or 0.0 for part in slow), rail, slow[0].leaf))


def _slow_leaf_inside(course: ScanCourse, rail: int) -> FaultyPart | None:
    """The leaf whose inside is slow as a whole on a rail, as of two leaves, where one is half of all."""
    inside: dict[str, list[float]] = {}
    for sample in course.samples(ScanPhase.SCREENING):
        leaf = course.fabric.leaves[sample.first]
        is_inside = leaf is not None and course.fabric.leaves[sample.second] == leaf
        if leaf is not None and is_inside and sample.rail == rail and not sample.failure:
            inside.setdefault(leaf, []).append(sample.gb_s)
    levels = {leaf: median(values) for leaf, values in inside.items() if len(values) >= LEAST_NODES_OF_A_RAIL // 2}
    if len(levels) < 2:
        return None
    leaf, best = min(levels, key=lambda each: levels[each]), max(levels.values())
    noise = robust_deviation(inside[leaf])
    is_whole = noise is not None and max(inside[leaf]) - levels[leaf] <= max(
        DEVIATIONS * noise.deviation, LEAST_GAIN * levels[leaf]
    )
    is_sure = noise is not None and best - levels[leaf] > DEVIATIONS * noise.deviation / math.sqrt(len(inside[leaf]))
    if levels[leaf] >= LEAF_SHARE * best or not is_whole or not is_sure:
        return None
    return FaultyPart(PartKind.LEAF_RAIL, _members(course.fabric, leaf), levels[leaf] / best, rail, leaf)


def _members(fabric: ScanFabric, leaf: str) -> tuple[int, ...]:
    return tuple(node for node, own in enumerate(fabric.leaves) if own == leaf)


def _cells(nodes: Iterable[int], rails: Iterable[int]) -> frozenset[NodeRail]:
    wanted = list(rails)
    return frozenset(NodeRail(node, rail) for node in nodes for rail in wanted)
