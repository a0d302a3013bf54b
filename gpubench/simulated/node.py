"""Build a healthy node from a profile with made-up addresses, and apply faults of PCI devices and settings to it."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts import snapshot
from gpubench.model.paths.topology import pcie_path_class
from gpubench.model.profiles.fault import Fault, Subject
from gpubench.model.profiles.profile import P2P_OK, NicKindOfMachine, Profile
from gpubench.model.terms.verdict import Origin

_BUSES = 256
_FIRST_FLAT_GPU = 6
_FIRST_FLAT_NIC = 3
_FABRIC_CAPABILITY = (9, 0)  # Hopper and later GPUs register with the NVSwitch fabric (`nvmlDeviceGetGpuFabricInfo`)
_IDLE_C = 35
_HEALTHY_MASK = 0xAA
_NO_CLUSTER = "00000000-0000-0000-0000-000000000000"
_COUNTERS: Mapping[str, int] = {"replay": 0, "recovery": 0, "crc_flit": 0}


def healthy_node(profile: Profile) -> snapshot.Snapshot:
    """Return a healthy node. The caller sets host name, boot ID and GPU UUIDs."""
    tree = _PciTree(profile)
    places = [tree.gpu(index) for index in range(profile.match.visible)]
    gpus = tuple(_gpu(profile, tree, index, places) for index in range(profile.match.visible))
    return snapshot.Snapshot(
        host="",
        origin=Origin.SIMULATED,
        source=f"profile {profile.name}",
        machine=_machine(profile),
        driver=snapshot.DriverFacts(version=profile.node.driver, cuda=profile.node.cuda),
        gpudirect=snapshot.GpuDirectFacts(peermem=profile.node.peermem, dma_buf=profile.node.dma_buf),
        gpus=gpus,
        nics=tuple(_nic(nic, tree, number) for number, nic in enumerate(profile.nic)),
        switches=tuple(tree.switches.values()),
        nvswitches=tree.nvswitches,
        pairs=tuple(_pair(profile, one, other) for one in gpus for other in gpus if one is not other),
    )


class _PciTree:
    """Assign PCI bus numbers.

    There is a host bridge for every switch directly below a CPU, and one per NUMA node for all other devices.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._buses = 0
        self._ports: dict[str, int] = {}
        self.switches: dict[str, snapshot.PciSwitch] = {}
        self._bridges = [self._bridge() for _ in range(max(1, profile.node.numa_nodes))]
        for switch in profile.switch:
            parent = self.switches.get(switch.above or "")
            place = self._below(parent) if parent else self._root_port(self._bridge(), switch.numa)
            link = _trained(switch.pcie_generation, switch.pcie_width)
            self.switches[switch.name] = snapshot.PciSwitch(bus_id=self._device(), link=link, place=place)
        nvlink = profile.nvlink
        count = nvlink.switches if nvlink and not profile.node.virtual_machine else 0
        self.nvswitches = tuple(self._device() for _ in range(count))

    def gpu(self, index: int) -> tuple[str, snapshot.PciPlace]:
        if self._profile.node.flat_pci:
            return f"0000:00:{_FIRST_FLAT_GPU + index:02x}.0", snapshot.PciPlace(host_bridge=self._bridges[0])
        places = self._profile.gpu.places
        return self._placed(places[index] if places else None, index, self._profile.match.visible)

    def nic(self, index: int, place: str | None) -> tuple[str, snapshot.PciPlace]:
        """Return a NIC's bus ID and location. On a flat PCI bus, NICs come before the GPUs as long as there is room."""
        if not self._profile.node.flat_pci:
            return self._placed(place, 0, 1)
        room = _FIRST_FLAT_GPU - _FIRST_FLAT_NIC
        number = index + (_FIRST_FLAT_NIC if index < room else self._profile.match.visible + _FIRST_FLAT_NIC)
        return f"0000:00:{number:02x}.0", snapshot.PciPlace(host_bridge=self._bridges[0])

    def _placed(self, place: str | None, index: int, count: int) -> tuple[str, snapshot.PciPlace]:
        if place is not None:
            return self._device(), self._below(self.switches[place])
        numa_nodes = self._profile.node.numa_nodes
        numa = index * numa_nodes // count if numa_nodes else None
        return self._device(), self._root_port(self._bridges[numa or 0], numa)

    def _below(self, switch: snapshot.PciSwitch) -> snapshot.PciPlace:
        return replace(switch.place, switches=(*switch.place.switches, switch.bus_id))

    def _root_port(self, bridge: str, numa: int | None) -> snapshot.PciPlace:
        self._ports[bridge] = self._ports.get(bridge, 0) + 1
        port = f"{bridge.removeprefix('pci')}:{self._ports[bridge]:02x}.0"
        return snapshot.PciPlace(host_bridge=bridge, root_port=port, numa_node=numa)

    def _bridge(self) -> str:
        return f"pci{self._bus()}"

    def _device(self) -> str:
        return f"{self._bus()}:00.0"

    def _bus(self) -> str:
        number, self._buses = self._buses, self._buses + 1
        return f"{number // _BUSES:04x}:{number % _BUSES:02x}"


