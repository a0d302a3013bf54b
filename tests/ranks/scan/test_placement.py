"""Which ranks can be scanned, and the error for others."""

import pytest

from gpubench.errors import UsageError
from gpubench.jobs.rounds import HOST, NCCL, check_backend, check_node_count, check_placement
from gpubench.model.results.scan import NodeRail


def test_every_rank_of_a_node_is_a_rail() -> None:
    found = check_placement([0, 0, 1, 1, 2, 2], list("aabbcc"))
    assert found.ranks_by_node == ((0, 1), (2, 3), (4, 5))
    assert found.rails_by_rank == ((0,), (1,), (0,), (1,), (0,), (1,))
    assert found.node_by_rank == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


def test_of_a_rank_alone_on_its_host_every_gpu_is_a_rail() -> None:
    found = check_placement([0, 1, 2], list("abc"), [4, 4, 4])
    assert found.rails_by_rank == ((0, 1, 2, 3),) * 3
    assert found.rank_by_rail[NodeRail(2, 3)] == 2
    with pytest.raises(UsageError, match="nodes with 4 GPUs, but these differ: b 3"):
        check_placement([0, 1, 2], list("abc"), [4, 3, 4])


def test_ranks_that_are_nodes_of_one_host_have_a_gpu_each() -> None:
    assert check_placement([0, 1, 2], list("aaa"), [4, 4, 4]).rails_by_rank == ((0,),) * 3


def test_ranks_with_a_gpu_each_are_rails_and_fewer_ranks_than_gpus_are_refused() -> None:
    nodes, hosts = [0, 0, 1, 1, 2, 2], list("aabbcc")
    for visible in (1, 2):
        assert check_placement(nodes, hosts, [visible] * 6).rails_by_rank == ((0,), (1,)) * 3
    with pytest.raises(UsageError, match="2 ranks on nodes of 8 GPUs") as raised:
        check_placement(nodes, hosts, [8] * 6)
    assert "ppr:8:node" in raised.value.next_step


def test_ranks_need_not_be_in_the_order_of_their_nodes() -> None:
    assert check_placement([0, 1, 2, 0, 1, 2], list("abcabc")).ranks_by_node == ((0, 3), (1, 4), (2, 5))


def test_nodes_with_other_numbers_of_ranks_are_named() -> None:
    with pytest.raises(UsageError, match="nodes with 2 ranks, but these differ: c 1") as raised:
        check_placement([0, 0, 1, 1, 2], list("aabbc"))
    assert "ppr:1:node" in raised.value.next_step


def test_more_ranks_than_a_message_holds_are_refused() -> None:
    with pytest.raises(UsageError, match="65 ranks on each node"):
        check_placement([0] * 65 + [1] * 65, ["a"] * 65 + ["b"] * 65)


@pytest.mark.parametrize(("nodes", "said"), [(1, "one node"), (2, "two nodes")])
def test_too_few_nodes_to_tell_apart(nodes: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_node_count(nodes)
    check_node_count(3)


def test_gpus_are_measured_where_every_rank_has_one() -> None:
    hosts = ["a", "a", "b", "b"]
    assert check_backend(None, [0, 0, 0, 0], hosts) == HOST
    assert check_backend(HOST, [8, 8, 8, 8], hosts) == HOST
    assert check_backend(None, [2, 2, 8, 8], hosts) == check_backend(NCCL, [2, 2, 2, 2], hosts) == NCCL
    for asked, gpus in ((None, [2, 2, 1, 1]), (NCCL, [2, 2, 0, 0])):
        with pytest.raises(UsageError, match=r"b \d GPUs? for 2 ranks") as caught:
            check_backend(asked, gpus, hosts)
        assert "a 2" not in str(caught.value)
