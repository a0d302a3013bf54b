"""The clock, the power and what holds clocks down of a GPU while it works."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """A reading of a GPU at work; None is what nobody tells."""

    clock_mhz: int | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()


def mean_load(readings: Sequence[GpuLoad]) -> GpuLoad:
    """Several readings of one GPU as one: means, and every reason that was met."""
    clocks = [each.clock_mhz for each in readings if each.clock_mhz is not None]
    powers = [each.power_w for each in readings if each.power_w is not None]
    return GpuLoad(
        clock_mhz=round(fmean(clocks)) if clocks else None,
        power_w=fmean(powers) if powers else None,
        throttle_reasons=tuple(dict.fromkeys(reason for each in readings for reason in each.throttle_reasons)),
    )


def load_of_ranks(loads: Sequence[GpuLoad]) -> GpuLoad:
    """The GPUs of a job as one: the clock of the slowest, the mean of powers, every reason that was met."""
    clocks = [each.clock_mhz for each in loads if each.clock_mhz is not None]
    together = mean_load(loads)
    return GpuLoad(min(clocks, default=None), together.power_w, together.throttle_reasons)
