"""Facts about one process: namespaces, limits, settings, loadable libraries, and its GPU."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import field

from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import format_size

ENVIRONMENT = "the environment"


class PlacedValue(NamedTuple):
    """A variable's value and its source: the environment, or a file."""

    value: str
    place: str


class MpiFacts(Struct, frozen=True, kw_only=True):
    """The loaded and initialized MPI library. None is unknown, and `unknown` has the reason by field.

    `cuda_built` is true if it was built for GPU memory, and `cuda_aware` if it accepts GPU memory in this run. `pml`
    and `accelerator` are Open MPI's components: `ucx`, `ob1` or `cm` send messages, and `null` supports no accelerator.
    """

    version: str | None = None
    cuda_built: bool | None = None
    cuda_aware: bool | None = None
    pml: str | None = None
    accelerator: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


class TopologyFile(Struct, frozen=True, kw_only=True):
    """The topology file that NCCL uses. `by` is what names it: NCCL_TOPO_FILE, or NCCL's default.

    `links` has the PCIe link of each device ('32.0 GT/s PCIe x16') by bus id. `numa_nodes` are its memory nodes, -1 for
    none. `unusable` is the reason why it could not be read, which NCCL only logs.
    """

    path: str
    by: str
    links: Mapping[str, str] = field(default_factory=dict)
    numa_nodes: tuple[int, ...] = ()
    unusable: str | None = None


class CpuQuota(Struct, frozen=True, kw_only=True):
    """The number of CPUs that a control group grants, and the file that sets it."""

    cpus: float
    by: str


class RankFacts(Struct, frozen=True, kw_only=True):
    """One rank. None is unknown, and `unknown` has the reason by field.

    `node` numbers hosts by their first rank. `namespaces` are inode numbers of /proc/self/ns by kind. `shm_device` is
    st_dev of /dev/shm: NCCL compares it to decide whether two ranks share memory. `affinity` is a list of CPU ranges.
    `libraries` are loaded files of NCCL, MPI, UCX, CUDA and verbs by name. `environment` is an allow-list.

    `nccl_files` has the variables in NCCL's configuration files, in NCCL's order. The environment overrides them.
    `denied_device_files` exist but may not be opened. `driver_gpus` are the bus ids of all GPUs of the driver.
    `container` are signs of a container. `memory_nodes` are the allowed NUMA nodes, and `memory_policy` is for example
    'bind 0'. `loadable` has the files that the dynamic loader would find, None for a missing library. `verbs_providers`
    are the NIC drivers of libibverbs. `cpu_quota` is the smallest of its control groups, None without one.
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
        """NCCL's variables: from the environment, else from the first file."""
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

LOADER = "other programs"  # Programs such as nccl-tests use the library that the dynamic loader finds


class LibraryFile(Struct, frozen=True, kw_only=True):
    """A library file of a `package`. `version` is what the library reports. If None, `unread` has the reason."""

    library: str
    path: str
    package: str | None = None
    version: str | None = None
    unread: str = ""
    cuda: bool | None = None


class LibraryUser(Struct, frozen=True, kw_only=True):
    """A package or program that loads libraries.

    `loads` has the files by library. `inside` has libraries that it contains, with their versions. `unread` is the
    reason why it could not be queried.
    """

    name: str
    version: str | None = None
    path: str | None = None
    purpose: str = ""
    note: str = ""
    loads: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)
    unread: str = ""

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.name, self.version)))


class KernelModule(Struct, frozen=True, kw_only=True):
    """A kernel module that lets NICs or disks access GPU memory."""

    name: str
    loaded: bool
    version: str | None = None


