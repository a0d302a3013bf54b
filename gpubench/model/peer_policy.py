"""Pairs of GPUs without peer access, or kept off it by NCCL: which of them go through host memory by design."""

from dataclasses import dataclass

from gpubench.model.snapshot import GpuFacts, NvlinkPeer
from gpubench.model.topology import P2P_STATUS, PeerAccess, Topology

NCCL_POLICY = "NCCL takes peer access up to path class PXB (NCCL_P2P_LEVEL)"

_BEYOND_PXB = ("PHB", "NODE", "SYS")
_MOST_GPUS_ON_AMD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What pairs that the driver refuses peer access have in common.

    `status` is NVML's word, '' where only CUDA refuses; whether NVLinks join the two (`wired`), or, of TNS, each of
    them to other GPUs (`mesh`); whether either is split (`mig`).
    """

    status: str
    wired: bool
    mesh: bool
    mig: bool

    @property
    def by_design(self) -> bool:
        """Whether there is nothing to repair."""
        return self.mig or (not self.wired and (self.mesh or self.status == "GNS"))

    @property
    def reason(self) -> str:
        """Why, in a few words."""
        if self.mig:
            return "MIG instances have no peer access"
        if self.mesh and not self.wired:
            return "NVLinks join each of these GPUs to others"
        return P2P_STATUS.get(self.status, self.status) or "CUDA refuses peer access"


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


def nccl_keeps_off(node: Topology, source: GpuFacts, destination: GpuFacts) -> str:
    """Why NCCL, left to itself, does not use the peer access that a pair may have; empty where it does.

    It takes pairs up to PXB, and on AMD processors with at most two GPUs any (ncclTopoCheckP2p in src/graph/paths.cc).
    """
    path = node.path(source, destination)
    if path not in _BEYOND_PXB or ("AMD" in (node.snapshot.machine.cpu or "") and len(node.gpus) <= _MOST_GPUS_ON_AMD):
        return ""
    return f"{NCCL_POLICY}, and this is {path}"
