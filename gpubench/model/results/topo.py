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


class GpuRow(report.Record, frozen=True, kw_only=True):
    """One GPU. `gpu` is its name in matrices, and `unknown` says why a field is empty."""

    section = "gpus"
    on_page = report.OnPage(
        columns=(
            *("node", "gpu", "bus_id", "name", "pcie_generation", "pcie_width", "nvlinks_active", "nvlinks"),
            *("nvlink_gb_s", "nvlink_errors", "fabric_state", "throttle_reasons", "lost"),
        )
    )
    host_fields = ("node",)

    node: str  #: host name of the node
    gpu: str  #: name in matrices: GPU0
    cuda_index: int | None  #: index in CUDA; null: not visible
    name: str | None  #: model
    uuid: str | None  #: UUID from the driver
    bus_id: str | None  #: PCI address
    compute_capability: str | None  #: such as 9.0
    multiprocessors: int | None  #: SMs
    memory_bytes: int | None  #: memory of the GPU
    memory_used_bytes: int | None  #: memory in use
    mig: bool | None  #: whether MIG is enabled
    ecc: bool | None  #: whether ECC is enabled
    persistence: bool | None  #: whether the driver stays loaded
    idle: bool | None  #: whether the GPU is idle, so that its PCIe link may be slow
    pcie_generation: int | None  #: generation of the PCIe link now
    pcie_width: int | None  #: lanes of the PCIe link now
    pcie_max_generation: int | None  #: maximum generation
    pcie_max_width: int | None  #: maximum lanes
    pcie_gb_s: float | None  #: narrowest PCIe link towards the CPU, GB/s per direction
    pcie_replays: int | None  #: number of PCIe replays
    numa_node: int | None  #: nearest NUMA node
    cpu_affinity: str | None  #: nearest CPUs
    nvlinks_active: int | None  #: active NVLinks
    nvlinks: int | None  #: number of NVLinks
    nvlink_version: str | None  #: of the links
    nvlink_gb_s_per_link: float | None  #: GB/s per direction of a link
    nvlink_gb_s: float | None  #: GB/s per direction of all active links
    nvlink_peers: Sequence[str]  #: far ends of the links
    nvlink_errors: int | None  #: sum of all error counters
    fabric_state: str | None  #: registration with the NVSwitch fabric
    fabric_status: str | None  #: status of the registration
    fabric_clique: int | None  #: clique: GPUs in the same one reach each other
    fabric_health: str | None  #: degraded parts
    throttle_reasons: Sequence[str] | None  #: reasons for lower clocks
    remapped_rows_correctable: int | None  #: memory rows replaced after correctable errors
    remapped_rows_uncorrectable: int | None  #: memory rows replaced after uncorrectable errors
    remapped_rows_pending: bool | None  #: whether a reset is due
    remapped_rows_failure: bool | None  #: whether a replacement failed
    bar1_bytes: int | None  #: window to its memory on PCIe
    users: Sequence[str] | None  #: processes that use it
    driver: str | None  #: version of the driver
    cuda: str | None  #: newest CUDA that the driver runs
    lost: str | None  #: why it does not answer
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    unknown: Mapping[str, str]  #: why a field is empty, by field name


class NvlinkRow(report.Record, frozen=True, kw_only=True):
    """One NVLink. GB/s per direction: `gb_s` is usable, `raw_gb_s` includes protocol, as in `nvidia-smi nvlink -s`."""

    section = "nvlinks"
    on_page = report.HIDDEN
    host_fields = ("node",)

    node: str  #: host name of the node
    gpu: str  #: name in matrices: GPU0
    link: int  #: number of the link
    active: bool | None  #: whether it is up
    version: str | None  #: NVLink version
    gb_s: float | None  #: usable GB/s per direction
    raw_gb_s: float | None  #: including protocol, as in nvidia-smi nvlink -s
    peer: str | None  #: far end
    peer_bus_id: str | None  #: PCI address of the far end
    errors: Mapping[str, int]  #: counters by name
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded


class NicRow(report.Record, frozen=True, kw_only=True):
    """One port of a NIC. `gpudirect_rdma` says whether it can reach GPU memory, with the reason."""

    section = "nics"
    on_page = report.OnPage(
        columns=(
            *("node", "nic", "link_layer", "state", "rate_gbit_s", "nearest_gpus", "nearest_path", "gpudirect_rdma"),
        )
    )
    host_fields = ("node",)

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
    pcie_max_generation: int | None  #: maximum generation
    pcie_max_width: int | None  #: maximum lanes
    pcie_gb_s: float | None  #: narrowest PCIe link towards the CPU, GB/s per direction
    numa_node: int | None  #: nearest NUMA node
    nearest_gpus: Sequence[str]  #: GPUs with the shortest path
    nearest_path: str | None  #: path class to them
    gpudirect_rdma: bool | None  #: whether the NIC can access GPU memory directly
    gpudirect_rdma_reason: str  #: kernel module or DMA-BUF that enables it, or why not
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    unknown: Mapping[str, str]  #: why a field is empty, by field name


