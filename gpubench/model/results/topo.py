"""The rows of `gpubench topo`: devices, pairs, matrices and the PCI tree."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec.structs import replace

from gpubench.model.facts.health import describe_health
from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.snapshot import (
    Fabric,
    GpuFacts,
    NicFacts,
    NvLink,
    PciDevice,
    PcieLink,
    PciKind,
    PciPlace,
    Snapshot,
)
from gpubench.model.paths.nodes import MachineKind, describe_differences
from gpubench.model.paths.topology import (
    BITS_PER_BYTE,
    PATH_CLASSES,
    Device,
    Topology,
    active_links,
    describe_pcie,
    link_under_load,
    nvlink_gb_s,
    pcie_ceiling_gb_s,
    round_gb_s,
)
from gpubench.model.paths.wiring import network_limits
from gpubench.model.results import report
from gpubench.model.terms.verdict import Origin

TOPO_SECTIONS = (
    *("gpus", "nvlinks", "nics", "nodes", "kinds", "matrix", "peer_access", "limits", "pairs", "ranks", "tree"),
    *("fallback", "causes", "causes_unread", "findings"),
)


SHARING = ("cuda_ipc", "virtual_memory", "fabric_handles", "multicast")
"""Columns of GpuRow about the ways in which processes can share GPU memory."""


class GpuRow(report.Record, frozen=True, kw_only=True):
    """One GPU. `gpu` is the name of the GPU in matrices. `unknown` contains the reason for each empty field."""

    section = "gpus"
    on_page = report.OnPage(
        columns=(
            *("node", "gpu", "bus_id", "name", "pcie_generation", "pcie_width", "nvlinks_active", "nvlinks"),
            *("nvlink_gb_s", "nvlink_errors", "fabric_state", "throttle_reasons", "lost"),
        )
    )
    host_fields = ("node",)

    node: str  #: host name of the node
    gpu: str  #: name of the GPU in matrices, for example GPU0
    cuda_index: int | None  #: CUDA device index (null if CUDA does not see the GPU)
    name: str | None  #: GPU model
    uuid: str | None  #: GPU UUID from the driver
    bus_id: str | None  #: PCI address of the GPU
    compute_capability: str | None  #: CUDA compute capability, for example 9.0
    multiprocessors: int | None  #: number of SMs
    memory_bytes: int | None  #: size of the GPU memory in bytes
    memory_used_bytes: int | None  #: GPU memory in use, in bytes
    mig: bool | None  #: whether MIG mode is enabled
    ecc: bool | None  #: whether ECC memory protection is enabled
    persistence: bool | None  #: whether persistence mode is on, which keeps the driver loaded
    idle: bool | None  #: whether the GPU is idle, which may slow its PCIe link down
    pcie_generation: int | None  #: current generation of the PCIe link
    pcie_width: int | None  #: current number of lanes of the PCIe link
    pcie_max_generation: int | None  #: maximum generation of the PCIe link
    pcie_max_width: int | None  #: maximum number of lanes of the PCIe link
    #: bandwidth of the narrowest PCIe link between the device and the CPU, in GB/s per direction
    pcie_gb_s: float | None
    pcie_replays: int | None  #: number of retransmitted PCIe packets
    numa_node: int | None  #: NUMA node nearest to the device
    cpu_affinity: str | None  #: CPUs close to the GPU
    nvlinks_active: int | None  #: number of active NVLinks
    nvlinks: int | None  #: number of NVLinks on the GPU
    nvlink_version: str | None  #: NVLink version of the active links
    nvlink_gb_s_per_link: float | None  #: bandwidth of one NVLink in GB/s per direction
    nvlink_gb_s: float | None  #: bandwidth of all active NVLinks in GB/s per direction
    nvlink_peers: Sequence[str]  #: devices at the far ends of the NVLinks
    nvlink_errors: int | None  #: sum of all NVLink error counters
    fabric_state: str | None  #: state of the GPU's registration with the NVSwitch fabric: completed, in_progress, ...
    fabric_status: str | None  #: result of the fabric registration: success or the failure
    fabric_clique: int | None  #: fabric clique of the GPU, whose GPUs can reach each other
    fabric_health: str | None  #: fabric health, with the degraded components
    throttle_reasons: Sequence[str] | None  #: reasons why the GPU clocks are lowered
    remapped_rows_correctable: int | None  #: number of memory rows remapped after correctable errors
    remapped_rows_uncorrectable: int | None  #: number of memory rows remapped after uncorrectable errors
    remapped_rows_pending: bool | None  #: whether a row remapping waits for a GPU reset
    remapped_rows_failure: bool | None  #: whether a row remapping failed
    bar1_bytes: int | None  #: size of BAR1, the PCIe window to GPU memory, in bytes
    cuda_ipc: bool | None = None  #: whether processes can share cudaMalloc memory (legacy CUDA IPC)
    virtual_memory: bool | None = None  #: whether CUDA's virtual memory management (cuMemCreate) is supported
    fabric_handles: bool | None = None  #: whether the driver supports fabric handles, which also need an IMEX channel
    multicast: bool | None = None  #: whether NVSwitch multicast is supported
    users: Sequence[str] | None  #: processes that use the GPU
    driver: str | None  #: version of the NVIDIA driver
    cuda: str | None  #: newest CUDA version that the driver supports
    lost: str | None  #: why the GPU does not respond (null if it responds)
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    unknown: Mapping[str, str]  #: why a field is empty, by field name


class NvlinkRow(report.Record, frozen=True, kw_only=True):
    """One NVLink of a GPU."""

    section = "nvlinks"
    on_page = report.HIDDEN
    host_fields = ("node",)

    node: str  #: host name of the node
    gpu: str  #: name of the GPU in matrices, for example GPU0
    link: int  #: number of the NVLink on the GPU
    active: bool | None  #: whether the NVLink is up
    version: str | None  #: NVLink version
    gb_s: float | None  #: usable bandwidth in GB/s per direction
    raw_gb_s: float | None  #: bandwidth including protocol overhead, in GB/s per direction, as in nvidia-smi nvlink -s
    peer: str | None  #: device at the far end of the NVLink
    peer_bus_id: str | None  #: PCI address of the device at the far end
    errors: Mapping[str, int]  #: NVLink error counters by name
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded


class NicRow(report.Record, frozen=True, kw_only=True):
    """One port of a NIC."""

    section = "nics"
    on_page = report.OnPage(
        columns=(
            *("node", "nic", "link_layer", "state", "rate_gbit_s", "nearest_gpus", "nearest_path", "gpudirect_rdma"),
        )
    )
    host_fields = ("node",)

    node: str  #: host name of the node
    nic: str  #: name of the NIC port, for example mlx5_0 or eth0
    link_layer: str  #: link layer of the port: infiniband or ethernet
    state: str | None  #: state of the port: active, down, or another state from the kernel
    rate_gbit_s: float | None  #: data rate of the port in Gbit/s
    rate_gb_s: float | None  #: data rate of the port in GB/s
    interfaces: Sequence[str]  #: network interfaces on the port
    bus_id: str | None  #: PCI address of the NIC
    model: str | None  #: NIC model
    driver: str | None  #: kernel driver of the NIC
    firmware: str | None  #: firmware version of the NIC
    mtu: int | None  #: maximum transmission unit (MTU) of the port in bytes
    pcie_generation: int | None  #: current generation of the PCIe link
    pcie_width: int | None  #: current number of lanes of the PCIe link
    pcie_max_generation: int | None  #: maximum generation of the PCIe link
    pcie_max_width: int | None  #: maximum number of lanes of the PCIe link
    #: bandwidth of the narrowest PCIe link between the device and the CPU, in GB/s per direction
    pcie_gb_s: float | None
    numa_node: int | None  #: NUMA node nearest to the device
    nearest_gpus: Sequence[str]  #: GPUs with the shortest path to the NIC
    nearest_path: str | None  #: path class between the NIC and its nearest GPUs
    gpudirect_rdma: bool | None  #: whether the NIC can access GPU memory directly
    gpudirect_rdma_reason: str  #: kernel module or DMA-BUF that enables GPUDirect RDMA, or why it is impossible
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    unknown: Mapping[str, str]  #: why a field is empty, by field name


class NodeRow(report.Record, frozen=True, kw_only=True):
    """One node, with its kind and the differences between the node and that kind."""

    section = "nodes"
    on_page = report.OnPage(
        columns=("node", "node_kind", "differences", "gpus", "nics", "driver", "cuda", "kernel", "place", "cpu")
    )

    node: str  #: host name of the node
    node_kind: str  #: letter of the node's kind, a group of equal nodes
    differences: Sequence[str]  #: differences between the node and its kind
    gpus: int  #: number of GPUs
    nics: int  #: number of NIC ports
    driver: str | None  #: version of the NVIDIA driver
    cuda: str | None  #: newest CUDA version that the driver supports
    driver_absent: str | None  #: why there is no NVIDIA driver (null if there is one)
    kernel: str | None  #: release of the Linux kernel
    cpu: str | None  #: CPU model
    cpus: int | None  #: number of logical CPUs
    sockets: int | None  #: number of CPU sockets
    numa_nodes: int  #: number of NUMA nodes
    virtual_machine: bool | None  #: whether the node is a virtual machine
    place: str | None = None  #: type of machine: laptop, server, virtual machine, WSL 2, or a container in one of these
    product: str | None  #: product name of the machine
    peermem: bool | None  #: whether the kernel module nvidia-peermem is loaded
    dma_buf: bool | None  #: whether GPU memory can be exported as DMA-BUF
    open_kernel_module: bool | None  #: whether the driver uses NVIDIA's open kernel modules
    nvswitches: int  #: number of NVSwitches on the node's PCI bus
    topology: str  #: fingerprint of the node's topology
    taken_at: str | None  #: time when the facts were read
    source: str  #: origin of the node's facts
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    failures: Sequence[str]  #: facts that could not be read, with the errors


class KindRow(report.Record, frozen=True, kw_only=True):
    """A kind: a group of equal nodes, represented by the first. `odd` lists nodes that differ slightly from the
    kind.
    """

    section = "kinds"
    on_page = report.HIDDEN

    node_kind: str  #: letter that names this kind of node
    node: str  #: host name of the node that represents the kind
    nodes: Sequence[str]  #: nodes without differences from the kind
    odd: Sequence[str]  #: nodes with small differences from the kind
    differs_from: str | None  #: letter of the largest kind with the same GPU models
    differences: Sequence[str]  #: differences between this kind and the one in differs_from
    matrix: Mapping[str, Mapping[str, str]]  #: path class between each pair of devices
    peer_access: Mapping[str, Mapping[str, Any]]  #: peer access between each pair of GPUs as CUDA and NVML report it
    #: bandwidth limits of each GPU in GB/s per direction: to each other device, and in total
    limits: Mapping[str, Mapping[str, float | None]]
    #: network bandwidth limit of a node over the NICs nearest to its GPUs, in GB/s per direction
    network_gb_s: float | None


class TreeRow(report.Record, frozen=True, kw_only=True):
    """One element of a node's PCI tree, in display order."""

    section = "tree"
    on_page = report.HIDDEN

    node: str  #: host name of the node
    depth: int  #: depth in the tree: 0 is a NUMA node, 1 a host bridge
    element: str  #: name or PCI address of the element
    what: str  #: description of the element
    link: str | None  #: PCIe link above the element
    gb_s: float | None  #: bandwidth of the PCIe link above the element, in GB/s per direction


