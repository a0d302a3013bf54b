"""Which ranks can be scanned, and what is said of others."""

import pytest

from gpubench.errors import UsageError
from gpubench.jobs.scan.checks import HOST, NCCL, check_backend, check_node_count, check_placement


def test_every_rank_of_a_node_is_a_rail() -> None:
    found = check_placement([0, 0, 1, 1, 2, 2], list("aabbcc"))
    assert found.ranks_by_node == ((0, 1), (2, 3), (4, 5))
    assert found.rails_by_rank == ((0,), (1,), (0,), (1,), (0,), (1,))
    assert found.node_by_rank == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


def test_ranks_need_not_be_in_the_order_of_their_nodes() -> None:
    assert check_placement([0, 1, 2, 0, 1, 2], list("abcabc")).ranks_by_node == ((0, 3), (1, 4), (2, 5))


def test_nodes_with_other_numbers_of_ranks_are_named() -> None:
    with pytest.raises(UsageError, match="nodes with 2 ranks, and others: c 1") as raised:
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
