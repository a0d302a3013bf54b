"""An error on one rank is an error on all ranks."""

import pytest

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs.rank import AgreedError, agree
from tests.fakes.ranks import ThreadGroup, run_ranks


def test_each_rank_has_its_result_if_all_succeed() -> None:
    assert run_ranks(3, lambda group: agree(group, lambda: group.rank * 10)) == [0, 10, 20]


def test_the_error_of_the_lowest_failing_rank_counts() -> None:
    def action(rank: int) -> str:
        if rank == 1:
            message = "no GPU here"
            raise CouldNotMeasureError(message)
        if rank == 2:
            message = "wrong option"
            raise UsageError(message)
        return "fine"

    def body(group: ThreadGroup) -> tuple[str, int]:
        with pytest.raises(AgreedError) as caught:
            agree(group, lambda: action(group.rank), place=f"rank {group.rank}")
        return str(caught.value.error), caught.value.error.exit_code

    assert run_ranks(3, body) == [("rank 1: no GPU here", 3)] * 3


def test_other_exceptions_are_not_agreed_on() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    def body(group: ThreadGroup) -> None:
        agree(group, fail)

    with pytest.raises(ZeroDivisionError):
        run_ranks(1, body)
