"""Seconds of a healthy collective inside one node, over size, from the expected values of a profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gpubench.collectives.record import Collective
from gpubench.collectives.registry import collective_named
from gpubench.errors import UsageError
from gpubench.model.profiles.profile import BUSBW, TIME, Expected, ExpectedKind, Profile
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

_PREFERRED_KINDS = (ExpectedKind.MEASURED, ExpectedKind.DERIVED, ExpectedKind.THRESHOLD)


@dataclass(frozen=True, slots=True)
class Curve:
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
    """The curve for `gpus` GPUs of a node out of `ranks` ranks in all.

    Without `nvls` values of reductions in NVSwitches are left out: a row that names another algorithm, or none, is held
    against what its own reaches.

    A collective of which the profile expects nothing takes the points of all-reduce, at the same latency and above it
    at the same busbw, which is by definition what the links carry (nccl-tests, doc/PERFORMANCE.md); but none of NVLS,
    which reduces in the switches and so reaches a busbw beyond the links.
    Raises UsageError where the profile expects nothing of all-reduce either at a known size.
    """
    known = _known(profile, collective)
    if not nvls:
        known = [each for each in known if not each.nvls]
    if known:
        return _through(known, profile, collective, gpus, ranks)
    all_reduce = collective_named("allreduce")
    known = [each for each in _known(profile, all_reduce) if not each.nvls]
    if not known:
        raise UsageError(
            f"the profile {profile.name} expects no time of {collective.name}, so there is none to simulate",
            expected="an expected value with size_bytes for it, or for allreduce",
            reason="one GPU has nobody to talk to" if profile.match.visible == 1 else "",
            next_step="another machine: --simulate hgx-h200-4",
        )
    usual = _through(known, profile, all_reduce, gpus, ranks)
    ratio = collective.busbw_factor(ranks) / all_reduce.busbw_factor(ranks)
    points = ((size, usual.latency + (seconds - usual.latency) * ratio) for size, seconds in usual.points)
    return Curve(tuple(points), usual.limit_gb_s)


def _known(profile: Profile, collective: Collective) -> list[Expected]:
    """The profile's expectations of a collective at known sizes."""
    found = (each for quantity in (TIME, BUSBW) for each in profile.find(f"{collective.name}.{quantity}"))
    return [each for each in found if each.size_bytes is not None]


def _through(known: Sequence[Expected], profile: Profile, collective: Collective, gpus: int, ranks: int) -> Curve:
    """The curve through expected values.

    Points of this very number of GPUs are taken, else those of the nearest number, scaled by the ratio of the busbw
    factors; reductions in NVSwitches (NVLS) are not carried over to another number. For this number they take the
    place of the bandwidths of rings, which NCCL then does not pick. Of several values for one size a measured one
    comes first, then the fastest.
    """
    nearest = min({profile.gpus_of(each) for each in known}, key=lambda count: (abs(count - gpus), -count))
    taken = [each for each in known if profile.gpus_of(each) == nearest]
    nvls = nearest == gpus and any(each.nvls for each in taken)
    if nvls:
        taken = [each for each in taken if each.algorithm != "RING" or each.quantity.endswith(TIME)]
    elif nearest != gpus:
        taken = [each for each in taken if not each.nvls] or taken
    scale = collective.busbw_factor(ranks) / collective.busbw_factor(nearest)
    best: dict[int, tuple[int, float]] = {}
    for each in taken:
        size = each.size_bytes or 0
        candidate = (_PREFERRED_KINDS.index(each.kind), scale * _seconds(each, collective.busbw_factor(nearest)))
        best[size] = min(candidate, best.get(size, candidate))
    sizes = sorted(best)
    # A larger size never takes less time, whatever two sources say.
    times = accumulate((best[size][1] for size in sizes), max)
    limit = profile.link_gb_s * (2 * (gpus - 1) / (gpus + 1) if nvls else 1)
    return Curve(tuple(zip(sizes, times, strict=True)), limit)


def _seconds(expected: Expected, factor: float) -> float:
    if expected.quantity.endswith(TIME):
        return expected.value / MICROSECONDS_PER_SECOND
    return (expected.size_bytes or 0) * factor / (expected.value * BYTES_PER_GB)
