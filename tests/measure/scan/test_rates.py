"""Rails that are slower than the rate of their NICs on all nodes."""

import pytest
from msgspec.structs import replace

from gpubench.measure.scan.report import ScanResult, report_of
from gpubench.measure.scan.verdicts import all_rates_known, decode, rail_levels
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import Report
from gpubench.model.results.scan import NodeRail, ScanCellRow, ScanFabric, ScanPartRow
from gpubench.model.results.sentence import sentence
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.simulated.scan import SimulatedFabric
from tests.formats.sample import METADATA
from tests.measure.scan.fabrics import USUAL_GB_S, course, fabric

RATE = 50.0
RAILS = 4


def with_rates(nodes: int, *, leaf: int = 0, rates: tuple[float | None, ...] = RAILS * (RATE,)) -> ScanFabric:
    return replace(fabric(nodes, rails=RAILS, leaf=leaf), rates=rates)


def report(of: ScanFabric, model: SimulatedFabric, *, quick: bool = False) -> Report:
    found = course(of, model, quick=quick)
    return report_of(ScanResult(found, decode(found, {})), 1)


def below(found: Report) -> list[Finding]:
    return [finding for finding in found.findings if finding.id == "below-nic-rate"]


def all_nodes(nodes: int, share: float, rails: range = range(RAILS)) -> dict[NodeRail, float]:
    return {NodeRail(node, rail): share for node in range(nodes) for rail in rails}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("share", "verdict"), [(1.0, Verdict.PASS), (0.95, Verdict.PASS), (0.8, Verdict.WARN), (0.5, Verdict.FAIL)]
)
@pytest.mark.parametrize("nodes", [16, 17, 64])
def test_a_network_that_is_slow_for_all_nodes_does_not_pass(
    nodes: int, share: float, verdict: Verdict, *, quick: bool
) -> None:
    found = report(with_rates(nodes), SimulatedFabric(USUAL_GB_S, all_nodes(nodes, share)), quick=quick)
    assert found.verdict == verdict
    cells = {row.verdict for row in found.rows(ScanCellRow)}
    assert cells == ({Verdict.PASS} if verdict is Verdict.PASS else {Verdict.WARN})
    assert not list(found.rows(ScanPartRow))
    assert {each.severity for each in below(found)} == ({verdict} - {Verdict.PASS})


def test_a_bandwidth_above_the_nic_rate_is_an_error() -> None:
    found = report(with_rates(16, rates=RAILS * (RATE / 4,)), SimulatedFabric(USUAL_GB_S, {}))
    (finding,) = [each for each in found.findings if each.id == "above-limit"]
    assert (finding.severity, found.verdict) == (Verdict.ERROR, Verdict.ERROR)
    assert finding.expected.startswith("at most 25 GB/s in both directions")


def test_half_of_slow_nodes_are_not_reported_as_all() -> None:
    slow = {NodeRail(node, rail): 0.5 for node in range(0, 16, 2) for rail in range(RAILS)}
    found = report(with_rates(16), SimulatedFabric(USUAL_GB_S, slow))
    assert (found.verdict, below(found)) == (Verdict.INCONCLUSIVE, [])


def test_two_slow_nodes_of_three_do_not_pass() -> None:
    slow = {NodeRail(node, rail): 0.4 for node in (1, 2) for rail in range(RAILS)}
    (finding,) = below(report(with_rates(3), SimulatedFabric(USUAL_GB_S, slow)))
    assert (finding.severity, finding.subject) == (Verdict.FAIL, "all rails between nodes")


def test_a_slow_rail_is_reported_once_and_the_others_are_healthy() -> None:
    found = report(with_rates(16), SimulatedFabric(USUAL_GB_S, all_nodes(16, 0.4, range(2, 3))))
    assert below(found) == []
    verdicts = {row.rail: row.verdict for row in found.rows(ScanCellRow)}
    assert verdicts == {0: Verdict.PASS, 1: Verdict.PASS, 2: Verdict.FAIL, 3: Verdict.PASS}


def test_a_spine_with_half_the_bandwidth_of_leaves_is_a_doubt() -> None:
    """Comparing leaves cannot show slow uplinks of all leaves, and many networks are built like this."""
    uplinks = {(f"leaf{leaf}", rail): 0.4 for leaf in range(4) for rail in range(RAILS)}
    (finding,) = below(report(with_rates(64, leaf=16), SimulatedFabric(USUAL_GB_S, uplinks=uplinks)))
    assert finding.severity is Verdict.WARN
    assert "between leaves" in finding.seen


def test_rails_without_a_rate_are_compared_only_with_each_other() -> None:
    slow = SimulatedFabric(USUAL_GB_S, all_nodes(16, 0.4))
    unknown = course(with_rates(16, rates=()), slow)
    assert not all_rates_known(unknown)
    assert below(report(with_rates(16, rates=()), slow)) == []
    assert not rail_levels(course(with_rates(16, rates=(0.0, -RATE, float("nan"), None)), slow))
    in_part = with_rates(16, rates=(None, RATE, RATE, RATE))
    found = course(in_part, slow)
    assert not all_rates_known(found)
    assert rail_levels(found).keys() == {1, 2, 3}
    (finding,) = below(report(in_part, slow))
    assert finding.subject == "rail1-3 between nodes"
    assert all_rates_known(course(with_rates(16), slow))


def test_rails_with_different_shares_are_separate_findings() -> None:
    slow = SimulatedFabric(USUAL_GB_S, all_nodes(16, 0.5))
    found = below(report(with_rates(16, rates=(RATE, RATE, RATE / 1.5, RATE / 1.5)), slow))
    assert {each.severity: each.subject for each in found} == {
        Verdict.FAIL: "rail0-1 between nodes",
        Verdict.WARN: "rail2-3 between nodes",
    }


@pytest.mark.parametrize(("options", "words"), [({"rates_known": True}, ""), ({}, "er than the others")])
def test_the_sentence_names_comparison_without_a_rate(options: dict[str, bool], words: str) -> None:
    of = with_rates(3)
    metadata = replace(METADATA, subject="scan", hosts=list(of.hosts), options={"sure_loss_percent": 7.2, **options})
    said = sentence(metadata, report(of, SimulatedFabric(USUAL_GB_S)), SpeedFigures())
    assert said == f"PASS: all 3 nodes are healthy (a node 7 % slow{words} would have been detected)"
