"""Scores, normal bandwidth and noise."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.measure.scan.judging import LEAST_LOSS, smallest_sure_loss, threshold, upper_excess, upper_mean
from gpubench.model.results.scan import NodeRail, ScanPhase
from gpubench.simulated.scan import SimulatedFabric
from tests.measure.scan.fabrics import USUAL_GB_S, course, fabric


def test_the_upper_mean_is_of_the_larger_half() -> None:
    assert upper_mean([3.0]) == 3.0
    assert upper_mean([1.0, 3.0]) == 3.0
    assert upper_mean([0.0, 3.0, 5.0]) == 4.0
    assert upper_mean([0.0, 0.1, 3.0, 4.0, 5.0]) == 4.0


@given(st.lists(st.floats(0, 100), min_size=3, max_size=9), st.floats(0, 0.99))
def test_one_dip_of_three_or_more_lowers_no_score_below_the_worst_other(values: list[float], left: float) -> None:
    dipped = [values[0] * left, *values[1:]]
    assert upper_mean(dipped) >= min(values[1:]) - 1e-9


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_excess_of_the_upper_mean_is_that_of_normal_values(count: int) -> None:
    source = random.Random(1)
    seen = [upper_mean([source.gauss(0, 1) for _ in range(count)]) for _ in range(6_000)]
    assert sum(seen) / len(seen) == pytest.approx(upper_excess(count), abs=0.03)


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.1])
@pytest.mark.parametrize(("nodes", "leaf"), [(64, 0), (64, 8), (9, 0)])
def test_noise_and_normal_bandwidth_are_found_next_to_faults(noise: float, nodes: int, leaf: int) -> None:
    bad = {NodeRail(node, rail): 0.5 for node in range(0, nodes, 5) for rail in range(8)}
    found = course(fabric(nodes, 8, leaf), SimulatedFabric(USUAL_GB_S, bad, noise=noise)).yardstick
    assert 0.7 * noise < found.deviation < 2.5 * noise
    assert sum(found.centres.values()) / len(found.centres) == pytest.approx(USUAL_GB_S, rel=2 * noise)


def test_permanent_differences_between_nodes_raise_the_noise() -> None:
    spread = {
        NodeRail(node, rail): 1 + 0.05 * ((node * 7 + rail) % 11 / 10 - 0.5) for node in range(64) for rail in range(4)
    }
    found = course(fabric(64), SimulatedFabric(USUAL_GB_S, spread, noise=0.001, usual_dips=0.0))
    assert found.yardstick.deviation > 0.01
    assert found.confirmed == {}


def test_thresholds_follow_the_noise_and_have_a_floor() -> None:
    assert threshold(ScanPhase.CONFIRMATION, 0.0) == LEAST_LOSS[ScanPhase.CONFIRMATION]
    assert threshold(ScanPhase.CONFIRMATION, 0.1) == pytest.approx(0.15)
    assert smallest_sure_loss(0.02) == pytest.approx(0.06)
