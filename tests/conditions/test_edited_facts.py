"""Edit one fact of a healthy machine and run `check --quick` again: one line per kind of machine.

Add a line to `ILL` if the edit makes a machine ill, and to `HEALTHY` if it does not. Name several kinds of machines:
boards with NVSwitches, cards with and without bridges, workstations, racks, DGX Spark.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.conditions.circumstances import Facts
from gpubench.measure.check.health import judge
from gpubench.model.facts.health import REPLAYS
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.snapshot import (
    AccessControl,
    Gid,
    GpuDirectFacts,
    GpuFacts,
    GpuLimits,
    IommuFacts,
    NicFacts,
    NicKind,
    NvLink,
    PairFacts,
    PcieLink,
    PciKind,
    PciPlace,
    RdmaPort,
    RemappedRows,
    Service,
    Snapshot,
)
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles import find_node_profiles
from gpubench.simulated.machine import parse_machine, snapshots

Edit = Callable[[Snapshot], Snapshot]


def node(**facts: Any) -> Edit:
    """Change facts of the node."""
    return lambda snapshot: replace(snapshot, **facts)


def _part(kind: str, numbers: tuple[int, ...], facts: dict[str, Any]) -> Edit:
    def edit(snapshot: Snapshot) -> Snapshot:
        parts = list(getattr(snapshot, kind))
        for number in numbers or range(len(parts)):
            changed = {name: value(parts[number]) if callable(value) else value for name, value in facts.items()}
            parts[number] = replace(parts[number], **changed)
        changed_parts: dict[str, Any] = {kind: tuple(parts)}
        return replace(snapshot, **changed_parts)

    return edit


def gpu(*numbers: int, **facts: Any) -> Edit:
    """Change facts of these GPUs, or of all if no number is given. A function gets the GPU and returns the value."""
    return _part("gpus", numbers, facts)


def nic(*numbers: int, **facts: Any) -> Edit:
    """Change facts of these NICs, or of all."""
    return _part("nics", numbers, facts)


def port(*numbers: int, **facts: Any) -> Edit:
    """Change facts of these RDMA ports, or of all."""
    return _part("rdma_ports", numbers, facts)


def pci(kind: PciKind, **facts: Any) -> Edit:
    """Change facts of the first PCI device of a kind that is above a GPU."""

    def edit(snapshot: Snapshot) -> Snapshot:
        above = {device.bus_id: device.above for device in snapshot.pci_devices}
        hops = [snapshot.gpus[0].bus_id or ""]
        while (port := above.get(hops[-1])) is not None:
            hops.append(port)
        first = next(device for device in snapshot.pci_devices if device.kind is kind and device.bus_id in hops)
        devices = (replace(device, **facts) if device is first else device for device in snapshot.pci_devices)
        return replace(snapshot, pci_devices=tuple(devices))

    return edit


def beside(*nics: NicFacts) -> Edit:
    """Add NICs."""
    return lambda snapshot: replace(snapshot, nics=(*snapshot.nics, *nics))


def without_nics(*numbers: int) -> Edit:
    """Remove these NICs, or all, also from the PCI bus."""

    def edit(snapshot: Snapshot) -> Snapshot:
        gone = {nic.bus_id for number, nic in enumerate(snapshot.nics) if number in numbers or not numbers}
        names = {nic.name for nic in snapshot.nics if nic.bus_id in gone}
        return replace(
            snapshot,
            nics=tuple(nic for nic in snapshot.nics if nic.name not in names),
            rdma_ports=tuple(port for port in snapshot.rdma_ports if port.nic not in names),
            pci_devices=tuple(device for device in snapshot.pci_devices if device.bus_id not in gone),
        )

    return edit


def machine_facts(**facts: Any) -> Edit:
    """Change facts of the host."""
    return lambda snapshot: replace(snapshot, machine=replace(snapshot.machine, **facts))


def at(generation: int, width: int, max_generation: int | None = None, max_width: int | None = None) -> PcieLink:
    """A PCIe link with its current and highest values; the default maximum is the current value."""
    return PcieLink(
        generation=generation, width=width, max_generation=max_generation or generation, max_width=max_width or width
    )


def storage(number: int, state: str = "active", rate: float | None = 200.0, function: int = 0) -> NicFacts:
    """A port of a storage card that is next to no GPU."""
    return NicFacts(
        name=f"mlx5_s{number}{function}",
        kind=NicKind.INFINIBAND,
        state=state,
        rate_gbit_s=rate,
        bus_id=f"0000:f{number}:00.{function}",
        model="ConnectX-7",
        pcie=at(5, 8, 5, 16),
        place=PciPlace(host_bridge=f"pci0000:f{number}", numa_node=0),
    )


def second_ports(snapshot: Snapshot) -> Snapshot:
    """Give every NIC a second port that is down."""
    second = (
        replace(each, name=f"{each.name}b", bus_id=(each.bus_id or "").replace(".0", ".1"), state="down")
        for each in snapshot.nics
    )
    return replace(snapshot, nics=(*snapshot.nics, *second))


def gpudirect(**facts: bool) -> Edit:
    """Change the mechanisms by which a NIC reaches GPU memory."""
    return lambda snapshot: replace(snapshot, gpudirect=GpuDirectFacts(**facts))


def redirect(kind: PciKind) -> Edit:
    """Let ACS redirect requests at all ports of a kind."""
    control = AccessControl(capable=("request_redirect",), enabled=("request_redirect",))

    def edit(snapshot: Snapshot) -> Snapshot:
        ports = (
            replace(device, access_control=control) if device.kind is kind else device
            for device in snapshot.pci_devices
        )
        return replace(snapshot, pci_devices=tuple(ports))

    return edit


def translating(snapshot: Snapshot) -> Snapshot:
    """Let the IOMMU translate every device's addresses, as Linux does by default on AMD and Arm."""
    iommu = IommuFacts(units=("ivhd0",), group_types={"1": "DMA-FQ"})
    devices = (replace(device, iommu_group=1) for device in snapshot.pci_devices)
    kernel = replace(snapshot.kernel, iommu=iommu)
    return replace(snapshot, kernel=kernel, pci_devices=tuple(devices))