class RankRow(report.Record, frozen=True, kw_only=True):
    """One process of the job."""

    section = "ranks"
    on_page = report.HIDDEN

    rank: int  #: number of the rank in the job
    node: str  #: host name of the node
    local_rank: int  #: number of the rank on its node
    pid: int  #: process ID of the rank
    namespaces: Mapping[str, int]  #: inode number of each Linux namespace of the process
    shm_device: int | None  #: device number of /dev/shm, equal for ranks that share it
    shm_bytes: int | None  #: size of /dev/shm in bytes
    shm_free_bytes: int | None  #: free space in /dev/shm in bytes
    visible_devices: str | None  #: value of CUDA_VISIBLE_DEVICES
    device_files: Sequence[str]  #: /dev/nvidia* files that the process can see
    memlock_bytes: Annotated[int | None, {"minimum": -1}]  #: limit on locked memory in bytes, -1 if unlimited
    affinity: str | None  #: CPUs on which the process may run
    ptrace_scope: int | None  #: value of the kernel setting ptrace_scope, which may forbid IPC between processes
    seccomp: int | None  #: seccomp mode of the process
    libraries: Mapping[str, str]  #: path of each loaded library, by library name
    environment: Mapping[str, str]  #: environment variables that change results


def gpu_rows(node: Topology) -> Iterator[GpuRow]:
    for gpu in node.gpus:
        active = [link for link in gpu.nvlinks or () if link.active]
        counted = [count for link in gpu.nvlinks or () for count in link.errors.values()]
        setting = node.snapshot.driver_settings.nvlink_disabled
        hides_nvlinks = gpu.nvlinks == () and setting
        yield report.make_record(
            GpuRow,
            gpu,
            node=node.snapshot.host,
            gpu=gpu.device,
            **_pcie(gpu.pcie),
            pcie_gb_s=round_gb_s(node.pcie_total(gpu).gb_s),
            numa_node=gpu.place.numa_node,
            nvlinks_active=active_links(gpu),
            nvlinks=None if gpu.nvlinks is None else len(gpu.nvlinks),
            nvlink_version=active[0].version if active else None,
            nvlink_gb_s_per_link=nvlink_gb_s(active[0]) if active else None,
            nvlink_gb_s=round_gb_s(node.nvlink_total(gpu).gb_s),
            nvlink_peers=sorted({_far_end(node, link) for link in active}),
            nvlink_errors=sum(counted) if counted else None,
            **_fabric(gpu.fabric),
            **{name: gpu.cuda_features.get(name) for name in SHARING},
            **{
                f"remapped_rows_{name}": getattr(gpu.remapped_rows, name, None)
                for name in ("correctable", "uncorrectable", "pending", "failure")
            },
            users=None if gpu.processes is None else [_user(process) for process in gpu.processes],
            unknown={**gpu.unknown, **({"nvlinks": f"the driver hides them: {setting}"} if hides_nvlinks else {})},
            driver=node.snapshot.driver.version,
            cuda=node.snapshot.driver.cuda,
            origin=node.snapshot.origin,
        )


