"""The wiring of one node's devices, and the bandwidth that it can carry at most: arithmetic on a snapshot."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

from gpubench.model.facts.snapshot import (
    SOFTWARE_RDMA,
    GpuFacts,
    NicFacts,
    NicKind,
    NvlinkPeer,
    PairFacts,
    PcieLink,
    PciPlace,
    Snapshot,
)
from gpubench.model.paths.links import active_links, loaded_link, nvlink_gb_s, pcie_ceiling_gb_s

SELF = "X"
UNKNOWN_PATH = "?"
PATH_CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe path classes as `nvidia-smi topo -m` names them, nearest first; NV# is nearer, NET farther."""

BITS_PER_BYTE = 8

P2P_STATUS = {
    "OK": "possible",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "DR": "disabled by a driver registry key",
    "NS": "not supported",
    "U": "unknown to the driver",
}
"""The words of `nvidia-smi topo -p2p`."""

NOT_SAID = "U"
"""The word that is no answer, neither leave nor refusal."""

Device = GpuFacts | NicFacts


@dataclass(frozen=True, slots=True)
class Limit:
    """A physical ceiling in GB/s per direction; None where it cannot be known, and `note` says why, or what sets it."""

    gb_s: float | None
    note: str


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """Peer access from one GPU to another's memory, as CUDA and as NVML report it; `reason` puts both in words."""

    cuda: bool | None
    nvml: str | None
    reason: str

    @property
    def contradicts(self) -> bool:
        """CUDA says one thing, NVML the other."""
        return self.cuda is not None and self.nvml is not None and self.cuda != (self.nvml == "OK")

    @property
    def possible(self) -> bool | None:
        """Both agree that it is, one of them refuses it, or nobody knows."""
        answers = [self.cuda, None if self.nvml is None else self.nvml == "OK"]
        if False in answers:
            return False
        return True if True in answers else None

    @property
    def word(self) -> str:
        """One word for a matrix: OK, the driver's refusal, `no` where only CUDA refuses, `?`."""
        if self.contradicts:
            return f"{self.nvml}!"
        if self.nvml is not None:
            return self.nvml
        return {True: "OK", False: "no", None: UNKNOWN_PATH}[self.cuda]


