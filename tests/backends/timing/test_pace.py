"""How loops are cut into groups by earlier durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.backends.timing import HostClockedLaunch, Pace, join_groups, join_launches
from gpubench.model.terms.ranks import Phase
from tests.fakes.progress import FakeProgress


def launch() -> None:
    pass


@given(st.integers(0, 300), st.integers(0, 9), st.floats(1e-7, 10))
def test_groups_hold_every_operation_and_take_no_longer_than_asked(count: int, replays: int, seconds: float) -> None:
    pace = Pace(0.02)
    assert pace.groups([launch] * 2) == [2]
    assert pace.measured(2 * seconds) == 2
    groups = pace.groups([launch] * count, replays)
    assert sum(groups) == (replays or count)
    each = seconds * (count if replays else 1)
    if len(groups) > 1:
        assert all(group == 1 or group * each <= 0.02 * 1.001 for group in groups)
    elif count:
        assert groups == [1] or seconds * count * max(1, replays) <= 0.02 * 1.001
    assert pace.measured(1) == (count * max(1, replays) if len(groups) == 1 and pace._single else 0)


@pytest.mark.parametrize("groups", [[2, 2, 1], [5], [1] * 5])
def test_a_group_that_is_through_is_told(groups: list[int]) -> None:
    progress, seen = FakeProgress(), []
    progress.enter(Phase.OPERATION)
    parts = join_groups([lambda: seen.append(progress.state().done)] * 5, groups, join_launches)
    HostClockedLaunch(parts, progress)()
    assert seen == [sum(groups[:number]) for number, group in enumerate(groups) for _ in range(group)]
    assert progress.state().done == 5


def test_launches_with_a_clock_know_how_long_each_group_took() -> None:
    progress, seen = FakeProgress(), []
    progress.enter(Phase.OPERATION)
    clocked = HostClockedLaunch(
        join_groups([lambda: seen.append(progress.state().done)] * 7, [3, 3, 1], join_launches), progress
    )
    for _ in range(2):
        clocked()
        assert len(clocked.batch_seconds()) == 2
        assert min(clocked.batch_seconds()) > 0
    assert seen[:7] == [0, 0, 0, 3, 3, 3, 6]
