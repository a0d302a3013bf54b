"""Facts about one node: GPUs, links, NICs, PCI tree and settings as they were read.

A snapshot is immutable data from any source. Unknown values are None, and `unknown` has the reason by field name. Bus
ids are in lower case with four digits of domain (0000:1b:00.0). `bus_id` converts them.
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
    """A service of the driver. `running` is None if the host's processes are not visible.

    A virtual machine that leaves its NVSwitches to its host runs none. `version` is the last one in its log.
    """

    running: bool | None = None
    version: str | None = None


class ConfidentialComputing(Struct, frozen=True, kw_only=True):
    """Confidential computing according to NVML. With it, transfers are encrypted or host-staged.

    `environment` is unavailable, simulation or production. `multi_gpu` is none, protected_pcie or nvle, which decides
    how GPUs may reach each other.
    """

    enabled: bool | None = None
    developer_tools: bool | None = None
    environment: str | None = None
    multi_gpu: str | None = None


class DriverSettings(Struct, frozen=True, kw_only=True):
    """The driver settings of a node. None is unknown, and `unknown` has the reason by field.

    `parameters` are those of the loaded module that affect peer access, NVLink, BAR 1 and IMEX, without the prefix
    NVreg_. `registry_keys` are such keys of RegistryDwords, for one GPU as 'key@bus id'. `configured` is what
    modprobe's files will set at the next load (in a container, its own files). `services` are by program name.
    `nvlink_bandwidth_mode` is full, off, min, half or 3quarter for the whole node. `nvlink_bandwidth_reduced` names the
    GPUs (GPU3) with a reduced mode.
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
        """The setting that disables NVLink on the whole node as text, or ''."""
        parameter = (self.parameters or {}).get("NvLinkDisable")
        if parameter not in (None, "", "0"):
            return f"NvLinkDisable: {parameter} in the driver's parameters"
        return "NVML says that the NVLink bandwidth mode is off" if self.nvlink_bandwidth_mode == "off" else ""


class IommuFacts(Struct, frozen=True, kw_only=True):
    """The IOMMU as the kernel uses it. None is unknown, and `unknown` has the reason by field.

    `units` are hardware units (`dmar0`, `ivhd0`, `smmu3.0x...`), empty if the kernel uses none. `group_types` are those
    of groups with a GPU, a NIC or a bridge above one, by group number: DMA and DMA-FQ translate, identity passes
    through.
    """

    units: tuple[str, ...] | None = None
    group_types: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


class KernelSettings(Struct, frozen=True, kw_only=True):
    """The kernel of a node. None is unknown, and `unknown` has the reason by field.

    `options` are the boot options that affect PCI, IOMMU, memory nodes and the NVIDIA driver, never the whole line.
    `wsl` is Windows Subsystem for Linux. `imex` tells whether the driver offers IMEX channels, which memory shared
    between nodes needs.
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
    """The kind of a device between a GPU or NIC and the CPU. UNKNOWN has no PCI class."""

    GPU = "gpu"
    NIC = "nic"
    ROOT_PORT = "root_port"
    UPSTREAM_PORT = "upstream_port"
    DOWNSTREAM_PORT = "downstream_port"
    UNKNOWN = "unknown"


class AccessControl(Struct, frozen=True, kw_only=True):
    """Access control of a port: the supported and the enabled `ACCESS_CONTROLS`, empty without ACS.

    If requests or completions are redirected, or forwarded upstream, traffic between two devices below one switch goes
    up to the root and back.
    """

    capable: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()


class PcieErrors(Struct, frozen=True, kw_only=True):
    """Errors of a device since it was found: totals, and the non-zero counters by name.

    Names start with the severity: 'correctable.BadTLP', 'fatal.ACSViol'. None is a total that could not be read. Not
    tried on hardware.
    """

    correctable: int | None = None
    nonfatal: int | None = None
    fatal: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)


_ROCE_HEADERS_BYTES = 40 + 8 + 12 + 4 + 28 + 4  # GRH, UDP, BTH, XRC, atomics, ICRC (`iboe_get_mtu`)
RDMA_MTUS = (256, 512, 1024, 2048, 4096)  # Sizes of RDMA (`enum ibv_mtu`); GPU servers can do the last


class Gid(Struct, frozen=True, kw_only=True):
    """An address of a port, with its index in the port's table.

    `kind` is the kernel's word: 'IB/RoCE v1' or 'RoCE v2'. `address` is only the kind of address (ipv4, link_local,
    global).
    """

    index: int
    kind: str
    address: str


class RdmaPort(Struct, frozen=True, kw_only=True):
    """An RDMA port. None is unknown, and `unknown` has the reason by field.

    `nic` is the NIC's name in the snapshot. `physical_state` and `link_layer` are the kernel's words. `counters` and
    `hardware_counters` are those of errors, waits and congestion since the driver was loaded, by sysfs name. `gids` are
    the first used ones. `device_file` is what a process opens to use the device, and a container may lack it
    (`RankFacts.device_files`). Not tried on hardware.
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
    """Return the largest RoCE MTU that fits an interface's MTU with all headers, or None.

    An MTU of 1500 allows 1024, and 4096 needs at least 4200 (Linux, include/rdma/ib_addr.h).
    """
    room_bytes = interface_mtu_bytes - _ROCE_HEADERS_BYTES
    return max((size for size in RDMA_MTUS if size <= room_bytes), default=None)


