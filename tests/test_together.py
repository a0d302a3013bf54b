"""Cases that are tried together: each of them is, and those that fail are all told."""

from pathlib import Path

import pytest

from tests.together import together

TRIED: list[tuple[int, str]] = []


@together("number, word", [(1, "one"), (2, "two")])
def test_fixtures_come_to_every_case(number: int, word: str, tmp_path: Path) -> None:
    assert tmp_path.is_dir()
    TRIED.append((number, word))
    assert TRIED[-1][0] == len(TRIED)


def test_every_case_that_fails_is_told() -> None:
    @together("number", range(4), ids=lambda number: f"no. {number}")
    def is_even(number: int) -> None:
        assert number % 2 == 0, f"{number} is odd"

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed") as caught:
        is_even()
    assert [each.__notes__ for each in caught.value.exceptions] == [["of the case no. 1"], ["of the case no. 3"]]
