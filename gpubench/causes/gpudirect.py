"""RDMA that does not reach the GPUs' memory."""

from gpubench.causes.cause import SOCKET, Cause, Reason, Staged
from gpubench.model.nccl_log import RemarkKind


def _find(staged: Staged) -> Reason | None:
    disabled = staged.found(RemarkKind.GDR_DISABLED)
    if staged.inside or staged.network == SOCKET or not disabled:
        return None
    return (
        f"NCCL says: {disabled[0].text}",
        "modprobe nvidia-peermem, or the driver's open kernel modules; gpubench topo shows what is missing",
    )


GPUDIRECT = Cause("gpudirect", "RDMA does not reach the GPUs' memory", _find)