SNAPSHOT_VERSION = 1

_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.?([0-7])?", re.ASCII)


def normalize_bus_id(text: str) -> str:
    """Normalize a PCI address as in sysfs: '00000000:1B:00.0' → '0000:1b:00.0'. Other text is only lowercased."""
    match = _BUS_ID.fullmatch(text.strip().lower())
    if match is None:
        return text.strip().lower()
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}"


SOFTWARE_RDMA = "software RDMA"  # Model of an RDMA device that Linux emulates over an interface (siw, rxe)


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
    """The current and maximum state of a PCIe link. Generations 1 to 6, widths in lanes."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class PciPlace(Struct, frozen=True, kw_only=True):
    """The place of a device in the PCI tree.

    `host_bridge` names the root (`pci0000:00`, or a file's own name). `switches` are the PCIe switches above the
    device, outermost first, by the bus id of the upstream port. `root_port` is the CPU's port.
    """

    host_bridge: str | None = None
    root_port: str | None = None
    switches: tuple[str, ...] = ()
    numa_node: int | None = None


class PciSwitch(Struct, frozen=True, kw_only=True):
    """A PCIe switch. `link` is its uplink towards the CPU, and `place.switches` are the switches above it."""

    bus_id: str
    link: PcieLink = PcieLink()
    place: PciPlace = PciPlace()


class PciDevice(Struct, frozen=True, kw_only=True):
    """A GPU, a NIC, or a bridge above one. None is unknown, and `unknown` has the reason by field.

    `above` is the bridge towards the CPU. `identity` is vendor and device id ('10b5:8796'). `link` is what this end
    reports: for a GPU, a NIC and an upstream port the link towards the CPU, for other ports the link below. Ports have
    access control, devices address translation (ATS). For a GPU, `bar1_bytes` is the window onto its memory (BAR 1),
    `bar1_most_bytes` the largest possible one, and `minor` the number of its device file (/dev/nvidia0). `place` is set
    only for a device of unknown kind.
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

    `version` is NVLink's ('4.0'). `raw_gb_s` is the line rate per direction as the driver prints it, including the
    protocol. `peer_bus_id` is None if a virtual machine hides it. `errors` are the readable counters by name.
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

    `state` is not_supported, not_started, in_progress or completed. `status` is 'success' or the failure. `health_mask`
    has two-bit fields, which `decode_health` decodes.
    """

    state: str | None = None
    status: str | None = None
    clique: int | None = None
    cluster_uuid: str | None = None
    health_mask: int | None = None

    @property
    def spans_nodes(self) -> bool:
        """True in an NVLink domain of several nodes. A fabric of one node has no cluster, or a cluster of zeros."""
        return bool(set(self.cluster_uuid or "") - {"0", "-"})

    @property
    def domain(self) -> tuple[str, int | None] | None:
        """Cluster and clique of an NVLink domain of several nodes, or None."""
        return (self.cluster_uuid or "", self.clique) if self.spans_nodes else None


class RemappedRows(Struct, frozen=True, kw_only=True):
    """Replaced memory rows: after correctable errors, after uncorrectable ones, pending a reset, and failed.

    `banks_without_spares` counts memory banks without a spare row, None if the driver does not report it.
    """

    correctable: int
    uncorrectable: int
    pending: bool
    failure: bool
    banks_without_spares: int | None = None


class GpuFacts(Struct, frozen=True, kw_only=True):
    """One GPU. `index` is the driver's (nvidia-smi's), `cuda_index` this process's CUDA's; the bus id identifies it.

    `idle` is true where clocks say that nothing runs: it then trains its PCIe link down. `performance_state` is the
    driver's, 0 at work (P0) to 15; from 3 on the link may be trained down, whatever the clocks say. `throttle_reasons`
    leaves out idling and clocks that somebody asked for. `cuda_features` are what CUDA says that it supports, by name
    (`fabric_handles`, `multicast`); a driver that does not know one leaves it out. `temperature_c` is its chip's,
    `slowdown_margin_c` how far that is below the temperature at which its clocks are lowered, `most_clock_mhz` the
    highest clock of its multiprocessors, `memory_errors` the uncorrectable ones since the driver was loaded;
    `retirement_pending` is what GPUs before Ampere have in the place of remapped rows.
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
        """Its name in matrices: GPU0."""
        return f"GPU{self.index}"