def wsl(snapshot: Snapshot) -> Snapshot:
    """Run Linux inside Windows, which hides PCI devices, links and processes."""
    hidden = dict.fromkeys(("pcie", "processes", "memory_used_bytes", "throttle_reasons", "idle"), "Unknown Error")
    gpus = (
        replace(
            each, pcie=PcieLink(), processes=None, idle=None, throttle_reasons=None, place=PciPlace(), unknown=hidden
        )
        for each in snapshot.gpus
    )
    bare = replace(snapshot, gpus=tuple(gpus), nics=(), rdma_ports=(), pci_devices=(), switches=())
    return replace(bare, kernel=replace(snapshot.kernel, wsl=True))


def node_links(link: PcieLink) -> Edit:
    """Change the uplinks of all switches."""

    def edit(snapshot: Snapshot) -> Snapshot:
        devices = (
            replace(device, link=link) if device.kind in (PciKind.UPSTREAM_PORT, PciKind.ROOT_PORT) else device
            for device in snapshot.pci_devices
        )
        switches = (replace(switch, link=link) for switch in snapshot.switches)
        return replace(snapshot, pci_devices=tuple(devices), switches=tuple(switches))

    return edit


def both(*edits: Edit) -> Edit:
    """Apply several edits in order."""

    def edit(snapshot: Snapshot) -> Snapshot:
        for change in edits:
            snapshot = change(snapshot)
        return snapshot

    return edit


def links(**facts: Any) -> Callable[[GpuFacts], tuple[NvLink, ...]]:
    """Change facts of the first NVLink of a GPU."""

    def edit(gpu: GpuFacts) -> tuple[NvLink, ...]:
        first, *others = gpu.nvlinks or ()
        return replace(first, **facts), *others

    return edit


def pair(source: str = "", destination: str = "", **facts: Any) -> Edit:
    """Change NVML's answers for a pair, for all pairs with a GPU, or for all pairs."""

    def edit(snapshot: Snapshot) -> Snapshot:
        named = {source, destination} - {""}
        pairs = (
            replace(each, **facts) if named <= {each.source, each.destination} else each for each in snapshot.pairs
        )
        return replace(snapshot, pairs=tuple(pairs))

    return edit


def settings(**facts: Any) -> Edit:
    """Change settings of the driver."""
    return lambda snapshot: replace(snapshot, driver_settings=replace(snapshot.driver_settings, **facts))


