"""Phase 0 of real nodes, before anything is measured: what is wrong by their facts, and which NIC a rail uses."""

from collections.abc import Sequence

from gpubench.conditions.checks import CHECKS, run
from gpubench.conditions.definition.circumstances import Facts
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import PATH_CLASSES, Topology
from gpubench.model.results.measurements import Need
from gpubench.model.terms.verdict import Finding

_OF_FACTS = tuple(check for check in CHECKS if check.needs is Need.FACTS)


def fact_findings(nodes: Sequence[Topology]) -> tuple[Finding, ...]:
    """The findings that `gpubench check --quick` has on these nodes, where they have GPUs, but for their profiles."""
    if not any(node.gpus for node in nodes):
        return ()
    return run(_OF_FACTS, Facts(nodes, group(nodes)))


def nic_names(nodes: Sequence[Topology], rails: int) -> tuple[str | None, ...]:
    """The RDMA NIC that is nearer than any other to the GPU of each rail; None where nodes do not agree on one."""
    found = ({_nearest_nic(node, rail) for node in nodes} for rail in range(rails))
    return tuple(names.pop() if len(names) == 1 else None for names in found)


def _nearest_nic(node: Topology, rail: int) -> str | None:
    nics = [nic for nic in node.nics if nic.rdma]
    if rail >= len(node.gpus) or not nics:
        return None
    places = {nic.name: node.path(node.gpus[rail], nic) for nic in nics}
    nearest = next((each for each in PATH_CLASSES if each in places.values()), None)
    names = [name for name, path in places.items() if path == nearest]
    return names[0] if len(names) == 1 else None
