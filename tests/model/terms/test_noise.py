"""Deviations that outliers do not move, and Student's t."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.terms.statistics import Noise, robust_deviation, student_quantile


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 26, 60, 1000])
def test_the_deviation_of_normal_figures(count: int) -> None:
    generator = random.Random(count)
    samples = 1000 if count < 10 else 200 if count < 100 else 5
    found = [robust_deviation([generator.gauss(5, 2) for _ in range(count)]) for _ in range(samples)]
    assert fmean(each.deviation for each in found if each) == pytest.approx(2, rel=0.1)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=40), st.floats(1e3, 1e6))
def test_less_than_half_of_the_figures_may_be_anything(figures: list[float], far: float) -> None:
    spoiled = [far * (number + 1) for number in range((len(figures) - 1) // 2)]
    found = robust_deviation([*figures, *spoiled])
    assert found is not None
    assert found.deviation <= 2 * 2.2219


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30), st.floats(-1e3, 1e3))
def test_where_figures_lie_makes_no_difference(figures: list[float], shift: float) -> None:
    one, other = robust_deviation(figures), robust_deviation([each + shift for each in figures])
    assert one is not None
    assert other is not None
    assert one.deviation == pytest.approx(other.deviation, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "distance", "factor"),
    # By hand: the 3rd of 10 distances of five values, the 15th of 45 of ten and of 55 of eleven.
    [
        ([0, 1, 3, 7, 15], 3, 0.844),
        (list(range(11)), 2, 11 / 12.4),
        ([0, 1, 2, 4, 8, 16, 32, 64, 128, 256], 16, 10 / 13.8),
    ],
)
def test_the_deviation_is_a_distance_between_two_values(values: list[float], distance: float, factor: float) -> None:
    found = robust_deviation(values)
    assert found is not None
    assert found.deviation == pytest.approx(factor * 2.2219 * distance)
    assert found.freedom == pytest.approx(0.82 * (len(values) - 1))


def test_one_figure_tells_nothing() -> None:
    assert robust_deviation([1.0]) is None


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile", "within"),
    # Tables of Student's t.
    [
        (0.975, 10, 2.22814, 1e-5),
        (0.995, 30, 2.749996, 1e-6),
        (0.9995, 30, 3.645959, 1e-5),
        (0.9995, 8, 5.0413, 0.001),
        (0.9995, 4, 8.6103, 0.02),
        (0.975, math.inf, 1.9600, 0.001),
    ],
)
def test_student(probability: float, freedom: float, quantile: float, within: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(quantile, rel=within)


def test_bounds_grow_with_what_is_compared_and_shrink_with_what_is_known() -> None:
    assert Noise(1.0, 20).bound(100) > Noise(1.0, 20).bound(10) > Noise(1.0, 40).bound(10)


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    # The expansion itself, in fractions: also where it is far from Student's t.
    [(0.9995, 4, 8.49705546325937), (0.975, 2, 4.2705513418998144), (0.9, 3, 1.6374250413708942)],
)
def test_all_terms_of_the_expansion(probability: float, freedom: float, quantile: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(quantile, rel=1e-12)


@pytest.mark.parametrize(
    ("figures", "factor", "distance"),
    # Factors for few figures, and which distance counts, from Rousseeuw and Croux.
    [
        ([0.0, 1.0], 0.399, 1),
        ([0.0, 1.0, 3.0], 0.994, 1),
        ([0.0, 1.0, 3.0, 7.0], 0.512, 3),
        ([0.0, 1.0, 3.0, 7.0, 15.0], 0.844, 3),
        ([float(2**each) for each in range(10)], 10 / 13.8, 31),
        ([float(2**each) for each in range(11)], 11 / 12.4, 31),
    ],
)
def test_the_deviation_of_few_figures(figures: list[float], factor: float, distance: float) -> None:
    found = robust_deviation(figures)
    assert found is not None
    assert found.deviation == pytest.approx(factor * 2.2219 * distance)
    assert found.freedom == pytest.approx(0.82 * (len(figures) - 1))
