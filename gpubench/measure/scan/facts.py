"""Which NIC a rail uses, and what it carries, by the facts of real nodes."""

from collections import Counter
from collections.abc import Sequence
from statistics import median_low

from gpubench.model.facts.snapshot import NicFacts
from gpubench.model.paths.topology import PATH_CLASSES, Topology

_ACTIVE = "active"


def nic_names(nodes: Sequence[Topology], rails: int) -> tuple[str | None, ...]:
    """The RDMA NIC that is nearer than any other to the GPU of each rail; None where nodes do not agree on one."""
    found = ({_only_name(node, rail) for node in nodes} for rail in range(rails))
    return tuple(names.pop() if len(names) == 1 else None for names in found)


def rail_rates(nodes: Sequence[Topology], rails: int) -> tuple[float | None, ...]:
    """What the nearest RDMA NICs of each rail's GPU carry, GB/s each way, as on most nodes.

    None where it is not known of one node, and where NVLinks join the GPUs of a rail on several nodes. Rails with the
    same nearest NIC share its rate, as all of them are measured at once; the slots of GPU and NIC may carry less than
    its port does.
    """
    by_node = [_rates_of_node(node, rails) for node in nodes]
    found = ([own[rail] for own in by_node] if not _in_one_domain(nodes, rail) else [] for rail in range(rails))
    return tuple(None if None in own or not own else median_low(filter(None, own)) for own in found)


def _in_one_domain(nodes: Sequence[Topology], rail: int) -> bool:
    gpus = [node.gpus[rail] for node in nodes if rail < len(node.gpus)]
    domains = [gpu.fabric.domain for gpu in gpus if gpu.fabric is not None and gpu.fabric.domain is not None]
    return len(set(domains)) < len(domains)


def _rates_of_node(node: Topology, rails: int) -> list[float | None]:
    nearest = [[nic for nic in _nearest_nics(node, rail) if nic.state == _ACTIVE] for rail in range(rails)]
    sharing = Counter(nic.name for own in nearest for nic in own)
    rates: list[float | None] = []
    for rail, own in enumerate(nearest):
        by_slot: dict[str, float] = {}
        slots = {_slot(nic): node.pcie_total(nic).gb_s for nic in own}
        gpu_slot = node.pcie_total(node.gpus[rail]).gb_s if own else None
        for nic in own:
            gb_s = node.limit(node.gpus[rail], nic).gb_s or 0.0
            by_slot[_slot(nic)] = by_slot.get(_slot(nic), 0.0) + gb_s / sharing[nic.name]
        known = gpu_slot and all(slots.values()) and all(by_slot.values())
        carried = sum(min(gb_s, slots[slot] or 0.0) for slot, gb_s in by_slot.items())
        rates.append(min(carried, gpu_slot) if known and gpu_slot and carried else None)
    return rates


def _slot(nic: NicFacts) -> str:
    """The PCIe slot of a NIC, which its ports share: its bus id without the function."""
    return nic.bus_id.rpartition(".")[0] if nic.bus_id else nic.name


def _only_name(node: Topology, rail: int) -> str | None:
    names = [nic.name for nic in _nearest_nics(node, rail)]
    return names[0] if len(names) == 1 else None


def _nearest_nics(node: Topology, rail: int) -> list[NicFacts]:
    """The RDMA NICs with the shortest path to the GPU of a rail; none where no path is known."""
    nics = [nic for nic in node.nics if nic.rdma]
    if rail >= len(node.gpus) or not nics:
        return []
    places = {nic.name: node.path(node.gpus[rail], nic) for nic in nics}
    nearest = next((each for each in PATH_CLASSES if each in places.values()), None)
    return [nic for nic in nics if places[nic.name] == nearest] if nearest is not None else []
