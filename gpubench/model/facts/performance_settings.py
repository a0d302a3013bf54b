"""Which variables of the environment bear on how fast GPUs exchange data."""

from collections.abc import Mapping

_BEARING = (
    *("NCCL_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"),
    *("OMPI_MCA_", "MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_", "MPICH_RDMA_ENABLED_CUDA", "MV2_USE_CUDA", "MVP_USE_CUDA"),
    *("UCX_", "FI_", "OFI_NCCL_"),
)
_HARMLESS = (
    *("NCCL_DEBUG", "NCCL_COMM_ID", "NCCL_HOSTID", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_RAS_"),
    *("NCCL_HOME", "NCCL_ROOT", "NCCL_LIB", "NCCL_INCLUDE", "NCCL_VERSION"),
    *("UCX_LOG_LEVEL", "FI_LOG_LEVEL"),
)
_OFF = {"CUDA_LAUNCH_BLOCKING": ("", "0")}
_TRACE = "TRACE"


def bears_on_performance(name: str, value: str) -> bool:
    """True for a variable that can make transfers slower or faster; NCCL_DEBUG only where it traces every call."""
    if name == "NCCL_DEBUG":
        return value.upper() == _TRACE
    return name.startswith(_BEARING) and not name.startswith(_HARMLESS) and value not in _OFF.get(name, ())


def bearing_on_performance(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that bear on performance, in their order."""
    return {name: value for name, value in environment.items() if bears_on_performance(name, value)}
