"""Facts about one process and its GPU: namespaces, limits, settings, and libraries that it can load."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import field

from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import format_size

ENVIRONMENT = "the environment"


class PlacedValue(NamedTuple):
    """The value of a variable and its source, which is the environment or a file."""

    value: str
    place: str


class MpiFacts(Struct, frozen=True, kw_only=True):
    """The MPI library of a process after MPI_Init. None is unknown, and `unknown` has the reason by field.

    - `cuda_built`: whether the library was built with CUDA support
    - `cuda_aware`: whether it accepts GPU memory in this run
    - `pml`: the Open MPI component that sends messages: `ucx`, `ob1` or `cm`
    - `accelerator`: the Open MPI component for GPUs; `null` means no GPU support
    """

    version: str | None = None
    cuda_built: bool | None = None
    cuda_aware: bool | None = None
    pml: str | None = None
    accelerator: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


class TopologyFile(Struct, frozen=True, kw_only=True):
    """The topology file that NCCL uses.

    - `by`: the source of the path: NCCL_TOPO_FILE, or NCCL's default
    - `links`: the PCIe link of each device ('32.0 GT/s PCIe x16'), by bus id
    - `numa_nodes`: the NUMA nodes in the file; -1 means none
    - `unusable`: why the file could not be read; NCCL itself only logs this
    """

    path: str
    by: str
    links: Mapping[str, str] = field(default_factory=dict)
    numa_nodes: tuple[int, ...] = ()
    unusable: str | None = None


class CpuQuota(Struct, frozen=True, kw_only=True):
    """The number of CPUs that a control group (cgroup) allows, and the file that sets this limit."""

    cpus: float
    by: str


class RankFacts(Struct, frozen=True, kw_only=True):
    """Facts about one rank and its process. None is unknown, and `unknown` has the reason by field.

    - `node`: number of the host, in the order of the hosts' first ranks
    - `namespaces`: inode numbers from /proc/self/ns, by kind
    - `shm_device`: st_dev of /dev/shm, which NCCL compares to decide whether two ranks share memory
    - `affinity`: allowed CPUs as ranges
    - `libraries`: loaded library files of NCCL, MPI, UCX, CUDA and verbs, by name
    - `environment`: the environment variables on gpubench's allow-list
    - `nccl_files`: variables in NCCL's configuration files, in NCCL's order; the environment overrides them
    - `denied_device_files`: device files that the process has no permission to open
    - `driver_gpus`: PCI bus ids of all GPUs that the driver lists
    - `container`: signs that the process runs in a container
    - `memory_nodes`: the NUMA nodes from which the process may allocate memory
    - `memory_policy`: the NUMA policy, for example 'bind 0'
    - `loadable`: the file that the dynamic loader would load for each library; None if it finds none
    - `verbs_providers`: the NIC drivers of libibverbs
    - `cpu_quota`: the smallest CPU limit of the process's control groups; None without a limit
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
    cpu_quota: CpuQuota | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def nccl_settings(self) -> dict[str, PlacedValue]:
        """NCCL variables with their values.

        The environment overrides configuration files, and the first file overrides the second.
        """
        found = {
            name: PlacedValue(value, ENVIRONMENT)
            for name, value in self.environment.items()
            if name.startswith("NCCL_")
        }
        for file, variables in self.nccl_files.items():
            for name, value in variables.items():
                found.setdefault(name, PlacedValue(value, file))
        return found


LIBRARIES_VERSION = 1

NCCL_LIB, RCCL_LIB, MPI_LIB, UCX_LIB, NVSHMEM_LIB, MSCCLPP_LIB = "NCCL", "RCCL", "MPI", "UCX", "NVSHMEM", "MSCCL++"

NIXL, MOONCAKE = "NIXL", "Mooncake"
LOADER = "other programs"  # Programs such as nccl-tests, which use the library that the dynamic loader finds


class LibraryFile(Struct, frozen=True, kw_only=True):
    """A file of a communication library. `package` is the package that contains it.

    `version` is the version that the library reports. If it is None, `unread` has the reason. `transports` has the
    transport modules of UCX in the folder `modules`.
    """

    library: str
    path: str
    package: str | None = None
    version: str | None = None
    unread: str = ""
    cuda: bool | None = None
    modules: str | None = None
    transports: tuple[str, ...] = ()


