"""The schemas of `gpubench topo`'s sections: what a row of each says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from gpubench.model.results.report import Record
from gpubench.model.terms.origin import Origin

TREE_SECTION = "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow(Record):
    """One GPU. `gpu` is its name in matrices; `unknown` says why a field is empty, by field name."""

    node: str  #: host name of the node
    gpu: str  #: its name in matrices: GPU0
    cuda_index: int | None  #: number that CUDA gives it; null where it is not visible
    name: str | None  #: model
    uuid: str | None  #: as the driver has it
    bus_id: str | None  #: PCI address
    compute_capability: str | None  #: such as 9.0
    multiprocessors: int | None  #: SMs
    memory_bytes: int | None  #: memory of the GPU
    memory_used_bytes: int | None  #: of it in use
    mig: bool | None  #: whether it is cut into instances
    ecc: bool | None  #: whether memory errors are corrected
    persistence: bool | None  #: whether the driver stays loaded
    idle: bool | None  #: whether its PCIe link may rest
    pcie_generation: int | None  #: generation of the PCIe link now
    pcie_width: int | None  #: lanes of the PCIe link now
    pcie_max_generation: int | None  #: generation it can have
    pcie_max_width: int | None  #: lanes it can have
    pcie_gb_s: float | None  #: GB/s per direction of the narrowest PCIe hop upwards
    pcie_replays: int | None  #: PCIe packets that were sent again
    numa_node: int | None  #: NUMA node it hangs on
    cpu_affinity: str | None  #: CPUs near it
    nvlinks_active: int | None  #: NVLinks that are up
    nvlinks: int | None  #: NVLinks it has
    nvlink_version: str | None  #: of the links
    nvlink_gb_s_per_link: float | None  #: GB/s per direction of a link
    nvlink_gb_s: float | None  #: GB/s per direction of all active links
    nvlink_peers: Sequence[str]  #: what the links lead to
    nvlink_errors: int | None  #: sum of all error counters
    fabric_state: str | None  #: registration with the NVSwitch fabric
    fabric_status: str | None  #: its outcome
    fabric_clique: int | None  #: GPUs with the same one reach each other
    fabric_health: str | None  #: what is degraded
    throttle_reasons: Sequence[str] | None  #: why clocks are lowered
    remapped_rows_correctable: int | None  #: memory rows replaced after correctable errors
    remapped_rows_uncorrectable: int | None  #: after uncorrectable ones
    remapped_rows_pending: bool | None  #: whether a reset is due
    remapped_rows_failure: bool | None  #: whether a replacement failed
    bar1_bytes: int | None  #: window to its memory on PCIe
    users: Sequence[str] | None  #: processes that use it
    driver: str | None  #: version of the driver
    cuda: str | None  #: newest CUDA that the driver runs
    lost: str | None  #: why it does not answer
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    unknown: Mapping[str, str]  #: why a field is empty, by field name


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkRow(Record):
    """One NVLink. GB/s per direction: `gb_s` usable, `raw_gb_s` with protocol, as `nvidia-smi nvlink -s` prints it."""

    node: str  #: host name of the node
    gpu: str  #: its name in matrices: GPU0
    link: int  #: number of the link
    active: bool | None  #: whether it is up
    version: str | None  #: NVLink version
    gb_s: float | None  #: usable GB/s per direction
    raw_gb_s: float | None  #: with protocol, as nvidia-smi nvlink -s prints it
    peer: str | None  #: what it leads to
    peer_bus_id: str | None  #: PCI address of that
    errors: Mapping[str, int]  #: counters by name
    origin: Annotated[str, Origin]  #: measured, simulated or recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class NicRow(Record):
    """One port of a NIC. `gpudirect_rdma` is whether it may reach GPU memory, and by what or why not."""

    node: str  #: host name of the node
    nic: str  #: device name: mlx5_0, eth0
    link_layer: str  #: infiniband or ethernet
    state: str | None  #: of the port
    rate_gbit_s: float | None  #: Gb/s of the port
    rate_gb_s: float | None  #: the same in GB/s
    interfaces: Sequence[str]  #: network interfaces on it
    bus_id: str | None  #: PCI address
    model: str | None  #: of the device
    driver: str | None  #: kernel driver
    firmware: str | None  #: version
    mtu: int | None  #: bytes of the largest packet
    pcie_generation: int | None  #: generation of the PCIe link now
    pcie_width: int | None  #: lanes of the PCIe link now
    pcie_max_generation: int | None  #: generation it can have
    pcie_max_width: int | None  #: lanes it can have
    pcie_gb_s: float | None  #: GB/s per direction of the narrowest PCIe hop upwards
    numa_node: int | None  #: NUMA node it hangs on
    nearest_gpus: Sequence[str]  #: GPUs with the shortest path
    nearest_path: str | None  #: path class to them
    gpudirect_rdma: bool | None  #: whether it may reach GPU memory
    gpudirect_rdma_reason: str  #: by what, or why not
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    unknown: Mapping[str, str]  #: why a field is empty, by field name


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow(Record):
    """One node: of which kind, and how it differs from it."""

    node: str  #: host name of the node
    node_kind: str  #: letter of the kind it is of
    differences: Sequence[str]  #: from that kind
    gpus: int  #: GPUs it has
    nics: int  #: NIC ports it has
    driver: str | None  #: version of the driver
    cuda: str | None  #: newest CUDA that the driver runs
    driver_absent: str | None  #: why there is no driver
    kernel: str | None  #: release
    cpu: str | None  #: model
    cpus: int | None  #: logical CPUs
    sockets: int | None  #: CPU sockets
    numa_nodes: int  #: NUMA nodes
    virtual_machine: bool | None  #: whether it is one
    product: str | None  #: what the maker calls it
    peermem: bool | None  #: whether nvidia-peermem is loaded
    dma_buf: bool | None  #: whether DMA-BUF export is possible
    open_kernel_module: bool | None  #: whether the driver is the open one
    nvswitches: int  #: NVSwitches on its PCI bus
    topology: str  #: fingerprint of the wiring
    taken_at: str | None  #: when it was read
    source: str  #: where the facts come from
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    failures: Sequence[str]  #: what could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow(Record):
    """Nodes that are the same, by the first of them; `odd` are those that nearly are."""

    node_kind: str  #: letter of the kind
    node: str  #: the node that stands for it
    nodes: Sequence[str]  #: those that are the same
    odd: Sequence[str]  #: those that nearly are
    differs_from: str | None  #: the largest kind with the same GPU models
    differences: Sequence[str]  #: from the largest kind
    matrix: Mapping[str, Mapping[str, str]]  #: path classes
    peer_access: Mapping[str, Mapping[str, Any]]  #: what CUDA and NVML say
    limits: Mapping[str, Mapping[str, float | None]]  #: GB/s per direction


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow(Record):
    """One element of the PCI tree of a node, in the order in which the tree is drawn; `gb_s` of the link above it."""

    node: str  #: host name of the node
    depth: int  #: below the host bridge
    element: str  #: what it is called
    what: str  #: what it is
    link: str | None  #: PCIe link above it
    gb_s: float | None  #: GB/s per direction of that


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow(Record):
    """One process of the job."""

    rank: int  #: number in the job
    node: str  #: host name of the node
    local_rank: int  #: number on its node
    pid: int  #: process id
    namespaces: Mapping[str, int]  #: inode by namespace
    shm_device: int | None  #: device number of /dev/shm: the same where it is shared
    shm_bytes: int | None  #: size of /dev/shm
    shm_free_bytes: int | None  #: of it free
    visible_devices: str | None  #: CUDA_VISIBLE_DEVICES
    device_files: Sequence[str]  #: /dev/nvidia* that it sees
    memlock_bytes: Annotated[int | None, {"minimum": -1}]  #: memory that it may pin; -1 is no limit
    affinity: str | None  #: CPUs that it may use
    ptrace_scope: int | None  #: Yama setting, which IPC between processes needs
    seccomp: int | None  #: filter mode
    libraries: Mapping[str, str]  #: file by library
    environment: Mapping[str, str]  #: settings that change results
