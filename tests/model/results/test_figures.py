"""Figures that the last sentence and a gate go by."""

from dataclasses import replace

import pytest

from gpubench.model.results.figures import SpeedFigures
from tests.formats.sample import PAIR, ROW

JUDGED = replace(PAIR, verdict="PASS", verified="last")


@pytest.mark.parametrize("slowest_first", [True, False])
@pytest.mark.parametrize("verdict", [None, "SKIP"])
def test_one_pair_that_nobody_judged_is_no_gates_pass(verdict: str | None, *, slowest_first: bool) -> None:
    """Nor where a slower one, which the sentence tells, was judged."""
    pairs = [replace(JUDGED, bandwidth_gb_s=380.0), replace(PAIR, destination="GPU2", verdict=verdict)]
    figures = SpeedFigures()
    for each in pairs if slowest_first else pairs[::-1]:
        figures.add(each)
    (told,) = figures.all()
    assert (told.gb_s, told.is_judged, figures.is_unjudged) == (380.0, False, True)


def test_what_was_not_checked_is_known_beside_what_was() -> None:
    figures = SpeedFigures()
    figures.add(JUDGED)
    figures.add(replace(ROW, wrong=None))
    assert (figures.checked, figures.unchecked) == (True, True)


def test_a_pair_that_was_not_measured_has_no_data_to_check() -> None:
    figures = SpeedFigures()
    figures.add(JUDGED)
    figures.add(replace(PAIR, bandwidth_gb_s=None, verdict="ERROR"))
    assert (figures.checked, figures.unchecked, figures.is_unjudged) == (True, False, False)
