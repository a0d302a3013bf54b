"""Facts about one node: GPUs, links, NICs, PCI tree and settings, from any source.

In all records of this module, None is unknown, and `unknown` has the reason by field. Bus ids are in lower case with a
four-digit domain (0000:1b:00.0). `normalize_bus_id` converts other forms.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import field

from gpubench.model.facts.process import GpuProcess
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.verdict import Origin


class GpuLimits(Struct, frozen=True, kw_only=True):
    """The application clock (nvidia-smi -ac) and the power limit (nvidia-smi -pl), with the driver's defaults."""

    clock_mhz: int | None = None
    default_clock_mhz: int | None = None
    power_w: float | None = None
    default_power_w: float | None = None

    @property
    def power_share(self) -> float | None:
        """The power limit, divided by the driver's default limit."""
        return self.power_w / self.default_power_w if self.power_w and self.default_power_w else None


class Service(Struct, frozen=True, kw_only=True):
    """A service of the NVIDIA driver.

    `running` is None if the processes of the host are not visible. `version` comes from the service's log.
    """

    running: bool | None = None
    version: str | None = None


class ConfidentialComputing(Struct, frozen=True, kw_only=True):
    """Confidential computing as NVML reports it. If it is enabled, transfers are encrypted or host-staged.

    `environment` is unavailable, simulation or production. `multi_gpu` is none, protected_pcie or nvle.
    """

    enabled: bool | None = None
    developer_tools: bool | None = None
    environment: str | None = None
    multi_gpu: str | None = None


class DriverSettings(Struct, frozen=True, kw_only=True):
    """The driver settings of a node.

    - `parameters`: parameters of the loaded module about peer access, NVLink, BAR 1 or IMEX, without the prefix NVreg_
    - `registry_keys`: keys from RegistryDwords; a key for a single GPU is written 'key@bus id'
    - `configured`: parameters in modprobe's files, which apply the next time the module is loaded
    - `services`: services of the driver, by program name
    - `nvlink_bandwidth_mode`: full, off, min, half or 3quarter
    - `nvlink_bandwidth_reduced`: names of GPUs with a lower mode, such as GPU3
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
        """The setting that disables NVLink on this node. '' if there is none."""
        parameter = (self.parameters or {}).get("NvLinkDisable")
        if parameter not in (None, "", "0"):
            return f"NvLinkDisable: {parameter} in the driver's parameters"
        return "NVML reports that the NVLink bandwidth mode is off" if self.nvlink_bandwidth_mode == "off" else ""


class IommuFacts(Struct, frozen=True, kw_only=True):
    """How the kernel uses the IOMMU.

    `units` are hardware units (`dmar0`, `ivhd0`, `smmu3.0x...`), empty if the kernel uses none.

    `group_types` has the type of each IOMMU group that contains a GPU, a NIC, or a bridge above one. DMA and DMA-FQ
    translate addresses, identity passes them through.
    """

    units: tuple[str, ...] | None = None
    group_types: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


class KernelSettings(Struct, frozen=True, kw_only=True):
    """The kernel of a node.

    - `options`: boot options that affect PCI, IOMMU, NUMA and the NVIDIA driver, never the whole command line
    - `wsl`: whether this is Windows Subsystem for Linux
    - `imex`: whether the driver has IMEX channels, which share memory between nodes
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
"""The bits of the ACS capability and control registers, from bit 0 (PCI_ACS_* in Linux's pci_regs.h)."""


class PciKind(StrEnum):
    """The kind of a PCI device. UNKNOWN means that the source does not state the PCI class."""

    GPU = "gpu"
    NIC = "nic"
    ROOT_PORT = "root_port"
    UPSTREAM_PORT = "upstream_port"
    DOWNSTREAM_PORT = "downstream_port"
    UNKNOWN = "unknown"


class AccessControl(Struct, frozen=True, kw_only=True):
    """The `ACCESS_CONTROLS` that a port supports and has enabled. Both are empty if the port has no ACS.

    With redirection or upstream forwarding, traffic between two devices below one switch takes a detour through the
    root.
    """

    capable: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()


class PcieErrors(Struct, frozen=True, kw_only=True):
    """PCIe errors of a device since the kernel found it: totals, and counters above zero by severity and name.

    Examples for names are 'correctable.BadTLP' and 'fatal.ACSViol'. Not tested on hardware.
    """

    correctable: int | None = None
    nonfatal: int | None = None
    fatal: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)


_ROCE_HEADERS_BYTES = 40 + 8 + 12 + 4 + 28 + 4  # GRH, UDP, BTH, XRC, atomics, ICRC (`iboe_get_mtu`)
RDMA_MTUS = (256, 512, 1024, 2048, 4096)  # `enum ibv_mtu`. GPU servers support 4096.