def manager(**facts: Any) -> Edit:
    """Change the fabric manager."""

    def edit(snapshot: Snapshot) -> Snapshot:
        services = {**snapshot.driver_settings.services, "nv-fabricmanager": Service(**facts)}
        return settings(services=services)(snapshot)

    return edit


def unlisted(snapshot: Snapshot) -> Snapshot:
    """Remove the last GPU from the driver's list, but leave it on the PCI bus."""
    *listed, last = snapshot.gpus
    pairs = (each for each in snapshot.pairs if last.device not in (each.source, each.destination))
    return replace(snapshot, gpus=tuple(listed), pairs=tuple(pairs))


REFUSED: dict[str, Any] = {"cuda": False, "read": "NS", "write": "NS", "atomics": "NS", "pci": "NS"}


def split(*numbers: int) -> Edit:
    """Split GPUs with MIG, which removes their peer access."""
    pairs = [pair(f"GPU{number}", **REFUSED, nvlink="NS") for number in numbers] or [pair(**REFUSED, nvlink="NS")]
    return both(gpu(*numbers, mig=True), *pairs)


def with_display_card(snapshot: Snapshot) -> Snapshot:
    """Add a small card in a slot with eight lanes, without peer access."""
    first, number = snapshot.gpus[0], len(snapshot.gpus)
    lanes = PcieLink(generation=3, width=8, max_generation=3, max_width=16)
    card: dict[str, Any] = {
        "name": "NVIDIA T400 4GB",
        "uuid": "GPU-00000000-0000-0000-0000-0000000000f1",
        "memory_bytes": 4 * 10**9,
        "compute_capability": "7.5",
        "ecc": None,
    }
    small: GpuFacts = replace(
        first, index=number, cuda_index=number, bus_id="0000:f1:00.0", multiprocessors=6, pcie=lanes, nvlinks=(), **card
    )
    facts: dict[str, Any] = {"pcie_path": "NODE", "nvlink": "NS", **REFUSED, "read": "CNS", "write": "CNS"}
    names = [(gpu.device, small.device) for gpu in snapshot.gpus]
    pairs = (PairFacts(source=one, destination=two, **facts) for pair in names for one, two in (pair, pair[::-1]))
    return replace(snapshot, gpus=(*snapshot.gpus, small), pairs=(*snapshot.pairs, *pairs))


def throttled(reason: str, *numbers: int) -> Edit:
    """Give busy GPUs a reason for lower clocks."""
    return gpu(*numbers, throttle_reasons=(reason,), idle=False)


def power(limit_w: float, *numbers: int) -> Edit:
    """Set the power limit of GPUs whose default is 700 W."""
    return gpu(*numbers, limits=GpuLimits(power_w=limit_w, default_power_w=700.0))


def rows(**facts: Any) -> Edit:
    """Set the remapped memory rows of GPU1."""
    known: dict[str, Any] = {"correctable": 0, "uncorrectable": 0, "pending": False, "failure": False, **facts}
    return gpu(1, remapped_rows=RemappedRows(**known))


def counted(**counters: int) -> Callable[[RdmaPort], dict[str, int]]:
    """Set counters of an RDMA port."""
    return lambda port: {**(port.counters or {}), **counters}


BOARDS = "hgx-h100-8 hgx-a100-8 hgx-b200-8 hgx-h200-4"
HBM = f"{BOARDS} h100-pcie-2 h100-nvl-2 a100-pcie-2 gb200-nvl-4"
SWITCHED = "hgx-h100-8 hgx-a100-8"
NVLINKS = f"{BOARDS} h100-nvl-2 a100-pcie-2 dgx-1-v100 gb200-nvl-4"
LIMITED = "nvlink-bandwidth-limited WARN"
RDMA = "hgx-h100-8 hgx-a100-8"
CARDS = "l40s-8 l4-8 h100-pcie-2 h100-nvl-2 a100-pcie-2 rtx-pro-6000-8"
WORKSTATIONS = "rtx-4090-2 rtx-5090-2"
PEERS = "l40s-8 rtx-pro-6000-8"
PEERMEM = "peermem-not-registered WARN"
SOLDERED = "hgx-h100-8 hgx-a100-8 hgx-a100-4 gh200-4 dgx-1-v100"
ROCE_V2 = Gid(index=3, kind="RoCE v2", address="ipv4")
EVERYWHERE = f"{BOARDS} {CARDS} {WORKSTATIONS} gb200-nvl-4 dgx-1-v100"


