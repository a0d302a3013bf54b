"""Whether what is called usual is what healthy parts deliver: nothing that disturbs a figure makes it faster."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from statistics import median

from gpubench.measure.scan.leaves import MEDIAN_ERROR
from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.results.scan_rounds import NodeRail, ScanPhase
from gpubench.model.terms.statistics.noise import robust_deviation
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Finding, Verdict

DEVIATIONS, LEAST_GAIN = 5.0, 0.1
"""A cell or rail is faster than usual by so many deviations of a figure, and at least this share."""

_LEAST_SHARE_OF_CELLS = 0.02
"""Two nodes of a faster kind among hundreds do not make the others slow."""

_DEVIATIONS_OF_PAIRS, _LEAST_GAIN_OF_NODES = 4.0, 0.03
"""The same of the middle rail of two nodes, above slow pairs; of few pairs, whose lowest is what is usual, as above."""

_MOST_SLOW_AMONG = 0.2
"""Of the pairs among nodes that seem faster: where more are slow, the nodes are near to each other, and not faster."""

_LEAST_RAILS, _LEAST_PAIRS = 4, 6
"""From so many rails the spread within a pair tells the noise of its mean, from so many pairs their own spread does."""

_LOWER_DEVIATIONS = 0.97
"""Between the 5 % and the 25 % quantile of normal values."""

_MOST_NAMES = 4


def least_gain(course: ScanCourse) -> float:
    """From which share above what is usual a cell is faster than noise makes it."""
    return max(DEVIATIONS * course.yardstick.deviation, LEAST_GAIN)


def faster_cells(course: ScanCourse) -> Mapping[NodeRail, float]:
    """The cells that delivered more in the screening than is usual, with their scores: others are slow, then."""
    most = 1 + least_gain(course)
    found = {cell: each.score for cell, each in course.screened.items() if each.score > most}
    cells, faster = (Counter(cell.rail for cell in each) for each in (course.screened, found))
    return {
        cell: score for cell, score in found.items() if faster[cell.rail] >= _LEAST_SHARE_OF_CELLS * cells[cell.rail]
    }


def usual_by_rail(course: ScanCourse) -> Mapping[int, float]:
    """GB/s that are usual of every rail that was measured."""
    centres = course.yardstick.centres
    found = {rail: [gb_s for (of, _), gb_s in centres.items() if of == rail] for rail in range(course.fabric.rails)}
    return {rail: median(own) for rail, own in found.items() if own}


def faster_rails(course: ScanCourse) -> Mapping[int, float]:
    """The rails that deliver more than most others on all nodes, with their shares of these."""
    usual = usual_by_rail(course)
    shares = {
        rail: gb_s / median(others)
        for rail, gb_s in usual.items()
        if len(others := [each for other, each in usual.items() if other != rail]) >= 2
    }
    return {rail: share for rail, share in shares.items() if share > 1 + least_gain(course)}


def faster_nodes(course: ScanCourse) -> Mapping[int, float]:
    """The nodes that are faster with each other, over all rails, than most pairs are, with the best of these shares.

    A pair is as slow as its slower node: where a third of all nodes or more are slow alike, most pairs are slow, and
    those of two healthy nodes stand out. Most pairs among the faster nodes have to be fast; else their place is.
    """
    shares: dict[tuple[int, int], list[float]] = {}
    for sample in course.samples(ScanPhase.SCREENING):
        if not sample.failure:
            shares.setdefault((sample.first, sample.second), []).append(course.yardstick.share(course.fabric, sample))
    pairs = {pair: median(own) for pair, own in shares.items() if len(own) == course.fabric.rails}
    if len(pairs) < 2:
        return {}
    usual = _quantile(list(pairs.values()), 0.25)
    deviations = DEVIATIONS if len(pairs) < _LEAST_PAIRS else _DEVIATIONS_OF_PAIRS
    gain = max(deviations * _deviation_of_pairs(course, shares, pairs), _LEAST_GAIN_OF_NODES)
    fast = {pair: share for pair, share in pairs.items() if share > usual * (1 + gain)}
    nodes = {node: max(share for pair, share in fast.items() if node in pair) for node in {*sum(fast, ())}}
    among = [share for pair, share in pairs.items() if nodes.keys() >= {*pair}]
    is_place = sum(share < usual * (1 + gain / 2) for share in among) > _MOST_SLOW_AMONG * len(among)
    few = len(fast) < _LEAST_SHARE_OF_CELLS * len(pairs)
    return {} if is_place or few else {node: share / usual for node, share in nodes.items()}


def _deviation_of_pairs(
    course: ScanCourse, shares: Mapping[tuple[int, int], list[float]], pairs: Mapping[tuple[int, int], float]
) -> float:
    """The deviation of the middle rail of a pair: from the rails' own spread and, of many pairs, from their lower ones.

    Lower ones are of one kind, whether all pairs are or those of slow nodes.
    """
    rails, values = course.fabric.rails, list(pairs.values())
    apart = [share - middle for pair, middle in pairs.items() for share in shares[pair]]
    noise = robust_deviation(apart) if rails >= _LEAST_RAILS else None
    own = course.yardstick.deviation if noise is None else noise.deviation * math.sqrt(rails / (rails - 1))
    lower = _quantile(values, 0.25) - _quantile(values, 0.05) if len(values) >= _LEAST_PAIRS else 0.0
    return max((MEDIAN_ERROR if rails > 2 else 1.0) * own / math.sqrt(rails), lower / _LOWER_DEVIATIONS)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def rails_without_level(course: ScanCourse, named: Set[int], *, explained: bool = False) -> frozenset[int]:
    """The rails of which nobody knows what a healthy cell delivers; rails that are `named` explain faster ones.

    Where any part is named, that has `explained` why some pairs are slower than others.
    """
    if not explained and faster_nodes(course):
        return frozenset(range(course.fabric.rails))
    faster = {} if named else faster_rails(course)
    slower = set(range(course.fabric.rails)) - faster.keys() if faster else set()
    return frozenset({cell.rail for cell in faster_cells(course)} | slower)


def level_findings(course: ScanCourse, named: Set[int], *, explained: bool = False) -> Iterator[Finding]:
    """That some cells are faster than what is usual, so that many others have to be slow, which nobody can name."""
    cells = faster_cells(course)
    hosts = course.fabric.hosts
    nodes = {} if explained or cells else faster_nodes(course)
    if nodes:
        names = some_of([hosts[node] for node in sorted(nodes)], _MOST_NAMES)
        yield _finding("all rails", f"{names} with each other", max(nodes.values()))
    for rail in sorted({cell.rail for cell in cells}):
        own = {cell.node: score for cell, score in cells.items() if cell.rail == rail}
        yield _finding(f"rail {rail}", some_of([hosts[node] for node in sorted(own)], _MOST_NAMES), max(own.values()))
    rails = {} if named else faster_rails(course)
    if rails:
        yield _finding("rails", some_of([f"rail {rail}" for rail in sorted(rails)], _MOST_NAMES), max(rails.values()))


def _finding(subject: str, faster: str, share: float) -> Finding:
    return Finding(
        "no-usual-level",
        Verdict.INCONCLUSIVE,
        subject,
        f"{faster}: up to {share:.0%} of what is usual",
        "nothing far above what is usual: what disturbs a figure only lowers it",
        "a third of the others or more are slow, or nodes and NICs are of two kinds",
        "gpubench scan with more nodes, or of one kind; gpubench allreduce against the NICs' rate",
    )
