"""The environment of a process: its launcher, and variables that affect GPU transfers."""

from collections.abc import Mapping

from msgspec import Struct

from gpubench.errors import UsageError

MPS = "MPS"
MPS_PREFIX = "CUDA_MPS_"
# gpubench sets this variable for the ranks that it launches. It names the socket to the launcher.
CHANNEL_VARIABLE = "GPUBENCH_CHANNEL"
PLAN_VARIABLE = "GPUBENCH_PLAN"  # All options of the command as JSON, for launched ranks
DEFAULTS_VARIABLE = "GPUBENCH_DEFAULTS"
# If one gpubench command runs another, the inner command must not read default options from files.
NO_DEFAULTS_TO_READ = "off"
SECONDS_FOR_THE_FIRST_RANK = 1.0
"""Time that other ranks wait before they exit after an error.

Launchers kill all ranks after one has failed, including rank 0, which still has to report the error.
"""

_PMI = "a PMI launcher (mpiexec or srun)"

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # From this number on, Slurm numbers its batch, interactive and external steps.
_LAUNCHER_PREFIXES = (
    *("SLURM_", "PBS_", "PALS_", "LSB_", "SGE_", "PE_HOSTFILE"),
    *("PMI_", "PMIX_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_", "HYDRA_"),
    *("OMPI_COMM_WORLD_", "OMPI_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_CTX_", "OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS"),
    *("OMPI_FILE_LOCATION", "OMPI_COMMAND", "OMPI_ARGV", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_orte_ess_", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"),
    *("OMPI_MCA_orte_app_num", "OMPI_MCA_orte_launch", "OMPI_MCA_orte_num_nodes", "OMPI_MCA_orte_bound_at_launch"),
)
"""Prefixes of variables that schedulers and launchers (Open MPI 4 and 5, MPICH, srun) set for ranks."""

TORCHRUN = "torchrun"
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each process. Kubernetes operators set some of them per pod, but not LOCAL_RANK."""


class LaunchedRank(Struct, frozen=True):
    """The launcher of this process, according to its environment, with the process's rank and the number of ranks."""

    launcher: str
    rank: int
    size: int

    @property
    def advice_without_launcher(self) -> str:
        """Advice on how to run a command that needs a single process."""
        shell = ", or env -u LOCAL_RANK gpubench ... in a shell that one of its ranks opened"
        return "run the same command without the launcher" + (shell if self.launcher == TORCHRUN else "")


def refuse_several_ranks(launch: LaunchedRank | None, what: str, expected: str) -> None:
    """Raise UsageError if this process is one of several ranks of a launcher. `what` needs a single process."""
    if launch is not None and launch.size > 1:
        raise UsageError(f"{what} under {launch.launcher}", expected=expected, next_step=launch.advice_without_launcher)


def detect_launcher(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the launcher if this process is a rank. None without a launcher, and in a shell from `srun --pty`.

    Raises UsageError if torchrun's variables are invalid.
    """
    claims = (
        ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (_PMI, "PMI_RANK", "PMI_SIZE"),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    )
    for launcher, rank_variable, size_variable in claims:
        rank, size = _number(environment, rank_variable), _number(environment, size_variable)
        if rank is None or size is None:
            continue
        if size == 1 and launcher in (_PMI, "srun") and environment.get("SLURM_STEP_NUM_TASKS") == "1":
            continue
        if launcher == "srun" and (_number(environment, "SLURM_STEP_ID") or 0) >= _FIRST_SPECIAL_STEP:
            continue
        return LaunchedRank(launcher, rank, size)
    if not all(environment.get(name) for name in TORCHRUN_VARIABLES):
        return None
    found = {name: _number(environment, name) for name in TORCHRUN_VARIABLES if name != "MASTER_ADDR"}
    for name, number in found.items():
        if number is None or (name == "WORLD_SIZE" and number == 0):
            raise UsageError(
                f"{name}={environment[name]} together with "
                f"{', '.join(set_ for set_ in TORCHRUN_VARIABLES if set_ != name)}",
                expected="numbers, as torchrun sets them for each process",
                reason="the variables were set by hand, or by a script",
                next_step="torchrun --nproc-per-node N -m gpubench ..., or alone after unset "
                + " ".join(TORCHRUN_VARIABLES[:3]),
            )
    return LaunchedRank(TORCHRUN, found["RANK"] or 0, found["WORLD_SIZE"] or 0)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def strip_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove variables of launchers and schedulers, so that a child process can start ranks on this host."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("PMIX_MCA_") or not (name.startswith(_LAUNCHER_PREFIXES) or name in TORCHRUN_VARIABLES)
    }


_PERFORMANCE_PREFIXES = (
    *("NCCL_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDA_MPS_"),
    *("OMPI_MCA_", "MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_", "MPICH_RDMA_ENABLED_CUDA", "MV2_USE_CUDA", "MVP_USE_CUDA"),
    *("UCX_", "FI_", "OFI_NCCL_"),
)
_HARMLESS_PREFIXES = (
    *("NCCL_DEBUG", "NCCL_COMM_ID", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_RAS_"),
    *("NCCL_HOME", "NCCL_ROOT", "NCCL_LIB", "NCCL_INCLUDE", "NCCL_VERSION"),
    *("UCX_LOG_LEVEL", "FI_LOG_LEVEL"),
)
_DEFAULTS = {"CUDA_LAUNCH_BLOCKING": ("", "0"), "CUDA_DEVICE_MAX_CONNECTIONS": ("", "8")}
"""Values that have no effect (CUDA C++ Programming Guide, environment variables)."""

# With these subsystems, NCCL logs a line per operation.
_OPERATION_SUBSYSTEMS = frozenset(("COLL", "CALL", "TUNING", "ALL"))
_DEFAULT_SUBSYSTEMS = frozenset(("INIT", "BOOTSTRAP", "ENV"))


def logs_every_operation(level: str, subsystems: str) -> bool:
    """True if NCCL logs every operation with these values of NCCL_DEBUG and NCCL_DEBUG_SUBSYS. That slows
    operations down.
    """
    level = level.upper()
    if level != "INFO":
        return level == "TRACE"
    named = frozenset(subsystems.lstrip("^").upper().split(","))
    logged = (_DEFAULT_SUBSYSTEMS | _OPERATION_SUBSYSTEMS) - named if subsystems.startswith("^") else named
    return bool(logged & _OPERATION_SUBSYSTEMS)


def performance_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change the speed of transfers. Include NCCL_DEBUG if its log slows operations
    down.
    """
    log = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")
    logged = logs_every_operation(*(environment.get(name, "") for name in log))

    def matters(name: str, value: str) -> bool:
        if name in log:
            return logged
        known = name.startswith(_PERFORMANCE_PREFIXES) and not name.startswith(_HARMLESS_PREFIXES)
        return known and value not in _DEFAULTS.get(name, ())

    return {name: value for name, value in environment.items() if matters(name, value)}
