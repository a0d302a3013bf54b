"""Predictions of the steps that were recorded on two H200s: none of them may get worse unseen."""

import statistics

import pytest

from benchmarks.plan_validation import FOLDER, Cell, cells, regrets


@pytest.fixture(scope="module")
def found() -> list[Cell]:
    return list(cells(FOLDER))


def is_held_up_by_its_host(cell: Cell) -> bool:
    """FSDP2 of 24 small blocks takes 104 to 125 ms where a GPU computes for 46: the host issues slower than that."""
    return cell.layout == "fsdp2" and cell.model == "gpt-0.3B"


def test_errors_are_those_of_the_page(found: list[Cell]) -> None:
    errors = [abs(each.error) for each in found if not is_held_up_by_its_host(each)]
    assert len(found) == 81
    assert statistics.median(errors) < 2.6
    assert max(errors) < 12


def test_the_healthy_fabric_is_predicted_within_the_bounds(found: list[Cell]) -> None:
    healthy = [each for each in found if each.fabric == "healthy" and not is_held_up_by_its_host(each)]
    assert statistics.median(abs(each.error) for each in healthy) < 2
    assert max(abs(each.error) for each in healthy) < 7
    assert statistics.median(abs(each.added_error) for each in healthy) < 20


def test_the_staged_fabric_is_predicted_from_its_curves(found: list[Cell]) -> None:
    staged = [each for each in found if each.fabric == "staged" and not is_held_up_by_its_host(each)]
    assert statistics.median(abs(each.error) for each in staged) < 5
    assert statistics.median(abs(each.added_error) for each in staged) < 25
    beside_blocks = [each for each in cells(FOLDER, "blocks") if each.fabric == "staged"]
    beside_blocks = [each for each in beside_blocks if not is_held_up_by_its_host(each)]
    assert statistics.median(abs(each.error) for each in beside_blocks) < 3


def test_the_model_that_was_held_out_is_no_worse(found: list[Cell]) -> None:
    held_out = [each for each in found if each.is_held_out]
    assert len(held_out) == 9
    assert max(abs(each.error) for each in held_out) < 4


def test_what_a_host_holds_up_is_underestimated(found: list[Cell]) -> None:
    """The simulation has no host: it has to be said of such a model, and is, in docs/plan.md."""
    assert all(each.error < -20 for each in found if is_held_up_by_its_host(each))


def test_recommended_buckets_cost_little(found: list[Cell]) -> None:
    costs = [regret for _, regret, _ in regrets(found)]
    assert len(costs) == 10
    assert statistics.median(costs) < 2