def _trained(generation: int | None, width: int | None) -> snapshot.PcieLink:
    generation, width = generation or None, width or None
    return snapshot.PcieLink(generation=generation, width=width, max_generation=generation, max_width=width)


def _cpus(profile: Profile, numa: int | None) -> str:
    cpus, numa_nodes = profile.node.cpus, profile.node.numa_nodes
    if numa is None:
        return f"0-{cpus - 1}"
    return f"{cpus * numa // numa_nodes}-{cpus * (numa + 1) // numa_nodes - 1}"


def _machine(profile: Profile) -> snapshot.HostFacts:
    node = profile.node
    return snapshot.HostFacts(
        cpus=node.cpus,
        sockets=node.sockets,
        numa_nodes=tuple(snapshot.NumaNode(number=numa, cpus=_cpus(profile, numa)) for numa in range(node.numa_nodes)),
        virtual_machine=node.virtual_machine,
        product=profile.title,
    )


def _gpu(
    profile: Profile, tree: _PciTree, index: int, places: Sequence[tuple[str, snapshot.PciPlace]]
) -> snapshot.GpuFacts:
    kind = profile.gpu
    bus_id, place = places[index]
    missing = {"bar1_bytes": kind.bar1_bytes, "ecc": kind.ecc, "mig": kind.mig}
    return snapshot.GpuFacts(
        index=index,
        bus_id=bus_id,
        name=kind.name,
        cuda_index=index,
        compute_capability=kind.compute_capability,
        multiprocessors=kind.multiprocessors,
        memory_bytes=kind.memory_bytes,
        memory_used_bytes=0,
        mig=kind.mig,
        ecc=kind.ecc,
        persistence=True,
        idle=True,
        throttle_reasons=(),
        remapped_rows=snapshot.RemappedRows(correctable=0, uncorrectable=0, pending=False, failure=False)
        if kind.ecc
        else None,
        memory_errors=0 if kind.ecc else None,
        temperature_c=_IDLE_C,
        pcie=_trained(kind.pcie_generation, kind.pcie_width),
        pcie_replays=0,
        place=place,
        cpu_affinity=_cpus(profile, place.numa_node),
        nvlinks=_nvlinks(profile, tree, index, [address for address, _ in places]),
        fabric=_fabric(profile),
        cuda_features=_cuda_features(profile),
        bar1_bytes=kind.bar1_bytes,
        processes=(),
        unknown={name: "not in the profile" for name, value in missing.items() if value is None},
    )


def _nvlinks(profile: Profile, tree: _PciTree, index: int, bus_ids: Sequence[str]) -> tuple[snapshot.NvLink, ...]:
    nvlink = profile.nvlink
    if nvlink is None:
        return ()
    if nvlink.to is snapshot.NvlinkPeer.SWITCH:
        peers = [tree.nvswitches[i % len(tree.nvswitches)] if tree.nvswitches else None for i in range(nvlink.links)]
    else:
        others = [(pair[1] if pair[0] == index else pair[0], pair[2]) for pair in nvlink.pairs if index in pair[:2]]
        peers = [bus_ids[other] for other, links in others if other < len(bus_ids) for _ in range(links)]
    return tuple(
        snapshot.NvLink(
            number=number,
            active=True,
            version=nvlink.version,
            raw_gb_s=nvlink.raw_gb_s,
            peer=nvlink.to,
            peer_bus_id=peer,
            errors=_COUNTERS,
        )
        for number, peer in enumerate(peers)
    )


def _fabric(profile: Profile) -> snapshot.Fabric | None:
    capability = tuple(int(part) for part in profile.gpu.compute_capability.split("."))
    if profile.nvlink is None or profile.nvlink.to is not snapshot.NvlinkPeer.SWITCH or capability < _FABRIC_CAPABILITY:
        return None
    # A virtual machine does not show the fabric's health (seen on 4 H200s with driver 580).
    mask = 0 if profile.node.virtual_machine else _HEALTHY_MASK
    return snapshot.Fabric(state="completed", status="success", clique=0, cluster_uuid=_NO_CLUSTER, health_mask=mask)


def _cuda_features(profile: Profile) -> dict[str, bool]:
    """Return what the driver certainly reports, as it did on H100s and H200s. Other features are unknown."""
    if _fabric(profile) is None:
        return {"multicast": False}  # It needs NVSwitches for Hopper or later GPUs.
    # A virtual machine with some GPUs of a board may have no multicast.
    multicast = {} if profile.node.virtual_machine else {"multicast": True}
    return {"cuda_ipc": True, "virtual_memory": True, "fabric_handles": True, **multicast}


