"""Findings on what passes between leaves: slower than inside on all of them alike, or between some of them."""

from collections.abc import Iterator, Sequence
from statistics import median

from gpubench.measure.scan.decoding import FaultyPart
from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.results.rows.scan import OF_ONE_NODE
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Finding, Verdict

_MOST_NAMES = 8
_ACROSS_SHARE = 0.9
_LEAF_PAIR_SHARE = 0.9
_LEAST_OF_A_LEAF_PAIR = 8
"""Figures between two leaves, whose median neither bad nodes nor noise moves by a tenth."""


def between_leaves(course: ScanCourse) -> Iterator[Finding]:
    """That what passes between leaves is slower than what stays inside, on all of them alike."""
    centres = course.yardstick.centres
    shares = [
        centres[rail, False] / inside for (rail, is_in), inside in centres.items() if is_in and (rail, False) in centres
    ]
    if shares and median(shares) < _ACROSS_SHARE:
        yield Finding(
            "between-leaves-slow",
            Verdict.WARN,
            "what passes between leaves",
            f"{median(shares):.0%} of what stays inside a leaf",
            f"at least {_ACROSS_SHARE:.0%}, where leaves have as many uplinks as ports",
            "fewer uplinks by design, or all uplinks of one of few leaves: of two nobody can say which",
            "ibdiagnet; the counters of the uplinks",
        )


def leaf_pair_findings(course: ScanCourse, parts: Sequence[FaultyPart]) -> Iterator[Finding]:
    """Leaves between which less passes than between others, where no leaf or uplink was named that explains it.

    Of few leaves most pairs across touch a slow uplink, and it becomes what is usual; between two others it shows.
    """
    named = {part.leaf for part in parts if part.leaf is not None and part.kind not in OF_ONE_NODE}
    levels = dict(_between_pairs_of_leaves(course))
    if len(levels) < 2:
        return
    best, most = max(levels.items(), key=lambda each: each[1][0])
    slow = {
        pair: gb_s
        for pair, (gb_s, _) in levels.items()
        if gb_s < _LEAF_PAIR_SHARE * most[0] and not named.intersection(pair)
    }
    if slow:
        pairs = [f"{one} and {other}" for one, other in slow]
        common = set.intersection(*(set(pair) for pair in slow))
        yield Finding(
            "leaf-pairs-differ",
            Verdict.FAIL,
            f"between {some_of(pairs, _MOST_NAMES)}",
            f"{min(slow.values()) / most[0]:.0%} of what passes between {best[0]} and {best[1]}",
            f"at least {_LEAF_PAIR_SHARE:.0%} between any two leaves",
            f"the uplinks of {' or '.join(sorted(common)) if common else 'one of them'}; or fewer of them by design",
            "ibdiagnet; the counters of the leaves' uplinks",
            subjects=tuple(pairs),
        )


def _between_pairs_of_leaves(course: ScanCourse) -> Iterator[tuple[tuple[str, str], tuple[float, int]]]:
    """The median GB/s of all figures between two leaves, and their number."""
    leaves = course.fabric.leaves
    found: dict[tuple[str, str], list[float]] = {}
    for outcome in course.outcomes:
        for sample in outcome.samples:
            one, other = leaves[sample.first], leaves[sample.second]
            if one is not None and other is not None and one != other and not sample.failure:
                found.setdefault((min(one, other), max(one, other)), []).append(sample.gb_s)
    for pair, values in found.items():
        if len(values) >= _LEAST_OF_A_LEAF_PAIR:
            yield pair, (median(values), len(values))
