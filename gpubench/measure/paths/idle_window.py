"""What the links of GPUs carry, and what runs there, over a moment in which this job does nothing."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, sleep

from gpubench.measure.paths.counters import PCIE_COUNTS_TO
from gpubench.model.facts.idle_gpu import GpuUse, IdleGpu, LinkRates
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.ports.gpu_use import GpuUsers, NoUsers
from gpubench.ports.link_counters import LinkBytes, LinkCounters

WINDOW_SECONDS = 0.02
"""Long enough for counters that tick slowly; no PCIe link of today gets around NVML's counter in that time."""

_MOST_SETTLING_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.1
"""NVML's utilization is that of the last sixth of a second to the last second: what this job did is in it for a while,
and what others do stays.
"""


class IdleWindow:
    """Looks at GPUs while this job leaves them alone; whoever calls it sees to that."""

    def __init__(
        self,
        counters: LinkCounters,
        users: GpuUsers | None = None,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[float], object] = sleep,
    ) -> None:
        self._counters, self._users = counters, users or NoUsers()
        self._clock, self._wait = clock, wait

    def look(self, gpus: Sequence[int]) -> tuple[IdleGpu, ...]:
        """These GPUs now: it takes 20 ms, and up to 2 s where one of them computes."""
        before = [(self._clock(), self._counters.read(gpu)) for gpu in gpus]
        self._wait(WINDOW_SECONDS)
        rates = []
        for gpu, (since, counted) in zip(gpus, before, strict=True):
            after = self._counters.read(gpu)
            rates.append(_rates(counted, after, self._clock() - since))
        uses = self._settled(gpus)
        return tuple(IdleGpu(rates=rate, use=use) for rate, use in zip(rates, uses, strict=True))

    def _settled(self, gpus: Sequence[int]) -> Sequence[GpuUse]:
        """The use of GPUs, once what this job did there is forgotten."""
        *_, last = self._looks(gpus)
        return last

    def _looks(self, gpus: Sequence[int]) -> Iterator[Sequence[GpuUse]]:
        start = self._clock()
        while True:
            uses = [self._users.read(gpu) for gpu in gpus]
            yield uses
            if not any(use.is_busy for use in uses) or self._clock() - start >= _MOST_SETTLING_SECONDS:
                return
            self._wait(_SECONDS_BETWEEN_LOOKS)


def _rates(before: LinkBytes, after: LinkBytes, seconds: float) -> LinkRates:
    return LinkRates(
        nvlink_sent=_rate(before.nvlink_sent, after.nvlink_sent, seconds),
        nvlink_received=_rate(before.nvlink_received, after.nvlink_received, seconds),
        pcie_sent=_rate(before.pcie_sent, after.pcie_sent, seconds, PCIE_COUNTS_TO),
        pcie_received=_rate(before.pcie_received, after.pcie_received, seconds, PCIE_COUNTS_TO),
    )


def _rate(before: int | None, after: int | None, seconds: float, counts_to: int | None = None) -> float | None:
    if before is None or after is None or seconds <= 0:
        return None
    moved = after - before if counts_to is None else (after - before) % counts_to
    return moved / seconds / BYTES_PER_GB
