"""The judge of a collective's speed: the profile of its ranks' GPUs, and what else it may be held against."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gpubench.collectives.record import Collective
from gpubench.measure.collective.speed_judge import ExpectedTimes, SpeedJudge
from gpubench.model.paths.peer_policy import split_by_mig
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import OF_THE_PAST, ExpectedTime, between_nodes
from gpubench.model.terms.rank_identity import RankIdentity, why_not_judged
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND

if TYPE_CHECKING:
    from gpubench.conditions.definition.circumstances import Circumstances
    from gpubench.hardware.simulated.times import CollectiveTimes
    from gpubench.model.paths.busbw_limit import NodeNetwork
    from gpubench.model.paths.topology import Topology
    from gpubench.model.profiles.profile import Profile
    from gpubench.model.results.past import PastFigures

_MOST_CHANCE = 1.0
"""Beyond its level: a past that varies so much that twice its time may be chance judges nothing."""

_ROWS = 46
"""Of a usual sweep, 1K to 4G in both placements: so many chances for a row to be called slow by accident."""


def speed_judge_of(
    collective: Collective,
    ranks: Sequence[RankIdentity],
    nccl: str | None,
    asked_profile: str | None,
    past: "PastFigures | None" = None,
) -> Callable[["Circumstances | None"], SpeedJudge]:
    """Makes the judge of what these ranks measure; `nccl` is its version and file, as the metadata have it.

    `past` are earlier results of these machines, None where there are none.
    """
    hosts = tuple(dict.fromkeys(rank.host for rank in ranks))

    def make(circumstances: "Circumstances | None") -> SpeedJudge:
        node = None if circumstances is None else circumstances.nodes.get(ranks[0].node)
        profile = profile_of_ranks(ranks, node, asked_profile)
        version = None if nccl is None else nccl.split(" ")[0]
        joined = None
        if circumstances is not None:
            from gpubench.model.paths.busbw_limit import networks

            joined = networks(circumstances.wiring)
            if circumstances.wiring.domain(0) is not None:
                from gpubench.profiles.matching import domain_of

                profile = domain_of(sorted({rank.gpu for rank in ranks if rank.gpu})) or profile
        network = _of_hosts(ranks, asked_profile) if joined is None else joined[1]
        unlike = why_not_judged(ranks) or split_by_mig([] if circumstances is None else circumstances.nodes.values())
        sources = ExpectedTimes(collective=collective, profile=profile, nccl=version, network=network, unlike=unlike)
        return SpeedJudge(sources if past is None else replace(sources, past=partial(_in_the_past, past)), hosts)

    return make


def _in_the_past(past: "PastFigures", row: CollectiveRow) -> ExpectedTime | None:
    """What earlier results reached, and as far off as they were from each other."""
    figure = past.time_of(row)
    if figure is None or figure.time_us is None:
        return None
    chance = figure.slow_beyond(_ROWS) - 1
    if chance > _MOST_CHANCE:
        return None
    return ExpectedTime(figure.time_us, figure.source, replace(OF_THE_PAST, fail=max(OF_THE_PAST.fail, chance)))


def judge_of_model(
    collective: Collective, times: "CollectiveTimes", nodes: Sequence["Topology"], per_node: int, profile: "Profile"
) -> SpeedJudge:
    """The judge of a simulated machine, held against its profile; of several nodes against the same without faults."""

    def without_faults(row: CollectiveRow) -> ExpectedTime | None:
        if row.nodes == 1 or profile.match.generic is not None:
            return None
        seconds = times.healthy_seconds(collective.name, row.size_bytes, ranks_per_node=per_node)
        source = f"profile {profile.name}, {row.nodes} nodes by a model"
        return ExpectedTime(seconds * MICROSECONDS_PER_SECOND, source, between_nodes(row.size_bytes))

    # Its figures stand for those of the NCCL that the profile's were measured with.
    versions = {each.nccl for each in profile.all_expected if each.quantity.startswith(f"{collective.name}.")}
    nccl = next(iter(sorted(filter(None, versions))), None)
    unlike = split_by_mig(nodes)
    sources = ExpectedTimes(collective=collective, profile=profile, nccl=nccl, past=without_faults, unlike=unlike)
    return SpeedJudge(sources, [node.snapshot.host for node in nodes])


def _of_hosts(ranks: Sequence[RankIdentity], asked: str | None) -> "NodeNetwork | None":
    """What joins hosts without GPUs, by the NICs of the profile that was asked for; None where nobody named one.

    What a host's own interfaces say is no measure: those of containers claim 10 Gb/s whatever carries them.
    """
    nodes = Counter(rank.node for rank in ranks)
    if asked is None or len(nodes) < 2 or any(rank.gpu for rank in ranks) or len(set(nodes.values())) > 1:
        return None
    from gpubench.model.facts.snapshot import NicKind
    from gpubench.model.paths.busbw_limit import NodeNetwork
    from gpubench.model.paths.topology import BITS_PER_BYTE
    from gpubench.profiles.files import find

    profile = find(asked, os.environ)
    rates = [nic.rate_gbit_s / BITS_PER_BYTE for nic in profile.nic if nic.rate_gbit_s]
    if not rates:
        return None
    rdma = any(nic.kind is not NicKind.ETHERNET for nic in profile.nic)
    return NodeNetwork(len(nodes), len(ranks), profile.nics_gb_s, min(rates), rdma)


def profile_of_ranks(ranks: Sequence[RankIdentity], node: "Topology | None", asked: str | None) -> "Profile | None":
    """The profile for as many GPUs a node as there are ranks; None where nodes have different numbers, or no GPU.

    Raises:
        UsageError: there is none of the name asked for, or it or one of the user's own is broken.
    """
    models = {rank.gpu for rank in ranks}
    counts = set(Counter(rank.node for rank in ranks).values())
    if None in models or len(counts) > 1:
        return None
    from gpubench.profiles.nodes import profile_of_gpus

    return profile_of_gpus(sorted(filter(None, models)), counts.pop(), node, os.environ, asked)
