"""Which NIC a rail uses, by the facts of real nodes."""

from collections.abc import Sequence

from gpubench.model.paths.topology import PATH_CLASSES, Topology


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
