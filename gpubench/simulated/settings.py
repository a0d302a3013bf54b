"""A model of NCCL variables on simulated ranks.

It has the variables whose effect is known, the GPU pairs that lose peer access, and the times of NCCL's algorithms and
protocols.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpubench.collectives.expected import BASE_US, NVLINK_US
from gpubench.collectives.record import Collective
from gpubench.conditions import nccl_settings
from gpubench.conditions.circumstances import OFF, Facts
from gpubench.conditions.nccl_settings import ALGORITHMS, PROTOCOLS, chosen
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology, is_beyond_policy, level_allows
from gpubench.model.profiles.fault import ENV, Fault, Subject
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.settings import ALGORITHM_VARIABLE, PER_COMMUNICATOR, PROTOCOL_VARIABLE
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND
from gpubench.simulated.links import NodeLinks, node_links
from gpubench.simulated.node import healthy_node

NVLS = "NCCL_NVLS_ENABLE"


def job_variables(environment: Mapping[str, str], nodes: int) -> list[Fault]:
    """Return the NCCL variables of an environment as faults, one for each node."""
    settings = tuple((ENV, f"{name}={value}") for name, value in sorted(environment.items()))
    return [Fault(Subject.NODE, settings, number) for number in range(nodes)] if settings else []


def variables_by_node(faults: Iterable[Fault]) -> dict[int, dict[str, str]]:
    """Return the NCCL variables by node, for nodes that have any. A later fault overrides an earlier one."""
    found: dict[int, dict[str, str]] = {}
    for fault in faults:
        if fault.variables:
            found.setdefault(fault.node_number, {}).update(fault.variables)
    return found


def distinct_variables(faults: Iterable[Fault]) -> list[dict[str, str]]:
    """Return the different sets of NCCL variables that nodes have."""
    distinct = {tuple(sorted(variables.items())) for variables in variables_by_node(faults).values()}
    return [dict(variables) for variables in distinct]


_SHARES = {
    "ring": {"ll": 0.44, "ll128": 0.92, "simple": 1.0},
    "tree": {"ll": 0.41, "ll128": 7 / 9, "simple": 0.92},
}
"""Fraction of the link bandwidth by algorithm and protocol. In a tree, every rank forwards all data in both
directions.

The values come from NCCL (src/graph/tuning.cc in NCCL 2.28), except those for LL. On four H200s, LL reached 0.44 of
Simple in a ring, and 0.31 of a Simple ring in a tree. Kind: derived. The model is within 40 % of the times in
docs/how-to/nccl-settings.md, except for a tree with Simple at 16 MiB, which took twice as long.
"""

_NAMES = {ALGORITHM_VARIABLE: ALGORITHMS, PROTOCOL_VARIABLE: PROTOCOLS}


def is_known_choice(name: str, value: str) -> bool:
    """True if a value of NCCL_ALGO or NCCL_PROTO allows a ring, a tree or a protocol, with no exceptions by
    collective.
    """
    found = chosen(value, _NAMES[name])
    known = {*_SHARES} if name == ALGORITHM_VARIABLE else PROTOCOLS
    return set(found) == {""} and not known.isdisjoint(found[""])


def allows_nvls(variables: Mapping[str, str]) -> bool:
    """True if NCCL may still reduce in NVSwitches (NVLS), which needs the Simple protocol."""
    needed = {ALGORITHM_VARIABLE: "nvls", PROTOCOL_VARIABLE: "simple"}
    return all(
        word in chosen(variables[name], _NAMES[name]).get("", ()) for name, word in needed.items() if name in variables
    )


def slower_by_choice(
    variables: Mapping[str, str], collective: Collective, size_bytes: int, ranks: int, gb_s: float
) -> float:
    """Return how many times slower NCCL is with these variables than with its fastest ring or tree.

    `gb_s` is the busbw without restrictions. Raise CouldNotMeasureError if NCCL has none of the allowed algorithms for
    this collective.
    """
    if collective.point_to_point or variables.keys().isdisjoint(_NAMES):
        return 1.0
    times = dict(_times_by_choice(collective, size_bytes, ranks, gb_s))
    allowed = {name: chosen(value, _NAMES[name])[""] for name, value in variables.items() if name in _NAMES}
    algorithms = allowed.get(ALGORITHM_VARIABLE, ALGORITHMS)
    protocols = allowed.get(PROTOCOL_VARIABLE, PROTOCOLS)
    allowed_times = [
        seconds for (algorithm, protocol), seconds in times.items() if algorithm in algorithms and protocol in protocols
    ]
    if not allowed_times:
        raise CouldNotMeasureError(f"NCCL has no {' or '.join(sorted(algorithms))} for {collective.name}")
    return min(allowed_times) / min(times.values())


def _times_by_choice(
    collective: Collective, size_bytes: int, ranks: int, gb_s: float
) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the time in seconds for each algorithm and protocol, with the latencies that NCCL itself compares."""
    is_all_reduce = collective.name == "allreduce"
    link_seconds = size_bytes * collective.busbw_factor(ranks) / (gb_s * BYTES_PER_GB)
    steps = (2 if is_all_reduce else 1) * (ranks - 1)
    for algorithm in ("ring", "tree") if is_all_reduce else ("ring",):
        # With two ranks, a tree is the same as a ring.
        part = (ranks - 1) / ranks if algorithm == "tree" and ranks > 2 else 1.0
        for protocol, share in _SHARES[algorithm].items():
            base_us = BASE_US[algorithm.upper()][protocol.upper()]
            hop_us = NVLINK_US[algorithm.upper()][protocol.upper()]
            latency = (base_us + steps * hop_us) / MICROSECONDS_PER_SECOND
            yield (algorithm, protocol), latency + link_seconds / (share * part)


