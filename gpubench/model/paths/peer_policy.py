"""Pairs of GPUs without peer access, or kept off it by NCCL: which of them go through host memory by design."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpubench.model.facts.snapshot import GpuFacts, NvlinkPeer
from gpubench.model.paths.links import active_links
from gpubench.model.paths.path_types import DEFAULT_LEVEL, amd_takes_all, is_within, nccl_type
from gpubench.model.paths.topology import P2P_STATUS, PeerAccess, Topology

NCCL_POLICY = f"NCCL takes peer access up to path class {DEFAULT_LEVEL} (NCCL_P2P_LEVEL)"

_REFUSALS: Mapping[str, tuple[str, str]] = {
    "GNS": (
        "this GPU model has no peer-to-peer over PCIe with NVIDIA's driver (GeForce): by design, not a fault",
        "nothing to repair: NCCL goes through shared memory here",
    ),
    "CNS": (
        "the driver does not trust this chipset, or the hypervisor does not say that the GPUs may reach each other",
        "bare metal: put the GPUs under one PCIe switch; virtual machine: set x-nv-gpudirect-clique",
    ),
    "TNS": ("the GPUs hang on different sockets or I/O hubs", "move the cards to one socket"),
    "DR": (
        "a registry key of the driver forbids it (ForceP2P, RMForceP2PType)",
        "grep RegistryDwords /proc/driver/nvidia/params; remove the key and reload the driver",
    ),
    "NS": ("the driver supports it for none of these GPUs", "nvidia-smi topo -p2p r; nvidia-smi -q | grep -A 3 MIG"),
}
_MESH = (
    "NVLinks join each of these GPUs to others, not to each other, and PCIe cannot: by design, as on DGX-1",
    "nothing to repair: NCCL takes the NVLinks of a GPU between",
)
_MIG = ("MIG is on: the driver offers no peer access to MIG instances, by design", "nvidia-smi -mig 0, or accept it")
_FABRIC = (
    "NVLinks are active, yet the driver refuses: the fabric manager is not ready",
    "systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A 12 Fabric",
)
_OTHER = ("the driver gives no reason", "nvidia-smi topo -p2p r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A kind of refusal of peer access by the driver.

    `status` is NVML's word, '' where only CUDA refuses; whether NVLinks join the two (`wired`), or, of TNS, each of
    them to other GPUs (`mesh`); whether either is split (`mig`).
    """

    status: str
    wired: bool
    mesh: bool
    mig: bool

    @property
    def by_design(self) -> bool:
        """True if there is nothing to repair."""
        return self.mig or (not self.wired and (self.mesh or self.status == "GNS"))

    @property
    def reason(self) -> str:
        """The reason in a few words."""
        if self.mig:
            return "MIG instances have no peer access"
        if self.mesh and not self.wired:
            return "NVLinks join each of these GPUs to others"
        return P2P_STATUS.get(self.status, self.status) or "CUDA refuses peer access"

    @property
    def cause_and_advice(self) -> tuple[str, str]:
        """The reason in a sentence, and the cure."""
        if self.mig or self.wired:
            return _MIG if self.mig else _FABRIC
        return _MESH if self.mesh else _REFUSALS.get(self.status, _OTHER)


def refusal_of(node: Topology, source: GpuFacts, destination: GpuFacts, access: PeerAccess) -> Refusal:
    """The kind of refusal that a pair without peer access meets."""
    return Refusal(
        status=access.nvml or "",
        wired=bool(node.nvlinks(source, destination)),
        mesh=access.nvml == "TNS" and _has_peers(source) and _has_peers(destination),
        mig=bool(source.mig or destination.mig),
    )


def _has_peers(gpu: GpuFacts) -> bool:
    return any(link.active and link.peer is NvlinkPeer.GPU for link in gpu.nvlinks or ())


def is_beyond_policy(node: Topology, path_class: str) -> bool:
    """True if NCCL, left to itself, keeps off peer access over a path class.

    It takes pairs up to PXB, and on AMD processors with at most two GPUs any (ncclTopoCheckP2p in src/graph/paths.cc).
    """
    path = nccl_type(path_class)
    on_amd = "AMD" in (node.snapshot.machine.cpu or "")
    return path is not None and not is_within(path) and not (on_amd and amd_takes_all(len(node.gpus)))


def nccl_keeps_off(node: Topology, source: GpuFacts, destination: GpuFacts) -> str:
    """The reason why NCCL, without settings, does not use the peer access of a pair; empty where it does.

    GPUs that lost all their NVLinks to NVSwitches are no matter of policy.
    """
    path = node.path(source, destination)
    if not is_beyond_policy(node, path) or any(_lost_its_switches(node, gpu) for gpu in (source, destination)):
        return ""
    return f"{NCCL_POLICY}, and this is {path}"


def _lost_its_switches(node: Topology, gpu: GpuFacts) -> bool:
    """True if a GPU has NVLinks to NVSwitches and none is active; one without a bridge just has none."""
    switched = bool(node.snapshot.nvswitches) or any(link.peer is NvlinkPeer.SWITCH for link in gpu.nvlinks or ())
    return switched and bool(gpu.nvlinks) and active_links(gpu) == 0
