"""Leaves that are slow as a whole are told before any node behind them is named."""

import pytest

from gpubench.hardware.simulated.scan import SimulatedFabric
from gpubench.measure.scan.report import ScanResult, report_of
from gpubench.measure.scan.verdicts import PartKind, decode
from gpubench.model.results.rounds import ScanFabric
from gpubench.model.terms.verdict import Verdict
from tests.measure.scan.fabrics import USUAL_GB_S, course, fabric

RAILS = 8


def slow(*leaves: int, share: float) -> SimulatedFabric:
    """These leaves with this share of the usual bandwidth, on all rails."""
    rails = {(f"leaf{leaf}", rail): share for leaf in leaves for rail in range(RAILS)}
    return SimulatedFabric(USUAL_GB_S, leaf_rails=rails)


@pytest.mark.parametrize("nodes", [16, 32])
def test_one_of_four_leaves_that_is_5_percent_slow_is_named_and_no_node_behind_it(nodes: int) -> None:
    """Healthy NICs and nodes of that leaf were named, up to 23 of them in one scan."""
    for seed in range(900, 904):
        found = course(fabric(4 * nodes, RAILS, nodes), slow(1, share=0.95), seed)
        assert [(part.kind, part.leaf) for part in decode(found, {})] == [(PartKind.LEAF, "leaf1")]


def test_a_rail_of_a_leaf_of_few_nodes_is_no_uplink() -> None:
    for seed in range(900, 904):
        model = SimulatedFabric(USUAL_GB_S, leaf_rails={("leaf2", 5): 0.9})
        found = decode(course(fabric(28, RAILS, 7), model, seed), {})
        assert [(part.kind, part.leaf, part.rail) for part in found] == [(PartKind.LEAF_RAIL, "leaf2", 5)]


@pytest.mark.parametrize(("leaves", "bad"), [(2, (1,)), (3, (1, 2))])
def test_leaves_that_are_slow_beside_no_majority_take_a_known_rate_to_be_named(
    leaves: int, bad: tuple[int, ...]
) -> None:
    """They were PASS: half of all nodes, or most of them, do not stand out."""
    plain = fabric(leaves * 32, RAILS, 32)
    for rates, verdict in (((), Verdict.INCONCLUSIVE), ((USUAL_GB_S / 2 / 0.92,) * RAILS, Verdict.FAIL)):
        of = ScanFabric(plain.hosts, RAILS, plain.leaves, (), rates)
        found = course(of, slow(*bad, share=0.95), 901)
        parts = decode(found, {})
        report = report_of(ScanResult(found, parts), 1)
        assert report.verdict is verdict
        assert [part.leaf for part in parts] == ([f"leaf{leaf}" for leaf in bad] if rates else [])
        said = {name for each in report.findings for name in each.subjects}
        assert rates or said == {f"leaf{leaf}" for leaf in bad}
