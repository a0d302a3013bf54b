"""The cap with the shortest step, and whether chance may have made it so."""

import pytest
from msgspec.structs import replace

from gpubench.measure.collective.cases import JobFacts
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.terms.overlap import OverlapTimes, Partner, StepSample
from gpubench.model.terms.verdict import Origin
from gpubench.training.overlap_options import OverlapPlan
from gpubench.training.overlap_steps import overlap_row, shortest_steps

TIMES = OverlapTimes(
    partner_alone=3e-3,
    communication_alone=1e-3,
    communication_first=1.2e-3,
    partner_together=3.2e-3,
    communication_together=2.7e-3,
    together=3.2e-3,
    step=3.2e-3,
    in_flight=2.7e-3,
)


def row(
    ctas: int | None, step_us: float, *, interval: float | None = 0.1, wrong: int = 0, size: int = 2**20
) -> OverlapRow:
    times = replace(TIMES, step=step_us * 1e-6)
    sample = StepSample(times=times, partner_count=3, steps=20, step_ci95_percent=interval, wrong=wrong)
    return overlap_row(OverlapPlan(), size, Partner.GEMM, ctas, JobFacts("nccl", Origin.MEASURED, 2, 1), sample)


def test_what_is_hidden_of_a_collective_is_not_told_by_steps_that_differ_by_more() -> None:
    """An all-reduce of 1 MiB takes 23 µs on 2 H200s and steps of 3,210 µs differed by 10 %: it read -1273 % hidden."""
    assert row(None, 3200, interval=31).hidden_share == pytest.approx(0.8)
    assert row(None, 3200, interval=32).hidden_share is None
    assert row(None, 3200, interval=None).hidden_share == pytest.approx(0.8)


def test_a_cap_that_makes_steps_shorter_is_told_with_its_gain() -> None:
    rows = [row(None, 1000), row(8, 950), row(2, 1200)]
    (found,) = shortest_steps(rows, {("gemm", 2**20): 1010e-6})
    assert found.ctas == 8
    assert found.step_us == pytest.approx(950)
    assert found.own_step_us == pytest.approx(1000)
    assert found.own_drift_percent == pytest.approx(1)
    assert found.gain_percent == pytest.approx(100 * 55 / 1005)
    assert found.noise_percent == pytest.approx(1)
    assert found.beyond_noise is True


def test_a_gain_within_the_drift_is_none_worth_naming() -> None:
    (found,) = shortest_steps([row(None, 1000), row(8, 990)], {("gemm", 2**20): 970e-6})
    assert found.own_drift_percent == pytest.approx(-3)
    assert found.gain_percent == 0
    assert found.beyond_noise is False


def test_nccl_s_own_number_may_be_the_best() -> None:
    (found,) = shortest_steps([row(None, 900), row(8, 950)], {})
    assert (found.ctas, found.gain_percent, found.own_drift_percent) == (None, 0, None)


def test_without_intervals_the_noise_is_not_known() -> None:
    (found,) = shortest_steps([row(None, 1000, interval=None), row(8, 950)], {})
    assert (found.noise_percent, found.beyond_noise) == (None, None)


def test_wrong_data_win_nothing_and_one_cap_is_no_choice() -> None:
    assert list(shortest_steps([row(None, 1000), row(8, 500, wrong=1)], {})) == []
    assert list(shortest_steps([row(8, 500)], {})) == []


def test_caps_alone_have_a_best_without_a_gain() -> None:
    (found,) = shortest_steps([row(16, 1000), row(8, 950)], {})
    assert (found.ctas, found.own_step_us, found.gain_percent, found.beyond_noise) == (8, None, None, None)


def test_every_size_is_on_its_own() -> None:
    rows = [row(None, 1000), row(8, 950), row(None, 10, size=2**10), row(8, 20, size=2**10)]
    assert [(step.size_bytes, step.ctas) for step in shortest_steps(rows, {})] == [(2**20, 8), (2**10, None)]
