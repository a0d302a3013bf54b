"""Published steps that were at hand: what plan says of them may not get worse unseen."""

import statistics

import pytest

from benchmarks.plan_published import PublishedPrediction, predictions, published_steps


@pytest.fixture(scope="module")
def found() -> list[PublishedPrediction]:
    return list(predictions([each for each in published_steps() if each.use == "practice"]))


def test_ranges_hold_what_was_published(found: list[PublishedPrediction]) -> None:
    assert len(found) == 23
    assert sum(each.is_inside for each in found) >= 0.8 * len(found)
    assert max(each.most / each.least for each in found if "--fp8" not in each.published.options) < 1.7
    assert max(each.most / each.least for each in found) < 2


def test_communication_grows_with_the_machine_as_published(found: list[PublishedPrediction]) -> None:
    """From one row of a series the others follow: 7 B on 8, 128 and 512 GPUs, 30 B on 8 and 128."""
    errors = [abs(each.error) for each in found if each.error is not None]
    assert len(errors) == 3
    assert statistics.median(errors) < 2
    assert max(errors) < 5


def test_every_published_step_has_a_plan() -> None:
    steps = list(published_steps())
    assert {each.use for each in steps} == {"practice", "first_held_out", "second_held_out", "held_out"}
    assert len({(each.series, each.gpus, each.options) for each in steps}) == len(steps)
    assert all(each.tokens > 0 and each.plan.layouts for each in steps)
