"""The time that a collective should take: from a profile's curves, else from the least that its links let it reach.

docs/profiles.md names the order of the sources and the record that the least rests on.
"""

import math
from collections.abc import Sequence

from gpubench.collectives.between_nodes import Inside, efficiency, expected_between
from gpubench.collectives.curve import Curve, curve
from gpubench.collectives.record import Collective
from gpubench.errors import UsageError
from gpubench.model.paths.busbw_limit import NodeNetwork, network_limit
from gpubench.model.profiles.profile import BUSBW, TIME, Expected, ExpectedKind, Profile
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import (
    LEAST_KNOWN,
    MEASURED,
    MODELLED,
    MODELLED_SENDS,
    OF_ANOTHER_NCCL,
    OVER_ETHERNET,
    OVER_LINKS,
    ExpectedTime,
    Tolerance,
    between_nodes,
)
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

_LEAST_SHARE, _LEAST_SHARE_OF_SENDS = 0.33, 0.15
"""Of the limit, once the latency is taken off: healthy machines reach 50 % and more; of sends and receives 18 %, for
NCCL divides its channels among the peers (sendrecv of 64 MiB: 262 GB/s on 2 H200s, 157 on 4, 81 on 8, of 450)."""

_MOST_LATENCY_US, _MOST_LATENCY_US_A_RANK = 10.0, 2.0
"""Of the smallest all-reduce inside a node, 8 H200s with the slowest host 17 µs, 2 of them 9."""

_HOP_US = 15.0
"""Of one hop between nodes: 5 µs over InfiniBand, three times that over a network that is slow to answer."""

_NVLS = "NVLS"


def from_profile(
    profile: Profile, collective: Collective, row: CollectiveRow, *, nccl: str | None, like_model: bool = False
) -> ExpectedTime | None:
    """The time by the profile's points for this collective, number of GPUs and algorithm; None where it has none.

    Between points straight lines hold, below the smallest its time, beyond the largest its bandwidth. From another
    number of GPUs it is scaled by the bytes that pass a link. `nccl` is the version that measured the row; a simulated
    one is `like_model`, which reduces in NVSwitches where the profile has that. In place is expected to take as long as
    out of place: on 4 H200s it takes 0 to 5 % less. Of other types than float32, and of other reductions than sums,
    what was measured is no more than a model. Of an unknown algorithm the fastest is expected, and what the slowest may
    take is no failure.
    """
    if profile.match.generic is not None or row.nodes > 1 or row.ranks < 2:
        return None
    nvls = like_model or (row.algorithm or "").upper().startswith(_NVLS)
    try:
        points = curve(profile, collective, row.ranks, row.ranks, nvls=nvls)
    except UsageError:
        return None
    time_us = points.at(row.size_bytes) * MICROSECONDS_PER_SECOND
    measured = [each for each in _measured(profile, collective, row.ranks) if each.nvls == nvls or like_model]
    model = MODELLED_SENDS if collective.point_to_point and collective.busbw_factor(row.ranks) == 1.0 else MODELLED
    is_usual = row.dtype == DataType.FLOAT32 and row.op in (None, ReduceOp.SUM)
    tolerance = _tolerance(points, measured, row.size_bytes, nccl, model) if is_usual else model
    kind = ", by a model" if tolerance is model else ""
    source = f"profile {profile.name}{kind}"
    if row.algorithm is None and not like_model:
        fastest_us = curve(profile, collective, row.ranks, row.ranks).at(row.size_bytes) * MICROSECONDS_PER_SECOND
        if fastest_us < time_us:
            return ExpectedTime(fastest_us, f"{source}, NVLS assumed", tolerance.of_faster(time_us / fastest_us))
    return ExpectedTime(time_us, source, tolerance)


