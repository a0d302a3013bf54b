"""How many GPUs a host has, without asking its driver."""

from pathlib import Path


def gpus_of_host(root: Path = Path("/")) -> int:
    """The GPUs that the driver of this host lists in /proc, a file system that answers though the driver hangs."""
    try:
        return len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