class Gid(Struct, frozen=True, kw_only=True):
    """An entry in the address (GID) table of an RDMA port.

    `kind` is the kernel's name, 'IB/RoCE v1' or 'RoCE v2'. `address` is only the type of the address: ipv4, link_local
    or global.
    """

    index: int
    kind: str
    address: str


class RdmaPort(Struct, frozen=True, kw_only=True):
    """An RDMA port of the NIC `nic`. Not tested on hardware.

    - `physical_state`, `link_layer`: as the kernel names them
    - `counters`, `hardware_counters`: errors, waits and congestion since the driver was loaded, by sysfs name
    - `gids`: the first used entries of the address table
    - `device_file`: the file that processes open to use the port; a container may not contain it
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
    """Return the largest RoCE MTU that fits into the MTU of an interface, including all headers.

    Source: include/rdma/ib_addr.h in Linux.
    """
    return max((size for size in RDMA_MTUS if size + _ROCE_HEADERS_BYTES <= interface_mtu_bytes), default=None)


SNAPSHOT_VERSION = 1

_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.?([0-7])?", re.ASCII)


def normalize_bus_id(text: str) -> str:
    """Convert a PCI address to sysfs form: '00000000:1B:00.0' → '0000:1b:00.0'. Other text is only changed to lower
    case.
    """
    text = text.strip().lower()
    match = _BUS_ID.fullmatch(text)
    if match is None:
        return text
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}"


# NIC model of siw and rxe, the Linux drivers that emulate RDMA over a network interface
SOFTWARE_RDMA = "software RDMA"


class NvlinkPeer(StrEnum):
    """The type of device at the other end of an NVLink."""

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
    """The current and the maximum generation (1 to 6) and width (number of lanes) of a PCIe link."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class PciPlace(Struct, frozen=True, kw_only=True):
    """The position of a device in the PCI tree.

    `host_bridge` is the name of the root (`pci0000:00`), and `root_port` the port of the CPU. `switches` are the PCIe
    switches above the device, identified by the bus id of their upstream port, with the switch nearest to the CPU
    first.
    """

    host_bridge: str | None = None
    root_port: str | None = None
    switches: tuple[str, ...] = ()
    numa_node: int | None = None


class PciSwitch(Struct, frozen=True, kw_only=True):
    """A PCIe switch. `link` is its link towards the CPU."""

    bus_id: str
    link: PcieLink = PcieLink()
    place: PciPlace = PciPlace()


class PciDevice(Struct, frozen=True, kw_only=True):
    """A GPU, a NIC, or a bridge above a GPU or NIC.

    - `above`: the next bridge towards the CPU
    - `identity`: vendor and device id, such as '10b5:8796'
    - `link`: the link towards the CPU; for root ports and downstream ports, the link away from the CPU
    - `access_control`: access control services (ACS) of a port
    - `address_translation`: whether a device uses address translation services (ATS)
    - `bar1_bytes`, `bar1_most_bytes`: current and maximum size of BAR 1, the window onto a GPU's memory
    - `minor`: number of the GPU's device file; 0 for /dev/nvidia0
    - `place`: set only if the kind is unknown
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

    `raw_gb_s` is the line rate per direction that the driver prints. It includes protocol overhead. `peer_bus_id` is
    None if a virtual machine hides it. `errors` has error counters by name.
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

    `state` is not_supported, not_started, in_progress or completed. `status` is 'success' or describes the failure.
    `decode_health` decodes `health_mask`.
    """

    state: str | None = None
    status: str | None = None
    clique: int | None = None
    cluster_uuid: str | None = None
    health_mask: int | None = None

    @property
    def spans_nodes(self) -> bool:
        """True if the NVLink domain has several nodes. On a single node, the cluster UUID is missing or all zeros."""
        return bool(set(self.cluster_uuid or "") - {"0", "-"})

    @property
    def domain(self) -> tuple[str, int | None] | None:
        """The cluster UUID and the clique if the NVLink domain has several nodes, else None."""
        return (self.cluster_uuid or "", self.clique) if self.spans_nodes else None


class RemappedRows(Struct, frozen=True, kw_only=True):
    """Rows of GPU memory that were replaced by spare rows after errors.

    `banks_without_spares` is the number of memory banks that have no spare row left.
    """

    correctable: int
    uncorrectable: int
    pending: bool
    failure: bool
    banks_without_spares: int | None = None


