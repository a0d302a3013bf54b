"""Scans in which most or half of the parts are slow."""

import pytest
from msgspec.structs import replace

from gpubench.measure.scan.report import ScanResult, report_of
from gpubench.measure.scan.verdicts import (
    PartKind,
    decode,
    faster_cells,
    faster_nodes,
    faster_rails,
    level_findings,
    rails_without_level,
)
from gpubench.model.results.report import Report
from gpubench.model.results.scan import ExclusionRow, NodeRail, ScanCellRow, ScanPartRow, Tool
from gpubench.model.terms.verdict import Verdict
from gpubench.simulated.scan import SimulatedFabric
from tests.measure.scan.fabrics import USUAL_GB_S, course, fabric, parts

NONE: frozenset[int] = frozenset()


def report(nodes: int, slow: dict[NodeRail, float], *, leaf: int = 0, seed: int = 1, quick: bool = False) -> Report:
    found = course(fabric(nodes, leaf=leaf), SimulatedFabric(USUAL_GB_S, slow), seed, quick=quick)
    return report_of(ScanResult(found, decode(found, {})), 1)


def of_nodes(nodes: range, rails: range, share: float) -> dict[NodeRail, float]:
    return {NodeRail(node, rail): share for node in nodes for rail in rails}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("nodes", "slow"),
    [
        (5, of_nodes(range(1, 3), range(4), 0.5)),
        (6, of_nodes(range(3), range(1), 0.5)),
        (16, of_nodes(range(0, 16, 2), range(2, 3), 0.7)),
        (64, of_nodes(range(0, 64, 2), range(1, 2), 0.8)),
        (60, of_nodes(range(36), range(1, 2), 0.8)),
    ],
)
def test_a_rail_that_is_slow_on_half_of_the_nodes_never_passes(
    nodes: int, slow: dict[NodeRail, float], seed: int, *, quick: bool
) -> None:
    """Earlier, such scans were PASS, or WARN with exit code 0, or named every node of the rail."""
    found = report(nodes, slow, seed=seed, quick=quick)
    assert found.verdict in (Verdict.INCONCLUSIVE, Verdict.FAIL, *([Verdict.WARN] if quick else []))
    cells = () if quick else found.rows(ScanCellRow)
    assert all(row.verdict != Verdict.PASS for row in cells if NodeRail(int(row.node[4:]), row.rail) in slow)
    named = {node for row in found.rows(ScanPartRow) if row.verdict == Verdict.FAIL for node in row.nodes}
    assert named <= {f"node{node}" for node, _ in slow}


@pytest.mark.parametrize("nodes", [4, 5, 7, 12])
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_a_rail_that_is_slow_on_each_of_few_nodes_is_named(nodes: int, share: float) -> None:
    found = parts(fabric(nodes, rails=8), SimulatedFabric(USUAL_GB_S, of_nodes(range(nodes), range(3, 4), share)))
    assert [(each.kind, each.rail) for each in found] == [(PartKind.RAIL, 3)]


def test_a_rail_of_few_nodes_is_not_named_next_to_a_slow_node() -> None:
    for seed in range(50):
        slow = SimulatedFabric(USUAL_GB_S, of_nodes(range(3, 4), range(8), 0.8))
        found = course(fabric(4, rails=8), slow, seed)
        assert {each.nodes for each in decode(found, {})} == {(3,)}


def test_a_rail_of_few_nodes_is_not_named_next_to_a_slow_nic() -> None:
    for seed in range(20):
        found = course(fabric(4, rails=8), SimulatedFabric(USUAL_GB_S, {NodeRail(2, 3): 0.4}), seed)
        assert [(each.kind, each.nodes) for each in decode(found, {})] == [(PartKind.NIC, (2,))]


def test_a_leaf_with_healthy_nodes_is_not_named() -> None:
    found = report(60, of_nodes(range(24), range(3, 4), 0.5), leaf=32)
    assert not [row for row in found.rows(ScanPartRow) if row.leaf]
    well = [row for row in found.rows(ScanCellRow) if row.rail == 3 and int(row.node[4:]) >= 24]
    assert {row.verdict for row in well} == {Verdict.INCONCLUSIVE}


def test_most_rails_slow_on_all_nodes_are_found_by_faster_rails() -> None:
    found = course(fabric(16, rails=8), SimulatedFabric(USUAL_GB_S, of_nodes(range(16), range(5), 0.5)))
    assert faster_rails(found).keys() == {5, 6, 7}
    assert rails_without_level(found, NONE) == {0, 1, 2, 3, 4}
    (finding,) = level_findings(found, NONE)
    assert (finding.severity, finding.subject) == (Verdict.INCONCLUSIVE, "rails")
    assert finding.seen.startswith("rail 5, rail 6, rail 7: up to 2")
    assert list(level_findings(found, frozenset({0}))) == []


