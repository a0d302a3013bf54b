"""Phase 0: what nodes measured by themselves, each GPU and pair held against the same of all nodes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from gpubench.model.results.scan_rounds import WRONG_DATA_ARRIVED, LocalFigure, LocalQuantity
from gpubench.model.terms.statistics.noise import robust_deviation

DEVIATIONS, LEAST_LOSS = 5.0, 0.1
"""A figure is slow that is so many deviations, and at least this share, below the median of all."""

LEAST_FIGURES = 3
"""Of two nobody can say which one is slow."""


def slow_figures(figures: Sequence[LocalFigure]) -> dict[LocalFigure, float]:
    """The figures that fall behind, each with its share of what is usual.

    GPUs are held against all GPUs, pairs against the pair at the same place of other nodes: some are joined by fewer
    links than others.
    """
    found: dict[LocalFigure, float] = {}
    for quantity in LocalQuantity:
        alike: defaultdict[tuple[int, int | None], list[LocalFigure]] = defaultdict(list)
        for each in figures:
            if each.quantity is quantity:
                alike[(each.gpu, each.partner) if quantity is LocalQuantity.PAIR else (0, None)].append(each)
        shares: dict[LocalFigure, float] = {}
        for own in alike.values():
            usual = median(each.gb_s for each in own)
            if len(own) >= LEAST_FIGURES and usual > 0:
                shares |= {each: each.gb_s / usual for each in own}
        noise = robust_deviation([share for each, share in shares.items() if not each.failure])
        least = 1 - max(DEVIATIONS * (noise.deviation if noise else 0.0), LEAST_LOSS)
        found |= {each: share for each, share in shares.items() if share < least or each.failure}
    return found


def still_slow(first: Iterable[LocalFigure], again: Sequence[LocalFigure]) -> dict[LocalFigure, float]:
    """The figures that fall behind in both of two measurements, as the second one has them."""
    before = {each.place for each in first}
    return {each: share for each, share in slow_figures(again).items() if each.place in before}


def slowest_of(*measurements: Mapping[LocalFigure, float]) -> dict[LocalFigure, float]:
    """The figures that fall behind in any of several measurements, each as the one that has it slowest."""
    found: dict[tuple[int, int, LocalQuantity, int | None], tuple[LocalFigure, float]] = {}
    for figure, share in (each for measured in measurements for each in measured.items()):
        known = found.setdefault(figure.place, (figure, share))
        if share < known[1]:
            found[figure.place] = figure, share
    return dict(found.values())


def better_of(first: Sequence[LocalFigure], again: Sequence[LocalFigure]) -> list[LocalFigure]:
    """Of two measurements the better figures, which are slow where both are; damaged data where either has them."""
    found: dict[tuple[int, int, LocalQuantity, int | None], LocalFigure] = {}
    for each in (*first, *again):
        known = found.setdefault(each.place, each)
        if (each.failure.startswith(WRONG_DATA_ARRIVED), each.gb_s) > (
            known.failure.startswith(WRONG_DATA_ARRIVED),
            known.gb_s,
        ):
            found[each.place] = each
    return list(found.values())