_WORKSTATION_CARD = re.compile(r"GeForce|Quadro|TITAN|\bRTX\b(?!.*Server)")


def is_workstation_card(gpu: GpuFacts) -> bool:
    """True for desktop and workstation cards, which are often sold with ECC off or without it."""
    return _WORKSTATION_CARD.search(gpu.name or "") is not None


_MOST_DISPLAY_BYTES = 9 * 10**9  # T400, T1000 and GT 1030 have 2 to 8 GB
_VIRTUAL_GPU = re.compile(r"-\d+[ABCQ](?:ME)?$")  # 'NVIDIA L40S-24Q', 'NVIDIA H100XM-80C', 'NVIDIA A100-1-5CME'


def find_display_cards(gpus: Sequence[GpuFacts]) -> tuple[GpuFacts, ...]:
    """Return small cards next to cards with more than twice their memory. They drive a display and do not compute."""
    most = max((gpu.memory_bytes or 0 for gpu in gpus), default=0)
    limit = min(_MOST_DISPLAY_BYTES, most / 2)
    return tuple(gpu for gpu in gpus if gpu.memory_bytes and gpu.memory_bytes < limit and not gpu.mig)


def is_virtual_gpu(gpu: GpuFacts) -> bool:
    """True for a vGPU, a slice of a GPU from a hypervisor."""
    return _VIRTUAL_GPU.search(gpu.name or "") is not None


class NicFacts(Struct, frozen=True, kw_only=True):
    """One port of one NIC. `name` is the RDMA device's (`mlx5_0`, `mlx5_0:2` for a second port), else the interface's.

    `state` is active, down, or the kernel's own word; `rate_gbit_s` the port's data rate; `gpudirect` is what NCCL
    wrote about GPUDirect RDMA. `port` names the physical port: devices that share one, as the two of a DGX Spark's
    ConnectX-7 do, each with a slot of its own, together carry no more than its rate.
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
        """Its name in matrices."""
        return self.name

    @property
    def rdma(self) -> bool:
        """True if the NIC moves data without the CPU."""
        return self.kind is not NicKind.ETHERNET and self.model != SOFTWARE_RDMA


class PairFacts(Struct, frozen=True, kw_only=True):
    """Facts of an ordered pair of devices, named as in matrices.

    `path` is a path class as stated by a file (NV18, PIX, ...), `pcie_path` one without NVLink; `cuda` is
    cudaDeviceCanAccessPeer; `read` to `pci` are NVML's P2P statuses in `topo -p2p`'s words (OK, CNS, GNS, TNS, DR, NS,
    U).
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
    """A NUMA node and its CPUs, as a list of ranges ('0-31,64-95')."""

    number: int
    cpus: str = ""


class DriverFacts(Struct, frozen=True, kw_only=True):
    """The NVIDIA driver. `cuda` is the newest CUDA it runs ('13.0'); `absent` says why there is none."""

    version: str | None = None
    cuda: str | None = None
    open_kernel_module: bool | None = None
    absent: str | None = None


class HostFacts(Struct, frozen=True, kw_only=True):
    """The machine around the GPUs. `product` is what the firmware calls it, `chassis` laptop, desktop or server.

    `container` is the runtime of the container in which the facts were read; empty outside of any.
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

    `peermem_registered` says whether nvidia-peermem found the RDMA core that it must register with: built without one,
    it can be loaded and do nothing.
    """

    peermem: bool | None = None
    peermem_registered: bool | None = None
    efa_peermem: bool | None = None
    dma_buf: bool | None = None


WAITED_FOR_CPU = "for a CPU"  # The end of an error if it was no driver that hung but a host that is overloaded


class ProbeFailure(Struct, frozen=True, kw_only=True):
    """A source of facts (sysfs, nvml, cuda) without an answer: what happened, and whether it hung."""

    stage: str
    error: str
    timed_out: bool = False


class Snapshot(Struct, frozen=True, kw_only=True):
    """One node. `source` says who read it; `gpus_of_others` counts GPUs given to other containers or VMs.

    `pci_devices` are GPUs, NICs and bridges by bus id; `errors_grown` those counted until the end of a run, or None.
    `completed` names the devices whose rows a text of nvidia-smi lacks, and that the other rows completed.
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
