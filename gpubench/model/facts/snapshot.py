"""Facts about one node: GPUs, links, NICs, PCI tree and settings, from any source.

In all records here None is unknown, and `unknown` has the reason by field. Bus ids are in lower case with four digits
of domain (0000:1b:00.0). `normalize_bus_id` converts them.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import field

from gpubench.model.facts.process import GpuProcess
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.verdict import Origin


class GpuLimits(Struct, frozen=True, kw_only=True):
    """The application clock (nvidia-smi -ac) and the power limit (-pl), next to the driver's defaults."""

    clock_mhz: int | None = None
    default_clock_mhz: int | None = None
    power_w: float | None = None
    default_power_w: float | None = None

    @property
    def power_share(self) -> float | None:
        """The power limit as a share of the driver's default."""
        return self.power_w / self.default_power_w if self.power_w and self.default_power_w else None


class Service(Struct, frozen=True, kw_only=True):
    """A service of the driver. `running` is None if the host's processes are not visible. `version` is from its log."""

    running: bool | None = None
    version: str | None = None


class ConfidentialComputing(Struct, frozen=True, kw_only=True):
    """Confidential computing according to NVML. With it, transfers are encrypted or host-staged.

    `environment` is unavailable, simulation or production. `multi_gpu` is none, protected_pcie or nvle.
    """

    enabled: bool | None = None
    developer_tools: bool | None = None
    environment: str | None = None
    multi_gpu: str | None = None


class DriverSettings(Struct, frozen=True, kw_only=True):
    """The driver settings of a node.

    `parameters` of the loaded module affect peer access, NVLink, BAR 1 or IMEX, and have no prefix NVreg_.
    `registry_keys` are those of RegistryDwords, for one GPU as 'key@bus id'. `configured` are the parameters in
    modprobe's files, for the next load. `services` are by program name. `nvlink_bandwidth_mode` is full, off, min, half
    or 3quarter. `nvlink_bandwidth_reduced` lists GPUs (GPU3) with a lower mode.
    """

    parameters: Mapping[str, str] | None = None
    registry_keys: Mapping[str, str] | None = None
    configured: Mapping[str, str] | None = None
    services: Mapping[str, Service] = field(default_factory=dict)
    confidential_computing: ConfidentialComputing | None = None
    nvlink_bandwidth_mode: str | None = None
    nvlink_bandwidth_reduced: tuple[str, ...] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def nvlink_disabled(self) -> str:
        """The setting that disables NVLink on the node, or ''."""
        parameter = (self.parameters or {}).get("NvLinkDisable")
        if parameter not in (None, "", "0"):
            return f"NvLinkDisable: {parameter} in the driver's parameters"
        return "NVML says that the NVLink bandwidth mode is off" if self.nvlink_bandwidth_mode == "off" else ""


class IommuFacts(Struct, frozen=True, kw_only=True):
    """The IOMMU as the kernel uses it.

    `units` are hardware units (`dmar0`, `ivhd0`, `smmu3.0x...`), empty if the kernel uses none. `group_types` has the
    type of each group with a GPU, a NIC or a bridge above one: DMA and DMA-FQ translate, identity passes through.
    """

    units: tuple[str, ...] | None = None
    group_types: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


class KernelSettings(Struct, frozen=True, kw_only=True):
    """The kernel of a node.

    `options` are boot options that affect PCI, IOMMU, NUMA and the NVIDIA driver, never the whole line. `wsl` is
    Windows Subsystem for Linux. `imex` is true if the driver has IMEX channels, to share memory between nodes.
    """

    options: tuple[str, ...] | None = None
    wsl: bool | None = None
    imex: bool | None = None
    iommu: IommuFacts = field(default_factory=IommuFacts)
    unknown: Mapping[str, str] = field(default_factory=dict)


ACCESS_CONTROLS = (
    "source_validation",
    "translation_blocking",
    "request_redirect",
    "completion_redirect",
    "upstream_forwarding",
    "egress_control",
    "direct_translated",
)
"""The bits of ACS's capability and control registers, from bit 0 (PCI_ACS_* in Linux's pci_regs.h)."""


class PciKind(StrEnum):
    """The kind of a PCI device. UNKNOWN has no PCI class."""

    GPU = "gpu"
    NIC = "nic"
    ROOT_PORT = "root_port"
    UPSTREAM_PORT = "upstream_port"
    DOWNSTREAM_PORT = "downstream_port"
    UNKNOWN = "unknown"


class AccessControl(Struct, frozen=True, kw_only=True):
    """The supported and the enabled `ACCESS_CONTROLS` of a port, empty without ACS.

    Redirection or upstream forwarding sends traffic between devices of one switch up to the root and back.
    """

    capable: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()


