"""The expected time of a collective as a function of size, in a node or NVLink domain.

A model provides a curve for every profile, corrected by the profile's known points. `expected` uses the curve.
docs/internals/expected-speed.md has the formulas.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubench.collectives.record import Collective
from gpubench.collectives.registry import collective_named
from gpubench.errors import UsageError
from gpubench.model.profiles.profile import BUSBW, TIME, Expected, ExpectedKind, Profile
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

_PREFERRED_KINDS = (ExpectedKind.MEASURED, ExpectedKind.DERIVED, ExpectedKind.THRESHOLD)

_GRID = tuple(4**power for power in range(5, 19))  # Sizes in bytes, from 1 KiB to 64 GiB
_LATENCY_BYTES = 2**16  # Up to this size, an operation takes about as long as at the smallest size
_RATE_BYTES = 2**26  # The bandwidth at smaller sizes does not predict the bandwidth at large sizes
_RING_SHARE = 0.78  # Fraction of the link bandwidth, if a profile has no large size: 235 of 300 GB/s on 8 A100. Derived

_LEAST_GROWTH = 1.001  # Minimum ratio of the times at two consecutive sizes, applied if measured times do not grow

_LATENCY_US = {True: (9.9, 0.9), False: (6.6, 1.0)}
"""Latency of a ring operation and of one step in µs, with NVLink (True) and without.

Over PCIe these are NCCL's own values for the LL protocol (graph/tuning.cc). 64 KiB takes 1.1 times that on 8 RTX PRO
6000. Over NVLink they are 1.5 times NCCL's values. On 8 H200s in a virtual machine, 64 KiB takes 1.1 times NCCL's
value. In published results for H200, B200 and A100, it takes 1.5 to 2.6 times as long.
"""

_NVLS_LATENCY_US = 25.0  # NCCL's own latency for NVLS (graph/tuning.cc)

_NVLS_OVERLAP = 1.0
_RING_OVERLAP = {True: 0.75, False: 0.5}
"""Fraction of the pipeline's fill time that is not hidden, with NVLink (True) and over PCIe. `_NVLS_OVERLAP` is the
same for NVLS. Fitted to the tuned results in tests/published/collectives.csv for 8 H200, B200, A100 and RTX PRO
6000.
"""


class _Pipeline(NamedTuple):
    """A pipeline with the optimal chunk size. It takes L + x + 2 k √(L x) seconds.

    L is `latency`, k is `overlap`, and x is bytes / bandwidth.
    """

    latency: float
    gb_s: float
    overlap: float

    def seconds(self, moved_bytes: float) -> float:
        own = moved_bytes / (self.gb_s * BYTES_PER_GB)
        return self.latency + own + 2 * self.overlap * math.sqrt(self.latency * own)

    @classmethod
    def through(cls, latency: float, overlap: float, moved_bytes: float, seconds: float) -> "_Pipeline":
        """Return the pipeline whose bandwidth fits a known time. At most a quarter of that time counts as latency."""
        latency = min(latency, seconds / 4)
        root = math.sqrt(seconds - latency * (1 - overlap**2)) - overlap * math.sqrt(latency)
        return cls(latency, moved_bytes / root**2 / BYTES_PER_GB, overlap)


class Curve(Struct, frozen=True):
    """The time of a collective by size, as points of (bytes, seconds) in ascending order.

    `limit_gb_s` is the highest busbw that a GPU's links allow.
    """

    points: tuple[tuple[int, float], ...]
    limit_gb_s: float

    @property
    def latency(self) -> float:
        """The time at the smallest size, in seconds."""
        return self.points[0][1]

    def at(self, size_bytes: int) -> float:
        """Return the time in seconds, interpolated linearly between points.

        Below the first point the time is constant. Beyond the last point the bandwidth is constant.
        """
        last_size, last = self.points[-1]
        if size_bytes <= self.points[0][0]:
            return self.latency
        if size_bytes >= last_size:
            return last * size_bytes / last_size
        (low, start), (high, end) = next(pair for pair in pairwise(self.points) if size_bytes <= pair[1][0])
        return start + (end - start) * (size_bytes - low) / (high - low)


def curve(profile: Profile, collective: Collective, gpus: int, ranks: int, *, nvls: bool = True) -> Curve:
    """Return the curve for `gpus` GPUs of a node in a job of `ranks` ranks. Without `nvls`, reductions in
    NVSwitches are off.

    A collective without points in the profile uses those of all-reduce at the same busbw (nccl-tests,
    doc/PERFORMANCE.md). Raise UsageError if the profile has none for all-reduce either.
    """
    curves = []
    nvls_points = [point for point in _points(profile, collective) if point.nvls]
    for source in (collective, collective_named("allreduce")):
        ring_points = [point for point in _points(profile, source) if not point.nvls]
        if ring_points:
            curves.append(_fit(ring_points, profile, (source, collective), gpus, ranks))
            break
    if nvls_points and (nvls or not curves):
        curves.append(_fit(nvls_points, profile, (collective, collective), gpus, ranks))
    if not curves:
        raise UsageError(
            f"the profile {profile.name} has no expected time for {collective.name}, so it cannot be simulated",
            expected="an expected value with size_bytes for it, or for allreduce",
            reason="a collective moves data between GPUs" if profile.match.visible == 1 else "",
            next_step="--simulate hgx-h200-4",
        )
    return reduce(_faster, curves)


def _points(profile: Profile, collective: Collective) -> list[Expected]:
    """Return the profile's points for one node. An NVLink domain counts as one node with all its GPUs."""
    most_nodes = 1 if profile.domain is None else math.inf
    return [
        replace(point, gpus=point.nodes * profile.gpus_per_node(point), nodes=1)
        for point in profile.all_expected
        if point.quantity in (f"{collective.name}.{TIME}", f"{collective.name}.{BUSBW}")
        and point.size_bytes is not None
        and point.nodes <= most_nodes
    ]


