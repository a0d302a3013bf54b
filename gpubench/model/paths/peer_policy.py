"""Pairs of GPUs without peer access, or kept off it by NCCL: which of them go through host memory by design."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpubench.model.facts.snapshot import GpuFacts, NvlinkPeer
from gpubench.model.paths.links import active_links, usual_active_links
from gpubench.model.paths.path_types import DEFAULT_LEVEL, amd_takes_all, is_within, nccl_type
from gpubench.model.paths.topology import P2P_STATUS, PeerAccess, Topology
from gpubench.model.terms.rank_identity import GPUS_ARE_SPLIT

NCCL_POLICY = f"NCCL takes peer access up to path class {DEFAULT_LEVEL} (NCCL_P2P_LEVEL)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A kind of refusal of peer access by the driver.

    `status` is NVML's word, '' where only CUDA refuses; whether NVLinks join the two (`wired`), or, of TNS, each of
    them to other GPUs (`mesh`); whether either is split (`mig`); of GNS, whether two others of the same models have
    peer access over PCIe (`odd`), so that it is no matter of the models.
    """

    status: str
    wired: bool
    mesh: bool
    mig: bool
    odd: bool = False

    @property
    def by_design(self) -> bool:
        """True if there is nothing to repair."""
        return self.mig or (not self.wired and (self.mesh or (self.status == "GNS" and not self.odd)))

    @property
    def reason(self) -> str:
        """The reason in a few words."""
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
        mesh=access.nvml == "TNS"
        and _has_peers(source)
        and _has_peers(destination)
        and not lost_links_between(node, source, destination),
        mig=bool(source.mig or destination.mig),
        odd=access.nvml == "GNS" and _is_granted_alike(node, source, destination),
    )


def _is_granted_alike(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    """True if two GPUs of the same models as these have peer access, and no NVLinks between them."""
    models = frozenset((source.name, destination.name))
    return None not in models and models in node.granted_over_pcie


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

    GPUs that lost all their NVLinks to NVSwitches, or those that may have joined them, are no matter of policy.
    """
    path = node.path(source, destination)
    if not is_beyond_policy(node, path) or any(lost_its_switches(node, gpu) for gpu in (source, destination)):
        return ""
    if lost_links_between(node, source, destination):
        return ""
    return f"{NCCL_POLICY}, and this is {path}"


def is_policy_known(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    """True where nothing is missing that `nccl_keeps_off` rests on: the path as the driver said it, and for two GPUs
    the processor. A topology file may leave NVLinks out, or where they lead.
    """
    on_known = node.snapshot.machine.cpu is not None or not amd_takes_all(len(node.gpus))
    return on_known and node.states_path(source, destination)


def lost_its_switches(node: Topology, gpu: GpuFacts) -> bool:
    """True if a GPU has NVLinks to NVSwitches and none is active; one without a bridge just has none.

    The only GPU of a node misses none, unless NVLinks lead to other nodes: it has no other to reach.
    """
    has_others = len(node.gpus) > 1 or (gpu.fabric is not None and gpu.fabric.spans_nodes)
    return has_others and is_switched(node, gpu) and bool(gpu.nvlinks) and active_links(gpu) == 0


def lost_links_between(node: Topology, source: GpuFacts, destination: GpuFacts) -> bool:
    """True if no NVLink joins two GPUs, and both have fewer to others than their siblings: some may have joined them.

    GPUs without any may just have no bridge.
    """
    return node.nvlinks(source, destination) == 0 and all(_lost_some(node, gpu) for gpu in (source, destination))


def _lost_some(node: Topology, gpu: GpuFacts) -> bool:
    return 0 < (active_links(gpu) or 0) < usual_active_links(node.gpus, gpu.name) and not is_switched(node, gpu)


def is_switched(node: Topology, gpu: GpuFacts) -> bool:
    """True if NVLinks of a GPU lead to NVSwitches: it sees one, or they show one, or its fabric was ready.

    Virtual machines do not see the switches of a board of which they have all GPUs.
    """
    registered = gpu.fabric is not None and gpu.fabric.state == "completed"
    leads = any(link.peer is NvlinkPeer.SWITCH for link in gpu.nvlinks or ())
    return bool(node.snapshot.nvswitches) or leads or registered


def split_by_mig(nodes: Iterable[Topology]) -> str:
    """The reason why collectives are compared with no whole GPUs': a node has all its GPUs split. Else empty.

    A single GPU that is split beside whole ones slows these down, and is a fault.
    """
    return GPUS_ARE_SPLIT if any(node.gpus and all(gpu.mig for gpu in node.gpus) for node in nodes) else ""
