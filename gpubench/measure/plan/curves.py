"""Times of collectives over size: points that were measured or are expected, and what lies between them.

Between two sizes the logarithm of the time goes straight over the logarithm of the size. Below the smallest a time
stays that of the smallest, for it is latency; above the largest the bandwidth stays that of the largest.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpubench.model.terms.units import format_memory, format_size


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The time of one size, and the half-width of its 95 % interval as a part of it, 0 where that is not known."""

    size_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """The times of one collective among so many ranks, on so many nodes.

    `origin` is measured, simulated or expected, `source` where from; `note` what was done to make it fit, else empty.
    """

    collective: str
    ranks: int
    points: tuple[CurvePoint, ...]
    origin: str
    source: str
    note: str = ""

    def seconds(self, size_bytes: float) -> float:
        """Of one operation of this size; 0 for no bytes."""
        if size_bytes <= 0:
            return 0.0
        sizes = [each.size_bytes for each in self.points]
        after = bisect_left(sizes, size_bytes)
        if after == 0:
            return self.points[0].seconds
        if after == len(sizes):
            last = self.points[-1]
            return last.seconds * size_bytes / last.size_bytes
        low, high = self.points[after - 1], self.points[after]
        part = math.log(size_bytes / low.size_bytes) / math.log(high.size_bytes / low.size_bytes)
        return float(low.seconds * (high.seconds / low.seconds) ** part)

    def spread(self, size_bytes: float) -> float:
        """The half-width of the 95 % interval of the nearest size, as a part of its time."""
        nearest = min(self.points, key=lambda each: abs(math.log(each.size_bytes / max(size_bytes, 1))))
        return nearest.spread

    def way(self, size_bytes: float) -> str:
        """How a time of this size is known: its own point, between two, or beyond the ends."""
        sizes = [each.size_bytes for each in self.points]
        if size_bytes in sizes:
            return "point"
        return "interpolated" if sizes[0] < size_bytes < sizes[-1] else "extrapolated"


def curve_of(collective: str, ranks: int, points: Sequence[CurvePoint], **values: str) -> CollectiveCurve:
    """A curve through these points: of several for a size the middle one, with the spread of all of them."""
    by_size: dict[int, list[CurvePoint]] = {}
    for each in points:
        by_size.setdefault(each.size_bytes, []).append(each)
    merged = tuple(_merged(by_size[size]) for size in sorted(by_size))
    return CollectiveCurve(
        collective=collective, ranks=ranks, points=merged, **{"origin": "measured", "source": "", **values}
    )


def _merged(points: Sequence[CurvePoint]) -> CurvePoint:
    times = sorted(each.seconds for each in points)
    middle = times[len(times) // 2] if len(times) % 2 else (times[len(times) // 2 - 1] + times[len(times) // 2]) / 2
    apart = (times[-1] - times[0]) / 2 / middle
    return CurvePoint(points[0].size_bytes, middle, max([apart, *(each.spread for each in points)]))


@dataclass(frozen=True, slots=True)
class CommunicatorRanks:
    """The ranks that a collective runs among: how many, on how many nodes, and how many such groups share each node.

    Groups that share a node share its NICs; within a node the switch serves each GPU on its own.
    """

    ranks: int
    nodes: int = 1
    sharing: int = 1

    def __str__(self) -> str:
        return f"{self.ranks} ranks" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


class CurveSource(Protocol):
    """Finds the curve of a collective among ranks."""

    def curve(self, collective: str, group: CommunicatorRanks) -> CollectiveCurve:
        """The curve; GpubenchError where there is none to be had."""
        ...


@dataclass(slots=True)
class UsedSizes:
    """The sizes that predictions asked of a curve."""

    least: float = math.inf
    most: float = 0.0


FaultSeconds = Callable[[str, CommunicatorRanks, float, float], float]
"""What a fault makes of a time: seconds, from collective, group, size and the seconds without."""


@dataclass(slots=True)
class CollectiveTimesFound:
    """Times of collectives from a source of curves; it remembers what was asked.

    `shift` moves every time by so many half-widths of its own noise: -1 and 1 give the range of a prediction. `fault`
    changes times.
    """

    source: CurveSource
    shift: float = 0.0
    fault: FaultSeconds | None = None
    used: dict[tuple[str, CommunicatorRanks], UsedSizes] = field(default_factory=dict)
    _curves: dict[tuple[str, CommunicatorRanks], CollectiveCurve] = field(default_factory=dict)
    _seconds: dict[tuple[str, CommunicatorRanks, float], float] = field(default_factory=dict)
    """What was found: a step asks for few times, and for each of them once a layer."""

    def seconds(self, collective: str, group: CommunicatorRanks, size_bytes: float) -> float:
        """Of one operation; of one rank alone, which has nobody to talk to, none. Raises what the source raises."""
        if group.ranks == 1 or size_bytes <= 0:
            return 0.0
        asked = collective, group, size_bytes
        if asked not in self._seconds:
            self._seconds[asked] = self._found(collective, group, size_bytes)
        return self._seconds[asked]

    def _found(self, collective: str, group: CommunicatorRanks, size_bytes: float) -> float:
        curve = self.curve(collective, group)
        used = self.used.setdefault((collective, group), UsedSizes())
        used.least, used.most = min(used.least, size_bytes), max(used.most, size_bytes)
        effective = size_bytes * (group.sharing if group.nodes > 1 else 1)
        seconds = curve.seconds(effective) * max(0.0, 1 + self.shift * curve.spread(effective))
        return seconds if self.fault is None else self.fault(collective, group, size_bytes, seconds)

    def curve(self, collective: str, group: CommunicatorRanks) -> CollectiveCurve:
        """The curve of a collective."""
        key = (collective, group)
        if key not in self._curves:
            self._curves[key] = self.source.curve(collective, group)
        return self._curves[key]

    def shifted(self, shift: float) -> "CollectiveTimesFound":
        """The same with its noise up or down."""
        return CollectiveTimesFound(self.source, shift, self.fault, self.used, self._curves)

    def with_fault(self, fault: FaultSeconds) -> "CollectiveTimesFound":
        """The same with a fault."""
        return CollectiveTimesFound(self.source, self.shift, fault, self.used, self._curves)

    def beyond(self) -> list[str]:
        """The curves that were asked for sizes beyond their points, in words."""
        found = []
        for (name, group), used in sorted(self.used.items(), key=lambda each: (each[0][0], each[0][1].ranks)):
            points = self._curves[name, group].points
            least, most = points[0].size_bytes, points[-1].size_bytes
            sizes = [int(size) for size in dict.fromkeys((used.least, used.most)) if not least <= size <= most]
            if sizes:
                asked = " and ".join(map(format_memory, sizes))
                found.append(f"{name} of {asked}, known from {format_size(least)} to {format_size(most)}")
        return found
