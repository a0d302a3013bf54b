"""The clock and the power of a GPU at work, on a stand-in for it."""

import sys
from typing import Any

import pytest

from gpubench.machine.traffic import NvmlLoad
from gpubench.model.facts.health import GpuLoad
from tests.fakes.nvml import FakeGpu
from tests.machine.nvml.test_condition import SW_POWER_CAP, ByBusId


def read(monkeypatch: pytest.MonkeyPatch, bus_id: str = "06", instant: int | None = None, **replies: Any) -> GpuLoad:
    functions = {f"nvmlDeviceGet{name}": (lambda *_, _reply=reply: _reply) for name, reply in replies.items()}
    library = ByBusId(FakeGpu(replies=functions))
    answers = {} if instant is None else {(186, 0): instant}
    monkeypatch.setattr("gpubench.machine.drivers.GpuQueries.fields", lambda _self, _wanted: answers)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    load = NvmlLoad(bus_id)
    try:
        return load.read()
    finally:
        load.close()
        load.close()


def test_the_power_of_the_moment_comes_before_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: dict[str, Any] = {"ClockInfo": 1695, "PowerUsage": 550_871, "CurrentClocksEventReasons": SW_POWER_CAP}
    assert read(monkeypatch, instant=690_500, **replies) == GpuLoad(1695, 690.5, ("sw_power_cap",))
    assert read(monkeypatch, **replies) == GpuLoad(1695, 550.871, ("sw_power_cap",))


def test_what_nobody_tells_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, bus_id="gone") == GpuLoad()
