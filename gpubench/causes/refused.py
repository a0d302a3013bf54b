"""Peer access that the driver or CUDA refuses although the GPUs could have it."""

from gpubench.causes.cause import Cause, Reason, Staged
from gpubench.model.nccl_log import RemarkKind

_ADVICE = {
    RemarkKind.NVLINK_REFUSED: "NVLinks without peer access are a fault: is the fabric manager running? gpubench topo",
    RemarkKind.DRIVER_REFUSED: "gpubench topo shows the driver's reason",
    RemarkKind.PEER_ACCESS_REFUSED: "gpubench topo shows the driver's reason",
    RemarkKind.PEER_QUERY_FAILED: "gpubench topo shows the driver's reason",
    RemarkKind.LEGACY_IPC_REFUSED: "CUDA IPC does not work here: unset NCCL_CUMEM_ENABLE, or use a newer NCCL",
    RemarkKind.CONFIDENTIAL: "confidential computing encrypts transfers through host memory",
}
_CUDA_REFUSES = "0"


def _find(staged: Staged) -> Reason | None:
    if not staged.inside or staged.network is not None:
        return None
    for kind, advice in _ADVICE.items():
        for note in staged.found(kind):
            return f"NCCL says: {note.gist}", advice
    for note in staged.found(RemarkKind.P2P_TYPE):
        if note.about[1] == _CUDA_REFUSES:
            return (
                f"CUDA refuses peer access between GPUs of the node: {note.text}",
                "gpubench topo shows which, and the driver's reason",
            )
    return None


REFUSED = Cause("refused", "the driver or CUDA refuses peer access", _find)
