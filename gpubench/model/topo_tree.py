"""The PCI tree of a node as rows: NUMA nodes, host bridges, switches, GPUs, NICs, and what the links between carry."""

from collections.abc import Iterator, Sequence

from gpubench.model.links import pcie_ceiling_gb_s
from gpubench.model.snapshot import GpuFacts
from gpubench.model.topo_rows import TreeRow
from gpubench.model.topology import Device, Topology, rounded


def tree_rows(node: Topology) -> Iterator[TreeRow]:
    """The PCI tree that holds GPUs, NICs and the switches above them; empty where no place is known."""
    host = node.snapshot.host
    machine = node.snapshot.machine
    placed = [device for device in node.devices if device.place.host_bridge]
    numa_nodes = sorted({device.place.numa_node for device in placed}, key=lambda number: (number is None, number))
    for numa in numa_nodes:
        cpus = next((each.cpus for each in machine.numa_nodes if each.number == numa), "")
        what = f"CPUs {cpus}" if cpus else ""
        yield TreeRow(node=host, depth=0, element=_numa_name(numa), what=what, link=None, gb_s=None)
        here = [device for device in placed if device.place.numa_node == numa]
        for bridge in dict.fromkeys(device.place.host_bridge for device in here):
            yield TreeRow(node=host, depth=1, element=str(bridge), what="host bridge", link=None, gb_s=None)
            yield from _below(node, [each for each in here if each.place.host_bridge == bridge], 0)


def _below(node: Topology, devices: Sequence[Device], level: int) -> Iterator[TreeRow]:
    """What hangs below `level` switches, switch by switch; devices first."""
    host = node.snapshot.host
    switches: dict[str, list[Device]] = {}
    for device in devices:
        if len(device.place.switches) > level:
            switches.setdefault(device.place.switches[level], []).append(device)
            continue
        link, gb_s = link_text(device), pcie_ceiling_gb_s(device.pcie)
        yield TreeRow(
            node=host, depth=level + 2, element=device.device, what=_what(device), link=link, gb_s=rounded(gb_s)
        )
    uplinks = {switch.bus_id: switch.link for switch in node.snapshot.switches}
    for bus_id, members in switches.items():
        uplink = uplinks.get(bus_id)
        link = None if uplink is None or uplink.width is None else f"PCIe {uplink.max_generation} x{uplink.width}"
        gb_s = None if uplink is None else pcie_ceiling_gb_s(uplink)
        yield TreeRow(node=host, depth=level + 2, element=bus_id, what="PCIe switch", link=link, gb_s=rounded(gb_s))
        yield from _below(node, members, level + 1)


def link_text(device: Device) -> str | None:
    """A PCIe link now, and at most where that differs: '4 x16', '1 x16 (idle; 5 x16)', '5 x8 of 5 x16'."""
    link = device.pcie
    if link.generation is None or link.width is None:
        return None
    now = f"{link.generation} x{link.width}"
    most = f"{link.max_generation or link.generation} x{link.max_width or link.width}"
    if now == most:
        return now
    only_slow = link.width == (link.max_width or link.width)
    return f"{now} (idle; {most})" if only_slow and isinstance(device, GpuFacts) and device.idle else f"{now} of {most}"


def _numa_name(number: int | None) -> str:
    return "NUMA node unknown" if number is None else f"NUMA node {number}"


def _what(device: Device) -> str:
    if isinstance(device, GpuFacts):
        return " ".join(filter(None, (device.bus_id, device.name)))
    rate = f"{device.rate_gbit_s:g} Gb/s" if device.rate_gbit_s else None
    return " ".join(filter(None, (device.bus_id, device.kind, rate)))
