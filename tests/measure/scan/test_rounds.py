"""Scans of simulated fabrics."""

import pytest

from gpubench.measure.scan.rounds import scan
from gpubench.measure.scan.verdicts import PartKind, decode
from gpubench.model.results.scan import (
    BeforeRounds,
    LocalFigure,
    LocalQuantity,
    NodeRail,
    PlannedRound,
    RoundOutcome,
    ScanPhase,
)
from gpubench.simulated.scan import SimulatedFabric
from tests.measure.scan.fabrics import USUAL_GB_S, Recorded, course, fabric, parts


@pytest.mark.parametrize("nodes", [3, 4, 5, 6, 9, 33, 128])
@pytest.mark.parametrize("leaf", [0, 8])
def test_one_bad_nic_is_named_and_nothing_else(nodes: int, leaf: int) -> None:
    found = parts(fabric(nodes, leaf=leaf), SimulatedFabric(USUAL_GB_S, {NodeRail(nodes - 1, 2): 0.5}))
    assert [(each.kind, each.nodes, each.rail) for each in found] == [(PartKind.NIC, (nodes - 1,), 2)]
    assert found[0].share == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("nodes", [3, 8, 64])
def test_healthy_nodes_have_no_finding(nodes: int) -> None:
    for seed in range(8):
        assert course(fabric(nodes), SimulatedFabric(USUAL_GB_S), seed).confirmed == {}


def test_a_quiet_fabric_is_done_after_three_rounds() -> None:
    assert len(course(fabric(16), SimulatedFabric(USUAL_GB_S, noise=0.001, usual_dips=0.0)).outcomes) == 3


def test_never_more_than_eleven_rounds_and_quick_is_three() -> None:
    many = SimulatedFabric(USUAL_GB_S, {NodeRail(node, 1): 0.5 for node in range(0, 60, 7)}, hangs={3: 2}, dies={5: 4})
    assert len(course(fabric(60), many).outcomes) == 11
    quick = course(fabric(60), many, quick=True)
    assert len(quick.outcomes) == 3
    assert quick.confirmed == {}
    assert {cell.node for cell in quick.suspects} >= set(range(0, 60, 7))


def test_all_rails_of_a_node_are_the_node_and_two_rails_with_one_nic_are_the_nic() -> None:
    whole = parts(fabric(20), SimulatedFabric(USUAL_GB_S, {NodeRail(4, rail): 0.8 for rail in range(4)}))
    assert [(each.kind, each.nodes) for each in whole] == [(PartKind.NODE, (4,))]
    shared = fabric(20, nics=("mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"))
    found = parts(shared, SimulatedFabric(USUAL_GB_S, {NodeRail(4, 0): 0.7, NodeRail(4, 1): 0.7}))
    assert [(each.kind, len(each.cells)) for each in found] == [(PartKind.NIC, 2)]


def test_a_rail_of_a_leaf_differs_from_an_uplink() -> None:
    of = fabric(64, leaf=8)
    switch = parts(of, SimulatedFabric(USUAL_GB_S, leaf_rails={("leaf4", 2): 0.6}))
    assert [(each.kind, each.leaf, each.rail) for each in switch] == [(PartKind.LEAF_RAIL, "leaf4", 2)]
    uplink = parts(of, SimulatedFabric(USUAL_GB_S, uplinks={("leaf4", 2): 0.6}))
    assert [(each.kind, each.leaf, each.rail) for each in uplink] == [(PartKind.UPLINK, "leaf4", 2)]
    all_rails = parts(of, SimulatedFabric(USUAL_GB_S, leaf_rails={("leaf4", rail): 0.8 for rail in range(4)}))
    assert [(each.kind, each.leaf, each.rail) for each in all_rails] == [(PartKind.LEAF, "leaf4", None)]


def test_one_of_32_uplinks_is_seen_on_a_leaf_of_32_nodes() -> None:
    found = parts(fabric(256, leaf=32), SimulatedFabric(USUAL_GB_S, uplinks={("leaf3", 1): 31 / 32}))
    assert [(each.kind, each.leaf, each.rail) for each in found] == [(PartKind.UPLINK, "leaf3", 1)]


def test_a_node_in_a_slow_leaf_is_compared_with_its_leaf() -> None:
    model = SimulatedFabric(USUAL_GB_S, {NodeRail(33, 2): 0.7}, leaf_rails={("leaf4", 2): 0.8})
    found = parts(fabric(64, leaf=8), model)
    assert {(each.kind, each.rail) for each in found} == {(PartKind.LEAF_RAIL, 2), (PartKind.NIC, 2)}
    assert next(each.nodes for each in found if each.kind is PartKind.NIC) == (33,)


