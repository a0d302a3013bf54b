"""The identity of a rank: host, node, process, GPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """One rank: where it runs and what it drives. GPU fields are None on the host backend."""

    rank: int
    host: str
    node: int
    local_rank: int
    pid: int
    gpu: str | None = None
    gpu_index: int | None = None
    gpu_bus_id: str | None = None
    gpu_uuid: str | None = None

    def __str__(self) -> str:
        if self.gpu_bus_id is None:
            return f"rank {self.rank} on {self.host}"
        return f"rank {self.rank} on {self.host} (GPU {self.gpu_index}, {self.gpu_bus_id})"
