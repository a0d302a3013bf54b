"""Phase 0: what nodes measured by themselves, each GPU held against the same of all nodes."""

from collections.abc import Iterable, Sequence
from statistics import median

from gpubench.model.results.scan_rounds import LocalFigure, LocalQuantity
from gpubench.model.terms.statistics.noise import robust_deviation

DEVIATIONS, LEAST_LOSS = 5.0, 0.1
"""A figure is slow that is so many deviations, and at least this share, below the median of all."""

LEAST_FIGURES = 3
"""Of two nobody can say which one is slow."""


def slow_figures(figures: Sequence[LocalFigure]) -> dict[LocalFigure, float]:
    """The figures that fall behind, each with its share of what is usual."""
    found: dict[LocalFigure, float] = {}
    for quantity in LocalQuantity:
        own = [each for each in figures if each.quantity is quantity]
        if len(own) < LEAST_FIGURES:
            continue
        usual = median(each.gb_s for each in own)
        if usual <= 0:
            continue
        noise = robust_deviation([each.gb_s / usual for each in own])
        least = 1 - max(DEVIATIONS * (noise.deviation if noise else 0.0), LEAST_LOSS)
        found |= {each: each.gb_s / usual for each in own if each.gb_s / usual < least}
    return found


def still_slow(first: Iterable[LocalFigure], again: Sequence[LocalFigure]) -> dict[LocalFigure, float]:
    """The figures that fall behind in both of two measurements, as the second one has them."""
    before = {each[:3] for each in first}
    return {each: share for each, share in slow_figures(again).items() if each[:3] in before}