def test_all_nodes_of_a_small_leaf_are_the_leaf() -> None:
    found = parts(fabric(20, leaf=2), SimulatedFabric(USUAL_GB_S, {NodeRail(6, 1): 0.5, NodeRail(7, 1): 0.5}))
    assert [(each.kind, each.leaf, each.rail) for each in found] == [(PartKind.LEAF_RAIL, "leaf3", 1)]


def test_a_rail_that_is_slow_on_every_node_is_named() -> None:
    found = parts(fabric(24), SimulatedFabric(USUAL_GB_S, {NodeRail(node, 3): 0.8 for node in range(24)}))
    assert [(each.kind, each.rail) for each in found] == [(PartKind.RAIL, 3)]
    assert found[0].share == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_node_that_dies_is_gone_and_its_partners_are_not_blamed(number: int) -> None:
    of = fabric(24)
    measurer = Recorded(of, SimulatedFabric(USUAL_GB_S, dies={17: number}))
    found = scan(of, 1, measurer, quick=False, keep=lambda *_: None)
    assert found.gone == {17: (number, "its supervisor stopped answering")}
    assert not any(17 in pair for planned in measurer.planned[number:] for pair in planned.pairs)
    assert [(part.kind, part.nodes) for part in parts(of, SimulatedFabric(USUAL_GB_S, dies={17: number}))] == [
        (PartKind.NODE_GONE, (17,))
    ]


def test_cells_that_failed_in_phase_0_take_part_in_no_round() -> None:
    of = fabric(24)
    measurer = Recorded(of, SimulatedFabric(USUAL_GB_S))
    before = BeforeRounds(
        {17: "its supervisor is gone"},
        {NodeRail(3, 1): "its worker died", **{NodeRail(5, rail): "its worker was stopped" for rail in range(4)}},
    )
    found = scan(of, 1, measurer, quick=False, keep=lambda *_: None, before=before)
    assert not any({17, 5} & set(pair) for planned in measurer.planned for pair in planned.pairs)
    assert all(NodeRail(3, 1) in planned.retired for planned in measurer.planned)
    assert [(each.kind, each.nodes, each.rail, each.seen) for each in decode(found, {})] == [
        (PartKind.NODE_GONE, (17,), None, "its supervisor is gone in phase 0"),
        (PartKind.RAIL_HANGS, (3,), 1, "its worker died"),
        (PartKind.NODE_HANGS, (5,), None, "its worker was stopped"),
    ]


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_a_hanging_node_is_separated_from_its_partners_and_left_out(number: int) -> None:
    of, model = fabric(24), SimulatedFabric(USUAL_GB_S, {NodeRail(1, 0): 0.5}, hangs={9: number})
    found = parts(of, model)
    assert [(each.kind, each.nodes) for each in found] == [(PartKind.NODE_HANGS, (9,)), (PartKind.NIC, (1,))]
    outcomes = course(of, model).outcomes
    failed = [outcome.number for outcome in outcomes if any(sample.failure for sample in outcome.samples)]
    assert len(failed) == 2


def test_a_hang_in_the_last_round_may_be_of_either_node() -> None:
    of = fabric(24)
    found = course(of, SimulatedFabric(USUAL_GB_S, {NodeRail(1, 0): 0.5}, hangs={9: 11}))
    assert found.retired() == {}
    assert len({cell.node for cell in found.failures()}) == 2


def test_a_slow_gpu_of_phase_0_is_named_instead_of_its_nic() -> None:
    slow = LocalFigure(6, 2, LocalQuantity.TO_HOST, 20.0)
    found = parts(fabric(16), SimulatedFabric(USUAL_GB_S, {NodeRail(6, 2): 0.5}), {slow: 0.4})
    assert [(each.kind, each.nodes, each.gpu, each.rail) for each in found] == [(PartKind.GPU, (6,), 2, 2)]
    alone = parts(fabric(16), SimulatedFabric(USUAL_GB_S), {slow: 0.4})
    assert [(each.kind, each.gpu, each.rail) for each in alone] == [(PartKind.GPU, 2, None)]
    most = {LocalFigure(6, gpu, LocalQuantity.FROM_HOST, 20.0): 0.4 for gpu in range(3)}
    assert [part.kind for part in parts(fabric(16), SimulatedFabric(USUAL_GB_S), most)] == [PartKind.NODE]


def test_confirmation_is_judged_by_its_own_rounds() -> None:
    of = fabric(32)

    class Recovers(Recorded):
        def measure(self, planned: PlannedRound) -> RoundOutcome:
            outcome = super().measure(planned)
            is_late = planned.phase is ScanPhase.CONFIRMATION
            return Recorded(of, SimulatedFabric(USUAL_GB_S)).measure(planned) if is_late else outcome

    model = SimulatedFabric(USUAL_GB_S, {NodeRail(3, 1): 0.5})
    found = scan(of, 1, Recovers(of, model), quick=False, keep=lambda *_: None)
    assert NodeRail(3, 1) in found.suspects
    assert found.confirmed == {}
