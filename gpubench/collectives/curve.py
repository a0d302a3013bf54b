"""The time of a collective by size inside a node or NVLink domain, as a profile expects it (docs/formulas.md).

One model gives every profile a curve, and every known point of the profile corrects it. `expected` judges by it.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
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
_RATE_BYTES = 2**26  # A smaller size does not tell the bandwidth of large ones
_RING_SHARE = 0.78  # Of the links: 235 of 300 GB/s on 8 A100. A profile without a large size gets it. Derived

_LEAST_GROWTH = 1.001  # From a size to the next one, if what was measured is flat

_LATENCY_US = {True: (9.9, 0.9), False: (6.6, 1.0)}
"""Of a ring over NVLink, and over PCIe: of the operation, and of a step. Over PCIe it is NCCL's own for protocol LL
(graph/tuning.cc): 64 KiB takes 1.1 times that on 8 RTX PRO 6000. Over NVLink it is 1.5 times NCCL's: 64 KiB takes 1.1
times NCCL's on 8 H200s in a virtual machine, 1.5 to 2.6 times on other people's 8 H200s, B200s and A100s."""

_NVLS_LATENCY_US = 25.0  # NCCL's own for NVLS (graph/tuning.cc)

_NVLS_OVERLAP = 1.0
_RING_OVERLAP = {True: 0.75, False: 0.5}
"""Of the time to fill the pipeline, what data do not hide, with NVLS, and by a ring over NVLink and over PCIe. Chosen
on the tuned figures of tests/published/collectives.csv: 8 H200s, B200s, A100s and RTX PRO 6000."""


class _Pipeline(NamedTuple):
    """Seconds by bytes of a pipeline that cuts data into the best chunks: L + x + 2 k √(L x), x = bytes/bandwidth."""

    latency: float
    gb_s: float
    overlap: float

    def seconds(self, moved_bytes: float) -> float:
        """The time in which so many bytes pass a link."""
        own = moved_bytes / (self.gb_s * BYTES_PER_GB)
        return self.latency + own + 2 * self.overlap * math.sqrt(self.latency * own)

    @classmethod
    def through(cls, latency: float, overlap: float, moved_bytes: float, seconds: float) -> "_Pipeline":
        """The pipeline that takes this time for so many bytes; half of the time at least is not latency."""
        latency = min(latency, seconds / 4)
        root = math.sqrt(seconds - latency * (1 - overlap**2)) - overlap * math.sqrt(latency)
        return cls(latency, moved_bytes / root**2 / BYTES_PER_GB, overlap)


class Curve(Struct, frozen=True):
    """Points of (size, seconds), ascending in both; `limit_gb_s` is the busbw that the links of a GPU allow."""

    points: tuple[tuple[int, float], ...]
    limit_gb_s: float

    @property
    def latency(self) -> float:
        """Seconds of the smallest size."""
        return self.points[0][1]

    def at(self, size_bytes: int) -> float:
        """Seconds of a size: straight lines; below the smallest point its time, beyond the largest its bandwidth."""
        last_size, last = self.points[-1]
        if size_bytes <= self.points[0][0]:
            return self.latency
        if size_bytes >= last_size:
            return last * size_bytes / last_size
        (low, start), (high, end) = next(each for each in pairwise(self.points) if size_bytes <= each[1][0])
        return start + (end - start) * (size_bytes - low) / (high - low)


def curve(profile: Profile, collective: Collective, gpus: int, ranks: int, *, nvls: bool = True) -> Curve:
    """The curve for `gpus` GPUs of a node out of `ranks` ranks; without `nvls`, none of reductions in NVSwitches.

    A collective without expectations takes all-reduce's points at equal busbw (nccl-tests, doc/PERFORMANCE.md). Raises
    UsageError if the profile expects nothing of all-reduce either.
    """
    all_reduce = collective_named("allreduce")
    known = {each.name: _known(profile, each) for each in (collective, all_reduce)}
    in_switches = [each for each in known[collective.name] if each.nvls]
    of = next((each for each in (collective, all_reduce) if any(not one.nvls for one in known[each.name])), None)
    if of is None and not in_switches:
        raise UsageError(
            f"the profile {profile.name} expects no time of {collective.name}, so there is none to simulate",
            expected="an expected value with size_bytes for it, or for allreduce",
            reason="a collective moves data between GPUs" if profile.match.visible == 1 else "",
            next_step="another machine: --simulate hgx-h200-4",
        )
    if of is None:
        return _through(in_switches, profile, (collective, collective), gpus, ranks)
    by_ring = _through([each for each in known[of.name] if not each.nvls], profile, (of, collective), gpus, ranks)
    if not in_switches or not nvls:
        return by_ring
    return _faster(by_ring, _through(in_switches, profile, (collective, collective), gpus, ranks))


def _known(profile: Profile, collective: Collective) -> list[Expected]:
    """Points of one node. Those of a whole NVLink domain are points of a node with all its GPUs."""
    whole = 1 if profile.domain is None else math.inf
    return [
        replace(each, gpus=each.nodes * profile.gpus_per_node(each), nodes=1)
        for each in profile.all_expected
        if each.quantity in (f"{collective.name}.{TIME}", f"{collective.name}.{BUSBW}")
        and each.size_bytes is not None
        and each.nodes <= whole
    ]


def _faster(one: Curve, other: Curve) -> Curve:
    sizes = sorted({size for each in (one, other) for size, _ in each.points})
    points = tuple((size, min(one.at(size), other.at(size))) for size in sizes)
    return Curve(points, max(one.limit_gb_s, other.limit_gb_s))


def _through(
    known: Sequence[Expected], profile: Profile, of_and_wanted: tuple[Collective, Collective], gpus: int, ranks: int
) -> Curve:
    """The curve from the points of the nearest number of GPUs, all of rings or all of NVLS.

    The model of those GPUs goes through their latency and their largest size. What the other points differ from it, the
    model of the wanted GPUs is corrected by.
    """
    of, collective = of_and_wanted
    nvls = known[0].nvls
    nearest = min(
        {profile.gpus_per_node(each) for each in known}, key=lambda count: (abs(math.log(count / gpus)), -count)
    )
    seconds = _seconds_by_size(
        [each for each in known if profile.gpus_per_node(each) == nearest], of.busbw_factor(nearest)
    )
    ceilings = [_ceiling(profile, each, n, nvls=nvls) for each, n in ((of, nearest), (collective, gpus))]
    latencies = [_latency(profile, of, n, nvls=nvls) for n in (nearest, gpus)]
    overlap = _NVLS_OVERLAP if nvls else _RING_OVERLAP[profile.nvlink is not None]
    theirs = _pipeline(seconds, of.busbw_factor(nearest), latencies[0], ceilings[0], overlap)
    ours = _Pipeline(
        theirs.latency * latencies[1] / latencies[0], theirs.gb_s * ceilings[1] / ceilings[0], theirs.overlap
    )
    sizes = sorted(seconds)
    ratios = [seconds[size] / theirs.seconds(size * of.busbw_factor(nearest)) for size in sizes]
    wanted = sorted({*sizes, *(each for each in _GRID if not any(each / 2 <= size <= 2 * each for size in sizes))})
    times = (ours.seconds(size * collective.busbw_factor(ranks)) * _between(sizes, ratios, size) for size in wanted)
    # A larger size takes longer, whatever two sources or the noise of small sizes say.
    growing = accumulate(times, lambda before, own: max(own, before * _LEAST_GROWTH))
    return Curve(tuple(zip(wanted, growing, strict=True)), ceilings[1])


def _seconds_by_size(known: Sequence[Expected], factor: float) -> dict[int, float]:
    """The surest, then the shortest time of each size."""
    best: dict[int, tuple[int, float]] = {}
    for each in known:
        size = each.size_bytes or 0
        candidate = (_PREFERRED_KINDS.index(each.kind), _seconds(each, factor))
        best[size] = min(candidate, best.get(size, candidate))
    return {size: seconds for size, (_, seconds) in best.items()}


def _pipeline(seconds: dict[int, float], factor: float, latency: float, ceiling: float, overlap: float) -> _Pipeline:
    """The model through the latency and the largest size of known times."""
    smallest, largest = min(seconds), max(seconds)
    latency = seconds[smallest] if smallest <= _LATENCY_BYTES else latency
    if largest < _RATE_BYTES:
        return _Pipeline(latency, _RING_SHARE * ceiling, overlap)
    return _Pipeline.through(latency, overlap, largest * factor, seconds[largest])


def _ceiling(profile: Profile, collective: Collective, gpus: int, *, nvls: bool) -> float:
    """The most busbw; NVLS sends a GPU's data once, where a ring sends them 2(n-1)/(n+1) times."""
    return profile.carried_gb_s(collective.name, gpus) * (2 * (gpus - 1) / (gpus + 1) if nvls else 1)


def _latency(profile: Profile, collective: Collective, gpus: int, *, nvls: bool) -> float:
    steps = (gpus - 1) * (2 if collective.name == "allreduce" else 1)
    base, step = _LATENCY_US[profile.nvlink is not None]
    by_ring = base + steps * step
    return (_NVLS_LATENCY_US if nvls else by_ring) / MICROSECONDS_PER_SECOND


def _between(sizes: Sequence[int], ratios: Sequence[float], size: int) -> float:
    """The ratio of a size, on straight lines over the logarithm of sizes; beyond the ends that of the nearest."""
    place = bisect_left(sizes, size)
    if place in (0, len(sizes)) or sizes[place] == size:
        return ratios[min(place, len(sizes) - 1)]
    low, high = sizes[place - 1], sizes[place]
    part = math.log(size / low) / math.log(high / low)
    return ratios[place - 1] + part * (ratios[place] - ratios[place - 1])


def _seconds(expected: Expected, factor: float) -> float:
    if expected.quantity.endswith(TIME):
        return expected.value / MICROSECONDS_PER_SECOND
    return (expected.size_bytes or 0) * factor / (expected.value * BYTES_PER_GB)
