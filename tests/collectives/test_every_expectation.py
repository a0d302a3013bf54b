"""The curves of all profiles, slices, numbers of nodes (1 to 4) and collectives. New ones are included
automatically.
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest

from gpubench.collectives.expected import time_from_network, time_from_profile
from gpubench.collectives.record import Collective
from gpubench.collectives.registry import COLLECTIVES
from gpubench.model.paths.nodes import build_topologies
from gpubench.model.paths.wiring import NodeNetwork, Wiring, assumed_limit, internode_limit
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.ranks import RankIdentity
from gpubench.profiles import load, profile_names
from gpubench.simulated.machine import SimulatedMachine, snapshots
from tests.fakes.measured_rows import row

SIZES = tuple(4**power for power in range(5, 18))
LARGE_BYTES = 2**30
FALL = 0.8
"""Smallest accepted ratio to a smaller size's bandwidth, because a change of protocol costs some. Chosen"""

PROFILES = [name for name in profile_names() if load(name).match.generic is None]


def slices(profile: Profile) -> Iterator[tuple[int, int]]:
    """Yield ranks per node and nodes of all parts and multiples of a profile's machine."""
    if profile.domain is not None:
        yield from ((local, 1) for local in range(2, profile.match.visible + 1))
        yield from ((profile.match.visible, nodes) for nodes in range(2, profile.domain.nodes + 1))
        return
    for nodes in range(1, 5):
        yield from ((local, nodes) for local in range(1, profile.match.visible + 1) if local * nodes > 1)


@cache
def wiring(name: str, local: int, nodes: int) -> Wiring:
    profile = load(name)
    machine = SimulatedMachine(profile.resize_domains(nodes).first_gpus(local), nodes)
    known = dict(enumerate(build_topologies(snapshots(machine))))
    ranks = tuple(
        RankIdentity(
            rank=rank,
            host=f"node{rank // local}",
            node=rank // local,
            local_rank=rank % local,
            pid=0,
            gpu_bus_id=known[rank // local].gpus[rank % local].bus_id,
        )
        for rank in range(local * nodes)
    )
    return Wiring(ranks, known)


@cache
def network_of(name: str, local: int, nodes: int) -> NodeNetwork | None:
    """Return the weakest network between the nodes."""
    found = wiring(name, local, nodes).networks
    return None if found is None else found[0]


@cache
def expected_us(name: str, collective: Collective, local: int, nodes: int) -> list[float] | None:
    """Return the expected times of all sizes. None if there are none."""
    times = []
    for size in SIZES:
        measured = row(size, 1.0, 1.0, collective=collective.name, ranks=local * nodes, nodes=nodes)
        network = network_of(name, local, nodes)
        profile = load(name)
        if nodes == 1:
            found = time_from_profile(profile, collective, measured, nccl=None)
        else:
            found = None if network is None else time_from_network(collective, measured, network, profile)
        if found is None:
            return None
        times.append(found.time_us)
    return times


def limit_gb_s(name: str, collective: Collective, local: int, nodes: int) -> float:
    """Return the busbw that the links inside a node and the NICs allow."""
    network = network_of(name, local, nodes)
    if network is None or network.nodes == 1:
        return assumed_limit(collective, wiring(name, local, nodes)).gb_s or 0.0
    inside = assumed_limit(collective, wiring(name, local, 1)).gb_s if local > 1 else None
    return min(internode_limit(None, collective, network).gb_s or 0.0, inside or math.inf)


def ring_limit_gb_s(name: str, collective: Collective, local: int, nodes: int) -> float:
    """Return the busbw that rings allow, without NVSwitch reductions and trees, which move less data."""
    network, limit = network_of(name, local, nodes), limit_gb_s(name, collective, local, nodes)
    if collective.name != "allreduce":
        return limit
    across = network.node_gb_s if network is not None and network.nodes > 1 else math.inf
    return min(limit, load(name).carried_gb_s("allreduce", local) or math.inf, across)


def busbw(collective: Collective, ranks: int, times: list[float]) -> list[float]:
    """Return the GB/s of all sizes."""
    return [size * collective.busbw_factor(ranks) / time / 1e3 for size, time in zip(SIZES, times, strict=True)]


def is_part_of_xgmi(name: str, local: int) -> bool:
    """Return True if RCCL may use only some links: it builds rings of all xGMI links for 2, 4 and 8 GPUs."""
    return name.startswith("mi3") and local < 8


def wrong_with(name: str, collective: Collective, local: int, nodes: int) -> Iterator[str]:
    """Yield descriptions of what is impossible about a curve."""
    times = expected_us(name, collective, local, nodes)
    # Two GPUs of a node use their xGMI link in one direction for each of the two rings.
    if times is None or (nodes > 1 and is_part_of_xgmi(name, local)):
        return
    speeds = busbw(collective, local * nodes, times)
    limit, ring = (of(name, collective, local, nodes) for of in (limit_gb_s, ring_limit_gb_s))
    if not all(one < other for one, other in pairwise(times)):
        yield "a larger size takes no longer"
    falls = [one / other for one, other in pairwise(reversed(speeds))]
    if min(falls) < FALL:
        yield f"bandwidth falls to {min(falls):.0%} at four times the size"
    for size, speed in zip(SIZES, speeds, strict=True):
        if speed >= limit:
            yield f"{speed:.4g} of {limit:.4g} GB/s at {size}"
        elif size >= LARGE_BYTES and speed <= ring / 2 and not is_part_of_xgmi(name, local):
            yield f"{speed:.4g}, less than half of {ring:.4g} GB/s at {size}"


@pytest.mark.parametrize("name", PROFILES)
def test_every_expectation_is_a_size_curve_below_the_limit_and_above_half_of_it(name: str) -> None:
    assert not [
        f"{collective.name} on {nodes} × {local}: {words}"
        for collective in COLLECTIVES
        for local, nodes in slices(load(name))
        for words in wrong_with(name, collective, local, nodes)
    ]


@pytest.mark.parametrize("name", PROFILES)
def test_one_gpu_more_changes_an_expectation_by_less_than_a_factor_of_two(name: str) -> None:
    uneven = []
    for collective in COLLECTIVES:
        for one, other in pairwise(slices(load(name))):
            pair = [expected_us(name, collective, *each) for each in (one, other)]
            if one[1] != other[1] or None in pair or is_part_of_xgmi(name, min(one[0], other[0])):
                continue
            first, second = (times or [] for times in pair)
            ratios = [a / b for a, b in zip(first, second, strict=True)]
            if not 0.5 < min(ratios) <= max(ratios) < 2:
                uneven.append(f"{collective.name} on {one} and {other}: {min(ratios):.2g} to {max(ratios):.2g}")
    assert not uneven


def test_something_is_expected_of_every_slice_of_every_profile_with_several_gpus() -> None:
    unknown = [
        f"{name}: {collective.name} on {local}"
        for name in PROFILES
        for collective in COLLECTIVES
        for local, nodes in slices(load(name))
        if nodes == 1 and expected_us(name, collective, local, 1) is None
    ]
    assert not unknown