ILL: list[tuple[str, str, Edit, str]] = [
    # what is edited, on which machines, the edit, and the finding with its severity
    ("one NIC is down", "hgx-h100-8 hgx-b200-8", nic(3, state="down"), "rdma-port-down FAIL"),
    ("one GPU is 3 °C below its limit", EVERYWHERE, gpu(1, temperature_c=86, slowdown_margin_c=3), "gpu-hot WARN"),
    ("all GPUs are above their limit", EVERYWHERE, gpu(slowdown_margin_c=-2), "gpu-hot WARN"),
    ("one GPU is at 95 °C of an unknown limit", EVERYWHERE, gpu(1, temperature_c=95), "gpu-hot WARN"),
    ("one GPU slows down because of heat", EVERYWHERE, throttled("sw_thermal_slowdown", 1), "gpu-throttled WARN"),
    ("one GPU that nobody uses is capped", EVERYWHERE, throttled("sw_power_cap", 1), "clocks-capped WARN"),
    ("one GPU has a lower power limit", EVERYWHERE, both(power(700.0), power(500.0, 1)), "power-limited WARN"),
    ("all GPUs have half of their power", EVERYWHERE, power(350.0), "power-limited WARN"),
    ("ECC is off on one GPU", HBM, gpu(1, ecc=False), "ecc-off WARN"),
    ("ECC is off on all GPUs", HBM, gpu(ecc=False), "ecc-off WARN"),
    (
        "4 GiB are in use by nobody",
        "hgx-h100-8 l4-8 h100-nvl-2",
        gpu(1, memory_used_bytes=4 * 2**30),
        "memory-in-use WARN",
    ),
    ("a memory bank has no spare row", HBM, rows(uncorrectable=9, banks_without_spares=1), "row-remap-failed FAIL"),
    ("the driver does not list a GPU on the bus", EVERYWHERE, unlisted, "gpu-lost FAIL"),
    ("NVML denies an NVLink", NVLINKS, pair("GPU0", "GPU1", nvlink="NS"), "nvlink-doubtful WARN"),
    ("NVML denies atomics", NVLINKS, pair("GPU0", "GPU1", atomics="NS"), "nvlink-doubtful WARN"),
    ("the state of a link is unknown", NVLINKS, gpu(1, nvlinks=links(active=None)), "nvlink-doubtful WARN"),
    ("one GPU has less NVLink bandwidth", NVLINKS, settings(nvlink_bandwidth_reduced=("GPU1",)), LIMITED),
    ("all NVLinks have half their bandwidth", NVLINKS, settings(nvlink_bandwidth_mode="half"), LIMITED),
    (
        "an NVSwitch is gone",
        SWITCHED,
        lambda node: replace(node, nvswitches=node.nvswitches[1:]),
        "fabric-unhealthy FAIL",
    ),
    ("the fabric manager has stopped", SWITCHED, manager(running=False), "fabric-manager-stopped WARN"),
    ("the fabric manager is older", SWITCHED, manager(running=True, version="535.1"), "fabric-manager-version WARN"),
    ("one of two GPUs is another model", "h100-nvl-2 rtx-4090-2", gpu(1, name="NVIDIA L40S"), "gpu-differs WARN"),
    ("one GPU is another model", "dgx-1-v100 l40s-8", gpu(1, name="Tesla T4"), "gpu-model WARN"),
    ("one GPU has another capability", EVERYWHERE, gpu(1, compute_capability="7.2"), "gpu-differs WARN"),
    ("one GPU has replayed 5,000 packets", EVERYWHERE, gpu(1, pcie_replays=5000), "pcie-errors WARN"),
    ("all GPUs have replayed 1,000,000 packets", EVERYWHERE, gpu(pcie_replays=10**6), "pcie-errors WARN"),
    ("replays grow during the run", EVERYWHERE, node(errors_grown={"GPU1": {REPLAYS: 11}}), "pcie-errors FAIL"),
    ("all NVLinks count errors", BOARDS, gpu(nvlinks=links(errors={"replay": 10**6})), "nvlink-errors WARN"),
    ("NVLink errors grow", BOARDS, node(errors_grown={"GPU1": {"replay on link 0": 11}}), "nvlink-errors FAIL"),
    ("all ports count errors", RDMA, port(counters=counted(symbol_error=10**6)), "rdma-port-errors WARN"),
    ("one GPU has half its lanes", f"{BOARDS} {CARDS} dgx-1-v100", gpu(1, pcie=at(4, 8, 4, 16)), "pcie-width FAIL"),
    ("all GPUs of a board have half their lanes", SOLDERED, gpu(pcie=at(4, 8, 4, 16)), "pcie-width FAIL"),
    (
        "a GPU at work has a low generation",
        CARDS,
        gpu(0, pcie=at(1, 16, 5), performance_state=0),
        "pcie-generation WARN",
    ),
    (
        "a root port is at x4",
        f"{CARDS} {WORKSTATIONS}",
        pci(PciKind.ROOT_PORT, link=at(1, 4, 5, 16)),
        "pcie-uplink FAIL",
    ),
    ("the link above a switch is at x4", RDMA, pci(PciKind.ROOT_PORT, link=at(1, 4, 5, 16)), "pcie-uplink FAIL"),
    ("an uplink is at x4", RDMA, pci(PciKind.UPSTREAM_PORT, link=at(1, 4, 5, 16)), "pcie-uplink FAIL"),
    ("one card's maximum is lower", CARDS, gpu(1, pcie=at(3, 16)), "below-profile FAIL"),
    ("one NIC has half its lanes", RDMA, nic(3, pcie=at(4, 8, 4, 16)), "pcie-width FAIL"),
    ("one NIC is in an x8 slot", RDMA, nic(3, pcie=at(4, 8)), "nics-differ WARN"),
    ("one NIC is slower", f"{RDMA} gb200-nvl-4 gh200-4 hgx-h100-4", nic(3, rate_gbit_s=100.0), "rdma-port-slow FAIL"),
    ("two of four NICs are down", "gb200-nvl-4 hgx-h100-4", nic(2, 3, state="down"), "rdma-port-down FAIL"),
    ("all NICs are down", f"{RDMA} gb200-nvl-4 hgx-h100-4", nic(state="down"), "rdma-port-down FAIL"),
    ("one NIC is gone", f"{RDMA} hgx-b200-8", without_nics(3), "nic-absent FAIL"),
    ("one NIC of four is gone", "hgx-h100-4 gb200-nvl-4 gb300-nvl-4 gh200-4", without_nics(3), "nics-differ WARN"),
    ("three NICs of eight are gone", RDMA, without_nics(1, 2, 3), "nics-differ WARN"),
    ("one NIC runs Ethernet", RDMA, nic(3, kind=NicKind.ROCE), "nics-differ WARN"),
    ("one NIC has other firmware", RDMA, both(nic(firmware="28.1"), nic(3, firmware="28.0")), "nics-differ WARN"),
    ("one NIC has a small MTU", RDMA, both(nic(kind=NicKind.ROCE, mtu=4200), nic(3, mtu=1500)), "nics-differ WARN"),
    (
        "one RoCE port has no GID",
        RDMA,
        both(nic(kind=NicKind.ROCE), port(gids=(ROCE_V2,)), port(3, gids=())),
        "nics-differ WARN",
    ),
    ("nvidia-peermem is not registered", RDMA, gpudirect(peermem=True, peermem_registered=False), PEERMEM),
    ("ACS redirects GPUDirect RDMA", RDMA, redirect(PciKind.DOWNSTREAM_PORT), "acs-nic-redirect WARN"),
    ("the IOMMU translates copies between GPUs", PEERS, translating, "iommu-translating WARN"),
    ("the IOMMU translates GPUDirect RDMA", RDMA, translating, "iommu-translating WARN"),
    ("port errors grow", RDMA, node(errors_grown={"mlx5_0": {"symbol_error": 11}}), "rdma-port-errors FAIL"),
]