def _faster(one: Curve, other: Curve) -> Curve:
    sizes = sorted({size for curve in (one, other) for size, _ in curve.points})
    points = tuple((size, min(one.at(size), other.at(size))) for size in sizes)
    return Curve(points, max(one.limit_gb_s, other.limit_gb_s))


def _fit(
    points: Sequence[Expected], profile: Profile, collectives: tuple[Collective, Collective], gpus: int, ranks: int
) -> Curve:
    """Fit a curve for the second collective to points of the first. All points must be for rings, or all for NVLS.

    Fit the model to the points whose number of GPUs is nearest to `gpus`: to their latency and their largest size. Then
    scale it to `gpus`, and multiply it by the ratios of measured to modelled time at the other points.
    """
    known, wanted = collectives
    nvls = points[0].nvls
    nearest = min({profile.gpus_per_node(point) for point in points}, key=lambda n: (abs(math.log(n / gpus)), -n))
    factor = known.busbw_factor(nearest)
    # For each size, prefer the most reliable kind of value, and then the shortest time.
    best: dict[int, tuple[int, float]] = {}
    for point in points:
        if profile.gpus_per_node(point) == nearest:
            size = point.size_bytes or 0
            candidate = (_PREFERRED_KINDS.index(point.kind), _seconds(point, factor))
            best[size] = min(candidate, best.get(size, candidate))
    seconds = {size: time for size, (_, time) in sorted(best.items())}
    ceilings = [_ceiling(profile, one, n, nvls=nvls) for one, n in ((known, nearest), (wanted, gpus))]
    latencies = [_latency(profile, known, n, nvls=nvls) for n in (nearest, gpus)]
    overlap = _NVLS_OVERLAP if nvls else _RING_OVERLAP[profile.nvlink is not None]
    smallest, largest = min(seconds), max(seconds)
    latency = seconds[smallest] if smallest <= _LATENCY_BYTES else latencies[0]
    if largest < _RATE_BYTES:
        theirs = _Pipeline(latency, _RING_SHARE * ceilings[0], overlap)
    else:
        theirs = _Pipeline.through(latency, overlap, largest * factor, seconds[largest])
    ours = _Pipeline(theirs.latency * latencies[1] / latencies[0], theirs.gb_s * ceilings[1] / ceilings[0], overlap)
    ratios = {size: time / theirs.seconds(size * factor) for size, time in seconds.items()}
    far = (grid for grid in _GRID if not any(grid / 2 <= size <= 2 * grid for size in seconds))
    sizes = sorted({*seconds, *far})
    times = (ours.seconds(size * wanted.busbw_factor(ranks)) * _between(ratios, size) for size in sizes)
    # Make the times increase with size, even if two sources or noise at small sizes contradict that.
    growing = accumulate(times, lambda before, own: max(own, before * _LEAST_GROWTH))
    return Curve(tuple(zip(sizes, growing, strict=True)), ceilings[1])


def _ceiling(profile: Profile, collective: Collective, gpus: int, *, nvls: bool) -> float:
    """Return the highest busbw in GB/s. NVLS sends each GPU's data once, and a ring sends it 2(n-1)/(n+1) times."""
    return profile.carried_gb_s(collective.name, gpus) * (2 * (gpus - 1) / (gpus + 1) if nvls else 1)


def _latency(profile: Profile, collective: Collective, gpus: int, *, nvls: bool) -> float:
    steps = (gpus - 1) * (2 if collective.name == "allreduce" else 1)
    base, step = _LATENCY_US[profile.nvlink is not None]
    by_ring = base + steps * step
    return (_NVLS_LATENCY_US if nvls else by_ring) / MICROSECONDS_PER_SECOND


def _between(ratios: Mapping[int, float], size: int) -> float:
    """Interpolate the ratio linearly over the logarithm of the size. The ratio is constant beyond both ends."""
    sizes = list(ratios)
    place = bisect_left(sizes, size)
    if place in (0, len(sizes)) or sizes[place] == size:
        return ratios[sizes[min(place, len(sizes) - 1)]]
    low, high = sizes[place - 1], sizes[place]
    part = math.log(size / low) / math.log(high / low)
    return ratios[low] + part * (ratios[high] - ratios[low])


def _seconds(expected: Expected, factor: float) -> float:
    if expected.quantity.endswith(TIME):
        return expected.value / MICROSECONDS_PER_SECOND
    return (expected.size_bytes or 0) * factor / (expected.value * BYTES_PER_GB)
