"""NVLinks between nodes that are there and do not work."""

from gpubench.causes.cause import Cause, Reason, Staged
from gpubench.model.nccl_log import RemarkKind


def _find(staged: Staged) -> Reason | None:
    broken = staged.found(RemarkKind.MNNVL_BROKEN)
    if staged.inside or not broken:
        return None
    return f"NCCL says: {broken[0].text}", "look at the IMEX service of every node: nvidia-imex-ctl -N"


MNNVL = Cause("mnnvl", "NVLinks between nodes do not work", _find)
