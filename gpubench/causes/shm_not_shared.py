"""Ranks of one machine that share no /dev/shm, as in containers of their own: NCCL then uses the network."""

from gpubench.causes.cause import Cause, Reason, Staged


def _find(staged: Staged) -> Reason | None:
    if not staged.one_node or staged.network is None:
        return None
    return (
        "ranks of one host use the network, as they do in containers that share no /dev/shm",
        "run the ranks in one container, or share it: docker run --ipc=host",
    )


SHM_NOT_SHARED = Cause("shm_not_shared", "ranks of one machine share no /dev/shm", _find)