class Topology:
    """The answers that a snapshot implies of its GPUs and NICs; `like` is a node with the same facts, or itself."""

    def __init__(self, snapshot: Snapshot, like: "Topology | None" = None) -> None:
        self.snapshot = snapshot
        self.like = like or self
        self.gpus = snapshot.gpus
        self.nics = snapshot.nics
        self.devices: tuple[Device, ...] = (*snapshot.gpus, *snapshot.nics)
        self._pairs = {(pair.source, pair.destination): pair for pair in snapshot.pairs}
        self._uplinks = {switch.bus_id: switch.link for switch in snapshot.switches}

    def path(self, source: Device, destination: Device) -> str:
        """The path class: NV#, or one of `PATH_CLASSES`; `?` where nothing tells."""
        if source is destination:
            return SELF
        links = self.nvlinks(source, destination)
        if links:
            return f"NV{links}"
        return self.pcie_path(source, destination) or UNKNOWN_PATH

    def nvlinks(self, source: Device, destination: Device) -> int | None:
        """Active NVLinks that lead from one GPU to another, directly or through NVSwitch; None where nothing tells."""
        if not isinstance(source, GpuFacts) or not isinstance(destination, GpuFacts):
            return 0
        stated = self._stated(source, destination).path
        if stated is not None:
            return int(stated[2:]) if stated.startswith("NV") else 0
        own, others = self._links[source.index], self._links[destination.index]
        if own is None or others is None:
            return None
        direct = own.get(destination.bus_id, 0) if destination.bus_id else 0
        through_switch = min(own.get(NvlinkPeer.SWITCH, 0), others.get(NvlinkPeer.SWITCH, 0))
        return direct or (through_switch if _same_fabric(source, destination) else 0)

    def states_path(self, source: Device, destination: Device) -> bool:
        """True where somebody said the path class of a pair, as `nvidia-smi topo -m` does."""
        return self._stated(source, destination).path is not None

    @cached_property
    def _links(self) -> dict[int, dict[str | None, int] | None]:
        """Active NVLinks of each GPU by where they lead: a GPU's bus id, or the switch. None: not known."""
        counts: dict[int, dict[str | None, int] | None] = {}
        for gpu in self.gpus:
            if active_links(gpu) is None:
                counts[gpu.index] = None
                continue
            leads = counts[gpu.index] = dict[str | None, int]()
            for link in gpu.nvlinks or ():
                if link.active:
                    end = link.peer if link.peer is NvlinkPeer.SWITCH else link.peer_bus_id
                    leads[end] = leads.get(end, 0) + 1
        return counts

    def pcie_path(self, source: Device, destination: Device) -> str | None:
        """The path class without NVLink: as somebody stated it, else from both devices' places in the PCI tree."""
        facts = self._stated(source, destination)
        if facts.pcie_path:
            return facts.pcie_path
        if facts.path in PATH_CLASSES:
            return facts.path
        if source.bus_id is not None and source.bus_id == destination.bus_id:
            return "PIX"
        return pcie_path_class(source.place, destination.place, len(self.snapshot.machine.numa_nodes))

    def peer_access(self, source: GpuFacts, destination: GpuFacts) -> PeerAccess:
        """Peer access from one GPU to another, as CUDA and NVML report it."""
        facts = self._stated(source, destination)
        said = [word for word in (facts.read, facts.write) if word not in (None, NOT_SAID)]
        nvml = next((word for word in said if word != "OK"), said[0] if said else None)
        silent = [f"NVML says {P2P_STATUS[NOT_SAID]}"] if not said and NOT_SAID in (facts.read, facts.write) else []
        if nvml is not None:
            access = PeerAccess(facts.cuda, nvml, P2P_STATUS.get(nvml, nvml))
            both = f"CUDA says {'possible' if facts.cuda else 'refused'}, NVML says {access.reason}"
            return replace(access, reason=both) if access.contradicts else access
        if facts.cuda is not None:
            answer = "possible" if facts.cuda else "refused by CUDA"
            return PeerAccess(facts.cuda, None, "; ".join([answer, *silent]))
        unknown = "; ".join(dict.fromkeys([*silent, *facts.unknown.values()])) or source.lost or destination.lost
        return PeerAccess(None, None, unknown or self._why_silent)

    @cached_property
    def granted_over_pcie(self) -> frozenset[frozenset[str | None]]:
        """The models of pairs that have peer access, and no NVLinks between them."""
        return frozenset(
            frozenset((one.name, other.name))
            for one, other in permutations(self.gpus, 2)
            if self.peer_access(one, other).possible and not self.nvlinks(one, other)
        )

    @property
    def _why_silent(self) -> str:
        stages = ("nvml", "cuda")
        failed = [f"{each.stage}: {each.error}" for each in self.snapshot.failures if each.stage in stages]
        return "; ".join(failed) or self.snapshot.driver.absent or "nothing here tells"

    def limit(self, source: Device, destination: Device) -> Limit:
        """The ceiling from one device to another: the NVLinks between them, else the narrowest PCIe hop or NIC port."""
        links = self.nvlinks(source, destination)
        if links is None:
            lost = [each.lost for each in (source, destination) if isinstance(each, GpuFacts) and each.lost]
            return Limit(None, lost[0] if lost else "whether NVLinks join them is not known")
        if links:
            return _nvlink_limit(source, links)
        limits = [self._pcie_limit(source, destination)]
        limits += [_rate_limit(device) for device in (source, destination) if isinstance(device, NicFacts)]
        return min(limits, key=lambda limit: limit.gb_s or 0.0)

    def nvlink_total(self, gpu: GpuFacts) -> Limit:
        """GB/s per direction of a GPU's active NVLinks together."""
        if gpu.nvlinks is None:
            return Limit(None, gpu.unknown.get("nvlinks", gpu.lost or "NVLinks are not known"))
        if active_links(gpu) is None:
            return Limit(None, gpu.unknown.get("nvlinks.active", "which NVLinks are active is not known"))
        active = [link for link in gpu.nvlinks if link.active]
        if not active:
            return Limit(None, f"none of {len(gpu.nvlinks)} NVLinks is active" if gpu.nvlinks else "no NVLink")
        rates = [nvlink_gb_s(link) for link in active]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return Limit(None, "the speed of the NVLinks is not known")
        return Limit(sum(known), f"{len(active)} NVLinks × {known[0]:g}")

    def pcie_total(self, device: Device) -> Limit:
        """GB/s per direction of a device's PCIe path to the CPU: of the narrowest of its link and those above."""
        return self._narrowest({device.device: loaded_link(device)} | self._above(device.place, 0), device)

    def nic_limit(self, nic: NicFacts) -> Limit:
        """The ceiling of a NIC, in GB/s per direction: of its port, or of its slot where that carries less."""
        port, slot = _rate_limit(nic), self.pcie_total(nic)
        return slot if port.gb_s is not None and slot.gb_s is not None and slot.gb_s < port.gb_s else port

    def together(self, nics: Sequence[NicFacts]) -> Limit:
        """The ceiling of several NICs at once: devices that share a physical port carry no more than it does."""
        by_port: dict[str, list[NicFacts]] = {}
        for nic in nics:
            by_port.setdefault(nic.port or nic.name, []).append(nic)
        carried = [self.nic_limit(nic) for nic in nics]
        unknown = next((limit for limit in carried if limit.gb_s is None), None)
        if unknown is not None:
            return unknown
        ports = (
            min(sum(self.nic_limit(nic).gb_s or 0.0 for nic in own), max(_rate_limit(nic).gb_s or 0.0 for nic in own))
            for own in by_port.values()
        )
        return Limit(sum(ports), ", ".join(nic.name for nic in nics))

    def nearest_gpus(self, nic: NicFacts) -> tuple[GpuFacts, ...]:
        """The GPUs with the shortest PCIe path to a NIC; none where no path is known."""
        paths = {gpu.index: self.pcie_path(gpu, nic) for gpu in self.gpus}
        nearest = next((each for each in PATH_CLASSES if each in paths.values()), None)
        return tuple(gpu for gpu in self.gpus if nearest is not None and paths[gpu.index] == nearest)

    def gpudirect(self, nic: NicFacts) -> tuple[bool | None, str]:
        """True where GPUDirect RDMA is possible through a NIC, and by what; False or None, and why.

        NCCL takes nvidia-peermem, EFA's provider efa_nv_peermem, and both dma-buf where driver and NIC driver offer it.
        """
        facts, efa = self.snapshot.gpudirect, nic.kind is NicKind.EFA
        module, loaded = ("efa_nv_peermem", facts.efa_peermem) if efa else ("nvidia-peermem", facts.peermem)
        if not nic.rdma:
            software = nic.model == SOFTWARE_RDMA
            return False, "software RDMA: the CPU moves the data" if software else "no RDMA device: plain Ethernet"
        if nic.gpudirect is not None:
            return nic.gpudirect, "NCCL said so"
        if loaded:
            return True, f"{module} is loaded"
        missing = f"{module} is not loaded" if loaded is False else f"{module} was not looked for"
        if facts.dma_buf:
            return True, f"dma-buf, if the NIC's driver supports it too; {missing}"
        if facts.dma_buf is None:
            return None, f"{missing}, and nothing told whether the driver offers dma-buf"
        if efa:
            return None, f"{missing}, which older EFA drivers do without, and the GPU driver offers no dma-buf"
        return (False if loaded is False else None), f"{missing}, and the GPU driver offers no dma-buf"

    @cached_property
    def matrix(self) -> dict[str, dict[str, str]]:
        """Path classes between all devices, by name."""
        if self.like is not self:
            return self.like.matrix
        return {
            source.device: {destination.device: self.path(source, destination) for destination in self.devices}
            for source in self.devices
        }

    def fingerprint(self) -> str:
        """12 hexadecimal digits of the models, links and wiring of the machine; not of serial numbers or load."""
        return self._fingerprint if self.like is self else self.like.fingerprint()

    @cached_property
    def _fingerprint(self) -> str:
        described = {
            "gpus": [(gpu.name, gpu.memory_bytes, len(gpu.nvlinks or ())) for gpu in self.gpus],
            "nics": [(nic.name, nic.kind, nic.rate_gbit_s) for nic in self.nics],
            "matrix": self.matrix,
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]

    def _stated(self, source: Device, destination: Device) -> PairFacts:
        return self._pairs.get((source.device, destination.device), _NOTHING)

    def _pcie_limit(self, source: Device, destination: Device) -> Limit:
        shared = _shared_switches(source.place, destination.place)
        hops = {source.device: loaded_link(source)} | self._above(source.place, shared)
        hops |= self._above(destination.place, shared) | {destination.device: loaded_link(destination)}
        return self._narrowest(hops, source, destination)

    def _above(self, place: PciPlace, shared: int) -> dict[str, PcieLink]:
        """The uplinks above a device, but for the `shared` outermost switches."""
        return {
            f"the uplink of switch {bus_id}": self._uplinks.get(bus_id, PcieLink())
            for bus_id in place.switches[shared:]
        }

    def _narrowest(self, hops: Mapping[str, PcieLink], *ends: Device) -> Limit:
        ceilings = {name: pcie_ceiling_gb_s(link) for name, link in hops.items()}
        for device in ends:
            if ceilings[device.device] is None:
                return Limit(None, device.unknown.get("pcie", f"the PCIe link of {device.device} is not known"))
        known = [(gb_s, name) for name, gb_s in ceilings.items() if gb_s is not None]
        lowest, name = min(known, key=lambda hop: hop[0])
        link = hops[name]
        described = f"PCIe {link.generation or link.max_generation} x{link.width or link.max_width} at {name}"
        hidden = [name for name, gb_s in ceilings.items() if gb_s is None]
        return Limit(lowest, described + (f"; {', '.join(hidden)} is not known" if hidden else ""))


