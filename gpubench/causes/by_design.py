"""NCCL's own policy, and hardware without a direct path: nothing to repair."""

from gpubench.causes.cause import SOCKET, Cause, Reason, Staged
from gpubench.causes.path_types import DEFAULT_LEVEL, amd_takes_all, is_nvlink, is_within, level
from gpubench.model.nccl_log import RemarkKind

_AMD = "1/2"


def _find(staged: Staged) -> Reason | None:
    if staged.inside:
        return None if staged.network is not None else _too_far(staged) or _no_peer_access(staged)
    return _no_rdma(staged) if staged.network == SOCKET else _far_from_nic(staged)


def _too_far(staged: Staged) -> Reason | None:
    """A path that NCCL takes for too long."""
    path = staged.path
    if path is None or is_within(path):
        return None
    limits = [limit for value in staged.settings("NCCL_P2P_LEVEL") if (limit := level(value))]
    if any(is_within(path, limit) for limit in limits):
        return None
    is_amd = any(note.about == (_AMD,) for note in staged.found(RemarkKind.PROCESSOR))
    if is_amd and amd_takes_all(staged.gpus):
        return None
    return (
        f"GPUs whose path is {path}: NCCL uses peer access over PCIe switches only, up to {DEFAULT_LEVEL}",
        "nothing to repair; NCCL_P2P_LEVEL=SYS tries peer access, which may be faster or slower",
    )


def _no_peer_access(staged: Staged) -> Reason | None:
    """GPUs on PCIe that the driver gives none; where there are NVLinks, that is a fault."""
    refused = [note for note in staged.notes if note.kind is RemarkKind.DRIVER_REFUSED]
    if not refused or has_nvlinks(staged):
        return None
    return (
        f"the driver gives these GPUs no peer access: {refused[0].gist}",
        "GeForce GPUs have none over PCIe; for others gpubench topo shows the driver's reason",
    )


def has_nvlinks(staged: Staged) -> bool:
    """Whether anything in the log shows that the GPUs have NVLinks."""
    switched = any(note.about[0] == "" for note in staged.found(RemarkKind.MULTICAST))
    return switched or is_nvlink(staged.path) or bool(staged.found(RemarkKind.NVLINK_REFUSED))


def _no_rdma(staged: Staged) -> Reason | None:
    """No RDMA device anywhere in the job."""
    nothing = (RemarkKind.NO_RDMA_DEVICE,)
    tellers = (staged.source, staged.destination)
    if staged.rdma or staged.found(RemarkKind.NO_VERBS_LIBRARY):
        return None
    if not all(any(note.kind in nothing for note in teller.notes) for teller in tellers):
        return None
    return (
        "sockets between nodes on which NCCL found no RDMA device",
        "nothing to repair unless the nodes have InfiniBand or RoCE: a container needs /dev/infiniband",
    )


def _far_from_nic(staged: Staged) -> Reason | None:
    """A GPU far from every NIC."""
    far = [note for note in staged.notes if note.kind is RemarkKind.GDR_FAR]
    near = {note.about[0] for note in staged.notes if note.kind is RemarkKind.GDR_NEAR}
    far = [note for note in far if note.about[0] not in near]
    if not far or staged.found(RemarkKind.GDR_DISABLED):
        return None
    return (
        f"NICs too far from the GPUs for NCCL to use GPUDirect RDMA {far[0].text[far[0].text.find('(') :]}",
        "give the rank a NIC behind the same PCIe switch; NCCL_NET_GDR_LEVEL=SYS tries it over any path",
    )


BY_DESIGN = Cause("by_design", "NCCL's policy, or hardware without a direct path", _find)
