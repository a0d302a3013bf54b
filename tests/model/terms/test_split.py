"""Groups of ranks: by node, by place in the node, and by number."""

import pytest
from hypothesis import given
from hypothesis import strategies as s

from gpubench.errors import UsageError
from gpubench.model.terms.ranks import SPLITS, RankIdentity, check_split, split_ranks


def ranks_on(nodes: int, per_node: int) -> list[RankIdentity]:
    return [
        RankIdentity(rank=rank, host=f"n{rank // per_node}", node=rank // per_node, local_rank=rank % per_node, pid=1)
        for rank in range(nodes * per_node)
    ]


def named(text: str, identities: list[RankIdentity]) -> dict[str, tuple[int, ...]]:
    return {group.name: group.ranks for group in split_ranks(text, identities)}


def test_two_nodes_of_four() -> None:
    identities = ranks_on(2, 4)
    assert named("node", identities) == {"node n0": (0, 1, 2, 3), "node n1": (4, 5, 6, 7)}
    assert named("rail", identities) == {f"rail {rail}": (rail, rail + 4) for rail in range(4)}
    assert list(named("pairs", identities)) == ["ranks 0-1", "ranks 2-3", "ranks 4-5", "ranks 6-7"]
    assert list(named("3", identities)) == ["ranks 0-2", "ranks 3-5", "ranks 6-7"]
    assert named("64", identities) == {"ranks 0-7": tuple(range(8))}


@pytest.mark.parametrize("text", [*SPLITS[:-1], "2", "64"])
def test_a_split_that_means_something_is_taken(text: str) -> None:
    check_split(text)


@pytest.mark.parametrize(("text", "nodes", "per_node"), [("node", 4, 1), ("rail", 1, 4), ("pairs", 1, 5), ("3", 1, 4)])
def test_nobody_is_left_alone(text: str, nodes: int, per_node: int) -> None:
    with pytest.raises(UsageError, match=f"--split {text} leaves rank . on n. alone") as raised:
        split_ranks(text, ranks_on(nodes, per_node))
    reasons = {"node": "has only one rank", "rail": "several nodes", "pairs": "is odd", "3": "not a multiple"}
    assert reasons[text] in raised.value.reason


@given(s.integers(1, 6), s.integers(1, 9), s.sampled_from([*SPLITS[:-1], "2", "3", "7"]))
def test_every_rank_is_in_one_group(nodes: int, per_node: int, text: str) -> None:
    identities = ranks_on(nodes, per_node)
    try:
        groups = split_ranks(text, identities)
    except UsageError:
        return
    assert sorted(rank for group in groups for rank in group.ranks) == list(range(len(identities)))
    assert len({group.name for group in groups}) == len(groups)
    assert all(list(group.ranks) == sorted(group.ranks) for group in groups)


@pytest.mark.parametrize("text", ["", "0", "1", "-2", "²", "nodes", "2.0", "N"])
def test_splits_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="--split"):
        check_split(text)
