"""Predicted and measured rings of all nodes."""

from collections.abc import Sequence

import pytest

from gpubench.measure.scan.rounds import collectives, predicted_gb_s
from gpubench.model.results.scan import NodeRail
from gpubench.simulated.scan import SimulatedFabric
from tests.measure.scan.fabrics import USUAL_GB_S, course, fabric


def test_the_slowest_rail_sets_the_prediction() -> None:
    found = course(fabric(32), SimulatedFabric(USUAL_GB_S, {NodeRail(3, 1): 0.5}))
    assert predicted_gb_s(found, range(32)) == pytest.approx(4 * USUAL_GB_S * 0.5, rel=0.05)
    assert predicted_gb_s(found, range(4, 32)) == pytest.approx(4 * USUAL_GB_S, rel=0.05)


def test_a_ring_as_predicted_ends_the_phase() -> None:
    found = course(fabric(32), SimulatedFabric(USUAL_GB_S, dies={4: 2}, hangs={9: 1}))
    (whole,) = collectives(found, 1, lambda nodes: (predicted_gb_s(found, nodes) * 0.95, ""))
    assert whole.nodes == tuple(node for node in range(32) if node not in (4, 9))
    assert whole.share == pytest.approx(0.95)


def test_a_ring_that_falls_short_is_split_into_halves() -> None:
    found = course(fabric(32), SimulatedFabric(USUAL_GB_S))

    def measure(nodes: Sequence[int]) -> tuple[float | None, str]:
        return (None, "deadline") if 20 in nodes and len(nodes) > 16 else (predicted_gb_s(found, nodes), "")

    groups = list(collectives(found, 1, measure))
    assert [group.name for group in groups] == ["all", "first half", "second half", "mixed half", "other mixed half"]
    assert [group.share for group in groups] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert groups[0].failure == "deadline"
    for one, other in ((groups[1], groups[2]), (groups[3], groups[4])):
        assert sorted(one.nodes + other.nodes) == list(range(32))
    assert groups[3].nodes != groups[1].nodes
