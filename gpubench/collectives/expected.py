"""The time that a collective should take: from a profile's curves, else from the least that its links let it reach.

docs/profiles.md names the order of the sources and the record that the least rests on.
"""

import math

from gpubench.collectives.curve import curve
from gpubench.collectives.record import Collective
from gpubench.errors import UsageError
from gpubench.model.profiles.profile import ExpectedKind, Profile
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import LEAST_KNOWN, MEASURED, MODELLED, OF_ANOTHER_NCCL, ExpectedTime, Tolerance
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

_LEAST_SHARE, _LEAST_SHARE_OF_SENDS = 0.33, 0.15
"""Of the limit, once the latency is taken off: healthy machines reach 50 % and more; of sends and receives 18 %, for
NCCL divides its channels among the peers (sendrecv of 64 MiB: 262 GB/s on 2 H200s, 157 on 4, 81 on 8, of 450)."""

_MOST_LATENCY_US, _MOST_LATENCY_US_A_RANK = 10.0, 2.0
"""Of the smallest all-reduce inside a node, 8 H200s with the slowest host 17 µs, 2 of them 9."""

_HOP_US = 15.0
"""Of one hop between nodes: 5 µs over InfiniBand, three times that over a network that is slow to answer."""

_FEWEST_POINTS = 4
"""Measured sizes that make a curve; between fewer, straight lines are far from what protocols do."""

_NVLS = "NVLS"


def from_profile(
    profile: Profile, collective: Collective, row: CollectiveRow, *, nccl: str | None
) -> ExpectedTime | None:
    """The time by the profile's points for this collective, number of GPUs and algorithm; None where it has none.

    Between points straight lines hold, below the smallest its time, beyond the largest its bandwidth. From another
    number of GPUs it is scaled by the bytes that pass a link. `nccl` is the version that measured the row. In place is
    expected to take as long as out of place: on 4 H200s it takes 0 to 5 % less.
    """
    if profile.match.generic is not None or row.nodes > 1 or row.ranks < 2:
        return None
    nvls = (row.algorithm or "").upper().startswith(_NVLS)
    try:
        points = curve(profile, collective, row.ranks, row.ranks, nvls=nvls)
    except UsageError:
        return None
    time_us = points.at(row.size_bytes) * MICROSECONDS_PER_SECOND
    tolerance = _tolerance(profile, collective, row.ranks, nccl)
    kind = "" if tolerance is not MODELLED else ", by a model"
    return ExpectedTime(time_us, f"profile {profile.name}{kind}", tolerance)


def from_limit(collective: Collective, row: CollectiveRow) -> ExpectedTime | None:
    """The longest time of healthy machines with such links, whatever they are; None where the limit is not known."""
    factor = collective.busbw_factor(row.ranks)
    if not row.limit_gb_s or not factor:
        return None
    hops = 2 * math.ceil(math.log2(row.nodes)) * _HOP_US
    latency_us = _MOST_LATENCY_US + _MOST_LATENCY_US_A_RANK * row.ranks / row.nodes + hops
    share = _LEAST_SHARE_OF_SENDS if collective.point_to_point else _LEAST_SHARE
    seconds = row.size_bytes * factor / (share * row.limit_gb_s * BYTES_PER_GB)
    source = f"{share:.0%} of the limit, which every healthy machine on record reaches"
    return ExpectedTime(latency_us + seconds * MICROSECONDS_PER_SECOND, source, LEAST_KNOWN)


def _tolerance(profile: Profile, collective: Collective, ranks: int, nccl: str | None) -> Tolerance:
    """By the origin of the profile's points for this very number of GPUs."""
    found = [
        each
        for quantity in ("time_us", "busbw_gb_s")
        for each in profile.find(f"{collective.name}.{quantity}", gpus=ranks)
        if each.size_bytes is not None and each.kind is ExpectedKind.MEASURED and not each.nvls
    ]
    if len(found) < _FEWEST_POINTS:
        return MODELLED
    versions = {_release(each.nccl) for each in found}
    return MEASURED if nccl is not None and versions == {_release(nccl)} else OF_ANOTHER_NCCL


def _release(version: str | None) -> str:
    """The release of a version of NCCL: '2.28' of '2.28.9'."""
    return ".".join((version or "").split(".")[:2])