def _nic(nic: NicKindOfMachine, tree: _PciTree, number: int) -> snapshot.NicFacts:
    bus_id, place = tree.nic(number, nic.place)
    return snapshot.NicFacts(
        name=nic.name,
        kind=nic.kind,
        state="active",
        rate_gbit_s=nic.rate_gbit_s,
        interfaces=(nic.name,) if nic.kind is snapshot.NicKind.ETHERNET else (),
        bus_id=bus_id,
        model=nic.model,
        port=nic.port,
        pcie=_trained(nic.pcie_generation, nic.pcie_width),
        place=place,
        unknown={} if nic.rate_gbit_s else {"rate_gbit_s": "not in the profile"},
    )


def _pair(profile: Profile, one: snapshot.GpuFacts, other: snapshot.GpuFacts) -> snapshot.PairFacts:
    """Return what NVML and CUDA report for a GPU pair. With NVLink, NVML's status for PCI access is NS, as on H200.

    AMD GPUs have peer access by ROCm.
    """
    pcie_path = pcie_path_class(one.place, other.place, profile.node.numa_nodes)
    if snapshot.is_amd(one.name):
        return snapshot.PairFacts(source=one.device, destination=other.device, pcie_path=pcie_path, rocm=True)
    joined = profile.nvlink is not None and (
        profile.nvlink.to is snapshot.NvlinkPeer.SWITCH
        or any({one.index, other.index} == set(pair[:2]) for pair in profile.nvlink.pairs)
    )
    access = profile.peer_access
    status = access.status if joined or access.unlinked is None else access.unlinked
    return snapshot.PairFacts(
        source=one.device,
        destination=other.device,
        pcie_path=pcie_path,
        cuda=status == P2P_OK,
        read=status,
        write=status,
        nvlink=P2P_OK if joined else "NS",
        atomics=status,
        pci="NS" if joined else status,
    )


_SIMULATED = "not simulated"
_NO_IOMMU = {"iommu_group": "no IOMMU is simulated", "identity": _SIMULATED}
_NO_ERRORS = snapshot.PcieErrors(correctable=0, nonfatal=0, fatal=0)
_NO_COUNTS: Mapping[str, int] = {"link_downed": 0, "port_rcv_errors": 0, "symbol_error": 0}
_ROCE_GIDS = (
    snapshot.Gid(index=0, kind="IB/RoCE v1", address="link_local"),
    snapshot.Gid(index=1, kind="RoCE v2", address="link_local"),
    snapshot.Gid(index=2, kind="IB/RoCE v1", address="ipv4"),
    snapshot.Gid(index=3, kind="RoCE v2", address="ipv4"),
)
_INFINIBAND_GIDS = (snapshot.Gid(index=0, kind="IB/RoCE v1", address="link_local"),)
_LINK_LAYERS = {
    snapshot.NicKind.INFINIBAND: "InfiniBand",
    snapshot.NicKind.ROCE: "Ethernet",
    snapshot.NicKind.EFA: "Unspecified",
}


def add_surroundings(node: snapshot.Snapshot) -> snapshot.Snapshot:
    """Add PCI devices, kernel settings, driver settings and services to a node."""
    return replace(
        node,
        pci_devices=_pci_devices(node),
        rdma_ports=tuple(_port(nic, number) for number, nic in enumerate(nic for nic in node.nics if nic.rdma)),
        kernel=snapshot.KernelSettings(options=(), wsl=False, imex=False, iommu=snapshot.IommuFacts(units=())),
        driver_settings=_driver_settings(node),
    )


_REDIRECTS = snapshot.AccessControl(
    capable=("request_redirect", "completion_redirect"), enabled=("request_redirect", "completion_redirect")
)
_TRANSLATING = snapshot.IommuFacts(units=("dmar0",), group_types={"1": "DMA"})


def apply_surrounding_faults(node: snapshot.Snapshot, faults: Iterable[Fault]) -> snapshot.Snapshot:
    """Apply faults of PCI devices, settings and services. The node must already have them from `add_surroundings`."""
    for fault in faults:
        if fault.subject is Subject.NODE and fault.get("acs"):
            if not any(device.access_control for device in node.pci_devices):
                seen = f"--fault {str(fault)!r}: this virtual machine shows no PCIe bridge"
                raise UsageError(seen, expected="a machine that does: --simulate hgx-h100-8")
            devices = (
                replace(device, access_control=_REDIRECTS) if device.access_control is not None else device
                for device in node.pci_devices
            )
            node = replace(node, pci_devices=tuple(devices))
        if fault.subject is Subject.NODE and fault.get("iommu"):
            grouped = tuple(replace(device, iommu_group=1) for device in node.pci_devices)
            node = replace(node, kernel=replace(node.kernel, iommu=_TRANSLATING), pci_devices=grouped)
        if fault.subject is Subject.NIC and (errors := fault.get("errors")) and fault.index is not None:
            names = [nic.name for nic in node.nics[fault.index : fault.index + 1]]
            ports = (
                replace(port, counters={**(port.counters or {}), "symbol_error": int(errors)})
                if port.nic in names
                else port
                for port in node.rdma_ports
            )
            node = replace(node, rdma_ports=tuple(ports))
    return node


