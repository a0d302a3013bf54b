"""Models NCCL variables of simulated ranks: those with a known effect, and the GPU pairs that lose peer access."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpubench.conditions import nccl_settings
from gpubench.conditions.circumstances import OFF, Facts
from gpubench.errors import UsageError
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology, is_beyond_policy, level_allows
from gpubench.model.profiles.fault import ENV, Fault, Subject
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.settings import ALGORITHM_VARIABLE, PER_COMMUNICATOR, PROTOCOL_VARIABLE
from gpubench.simulated.choices import is_known_choice
from gpubench.simulated.links import NodeLinks, node_links
from gpubench.simulated.node import healthy_node

NVLS = "NCCL_NVLS_ENABLE"


def job_variables(environment: Mapping[str, str], nodes: int) -> list[Fault]:
    """Return the NCCL variables of an environment as one fault per node."""
    settings = tuple((ENV, f"{name}={value}") for name, value in sorted(environment.items()))
    return [Fault(Subject.NODE, settings, number) for number in range(nodes)] if settings else []


def variables_by_node(faults: Iterable[Fault]) -> dict[int, dict[str, str]]:
    """Return the NCCL variables of each node that has any. A later fault replaces an earlier one."""
    found: dict[int, dict[str, str]] = {}
    for fault in faults:
        if fault.variables:
            found.setdefault(fault.node_number, {}).update(fault.variables)
    return found


def distinct_variables(faults: Iterable[Fault]) -> list[dict[str, str]]:
    """Return the distinct sets of variables of all nodes."""
    return [dict(each) for each in {tuple(sorted(own.items())) for own in variables_by_node(faults).values()}]


def known_effects(profile: Profile, variables: Mapping[str, str], nodes: int = 1) -> dict[str, str]:
    """Return the variables with a known effect on this machine. The simulation ignores all others."""
    node, many = Topology(healthy_node(profile)), nodes > 1
    effects = {name: knows for name, knows in _EFFECTS.items() if not (many and name in PER_COMMUNICATOR)}
    return {name: value for name, value in variables.items() if name in effects and effects[name](node, value)}


def check_variables(profile: Profile, faults: Iterable[Fault], nodes: int) -> None:
    """Raise UsageError for a requested variable whose effect on this machine is unknown."""
    for fault in faults:
        unknown = fault.variables.keys() - known_effects(profile, fault.variables, nodes).keys()
        if unknown:
            raise UsageError(
                f"--fault {fault}",
                expected=f"a variable with a known effect on {profile.name}: {', '.join(_EFFECTS)}",
                reason=f"the effect of {', '.join(sorted(unknown))} there is not known; all would pass as healthy",
                next_step=f"{next(iter(fault.variables.items()))[0]}=... gpubench allreduce, on a machine with GPUs",
            )


def _raises_no_level(node: Topology, value: str) -> bool:
    """True if the value does not extend peer access beyond NCCL's default level, where its speed is unknown."""
    paths = {node.path(one, other) for one in node.gpus for other in node.gpus if one is not other}
    return not any(is_beyond_policy(node, path) and level_allows(value, path) for path in paths)


def _is_hopper(node: Topology) -> bool:
    """True for Hopper. Channels, algorithms and protocols were measured on H200s, and H100s have the same SMs and
    NVLinks.
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
"""Whether the effect of a value is known, from docs/evidence.md, docs/validation.md and the profile's own rows."""


def rank_facts(rank: int, variables: Mapping[str, str], node: Snapshot, number: int) -> RankFacts:
    """Return the facts of a simulated rank's process, which may open all NICs."""
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
    """Return the maximum number of channels, or None without a cap. NCCL prefers a minimum to a maximum."""
    most = [
        nccl_settings.nccl_number(variables[name]) or 0 for name in nccl_settings.MOST_CHANNELS if name in variables
    ]
    least = [
        nccl_settings.nccl_number(variables[name]) or 0 for name in nccl_settings.LEAST_CHANNELS if name in variables
    ]
    return max(1, min(most), *least) if most else None


def nccl_links(profile: Profile, faults: Sequence[Fault]) -> NodeLinks:
    """Return the links of a node as NCCL uses them, without peer access that variables forbid. Raises UsageError."""
    links = node_links(profile, faults)
    variables = known_effects(profile, {name: value for fault in faults for name, value in fault.variables.items()})
    lost = pairs_without_peers(profile, variables)
    if not lost:
        return links
    gpus = (
        replace(gpu, staged_with=gpu.staged_with | {other for one, other in lost if one == gpu.index})
        for gpu in links.gpus
    )
    return replace(links, gpus=tuple(gpus))


def pairs_without_peers(profile: Profile, variables: Mapping[str, str]) -> frozenset[tuple[int, int]]:
    """The GPU pairs, by index, that NCCL keeps off peer access because of variables."""
    if (
        all(value in OFF for name, value in variables.items() if name != nccl_settings.P2P_LEVEL)
        and nccl_settings.P2P_LEVEL not in variables
    ):
        return frozenset()
    node = healthy_node(profile)
    run = Facts([Topology(node)], ranks=[rank_facts(0, variables, node, 0)]).circumstances
    return frozenset(pair for pair in run.local_pairs if any(nccl_settings.keep_off_peers(run, pair, run.values)))
