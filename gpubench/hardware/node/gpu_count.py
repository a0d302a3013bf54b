"""How many GPUs a host has, without asking its driver."""

from collections.abc import Mapping
from pathlib import Path


def gpus_of_host(root: Path = Path("/")) -> int:
    """The GPUs that the driver of this host lists in /proc, a file system that answers though the driver hangs."""
    try:
        return len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def visible_gpus(count: int, environment: Mapping[str, str]) -> int:
    """How many of a host's GPUs CUDA shows a process with this environment.

    What follows a number in CUDA_VISIBLE_DEVICES that no GPU has is hidden too (CUDA programming guide).
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return count
    shown = 0
    for word in given.split(","):
        if not word.strip() or (word.strip().lstrip("-").isdecimal() and not 0 <= int(word) < count):
            break
        shown += 1
    return min(shown, count)