def _pci_devices(node: snapshot.Snapshot) -> tuple[snapshot.PciDevice, ...]:
    found: dict[str, snapshot.PciDevice] = {}
    ports: dict[str, int] = {}
    uplinks = {switch.bus_id: switch for switch in node.switches}

    def add(bus_id: str, kind: snapshot.PciKind, above: str | None, link: snapshot.PcieLink) -> str:
        if bus_id not in found:
            found[bus_id] = _device(bus_id, kind, above, link)
        return bus_id

    def below(switch: str, link: snapshot.PcieLink) -> str:
        ports[switch] = ports.get(switch, 0) + 1
        address = f"{switch.rpartition(':')[0]}:{ports[switch]:02x}.0"
        return add(address, snapshot.PciKind.DOWNSTREAM_PORT, switch, link)

    def reach(root_port: str | None, switches: tuple[str, ...], link: snapshot.PcieLink) -> str | None:
        """Return the switch port below these bridges, creating it if needed."""
        if not switches:
            return root_port and add(root_port, snapshot.PciKind.ROOT_PORT, None, link)
        last = switches[-1]
        if last not in found:
            uplink = uplinks[last].link
            add(last, snapshot.PciKind.UPSTREAM_PORT, reach(root_port, switches[:-1], uplink), uplink)
        return below(last, link)

    devices: tuple[snapshot.GpuFacts | snapshot.NicFacts, ...] = (*node.gpus, *node.nics)
    for device in devices:
        if device.bus_id is not None and device.bus_id not in found:
            kind = snapshot.PciKind.GPU if isinstance(device, snapshot.GpuFacts) else snapshot.PciKind.NIC
            above = reach(device.place.root_port, device.place.switches, device.pcie)
            add(device.bus_id, kind, above, device.pcie)
    return tuple(found[bus_id] for bus_id in sorted(found))


def _device(bus_id: str, kind: snapshot.PciKind, above: str | None, link: snapshot.PcieLink) -> snapshot.PciDevice:
    unknown = dict(_NO_IOMMU)
    if kind is snapshot.PciKind.GPU:
        unknown |= dict.fromkeys(("bar1_bytes", "bar1_most_bytes", "minor"), _SIMULATED)
    return snapshot.PciDevice(
        bus_id=bus_id,
        kind=kind,
        above=above,
        link=link,
        address_translation=False if kind in (snapshot.PciKind.GPU, snapshot.PciKind.NIC) else None,
        access_control=None if kind in (snapshot.PciKind.GPU, snapshot.PciKind.NIC) else snapshot.AccessControl(),
        errors=_NO_ERRORS,
        unknown=unknown,
    )


def _port(nic: snapshot.NicFacts, number: int) -> snapshot.RdmaPort:
    return snapshot.RdmaPort(
        nic=nic.name,
        physical_state="linkup" if nic.state == "active" else "polling",
        link_layer=_LINK_LAYERS[nic.kind],
        counters=_NO_COUNTS,
        hardware_counters={},
        gids=_ROCE_GIDS if nic.kind is snapshot.NicKind.ROCE else _INFINIBAND_GIDS,
        device_file=f"/dev/infiniband/uverbs{number}",
    )


def _driver_settings(node: snapshot.Snapshot) -> snapshot.DriverSettings:
    """Return default driver settings. With NVSwitch, a fabric manager of the driver's version runs on the node.

    In a virtual machine, it runs on the VM host instead.
    """
    fabric_manager = snapshot.Service(
        running=bool(node.nvswitches), version=node.driver.version if node.nvswitches else None
    )
    if node.machine.virtual_machine:
        fabric_manager = snapshot.Service()
    return snapshot.DriverSettings(
        parameters={"NvLinkDisable": "0"},
        registry_keys={},
        configured={},
        services={
            "nv-fabricmanager": fabric_manager,
            "nvlsm": snapshot.Service(running=False),
            "nvidia-imex": snapshot.Service(running=False),
        },
        confidential_computing=snapshot.ConfidentialComputing(
            enabled=False, developer_tools=False, environment="unavailable", multi_gpu="none"
        ),
        nvlink_bandwidth_mode="full",
        unknown={"nvlink_bandwidth_reduced": _SIMULATED},
    )
