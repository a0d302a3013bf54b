"""Who is to blame for pairs that failed: the fewest cells that explain all of them."""

from collections.abc import Mapping, Sequence

from gpubench.model.results.scan_rounds import NodeRail, PairSample

FAILURES_THAT_RETIRE = 2
"""A cell that failed so often, with another partner each time, takes part in no further round."""


def blamed(failures: Mapping[NodeRail, Sequence[PairSample]]) -> list[NodeRail]:
    """The cells whose own supervisor saw it, and those that failed with several partners who are not blamed themselves.

    A well cell may meet two that hang, one after the other, and fail with both. So whoever is the only one that a
    partner failed with is blamed first, which in a graph without circles gives a smallest vertex cover.
    """
    own = [cell for cell, samples in failures.items() if any(each.culprit == cell.node for each in samples)]
    partners = {
        cell: {NodeRail(each.partner(cell.node), cell.rail) for each in samples if each.culprit is None}
        for cell, samples in failures.items()
    }
    found = dict.fromkeys(own)
    left = {cell: met - found.keys() for cell, met in partners.items() if cell not in found}
    while True:
        candidates = [cell for cell, met in left.items() if len(met) >= FAILURES_THAT_RETIRE]
        alone = [cell for cell in candidates if any(len(left[each]) == 1 for each in left[cell])]
        if not candidates:
            return list(found)
        worst = max(alone or candidates, key=lambda cell: (len(left[cell]), -cell.node, -cell.rail))
        found[worst] = None
        for each in left.pop(worst):
            left[each] = left[each] - {worst}
