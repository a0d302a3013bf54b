"""The PCI tree of a node as rows: NUMA nodes, host bridges, switches, GPUs, NICs, and what the links between carry."""

from collections.abc import Iterator, Sequence

from gpubench.model.facts.pci_capabilities import PciKind
from gpubench.model.facts.snapshot import GpuFacts, PciDevice, PcieLink, PciPlace
from gpubench.model.paths.links import loaded_link, pcie_ceiling_gb_s, pcie_text
from gpubench.model.paths.topology import Device, Topology, rounded
from gpubench.model.results.topo.rows import TreeRow

Placed = Device | PciDevice
"""What has a place in the tree: GPUs, NICs, and devices of unknown kind."""


def _place(device: Placed) -> PciPlace:
    return device.place or PciPlace()


def tree_rows(node: Topology) -> Iterator[TreeRow]:
    """The PCI tree of GPUs, NICs, devices of unknown kind and the switches above; empty where no place is known."""
    host = node.snapshot.host
    machine = node.snapshot.machine
    unknown = [each for each in node.snapshot.pci_devices if each.kind is PciKind.UNKNOWN]
    placed = [device for device in (*node.devices, *unknown) if _place(device).host_bridge]
    numa_nodes = sorted({_place(device).numa_node for device in placed}, key=lambda number: (number is None, number))
    for numa in numa_nodes:
        cpus = next((each.cpus for each in machine.numa_nodes if each.number == numa), "")
        what = f"CPUs {cpus}" if cpus else ""
        yield TreeRow(node=host, depth=0, element=_numa_name(numa), what=what, link=None, gb_s=None)
        here = [device for device in placed if _place(device).numa_node == numa]
        for bridge in dict.fromkeys(_place(device).host_bridge for device in here):
            yield TreeRow(node=host, depth=1, element=str(bridge), what="host bridge", link=None, gb_s=None)
            yield from _below(node, [each for each in here if _place(each).host_bridge == bridge], 0)


def _below(node: Topology, devices: Sequence[Placed], level: int) -> Iterator[TreeRow]:
    """The devices and switches below `level` switches; devices first."""
    host = node.snapshot.host
    switches: dict[str, list[Placed]] = {}
    for device in devices:
        above = _place(device).switches
        if len(above) > level:
            switches.setdefault(above[level], []).append(device)
        elif isinstance(device, PciDevice):
            link, gb_s = pcie_text(device.link), pcie_ceiling_gb_s(device.link)
            what = "device of unknown kind"
            yield TreeRow(node=host, depth=level + 2, element=device.bus_id, what=what, link=link, gb_s=rounded(gb_s))
        else:
            link = pcie_text(device.pcie, idle=device.idle if isinstance(device, GpuFacts) else None)
            gb_s = pcie_ceiling_gb_s(loaded_link(device))
            yield TreeRow(
                node=host, depth=level + 2, element=device.device, what=_what(device), link=link, gb_s=rounded(gb_s)
            )
    uplinks = {switch.bus_id: switch.link for switch in node.snapshot.switches}
    for bus_id, members in switches.items():
        uplink = uplinks.get(bus_id, PcieLink())
        link, gb_s = pcie_text(uplink), pcie_ceiling_gb_s(uplink)
        yield TreeRow(node=host, depth=level + 2, element=bus_id, what="PCIe switch", link=link, gb_s=rounded(gb_s))
        yield from _below(node, members, level + 1)


def _numa_name(number: int | None) -> str:
    return "NUMA node unknown" if number is None else f"NUMA node {number}"


def _what(device: Device) -> str:
    if isinstance(device, GpuFacts):
        return " ".join(filter(None, (device.bus_id, device.name)))
    rate = f"{device.rate_gbit_s:g} Gb/s" if device.rate_gbit_s else None
    return " ".join(filter(None, (device.bus_id, device.kind, rate)))