def all_gpu_rows(nodes: Sequence[Topology]) -> list[GpuRow]:
    """Return one row per GPU of all nodes. Equal nodes reuse the rows of the first one."""
    found: list[GpuRow] = []
    like, rows = None, list[GpuRow]()
    for node in nodes:
        if node.like is not like:
            like, rows = node.like, list(gpu_rows(node.like))
        own = zip(rows, node.gpus, strict=True)
        found += rows if node is like else [replace(row, node=node.snapshot.host, uuid=gpu.uuid) for row, gpu in own]
    return found


def rows_by_node(
    nodes: Sequence[Topology], make: Callable[[Topology], Iterable[report.Record]]
) -> Iterator[report.RowsOfNode]:
    """Yield the rows of each node. Equal nodes share one list, because their rows differ only in `node`."""
    like, rows = None, list[report.Record]()
    for node in nodes:
        if node.like is not like:
            like, rows = node.like, list(make(node.like))
        yield report.RowsOfNode(rows, ("node",), node.snapshot.host)


def link_rows(node: Topology) -> Iterator[NvlinkRow]:
    for gpu in node.gpus:
        for link in gpu.nvlinks or ():
            yield report.make_record(
                NvlinkRow,
                link,
                node=node.snapshot.host,
                gpu=gpu.device,
                link=link.number,
                gb_s=nvlink_gb_s(link),
                peer=link.peer and _far_end(node, link),
                origin=node.snapshot.origin,
            )


