"""Pairs of nodes per round."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpubench.measure.scan.rounds import Schedule
from tests.measure.scan.fabrics import fabric


@given(nodes=st.integers(3, 70), leaf=st.sampled_from([0, 2, 4, 7]), seed=st.integers(0, 99))
def test_every_round_pairs_all_nodes_but_one_of_an_odd_number(nodes: int, leaf: int, seed: int) -> None:
    schedule = Schedule(fabric(nodes, leaf=leaf), seed)
    rounds = Counter[int]()
    for number in (1, 2, 3):
        pairs = schedule.screening(number, range(nodes))
        met = [node for pair in pairs for node in pair]
        assert len(set(met)) == len(met) == nodes - nodes % 2
        rounds.update(met)
    assert min(rounds[node] for node in range(nodes)) == 3 - nodes % 2


@given(nodes=st.integers(4, 70), seed=st.integers(0, 99))
def test_without_leaves_no_node_meets_a_partner_twice(nodes: int, seed: int) -> None:
    schedule = Schedule(fabric(nodes), seed)
    pairs = [frozenset(pair) for number in (1, 2, 3) for pair in schedule.screening(number, range(nodes))]
    assert len(set(pairs)) == len(pairs)


@given(leaves=st.integers(3, 9), leaf=st.sampled_from([2, 4, 8]), seed=st.integers(0, 99))
def test_one_round_stays_inside_leaves_and_the_others_leave_them(leaves: int, leaf: int, seed: int) -> None:
    of = fabric(leaves * leaf, leaf=leaf)
    schedule = Schedule(of, seed)
    everybody = range(leaves * leaf)
    assert all(of.inside(*pair) for pair in schedule.screening(1, everybody))
    assert not any(of.inside(*pair) for number in (2, 3) for pair in schedule.screening(number, everybody))


def test_few_nodes_between_leaves_never_meet_a_partner_twice() -> None:
    for seed in range(20):
        schedule = Schedule(fabric(24, leaf=4), seed)
        pairs = [frozenset(pair) for number in (2, 3, 4, 5) for pair in schedule._across(number, range(24))]
        assert len(set(pairs)) == len(pairs)


def test_a_leaf_with_more_than_half_of_all_nodes_is_paired() -> None:
    of = fabric(12, leaf=9)
    pairs = Schedule(of, 1).screening(2, range(12))
    assert len({node for pair in pairs for node in pair}) == 12


def test_the_schedule_depends_only_on_seed_and_living_nodes() -> None:
    one, other = (Schedule(fabric(40, leaf=8), 5).screening(2, nodes) for nodes in (range(40), range(39, -1, -1)))
    assert one == other
    assert one != Schedule(fabric(40, leaf=8), 6).screening(2, range(40))


@given(suspects=st.integers(1, 30), good=st.integers(1, 40), seed=st.integers(0, 9))
def test_suspects_meet_another_good_node_every_time(suspects: int, good: int, seed: int) -> None:
    schedule = Schedule(fabric(suspects + good), seed)
    bad, well = range(suspects), range(suspects, suspects + good)
    met: list[tuple[int, int]] = []
    for number in range(1, 4):
        judged, others = schedule.against_good(number, bad, well)
        assert len(judged) == min(suspects, good)
        assert all((one in bad) and (other in well) for one, other in judged)
        everybody = [node for pair in (*judged, *others) for node in pair]
        assert len(set(everybody)) == len(everybody) >= suspects + good - 1
        met += judged
    if suspects <= good and good >= 3:
        assert len(set(met)) == len(met)


def test_suspects_take_turns_if_they_outnumber_good_nodes() -> None:
    schedule = Schedule(fabric(9), 1)
    seen = {one for number in (1, 2, 3) for one, _ in schedule.against_good(number, range(6), range(6, 9))[0]}
    assert seen == set(range(6))


def test_no_node_gives_no_pair() -> None:
    assert Schedule(fabric(4), 1).screening(1, []) == ()
    assert Schedule(fabric(4), 1).screening(1, [3]) == ()