def known_effects(profile: Profile, variables: Mapping[str, str], nodes: int = 1) -> dict[str, str]:
    """Return the variables whose effect on this machine is known. The simulation ignores all other variables."""
    node, many = Topology(healthy_node(profile)), nodes > 1
    return {
        name: value
        for name, value in variables.items()
        if name in _EFFECTS and not (many and name in PER_COMMUNICATOR) and _EFFECTS[name](node, value)
    }


def check_variables(profile: Profile, faults: Iterable[Fault], nodes: int) -> None:
    """Raise UsageError if a fault sets a variable whose effect on this machine is unknown."""
    for fault in faults:
        unknown = fault.variables.keys() - known_effects(profile, fault.variables, nodes).keys()
        if unknown:
            raise UsageError(
                f"--fault {fault}",
                expected=f"a variable with a known effect on {profile.name}: {', '.join(_EFFECTS)}",
                reason=f"the effect of {', '.join(sorted(unknown))} there is not known, so the machine would pass as "
                "healthy",
                next_step=f"{next(iter(fault.variables.items()))[0]}=... gpubench allreduce, on a machine with GPUs",
            )


def _raises_no_level(node: Topology, value: str) -> bool:
    """True if the value allows no peer access beyond NCCL's default level. The bandwidth of such access is unknown."""
    paths = {node.path(one, other) for one in node.gpus for other in node.gpus if one is not other}
    return not any(is_beyond_policy(node, path) and level_allows(value, path) for path in paths)


def _is_hopper(node: Topology) -> bool:
    """True for Hopper GPUs with NVLinks.

    Channels and algorithms were measured on H200s only, but H100s have the same SMs and NVLinks.
    """
    return all((gpu.compute_capability, bool(gpu.nvlinks)) == ("9.0", True) for gpu in node.gpus)


_EFFECTS: Mapping[str, Callable[[Topology, str], bool]] = {
    nccl_settings.P2P_DISABLE: lambda _node, _value: True,
    nccl_settings.P2P_LEVEL: _raises_no_level,
    NVLS: lambda _node, value: value in ("0", "1", "2"),
    **dict.fromkeys(
        (*nccl_settings.MOST_CHANNELS, *nccl_settings.LEAST_CHANNELS),
        lambda node, value: nccl_settings.nccl_number(value) is not None and _is_hopper(node),
    ),
    ALGORITHM_VARIABLE: lambda node, value: is_known_choice(ALGORITHM_VARIABLE, value) and _is_hopper(node),
    PROTOCOL_VARIABLE: lambda node, value: is_known_choice(PROTOCOL_VARIABLE, value) and _is_hopper(node),
}
"""Functions that return whether a value's effect is known, from docs/explanation/evidence.md,
docs/internals/validation.md and the profile.
"""


def rank_facts(rank: int, variables: Mapping[str, str], node: Snapshot, number: int) -> RankFacts:
    """Return facts about a simulated rank's process, which may open all NICs."""
    return RankFacts(
        rank=rank,
        host=node.host,
        node=number,
        local_rank=0,
        pid=0,
        device_files=tuple(port.device_file for port in node.rdma_ports if port.device_file),
        environment=variables,
    )


def channel_cap(variables: Mapping[str, str]) -> int | None:
    """Return the maximum number of channels. None without a maximum. A larger minimum overrides the maximum, as in
    NCCL.
    """
    most, least = (
        [nccl_settings.nccl_number(variables[name]) or 0 for name in names if name in variables]
        for names in (nccl_settings.MOST_CHANNELS, nccl_settings.LEAST_CHANNELS)
    )
    return max(1, min(most), *least) if most else None


def nccl_links(profile: Profile, faults: Sequence[Fault]) -> NodeLinks:
    """Return a node's links as NCCL uses them, without the peer access that NCCL variables disable.

    Raise UsageError if a fault does not fit the node.
    """
    links = node_links(profile, faults)
    variables = known_effects(profile, {name: value for fault in faults for name, value in fault.variables.items()})
    lost = pairs_without_peers(profile, variables)
    if not lost:
        return links
    gpus = (
        replace(gpu, staged_peers=gpu.staged_peers | {other for one, other in lost if one == gpu.index})
        for gpu in links.gpus
    )
    return replace(links, gpus=tuple(gpus))


def pairs_without_peers(profile: Profile, variables: Mapping[str, str]) -> frozenset[tuple[int, int]]:
    """Return the GPU pairs, by index, for which variables keep NCCL from using peer access."""
    if nccl_settings.P2P_LEVEL not in variables and all(value in OFF for value in variables.values()):
        return frozenset()
    node = healthy_node(profile)
    run = Facts([Topology(node)], ranks=[rank_facts(0, variables, node, 0)]).circumstances
    return frozenset(pair for pair in run.local_pairs if any(nccl_settings.keep_off_peers(run, pair, run.values)))
