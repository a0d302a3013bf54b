"""The clock and the power of this rank's GPU while it works, from NVML: two questions, as often as somebody looks."""

from gpubench.hardware.node.nvml.answers import Answers
from gpubench.hardware.node.nvml.gpu import MULTIPROCESSORS, read_clock_reasons, throttle_reasons
from gpubench.hardware.node.nvml.library import open_library
from gpubench.model.facts.gpu_load import GpuLoad

_MILLIWATTS = 1000

_INSTANT_POWER = (186, 0)
"""NVML_FI_DEV_POWER_INSTANT, of the whole GPU: nvmlDeviceGetPowerUsage is the mean of the last second on an H200."""


class NvmlLoad:
    """Reads the GPU with that PCI bus id."""

    def __init__(self, bus_id: str) -> None:
        self._library = open_library()
        self._answers: Answers | None = None
        if self._library is not None:
            try:
                self._answers = Answers(self._library, self._library.nvmlDeviceGetHandleByPciBusId(bus_id))
            except self._library.NVMLError:
                self._answers = None

    def read(self) -> GpuLoad:
        """Its clock, power and what holds clocks down, now."""
        answers = self._answers
        if answers is None:
            return GpuLoad()
        power = answers.fields([_INSTANT_POWER]).get(_INSTANT_POWER)
        if power is None:
            power = answers.ask("power", "nvmlDeviceGetPowerUsage")
        return GpuLoad(
            clock_mhz=answers.ask("clock", "nvmlDeviceGetClockInfo", MULTIPROCESSORS),
            power_w=None if power is None else power / _MILLIWATTS,
            throttle_reasons=throttle_reasons(read_clock_reasons(answers)) or (),
        )

    def close(self) -> None:
        """Shut NVML down."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library = self._answers = None