class LibrariesFacts(Struct, frozen=True, kw_only=True):
    """The libraries of one Python environment. `failures` has the reasons for missing parts."""

    host: str
    python: str
    files: tuple[LibraryFile, ...] = ()
    users: tuple[LibraryUser, ...] = ()
    modules: tuple[KernelModule, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = LIBRARIES_VERSION


class TrialOutcome(StrEnum):
    """The result of an operation on GPU memory."""

    RIGHT = "right"
    WRONG = "wrong data"
    CRASHED = "crashed"
    REFUSED = "refused"
    HUNG = "hung"
    UNKNOWN = "not tried"


class OperationTrial(Struct, frozen=True, kw_only=True):
    """One operation at one size: its result, the seconds of its job, and the message."""

    operation: str
    size_bytes: int
    outcome: TrialOutcome
    seconds: float | None = None
    said: str = ""


class MpiSupport(Struct, frozen=True, kw_only=True):
    """All trials of an MPI library. `claims` are its own statements by source. `asked` is the operation in question."""

    library: str
    asked: str
    trials: Sequence[OperationTrial]
    claims: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None

    def find_trials(self, operation: str) -> Sequence[OperationTrial]:
        """Return the trials of an operation by size."""
        return [trial for trial in self.trials if trial.operation == operation]

    def works(self, operation: str) -> bool:
        """True if it was tried, and data was right at all sizes."""
        return {trial.outcome for trial in self.find_trials(operation)} == {TrialOutcome.RIGHT}

    @property
    def operations(self) -> Sequence[str]:
        return list(dict.fromkeys(trial.operation for trial in self.trials))

    @property
    def working(self) -> Sequence[str]:
        return [operation for operation in self.operations if self.works(operation)]

    @property
    def failing(self) -> Sequence[str]:
        """The operations that were tried and failed."""
        harmless = (TrialOutcome.RIGHT, TrialOutcome.UNKNOWN)
        return list(dict.fromkeys(trial.operation for trial in self.trials if trial.outcome not in harmless))

    @property
    def statements(self) -> str:
        """Describe MPI's statements: 'Open MPI v4.1.6: MPIX_Query_cuda_support no; built with CUDA no'."""
        claims = "; ".join(f"{name} {value}" for name, value in self.claims.items())
        return f"{self.library}: {claims}" if claims else self.library

    def why_not(self, operation: str) -> str:
        """Describe a failure: 'allreduce of 1K crashed: signal 11 (Segmentation fault)', or '' if it works."""
        trials = self.find_trials(operation)
        bad = next((trial for trial in trials if trial.outcome is not TrialOutcome.RIGHT), None)
        if bad is None:
            return "" if trials else f"{operation} was not tried"
        said = f": {bad.said}" if bad.said else ""
        return f"{operation} of {format_size(bad.size_bytes)} on GPU memory {bad.outcome}{said}"


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A process with a context on a GPU. Seen from a container, its pid may be that of another process.

    `container` is the runtime and short id of its container. `mps` is true if NVML lists it as a client of MPS.
    """

    pid: int
    name: str | None = None
    memory_bytes: int | None = None
    container: str | None = None
    mps: bool = False

    @property
    def label(self) -> str:
        """Its name in messages: 'process 8342 (python)', with its container."""
        named = f"process {self.pid}" + (f" ({self.name})" if self.name else "")
        return " ".join(
            filter(None, (named, "under MPS" if self.mps else "", f"in {self.container}" if self.container else ""))
        )

    @property
    def is_mps_server(self) -> bool:
        """True for an MPS server. Its clients do the work, and are listed separately."""
        return (self.name or "").rpartition("/")[2] == "nvidia-cuda-mps-server"


class _UsedGpu(Protocol):
    @property
    def device(self) -> str: ...

    @property
    def processes(self) -> tuple[GpuProcess, ...] | None: ...


def mps_in_use(gpus: Iterable[_UsedGpu], environment: Mapping[str, str]) -> str:
    """Describe signs of CUDA's MPS: 'in use on GPU0; asked for by CUDA_MPS_PIPE_DIRECTORY=/tmp/mps', or ''."""
    seen = [gpu.device for gpu in gpus if any(user.mps or user.is_mps_server for user in gpu.processes or ())]
    found = [f"in use on {', '.join(dict.fromkeys(seen))}"] if seen else []
    pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY")
    return "; ".join([*found, *([] if pipes is None else [f"asked for by CUDA_MPS_PIPE_DIRECTORY={pipes}"])])


THROTTLE_REASONS = (
    *("sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"),
)
"""Reasons that lower a GPU's clocks, in the order of NVML's bits 0x04 to 0x80."""

LEAST_CLOCK_SHARE = 0.9  # Report a busy GPU whose clock is below this share of its highest clock


class GpuCondition(Struct, frozen=True, kw_only=True):
    """What could have slowed a row down, read from the GPU directly after it.

    `clock_mhz` is None while idle. `memory_errors` are uncorrectable. `unread` has the reasons for missing facts.
    """

    throttle_reasons: tuple[str, ...] = ()
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    memory_errors: int = 0
    others: tuple[GpuProcess, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    def combine(self, later: "GpuCondition") -> "GpuCondition":
        """Combine two readings, keeping the worse of each fact."""
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
        """The facts that could not be read, with reasons, or ''."""
        if not self.unread:
            return ""
        return f"{', '.join(self.unread).replace('_', ' ')} ({'; '.join(dict.fromkeys(self.unread.values()))})"

    def remarks(self) -> Iterator[str]:
        """Yield what is wrong with the GPU as predicates: 'runs at 600 of 1980 MHz'."""
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
                f"{user.label}, which holds {user.memory_bytes / 2**30:.1f} GiB," if user.memory_bytes else user.label
                for user in self.others
            ]
            yield f"is used by {' and '.join(users)} too"
