"""Phase 0 between the rails of a node."""

from collections.abc import Callable, Sequence

import pytest

from gpubench.measure.scan.judging import (
    expected_inside,
    find_nodes_below_profile,
    local_parts,
    not_measured_inside,
    slow_figures,
    still_slow,
    wrong_data_inside,
)
from gpubench.measure.scan.rounds import InsideNodes
from gpubench.measure.scan.verdicts import PartKind
from gpubench.model.results.scan import LocalFigure, LocalQuantity, NodeRail, RingFailure, RingOutcome, ScanFabric
from gpubench.model.terms.verdict import WRONG_DATA, Verdict
from gpubench.profiles import find
from gpubench.simulated.scan import SimulatedFabric
from tests.measure.scan.fabrics import fabric, parts

Delivers = Callable[[Sequence[NodeRail], bool], RingOutcome]
FAST = 600.0


class Rings:
    """A measurer of rings that records the rings per step."""

    def __init__(self, delivers: Delivers) -> None:
        self.delivers = delivers
        self.steps: list[tuple[list[tuple[NodeRail, ...]], bool]] = []

    def rings(
        self, rings: Sequence[Sequence[NodeRail]], *, all_reduce: bool = False, repeats_failures: bool = False
    ) -> list[RingOutcome]:
        assert repeats_failures
        cells = [cell for ring in rings for cell in ring]
        assert len(cells) == len(set(cells))
        self.steps.append(([tuple(ring) for ring in rings], all_reduce))
        return [self.delivers(ring, all_reduce) for ring in rings]


def failing(ring: Sequence[NodeRail], seen: str, own: NodeRail | None = None) -> RingOutcome:
    return RingOutcome(0.0, {cell: RingFailure(cell.node, seen, is_own=cell == own) for cell in ring})


def slow_pairs(*slow: tuple[int, int, int], share: float = 0.1) -> Delivers:
    def delivers(ring: Sequence[NodeRail], _all_reduce: bool) -> RingOutcome:
        node, members = ring[0].node, {cell.rail for cell in ring}
        hit = any(node == each[0] and {*each[1:]} <= members for each in slow)
        return RingOutcome(FAST * (share if hit else 1.0) * (1 + 0.001 * (node % 3)))

    return delivers


def named(delivers: Delivers, rails: int = 8, nodes: int = 6) -> list[tuple[int, int | None, int | None]]:
    inside = InsideNodes(Rings(delivers), range(nodes), rails)
    first, again = inside.figures(), inside.figures()
    return [(part.node, part.gpu, part.partner) for part in local_parts(still_slow(slow_figures(first), again), rails)]


