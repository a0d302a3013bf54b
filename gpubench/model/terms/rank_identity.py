"""The identity of a rank: host, node, process, GPU; and the GPUs and hosts that ranks share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

RANKS_SHARE_A_GPU = "ranks share a GPU"
"""The reason why speed is not judged: no profile, limit or model is of ranks that divide one GPU's SMs and memory."""

HOSTS_ARE_SPLIT = "NCCL_HOSTID splits a host"
"""The same of ranks of one host that NCCL takes for ranks of several, and joins over the network."""

GPUS_ARE_SPLIT = "MIG splits the GPUs"
"""The same of ranks that drive instances of GPUs, which reach each other through host memory alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """One rank: where it runs and what it drives. GPU fields are None on the host backend.

    `nccl_host` is what NCCL takes for its host where NCCL_HOSTID says so, None where that is the host; `sm_percent` is
    the share of the GPU's SMs that MPS leaves it, None where it does not run under MPS.
    """

    rank: int
    host: str
    node: int
    local_rank: int
    pid: int
    gpu: str | None = None
    gpu_index: int | None = None
    gpu_bus_id: str | None = None
    gpu_uuid: str | None = None
    nccl_host: str | None = None
    sm_percent: float | None = None

    def __str__(self) -> str:
        if self.gpu_bus_id is None:
            return f"rank {self.rank} on {self.host}"
        return f"rank {self.rank} on {self.host} (GPU {self.gpu_index}, {self.gpu_bus_id})"

    @property
    def device(self) -> tuple[int, str] | None:
        """The GPU that it drives, or the MIG instance: the same for ranks that share it; None without one."""
        return None if self.gpu_uuid is None else (self.node, self.gpu_uuid)


def by_device(ranks: Sequence[RankIdentity]) -> list[list[RankIdentity]]:
    """The ranks of each GPU, in order of its first rank; ranks without one are left out."""
    found: dict[tuple[int, str], list[RankIdentity]] = {}
    for each in ranks:
        if each.device is not None:
            found.setdefault(each.device, []).append(each)
    return list(found.values())


def ranks_per_gpu(ranks: Sequence[RankIdentity]) -> int | None:
    """The most ranks that share a GPU, 1 where each has its own; None where none drives a GPU."""
    return max(map(len, by_device(ranks)), default=None)


def hosts_of_nccl(ranks: Sequence[RankIdentity]) -> int:
    """The number of hosts as NCCL counts them: by NCCL_HOSTID where that is set, else by node."""
    return len({each.node if each.device is None else each.nccl_host or each.node for each in ranks})


def why_not_judged(ranks: Sequence[RankIdentity]) -> str:
    """The reason why the speed of these ranks is compared with no machine's; '' where each has a GPU of its own."""
    if (ranks_per_gpu(ranks) or 1) > 1:
        return RANKS_SHARE_A_GPU
    hosts = Counter(node for node, _ in {(each.node, each.nccl_host) for each in ranks if each.device is not None})
    return HOSTS_ARE_SPLIT if any(names > 1 for names in hosts.values()) else ""
