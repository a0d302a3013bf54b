"""NVML asked who else uses a GPU, on a stand-in for it, with pids of one namespace or of two."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.machine.traffic import NvmlUse
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuUse
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError, process

GIB = 2**30
OWN, OTHER = 100, 8342
BUS = "0000:06:00.0"


class ByBusId(FakeNvml):
    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> FakeGpu:  # noqa: N802
        if bus_id != BUS:
            raise NVMLError(15)
        return self.gpus[0]


class Machine:
    """One GPU; its processes change after this job opened it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, before: list[Any], **more: Any) -> None:
        self.processes = before
        replies: dict[str, Any] = {
            "nvmlDeviceGetComputeRunningProcesses": lambda: self.processes,
            "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=100, memory=3),
            "nvmlDeviceGetMemoryInfo": lambda *_: SimpleNamespace(total=140 * GIB, used=121 * GIB),
        }
        monkeypatch.setitem(sys.modules, "pynvml", ByBusId(FakeGpu(replies=replies | more)))
        self.use = NvmlUse(root)

    def opened(self, *processes: Any) -> GpuUse:
        self.processes = list(processes)
        return self.use.other_users([BUS], {OWN}).read(0)


def process_files(root: Path, pid: int, command: str, groups: str = "0::/user.slice") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_text(command)
    (folder / "cgroup").write_text(groups)


def test_pids_of_another_namespace_are_others_where_they_were_there_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them is this job's own, by the pid that the host has for it; /proc/PID is somebody else's here."""
    process_files(tmp_path, 90001, "/bin/innocent")
    machine = Machine(monkeypatch, tmp_path, [process(90001, GIB)])
    assert machine.opened(process(90001, GIB), process(90002, GIB)).users == (GpuProcess(pid=90001, memory_bytes=GIB),)


def test_memory_that_ranks_held_before_is_nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, tmp_path, [process(OWN, GIB), process(77, 120 * GIB)])
    assert machine.opened(process(OWN, 5 * GIB), process(77, 120 * GIB)).held_bytes == 120 * GIB


def test_in_the_namespace_of_the_host_all_pids_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "proc/self/ns"
    folder.mkdir(parents=True)
    (folder / "pid").symlink_to("pid:[4026531836]")
    machine = Machine(monkeypatch, tmp_path, [])
    assert [each.pid for each in machine.opened(process(77)).users] == [77]


def test_what_nvml_does_not_say_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> None:
        raise NVMLError(3)

    functions = ("ComputeRunningProcesses", "UtilizationRates", "MemoryInfo")
    machine = Machine(monkeypatch, tmp_path, [], **{f"nvmlDeviceGet{name}": refused for name in functions})
    assert machine.opened() == GpuUse()
    assert machine.use.read("gone", ()) == GpuUse()
    machine.use.close()
    machine.use.close()
    assert machine.opened(process(77)) == GpuUse()


def test_without_a_driver_there_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ByBusId(start_error=9))
    assert NvmlUse().other_users([BUS], ()).read(0) == GpuUse()
