"""The host memory that this process may still take."""

from pathlib import Path

SHARE = 0.8
"""Of what is free, the part that buffers may take: the rest is for libraries, temporaries and the page cache."""


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes that can still be taken: what the kernel calls available, and no more than the control group allows.

    `root` is where /proc and /sys are found, so that a recorded tree is a test.
    """
    limits = [_available(root / "proc/meminfo"), *_control_group_limits(root)]
    return max(0, min(limits))


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _control_group_limits(root: Path) -> list[int]:
    """Room below the memory limit of this process's control group and of each group above it, versions 1 and 2."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits: list[int] = []
    for entry in entries:
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
        try:
            limit = (directory / limit_file).read_text().strip()
            usage = int((directory / usage_file).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            limits.append(int(limit) - usage)
    return limits
