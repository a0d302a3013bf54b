"""Sockets between nodes that have RDMA devices, or whose library to find them is missing."""

from gpubench.causes.cause import SOCKET, Cause, Reason, Staged
from gpubench.model.nccl_log import RemarkKind


def _find(staged: Staged) -> Reason | None:
    if staged.inside or staged.network != SOCKET:
        return None
    missing = staged.found(RemarkKind.NO_VERBS_LIBRARY)
    if missing:
        return f"sockets between nodes: {missing[0].text}", "install libibverbs (rdma-core) where the ranks run"
    devices = staged.found(RemarkKind.RDMA_DEVICES)
    if devices:
        return (
            f"sockets between nodes, although there are RDMA devices: {devices[0].text}",
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV shows why NCCL does not use them",
        )
    if staged.rdma:
        return (
            "sockets between nodes that found no RDMA device, in a job in which others did",
            "see that these nodes' ports are up (gpubench topo), and that their containers have /dev/infiniband",
        )
    return None


SOCKETS = Cause("sockets", "sockets although there is RDMA", _find)