def nic_rows(node: Topology) -> Iterator[NicRow]:
    for nic in node.nics:
        nearest = node.nearest_gpus(nic)
        possible, reason = node.gpudirect(nic)
        yield report.make_record(
            NicRow,
            nic,
            node=node.snapshot.host,
            nic=nic.name,
            link_layer=nic.kind,
            rate_gb_s=None if nic.rate_gbit_s is None else nic.rate_gbit_s / BITS_PER_BYTE,
            **_pcie(nic.pcie),
            pcie_gb_s=round_gb_s(node.pcie_total(nic).gb_s),
            numa_node=nic.place.numa_node,
            nearest_gpus=[gpu.device for gpu in nearest],
            nearest_path=node.pcie_path(nearest[0], nic) if nearest else None,
            gpudirect_rdma=possible,
            gpudirect_rdma_reason=reason,
            origin=node.snapshot.origin,
        )


def node_rows(nodes: Sequence[Topology], kinds: Sequence[MachineKind]) -> Iterator[NodeRow]:
    """Yield one row per node, in the order of the job."""
    kind_by_position = {position: kind for kind in kinds for position in (*kind.alike, *kind.odd)}
    for position, node in enumerate(nodes):
        snapshot, machine, kind = node.snapshot, node.snapshot.machine, kind_by_position[position]
        yield report.make_record(
            NodeRow,
            machine,
            snapshot.gpudirect,
            snapshot,
            node=snapshot.host,
            node_kind=kind.name,
            differences=describe_differences(kind.odd.get(position, ())),
            gpus=len(snapshot.gpus),
            nics=len(snapshot.nics),
            driver=snapshot.driver.version,
            cuda=snapshot.driver.cuda,
            driver_absent=snapshot.driver.absent,
            numa_nodes=len(machine.numa_nodes),
            open_kernel_module=snapshot.driver.open_kernel_module,
            place=snapshot.place or None,
            nvswitches=len(snapshot.nvswitches),
            topology=node.fingerprint(),
            failures=[f"{failure.stage}: {failure.error}" for failure in snapshot.failures],
        )


