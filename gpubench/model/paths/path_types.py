"""NCCL's types of paths, and how far apart NCCL uses peer access and GPUDirect RDMA by default."""

_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_NUMBERED = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
"""The numbers that NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL take."""

DEFAULT_LEVEL = "PXB"
_MOST_GPUS_ON_AMD = 2


def level(setting: str) -> str | None:
    """The type of path that a value of NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL names."""
    word = _NUMBERED.get(setting, setting.upper())
    return word if word in _LEVELS else None


def is_within(path: str, limit: str = DEFAULT_LEVEL) -> bool:
    """True if a path is no longer than a type of path; one that NCCL knows and this does not is longer."""
    return path in _LEVELS and _LEVELS.index(path) <= _LEVELS.index(limit)


def is_nvlink(path: str | None) -> bool:
    """True if NVLinks are all of a path."""
    return path in ("NVL", "NVB", "C2C")


def nccl_type(path_class: str) -> str | None:
    """NCCL's type of a path class: it does not tell the host bridges of a NUMA node from each other; None of others."""
    if path_class.startswith("NV"):
        return "NVL"
    return {"NODE": "PHB"}.get(path_class, path_class if path_class in _LEVELS else None)


def allows(setting: str, path_class: str) -> bool:
    """True if NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL of this value lets NCCL take a path class."""
    limit, path = level(setting), nccl_type(path_class)
    return limit is not None and path is not None and is_within(path, limit)


def amd_takes_all(gpus: int) -> bool:
    """True if on AMD processors NCCL uses peer access over any path (ncclTopoCheckP2p in src/graph/paths.cc)."""
    return gpus <= _MOST_GPUS_ON_AMD
