"""Name, state and container of a process, from /proc."""

import re
from pathlib import Path

from gpubench.hardware.system_files import text_of

FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The namespace of the host itself (PROC_PID_INIT_INO in the kernel); any other is a container's."""

_CONTAINER = re.compile(
    r"(?P<runtime>kubepods|docker|containerd|crio|libpod)[^\n]*?(?P<id>[0-9a-f]{12})[0-9a-f]{52}", re.IGNORECASE
)


def process_name(pid: int, root: Path = Path("/")) -> str | None:
    """The program of a process: the last part of its command line's first word, else what the kernel calls it."""
    folder = root / "proc" / str(pid)
    command = (text_of(folder / "cmdline") or "").partition("\0")[0].rpartition("/")[2]
    return command or (text_of(folder / "comm") or "").strip() or None


def process_state(pid: int) -> str:
    """The letter that the kernel has for the state of a process, `T` where it is stopped; '?' for one that is gone."""
    fields = (text_of(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()
    return fields[0] if fields else "?"


def container_of(pid: int, root: Path = Path("/")) -> str | None:
    """The container of a process by its control groups: 'docker 3f2a91bc04de'; None outside of any."""
    return container_in(text_of(root / "proc" / str(pid) / "cgroup") or "")


def container_in(groups: str) -> str | None:
    """The container that /proc/PID/cgroup names, by its runtime and the first twelve digits of its id."""
    found = _CONTAINER.search(groups)
    if found is None:
        return None
    runtime = found["runtime"].lower()
    return f"{'container' if runtime == 'kubepods' else runtime} {found['id'].lower()}"


def sees_all_pids(root: Path = Path("/")) -> bool:
    """True where this process is in the host's own PID namespace, whose pids NVML's are."""
    try:
        return (root / "proc/self/ns/pid").readlink().name == FIRST_PID_NAMESPACE
    except OSError:
        return False
