"""The condition of a GPU between rows, and its clock and power at work, on a stand-in for NVML."""

import os
import sys
from typing import Any

import pytest

from gpubench.machine.traffic import NvmlCondition, NvmlLoad, others
from gpubench.model.facts.health import GpuLoad
from gpubench.model.facts.process import GpuCondition, GpuProcess
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError, process

SW_POWER_CAP, IDLE = 0x4, 0x1


class ByBusId(FakeNvml):
    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> FakeGpu:  # noqa: N802
        if bus_id == "gone":
            raise NVMLError(15)
        return self.gpus[0]


def read(monkeypatch: pytest.MonkeyPatch, bus_id: str = "06", start_error: int = 0, **replies: Any) -> GpuCondition:
    usual = {"ClockInfo": 1980, "MaxClockInfo": 1980, "TotalEccErrors": 0, "CurrentClocksEventReasons": 0}
    functions = {f"nvmlDeviceGet{name}": reply for name, reply in (usual | replies).items()}
    answering = {name: (lambda *_, _reply=reply: _reply) for name, reply in functions.items()}
    monkeypatch.setitem(sys.modules, "pynvml", ByBusId(FakeGpu(replies=answering), start_error=start_error))
    condition = NvmlCondition(bus_id)
    try:
        return condition.read()
    finally:
        condition.close()
        condition.close()


def test_throttling_clock_errors_and_other_users_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = read(
        monkeypatch, CurrentClocksEventReasons=SW_POWER_CAP, ClockInfo=1200, TotalEccErrors=2,
        ComputeRunningProcesses=[process(os.getpid(), 2**30), process(77, 30 * 2**30)],
    )  # fmt: skip
    assert list(seen.remarks()) == [
        "is throttled: sw power cap; 1200 of 1980 MHz",
        "had 2 uncorrectable memory errors since the driver was loaded",
        "is also used by process 77 (30.0 GiB)",
    ]
    assert seen.not_read == ""


def test_the_low_clock_of_an_idle_gpu_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = read(monkeypatch, CurrentClocksEventReasons=IDLE, ClockInfo=345)
    assert (seen.clock_mhz, list(seen.remarks())) == (None, [])


def test_a_gpu_that_is_gone_and_a_missing_driver_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "throttling, clocks and other users (" in read(monkeypatch, bus_id="gone").not_read
    assert "NVML does not start" in read(monkeypatch, start_error=9).not_read


def test_where_pids_are_those_of_another_namespace_a_single_process_is_this_one() -> None:
    one, two = GpuProcess(pid=1), GpuProcess(pid=2)
    assert others((one,), own_pid=7) == ()
    assert others((one, two), own_pid=7) == (one, two)
    assert others((one, two), own_pid=2) == (one,)
    assert others((), own_pid=2) == ()


def read_load(
    monkeypatch: pytest.MonkeyPatch, bus_id: str = "06", instant: int | None = None, **replies: Any
) -> GpuLoad:
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
    assert read_load(monkeypatch, instant=690_500, **replies) == GpuLoad(1695, 690.5, ("sw_power_cap",))
    assert read_load(monkeypatch, **replies) == GpuLoad(1695, 550.871, ("sw_power_cap",))


def test_what_nobody_tells_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_load(monkeypatch, bus_id="gone") == GpuLoad()
