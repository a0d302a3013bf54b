"""The host memory that this process may still take."""

import re
from pathlib import Path

from gpubench.hardware.system_files import number_of, text_of

SHARE = 0.8
"""Of what is free, the part that buffers may take: the rest is for libraries, temporaries and the page cache."""


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes that can still be taken: what the kernel calls available, and no more than the control group allows.

    `root` is where /proc and /sys are found, so that a recorded tree is a test.
    """
    available = re.search(r"^MemAvailable:\s+(\d+)", (root / "proc/meminfo").read_text(), re.MULTILINE)
    return max(0, min([int(available[1]) * 1024 if available else 0, *_control_group_limits(root)]))


def _control_group_limits(root: Path) -> list[int]:
    """Room below the memory limit of this process's control group and of each group above it, versions 1 and 2."""
    limits: list[int] = []
    for entry in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            limits += _walk(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            limits += _walk(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return limits


def _walk(mount: Path, path: str, limit_file: str, usage_file: str) -> list[int]:
    """In a container the mount shows the own group as its root, so groups that are not there are passed over."""
    limits: list[int] = []
    group = mount / path.strip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            break
        limit, usage = number_of(directory / limit_file), number_of(directory / usage_file)
        if limit is not None and usage is not None:
            limits.append(limit - usage)
    return limits
