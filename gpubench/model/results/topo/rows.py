"""The schemas of `gpubench topo`'s sections: what a row of each says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpubench.model.results.report import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow(Record):
    """One GPU. `gpu` is its name in matrices; `unknown` says why a field is empty, by field name."""

    node: str
    gpu: str
    cuda_index: int | None
    name: str | None
    uuid: str | None
    bus_id: str | None
    compute_capability: str | None
    multiprocessors: int | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    mig: bool | None
    ecc: bool | None
    persistence: bool | None
    idle: bool | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_generation: int | None
    pcie_max_width: int | None
    pcie_gb_s: float | None
    pcie_replays: int | None
    numa_node: int | None
    cpu_affinity: str | None
    nvlinks_active: int | None
    nvlinks: int | None
    nvlink_version: str | None
    nvlink_gb_s_per_link: float | None
    nvlink_gb_s: float | None
    nvlink_peers: Sequence[str]
    nvlink_errors: int | None
    fabric_state: str | None
    fabric_status: str | None
    fabric_clique: int | None
    fabric_health: str | None
    throttle_reasons: Sequence[str] | None
    remapped_rows_correctable: int | None
    remapped_rows_uncorrectable: int | None
    remapped_rows_pending: bool | None
    remapped_rows_failure: bool | None
    bar1_bytes: int | None
    users: Sequence[str] | None
    driver: str | None
    cuda: str | None
    lost: str | None
    origin: str
    unknown: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow(Record):
    """One NVLink. GB/s per direction: `gb_s` usable, `raw_gb_s` with protocol, as `nvidia-smi nvlink -s` prints it."""

    node: str
    gpu: str
    link: int
    active: bool | None
    version: str | None
    gb_s: float | None
    raw_gb_s: float | None
    peer: str | None
    peer_bus_id: str | None
    errors: Mapping[str, int]
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NicRow(Record):
    """One port of a NIC. `gpudirect_rdma` is whether it may reach GPU memory, and by what or why not."""

    node: str
    nic: str
    link_layer: str
    state: str | None
    rate_gbit_s: float | None
    rate_gb_s: float | None
    interfaces: Sequence[str]
    bus_id: str | None
    model: str | None
    driver: str | None
    firmware: str | None
    mtu: int | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_generation: int | None
    pcie_max_width: int | None
    pcie_gb_s: float | None
    numa_node: int | None
    nearest_gpus: Sequence[str]
    nearest_path: str | None
    gpudirect_rdma: bool | None
    gpudirect_rdma_reason: str
    origin: str
    unknown: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow(Record):
    """One node: of which kind, and how it differs from it."""

    node: str
    node_kind: str
    differences: Sequence[str]
    gpus: int
    nics: int
    driver: str | None
    cuda: str | None
    driver_absent: str | None
    kernel: str | None
    cpu: str | None
    cpus: int | None
    sockets: int | None
    numa_nodes: int
    virtual_machine: bool | None
    product: str | None
    peermem: bool | None
    dma_buf: bool | None
    open_kernel_module: bool | None
    nvswitches: int
    topology: str
    taken_at: str | None
    source: str
    origin: str
    failures: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow(Record):
    """Nodes that are the same, by the first of them; `odd` are those that nearly are.

    `differences` are those from `differs_from`, the largest kind with the same GPU models.
    """

    node_kind: str
    node: str
    nodes: Sequence[str]
    odd: Sequence[str]
    differs_from: str | None
    differences: Sequence[str]
    matrix: Mapping[str, Mapping[str, str]]
    peer_access: Mapping[str, Mapping[str, Any]]
    limits: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow(Record):
    """One element of the PCI tree of a node, in the order in which the tree is drawn; `gb_s` of the link above it."""

    node: str
    depth: int
    element: str
    what: str
    link: str | None
    gb_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow(Record):
    """One process of the job."""

    rank: int
    node: str
    local_rank: int
    pid: int
    namespaces: Mapping[str, int]
    shm_device: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    visible_devices: str | None
    device_files: Sequence[str]
    memlock_bytes: int | None
    affinity: str | None
    ptrace_scope: int | None
    seccomp: int | None
    libraries: Mapping[str, str]
    environment: Mapping[str, str]