def device_sections(nodes: Sequence[Topology], kinds: Sequence[MachineKind]) -> dict[str, report.Section]:
    """Return the node, GPU and NIC sections that reports of other commands include."""
    return report.Table.group_by_section(
        {
            NodeRow: lambda: node_rows(nodes, kinds),
            GpuRow: lambda: all_gpu_rows(nodes),
            NicRow: lambda: (row for node in nodes for row in nic_rows(node)),
        }
    )


def rank_rows(ranks: Sequence[RankFacts]) -> Iterator[RankRow]:
    return (report.make_record(RankRow, rank, node=rank.host) for rank in ranks)


def _pcie(link: PcieLink) -> dict[str, int | None]:
    names = ("generation", "width", "max_generation", "max_width")
    return {f"pcie_{name}": getattr(link, name) for name in names}


def _fabric(fabric: Fabric | None) -> dict[str, Any]:
    fabric = fabric or Fabric()
    return {
        "fabric_state": fabric.state,
        "fabric_status": fabric.status,
        "fabric_clique": fabric.clique,
        "fabric_health": None if fabric.health_mask is None else describe_health(fabric.health_mask),
    }


def _far_end(node: Topology, link: NvLink) -> str:
    known = next((gpu.device for gpu in node.gpus if gpu.bus_id and gpu.bus_id == link.peer_bus_id), None)
    if known:
        return known
    return {"gpu": "a GPU", "switch": "NVSwitch", "cpu": "CPU"}.get(link.peer or "", "unknown")


def _user(process: GpuProcess) -> str:
    return " ".join(filter(None, (str(process.pid), process.name, "under MPS" if process.mps else "")))


_BEYOND_PXB = PATH_CLASSES[PATH_CLASSES.index("PXB") + 1 :]
_MOST_KNOWN = 8
_FAR = "NCCL uses it up to PXB, unless NCCL_NET_GDR_LEVEL is set"