@pytest.mark.parametrize("rails", [2, 3, 4, 8])
def test_every_pair_of_a_node_meets_once_and_all_nodes_measure_at_once(rails: int) -> None:
    rings = Rings(slow_pairs())
    figures = InsideNodes(rings, range(3), rails).figures()
    pairs = [(figure.node, figure.gpu, figure.partner) for figure in figures if figure.quantity is LocalQuantity.PAIR]
    assert sorted(pairs) == [(node, a, b) for node in range(3) for a in range(rails) for b in range(a + 1, rails)]
    assert [len(asked) for asked, _ in rings.steps] == [3 * (rails // 2)] * (rails - 1 + rails % 2) + [3]
    assert [reduces for _, reduces in rings.steps] == [False] * (len(rings.steps) - 1) + [True]


def test_one_gpu_a_node_has_nothing_to_measure_inside() -> None:
    assert InsideNodes(Rings(slow_pairs()), range(3), 1).figures() == []


def test_equal_measurements_name_no_part() -> None:
    assert named(slow_pairs()) == []


def test_a_slow_pair_is_the_pair_and_a_gpu_that_is_slow_with_all_is_the_gpu() -> None:
    assert named(slow_pairs((4, 2, 5))) == [(4, 2, 5)]
    assert named(slow_pairs(*((1, 3, other) for other in range(8) if other != 3))) == [(1, 3, None)]
    assert named(slow_pairs((2, 0, 1)), rails=2) == [(2, 0, 1)]


def test_most_slow_gpus_of_a_node_are_a_slow_node() -> None:
    everything = [(3, a, b) for a in range(8) for b in range(a + 1, 8)]
    assert named(slow_pairs(*everything, share=0.6)) == [(3, None, None)]


def test_a_slow_all_reduce_alone_is_a_slow_node() -> None:
    def delivers(ring: Sequence[NodeRail], all_reduce: bool) -> RingOutcome:
        return RingOutcome(FAST * (0.5 if all_reduce and ring[0].node == 5 else 1.0))

    assert named(delivers) == [(5, None, None)]


def test_a_gpu_that_hangs_with_others_is_tried_twice_and_named() -> None:
    asked: list[Sequence[NodeRail]] = []

    def delivers(ring: Sequence[NodeRail], _all_reduce: bool) -> RingOutcome:
        if NodeRail(2, 6) not in ring:
            return RingOutcome(FAST)
        asked.append(ring)
        return failing(ring, "not done within the deadline")

    assert named(delivers) == [(2, 6, None)]
    assert len(asked) == 2, "every further try would cost a deadline"


def test_a_rail_whose_worker_died_is_left_to_the_first_round() -> None:
    asked: list[Sequence[NodeRail]] = []

    def delivers(ring: Sequence[NodeRail], _all_reduce: bool) -> RingOutcome:
        if NodeRail(2, 6) not in ring:
            return RingOutcome(FAST)
        asked.append(ring)
        return failing(ring, "its worker died (signal 9)", NodeRail(2, 6))

    assert named(delivers) == []
    assert len(asked) == 1


def test_a_part_named_in_phase_0_is_no_nic() -> None:
    slow = {LocalFigure(6, 2, LocalQuantity.PAIR, 60.0, 5): 0.1}
    (part,) = parts(fabric(16), SimulatedFabric(100.0), slow)
    assert (part.kind, part.nodes, part.gpu, part.partner) == (PartKind.GPU_PAIR, (6,), 2, 5)
    assert part.seen == "copies inside the node between GPU2 and GPU5: 60 GB/s"


def of(nodes: int) -> ScanFabric:
    return ScanFabric(tuple(f"node{n}" for n in range(nodes)), 2, (None,) * nodes)


def test_damaged_data_are_a_finding_however_rare() -> None:
    figure = LocalFigure(1, 0, LocalQuantity.PAIR, 0.0, 1, "wrong data arrived (3 wrong elements)")
    (finding,) = wrong_data_inside(of(3), [figure])
    assert (finding.id, finding.severity, finding.subject) == (WRONG_DATA, Verdict.FAIL, "node1 GPU0 and GPU1")


def test_a_measurement_that_failed_on_most_nodes_does_not_pass() -> None:
    late = [
        LocalFigure(node, 0, LocalQuantity.ALL_REDUCE, 0.0, None, "not done within the deadline") for node in (0, 1)
    ]
    well = LocalFigure(2, 0, LocalQuantity.ALL_REDUCE, 300.0)
    assert slow_figures([*late, well]) == {}
    (finding,) = not_measured_inside(of(3), ([*late, well], [*late, well]), [])
    assert (finding.id, finding.severity, finding.subject) == ("inside-not-measured", Verdict.ERROR, "node0-1")
    again = [each._replace(gb_s=300.0, failure="") for each in late]
    (finding,) = not_measured_inside(of(3), ([*late, well], [*again, well]), [])
    assert (finding.severity, finding.seen.endswith("in one of two attempts")) == (Verdict.WARN, True)
    assert list(not_measured_inside(of(3), (late, late), late)) == []


def test_nodes_below_their_profile_are_one_finding_though_all_are_alike() -> None:
    profile = find("hgx-h200-2", {})
    profiles = dict.fromkeys(range(3), profile)
    expected = expected_inside(profile, 2)
    assert expected[LocalQuantity.PAIR].value == pytest.approx(2 * 268_435_456 / 884.8e-6 / 1e9, rel=0.01)
    assert expected[LocalQuantity.ALL_REDUCE].value == pytest.approx(268_435_456 / 898.1e-6 / 1e9, rel=0.01)
    figures = [LocalFigure(node, 0, LocalQuantity.PAIR, 60.0, 1) for node in range(3)]
    (finding,) = find_nodes_below_profile(of(3), (figures, figures), profiles, [])
    assert (finding.severity, finding.subject) == (Verdict.FAIL, "node0-2")
    assert list(find_nodes_below_profile(of(3), (figures, figures), profiles, figures)) == []
    well = [figure._replace(gb_s=600.0) for figure in figures]
    assert list(find_nodes_below_profile(of(3), (figures, well), profiles, [])) == []
    mesh = expected_inside(find("hgx-a100-4", {}), 4)
    assert 2 * 60 < mesh[LocalQuantity.PAIR].value < 2 * 90, "four of twelve NVLinks, though a collective has all"
    assert expected_inside(None, 2) == {}
    assert expected_inside(find("generic-nvlink", {}), 2) == {}