HEALTHY: list[tuple[str, str, Edit]] = [
    ("nothing is edited", EVERYWHERE, node()),
    ("all GPUs are 50 °C", EVERYWHERE, gpu(temperature_c=50)),
    ("one GPU is 29 °C warmer than its siblings", EVERYWHERE, gpu(1, temperature_c=64)),
    ("one GPU is at 68 °C after use", EVERYWHERE, gpu(0, temperature_c=68, slowdown_margin_c=19)),
    ("all GPUs are at 86 °C under load", EVERYWHERE, gpu(temperature_c=86, slowdown_margin_c=6)),
    ("one GPU is at 86 °C of an unknown limit", EVERYWHERE, gpu(1, temperature_c=86)),
    ("an idle GPU has a power cap", EVERYWHERE, gpu(1, throttle_reasons=("sw_power_cap",))),
    ("all GPUs have a power cap", EVERYWHERE, throttled("sw_power_cap")),
    ("all GPUs have 71 % of their power", EVERYWHERE, power(500.0)),
    ("ECC is off on all workstation cards", WORKSTATIONS, gpu(ecc=False)),
    ("the driver holds 600 MiB", EVERYWHERE, gpu(memory_used_bytes=600 * 2**20)),
    ("a hidden process holds 1,500 MiB", EVERYWHERE, gpu(1, memory_used_bytes=1500 * 2**20)),
    ("an idle process holds a GPU", EVERYWHERE, gpu(1, processes=(GpuProcess(pid=7),), idle=True)),
    (
        "a notebook keeps a GPU at its full clock",
        EVERYWHERE,
        gpu(1, processes=(GpuProcess(pid=7),), idle=False, utilization_percent=0),
    ),
    ("one GPU has replayed 999 packets", EVERYWHERE, gpu(1, pcie_replays=999)),
    ("three memory rows were remapped", HBM, rows(correctable=9, uncorrectable=3, banks_without_spares=0)),
    ("a GPU on the bus belongs to another container", EVERYWHERE, both(unlisted, node(gpus_of_others=1))),
    ("the fabric manager runs outside of this VM", BOARDS, both(manager(running=False), node(nvswitches=()))),
    ("one GPU is split by MIG", HBM, split(1)),
    ("all GPUs are split by MIG", HBM, split()),
    ("all GPUs are vGPUs", "l40s-8 h100-pcie-2", both(gpu(name="NVIDIA L40S-24Q"), pair(**REFUSED))),
    ("a small display card is there too", WORKSTATIONS + " rtx-pro-6000-8 l40s-8", with_display_card),
    ("half of the GPUs are another model", "l40s-8 rtx-pro-6000-8", gpu(0, 1, 2, 3, name="NVIDIA L4")),
    ("one GPU has replayed 140 packets in 200 days", EVERYWHERE, gpu(1, pcie_replays=140)),
    ("one NVLink has counted 140 errors", BOARDS, gpu(1, nvlinks=links(errors={"replay": 140}))),
    ("links rest while a desktop runs", CARDS, gpu(pcie=at(1, 16, 4), idle=False)),
    ("a Blackwell GPU at P8 is not idle", "rtx-pro-6000-8 rtx-5090-2", gpu(0, idle=False, performance_state=8)),
    ("Gen5 cards are in a Gen4 board", "h100-pcie-2 h100-nvl-2 rtx-5090-2 rtx-pro-6000-8", gpu(pcie=at(4, 16))),
    ("Gen4 cards are in a Gen3 board", "l40s-8 l4-8 a100-pcie-2 rtx-4090-2 a10-4", gpu(pcie=at(3, 16))),
    ("two cards share the lanes of one", WORKSTATIONS, gpu(pcie=at(4, 8, 4, 16))),
    ("two cards share the lanes of one, and the driver says so", WORKSTATIONS, gpu(pcie=at(4, 8))),
    ("the second slot has four lanes", WORKSTATIONS, both(node(pci_devices=()), gpu(1, pcie=at(4, 4, 4, 16)))),
    ("the second slot has four lanes, and the driver says so", WORKSTATIONS, gpu(1, pcie=at(4, 4))),
    ("all switches are in a Gen4 host", "hgx-h100-8", node_links(at(4, 16, 5, 16))),
    ("Gen5 NICs are in a Gen4 host", RDMA, nic(pcie=at(3, 16, 5, 16))),
    ("all NICs run at 200 Gb/s", "hgx-h100-8 hgx-b200-8", nic(rate_gbit_s=200.0)),
    ("storage is slower", f"{RDMA} hgx-b200-8 gb200-nvl-4", beside(storage(1), storage(2))),
    (
        "storage has ports without cable",
        f"{RDMA} gb200-nvl-4",
        beside(storage(1), storage(1, "down", None, 1), storage(2, "down", None), storage(2, "down", None, 1)),
    ),
    ("a front end is on the bus", RDMA, beside(replace(storage(1, rate=25.0), kind=NicKind.ROCE, model="E810"))),
    ("an onboard card is slow", WORKSTATIONS, beside(replace(storage(1, rate=25.0), model="ConnectX-4 Lx"))),
    ("every second port has no cable", "hgx-h100-8", second_ports),
    ("no NIC is visible", f"{EVERYWHERE} gh200-1", both(without_nics(), machine_facts(container="docker"))),
    ("the IOMMU translates, and no GPU reaches another over PCIe", f"{WORKSTATIONS} gb200-nvl-4 gh200-1", translating),
    ("the IOMMU translates, and NVLinks join the GPUs", "hgx-h100-8 h100-nvl-2", both(without_nics(), translating)),
    ("ACS redirects, and no NIC reaches GPUs", RDMA, both(redirect(PciKind.DOWNSTREAM_PORT), without_nics())),
    ("dma-buf serves in the place of nvidia-peermem", RDMA, gpudirect(peermem=False, dma_buf=True)),
    ("Windows hides facts from WSL 2", f"{WORKSTATIONS} rtx-4090-2/1", wsl),
    ("a workstation has no cable", f"{CARDS} {WORKSTATIONS}", nic(state="down")),
    ("one port counted 900 errors before its cable was replaced", RDMA, port(1, counters=counted(port_rcv_errors=900))),
]