class PcieErrors(Struct, frozen=True, kw_only=True):
    """Errors of a device since the kernel found it: totals, and non-zero counters by severity and name.

    Names are for example 'correctable.BadTLP' and 'fatal.ACSViol'. Not tried on hardware.
    """

    correctable: int | None = None
    nonfatal: int | None = None
    fatal: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)


_ROCE_HEADERS_BYTES = 40 + 8 + 12 + 4 + 28 + 4  # GRH, UDP, BTH, XRC, atomics, ICRC (`iboe_get_mtu`)
RDMA_MTUS = (256, 512, 1024, 2048, 4096)  # `enum ibv_mtu`. GPU servers support 4096.


class Gid(Struct, frozen=True, kw_only=True):
    """An entry of a port's address table. `kind` is the kernel's: 'IB/RoCE v1' or 'RoCE v2'.

    `address` is only the kind of address: ipv4, link_local or global.
    """

    index: int
    kind: str
    address: str


class RdmaPort(Struct, frozen=True, kw_only=True):
    """An RDMA port of the NIC `nic`. Not tried on hardware.

    `physical_state` and `link_layer` are the kernel's words. `counters` and `hardware_counters` count errors, waits and
    congestion since the driver was loaded, by sysfs name. `gids` are the first used ones. Processes open `device_file`
    to use the port, and a container may lack it (`RankFacts.device_files`).
    """

    nic: str
    physical_state: str | None = None
    link_layer: str | None = None
    counters: Mapping[str, int] | None = None
    hardware_counters: Mapping[str, int] | None = None
    gids: tuple[Gid, ...] | None = None
    device_file: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


def roce_mtu_bytes(interface_mtu_bytes: int) -> int | None:
    """Return the largest RoCE MTU that fits an interface's MTU with all headers (Linux, include/rdma/ib_addr.h)."""
    return max((size for size in RDMA_MTUS if size + _ROCE_HEADERS_BYTES <= interface_mtu_bytes), default=None)


SNAPSHOT_VERSION = 1

_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.?([0-7])?", re.ASCII)


def normalize_bus_id(text: str) -> str:
    """Convert a PCI address to that of sysfs: '00000000:1B:00.0' → '0000:1b:00.0'. Only lowercase other text."""
    text = text.strip().lower()
    match = _BUS_ID.fullmatch(text)
    if match is None:
        return text
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}"


SOFTWARE_RDMA = "software RDMA"  # The NIC model of siw and rxe, which Linux emulates over an interface


class NvlinkPeer(StrEnum):
    """The device at the other end of an NVLink."""

    GPU = "gpu"
    SWITCH = "switch"
    CPU = "cpu"


class NicKind(StrEnum):
    """The network protocol of a NIC."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"
    ETHERNET = "ethernet"


class PcieLink(Struct, frozen=True, kw_only=True):
    """The current and maximum generation (1 to 6) and width (lanes) of a PCIe link."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class PciPlace(Struct, frozen=True, kw_only=True):
    """The place of a device in the PCI tree.

    `host_bridge` is the name of the root (`pci0000:00`). `switches` are the PCIe switches above the device, outermost
    first, by the bus id of their upstream port. `root_port` is the CPU's port.
    """

    host_bridge: str | None = None
    root_port: str | None = None
    switches: tuple[str, ...] = ()
    numa_node: int | None = None


class PciSwitch(Struct, frozen=True, kw_only=True):
    """A PCIe switch. `link` is its uplink."""

    bus_id: str
    link: PcieLink = PcieLink()
    place: PciPlace = PciPlace()


class PciDevice(Struct, frozen=True, kw_only=True):
    """A GPU, a NIC, or a bridge above one.

    `above` is the next bridge towards the CPU. `identity` is vendor and device id ('10b5:8796'). `link` is the link
    towards the CPU, for root and downstream ports the link below. Ports have access control, devices address
    translation (ATS). BAR 1 is the window onto a GPU's memory, and `bar1_most_bytes` its largest size. `minor` is the
    number of the GPU's device file (/dev/nvidia0). `place` is set only if the kind is unknown.
    """

    bus_id: str
    kind: PciKind
    above: str | None = None
    link: PcieLink = PcieLink()
    identity: str | None = None
    access_control: AccessControl | None = None
    address_translation: bool | None = None
    errors: PcieErrors | None = None
    iommu_group: int | None = None
    bar1_bytes: int | None = None
    bar1_most_bytes: int | None = None
    minor: int | None = None
    place: PciPlace | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


class NvLink(Struct, frozen=True, kw_only=True):
    """One NVLink of a GPU.

    `raw_gb_s` is the line rate per direction as the driver prints it, including protocol overhead. `peer_bus_id` is
    None if a virtual machine hides it. `errors` are counters by name.
    """

    number: int
    active: bool | None = None
    version: str | None = None
    raw_gb_s: float | None = None
    peer: NvlinkPeer | None = None
    peer_bus_id: str | None = None
    errors: Mapping[str, int] = field(default_factory=dict)


