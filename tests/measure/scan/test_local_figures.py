"""Comparison of GPUs in two passes of phase 0."""

from gpubench.measure.scan.judging import better_of, slow_figures, still_slow
from gpubench.model.results.scan import LocalFigure, LocalQuantity


def figures(slow: dict[tuple[int, int], float], nodes: int = 8) -> list[LocalFigure]:
    return [
        LocalFigure(node, gpu, quantity, 50.0 * slow.get((node, gpu), 1.0) * (1 + 0.001 * (node % 3)))
        for quantity in (LocalQuantity.TO_HOST, LocalQuantity.FROM_HOST)
        for node in range(nodes)
        for gpu in range(4)
    ]


def test_a_slow_gpu_is_slow_in_all_measurements() -> None:
    found = slow_figures(figures({(3, 2): 0.5}))
    assert {each[:2] for each in found} == {(3, 2)}
    assert len(found) == 2


def test_only_what_is_slow_again_counts() -> None:
    first = slow_figures(figures({(3, 2): 0.5, (1, 1): 0.5}))
    assert {each[:2] for each in still_slow(first, figures({(3, 2): 0.5, (5, 0): 0.5}))} == {(3, 2)}


def test_noise_small_losses_and_lonely_figures_are_not_judged() -> None:
    assert slow_figures(figures({(3, 2): 0.93})) == {}
    assert slow_figures([LocalFigure(0, 0, LocalQuantity.MEMORY, 1.0)]) == {}
    assert slow_figures([LocalFigure(node, 0, LocalQuantity.MEMORY, 0.0) for node in range(5)]) == {}


def test_pairs_without_a_measurement_hide_no_slow_pair() -> None:
    pairs = [LocalFigure(node, 0, LocalQuantity.PAIR, 500.0 + node % 3, 1) for node in range(8)]
    late = [pair._replace(gb_s=0.0, failure="not done within the deadline") for pair in pairs[:3]]
    found = slow_figures([*late, *pairs[3:7], pairs[7]._replace(gb_s=250.0)])
    assert {each.node for each in found} == {0, 1, 2, 7}


def test_two_measurements_are_slow_if_both_are() -> None:
    first, again = figures({(3, 2): 0.5, (1, 1): 0.5}), figures({(3, 2): 0.6, (5, 0): 0.5})
    kept = better_of(first, again)
    assert len(kept) == len(first)
    assert {each[:2]: round(share, 1) for each, share in slow_figures(kept).items()} == {(3, 2): 0.6}
    damaged = first[0]._replace(gb_s=0.0, failure="wrong data arrived (1 wrong elements)")
    for two in (([damaged], [again[0]]), ([again[0]], [damaged])):
        assert better_of(*two) == [damaged]
    late = first[0]._replace(gb_s=0.0, failure="not done within the deadline")
    assert better_of([late], [again[0]]) == [again[0]]
