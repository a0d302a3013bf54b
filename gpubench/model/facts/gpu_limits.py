"""Clocks and power that somebody may have set for a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    """The clock that programs are given (nvidia-smi -ac) and the power limit (-pl), beside the driver's defaults."""

    clock_mhz: int | None = None
    default_clock_mhz: int | None = None
    power_w: float | None = None
    default_power_w: float | None = None
