"""What is known of one process: namespaces, shared memory, visible devices, limits, settings, loaded libraries."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank. None is unknown.

    `node` numbers the hosts of the job by their first rank. `namespaces` are the inode numbers of /proc/self/ns by
    kind: two processes share one where the numbers are equal and the boot id is. `shm_device` is st_dev of /dev/shm,
    by which NCCL decides whether two ranks share memory. `affinity` is a list of CPU ranges. `libraries` are the files
    of libraries that carry data (NCCL, MPI, UCX, CUDA, verbs), by name. `environment` is an allow-list.
    """

    rank: int
    host: str
    node: int
    local_rank: int
    pid: int
    boot_id: str | None = None
    namespaces: Mapping[str, int] = field(default_factory=dict)
    shm_device: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    visible_devices: str | None = None
    device_files: tuple[str, ...] = ()
    memlock_bytes: int | None = None
    affinity: str | None = None
    ptrace_scope: int | None = None
    seccomp: int | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