def pair_rows(node: Topology) -> Iterator[report.PairRow]:
    """Yield one row per ordered pair of different devices in a node."""
    host, origin = node.snapshot.host, node.snapshot.origin
    for source in node.devices:
        for destination in node.devices:
            if source is destination:
                continue
            limit = node.limit(source, destination)
            yield report.PairRow(
                source=source.device,
                destination=destination.device,
                source_bus_id=source.bus_id,
                destination_bus_id=destination.bus_id,
                source_node=host,
                destination_node=host,
                origin=origin,
                limit_gb_s=round_gb_s(limit.gb_s),
                path_class=node.path(source, destination),
                note="; ".join(filter(None, (_direct(node, source, destination), limit.note))),
            )


def all_pair_rows(nodes: Sequence[Topology]) -> Iterator[report.RowsOfNode]:
    """Yield the pairs of every node. Nodes with equal facts share rows, because most nodes of a large cluster are
    equal.
    """
    known: list[tuple[Snapshot, list[report.PairRow]]] = []
    like, rows = None, list[report.PairRow]()
    for node in nodes:
        if node.like is not like:
            like, what = node.like, _drop_identity(node.snapshot)
            same = next((rows for other, rows in known if other == what), None)
            rows = list(pair_rows(node)) if same is None else same
            if same is None:
                known = [(what, rows), *known[: _MOST_KNOWN - 1]]
        yield report.RowsOfNode(rows, ("source_node", "destination_node"), node.snapshot.host)


def _drop_identity(snapshot: Snapshot) -> Snapshot:
    gpus = tuple(
        replace(gpu, uuid=None, memory_used_bytes=None, processes=None, pcie_replays=None) for gpu in snapshot.gpus
    )
    machine = replace(snapshot.machine, boot_id=None)
    return replace(snapshot, host="", taken_at=None, machine=machine, gpus=gpus, pci_devices=(), rdma_ports=())


def peer_access(node: Topology) -> dict[str, dict[str, Any]]:
    """Return the peer access between each pair of GPUs as CUDA and NVML report it, with the reason."""
    cells: dict[str, dict[str, Any]] = {}
    for source in node.gpus:
        cells[source.device] = {}
        for destination in node.gpus:
            if source is not destination:
                access = node.peer_access(source, destination)
                cells[source.device][destination.device] = {
                    "cuda": access.cuda,
                    "nvml": access.nvml,
                    "reason": access.reason,
                }
    return cells


def limits(node: Topology) -> dict[str, dict[str, float | None]]:
    """Return the bandwidth limits of each GPU in GB/s per direction: to each other device, and in total over its
    NVLinks, its PCIe link and its NICs.
    """
    network, _ = network_limits(node)
    return {
        gpu.device: {
            **{device.device: round_gb_s(node.limit(gpu, device).gb_s) for device in node.devices if device is not gpu},
            "nvlink": round_gb_s(node.nvlink_total(gpu).gb_s),
            "pcie": round_gb_s(node.pcie_total(gpu).gb_s),
            "network": round_gb_s(towards_nodes.gb_s),
        }
        for gpu, towards_nodes in zip(node.gpus, network, strict=True)
    }


def kind_rows(nodes: Sequence[Topology], kinds: Sequence[MachineKind]) -> Iterator[KindRow]:
    """Yield one row per kind of node, the largest kind first."""
    for kind in kinds:
        node = nodes[kind.representative]
        yield KindRow(
            node_kind=kind.name,
            node=node.snapshot.host,
            nodes=[nodes[position].snapshot.host for position in kind.alike],
            odd=[nodes[position].snapshot.host for position in kind.odd],
            differs_from=kind.differs_from,
            differences=describe_differences(kind.differs),
            matrix=node.matrix,
            peer_access=peer_access(node),
            limits=limits(node),
            network_gb_s=round_gb_s(network_limits(node)[1]),
        )


