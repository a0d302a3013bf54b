"""Leaves that are slow as a whole."""

from collections.abc import Sequence

import pytest

from gpubench.measure.scan.judging import screening_yardstick
from gpubench.measure.scan.report import ScanResult, report_of
from gpubench.measure.scan.verdicts import PartKind, decode
from gpubench.model.results.scan import NodeRail, ScanFabric
from gpubench.model.terms.verdict import Verdict
from gpubench.simulated.scan import NOISE, SimulatedFabric
from tests.measure.scan.fabrics import USUAL_GB_S, course, fabric

RAILS = 8


def leaves_of(sizes: tuple[int, ...]) -> ScanFabric:
    leaves = tuple(f"leaf{leaf}" for leaf, size in enumerate(sizes) for _ in range(size))
    return ScanFabric(tuple(f"node{node}" for node in range(len(leaves))), RAILS, leaves)


def slow(*leaves: int, share: float) -> SimulatedFabric:
    rails = {(f"leaf{leaf}", rail): share for leaf in leaves for rail in range(RAILS)}
    return SimulatedFabric(USUAL_GB_S, leaf_rails=rails)


@pytest.mark.parametrize("nodes", [16, 32])
def test_one_of_four_leaves_that_is_5_percent_slow_is_named_and_no_node_behind_it(nodes: int) -> None:
    """Earlier, up to 23 healthy NICs and nodes of the leaf were named in one scan."""
    for seed in range(900, 902):
        found = course(fabric(4 * nodes, RAILS, nodes), slow(1, share=0.95), seed)
        assert [(part.kind, part.leaf) for part in decode(found, {})] == [(PartKind.LEAF, "leaf1")]


@pytest.mark.parametrize(
    ("sizes", "leaf", "rail", "share", "seed"),
    [
        ((16,) * 4, 3, 6, 0.95, 910005),
        ((16,) * 4, 3, 3, 0.95, 910013),
        ((5,) * 4, 2, 6, 0.93, 910004),
        ((5, 7, 9, 11, 13), 4, 7, 0.95, 910003),
        ((5, 7, 9, 11, 13), 3, 2, 0.95, 910016),
    ],
)
def test_no_nic_behind_a_slow_rail_of_a_small_leaf_is_named_and_no_other_leaf(
    sizes: tuple[int, ...], leaf: int, rail: int, share: float, seed: int
) -> None:
    """Earlier, the noise was estimated far too low, and 2 to 12 healthy NICs were named."""
    found = decode(
        course(leaves_of(sizes), SimulatedFabric(USUAL_GB_S, leaf_rails={(f"leaf{leaf}", rail): share}), seed), {}
    )
    assert [(part.kind, part.leaf, part.rail) for part in found] == [(PartKind.LEAF_RAIL, f"leaf{leaf}", rail)]


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("sizes", [(5,) * 4, (5, 7, 9, 11, 13), (16,) * 3])
def test_the_noise_is_known_of_small_leaves_and_after_two_rounds(sizes: tuple[int, ...], rounds: int) -> None:
    of = leaves_of(sizes)
    for seed in range(920, 922):
        samples = [
            sample
            for outcome in course(of, SimulatedFabric(USUAL_GB_S), seed).outcomes[:rounds]
            for sample in outcome.samples
        ]
        assert 0.7 * NOISE < screening_yardstick(of, samples).deviation < 1.5 * NOISE


def test_a_rail_of_a_leaf_of_few_nodes_is_no_uplink() -> None:
    for seed in range(900, 902):
        model = SimulatedFabric(USUAL_GB_S, leaf_rails={("leaf2", 5): 0.9})
        found = decode(course(fabric(28, RAILS, 7), model, seed), {})
        assert [(part.kind, part.leaf, part.rail) for part in found] == [(PartKind.LEAF_RAIL, "leaf2", 5)]


@pytest.mark.parametrize(("leaves", "bad"), [(2, (1,)), (3, (1, 2))])
def test_slow_leaves_without_a_healthy_majority_need_a_known_rate(leaves: int, bad: tuple[int, ...]) -> None:
    plain = fabric(leaves * 32, RAILS, 32)
    for rates, verdict in (((), Verdict.INCONCLUSIVE), ((USUAL_GB_S / 2 / 0.92,) * RAILS, Verdict.FAIL)):
        of = ScanFabric(plain.hosts, RAILS, plain.leaves, (), rates)
        found = course(of, slow(*bad, share=0.96), 901)
        parts = decode(found, {})
        report = report_of(ScanResult(found, parts), 1)
        assert report.verdict is verdict
        assert [part.leaf for part in parts] == ([f"leaf{leaf}" for leaf in bad] if rates else [])
        said = {name for finding in report.findings for name in finding.subjects}
        assert rates or said == {f"leaf{leaf}" for leaf in bad}


def test_the_slower_half_of_the_leaves_is_named_from_as_much_as_a_rail_is() -> None:
    for seed in range(940, 942):
        parts = decode(course(fabric(32, RAILS, 16), slow(1, share=0.9), seed), {})
        assert [(part.kind, part.leaf) for part in parts] == [(PartKind.LEAF, "leaf1")]


@pytest.mark.parametrize(("bad", "most"), [(range(RAILS), 0), ((3,), 2)])
def test_nodes_of_a_slow_leaf_of_three_are_not_named(bad: Sequence[int], most: int) -> None:
    """Earlier, 1.7 healthy NICs per scan were named behind a leaf that lost 5 %."""
    named = 0
    for seed in range(950, 970):
        model = SimulatedFabric(USUAL_GB_S, leaf_rails={("leaf2", rail): 0.95 for rail in bad})
        parts = decode(course(fabric(12, RAILS, 3), model, seed), {})
        named += sum(part.kind in (PartKind.NIC, PartKind.NODE) for part in parts)
    assert named <= most


def test_slow_nodes_of_a_leaf_that_is_too_small_to_be_judged_are_named_if_the_loss_tells_them_apart() -> None:
    """Earlier, up to five healthy NICs behind a slow leaf of 15 nodes were named."""
    of = leaves_of((3, 5, 7))
    cells = [(node, rail) for node in (8, 9, 10, 11) for rail in (2,)]
    for share, named in ((0.92, 0), (0.5, 4)):
        model = SimulatedFabric(USUAL_GB_S, cells={NodeRail(*cell): share for cell in cells})
        found = course(of, model, 931)
        parts = decode(found, {})
        verdict = report_of(ScanResult(found, parts), 1).verdict
        assert len(parts) == named
        assert verdict is (Verdict.FAIL if named else Verdict.INCONCLUSIVE)


@pytest.mark.parametrize("seed", [2, 3, 15])
def test_no_node_behind_a_slow_leaf_is_named_if_no_majority_tells_which_leaves_are_healthy(seed: int) -> None:
    """Earlier, up to six healthy nodes and NICs behind the leaf of 7 nodes were named."""
    found = course(leaves_of((3, 5, 7)), slow(2, share=0.8), 91000 + seed)
    parts = decode(found, {})
    assert not [part for part in parts if part.kind in (PartKind.NIC, PartKind.NODE)]
    assert report_of(ScanResult(found, parts), 1).verdict is not Verdict.PASS
