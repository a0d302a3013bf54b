"""Sweeps on fakes, which have no clocks to raise."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_set_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation is tried once, and not for 20 ms, in which threads that meet at each of them do nothing else."""
    monkeypatch.setattr("gpubench.measure.collective.sweep._SECONDS_TO_SET_TO_WORK", 1e-9)