def _direct(node: Topology, source: Device, destination: Device) -> str:
    if isinstance(source, GpuFacts) and isinstance(destination, GpuFacts):
        access = node.peer_access(source, destination)
        answer = {True: "direct possible", False: "through host memory", None: "peer access not known"}[access.possible]
        return answer if access.possible else f"{answer}: {access.reason}"
    if isinstance(source, NicFacts) and isinstance(destination, NicFacts):
        return ""
    nic = source if isinstance(source, NicFacts) else destination
    if not isinstance(nic, NicFacts):
        return ""
    possible, reason = node.gpudirect(nic)
    answer = {True: "GPUDirect RDMA possible", False: "no GPUDirect RDMA", None: "GPUDirect RDMA not known"}[possible]
    far = possible is not False and node.path(source, destination) in _BEYOND_PXB
    return f"{answer}: {reason}" + (f"; {_FAR}" if far else "")


Placed = Device | PciDevice  # A device in the PCI tree: a GPU, a NIC, or a PCI device of unknown type


def _place(device: Placed) -> PciPlace:
    return device.place or PciPlace()


def tree_rows(node: Topology) -> Iterator[TreeRow]:
    """Yield the PCI tree with GPUs, NICs, unknown devices and the switches above them.

    Yield nothing if no device has a known place in the tree.
    """
    host = node.snapshot.host
    machine = node.snapshot.machine
    unknown = [device for device in node.snapshot.pci_devices if device.kind is PciKind.UNKNOWN]
    placed = [device for device in (*node.devices, *unknown) if _place(device).host_bridge]
    numa_nodes = sorted({_place(device).numa_node for device in placed}, key=lambda number: (number is None, number))
    for numa in numa_nodes:
        cpus = next((numa_node.cpus for numa_node in machine.numa_nodes if numa_node.number == numa), "")
        what = f"CPUs {cpus}" if cpus else ""
        element = f"NUMA node {'unknown' if numa is None else numa}"
        yield TreeRow(node=host, depth=0, element=element, what=what, link=None, gb_s=None)
        here = [device for device in placed if _place(device).numa_node == numa]
        for bridge in dict.fromkeys(_place(device).host_bridge for device in here):
            yield TreeRow(node=host, depth=1, element=str(bridge), what="host bridge", link=None, gb_s=None)
            yield from _below(node, [device for device in here if _place(device).host_bridge == bridge], 0)


def _below(node: Topology, devices: Sequence[Placed], level: int) -> Iterator[TreeRow]:
    host = node.snapshot.host
    switches: dict[str, list[Placed]] = {}
    for device in devices:
        above = _place(device).switches
        if len(above) > level:
            switches.setdefault(above[level], []).append(device)
        elif isinstance(device, PciDevice):
            link, gb_s = describe_pcie(device.link), pcie_ceiling_gb_s(device.link)
            what = "device of unknown kind"
            yield TreeRow(
                node=host, depth=level + 2, element=device.bus_id, what=what, link=link, gb_s=round_gb_s(gb_s)
            )
        else:
            link = describe_pcie(device.pcie, idle=device.idle if isinstance(device, GpuFacts) else None)
            gb_s = pcie_ceiling_gb_s(link_under_load(device))
            yield TreeRow(
                node=host, depth=level + 2, element=device.device, what=_what(device), link=link, gb_s=round_gb_s(gb_s)
            )
    uplinks = {switch.bus_id: switch.link for switch in node.snapshot.switches}
    for bus_id, members in switches.items():
        uplink = uplinks.get(bus_id, PcieLink())
        link, gb_s = describe_pcie(uplink), pcie_ceiling_gb_s(uplink)
        yield TreeRow(node=host, depth=level + 2, element=bus_id, what="PCIe switch", link=link, gb_s=round_gb_s(gb_s))
        yield from _below(node, members, level + 1)


def _what(device: Device) -> str:
    if isinstance(device, GpuFacts):
        return " ".join(filter(None, (device.bus_id, device.name)))
    rate = f"{device.rate_gbit_s:g} Gb/s" if device.rate_gbit_s else None
    return " ".join(filter(None, (device.bus_id, device.kind, rate)))