class GpuFacts(Struct, frozen=True, kw_only=True):
    """One GPU, identified by its bus id.

    - `index`: index in nvidia-smi
    - `cuda_index`: index in CUDA in this process
    - `idle`: whether the clocks show that nothing runs; an idle GPU may lower its PCIe generation
    - `utilization_percent`: share of the last 1/6 to 1 s in which any program's kernels ran, before this job starts
    - `performance_state`: 0 to 15; from 3 on, the GPU may lower its PCIe generation
    - `throttle_reasons`: reasons for low clocks, except idling and requested clocks
    - `memory_errors`: uncorrectable errors since the driver was loaded
    - `slowdown_margin_c`: distance to the temperature at which clocks drop
    - `most_clock_mhz`: maximum SM clock
    - `retirement_pending`: replaces `remapped_rows` on GPUs before Ampere
    - `cuda_features`: whether the driver supports `cuda_ipc`, `virtual_memory`, `fabric_handles`, `multicast` and
      `gpu_direct_rdma`; a missing name is unknown
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
    utilization_percent: int | None = None
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
    """True for desktop and workstation cards. Many of them have no ECC, or ECC is off."""
    return re.search(r"GeForce|Quadro|TITAN|\bRTX\b(?!.*Server)", gpu.name or "") is not None


def find_display_cards(gpus: Sequence[GpuFacts]) -> tuple[GpuFacts, ...]:
    """Return small cards in a node where another card has more than twice their memory.

    They drive a display and do no computing.
    """
    most = max((gpu.memory_bytes or 0 for gpu in gpus), default=0)
    limit = min(9 * 10**9, most / 2)  # T400, T1000 and GT 1030 cards have 2 to 8 GB.
    return tuple(gpu for gpu in gpus if gpu.memory_bytes and gpu.memory_bytes < limit and not gpu.mig)


def is_amd(name: str | None) -> bool:
    """True for the model name of an AMD GPU, such as 'AMD Instinct MI300X'."""
    return "AMD" in (name or "")


def is_virtual_gpu(gpu: GpuFacts) -> bool:
    """True for a vGPU, which is a slice of a GPU that a hypervisor creates: 'NVIDIA L40S-24Q', 'NVIDIA A100-1-5CME'."""
    return re.search(r"-\d+[ABCQ](?:ME)?$", gpu.name or "") is not None


class NicFacts(Struct, frozen=True, kw_only=True):
    """One port of a NIC.

    - `name`: name of the RDMA device (`mlx5_0`, or `mlx5_0:2` for port 2), or of the interface without RDMA
    - `state`: active, down, or another word of the kernel
    - `gpudirect`: whether NCCL reported GPUDirect RDMA
    - `port`: the physical port; devices that have it in common share its rate, like the two of a DGX Spark's ConnectX-7
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
    """Facts about an ordered pair of devices.

    - `path`: path class that a file states (NV18, PIX, ...)
    - `pcie_path`: path class without NVLink
    - `cuda`: result of cudaDeviceCanAccessPeer
    - `rocm`: whether AMD's driver says that the two GPUs can access each other's memory
    - `read`, `write`, `nvlink`, `atomics`, `pci`: NVML's P2P statuses, as printed by `nvidia-smi topo -p2p`
    """

    source: str
    destination: str
    path: str | None = None
    pcie_path: str | None = None
    cuda: bool | None = None
    rocm: bool | None = None
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
    """The NVIDIA driver.

    `cuda` is the newest CUDA version that the driver supports ('13.0'). `absent` is the reason if there is no driver.
    """

    version: str | None = None
    cuda: str | None = None
    open_kernel_module: bool | None = None
    absent: str | None = None


class HostFacts(Struct, frozen=True, kw_only=True):
    """The machine that contains the GPUs.

    `product` is the firmware's product name, and `chassis` is laptop, desktop or server. `container` is the runtime of
    the container in which the facts were read, '' outside containers.
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
    """Kernel support for NICs that access GPU memory: nvidia-peermem, efa_nv_peermem (EFA), or dma-buf.

    nvidia-peermem has no effect if it is loaded but not registered with the RDMA core.
    """

    peermem: bool | None = None
    peermem_registered: bool | None = None
    efa_peermem: bool | None = None
    dma_buf: bool | None = None


# End of the error message on an overloaded host. The driver did not hang, the process waited for a CPU.
WAITED_FOR_CPU = "for a CPU"


class ProbeFailure(Struct, frozen=True, kw_only=True):
    """A source of facts (sysfs, nvml or cuda) that failed or did not respond."""

    stage: str
    error: str
    timed_out: bool = False


class Snapshot(Struct, frozen=True, kw_only=True):
    """All facts about one node.

    - `source`: the program that read the facts
    - `gpus_of_others`: number of GPUs that belong to other containers or VMs
    - `errors_grown`: increase of error counters during a run, by device
    - `completed`: devices without a row in nvidia-smi's output, whose facts were derived from other rows
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
        """The type of environment: 'Docker container in a virtual machine', 'laptop', or '' if unknown."""
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
