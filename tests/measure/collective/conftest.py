"""Skip the operations that raise clocks, because fakes have no clocks."""

import pytest


@pytest.fixture(autouse=True)
def _no_warm_up_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubench.measure.collective.sweep._WAKING_SECONDS", 1e-9)
