"""Readings of GPUs while a job is idle."""

from dataclasses import dataclass, field

import pytest

from gpubench.measure.paths import IdleWindow
from gpubench.model.facts.traffic import GpuUse, IdleGpu, LinkRates
from gpubench.ports.copies import LinkBytes

GB = 10**9


@dataclass
class Clocked:
    nvlink_sent: float | None = None
    pcie_received: float | None = None
    pcie_before: int = 0
    percents: list[int | None] = field(default_factory=lambda: [0])
    seconds: float = 0.0

    def read(self, gpu: int) -> LinkBytes:
        assert gpu in (0, 1)
        sent = None if self.nvlink_sent is None else round(self.nvlink_sent * GB * self.seconds)
        received = (
            None if self.pcie_received is None else self.pcie_before + round(self.pcie_received * GB * self.seconds)
        )
        return LinkBytes(nvlink_sent=sent, pcie_received=None if received is None else received % 2**32)

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    def clock(self) -> float:
        return self.seconds

    def window(self) -> IdleWindow:
        return IdleWindow(self, _Users(self.percents), clock=self.clock, wait=self.wait)


class _Users:
    def __init__(self, percents: list[int | None]) -> None:
        self._percents = percents

    def read(self, gpu: int) -> GpuUse:
        assert gpu in (0, 1)
        percent = self._percents.pop(0) if len(self._percents) > 1 else self._percents[0]
        return GpuUse(utilization_percent=percent)


def test_a_gpu_that_nobody_uses_takes_20_ms() -> None:
    idle = Clocked()
    assert idle.window().look([0, 1]) == (IdleGpu(rates=LinkRates(), use=GpuUse(utilization_percent=0)),) * 2
    assert idle.seconds == pytest.approx(0.02)