@pytest.mark.parametrize(("nodes", "leaf"), [(3, 0), (4, 0), (5, 0), (9, 4), (16, 0), (64, 32)])
def test_no_node_is_faster_than_normal_in_a_healthy_scan(nodes: int, leaf: int) -> None:
    for seed in range(4):
        for slow in ({}, {NodeRail(1, 0): 0.5}, of_nodes(range(1, 2), range(4), 0.8)):
            found = course(fabric(nodes, leaf=leaf), SimulatedFabric(USUAL_GB_S, slow), seed)
            assert (faster_cells(found), faster_rails(found)) == ({}, {})
            assert slow or not faster_nodes(found)


@pytest.mark.parametrize(("nodes", "slow", "leaf"), [(3, 1, 0), (4, 2, 0), (6, 3, 0), (12, 5, 0), (48, 32, 16)])
def test_a_third_of_slow_nodes_does_not_pass(nodes: int, slow: int, leaf: int) -> None:
    """A loss of 10 %, with healthy nodes reported as faster. One scan of six may miss it, because healthy nodes do
    not meet.
    """
    green = 0
    for seed in range(6):
        few = of_nodes(range(slow), range(8), 0.9)
        found = course(fabric(nodes, rails=8, leaf=leaf), SimulatedFabric(USUAL_GB_S, few), seed)
        bad = decode(found, {})
        green += report_of(ScanResult(found, bad), 1).verdict not in (Verdict.INCONCLUSIVE, Verdict.FAIL)
        assert {node for part in bad for node in part.nodes} <= set(range(slow))
        assert faster_nodes(found).keys() <= set(range(slow, nodes))
    assert green <= 1


def test_nodes_close_to_each_other_are_not_faster() -> None:
    known = fabric(64, rails=8, leaf=8)
    uplinks = {(leaf, rail): 0.8 for leaf in dict.fromkeys(filter(None, known.leaves)) for rail in range(8)}
    for seed in range(3):
        hidden = replace(known, leaves=(None,) * 64)
        machine = SimulatedFabric(USUAL_GB_S, {}, {}, uplinks)
        found = course(known, machine, seed)
        found.fabric = hidden
        assert faster_nodes(found) == {}


def test_two_nodes_of_a_faster_kind_among_hundreds_do_not_make_the_others_slow() -> None:
    of = fabric(200)
    model = SimulatedFabric(USUAL_GB_S, of_nodes(range(2, 200), range(4), 0.5))
    assert all(not faster_cells(course(of, model, seed)) for seed in range(3))


@pytest.mark.parametrize("rails", [1, 4])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_one_of_two_leaves_that_is_slow_inside_is_named(rails: int, share: float) -> None:
    slow = {("leaf1", rail): share for rail in range(rails)}
    for seed in range(3):
        of = fabric(64, rails=rails, leaf=32)
        found = decode(course(of, SimulatedFabric(USUAL_GB_S, leaf_rails=slow), seed), {})
        assert [part.leaf for part in found if part.leaf] == ["leaf1"]
        assert {node for part in found for node in part.nodes} == set(range(32, 64))


def test_slow_uplinks_of_two_leaves_name_no_leaf() -> None:
    for seed in range(4):
        for nodes, leaf in ((64, 32), (16, 8), (12, 6)):
            of = fabric(nodes, leaf=leaf)
            uplinks = {("leaf1", rail): 0.7 for rail in range(4)}
            for model in (SimulatedFabric(USUAL_GB_S), SimulatedFabric(USUAL_GB_S, uplinks=uplinks)):
                assert [part for part in decode(course(of, model, seed), {}) if part.leaf] == []


@pytest.mark.parametrize("nodes", [3, 4, 5, 16])
def test_a_healthy_scan_of_few_nodes_fails_nobody(nodes: int) -> None:
    """Seeds 52, 216, 225 and 297 named a NIC at 93 to 96 % of 3 nodes. 46 and 227 doubted a 3 % faster pair."""
    healthy = fabric(nodes, rails=8)
    for seed in (46, 52, 216, 225, 227, 297):
        found = course(healthy, SimulatedFabric(USUAL_GB_S), seed)
        result = report_of(ScanResult(found, decode(found, {})), 1)
        assert result.verdict in (Verdict.PASS, Verdict.WARN), seed
        assert Verdict.FAIL not in {row.verdict for row in result.rows(ScanCellRow)}
        assert Tool.SLURM not in {row.tool for row in result.rows(ExclusionRow)}


@pytest.mark.parametrize(("share", "severity"), [(0.96, Verdict.WARN), (0.8, Verdict.FAIL)])
def test_a_node_is_excluded_only_for_a_loss_that_the_scan_surely_detects(share: float, severity: Verdict) -> None:
    found = report(64, {NodeRail(5, 2): share}, seed=3)
    assert [row.verdict for row in found.rows(ScanPartRow)] == [severity]
    excluded = [row.line for row in found.rows(ExclusionRow) if row.tool is Tool.SLURM]
    assert excluded == (["--exclude=node5"] if severity is Verdict.FAIL else [])
