"""Facts of one process: namespaces, shared memory, visible devices, limits, settings, loaded libraries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ENVIRONMENT = "the environment"


class PlacedValue(NamedTuple):
    """A variable's value, and where it stands: the environment, or a file."""

    value: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiFacts:
    """The MPI library that is loaded and started. None is unknown, and `unknown` says why, by field.

    `cuda_built` says whether it was built for memory of GPUs, `cuda_aware` whether it takes such memory in this run:
    one that does not copies through the host, or crashes. `pml` and `accelerator` are the components that Open MPI
    chose: `ucx`, `ob1` or `cm` carry the messages, and `null` means that no accelerator is supported.
    """

    version: str | None = None
    cuda_built: bool | None = None
    cuda_aware: bool | None = None
    pml: str | None = None
    accelerator: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyFile:
    """The file from which NCCL takes a machine's topology; `by` says who names it (NCCL_TOPO_FILE, or NCCL's default).

    `links` are the PCI devices in it with their links as they are written ('32.0 GT/s PCIe x16'), by bus id: a file of
    another machine names devices that are not there. `numa_nodes` are its memory nodes, -1 for none. `unusable` says
    why it could not be read, which NCCL itself only logs.
    """

    path: str
    by: str
    links: Mapping[str, str] = field(default_factory=dict)
    numa_nodes: tuple[int, ...] = ()
    unusable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """The time that a control group grants its processes together: `cpus` of so many CPUs, by the file that says it."""

    cpus: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank. None is unknown.

    `node` numbers the hosts of the job by their first rank. `namespaces` are the inode numbers of /proc/self/ns by
    kind: two processes share one where the numbers are equal and the boot id is. `shm_device` is st_dev of /dev/shm,
    by which NCCL decides whether two ranks share memory. `affinity` is a list of CPU ranges. `libraries` are the files
    of libraries that carry data (NCCL, MPI, UCX, CUDA, verbs), by name. `environment` is an allow-list.

    `nccl_files` are the NCCL_ variables of NCCL's configuration files, by file and in NCCL's order: those of the
    environment count before them. `denied_device_files` are the device files that are there and may not be used;
    `driver_gpus` the bus ids of the GPUs that the driver has, which device files for fewer GPUs leave out of reach.
    `container` are signs of what contains the process. `memory_nodes` are the ranges that it may take memory from,
    `memory_policy` what it was told to ('bind 0'). `loadable` says where the
    dynamic loader would find libraries, None for nowhere; `verbs_providers` which NICs libibverbs has drivers for.
    `tracer` is the process that traces it ('4711 (gdb)'), `tools` the files of libraries of sanitizers and profilers in
    it, by the tool's name. `cpu_quota` is the least that its control groups grant, None for without limit.
    `unknown` says why a field is None or empty.
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
    nccl_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    topology_file: TopologyFile | None = None
    denied_device_files: tuple[str, ...] = ()
    imex_channels: tuple[str, ...] | None = None
    driver_gpus: tuple[str, ...] | None = None
    container: tuple[str, ...] = ()
    capabilities: tuple[str, ...] | None = None
    pidfd_getfd: bool | None = None
    memory_nodes: str | None = None
    memory_policy: str | None = None
    loadable: Mapping[str, str | None] = field(default_factory=dict)
    verbs_providers: tuple[str, ...] | None = None
    mpi: MpiFacts | None = None
    ucx_cuda: bool | None = None
    tracer: str | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    cpu_quota: CpuQuota | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def nccl_settings(self) -> dict[str, PlacedValue]:
        """NCCL's variables by name, as NCCL sees them: those of the environment, then those of its files in order."""
        found = {
            name: PlacedValue(value, ENVIRONMENT)
            for name, value in self.environment.items()
            if name.startswith("NCCL_")
        }
        for file, variables in self.nccl_files.items():
            for name, value in variables.items():
                found.setdefault(name, PlacedValue(value, file))
        return found
