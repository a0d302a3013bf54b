"""The expected time of a collective by size inside a node or NVLink domain (docs/formulas.md).

A model gives every profile a curve, and the profile's known points correct it. `expected` uses the curve.
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

_GRID = tuple(4**power for power in range(5, 19))  # Bytes: 1 KiB to 64 GiB
_LATENCY_BYTES = 2**16  # Up to this size an operation takes about as long as the smallest
_RATE_BYTES = 2**26  # The bandwidth of smaller sizes does not predict that of large ones
_RING_SHARE = 0.78  # Share of the links for profiles without a large size: 235 of 300 GB/s on 8 A100. Derived

_LEAST_GROWTH = 1.001  # From a size to the next one, if the measured times do not grow

_LATENCY_US = {True: (9.9, 0.9), False: (6.6, 1.0)}
"""Latency of a ring operation and of one step, with NVLink and without. Over PCIe these are NCCL's own values for
protocol LL (graph/tuning.cc): 64 KiB takes 1.1 times that on 8 RTX PRO 6000. Over NVLink they are 1.5 times NCCL's:
64 KiB takes 1.1 times NCCL's on 8 H200s in a virtual machine, 1.5 to 2.6 times on published H200s, B200s and A100s."""

_NVLS_LATENCY_US = 25.0  # NCCL's own for NVLS (graph/tuning.cc)

_NVLS_OVERLAP = 1.0
_RING_OVERLAP = {True: 0.75, False: 0.5}
"""The share of the pipeline's fill time that is not hidden: with NVLS, in a ring over NVLink, and over PCIe. Fitted to
the tuned results in tests/published/collectives.csv: 8 H200s, B200s, A100s and RTX PRO 6000."""


class _Pipeline(NamedTuple):
    """A pipeline with the best chunk size. It takes L + x + 2 k √(L x) seconds, with x = bytes / bandwidth."""

    latency: float
    gb_s: float
    overlap: float

    def seconds(self, moved_bytes: float) -> float:
        own = moved_bytes / (self.gb_s * BYTES_PER_GB)
        return self.latency + own + 2 * self.overlap * math.sqrt(self.latency * own)

    @classmethod
    def through(cls, latency: float, overlap: float, moved_bytes: float, seconds: float) -> "_Pipeline":
        """Fit the bandwidth to a known time. At most a quarter of that time is latency."""
        latency = min(latency, seconds / 4)
        root = math.sqrt(seconds - latency * (1 - overlap**2)) - overlap * math.sqrt(latency)
        return cls(latency, moved_bytes / root**2 / BYTES_PER_GB, overlap)


class Curve(Struct, frozen=True):
    """Points of (size, seconds), ascending in both. `limit_gb_s` is the busbw that the links of a GPU allow."""

    points: tuple[tuple[int, float], ...]
    limit_gb_s: float

    @property
    def latency(self) -> float:
        """The seconds of the smallest size."""
        return self.points[0][1]

    def at(self, size_bytes: int) -> float:
        """Interpolate the seconds linearly. Below the points the time is constant, beyond them the bandwidth."""
        last_size, last = self.points[-1]
        if size_bytes <= self.points[0][0]:
            return self.latency
        if size_bytes >= last_size:
            return last * size_bytes / last_size
        (low, start), (high, end) = next(pair for pair in pairwise(self.points) if size_bytes <= pair[1][0])
        return start + (end - start) * (size_bytes - low) / (high - low)


def curve(profile: Profile, collective: Collective, gpus: int, ranks: int, *, nvls: bool = True) -> Curve:
    """Return the curve for `gpus` GPUs of a node out of `ranks` ranks. Without `nvls`, NVSwitches do not reduce.

    A collective without points uses all-reduce's at equal busbw (nccl-tests, doc/PERFORMANCE.md). Raise UsageError if
    the profile has none for all-reduce either.
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
            f"the profile {profile.name} expects no time of {collective.name}, so there is none to simulate",
            expected="an expected value with size_bytes for it, or for allreduce",
            reason="a collective moves data between GPUs" if profile.match.visible == 1 else "",
            next_step="another machine: --simulate hgx-h200-4",
        )
    return reduce(_faster, curves)


def _points(profile: Profile, collective: Collective) -> list[Expected]:
    """Return the points of one node. Points of a whole NVLink domain count as those of a node with all its GPUs."""
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
    """Fit the second collective's curve to points of the first. Either all points are of rings, or all of NVLS.

    Use the points of the nearest number of GPUs. Their model goes through their latency and their largest size. The
    model of the wanted GPUs is corrected by the ratios of the other points to it.
    """
    known, wanted = collectives
    nvls = points[0].nvls
    nearest = min({profile.gpus_per_node(point) for point in points}, key=lambda n: (abs(math.log(n / gpus)), -n))
    factor = known.busbw_factor(nearest)
    # For each size, take the surest kind, then the shortest time.
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
    # A larger size takes longer, even if two sources or the noise of small sizes contradict that.
    growing = accumulate(times, lambda before, own: max(own, before * _LEAST_GROWTH))
    return Curve(tuple(zip(sizes, growing, strict=True)), ceilings[1])


def _ceiling(profile: Profile, collective: Collective, gpus: int, *, nvls: bool) -> float:
    """Return the largest busbw. NVLS sends a GPU's data once, a ring 2(n-1)/(n+1) times."""
    return profile.carried_gb_s(collective.name, gpus) * (2 * (gpus - 1) / (gpus + 1) if nvls else 1)


def _latency(profile: Profile, collective: Collective, gpus: int, *, nvls: bool) -> float:
    steps = (gpus - 1) * (2 if collective.name == "allreduce" else 1)
    base, step = _LATENCY_US[profile.nvlink is not None]
    by_ring = base + steps * step
    return (_NVLS_LATENCY_US if nvls else by_ring) / MICROSECONDS_PER_SECOND


def _between(ratios: Mapping[int, float], size: int) -> float:
    """Interpolate the ratio over the logarithm of sizes (ascending). Beyond the ends it is constant."""
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
