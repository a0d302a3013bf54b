"""The rest of a simulated node, around GPUs and NICs: PCI hops, ports, kernel and driver, all of it healthy.

It is derived from the node, so a fault in a device shows here too. Downstream ports have addresses that are made up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpubench.model.facts.driver_settings import ConfidentialComputing, DriverSettings, Service
from gpubench.model.facts.kernel_settings import IommuFacts, KernelSettings
from gpubench.model.facts.pci_capabilities import AccessControl, PcieErrors, PciKind
from gpubench.model.facts.rdma_port import Gid, RdmaPort
from gpubench.model.facts.snapshot import GpuFacts, NicFacts, NicKind, PciDevice, PcieLink, Snapshot
from gpubench.model.profiles.fault import Fault, Subject

_SIMULATED = "the simulation does not say"
_NO_IOMMU = {"iommu_group": "no IOMMU is simulated", "identity": _SIMULATED}
_NO_ERRORS = PcieErrors(correctable=0, nonfatal=0, fatal=0)
_NO_COUNTS: Mapping[str, int] = {"link_downed": 0, "port_rcv_errors": 0, "symbol_error": 0}
_ROCE_GIDS = (
    Gid(index=0, kind="IB/RoCE v1", address="link_local"),
    Gid(index=1, kind="RoCE v2", address="link_local"),
    Gid(index=2, kind="IB/RoCE v1", address="ipv4"),
    Gid(index=3, kind="RoCE v2", address="ipv4"),
)
_INFINIBAND_GIDS = (Gid(index=0, kind="IB/RoCE v1", address="link_local"),)
_LINK_LAYERS = {NicKind.INFINIBAND: "InfiniBand", NicKind.ROCE: "Ethernet", NicKind.EFA: "Unspecified"}


def with_surroundings(node: Snapshot) -> Snapshot:
    """The node with its surroundings."""
    return replace(
        node,
        pci_devices=_pci_devices(node),
        rdma_ports=tuple(_port(nic, number) for number, nic in enumerate(each for each in node.nics if each.rdma)),
        kernel=KernelSettings(options=(), wsl=False, imex=False, iommu=IommuFacts(units=())),
        driver_settings=_driver_settings(node),
    )


_REDIRECTS = AccessControl(
    capable=("request_redirect", "completion_redirect"), enabled=("request_redirect", "completion_redirect")
)
_TRANSLATING = IommuFacts(units=("dmar0",), group_types={"1": "DMA"})


def with_faults_around(node: Snapshot, faults: Iterable[Fault]) -> Snapshot:
    """The node with the faults of its surroundings, which it already has."""
    for fault in faults:
        if fault.subject is Subject.NODE and fault.get("acs"):
            devices = (
                replace(each, access_control=_REDIRECTS) if each.access_control is not None else each
                for each in node.pci_devices
            )
            node = replace(node, pci_devices=tuple(devices))
        if fault.subject is Subject.NODE and fault.get("iommu"):
            grouped = tuple(replace(each, iommu_group=1) for each in node.pci_devices)
            node = replace(node, kernel=replace(node.kernel, iommu=_TRANSLATING), pci_devices=grouped)
        if fault.subject is Subject.NIC and (errors := fault.get("errors")) and fault.index is not None:
            node = replace(
                node, rdma_ports=tuple(_counted(each, node.nics, fault.index, int(errors)) for each in node.rdma_ports)
            )
    return node


def _counted(port: RdmaPort, nics: Sequence[NicFacts], index: int, errors: int) -> RdmaPort:
    own = index < len(nics) and port.nic == nics[index].name
    return replace(port, counters={**(port.counters or {}), "symbol_error": errors}) if own else port


def _pci_devices(node: Snapshot) -> tuple[PciDevice, ...]:
    found: dict[str, PciDevice] = {}
    ports: dict[str, int] = {}
    uplinks = {switch.bus_id: switch for switch in node.switches}

    def add(bus_id: str, kind: PciKind, above: str | None, link: PcieLink) -> str:
        if bus_id not in found:
            found[bus_id] = _device(bus_id, kind, above, link)
        return bus_id

    def below(switch: str, link: PcieLink) -> str:
        """A downstream port of its own for what hangs below a switch."""
        ports[switch] = ports.get(switch, 0) + 1
        address = f"{switch.rpartition(':')[0]}:{ports[switch]:02x}.0"
        return add(address, PciKind.DOWNSTREAM_PORT, switch, link)

    def reach(root_port: str | None, switches: tuple[str, ...], link: PcieLink) -> str | None:
        """The port to which something with these above it is connected, which is made where it is not there yet."""
        if not switches:
            return root_port and add(root_port, PciKind.ROOT_PORT, None, link)
        last = switches[-1]
        if last not in found:
            own = uplinks[last].link
            add(last, PciKind.UPSTREAM_PORT, reach(root_port, switches[:-1], own), own)
        return below(last, link)

    devices: tuple[GpuFacts | NicFacts, ...] = (*node.gpus, *node.nics)
    for device in devices:
        if device.bus_id is not None and device.bus_id not in found:
            kind = PciKind.GPU if isinstance(device, GpuFacts) else PciKind.NIC
            above = reach(device.place.root_port, device.place.switches, device.pcie)
            add(device.bus_id, kind, above, device.pcie)
    return tuple(found[bus_id] for bus_id in sorted(found))


def _device(bus_id: str, kind: PciKind, above: str | None, link: PcieLink) -> PciDevice:
    unknown = dict(_NO_IOMMU)
    if kind is PciKind.GPU:
        unknown |= dict.fromkeys(("bar1_bytes", "bar1_most_bytes", "minor"), _SIMULATED)
    return PciDevice(
        bus_id=bus_id,
        kind=kind,
        above=above,
        link=link,
        address_translation=False if kind in (PciKind.GPU, PciKind.NIC) else None,
        access_control=None if kind in (PciKind.GPU, PciKind.NIC) else AccessControl(),
        errors=_NO_ERRORS,
        unknown=unknown,
    )


def _port(nic: NicFacts, number: int) -> RdmaPort:
    return RdmaPort(
        nic=nic.name,
        physical_state="linkup" if nic.state == "active" else "polling",
        link_layer=_LINK_LAYERS[nic.kind],
        counters=_NO_COUNTS,
        hardware_counters={},
        gids=_ROCE_GIDS if nic.kind is NicKind.ROCE else _INFINIBAND_GIDS,
        device_file=f"/dev/infiniband/uverbs{number}",
    )


def _driver_settings(node: Snapshot) -> DriverSettings:
    """Nothing set. A node with NVSwitch has its fabric manager, of the driver's version, unless others run it."""
    fabric_manager = Service(running=bool(node.nvswitches), version=node.driver.version if node.nvswitches else None)
    if node.machine.virtual_machine:
        fabric_manager = Service()
    return DriverSettings(
        parameters={"NvLinkDisable": "0"},
        registry_keys={},
        configured={},
        services={
            "nv-fabricmanager": fabric_manager,
            "nvlsm": Service(running=False),
            "nvidia-imex": Service(running=False),
        },
        confidential_computing=ConfidentialComputing(
            enabled=False, developer_tools=False, environment="unavailable", multi_gpu="none"
        ),
        nvlink_bandwidth_mode="full",
        unknown={"nvlink_bandwidth_reduced": _SIMULATED},
    )
