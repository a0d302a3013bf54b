"""Which variables of the environment bear on how fast GPUs exchange data."""

from collections.abc import Mapping

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
"""The values that CUDA has when the variable is not set (CUDA C++ Programming Guide, environment variables)."""

_DEBUG = "NCCL_DEBUG"
_SUBSYSTEMS = "NCCL_DEBUG_SUBSYS"

_OF_EVERY_OPERATION = frozenset(("COLL", "CALL", "TUNING", "ALL"))
"""The subsystems of NCCL's log that write a line for every operation; those of its start write none."""

_LOGGED_UNASKED = frozenset(("INIT", "BOOTSTRAP", "ENV"))


def logs_every_operation(level: str, subsystems: str) -> bool:
    """True where NCCL writes a line for every operation, which a rank does before it goes on: it costs time.

    `level` and `subsystems` are the values of NCCL_DEBUG and NCCL_DEBUG_SUBSYS.
    """
    level = level.upper()
    if level != "INFO":
        return level == "TRACE"
    named = frozenset(subsystems.lstrip("^").upper().split(","))
    inverted = subsystems.startswith("^")
    return bool(((_LOGGED_UNASKED | _OF_EVERY_OPERATION) - named if inverted else named) & _OF_EVERY_OPERATION)


def bearing_on_performance(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that can make transfers slower or faster, in their order; NCCL's log where it costs time."""
    logged = logs_every_operation(environment.get(_DEBUG, ""), environment.get(_SUBSYSTEMS, ""))
    return {
        name: value
        for name, value in environment.items()
        if (logged if name in (_DEBUG, _SUBSYSTEMS) else _bears(name, value))
    }


def _bears(name: str, value: str) -> bool:
    return name.startswith(_BEARING) and not name.startswith(_HARMLESS) and value not in _USUAL.get(name, ())