@cache
def healthy(machine: str) -> list[Snapshot]:
    """Simulate a machine's nodes."""
    return snapshots(parse_machine(machine))


def check(machine: str, edit: Edit) -> Report:
    """Check a machine whose first node was edited, with the profile that it then matches."""
    first, *others = healthy(machine)
    nodes = [Topology(each) for each in (edit(first), *others)]
    return judge(Facts(nodes, group_nodes(nodes), (), find_node_profiles(nodes, {})))


@pytest.mark.parametrize(("what", "machines", "edit", "expected"), ILL)
def test_an_edited_fact_is_named(what: str, machines: str, edit: Edit, expected: str) -> None:
    for machine in machines.split():
        report = check(machine, edit)
        found = [f"{finding.id} {finding.severity.value}" for finding in report.findings]
        assert expected in found, f"{what} on {machine}: {found}"
        assert report.verdict.value == expected.split()[1], f"{what} on {machine}: {found}"


@pytest.mark.parametrize(("what", "machines", "edit"), HEALTHY)
def test_a_healthy_edit_raises_no_alarm(what: str, machines: str, edit: Edit) -> None:
    for machine in machines.split():
        report = check(machine, edit)
        alarms = [(finding.id, finding.seen) for finding in report.findings if finding.severity is not Verdict.SKIP]
        assert alarms == [], f"{what} on {machine}"


CAUSES = [
    # a command, a machine, its fault, and how the last line begins
    ("check --quick", "dgx-1-v100", "gpu0:missing=yes", "FAIL (simulated): node0: 7 GPUs, the board has 8"),
    ("check --quick", "dgx-1-v100", "gpu5:missing=yes", "FAIL (simulated): node0: 7 GPUs, the board has 8"),
    ("check --quick", "dgx-1-v100", "gpu3:nvlink=5", "FAIL (simulated): node0 GPU3: 1 of 6 NVLinks down"),
    ("allreduce --sizes 1G", "gb200-nvl72/8", "gpu1:nvlink=5", "FAIL (simulated): node0 GPU1: 13 of 18 NVLinks down"),
]


@pytest.mark.parametrize(("command", "machine", "fault", "line"), CAUSES)
def test_a_fault_is_named_as_the_cause(command: str, machine: str, fault: str, line: str) -> None:
    """Regression: a missing GPU of a mesh looked like four GPUs to reset, and five NVLinks like a stopped IMEX
    service.
    """
    arguments = [*command.split(), "--simulate", machine, "--fault", fault, "--no-progress"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.stdout.rstrip().rpartition("\n")[2].startswith(line), result.stdout
