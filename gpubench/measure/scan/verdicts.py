"""Find out which NIC, node, leaf, uplink or GPU is faulty, and whether the normal bandwidth itself is healthy."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from statistics import NormalDist, median, median_low

from msgspec import Struct, field

from gpubench.measure.scan import judging
from gpubench.measure.scan.leaves import DOUBTFUL_ERRORS, MEDIAN_ERROR, LeafLevel, members_of
from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.facts.snapshot import NicFacts
from gpubench.model.paths.topology import PATH_CLASSES, Topology
from gpubench.model.results.scan import BOTH_WAYS, OF_ONE_NODE, LocalFigure, NodeRail, PairSample, ScanFabric, ScanPhase
from gpubench.model.results.scan import PartKind as PartKind
from gpubench.model.results.speed import ABOVE_LIMIT, MOST_PERCENT
from gpubench.model.terms.statistics import robust_deviation
from gpubench.model.terms.units import compress_names, format_bandwidth, plural, shorten
from gpubench.model.terms.verdict import Cure, Finding, Verdict

_ACTIVE = "active"


def nic_names(nodes: Sequence[Topology], rails: int) -> tuple[str | None, ...]:
    """Return the name of the RDMA NIC nearest to each rail's GPU.

    It is None if nodes differ, or if several are nearest.
    """
    found = ({_only_name(node, rail) for node in nodes} for rail in range(rails))
    return tuple(names.pop() if len(names) == 1 else None for names in found)


def rail_rates(nodes: Sequence[Topology], rails: int) -> tuple[float | None, ...]:
    """Return the rate of the RDMA NICs nearest to each rail's GPU on most nodes, in GB/s per direction.

    The rate is None if it is unknown on a node, or if NVLinks connect the rail's GPUs between nodes. Rails with the
    same nearest NIC share its rate, because all rails are measured at the same time. The rate is limited by the PCIe
    slots.
    """
    by_node = [_rates_of_node(node, rails) for node in nodes]
    found = ([rates[rail] for rates in by_node] if not _is_one_domain(nodes, rail) else [] for rail in range(rails))
    return tuple(None if None in rates or not rates else median_low(filter(None, rates)) for rates in found)


def _is_one_domain(nodes: Sequence[Topology], rail: int) -> bool:
    gpus = [node.gpus[rail] for node in nodes if rail < len(node.gpus)]
    domains = [gpu.fabric.domain for gpu in gpus if gpu.fabric is not None and gpu.fabric.domain is not None]
    return len(set(domains)) < len(domains)


def _rates_of_node(node: Topology, rails: int) -> list[float | None]:
    nearest = [[nic for nic in _nearest_nics(node, rail) if nic.state == _ACTIVE] for rail in range(rails)]
    sharing = Counter(nic.name for nics in nearest for nic in nics)
    rates: list[float | None] = []
    for rail, nics in enumerate(nearest):
        by_slot: dict[str, float] = {}
        slots = {_slot(nic): node.pcie_total(nic).gb_s for nic in nics}
        gpu_slot = node.pcie_total(node.gpus[rail]).gb_s if nics else None
        for nic in nics:
            gb_s = node.limit(node.gpus[rail], nic).gb_s or 0.0
            by_slot[_slot(nic)] = by_slot.get(_slot(nic), 0.0) + gb_s / sharing[nic.name]
        known = gpu_slot and all(slots.values()) and all(by_slot.values())
        carried = sum(min(gb_s, slots[slot] or 0.0) for slot, gb_s in by_slot.items())
        rates.append(min(carried, gpu_slot) if known and gpu_slot and carried else None)
    return rates


def _slot(nic: NicFacts) -> str:
    """Return the PCIe slot that all ports of a NIC share, which is the bus ID without the function."""
    return nic.bus_id.rpartition(".")[0] if nic.bus_id else nic.name


def _only_name(node: Topology, rail: int) -> str | None:
    names = [nic.name for nic in _nearest_nics(node, rail)]
    return names[0] if len(names) == 1 else None


def _nearest_nics(node: Topology, rail: int) -> list[NicFacts]:
    nics = [nic for nic in node.nics if nic.rdma]
    if rail >= len(node.gpus) or not nics:
        return []
    places = {nic.name: node.path(node.gpus[rail], nic) for nic in nics}
    nearest = next((class_ for class_ in PATH_CLASSES if class_ in places.values()), None)
    return [nic for nic in nics if places[nic.name] == nearest] if nearest is not None else []


_LEAST_SHARE_OF_CELLS = 0.02
"""The smallest share of faster cells that counts, so that two nodes of a faster model among hundreds are ignored."""

_MOST_SLOW_AMONG = 0.2
"""If more than this share of the pairs among faster nodes is slow, the nodes are not faster but close to each other."""

_LOWER_DEVIATIONS = NormalDist().inv_cdf(0.95) - NormalDist().inv_cdf(0.75)
"""The distance between the 5 % and 25 % quantiles of a normal distribution, in standard deviations."""

_MOST_NAMES = 4


def _least_gain(course: ScanCourse) -> float:
    """Return how far a cell must be above normal, as a share, so that noise cannot explain it."""
    return max(judging.ALARM_DEVIATIONS * course.yardstick.deviation, judging.LEAST_ALARM_LOSS)


def faster_cells(course: ScanCourse) -> Mapping[NodeRail, float]:
    """Return the cells that are clearly faster than normal in the screening, with their scores.

    If there are any, the other cells of their rail must be slow.
    """
    most = 1 + _least_gain(course)
    found = {cell: score.score for cell, score in course.screened.items() if score.score > most}
    cells, faster = (Counter(cell.rail for cell in scores) for scores in (course.screened, found))
    return {
        cell: score for cell, score in found.items() if faster[cell.rail] >= _LEAST_SHARE_OF_CELLS * cells[cell.rail]
    }


def faster_rails(course: ScanCourse) -> Mapping[int, float]:
    """Return the rails that are faster than the others on all nodes, relative to the median of the others."""
    centres = course.yardstick.centres
    found = {rail: [gb_s for (of, _), gb_s in centres.items() if of == rail] for rail in range(course.fabric.rails)}
    usual = {rail: median(values) for rail, values in found.items() if values}
    shares = {
        rail: gb_s / median(others)
        for rail, gb_s in usual.items()
        if len(others := [value for other, value in usual.items() if other != rail]) >= 2
    }
    return {rail: share for rail, share in shares.items() if share > 1 + _least_gain(course)}


def faster_nodes(course: ScanCourse) -> Mapping[int, float]:
    """Return nodes that are faster with each other, over all rails, than most pairs are, with their best shares.

    A pair is as slow as its slower node. If a third or more of the nodes are equally slow, most pairs are slow, and
    pairs of healthy nodes stand out. If many pairs among the faster nodes are slow, proximity explains the speed
    instead.
    """
    shares: dict[tuple[int, int], list[float]] = {}
    for sample in course.samples(ScanPhase.SCREENING):
        if not sample.failure:
            shares.setdefault((sample.first, sample.second), []).append(course.yardstick.share(course.fabric, sample))
    pairs = {pair: median(values) for pair, values in shares.items() if len(values) == course.fabric.rails}
    if len(pairs) < 2:
        return {}
    usual = _quantile(list(pairs.values()), 0.25)
    if not usual:
        return {}  # A quarter of the pairs has no bandwidth, so there is nothing to be faster than
    error = _error_of_pairs(course, shares, pairs)
    gain = max(judging.ALARM_DEVIATIONS * error, judging.LEAST_LOSS[ScanPhase.CONFIRMATION])
    fast = {pair: share for pair, share in pairs.items() if share > usual * (1 + gain)}
    nodes = {node: max(share for pair, share in fast.items() if node in pair) for node in {*sum(fast, ())}}
    among = [share for pair, share in pairs.items() if nodes.keys() >= {*pair}]
    is_place = sum(share < usual * (1 + gain / 2) for share in among) > _MOST_SLOW_AMONG * len(among)
    few = len(fast) < _LEAST_SHARE_OF_CELLS * len(pairs)
    return {} if is_place or few else {node: share / usual for node, share in nodes.items()}


def _error_of_pairs(
    course: ScanCourse, shares: Mapping[tuple[int, int], list[float]], pairs: Mapping[tuple[int, int], float]
) -> float:
    """Estimate the standard error of a pair's median over its rails.

    It comes from the spread of the rails and of the slower pairs, which are similar whether or not some nodes are
    faster.
    """
    rails, values = course.fabric.rails, list(pairs.values())
    noise = robust_deviation([share - middle for pair, middle in pairs.items() for share in shares[pair]])
    of_figure = noise.deviation * math.sqrt(rails / (rails - 1)) if noise and rails > 1 else course.yardstick.deviation
    lower = _quantile(values, 0.25) - _quantile(values, 0.05)
    return max((MEDIAN_ERROR if rails > 2 else 1.0) * of_figure / math.sqrt(rails), lower / _LOWER_DEVIATIONS)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def rails_without_level(course: ScanCourse, named: Set[int], *, explained: bool = False) -> frozenset[int]:
    """Return the rails whose healthy bandwidth is unknown.

    `named` are rails already reported as slow, which explain why others are faster. `explained` is true if a reported
    component already explains why some pairs are slower than others.
    """
    if not explained and faster_nodes(course):
        return frozenset(range(course.fabric.rails))
    without = {leaf.rail for leaf in _unnamed_leaves(course)}
    faster = {} if named else faster_rails(course)
    slower = set(range(course.fabric.rails)) - faster.keys() if faster else set()
    return frozenset({cell.rail for cell in faster_cells(course)} | slower | without)


def level_findings(course: ScanCourse, named: Set[int], *, explained: bool = False) -> Iterator[Finding]:
    """Yield findings if some cells are faster than normal. Many others must then be slow, but it is unknown which."""
    cells = faster_cells(course)
    hosts = course.fabric.hosts
    slow_leaves = _unnamed_leaves(course)
    if slow_leaves:
        yield _leaves_differ(course.fabric, slow_leaves)
    nodes = {} if explained or cells or slow_leaves else faster_nodes(course)
    if nodes:
        names = shorten([hosts[node] for node in sorted(nodes)], _MOST_NAMES)
        yield _finding("all rails", f"{names} with each other", max(nodes.values()))
    for rail in sorted({cell.rail for cell in cells}):
        scores = {cell.node: score for cell, score in cells.items() if cell.rail == rail}
        yield _finding(
            f"rail {rail}", shorten([hosts[node] for node in sorted(scores)], _MOST_NAMES), max(scores.values())
        )
    rails = {} if named else faster_rails(course)
    if rails:
        yield _finding("rails", shorten([f"rail {rail}" for rail in sorted(rails)], _MOST_NAMES), max(rails.values()))


def _finding(subject: str, faster: str, share: float) -> Finding:
    return Finding(
        "no-usual-level",
        Verdict.INCONCLUSIVE,
        subject,
        f"{faster}: up to {share:.0%} of the usual bandwidth",
        "no bandwidth far above the usual one, because disturbances only lower it",
        "a third or more of the other nodes are slow, or there are two kinds of nodes or NICs",
        Cure.of("gpubench scan", comment="Scan more nodes, or nodes of one kind."),
    )


def _leaves_differ(fabric: ScanFabric, slow: Sequence[LeafLevel]) -> Finding:
    leaves = list(dict.fromkeys(level.leaf for level in slow))
    others = [leaf for leaf in members_of(fabric) if leaf not in leaves]
    rails = sorted({level.rail for level in slow})
    return Finding(
        "no-usual-level",
        Verdict.INCONCLUSIVE,
        shorten(leaves, _MOST_NAMES),
        f"{min(level.share for level in slow):.0%} of the bandwidth of {shorten(others, _MOST_NAMES)}, "
        f"on {rail_names(rails, fabric.rails)}",
        "the same bandwidth on most leaves, or a known share of the NICs' rate on all of them",
        "slow leaf switches, or faster ones on the other leaves (neither group is the majority)",
        Cure.of("ibdiagnet", comment="Look at the counters of these switches."),
        subjects=tuple(leaves),
    )


SLOW_SHARE, FAILED_SHARE = 0.8, 0.5
"""A rail is slow (WARN) or failed (FAIL) below these shares of the NICs' rate. In one direction, published values
reach 90 to 98 %. Azure's health checks require 380 of 400 Gb/s with GPUDirect RDMA, and RoCE reached 180 of 200
(NVIDIA/nccl-tests#112). Both directions at once were not measured here.
"""

_BETWEEN = {True: " inside leaves", False: " between leaves", None: ""}


class RailLevel(Struct, frozen=True):
    """The normal bandwidth of a rail in GB/s, both directions together, and its share of the NICs' rate.

    Pairs inside one leaf and pairs between leaves are judged separately, and the values are from the slower of the two.
    `inside` is true if those are the pairs inside a leaf, or None if fewer than two leaves are known. `best` is the
    share of the faster pairs.
    """

    gb_s: float
    share: float
    inside: bool | None
    best: float

    @property
    def severity(self) -> Verdict:
        """FAIL if even the faster pairs are below FAILED_SHARE. WARN if the slower pairs are below SLOW_SHARE.

        The slower pairs alone are no FAIL, because a slower spine may be intended. A bandwidth above the NICs' rate is
        an ERROR, because the rate or the times must be wrong.
        """
        if 100 * self.best > MOST_PERCENT:
            return Verdict.ERROR
        if self.best < FAILED_SHARE:
            return Verdict.FAIL
        return Verdict.WARN if self.share < SLOW_SHARE else Verdict.PASS


def rail_levels(course: ScanCourse) -> Mapping[int, RailLevel]:
    """Return the normal bandwidth of each measured rail whose NIC rate is known."""
    found: dict[int, RailLevel] = {}
    several_leaves = len({*course.fabric.leaves}) > 1
    for rail, rate in enumerate(course.fabric.rates):
        centres = [(gb_s, inside) for (of, inside), gb_s in course.yardstick.centres.items() if of == rail]
        if rate is None or not rate > 0 or not centres:
            continue
        gb_s, inside = min(centres)
        carried = BOTH_WAYS * rate
        found[rail] = RailLevel(gb_s, gb_s / carried, inside if several_leaves else None, max(centres)[0] / carried)
    return found


def slow_levels(course: ScanCourse, without: Set[int]) -> Mapping[int, RailLevel]:
    """Return the rails that are clearly below or above the NICs' rate, except the rails in `without`."""
    levels = rail_levels(course)
    return {rail: level for rail, level in levels.items() if rail not in without and level.severity is not Verdict.PASS}


def least_percent(course: ScanCourse, without_level: Set[int]) -> float | None:
    """Return how much of the NICs' rate the slowest rail reaches, in percent.

    Return None if it is unknown for all rails.
    """
    levels = rail_levels(course)
    return min((100 * level.share for rail, level in levels.items() if rail not in without_level), default=None)


def all_rates_known(course: ScanCourse) -> bool:
    """True if every rail was compared with the rate of its NICs. Otherwise nodes were only compared with each other."""
    return len(rail_levels(course)) == course.fabric.rails


def rate_findings(course: ScanCourse, without: Set[int]) -> Iterator[Finding]:
    """Yield findings for rails that are below or above the rate of their NICs on all nodes."""
    by_severity: dict[Verdict, dict[int, RailLevel]] = {}
    for rail, level in slow_levels(course, without).items():
        by_severity.setdefault(level.severity, {})[rail] = level
    for severity, levels in by_severity.items():
        if severity is Verdict.ERROR:
            yield _find_above_rate(course, levels)
            continue
        rail, worst = min(levels.items(), key=lambda item: item[1].share)
        carried = BOTH_WAYS * (course.fabric.rates[rail] or 0.0)
        share = FAILED_SHARE if severity is Verdict.FAIL else SLOW_SHARE
        yield Finding(
            "below-nic-rate",
            severity,
            f"{rail_names(list(levels), course.fabric.rails)} between nodes",
            f"{format_bandwidth(worst.gb_s, 4)} in both directions{_BETWEEN[worst.inside]}, {worst.share:.0%} of "
            "the NICs' rate",
            f"at least {share:.0%} of {format_bandwidth(carried, 4)} in both directions, the rate of the NICs and "
            "their slots",
            "a cause shared by all nodes: sockets instead of RDMA, no GPUDirect RDMA, an NCCL setting, switches, other "
            "jobs",
            Cure.of(
                "gpubench allreduce --sizes 256M", comment="Run it on two of these nodes. It shows the transports."
            ),
        )


def _find_above_rate(course: ScanCourse, levels: Mapping[int, RailLevel]) -> Finding:
    rail, most = max(levels.items(), key=lambda item: item[1].best)
    carried = BOTH_WAYS * (course.fabric.rates[rail] or 0.0)
    return Finding(
        ABOVE_LIMIT,
        Verdict.ERROR,
        f"{rail_names(list(levels), course.fabric.rails)} between nodes",
        f"{format_bandwidth(most.best * carried, 4)} in both directions, {most.best:.1f} times the limit",
        f"at most {format_bandwidth(carried, 4)} in both directions, the rate of the NICs and their slots "
        "reported by the driver",
        "NICs that were not found, a wrong port rate, or NVLinks between these nodes",
        Cure.of("gpubench allreduce --evidence", "gpubench topo", comment="They show the paths and the NICs."),
    )


def rail_names(slow: Sequence[int], rails: int) -> str:
    """Return a text with the names of rails, or 'all rails'."""
    if len(slow) == rails:
        return "all rails" if rails > 1 else "the rail"
    return compress_names([f"rail{rail}" for rail in slow])


LEAST_NODES_OF_A_RAIL = 8
"""With fewer nodes, one bad node changes the normal bandwidth of its rail, so a larger loss is required."""

KINDS_OF_CELLS = (PartKind.NIC, PartKind.NODE)
"""The types of components that are found by the scores of cells alone."""

LEAST_OTHER_RAILS = 2
"""Rails needed to determine the normal bandwidth of another rail."""

RAIL_SHARE = 0.95
"""A rail is slow on every node if it is below this share of the other rails' bandwidth. The slower half of the
leaves is slow below the same share of the faster half. Rails of healthy machines differ by less.
"""


class FaultyPart(Struct, frozen=True):
    """A faulty component. `share` is its share of the normal bandwidth, or None if it has no bandwidth left.

    nodes    all nodes that the component slows down
    rail     number of the rail, or None
    leaf     name of the leaf, or None
    gpu      index of the GPU, or None
    partner  index of the other GPU in a slow pair, or None
    seen     further evidence as text
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


class _Cells(Struct):
    fabric: ScanFabric
    scores: dict[NodeRail, float]
    local: dict[LocalFigure, float]
    parts: list[FaultyPart] = field(default_factory=list)

    def explain(self, part: FaultyPart) -> None:
        self.parts.append(part)
        for cell in part.cells:
            self.scores.pop(cell, None)


def decode(course: ScanCourse, local: Mapping[LocalFigure, float]) -> list[FaultyPart]:
    """Return the faulty components, most severe first. Each confirmed cell, leaf and GPU belongs to one component."""
    left = _Cells(course.fabric, {cell: score.score for cell, score in course.confirmed.items()}, dict(local))
    _gone(course, left)
    _hanging(course, left)
    named = _named_leaves(course)
    left.parts += leaf_parts(course.fabric, named)
    _cells_of_leaves(course, left)
    # With two leaves, only traffic inside leaves is compared, so cells behind the slow leaf may look slow across.
    inside_only = [level for level in named if False not in level.slow]
    for cell in (*doubtful_cells(course), *_cells_like_leaf(course, [*inside_only, *_unnamed_leaves(course)])):
        left.scores.pop(cell, None)
    _whole_nodes(course, left)
    _inside(left)
    _nics(left)
    _rails(course, left)
    return left.parts


def _gone(course: ScanCourse, left: _Cells) -> None:
    for node, (number, seen) in sorted(course.gone.items()):
        cells = _cells([node], range(left.fabric.rails))
        when = f"in round {number}" if number else "in phase 0"
        left.explain(FaultyPart(PartKind.NODE_GONE, (node,), seen=f"{seen} {when}", cells=cells))
        left.local = {figure: share for figure, share in left.local.items() if figure.node != node}


def _hanging(course: ScanCourse, left: _Cells) -> None:
    """Report cells that failed with several partners. If all rails of a node failed, report the node."""
    by_node: dict[int, dict[int, list[PairSample]]] = {}
    for cell, samples in course.retired().items():
        if cell.node not in course.gone:
            by_node.setdefault(cell.node, {})[cell.rail] = samples
    for node, rails in sorted(by_node.items()):
        whole = len(rails) == left.fabric.rails
        for rail, samples in [(None, next(iter(rails.values())))] if whole else list(rails.items()):
            kind = PartKind.NODE_HANGS if rail is None else PartKind.RAIL_HANGS
            cells = _cells([node], range(left.fabric.rails) if rail is None else [rail])
            left.explain(FaultyPart(kind, (node,), rail=rail, seen=_failed(left.fabric, node, samples), cells=cells))


def _failed(fabric: ScanFabric, node: int, samples: Sequence[PairSample]) -> str:
    seen = next((sample.failure for sample in samples if sample.culprit == node), samples[0].failure)
    partners = list(
        dict.fromkeys(fabric.hosts[sample.partner(node)] for sample in samples if sample.partner(node) != node)
    )
    return f"{seen}, with {' and '.join(partners[:3])}" if partners else seen


def _named_leaves(course: ScanCourse) -> list[LeafLevel]:
    faster = {(course.fabric.leaves[cell.node], cell.rail) for cell in faster_cells(course)}
    leaves = {leaf.leaf for leaf in course.slow_leaves}
    levels, as_others = rail_levels(course), _rails_as_fast_as_others(course)
    shares = {leaf: median(level.share for level in course.slow_leaves if level.leaf == leaf) for leaf in leaves}
    return [
        level
        for level in course.slow_leaves
        if (level.leaf, level.rail) not in faster
        and (
            level.healthy > 0.5
            or (level.healthy == 0.5 and shares[level.leaf] < RAIL_SHARE)
            or (level.rail in as_others and level.share < RAIL_SHARE)
            or (level.rail in levels and SLOW_SHARE <= levels[level.rail].best <= MOST_PERCENT / 100)
        )
    ]


def _rails_as_fast_as_others(course: ScanCourse) -> frozenset[int]:
    centres = course.yardstick.centres
    slow = {leaf.rail for leaf in course.slow_leaves}
    others = [gb_s for (rail, inside), gb_s in centres.items() if inside and rail not in slow]
    least = RAIL_SHARE * median(others) if len(others) >= LEAST_OTHER_RAILS else math.inf
    return frozenset(rail for rail in slow if centres.get((rail, True), 0.0) >= least)


def _unnamed_leaves(course: ScanCourse) -> list[LeafLevel]:
    named = {(leaf.leaf, leaf.rail) for leaf in _named_leaves(course)}
    return [leaf for leaf in course.slow_leaves if (leaf.leaf, leaf.rail) not in named]


def doubtful_cells(course: ScanCourse) -> Mapping[NodeRail, LeafLevel]:
    """Return slow cells with a loss so small that the cell or its leaf may be slow."""
    return _cells_like_leaf(course, (*course.unjudged_leaves(), *course.doubtful_leaves))


def _cells_like_leaf(course: ScanCourse, levels: Iterable[LeafLevel]) -> Mapping[NodeRail, LeafLevel]:
    """Return confirmed cells that are no slower than their leaf, with the level of the leaf."""
    least = 1 - judging.threshold(ScanPhase.CONFIRMATION, course.yardstick.deviation)
    by_place = {(level.leaf, level.rail): level for level in levels}
    found = {}
    for cell, score in course.confirmed.items():
        level = by_place.get((course.fabric.leaves[cell.node] or "", cell.rail))
        if level is not None and score.score >= least * level.share - DOUBTFUL_ERRORS * level.error:
            found[cell] = level
    return found


def leaf_parts(fabric: ScanFabric, levels: Iterable[LeafLevel]) -> Iterator[FaultyPart]:
    """Yield the slow leaves. If only traffic that leaves a leaf is slow, yield its uplink instead."""
    by_leaf: dict[tuple[str, bool], list[LeafLevel]] = {}
    for level in levels:
        by_leaf.setdefault((level.leaf, level.is_uplink), []).append(level)
    for (leaf, is_uplink), leaf_levels in sorted(by_leaf.items()):
        whole = len(leaf_levels) == fabric.rails and fabric.rails > 1
        for group in [leaf_levels] if whole else [[level] for level in leaf_levels]:
            share = median(level.share for level in group)
            kind = PartKind.UPLINK if is_uplink else PartKind.LEAF if whole else PartKind.LEAF_RAIL
            yield FaultyPart(kind, _members(fabric, leaf), share, None if whole else group[0].rail, leaf)


def _cells_of_leaves(course: ScanCourse, left: _Cells) -> None:
    living = len(course.living())
    members: dict[str, list[int]] = {}
    for node, leaf in enumerate(left.fabric.leaves):
        if leaf is not None and node not in course.gone:
            members.setdefault(leaf, []).append(node)
    for leaf, nodes in members.items():
        if len(nodes) < 2 or len(nodes) == living:
            continue
        slow = {rail for rail in range(left.fabric.rails) if all(NodeRail(node, rail) in left.scores for node in nodes)}
        whole = len(slow) == left.fabric.rails and left.fabric.rails > 1
        for rails in [sorted(slow)] if whole else [[rail] for rail in sorted(slow)]:
            cells = _cells(nodes, rails)
            share = median(left.scores[cell] for cell in cells)
            kind = PartKind.LEAF if whole else PartKind.LEAF_RAIL
            left.explain(FaultyPart(kind, tuple(nodes), share, None if whole else rails[0], leaf, cells=cells))


def _whole_nodes(course: ScanCourse, left: _Cells) -> None:
    """Report a node if most of its rails are slow, and the median of all its rails is about as slow."""
    by_node: dict[int, list[NodeRail]] = {}
    for cell in left.scores:
        by_node.setdefault(cell.node, []).append(cell)
    for node, slow_cells in sorted(by_node.items()):
        everything = [NodeRail(node, rail) for rail in range(left.fabric.rails)]
        known = [left.scores.get(cell, course.judged[cell].score) for cell in everything if cell in course.judged]
        slow = median(left.scores[cell] for cell in slow_cells)
        if len(slow_cells) * 2 > len(everything) and (len(everything) == 1 or median(known) < (1 + slow) / 2):
            left.explain(FaultyPart(PartKind.NODE, (node,), slow, cells=frozenset(everything)))


def _inside(left: _Cells) -> None:
    """Report the slow measurements inside nodes as slow GPUs, pairs of GPUs, or nodes.

    A slow rail is added to its GPU.
    """
    for part in judging.local_parts(left.local, left.fabric.rails):
        gpu_cells = [cell for cell in left.scores if cell.node == part.node and part.gpu in (None, cell.rail)]
        cells = frozenset(() if part.partner is not None else gpu_cells)
        kind = PartKind.NODE if part.gpu is None else PartKind.GPU if part.partner is None else PartKind.GPU_PAIR
        figure, share = min(part.figures.items(), key=lambda item: item[1])
        ends = "" if figure.partner is None else f" between GPU{figure.gpu} and GPU{figure.partner}"
        more = len(part.figures) - 1
        seen = f"{figure.quantity.value}{ends}: {figure.failure or f'{figure.gb_s:.4g} GB/s'}"
        seen += f" and {plural(more, 'more value')}" if more else ""
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
    """Report the remaining cells as slow NICs. Rails that share a NIC are one component."""
    by_nic: dict[tuple[int, str | int], list[NodeRail]] = {}
    for cell in sorted(left.scores):
        by_nic.setdefault((cell.node, left.fabric.nic(cell.rail) or cell.rail), []).append(cell)
    for (node, _), cells in by_nic.items():
        share = median(left.scores[cell] for cell in cells)
        left.explain(FaultyPart(PartKind.NIC, (node,), share, cells[0].rail, cells=frozenset(cells)))


def _rails(course: ScanCourse, left: _Cells) -> None:
    """Report rails that are slow on every node, which a comparison of nodes does not show."""
    several_leaves = len({*course.fabric.leaves}) > 1
    usual: dict[bool | None, dict[int, float]] = {}
    for (rail, inside), gb_s in course.yardstick.centres.items():
        usual.setdefault(inside if several_leaves else None, {})[rail] = gb_s
    faster = {cell.rail for cell in faster_cells(course)}
    few = len(course.living()) < LEAST_NODES_OF_A_RAIL
    least = 1 - judging.smallest_sure_loss(course.yardstick.deviation) if few else RAIL_SHARE
    named = Counter(cell.rail for part in left.parts for cell in part.cells if part.kind in KINDS_OF_CELLS)
    if not course.has_confirmed:
        named = Counter(cell.rail for cell in course.suspects if course.screened[cell].score < least)
    most_named = len(course.living()) // LEAST_NODES_OF_A_RAIL
    without = faster | unknown_between_leaves(course)
    for rail in (rail for rail in range(course.fabric.rails) if rail not in without and named[rail] <= most_named):
        slow = [
            (rail_gb_s / median(others), f"{rail_gb_s:.4g} GB/s on every node{_BETWEEN[inside]}, {median(others):.4g}")
            for inside, by_rail in usual.items()
            if (rail_gb_s := by_rail.get(rail)) is not None
            and len(others := [gb_s for other, gb_s in by_rail.items() if other != rail]) >= LEAST_OTHER_RAILS
            and rail_gb_s < least * median(others)
        ]
        if slow:
            share, seen = min(slow)
            nodes = tuple(course.living())
            left.explain(FaultyPart(PartKind.RAIL, nodes, share, rail, seen=f"{seen} on the other rails"))


def unknown_between_leaves(course: ScanCourse) -> frozenset[int]:
    """Return the rails with a leaf that is slow inside, because their normal bandwidth between leaves is unknown."""
    return frozenset(leaf.rail for leaf in course.slow_leaves if False not in leaf.slow)


def _members(fabric: ScanFabric, leaf: str) -> tuple[int, ...]:
    return tuple(node for node, other in enumerate(fabric.leaves) if other == leaf)


def _cells(nodes: Iterable[int], rails: Iterable[int]) -> frozenset[NodeRail]:
    wanted = list(rails)
    return frozenset(NodeRail(node, rail) for node in nodes for rail in wanted)


_MOST_LEAF_NAMES = 8
_BETWEEN_SHARE = 0.9
"""Traffic between leaves is slow below this share of the bandwidth inside leaves, or between the two fastest leaves."""


def find_slow_uplinks(course: ScanCourse) -> Iterator[Finding]:
    """Yield a finding if the bandwidth between leaves is lower than inside leaves."""
    centres = course.yardstick.centres
    shares = [
        centres[rail, False] / inside
        for (rail, is_in), inside in centres.items()
        if is_in and (rail, False) in centres and rail not in unknown_between_leaves(course)
    ]
    if shares and median(shares) < _BETWEEN_SHARE:
        yield Finding(
            "between-leaves-slow",
            Verdict.WARN,
            "traffic between leaves",
            f"{median(shares):.0%} of the bandwidth inside a leaf",
            f"at least {_BETWEEN_SHARE:.0%}, if leaves have as many uplinks as ports",
            "fewer uplinks by design, or a leaf with slow uplinks (with two leaves, measurements cannot show which)",
            Cure.of("ibdiagnet", comment="Look at the counters of the leaves' uplinks."),
        )


def leaf_pair_findings(course: ScanCourse, parts: Sequence[FaultyPart]) -> Iterator[Finding]:
    """Yield a finding if some pairs of leaves have less bandwidth than others without a known cause.

    Slow leaves and uplinks are known causes. If there are few leaves, most pairs between leaves use the slow uplink,
    which then looks normal. Comparing pairs of leaves shows it.
    """
    named = {part.leaf for part in parts if part.leaf is not None and part.kind not in OF_ONE_NODE}
    levels = dict(_leaf_pair_bandwidths(course))
    if len(levels) < 2:
        return
    best, most = max(levels.items(), key=lambda item: item[1][0])
    slow = {
        pair: gb_s
        for pair, (gb_s, _) in levels.items()
        if gb_s < _BETWEEN_SHARE * most[0] and not named.intersection(pair)
    }
    if slow:
        pairs = [f"{one} and {other}" for one, other in slow]
        common = set.intersection(*(set(pair) for pair in slow))
        yield Finding(
            "leaf-pairs-differ",
            Verdict.FAIL,
            f"between {shorten(pairs, _MOST_LEAF_NAMES)}",
            f"{min(slow.values()) / most[0]:.0%} of the bandwidth between {best[0]} and {best[1]}",
            f"at least {_BETWEEN_SHARE:.0%} between any two leaves",
            f"slow uplinks of {' or '.join(sorted(common)) if common else 'one leaf'}, or fewer uplinks by design",
            Cure.of("ibdiagnet", comment="Look at the counters of the leaves' uplinks."),
            subjects=tuple(pairs),
        )


def _leaf_pair_bandwidths(course: ScanCourse) -> Iterator[tuple[tuple[str, str], tuple[float, int]]]:
    leaves = course.fabric.leaves
    found: dict[tuple[str, str], list[float]] = {}
    for outcome in course.outcomes:
        for sample in outcome.samples:
            one, other = leaves[sample.first], leaves[sample.second]
            if one is not None and other is not None and one != other and not sample.failure:
                found.setdefault((min(one, other), max(one, other)), []).append(sample.gb_s)
    for pair, values in found.items():
        if len(values) >= judging.LEAST_OF_A_LEAF_PAIR:
            yield pair, (median(values), len(values))
