"""The ceiling of busbw, from links and what has to pass: known machines, and properties that must hold on any."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.collectives.record import exchanges, least_moved
from gpubench.collectives.registry import COLLECTIVES
from gpubench.model.paths.transport import Pair, drop_idle_pairs
from gpubench.model.paths.wiring import NodeNetwork, Wiring, Work, busbw_limit, exchange_limit, internode_limit
from gpubench.model.terms.operation import DataType
from tests.model.paths.test_wiring import nodes_of, wiring


def ring(*ranks: int) -> list[Pair]:
    return [(rank, ranks[(at + 1) % len(ranks)]) for at, rank in enumerate(ranks)]


def chain(*ranks: int) -> list[Pair]:
    up = list(pairwise(ranks))
    return up + [(other, one) for one, other in up]


def machine(name: str, *faults: str) -> Wiring:
    nodes = nodes_of(name, *faults)
    return wiring(nodes, per_node=len(nodes[0].gpus))


def work_of(name: str, ranks: int) -> tuple[Work, list[Pair]]:
    collective = next(each for each in COLLECTIVES if each.name == name)
    layout = collective.layout(1 << 20, DataType.FLOAT32, ranks)
    moved = [least_moved(collective, layout, rank, ranks, 0) for rank in range(ranks)]
    due = [(each.sent / layout.largest, each.received / layout.largest) for each in moved]
    return Work(collective.busbw_factor(ranks), due), list(exchanges(collective, layout, ranks, 0))


def test_a_ring_over_nvswitch_is_bound_by_a_gpus_links() -> None:
    assert busbw_limit("RING", ring(0, 1, 2, 3), machine("hgx-h200-4")).gb_s == pytest.approx(450)


def test_a_ring_is_as_slow_as_the_gpu_with_the_fewest_links() -> None:
    wires = machine("hgx-h200-4", "gpu2:nvlink=12")
    assert busbw_limit("RING", ring(0, 1, 2, 3), wires).gb_s == pytest.approx(300)


def test_without_nvlinks_it_is_the_pcie_link() -> None:
    wires = machine("rtx-4090-2")
    assert busbw_limit("RING", ring(0, 1), wires).gb_s == wires.limit((0, 1)).gb_s


def test_a_tree_is_bound_by_the_mean() -> None:
    wires = machine("hgx-h200-4", "gpu2:nvlink=12")
    limit = busbw_limit("TREE", chain(0, 1, 2, 3), wires)
    assert limit.gb_s == pytest.approx((450 + 450 + 300 + 300) / 4)


def test_the_mean_is_that_of_ranks_that_send() -> None:
    limit = busbw_limit("TREE", [(0, 2), (1, 2)], machine("hgx-h200-4", "gpu0:nvlink=12"))
    assert limit.gb_s == pytest.approx((300 + 450) / 2)
    assert limit.note == "mean of 2 ranks' links"


@pytest.mark.parametrize("name", ["alltoall", "gather", "scatter", "sendrecv"])
def test_exchanges_over_nvswitch_reach_a_gpus_links(name: str) -> None:
    work, pairs = work_of(name, 4)
    assert exchange_limit(work, pairs, machine("hgx-h200-4")).gb_s == pytest.approx(450)


def test_what_is_not_known_says_why() -> None:
    two = machine("hgx-h200-2*2")
    work, pairs = work_of("alltoall", 4)
    assert "no NIC with a known rate" in exchange_limit(work, pairs, two).note
    assert two.networks is None
    one = machine("hgx-h200-4")
    assert busbw_limit("NVLS", ring(0, 1, 2, 3), one).note == "no limit is known for NVLS"
    for nobody in (busbw_limit("RING", [], one), exchange_limit(work, [], one)):
        assert nobody.gb_s is None
        assert nobody.note == "the connections between ranks are unknown"


def test_the_root_closes_no_ring() -> None:
    due = {name: work_of(name, 4)[0].expected_bytes for name in ("broadcast", "reduce", "allreduce")}
    assert drop_idle_pairs(ring(0, 1, 2, 3), due["broadcast"]) == [(0, 1), (1, 2), (2, 3)]
    assert drop_idle_pairs(ring(0, 1, 2, 3), due["reduce"]) == [(1, 2), (2, 3), (3, 0)]
    assert drop_idle_pairs(ring(0, 1, 2, 3), due["allreduce"]) == ring(0, 1, 2, 3)


@given(down=st.lists(st.integers(1, 18), min_size=4, max_size=4), order=st.permutations(range(4)))
def test_no_algorithm_promises_more_than_the_links(down: list[int], order: list[int]) -> None:
    wires = machine("hgx-h200-4", *(f"gpu{gpu}:nvlink={links}" for gpu, links in enumerate(down)))
    slowest, fastest = 25 * min(down), 25 * max(down)
    found = busbw_limit("RING", ring(*order), wires).gb_s
    assert found == pytest.approx(slowest)
    tree = busbw_limit("TREE", chain(*order), wires).gb_s
    assert tree is not None
    assert slowest - 1e-9 <= tree <= fastest + 1e-9
    work, pairs = work_of("alltoall", 4)
    straight = exchange_limit(work, pairs, wires).gb_s
    assert straight == pytest.approx(slowest)


def test_between_nodes_the_nics_near_the_ranks_gpus_count() -> None:
    both = machine("hgx-h100-8*2", "node1.nic0:rate=200").networks
    assert both is not None
    weakest, strongest = both
    assert (weakest.node_gb_s, strongest.node_gb_s) == (375, 400)
    assert (weakest.nic_gb_s, strongest.nic_gb_s) == (25, 50)
    assert machine("hgx-h100-8").networks is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("alltoall", 93.75), ("gather", 93.75), ("scatter", 93.75), ("sendrecv", 50), ("reduce", 400)],
)
def test_what_goes_straight_from_rank_to_rank_is_bounded_by_the_nics_too(name: str, expected: float) -> None:
    """Of an all-to-all each of 16 ranks sends 8 of 16 blocks over a NIC of 50 GB/s: 50 / 0.5 × 15/16."""
    collective = next(each for each in COLLECTIVES if each.name == name)
    assert internode_limit("RING", collective, NodeNetwork(2, 16, 400.0, 50.0)).gb_s == pytest.approx(expected)


def test_an_nvlink_domain_counts_as_one_node() -> None:
    alone, racks = machine("gb200-nvl72").networks, machine("gb200-nvl72*2").networks
    assert alone is not None
    assert racks is not None
    assert alone[0].nodes == 1
    assert (racks[0].nodes, racks[0].ranks_per_node, racks[0].node_gb_s) == (2, 72, 72 * 50)
    assert busbw_limit("RING", ring(*range(72)), machine("gb200-nvl72")).gb_s == 900
