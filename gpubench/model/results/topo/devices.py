"""The rows of `gpubench topo`'s sections about single things: GPUs, their links, NICs, nodes, ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

from gpubench.model.facts.fabric_health import describe_health
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Fabric, NvLink, RemappedRows
from gpubench.model.paths.links import active_links, nvlink_gb_s
from gpubench.model.paths.nodes import MachineKind, condense
from gpubench.model.paths.topology import BITS_PER_BYTE, Topology, rounded
from gpubench.model.results.topo.rows import GpuRow, NicRow, NodeRow, NvlinkRow, RankRow


def gpu_rows(node: Topology) -> Iterator[GpuRow]:
    """The GPUs of a node."""
    for gpu in node.gpus:
        active = [link for link in gpu.nvlinks or () if link.active]
        yield GpuRow(
            node=node.snapshot.host,
            gpu=gpu.device,
            cuda_index=gpu.cuda_index,
            name=gpu.name,
            uuid=gpu.uuid,
            bus_id=gpu.bus_id,
            compute_capability=gpu.compute_capability,
            multiprocessors=gpu.multiprocessors,
            memory_bytes=gpu.memory_bytes,
            memory_used_bytes=gpu.memory_used_bytes,
            mig=gpu.mig,
            ecc=gpu.ecc,
            persistence=gpu.persistence,
            idle=gpu.idle,
            pcie_generation=gpu.pcie.generation,
            pcie_width=gpu.pcie.width,
            pcie_max_generation=gpu.pcie.max_generation,
            pcie_max_width=gpu.pcie.max_width,
            pcie_gb_s=rounded(node.pcie_total(gpu).gb_s),
            pcie_replays=gpu.pcie_replays,
            numa_node=gpu.place.numa_node,
            cpu_affinity=gpu.cpu_affinity,
            nvlinks_active=active_links(gpu),
            nvlinks=None if gpu.nvlinks is None else len(gpu.nvlinks),
            nvlink_version=active[0].version if active else None,
            nvlink_gb_s_per_link=nvlink_gb_s(active[0]) if active else None,
            nvlink_gb_s=rounded(node.nvlink_total(gpu).gb_s),
            nvlink_peers=sorted({_far_end(node, link) for link in active}),
            nvlink_errors=_errors(gpu.nvlinks or ()),
            **_fabric(gpu.fabric),
            throttle_reasons=gpu.throttle_reasons,
            **_remapped(gpu.remapped_rows),
            bar1_bytes=gpu.bar1_bytes,
            users=None if gpu.processes is None else [_user(each.pid, each.name) for each in gpu.processes],
            driver=node.snapshot.driver.version,
            cuda=node.snapshot.driver.cuda,
            lost=gpu.lost,
            origin=node.snapshot.origin,
            unknown=gpu.unknown,
        )


def link_rows(node: Topology) -> Iterator[NvlinkRow]:
    """Every NVLink of a node."""
    for gpu in node.gpus:
        for link in gpu.nvlinks or ():
            yield NvlinkRow(
                node=node.snapshot.host,
                gpu=gpu.device,
                link=link.number,
                active=link.active,
                version=link.version,
                gb_s=nvlink_gb_s(link),
                raw_gb_s=link.raw_gb_s,
                peer=link.peer and _far_end(node, link),
                peer_bus_id=link.peer_bus_id,
                errors=link.errors,
                origin=node.snapshot.origin,
            )


def nic_rows(node: Topology) -> Iterator[NicRow]:
    """The NICs of a node."""
    for nic in node.nics:
        nearest = node.nearest_gpus(nic)
        possible, reason = node.gpudirect(nic)
        yield NicRow(
            node=node.snapshot.host,
            nic=nic.name,
            link_layer=nic.kind,
            state=nic.state,
            rate_gbit_s=nic.rate_gbit_s,
            rate_gb_s=None if nic.rate_gbit_s is None else nic.rate_gbit_s / BITS_PER_BYTE,
            interfaces=nic.interfaces,
            bus_id=nic.bus_id,
            model=nic.model,
            driver=nic.driver,
            firmware=nic.firmware,
            mtu=nic.mtu,
            pcie_generation=nic.pcie.generation,
            pcie_width=nic.pcie.width,
            pcie_max_generation=nic.pcie.max_generation,
            pcie_max_width=nic.pcie.max_width,
            pcie_gb_s=rounded(node.pcie_total(nic).gb_s),
            numa_node=nic.place.numa_node,
            nearest_gpus=[gpu.device for gpu in nearest],
            nearest_path=node.pcie_path(nearest[0], nic) if nearest else None,
            gpudirect_rdma=possible,
            gpudirect_rdma_reason=reason,
            origin=node.snapshot.origin,
            unknown=nic.unknown,
        )


def node_rows(nodes: Sequence[Topology], kinds: Sequence[MachineKind]) -> Iterator[NodeRow]:
    """Every node, in the order of the job."""
    kind_of = {position: kind for kind in kinds for position in (*kind.alike, *kind.odd)}
    for position, node in enumerate(nodes):
        snapshot, machine, kind = node.snapshot, node.snapshot.machine, kind_of[position]
        yield NodeRow(
            node=snapshot.host,
            node_kind=kind.name,
            differences=condense(kind.odd.get(position, ())),
            gpus=len(snapshot.gpus),
            nics=len(snapshot.nics),
            driver=snapshot.driver.version,
            cuda=snapshot.driver.cuda,
            driver_absent=snapshot.driver.absent,
            kernel=machine.kernel,
            cpu=machine.cpu,
            cpus=machine.cpus,
            sockets=machine.sockets,
            numa_nodes=len(machine.numa_nodes),
            virtual_machine=machine.virtual_machine,
            product=machine.product,
            peermem=snapshot.gpudirect.peermem,
            dma_buf=snapshot.gpudirect.dma_buf,
            open_kernel_module=snapshot.driver.open_kernel_module,
            nvswitches=len(snapshot.nvswitches),
            topology=node.fingerprint(),
            taken_at=snapshot.taken_at,
            source=snapshot.source,
            origin=snapshot.origin,
            failures=[f"{failure.stage}: {failure.error}" for failure in snapshot.failures],
        )


def rank_rows(ranks: Sequence[RankFacts]) -> Iterator[RankRow]:
    """Every process of the job."""
    for rank in ranks:
        values = {name: getattr(rank, name) for name in RankRow.columns() if name != "node"}
        yield RankRow(node=rank.host, **values)


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
    """The other end of an NVLink, as a person would name it."""
    known = next((gpu.device for gpu in node.gpus if gpu.bus_id and gpu.bus_id == link.peer_bus_id), None)
    if known:
        return known
    return {"gpu": "a GPU", "switch": "NVSwitch", "cpu": "CPU"}.get(link.peer or "", "unknown")


def _user(pid: int, name: str | None) -> str:
    return f"{pid} {name}" if name else str(pid)
