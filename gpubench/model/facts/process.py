"""Facts about one process: namespaces, limits, settings, loadable libraries, and the backends of a collective."""

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

    `cuda_built` tells whether it was built for GPU memory, `cuda_aware` whether it accepts GPU memory in this run. One
    that does not copies through the host, or crashes. `pml` and `accelerator` are Open MPI's components: `ucx`, `ob1`
    or `cm` carry the messages, and `null` means that no accelerator is supported.
    """

    version: str | None = None
    cuda_built: bool | None = None
    cuda_aware: bool | None = None
    pml: str | None = None
    accelerator: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


class TopologyFile(Struct, frozen=True, kw_only=True):
    """The file with the topology that NCCL uses. `by` is its source (NCCL_TOPO_FILE, or NCCL's default).

    `links` are its PCI devices with their links as written ('32.0 GT/s PCIe x16'), by bus id. A file of another machine
    names missing devices. `numa_nodes` are its memory nodes, -1 for none. `unusable` says why it could not be read,
    which NCCL only logs.
    """

    path: str
    by: str
    links: Mapping[str, str] = field(default_factory=dict)
    numa_nodes: tuple[int, ...] = ()
    unusable: str | None = None


class CpuQuota(Struct, frozen=True, kw_only=True):
    """The CPU time that a control group grants its processes: `cpus` is the number of CPUs, with the file that sets
    it.
    """

    cpus: float
    by: str


class RankFacts(Struct, frozen=True, kw_only=True):
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
    `cpu_quota` is the least that its control groups grant, None for without limit.
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
    cpu_quota: CpuQuota | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def nccl_settings(self) -> dict[str, PlacedValue]:
        """NCCL's variables as NCCL sees them: from the environment, then from its files in order."""
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

LOADER = "other programs"  # Who takes what the dynamic loader finds: nccl-tests and the like


class LibraryFile(Struct, frozen=True, kw_only=True):
    """One library file of a `package`. `version` is what it reports itself. If None, `unread` has the reason."""

    library: str
    path: str
    package: str | None = None
    version: str | None = None
    unread: str = ""
    cuda: bool | None = None


class LibraryUser(Struct, frozen=True, kw_only=True):
    """A program that loads libraries: a package, or any program that the loader serves.

    `purpose` is what it moves data for, `loads` has its files by library, `inside` its built-in libraries with versions
    if known. `unread` says why it could not be queried.
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
        """Its name and version."""
        return " ".join(filter(None, (self.name, self.version)))


class KernelModule(Struct, frozen=True, kw_only=True):
    """A kernel module that lets NICs or disks reach GPU memory, with its version if known."""

    name: str
    loaded: bool
    version: str | None = None


class LibrariesFacts(Struct, frozen=True, kw_only=True):
    """One Python environment on a host. `python` is the interpreter. `failures` has the reasons for missing parts."""

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
    """All trials of an MPI, and its own statements (`claims`, by source). `asked` are the most important operations."""

    library: str
    asked: str
    trials: Sequence[OperationTrial]
    claims: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None

    def find_trials(self, operation: str) -> Sequence[OperationTrial]:
        """Return the trials of an operation by size."""
        return [trial for trial in self.trials if trial.operation == operation]

    def works(self, operation: str) -> bool:
        """True if it was tried and gave right data at all sizes."""
        trials = self.find_trials(operation)
        return bool(trials) and all(trial.outcome is TrialOutcome.RIGHT for trial in trials)

    @property
    def operations(self) -> Sequence[str]:
        """All operations in the order of their trials."""
        return list(dict.fromkeys(trial.operation for trial in self.trials))

    @property
    def working(self) -> Sequence[str]:
        """The operations that work."""
        return [operation for operation in self.operations if self.works(operation)]

    @property
    def failing(self) -> Sequence[str]:
        """The operations that were tried and failed."""
        bad = {
            trial.operation for trial in self.trials if trial.outcome not in (TrialOutcome.RIGHT, TrialOutcome.UNKNOWN)
        }
        return [operation for operation in self.operations if operation in bad]

    @property
    def statements(self) -> str:
        """Describe MPI's statements: 'Open MPI v4.1.6: MPIX_Query_cuda_support no; built with CUDA no'."""
        claims = "; ".join(f"{name} {value}" for name, value in self.claims.items())
        return f"{self.library}: {claims}" if claims else self.library

    def why_not(self, operation: str) -> str:
        """Describe a failure: 'allreduce of 1K crashed: signal 11 (Segmentation fault)', or '' if it works."""
        bad = next((each for each in self.find_trials(operation) if each.outcome is not TrialOutcome.RIGHT), None)
        if bad is None:
            return "" if self.find_trials(operation) else f"{operation} was not tried"
        said = f": {bad.said}" if bad.said else ""
        return f"{operation} of {format_size(bad.size_bytes)} on GPU memory {bad.outcome}{said}"


_MPS_SERVER = "nvidia-cuda-mps-server"

_PIPES = "CUDA_MPS_PIPE_DIRECTORY"


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A process with a context on a GPU. Inside a container its pid may belong to another process.

    `container` is its container's runtime and short id. `mps` tells whether NVML lists it as a client of MPS.
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
        """True for an MPS server, which does no work itself. Its clients are listed separately."""
        return (self.name or "").rpartition("/")[2] == _MPS_SERVER

    @property
    def shows_mps(self) -> bool:
        """True for an MPS server and its clients."""
        return self.mps or self.is_mps_server


class _UsedGpu(Protocol):
    @property
    def device(self) -> str: ...

    @property
    def processes(self) -> tuple[GpuProcess, ...] | None: ...


def mps_in_use(gpus: Iterable[_UsedGpu], environment: Mapping[str, str]) -> str:
    """Describe the use of CUDA's MPS: 'in use on GPU0', from NVML's processes and the environment, or ''."""
    seen = [gpu.device for gpu in gpus if any(process.shows_mps for process in gpu.processes or ())]
    asked = [f"{name}={value}" for name, value in environment.items() if name == _PIPES]
    found = [f"in use on {', '.join(dict.fromkeys(seen))}"] if seen else []
    return "; ".join([*found, *(f"asked for by {each}" for each in asked)])


THROTTLE_REASONS = (
    *("sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"),
)
"""Reasons that lower a GPU's clocks, in the order of NVML's bits 0x04 to 0x80."""

LEAST_CLOCK_SHARE = 0.9  # Of the highest clock: a GPU at work below that is worth naming


class GpuCondition(Struct, frozen=True, kw_only=True):
    """A GPU's condition directly after a row, as far as it can slow the row down.

    `clock_mhz` is None while idle. `memory_errors` are uncorrectable. `unread` has reasons for missing facts.
    """

    throttle_reasons: tuple[str, ...] = ()
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    memory_errors: int = 0
    others: tuple[GpuProcess, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    def combine(self, later: "GpuCondition") -> "GpuCondition":
        """Combine two readings, keeping the worse of each fact."""
        clocks = [each for each in (self.clock_mhz, later.clock_mhz) if each is not None]
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
        """Describe the facts that could not be read, with reasons, or ''."""
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
            yield f"is used by {' and '.join(map(_user, self.others))} too"


def _user(process: GpuProcess) -> str:
    held = f", which holds {process.memory_bytes / 2**30:.1f} GiB," if process.memory_bytes else ""
    return f"{process.label}{held}"