def from_network(
    collective: Collective, row: CollectiveRow, network: NodeNetwork, profile: Profile | None
) -> ExpectedTime | None:
    """The time between nodes, by what their NICs carry and what the profile's GPUs reach inside a node or domain.

    None inside a node, where RDMA goes through host memory, for which there is no model unless it is the GPU's own
    memory too, and where the profile does not know such a node. By the algorithm that NCCL's log names, else the one
    that NCCL's own model takes.
    """
    if row.nodes < 2 or profile is None or profile.match.generic is not None:
        return None
    if row.host_staged and network.rdma and not profile.gpu.shared_memory:
        return None
    local, rest = divmod(row.ranks, network.nodes)
    # The one table of more than two NVLink domains is 2 to 3 times slower than the model: only far more is a FAIL.
    size_bytes = 0 if profile.domain is not None and network.nodes > 2 else row.size_bytes
    tolerance = between_nodes(size_bytes) if network.rdma else OVER_ETHERNET
    profile = profile.domain_as_node()
    if rest or local > profile.match.visible or network.ranks != row.ranks:
        return None
    try:
        if network.nodes == 1:
            whole = profile.match.visible
            scale = collective.busbw_factor(local) / collective.busbw_factor(whole)
            seconds = scale * curve(profile, collective, whole, whole).at(row.size_bytes)
            source = f"profile {profile.name}, {row.ranks} GPUs of one NVLink domain"
            return ExpectedTime(seconds * MICROSECONDS_PER_SECOND, source, tolerance)
        found = expected_between(
            collective, row.size_bytes, network, Inside.of(profile, collective, local), row.algorithm
        )
    except UsageError:
        return None
    how = "" if row.algorithm or found.algorithm is None else f", {_NAMES[found.algorithm]} assumed"
    source = f"{network.nodes} nodes by a model: NICs of {network.node_gb_s:g} GB/s a node, profile {profile.name}{how}"
    return ExpectedTime(found.seconds * MICROSECONDS_PER_SECOND, source, tolerance)


def from_links(collective: Collective, row: CollectiveRow, network: NodeNetwork) -> ExpectedTime | None:
    """The time of CPU buffers between nodes, by what their links carry to whoever takes a ring; None on one node."""
    limit = network_limit("RING", collective, network).gb_s
    if row.nodes < 2 or network.ranks != row.ranks or not limit:
        return None
    hops_us = 2 * math.ceil(math.log2(network.nodes)) * _HOP_OF_MPI_US
    seconds = row.size_bytes * collective.busbw_factor(row.ranks) / (limit * efficiency(network) * BYTES_PER_GB)
    source = f"{network.nodes} nodes by their links: {network.node_gb_s:g} GB/s a node"
    return ExpectedTime(hops_us + seconds * MICROSECONDS_PER_SECOND, source, OVER_LINKS)


_HOP_OF_MPI_US = 50.0
"""Of one message over TCP between hosts."""

_NAMES = {"RING": "ring", "TREE": "tree", "NVLSTREE": "NVLSTree"}


def from_limit(collective: Collective, row: CollectiveRow) -> ExpectedTime | None:
    """The longest time of healthy machines with such links; None where the limit is not known.

    Nothing is known of what goes through host memory: where that is by design, links are no measure of it.
    """
    factor = collective.busbw_factor(row.ranks)
    if not row.limit_gb_s or not factor or row.host_staged:
        return None
    hops = 2 * math.ceil(math.log2(row.nodes)) * _HOP_US
    latency_us = _MOST_LATENCY_US + _MOST_LATENCY_US_A_RANK * row.ranks / row.nodes + hops
    share = _LEAST_SHARE_OF_SENDS if collective.point_to_point else _LEAST_SHARE
    seconds = row.size_bytes * factor / (share * row.limit_gb_s * BYTES_PER_GB)
    source = f"{share:.0%} of the limit, which every healthy machine on record reaches"
    return ExpectedTime(latency_us + seconds * MICROSECONDS_PER_SECOND, source, LEAST_KNOWN)


def _measured(profile: Profile, collective: Collective, ranks: int) -> list[Expected]:
    """What was measured of a collective with this very number of GPUs, at known sizes."""
    return [
        each
        for quantity in (TIME, BUSBW)
        for each in profile.find(f"{collective.name}.{quantity}", gpus=ranks)
        if each.size_bytes is not None and each.kind is ExpectedKind.MEASURED
    ]


def _tolerance(
    points: Curve, measured: Sequence[Expected], size_bytes: int, nccl: str | None, model: Tolerance
) -> Tolerance:
    """That of a measured size, by the NCCL that measured it; between two of them wider, up to that of a model.

    A protocol may change anywhere between them. But no size takes longer than a larger one: what the next measured size
    may take, this one may.
    """
    own = [each for each in measured if nccl is not None and _release(each.nccl) == _release(nccl)]
    known, taken = (MEASURED, own) if len(own) > 1 else (OF_ANOTHER_NCCL, measured)
    sizes = [each.size_bytes or 0 for each in taken]
    larger = min((size for size in sizes if size >= size_bytes), default=None)
    if len(sizes) < 2 or (model is MODELLED_SENDS and known is OF_ANOTHER_NCCL):
        return model
    if larger is None or larger == size_bytes or size_bytes <= min(sizes):
        return known
    fail = (1 + known.fail) * points.at(larger) / points.at(size_bytes) - 1
    return model if fail >= model.fail else Tolerance(fail, microseconds=known.microseconds)


def _release(version: str | None) -> str:
    """The release of a version of NCCL: '2.28' of '2.28.9'."""
    return ".".join((version or "").split(".")[:2])
