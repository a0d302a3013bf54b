"""The rows of `gpubench topo`'s sections about single things: GPUs, their links, NICs, nodes, ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpubench.model.facts.fabric_health import describe_health
from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Fabric, GpuFacts, NvLink, PcieLink, RemappedRows
from gpubench.model.paths.links import active_links, nvlink_gb_s
from gpubench.model.paths.nodes import MachineKind, condense
from gpubench.model.paths.topology import BITS_PER_BYTE, Topology, rounded
from gpubench.model.results.report import Record, RowsOfNode, Section, Table, made_of
from gpubench.model.results.topo.rows import GpuRow, NicRow, NodeRow, NvlinkRow, RankRow


def gpu_rows(node: Topology) -> Iterator[GpuRow]:
    """The GPUs of a node."""
    for gpu in node.gpus:
        active = [link for link in gpu.nvlinks or () if link.active]
        yield made_of(
            GpuRow,
            gpu,
            node=node.snapshot.host,
            gpu=gpu.device,
            **_pcie(gpu.pcie),
            pcie_gb_s=rounded(node.pcie_total(gpu).gb_s),
            numa_node=gpu.place.numa_node,
            nvlinks_active=active_links(gpu),
            nvlinks=None if gpu.nvlinks is None else len(gpu.nvlinks),
            nvlink_version=active[0].version if active else None,
            nvlink_gb_s_per_link=nvlink_gb_s(active[0]) if active else None,
            nvlink_gb_s=rounded(node.nvlink_total(gpu).gb_s),
            nvlink_peers=sorted({_far_end(node, link) for link in active}),
            nvlink_errors=_errors(gpu.nvlinks or ()),
            **_fabric(gpu.fabric),
            **_remapped(gpu.remapped_rows),
            users=None if gpu.processes is None else [_user(each) for each in gpu.processes],
            unknown={**gpu.unknown, **_hidden_nvlinks(node, gpu)},
            driver=node.snapshot.driver.version,
            cuda=node.snapshot.driver.cuda,
            origin=node.snapshot.origin,
        )


def gpu_rows_of(nodes: Sequence[Topology]) -> list[GpuRow]:
    """The GPUs of some nodes; those of a node that is like an earlier one are made of that one's."""
    found: list[GpuRow] = []
    like, rows = None, list[GpuRow]()
    for node in nodes:
        if node.like is not like:
            like, rows = node.like, list(gpu_rows(node.like))
        own = zip(rows, node.gpus, strict=True)
        found += rows if node is like else [replace(row, node=node.snapshot.host, uuid=gpu.uuid) for row, gpu in own]
    return found


def rows_by_node(nodes: Sequence[Topology], make: Callable[[Topology], Iterable[Record]]) -> Iterator[RowsOfNode]:
    """Rows with nothing in them that tells a node from those that are like it but `node`, its host."""
    like, rows = None, list[Record]()
    for node in nodes:
        if node.like is not like:
            like, rows = node.like, list(make(node.like))
        yield RowsOfNode(rows, ("node",), node.snapshot.host)


def link_rows(node: Topology) -> Iterator[NvlinkRow]:
    """Every NVLink of a node."""
    for gpu in node.gpus:
        for link in gpu.nvlinks or ():
            yield made_of(
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
    """The NICs of a node."""
    for nic in node.nics:
        nearest = node.nearest_gpus(nic)
        possible, reason = node.gpudirect(nic)
        yield made_of(
            NicRow,
            nic,
            node=node.snapshot.host,
            nic=nic.name,
            link_layer=nic.kind,
            rate_gb_s=None if nic.rate_gbit_s is None else nic.rate_gbit_s / BITS_PER_BYTE,
            **_pcie(nic.pcie),
            pcie_gb_s=rounded(node.pcie_total(nic).gb_s),
            numa_node=nic.place.numa_node,
            nearest_gpus=[gpu.device for gpu in nearest],
            nearest_path=node.pcie_path(nearest[0], nic) if nearest else None,
            gpudirect_rdma=possible,
            gpudirect_rdma_reason=reason,
            origin=node.snapshot.origin,
        )


def node_rows(nodes: Sequence[Topology], kinds: Sequence[MachineKind]) -> Iterator[NodeRow]:
    """Every node, in the order of the job."""
    kind_of = {position: kind for kind in kinds for position in (*kind.alike, *kind.odd)}
    for position, node in enumerate(nodes):
        snapshot, machine, kind = node.snapshot, node.snapshot.machine, kind_of[position]
        yield made_of(
            NodeRow,
            machine,
            snapshot.gpudirect,
            snapshot,
            node=snapshot.host,
            node_kind=kind.name,
            differences=condense(kind.odd.get(position, ())),
            gpus=len(snapshot.gpus),
            nics=len(snapshot.nics),
            driver=snapshot.driver.version,
            cuda=snapshot.driver.cuda,
            driver_absent=snapshot.driver.absent,
            numa_nodes=len(machine.numa_nodes),
            open_kernel_module=snapshot.driver.open_kernel_module,
            nvswitches=len(snapshot.nvswitches),
            topology=node.fingerprint(),
            failures=[f"{failure.stage}: {failure.error}" for failure in snapshot.failures],
        )


def device_sections(nodes: Sequence[Topology], kinds: Sequence[MachineKind]) -> dict[str, Section]:
    """The sections of nodes and of their devices, for a report that is about more than those."""
    return {
        "nodes": Table(NodeRow.columns(), lambda: node_rows(nodes, kinds)),
        "gpus": Table(GpuRow.columns(), lambda: gpu_rows_of(nodes)),
        "nics": Table(NicRow.columns(), lambda: (row for node in nodes for row in nic_rows(node))),
    }


def rank_rows(ranks: Sequence[RankFacts]) -> Iterator[RankRow]:
    """Every process of the job."""
    return (made_of(RankRow, rank, node=rank.host) for rank in ranks)


def _pcie(link: PcieLink) -> dict[str, int | None]:
    names = ("generation", "width", "max_generation", "max_width")
    return {f"pcie_{name}": getattr(link, name) for name in names}


def _errors(links: Sequence[NvLink]) -> int | None:
    """Of all counters that could be read; None where none could."""
    counted = [count for link in links for count in link.errors.values()]
    return sum(counted) if counted else None


def _fabric(fabric: Fabric | None) -> dict[str, Any]:
    fabric = fabric or Fabric()
    return {
        "fabric_state": fabric.state,
        "fabric_status": fabric.status,
        "fabric_clique": fabric.clique,
        "fabric_health": None if fabric.health_mask is None else describe_health(fabric.health_mask),
    }


def _remapped(rows: RemappedRows | None) -> dict[str, Any]:
    names = ("correctable", "uncorrectable", "pending", "failure")
    return {f"remapped_rows_{name}": None if rows is None else getattr(rows, name) for name in names}


def _far_end(node: Topology, link: NvLink) -> str:
    known = next((gpu.device for gpu in node.gpus if gpu.bus_id and gpu.bus_id == link.peer_bus_id), None)
    if known:
        return known
    return {"gpu": "a GPU", "switch": "NVSwitch", "cpu": "CPU"}.get(link.peer or "", "unknown")


def _hidden_nvlinks(node: Topology, gpu: GpuFacts) -> dict[str, str]:
    setting = node.snapshot.driver_settings.nvlink_disabled
    return {"nvlinks": f"the driver hides them: {setting}"} if gpu.nvlinks == () and setting else {}


def _user(process: GpuProcess) -> str:
    return " ".join(filter(None, (str(process.pid), process.name, "under MPS" if process.mps else "")))
