"""The environment of a process: the launcher that started it, and variables that affect GPU transfers."""

from collections.abc import Mapping

from msgspec import Struct

from gpubench.errors import UsageError

MPS = "MPS"
MPS_PREFIX = "CUDA_MPS_"  # What the names of MPS's variables begin with
CHANNEL_VARIABLE = "GPUBENCH_CHANNEL"  # Set by a gpubench that relaunched itself: its ranks' socket
PLAN_VARIABLE = "GPUBENCH_PLAN"  # Values of all options as JSON, for these ranks
DEFAULTS_VARIABLE = "GPUBENCH_DEFAULTS"
NO_DEFAULTS_TO_READ = "off"  # No defaults from environment or file, for a command that another one runs
SECONDS_FOR_THE_FIRST_RANK = 1.0
"""Other ranks wait this long before they end with an error that rank 0 reports, because launchers kill all ranks
once one has failed, even the one that is about to report it.
"""

_PMI = "a PMI launcher (mpiexec or srun)"

_SLURM_INTERACTIVE_STEP = 0xFFFFFFF0  # From here on Slurm's own steps: batch, interactive, external
_OF_RANKS = (
    *("SLURM_", "PBS_", "PALS_", "LSB_", "SGE_", "PE_HOSTFILE"),
    *("PMI_", "PMIX_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_", "HYDRA_"),
    *("OMPI_COMM_WORLD_", "OMPI_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_CTX_", "OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS"),
    *("OMPI_FILE_LOCATION", "OMPI_COMMAND", "OMPI_ARGV", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_orte_ess_", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"),
    *("OMPI_MCA_orte_app_num", "OMPI_MCA_orte_launch", "OMPI_MCA_orte_num_nodes", "OMPI_MCA_orte_bound_at_launch"),
)
"""Prefixes of the variables that schedulers and launchers (Open MPI 4 and 5, MPICH, srun) set for their ranks."""

_SETTINGS = ("PMIX_MCA_",)

TORCHRUN = "torchrun"
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each process. Kubernetes operators set some of them for a whole pod, but not
LOCAL_RANK, because no ranks have started yet.
"""


class LaunchedRank(Struct, frozen=True):
    """A launcher found in the environment, with this process's rank and the number of processes."""

    launcher: str
    rank: int
    size: int

    @property
    def advice_without_launcher(self) -> str:
        """Return what to do instead, for a command that needs a single process."""
        shell = ", or env -u LOCAL_RANK gpubench ... in a shell that one of its ranks opened"
        return "the same without the launcher" + (shell if self.launcher == TORCHRUN else "")


def detect_launcher(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the launcher if this process is a rank. None alone or in a shell of `srun --pty`. Raises UsageError."""
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
        if launcher == "srun" and (_number(environment, "SLURM_STEP_ID") or 0) >= _SLURM_INTERACTIVE_STEP:
            continue
        return LaunchedRank(launcher, rank, size)
    return _read_torchrun(environment) if all(environment.get(name) for name in TORCHRUN_VARIABLES) else None


def _read_torchrun(environment: Mapping[str, str]) -> LaunchedRank:
    found = {name: _number(environment, name) for name in TORCHRUN_VARIABLES if name != "MASTER_ADDR"}
    for name in (each for each, number in found.items() if number is None or (each == "WORLD_SIZE" and number == 0)):
        raise UsageError(
            f"{name}={environment[name]} beside {', '.join(each for each in TORCHRUN_VARIABLES if each != name)}",
            expected="numbers, as torchrun sets them for each of its processes",
            reason="the variables were set by hand, or by a script",
            next_step=f"torchrun --nproc-per-node N -m gpubench ...; alone: unset {' '.join(TORCHRUN_VARIABLES[:3])}",
        )
    return LaunchedRank(TORCHRUN, found["RANK"] or 0, found["WORLD_SIZE"] or 0)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def strip_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove a launcher's or an allocation's variables, for a child that starts ranks here."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS) or not (name.startswith(_OF_RANKS) or name in TORCHRUN_VARIABLES)
    }


_BEARING = (
    *("NCCL_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDA_MPS_"),
    *("OMPI_MCA_", "MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_", "MPICH_RDMA_ENABLED_CUDA", "MV2_USE_CUDA", "MVP_USE_CUDA"),
    *("UCX_", "FI_", "OFI_NCCL_"),
)
_HARMLESS = (
    *("NCCL_DEBUG", "NCCL_COMM_ID", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_RAS_"),
    *("NCCL_HOME", "NCCL_ROOT", "NCCL_LIB", "NCCL_INCLUDE", "NCCL_VERSION"),
    *("UCX_LOG_LEVEL", "FI_LOG_LEVEL"),
)
_USUAL = {"CUDA_LAUNCH_BLOCKING": ("", "0"), "CUDA_DEVICE_MAX_CONNECTIONS": ("", "8")}
"""CUDA's values if the variable is not set (CUDA C++ Programming Guide, environment variables)."""

_DEBUG = "NCCL_DEBUG"
_SUBSYSTEMS = "NCCL_DEBUG_SUBSYS"

_OF_EVERY_OPERATION = frozenset(("COLL", "CALL", "TUNING", "ALL"))  # NCCL subsystems with a line an operation
_LOGGED_UNASKED = frozenset(("INIT", "BOOTSTRAP", "ENV"))


def logs_every_operation(level: str, subsystems: str) -> bool:
    """True if NCCL_DEBUG and NCCL_DEBUG_SUBSYS log every operation, which costs time."""
    level = level.upper()
    if level != "INFO":
        return level == "TRACE"
    named = frozenset(subsystems.lstrip("^").upper().split(","))
    inverted = subsystems.startswith("^")
    return bool(((_LOGGED_UNASKED | _OF_EVERY_OPERATION) - named if inverted else named) & _OF_EVERY_OPERATION)


def performance_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change the speed of transfers, in order, and NCCL's log if it costs time."""
    logged = logs_every_operation(environment.get(_DEBUG, ""), environment.get(_SUBSYSTEMS, ""))
    return {
        name: value
        for name, value in environment.items()
        if (logged if name in (_DEBUG, _SUBSYSTEMS) else _bears(name, value))
    }


def _bears(name: str, value: str) -> bool:
    return name.startswith(_BEARING) and not name.startswith(_HARMLESS) and value not in _USUAL.get(name, ())
