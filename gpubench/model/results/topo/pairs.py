"""The sections of `gpubench topo` about pairs: matrices of path classes, peer access and limits, and a row a pair."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpubench.model.facts.snapshot import GpuFacts, NicFacts, Snapshot
from gpubench.model.paths.nodes import MachineKind, condense
from gpubench.model.paths.topology import PATH_CLASSES, Device, Topology, rounded
from gpubench.model.results.report import PairRow, RowsOfNode
from gpubench.model.results.topo.rows import KindRow

_BEYOND_PXB = PATH_CLASSES[PATH_CLASSES.index("PXB") + 1 :]
_MOST_KNOWN = 8
_FAR = "NCCL uses it up to PXB unless NCCL_NET_GDR_LEVEL says otherwise"


def pair_rows(node: Topology) -> Iterator[PairRow]:
    """Every ordered pair of different devices of a node."""
    host, origin = node.snapshot.host, node.snapshot.origin
    for source in node.devices:
        for destination in node.devices:
            if source is destination:
                continue
            limit = node.limit(source, destination)
            yield PairRow(
                source=source.device,
                destination=destination.device,
                source_bus_id=source.bus_id,
                destination_bus_id=destination.bus_id,
                source_node=host,
                destination_node=host,
                origin=origin,
                limit_gb_s=rounded(limit.gb_s),
                path_class=node.path(source, destination),
                note="; ".join(filter(None, (_direct(node, source, destination), limit.note))),
            )


def pair_rows_of(nodes: Sequence[Topology]) -> Iterator[RowsOfNode]:
    """The pairs of every node. Of a thousand nodes most are alike: theirs are an earlier one's, by another host."""
    known: list[tuple[Snapshot, list[PairRow]]] = []
    like, rows = None, list[PairRow]()
    for node in nodes:
        if node.like is not like:
            like, what = node.like, _anonymous(node.snapshot)
            same = next((rows for other, rows in known if other == what), None)
            rows = list(pair_rows(node)) if same is None else same
            if same is None:
                known = [(what, rows), *known[: _MOST_KNOWN - 1]]
        yield RowsOfNode(rows, ("source_node", "destination_node"), node.snapshot.host)


def _anonymous(snapshot: Snapshot) -> Snapshot:
    """A node without what tells it from its equals and no pair depends on."""
    gpus = tuple(
        replace(gpu, uuid=None, memory_used_bytes=None, processes=None, pcie_replays=None) for gpu in snapshot.gpus
    )
    machine = replace(snapshot.machine, boot_id=None)
    return replace(snapshot, host="", taken_at=None, machine=machine, gpus=gpus, pci_devices=(), rdma_ports=())


def peer_access(node: Topology) -> dict[str, dict[str, Any]]:
    """Peer access between GPUs: what CUDA and NVML say, and both in words."""
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
    """GB/s per direction from every GPU to every other device, and towards everybody: all its NVLinks, its PCIe."""
    return {
        gpu.device: {
            **{each.device: rounded(node.limit(gpu, each).gb_s) for each in node.devices if each is not gpu},
            "nvlink": rounded(node.nvlink_total(gpu).gb_s),
            "pcie": rounded(node.pcie_total(gpu).gb_s),
        }
        for gpu in node.gpus
    }


def kind_rows(nodes: Sequence[Topology], kinds: Sequence[MachineKind]) -> Iterator[KindRow]:
    """The kinds, the largest first."""
    for kind in kinds:
        node = nodes[kind.representative]
        yield KindRow(
            node_kind=kind.name,
            node=node.snapshot.host,
            nodes=[nodes[position].snapshot.host for position in kind.alike],
            odd=[nodes[position].snapshot.host for position in kind.odd],
            differs_from=kind.differs_from,
            differences=condense(kind.differs),
            matrix=node.matrix,
            peer_access=peer_access(node),
            limits=limits(node),
        )


def _direct(node: Topology, source: Device, destination: Device) -> str:
    """A note on a pair: direct or through host memory, by peer access or by GPUDirect RDMA."""
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
