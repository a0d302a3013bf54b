"""Whether what is called usual is what healthy parts deliver: nothing that disturbs a figure makes it faster."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from statistics import median

from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.results.scan_rounds import NodeRail
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Finding, Verdict

DEVIATIONS, LEAST_GAIN = 5.0, 0.1
"""A cell or rail is faster than usual by so many deviations of a figure, and at least this share."""

_LEAST_SHARE_OF_CELLS = 0.02
"""Two nodes of a faster kind among hundreds do not make the others slow."""

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


def rails_without_level(course: ScanCourse, named: Set[int]) -> frozenset[int]:
    """The rails of which nobody knows what a healthy cell delivers; rails that are `named` explain faster ones."""
    faster = {} if named else faster_rails(course)
    slower = set(range(course.fabric.rails)) - faster.keys() if faster else set()
    return frozenset({cell.rail for cell in faster_cells(course)} | slower)


def level_findings(course: ScanCourse, named: Set[int]) -> Iterator[Finding]:
    """That some cells are faster than what is usual, so that many others have to be slow, which nobody can name."""
    cells = faster_cells(course)
    hosts = course.fabric.hosts
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
