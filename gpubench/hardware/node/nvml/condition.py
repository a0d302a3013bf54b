"""The condition of this rank's GPU between rows, from NVML: throttling, clocks, memory errors, other users."""

import os
from collections.abc import Sequence

from gpubench.hardware.node.nvml.answers import Answers
from gpubench.hardware.node.nvml.gpu import (
    MULTIPROCESSORS,
    is_idle,
    read_clock_reasons,
    read_memory_errors,
    read_processes,
    throttle_reasons,
)
from gpubench.hardware.node.nvml.library import open_library
from gpubench.model.facts.gpu_condition import GpuCondition
from gpubench.model.facts.gpu_process import GpuProcess

_ALL = "throttling, clocks and other users"


class NvmlCondition:
    """Reads the GPU with that PCI bus id between rows."""

    def __init__(self, bus_id: str) -> None:
        self._bus_id = bus_id
        self._library = open_library()

    def read(self) -> GpuCondition:
        """The condition now; facts without an answer are in `unread`."""
        library = self._library
        if library is None:
            return GpuCondition(unread={_ALL: "NVML does not start"})
        try:
            answers = Answers(library, library.nvmlDeviceGetHandleByPciBusId(self._bus_id))
        except library.NVMLError as error:
            return GpuCondition(unread={_ALL: str(error)})
        reasons = read_clock_reasons(answers)
        clock_mhz = answers.ask("clock", "nvmlDeviceGetClockInfo", MULTIPROCESSORS)
        return GpuCondition(
            throttle_reasons=throttle_reasons(reasons) or (),
            clock_mhz=None if is_idle(reasons) else clock_mhz,
            most_clock_mhz=answers.call("nvmlDeviceGetMaxClockInfo", MULTIPROCESSORS).value,
            memory_errors=read_memory_errors(answers) or 0,
            others=others(read_processes(answers) or (), os.getpid()),
            unread=answers.unknown,
        )

    def close(self) -> None:
        """Shut NVML down."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library = None


def others(processes: Sequence[GpuProcess], own: int) -> tuple[GpuProcess, ...]:
    """The processes other than this one.

    Inside a container NVML's pids may be the host's: where this process is not among them, one of them is it, but it is
    unknown which one; a single one is then this process.
    """
    if any(each.pid == own for each in processes):
        return tuple(each for each in processes if each.pid != own)
    return tuple(processes) if len(processes) > 1 else ()
