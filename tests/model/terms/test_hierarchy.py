"""Ranks by node and by place in their node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.terms.operation import DataType, ReduceOp, TwoLevels


@given(st.integers(2, 6), st.integers(2, 6), st.randoms())
def test_every_rank_meets_all_of_its_node_and_one_of_every_other(nodes: int, ranks: int, shuffled: object) -> None:
    named = [f"node{node}" for node in range(nodes) for _ in range(ranks)]
    shuffled.shuffle(named)  # type: ignore[attr-defined]
    levels = TwoLevels.of(named)
    assert (levels.node_count, levels.ranks_per_node) == (nodes, ranks)
    assert len(set(zip(levels.nodes, levels.places, strict=True))) == nodes * ranks
    for one, name in enumerate(named):
        assert {other for other, node in enumerate(levels.nodes) if node == levels.nodes[one]} == {
            other for other, each in enumerate(named) if each == name
        }


@pytest.mark.parametrize(
    ("nodes", "seen"),
    [
        ("aaaa", "all 4 ranks are on one node"),
        ("aaab", "nodes have from 1 to 3 ranks"),
        ("abcd", "every node has a single rank"),
    ],
)
def test_what_has_no_two_levels_is_refused(nodes: str, seen: str) -> None:
    with pytest.raises(UsageError, match=seen) as caught:
        TwoLevels.of(nodes)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("nodes", "dtype", "exact"),
    [
        ("aabb", DataType.BFLOAT16, True),
        ("aabb", DataType.INT8, False),
        ("aabbcc", DataType.FLOAT32, False),
        ("aaabbb", DataType.FLOAT32, False),
    ],
)
def test_an_average_of_averages_has_to_be_exact(nodes: str, dtype: DataType, exact: bool) -> None:
    levels = TwoLevels.of(nodes)
    levels.check_averages([ReduceOp.SUM], [dtype])
    if exact:
        levels.check_averages(tuple(ReduceOp), [dtype])
    else:
        with pytest.raises(UsageError, match="--op avg"):
            levels.check_averages(tuple(ReduceOp), [dtype])
