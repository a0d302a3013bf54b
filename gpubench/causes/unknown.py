"""What applies where nothing in the log explains a fallback: how to learn more."""

from gpubench.causes.cause import ASK_FOR_MORE, Cause, Reason, Staged
from gpubench.model.nccl_log import RemarkKind

_POLICY = ("0", "1")


def _find(staged: Staged) -> Reason | None:
    more = f"run it again with {ASK_FOR_MORE}"
    if staged.inside and any(note.about == _POLICY for note in staged.found(RemarkKind.P2P_TYPE)):
        return (
            "isAllCudaP2p 1: CUDA grants these GPUs peer access, and the log does not say why NCCL keeps off it",
            f"{more}; gpubench topo shows the paths",
        )
    if staged.inside:
        return "nothing in the log explains it", f"{more}; gpubench topo shows paths and peer access"
    return "nothing in the log explains it", f"{more}; gpubench topo shows the NICs of a node"


UNKNOWN = Cause("unknown", "nothing in the log explains it", _find)
