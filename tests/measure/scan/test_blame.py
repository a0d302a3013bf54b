"""Cells that are blamed for failed pairs."""

import random
from itertools import pairwise

import pytest

from gpubench.measure.scan.rounds import blamed
from gpubench.measure.scan.verdicts import PartKind
from gpubench.model.results.scan import NodeRail, PairSample
from gpubench.simulated.scan import SimulatedFabric
from tests.measure.scan.fabrics import USUAL_GB_S, fabric, parts


def failures(*pairs: tuple[int, int], culprit: int | None = None) -> dict[NodeRail, list[PairSample]]:
    found: dict[NodeRail, list[PairSample]] = {}
    for first, second in pairs:
        sample = PairSample(first, second, 0, 0.0, "not done within the deadline", culprit)
        for node in (first, second) if culprit is None else (culprit,):
            found.setdefault(NodeRail(node, 0), []).append(sample)
    return found


@pytest.mark.parametrize(
    ("pairs", "nodes"),
    [
        ([(0, 1)], set()),
        ([(0, 1), (1, 0)], set()),
        ([(0, 1), (1, 2)], {1}),
        (list(pairwise([0, 1, 2, 3, 4])), {1, 3}),
        (list(pairwise([4, 1, 0, 2, 3])), {1, 2}),
        ([(9, 1), (9, 2), (9, 3), (5, 3), (5, 6)], {9, 5}),
    ],
)
def test_the_fewest_cells_that_explain_all_failures_are_blamed(pairs: list[tuple[int, int]], nodes: set[int]) -> None:
    assert {cell.node for cell in blamed(failures(*pairs))} == nodes


def test_a_failure_reported_by_the_supervisor_explains_those_of_partners() -> None:
    known = failures((1, 5), culprit=1)
    found = failures((0, 1), (0, 2))
    found[NodeRail(1, 0)] += known[NodeRail(1, 0)]
    assert blamed(found) == [NodeRail(1, 0)]


@pytest.mark.parametrize("since", [1, 2, 3])
@pytest.mark.parametrize(("nodes", "hanging"), [(8, 2), (8, 3), (16, 4), (33, 2)])
def test_only_hanging_nodes_are_named(nodes: int, hanging: int, since: int) -> None:
    for seed in range(4):
        bad = random.Random(seed).sample(range(nodes), hanging)
        found = parts(fabric(nodes), SimulatedFabric(USUAL_GB_S, hangs=dict.fromkeys(bad, since)))
        assert {part.kind for part in found} == {PartKind.NODE_HANGS}
        assert {node for part in found for node in part.nodes} == set(bad)
