"""The arithmetic of communication beside computation."""

import pytest

from gpubench.errors import UsageError
from gpubench.model.terms.overlap import OverlapTimes, describe_cap, parse_ctas, partner_operations


def times(**changed: float | None) -> OverlapTimes:
    """64 MiB beside two GEMMs of 1.48 ms on 4 H200s, in milliseconds, and a share of bandwidth of 10 %."""
    values: dict[str, float | None] = {
        "partner_alone": 2.96,
        "communication_alone": 0.334,
        "communication_first": 0.3674,
        "partner_together": 3.10,
        "communication_together": 1.85,
        "together": 3.10,
        "step": 3.11,
        "in_flight": 1.85,
    }
    return OverlapTimes(**values | changed)  # type: ignore[arg-type]


def test_waiting_and_sharing_are_what_slows_a_collective() -> None:
    found = times()
    assert found.communication_slowdown == pytest.approx(1.85 / 0.334)
    assert found.sharing_slowdown == pytest.approx(0.1)
    assert found.waiting_slowdown == pytest.approx((1.85 - 0.3674) / 0.334)
    parts = (1, found.waiting_slowdown or 0, found.sharing_slowdown or 0)
    assert sum(parts) == pytest.approx(found.communication_slowdown)


def test_what_was_not_told_apart_is_not_known() -> None:
    found = times(communication_first=None)
    assert (found.waiting_slowdown, found.sharing_slowdown) == (None, None)


def test_computation_is_slowed_while_the_collective_is_in_flight() -> None:
    assert times().compute_slowdown == pytest.approx(1.85 / (1.85 - 0.14))


def test_beside_a_collective_that_lasts_longer_it_is_the_plain_ratio() -> None:
    found = times(partner_together=3.5, communication_together=9.0, together=9.0, in_flight=3.5)
    assert found.compute_slowdown == pytest.approx(3.5 / 2.96)


def test_computation_that_lost_all_the_time_in_flight_has_no_ratio() -> None:
    assert times(partner_together=4.81).compute_slowdown is None
    assert times(partner_together=5.5).compute_slowdown is None


@pytest.mark.parametrize(("together", "hidden"), [(2.96, 1.0), (3.127, 0.5), (3.294, 0.0), (3.628, -1.0)])
def test_hidden_is_what_running_both_saves(together: float, hidden: float) -> None:
    assert times(together=together).hidden_share == pytest.approx(hidden)


def test_a_step_computes_twice_as_long_as_it_communicates_and_an_operation_more() -> None:
    assert partner_operations(0.334e-3, 1.48e-3) == 2
    assert partner_operations(1.233e-3, 1.48e-3) == 3
    assert partner_operations(4.56e-3, 1.48e-3) == 8


def test_caps_are_numbers_and_nccl_s_own() -> None:
    assert parse_ctas(["own,16", "8,16"]) == (None, 16, 8)
    assert [describe_cap(each) for each in (None, 1, 8)] == ["NCCL's own", "1 CTA", "8 CTAs"]


@pytest.mark.parametrize("text", ["0", "-1", "65", "eight", "", "1.5", "²"])
def test_what_is_no_number_of_ctas_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--ctas"):
        parse_ctas([text])