class LibraryUser(Struct, frozen=True, kw_only=True):
    """A package or program that loads communication libraries.

    - `loads`: the files that it loads, by library
    - `inside`: the versions of libraries that it contains, by library
    - `unread`: the reason why its libraries could not be read
    - `transports`: NIXL's plugins
    """

    name: str
    version: str | None = None
    path: str | None = None
    purpose: str = ""
    note: str = ""
    loads: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)
    unread: str = ""
    transports: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.name, self.version)))


class KernelModule(Struct, frozen=True, kw_only=True):
    """A kernel module that gives NICs or disks access to GPU memory."""

    name: str
    loaded: bool
    version: str | None = None


class LibrariesFacts(Struct, frozen=True, kw_only=True):
    """The libraries that one Python environment uses. `failures` has the reasons for missing facts."""

    host: str
    python: str
    files: tuple[LibraryFile, ...] = ()
    users: tuple[LibraryUser, ...] = ()
    modules: tuple[KernelModule, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = LIBRARIES_VERSION


class TrialOutcome(StrEnum):
    """The outcome of a trial of an MPI operation on GPU memory."""

    RIGHT = "right"
    WRONG = "wrong data"
    CRASHED = "crashed"
    REFUSED = "refused"
    HUNG = "hung"
    UNKNOWN = "not tried"


class OperationTrial(Struct, frozen=True, kw_only=True):
    """The trial of one operation with one size.

    `outcome` is its result, `seconds` the duration of the trial job, and `said` an error message.
    """

    operation: str
    size_bytes: int
    outcome: TrialOutcome
    seconds: float | None = None
    said: str = ""


class MpiSupport(Struct, frozen=True, kw_only=True):
    """All trials of an MPI library on GPU memory.

    `claims` are the library's own statements about GPU support, by source. `asked` is the operation that the user wants
    to measure.
    """

    library: str
    asked: str
    trials: Sequence[OperationTrial]
    claims: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None

    def find_trials(self, operation: str) -> Sequence[OperationTrial]:
        """Return the trials of an operation, one per size."""
        return [trial for trial in self.trials if trial.operation == operation]

    def works(self, operation: str) -> bool:
        """True if the operation was tried, and data was correct for all sizes."""
        return {trial.outcome for trial in self.find_trials(operation)} == {TrialOutcome.RIGHT}

    @property
    def operations(self) -> Sequence[str]:
        return list(dict.fromkeys(trial.operation for trial in self.trials))

    @property
    def working(self) -> Sequence[str]:
        return [operation for operation in self.operations if self.works(operation)]

    @property
    def failing(self) -> Sequence[str]:
        """Operations that failed in at least one trial."""
        harmless = (TrialOutcome.RIGHT, TrialOutcome.UNKNOWN)
        return list(dict.fromkeys(trial.operation for trial in self.trials if trial.outcome not in harmless))

    @property
    def statements(self) -> str:
        """The MPI library's own statements: 'Open MPI v4.1.6: MPIX_Query_cuda_support no; built with CUDA no'."""
        claims = "; ".join(f"{name} {value}" for name, value in self.claims.items())
        return f"{self.library}: {claims}" if claims else self.library

    def why_not(self, operation: str) -> str:
        """Describe the first failure: 'allreduce of 1K on GPU memory crashed: signal 11 (Segmentation fault)'.

        Return '' if the operation works.
        """
        trials = self.find_trials(operation)
        bad = next((trial for trial in trials if trial.outcome is not TrialOutcome.RIGHT), None)
        if bad is None:
            return "" if trials else f"{operation} was not tested"
        said = f": {bad.said}" if bad.said else ""
        return f"{operation} of {format_size(bad.size_bytes)} on GPU memory {bad.outcome}{said}"


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A process with a CUDA context on a GPU.

    Inside a container, `pid` may be the number of another process. `container` is the runtime and the short id of the
    process's container. `mps` is true if NVML lists the process as an MPS client.
    """

    pid: int
    name: str | None = None
    memory_bytes: int | None = None
    container: str | None = None
    mps: bool = False

    @property
    def label(self) -> str:
        """The name of the process in messages: 'process 8342 (python)', followed by its container."""
        named = f"process {self.pid}" + (f" ({self.name})" if self.name else "")
        return " ".join(
            filter(None, (named, "under MPS" if self.mps else "", f"in {self.container}" if self.container else ""))
        )

    @property
    def is_mps_server(self) -> bool:
        """True if the process is an MPS server. Its clients do the work, and NVML lists them separately."""
        return (self.name or "").rpartition("/")[2] == "nvidia-cuda-mps-server"


class _UsedGpu(Protocol):
    @property
    def device(self) -> str: ...

    @property
    def processes(self) -> tuple[GpuProcess, ...] | None: ...


def mps_in_use(gpus: Iterable[_UsedGpu], environment: Mapping[str, str]) -> str:
    """Describe signs of CUDA's MPS: 'in use on GPU0; asked for by CUDA_MPS_PIPE_DIRECTORY=/tmp/mps'. '' if there
    are none.
    """
    seen = [gpu.device for gpu in gpus if any(user.mps or user.is_mps_server for user in gpu.processes or ())]
    found = [f"in use on {', '.join(dict.fromkeys(seen))}"] if seen else []
    pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY")
    return "; ".join([*found, *([] if pipes is None else [f"requested by CUDA_MPS_PIPE_DIRECTORY={pipes}"])])


THROTTLE_REASONS = (
    *("sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"),
)
"""Reasons why a driver lowers GPU clocks, in the order of NVML's bits 0x04 to 0x80."""

LEAST_CLOCK_SHARE = 0.9  # Report a busy GPU if its clock is below this share of the maximum clock.


class GpuCondition(Struct, frozen=True, kw_only=True):
    """Conditions of a GPU that may have slowed a row down. They are read directly after the row.

    `clock_mhz` is None if the GPU is idle. `memory_errors` counts uncorrectable errors. `unread` has the reasons for
    missing values.
    """

    throttle_reasons: tuple[str, ...] = ()
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    memory_errors: int = 0
    others: tuple[GpuProcess, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    def combine(self, later: "GpuCondition") -> "GpuCondition":
        """Combine two readings. For each value, keep the worse one."""
        clocks = [clock for clock in (self.clock_mhz, later.clock_mhz) if clock is not None]
        return GpuCondition(
            throttle_reasons=tuple(dict.fromkeys((*self.throttle_reasons, *later.throttle_reasons))),
            clock_mhz=min(clocks, default=None),
            most_clock_mhz=later.most_clock_mhz or self.most_clock_mhz,
            memory_errors=max(self.memory_errors, later.memory_errors),
            others=later.others or self.others,
            unread={name: later.unread[name] for name in self.unread if name in later.unread},
        )

    @property
    def not_read(self) -> str:
        """The names of values that could not be read, with the reasons. '' if all values were read."""
        if not self.unread:
            return ""
        return f"{', '.join(self.unread).replace('_', ' ')} ({'; '.join(dict.fromkeys(self.unread.values()))})"

    def remarks(self) -> Iterator[str]:
        """Yield the conditions that may slow the GPU down, as predicates: 'runs at 600 of 1980 MHz'."""
        clock = f"{self.clock_mhz} of {self.most_clock_mhz} MHz"
        slow = self.clock_mhz and self.most_clock_mhz and self.clock_mhz < LEAST_CLOCK_SHARE * self.most_clock_mhz
        if self.throttle_reasons:
            reasons = ", ".join(self.throttle_reasons).replace("_", " ")
            yield f"is throttled: {reasons}" + (f"; {clock}" if slow else "")
        elif slow:
            yield f"runs at {clock}"
        if self.memory_errors:
            yield f"had {self.memory_errors} uncorrectable memory errors since the driver was loaded"
        if self.others:
            users = [
                f"{user.label} ({user.memory_bytes / 2**30:.1f} GiB)" if user.memory_bytes else user.label
                for user in self.others
            ]
            yield f"is also used by {' and '.join(users)}"