class NodeRow(report.Record, frozen=True, kw_only=True):
    """One node: its kind, and its differences from that kind."""

    section = "nodes"
    on_page = report.OnPage(
        columns=("node", "node_kind", "differences", "gpus", "nics", "driver", "cuda", "kernel", "place", "cpu")
    )

    node: str  #: host name of the node
    node_kind: str  #: letter of its kind
    differences: Sequence[str]  #: differences from its kind
    gpus: int  #: number of GPUs
    nics: int  #: number of NIC ports
    driver: str | None  #: version of the driver
    cuda: str | None  #: newest CUDA that the driver runs
    driver_absent: str | None  #: why there is no driver
    kernel: str | None  #: release
    cpu: str | None  #: model
    cpus: int | None  #: logical CPUs
    sockets: int | None  #: CPU sockets
    numa_nodes: int  #: NUMA nodes
    virtual_machine: bool | None  #: whether it is one
    place: str | None = None  #: laptop, server, virtual machine, WSL 2, container in one of them
    product: str | None  #: product name
    peermem: bool | None  #: whether nvidia-peermem is loaded
    dma_buf: bool | None  #: whether DMA-BUF export is possible
    open_kernel_module: bool | None  #: whether the driver is the open one
    nvswitches: int  #: NVSwitches on its PCI bus
    topology: str  #: fingerprint of the wiring
    taken_at: str | None  #: when it was read
    source: str  #: where the facts come from
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    failures: Sequence[str]  #: what could not be read


class KindRow(report.Record, frozen=True, kw_only=True):
    """A group of equal nodes, named after the first. `odd` lists nodes with small differences."""

    section = "kinds"
    on_page = report.HIDDEN

    node_kind: str  #: letter of the kind
    node: str  #: representative node
    nodes: Sequence[str]  #: equal nodes
    odd: Sequence[str]  #: nodes with small differences
    differs_from: str | None  #: the largest kind with the same GPU models
    differences: Sequence[str]  #: differences from the largest kind
    matrix: Mapping[str, Mapping[str, str]]  #: path classes
    peer_access: Mapping[str, Mapping[str, Any]]  #: answers of CUDA and NVML
    limits: Mapping[str, Mapping[str, float | None]]  #: GB/s per direction
    network_gb_s: float | None  #: limit out of a node over the NICs nearest to its GPUs, GB/s per direction


class TreeRow(report.Record, frozen=True, kw_only=True):
    """One element of a node's PCI tree, in display order. `gb_s` is the bandwidth of the link above it."""

    section = "tree"
    on_page = report.HIDDEN

    node: str  #: host name of the node
    depth: int  #: depth below the host bridge
    element: str  #: name
    what: str  #: what it is
    link: str | None  #: PCIe link above it
    gb_s: float | None  #: bandwidth of that link, GB/s per direction


class RankRow(report.Record, frozen=True, kw_only=True):
    """One process of the job."""

    section = "ranks"
    on_page = report.HIDDEN

    rank: int  #: number in the job
    node: str  #: host name of the node
    local_rank: int  #: number on its node
    pid: int  #: process id
    namespaces: Mapping[str, int]  #: inode of each namespace
    shm_device: int | None  #: device number of /dev/shm, equal if shared
    shm_bytes: int | None  #: size of /dev/shm
    shm_free_bytes: int | None  #: free space in /dev/shm
    visible_devices: str | None  #: CUDA_VISIBLE_DEVICES
    device_files: Sequence[str]  #: visible /dev/nvidia* files
    memlock_bytes: Annotated[int | None, {"minimum": -1}]  #: limit of pinned memory; -1: unlimited
    affinity: str | None  #: allowed CPUs
    ptrace_scope: int | None  #: Yama's ptrace_scope, which may forbid IPC between processes
    seccomp: int | None  #: filter mode
    libraries: Mapping[str, str]  #: file by library
    environment: Mapping[str, str]  #: settings that change results


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
    """Return the GPUs of nodes. Equal nodes reuse the rows of the first one."""
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
    """Yield the rows of nodes. Equal nodes share rows that differ in `node` only."""
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
    """Yield the nodes in the order of the job."""
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
    """Return the sections of nodes, GPUs and NICs for other reports."""
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
_FAR = "NCCL uses it up to PXB unless NCCL_NET_GDR_LEVEL says otherwise"


def pair_rows(node: Topology) -> Iterator[report.PairRow]:
    """Yield every ordered pair of different devices of a node."""
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
    """Yield the pairs of every node. Nodes with equal facts share rows, because most of a thousand nodes are alike."""
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
    """Return the peer access between GPUs as CUDA and NVML report it, with the reason."""
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
    """Return GB/s per direction from every GPU to every other device, and over all its NVLinks, its PCIe and its
    NICs.
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
    """Yield the kinds, the largest first."""
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


Placed = Device | PciDevice  # A device in the PCI tree: GPU, NIC, or PCI device of unknown kind


def _place(device: Placed) -> PciPlace:
    return device.place or PciPlace()


def tree_rows(node: Topology) -> Iterator[TreeRow]:
    """Yield the PCI tree of GPUs, NICs and unknown devices with the switches above them. Nothing if no place is
    known.
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