class Fabric(Struct, frozen=True, kw_only=True):
    """A GPU's registration with the NVLink fabric (`nvmlGpuFabricInfo`).

    `state` is not_supported, not_started, in_progress or completed. `status` is 'success' or the failure.
    `decode_health` decodes `health_mask`.
    """

    state: str | None = None
    status: str | None = None
    clique: int | None = None
    cluster_uuid: str | None = None
    health_mask: int | None = None

    @property
    def spans_nodes(self) -> bool:
        """True in an NVLink domain of several nodes. On one node the cluster is missing or all zeros."""
        return bool(set(self.cluster_uuid or "") - {"0", "-"})

    @property
    def domain(self) -> tuple[str, int | None] | None:
        """Cluster and clique of a multi-node NVLink domain, or None."""
        return (self.cluster_uuid or "", self.clique) if self.spans_nodes else None


class RemappedRows(Struct, frozen=True, kw_only=True):
    """Rows of GPU memory that were remapped after errors. `banks_without_spares` counts banks without a spare row."""

    correctable: int
    uncorrectable: int
    pending: bool
    failure: bool
    banks_without_spares: int | None = None


class GpuFacts(Struct, frozen=True, kw_only=True):
    """One GPU, identified by its bus id. `index` is nvidia-smi's, `cuda_index` that of CUDA in this process.

    `idle` is true if the clocks show that nothing runs. An idle GPU may train its PCIe link down, as may one in
    `performance_state` P3 or higher. `throttle_reasons` excludes idling and requested clocks. `cuda_features` are the
    capabilities (`fabric_handles`, `multicast`) that the driver knows. `slowdown_margin_c` is the distance to the
    temperature that lowers clocks. `most_clock_mhz` is the maximum SM clock. `memory_errors` are uncorrectable, since
    the driver was loaded. GPUs before Ampere have `retirement_pending` instead of `remapped_rows`.
    """

    index: int
    bus_id: str | None = None
    name: str | None = None
    uuid: str | None = None
    cuda_index: int | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    mig: bool | None = None
    ecc: bool | None = None
    persistence: bool | None = None
    idle: bool | None = None
    performance_state: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    remapped_rows: RemappedRows | None = None
    retirement_pending: bool | None = None
    memory_errors: int | None = None
    temperature_c: int | None = None
    slowdown_margin_c: int | None = None
    most_clock_mhz: int | None = None
    limits: GpuLimits = field(default_factory=GpuLimits)
    pcie: PcieLink = PcieLink()
    pcie_replays: int | None = None
    place: PciPlace = PciPlace()
    cpu_affinity: str | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric: Fabric | None = None
    cuda_features: Mapping[str, bool] = field(default_factory=dict)
    bar1_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return f"GPU{self.index}"


def is_workstation_card(gpu: GpuFacts) -> bool:
    """True for desktop and workstation cards, which often have ECC off or no ECC."""
    return re.search(r"GeForce|Quadro|TITAN|\bRTX\b(?!.*Server)", gpu.name or "") is not None


def find_display_cards(gpus: Sequence[GpuFacts]) -> tuple[GpuFacts, ...]:
    """Return small cards next to cards with more than twice their memory. They drive a display and do not compute."""
    most = max((gpu.memory_bytes or 0 for gpu in gpus), default=0)
    limit = min(9 * 10**9, most / 2)  # T400, T1000 and GT 1030 have 2 to 8 GB.
    return tuple(gpu for gpu in gpus if gpu.memory_bytes and gpu.memory_bytes < limit and not gpu.mig)


def is_virtual_gpu(gpu: GpuFacts) -> bool:
    """True for a vGPU, a slice of a GPU from a hypervisor: 'NVIDIA L40S-24Q', 'NVIDIA A100-1-5CME'."""
    return re.search(r"-\d+[ABCQ](?:ME)?$", gpu.name or "") is not None


class NicFacts(Struct, frozen=True, kw_only=True):
    """One port of a NIC. `name` is that of the RDMA device (`mlx5_0`, `mlx5_0:2` for port 2), else of the interface.

    `state` is active, down, or another word of the kernel. `gpudirect` is NCCL's statement about GPUDirect RDMA. `port`
    is the physical port: devices with the same one, such as both of a DGX Spark's ConnectX-7, share its rate.
    """

    name: str
    kind: NicKind
    state: str | None = None
    rate_gbit_s: float | None = None
    interfaces: tuple[str, ...] = ()
    bus_id: str | None = None
    model: str | None = None
    driver: str | None = None
    firmware: str | None = None
    mtu: int | None = None
    gpudirect: bool | None = None
    port: str | None = None
    pcie: PcieLink = PcieLink()
    place: PciPlace = PciPlace()
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.name

    @property
    def rdma(self) -> bool:
        """True if the NIC moves data without the CPU."""
        return self.kind is not NicKind.ETHERNET and self.model != SOFTWARE_RDMA


