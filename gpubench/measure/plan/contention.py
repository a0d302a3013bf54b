"""What communication and computation cost each other, from the rows of `gpubench overlap`, or assumed to be nothing.

A row's κ_c is the slow-down of computation while a collective is in flight, waiting for multiprocessors included; what
slows computation is the collective that runs. So while it runs the factor is 1 + (κ_c - 1)·κ_m/(1 + sharing): the same
time lost for one operation.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpubench.measure.plan.events import NO_CONTENTION, Contention


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredContention:
    """One measurement of a collective beside a partner.

    `compute_slowdown` is κ_c, `communication_slowdown` κ_m, of which `sharing_slowdown` is lost while it runs and the
    rest waiting; None where that was not told apart: then all of it is waiting. `kernel_seconds` is one operation of
    the partner; `ctas` the cap on NCCL's thread blocks, None for its own choice.
    """

    collective: str
    size_bytes: int
    partner: str
    compute_slowdown: float
    communication_slowdown: float
    alone_seconds: float
    sharing_slowdown: float | None = None
    kernel_seconds: float = 0.0
    ctas: int | None = None

    @property
    def contention(self) -> Contention:
        """For the simulation, which tells waiting from running."""
        sharing = min(max(0.0, self.sharing_slowdown or 0.0), max(0.0, self.communication_slowdown - 1))
        running = 1 + sharing
        return Contention(
            compute=1 + max(0.0, self.compute_slowdown - 1) * max(1.0, self.communication_slowdown) / running,
            communication=running,
            wait_seconds=max(0.0, self.communication_slowdown - running) * self.alone_seconds,
            kernel_seconds=self.kernel_seconds,
            alone_seconds=self.alone_seconds,
        )


@dataclass(frozen=True, slots=True)
class ContentionTable:
    """Measurements, and what lies between them; without any, nothing slows anything."""

    measured: Sequence[MeasuredContention] = ()
    source: str = ""

    @property
    def is_assumed(self) -> bool:
        """True where nothing was measured."""
        return not self.measured

    def of(self, collective: str, size_bytes: float) -> Contention:
        """Of a collective of this size: between two sizes by the logarithm of the size, beyond them as at the end.

        Of another collective where this one was not measured. Several partners are averaged.
        """
        if not self.measured or size_bytes <= 0:
            return NO_CONTENTION
        same = [each for each in self.measured if each.collective == collective] or self.measured
        partners = dict.fromkeys(each.partner for each in same)
        return _weighted([(_at(size_bytes, [each for each in same if each.partner == name]), 1.0) for name in partners])


def _at(size_bytes: float, measured: Sequence[MeasuredContention]) -> Contention:
    """Of one partner."""
    by_size: dict[int, list[Contention]] = {}
    for each in measured:
        by_size.setdefault(each.size_bytes, []).append(each.contention)
    points = [(size, _weighted([(each, 1.0) for each in found])) for size, found in sorted(by_size.items())]
    after = bisect_left([size for size, _ in points], size_bytes)
    if after == 0:
        return points[0][1]
    if after == len(points):
        largest, last = points[-1]
        return replace(last, alone_seconds=last.alone_seconds * size_bytes / largest)
    (low, first), (high, second) = points[after - 1], points[after]
    part = math.log(size_bytes / low) / math.log(high / low)
    return _weighted([(first, 1 - part), (second, part)])


def _weighted(parts: Sequence[tuple[Contention, float]]) -> Contention:
    whole = sum(weight for _, weight in parts)

    def mean(values: Iterable[float]) -> float:
        return sum(value * weight for value, (_, weight) in zip(values, parts, strict=True)) / whole

    return Contention(
        compute=mean(each.compute for each, _ in parts),
        communication=mean(each.communication for each, _ in parts),
        wait_seconds=mean(each.wait_seconds for each, _ in parts),
        kernel_seconds=mean(each.kernel_seconds for each, _ in parts),
        alone_seconds=mean(each.alone_seconds for each, _ in parts),
    )
