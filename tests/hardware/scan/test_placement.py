"""Which ranks can be scanned, and what is said of others."""

import pytest

from gpubench.errors import UsageError
from gpubench.jobs.scan.checks import check_node_count, check_placement


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