_NOTHING = PairFacts(source="", destination="")


def pcie_path_class(one: PciPlace, other: PciPlace, numa_nodes: int) -> str | None:
    """The PCIe path class of two places, None where they do not tell.

    PIX: at most one switch between them; PXB: several, but no host bridge; PHB: the host bridge; NODE: two host bridges
    of one NUMA node; SYS: two NUMA nodes (the legend of `nvidia-smi topo -m`).
    """
    if one.host_bridge is None or other.host_bridge is None:
        return None
    if one.host_bridge != other.host_bridge:
        if one.numa_node is None or other.numa_node is None:
            return "NODE" if numa_nodes == 1 else None
        return "NODE" if one.numa_node == other.numa_node else "SYS"
    shared = _shared_switches(one, other)
    same_port = one.root_port is not None and one.root_port == other.root_port
    if not shared and not same_port:
        return "PHB"
    return "PIX" if len(one.switches) == len(other.switches) == shared else "PXB"


def rounded(gb_s: float | None) -> float | None:
    """To three decimals: PCIe's figures are fractions of 130ths."""
    return None if gb_s is None else round(gb_s, 3)


def _shared_switches(one: PciPlace, other: PciPlace) -> int:
    if one.host_bridge != other.host_bridge:
        return 0
    shared = 0
    for mine, theirs in zip(one.switches, other.switches, strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared


def _nvlink_limit(source: Device, links: int) -> Limit:
    """GB/s per direction of so many NVLinks of a GPU; all of them are alike."""
    own = source.nvlinks if isinstance(source, GpuFacts) else None
    rate = next((nvlink_gb_s(link) for link in own or () if link.active), None)
    if rate is None:
        return Limit(None, f"{links} NVLinks, but their speed is not known")
    return Limit(links * rate, f"{links} NVLinks × {rate:g}")


def _same_fabric(one: GpuFacts, other: GpuFacts) -> bool:
    """True where two GPUs behind NVSwitches are on the same ones, or nothing says that they are not."""
    mine, theirs = one.fabric, other.fabric
    if mine is None or theirs is None or mine.clique is None or theirs.clique is None:
        return True
    return (mine.cluster_uuid, mine.clique) == (theirs.cluster_uuid, theirs.clique)


def _rate_limit(nic: NicFacts) -> Limit:
    if nic.rate_gbit_s is None:
        return Limit(None, nic.unknown.get("rate_gbit_s", f"the rate of {nic.name} is not known"))
    return Limit(nic.rate_gbit_s / BITS_PER_BYTE, f"{nic.name} at {nic.rate_gbit_s:g} Gb/s")