class PairFacts(Struct, frozen=True, kw_only=True):
    """Facts of an ordered pair of devices.

    `path` is the path class in a file (NV18, PIX, ...), and `pcie_path` the class without NVLink. `cuda` is
    cudaDeviceCanAccessPeer. `read` to `pci` are NVML's P2P statuses, as `topo -p2p` prints them.
    """

    source: str
    destination: str
    path: str | None = None
    pcie_path: str | None = None
    cuda: bool | None = None
    read: str | None = None
    write: str | None = None
    nvlink: str | None = None
    atomics: str | None = None
    pci: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


class NumaNode(Struct, frozen=True, kw_only=True):
    """A NUMA node and its CPUs ('0-31,64-95')."""

    number: int
    cpus: str = ""


class DriverFacts(Struct, frozen=True, kw_only=True):
    """The NVIDIA driver. `cuda` is the newest supported CUDA ('13.0'). `absent` is the reason for no driver."""

    version: str | None = None
    cuda: str | None = None
    open_kernel_module: bool | None = None
    absent: str | None = None


class HostFacts(Struct, frozen=True, kw_only=True):
    """The machine around the GPUs. `product` is the firmware's name, `chassis` is laptop, desktop or server.

    `container` is the runtime of the container that read the facts, '' outside of containers.
    """

    kernel: str | None = None
    cpu: str | None = None
    cpus: int | None = None
    sockets: int | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    virtual_machine: bool | None = None
    product: str | None = None
    boot_id: str | None = None
    chassis: str | None = None
    container: str | None = None


class GpuDirectFacts(Struct, frozen=True, kw_only=True):
    """The ways for a NIC to reach GPU memory: the kernel modules nvidia-peermem and efa_nv_peermem (EFA), or dma-buf.

    If nvidia-peermem is loaded but not registered with the RDMA core, it does nothing.
    """

    peermem: bool | None = None
    peermem_registered: bool | None = None
    efa_peermem: bool | None = None
    dma_buf: bool | None = None


WAITED_FOR_CPU = "for a CPU"  # The end of an error on an overloaded host, where no driver hung


class ProbeFailure(Struct, frozen=True, kw_only=True):
    """A source of facts (sysfs, nvml, cuda) that failed or hung."""

    stage: str
    error: str
    timed_out: bool = False


class Snapshot(Struct, frozen=True, kw_only=True):
    """One node. `source` is the program that read it. `gpus_of_others` counts GPUs of other containers or VMs.

    `errors_grown` has the growth of error counters during a run, by device. `completed` lists devices without a row in
    a text of nvidia-smi, completed from other rows.
    """

    host: str
    origin: Origin
    source: str
    taken_at: str | None = None
    machine: HostFacts = HostFacts()
    driver: DriverFacts = DriverFacts()
    gpudirect: GpuDirectFacts = GpuDirectFacts()
    gpus: tuple[GpuFacts, ...] = ()
    gpus_of_others: int = 0
    nics: tuple[NicFacts, ...] = ()
    switches: tuple[PciSwitch, ...] = ()
    pci_devices: tuple[PciDevice, ...] = ()
    rdma_ports: tuple[RdmaPort, ...] = ()
    kernel: KernelSettings = field(default_factory=KernelSettings)
    driver_settings: DriverSettings = field(default_factory=DriverSettings)
    nvswitches: tuple[str, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    failures: tuple[ProbeFailure, ...] = ()
    completed: str = ""
    errors_grown: Mapping[str, Mapping[str, int]] | None = None
    schema_version: int = SNAPSHOT_VERSION

    @property
    def place(self) -> str:
        """The kind of place: 'Docker container in a virtual machine', 'laptop', or '' if unknown."""
        machine = self.machine
        around = "virtual machine" if machine.virtual_machine else machine.chassis or ""
        if self.kernel.wsl:
            around = "WSL 2 (Linux inside Windows)"
        if not machine.container:
            return around
        inside = _CONTAINERS.get(machine.container, "container")
        article = "" if self.kernel.wsl else "a "
        return f"{inside} {'on' if around == machine.chassis else 'in'} {article}{around}" if around else inside


_CONTAINERS = {
    "kubernetes": "Kubernetes pod",
    "docker": "Docker container",
    "podman": "Podman container",
    "containerd": "containerd container",
    "lxc": "LXC container",
    "singularity": "Apptainer container",
}
