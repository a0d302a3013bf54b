"""Reads the host from /proc, /sys and /dev: small files, processes, cores, free memory, GPUs, and CUDA's MPS."""

import errno
import os
import re
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpubench.errors import MPS_PERCENTAGE, SHARED_GPU_VARIABLE

_LONGEST = 300
_CHUNK_BYTES = 2**16
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]{1,16}|\d{1,20})", re.ASCII | re.IGNORECASE)
"""At most as many digits as the kernel's 64-bit numbers have."""


def text_of(path: Path) -> str | None:
    """Return the stripped text of a file, or None if it is empty or cannot be read."""
    return UnknownFields().text("", path)


def number_of(path: Path) -> int | None:
    """Return the number in a file, decimal or 0x..., or None."""
    text = text_of(path) or ""
    if not _NUMBER.fullmatch(text):
        return None
    return int(text, 16 if "x" in text.lower() else 10)


def below(root: Path, path: Path) -> Path:
    """Move an absolute path below another root. A relative path stays as it is."""
    return root / str(path).lstrip("/") if path.is_absolute() else path


def exists(path: Path) -> bool:
    """True if this process can see the path. Unlike Path.exists, it never raises."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def is_link(path: Path) -> bool:
    """True for a symbolic link, wherever it leads. Never raises."""
    try:
        path.readlink()
    except (OSError, ValueError):
        return False
    return True


def printable(text: str) -> str:
    """Make text from an untrusted file safe to show: no control characters, limited length."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text[:_LONGEST])


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder, or [] if it cannot be read."""
    return UnknownFields().names("", folder) or []


def _content(path: Path) -> bytes:
    """Read a file in half the time of Path.read_bytes: a node has thousands of small ones."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(file, _CHUNK_BYTES):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(file)


class UnknownFields:
    """Reads facts, and keeps the reason for each one that cannot be read, by the name of the fact."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def text(self, field: str, path: Path) -> str | None:
        """Return the text of a file. If there is none, keep the reason and return None."""
        try:
            text = _content(path).decode(errors="replace").strip("\0 \t\r\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self.reasons[field] = f"{path.name}: {reason or error}"
            return None
        if not text:
            self.reasons[field] = f"{path.name} is empty"
        return text or None

    def names(self, field: str, folder: Path) -> list[str] | None:
        """Return the sorted names in a folder. If it cannot be read, keep the reason and return None."""
        try:
            return sorted(os.listdir(folder))  # noqa: PTH208 - four times as fast as iterdir, for folders of thousands
        except OSError as error:
            self.reasons[field] = f"{folder.name}: {error.strerror}"
            return None

    def tail(self, field: str, path: Path, most_bytes: int) -> bytes | None:
        """Return the end of a long file, such as a log. If it cannot be read, keep the reason and return None."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            needs_root = isinstance(error, PermissionError)
            self.reasons[field] = f"needs root: {path.name}" if needs_root else f"{path.name}: {reason or error}"
            return None
        try:
            return os.pread(file, most_bytes, max(0, os.fstat(file).st_size - most_bytes))
        except OSError as error:
            self.reasons[field] = f"{path.name}: {error.strerror}"
            return None
        finally:
            os.close(file)


# The host's own namespace (PROC_PID_INIT_INO). Any other belongs to a container
FIRST_PID_NAMESPACE = "pid:[4026531836]"
_CONTAINER = re.compile(
    r"(?P<runtime>kubepods|docker|containerd|crio|libpod)[^\n]*?(?P<id>[0-9a-f]{12})[0-9a-f]{52}", re.IGNORECASE
)


def process_name(pid: int, root: Path = Path("/")) -> str | None:
    """Return the program name of a process: the last part of its command, or else the kernel's name for it."""
    folder = root / "proc" / str(pid)
    command = (text_of(folder / "cmdline") or "").partition("\0")[0].rpartition("/")[2]
    return command or (text_of(folder / "comm") or "").strip() or None


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, for example `T` if stopped, or '?' if it is gone."""
    fields = (text_of(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()
    return fields[0] if fields else "?"


def container_of(pid: int, root: Path = Path("/")) -> str | None:
    """Return the container of a process from its control groups, for example 'docker 3f2a91bc04de', or None."""
    return container_in(text_of(root / "proc" / str(pid) / "cgroup") or "")


def container_in(groups: str) -> str | None:
    """Return the container in a /proc/PID/cgroup text: its runtime and the first twelve digits of its id."""
    found = _CONTAINER.search(groups)
    if found is None:
        return None
    runtime = found["runtime"].lower()
    return f"{'container' if runtime == 'kubepods' else runtime} {found['id'].lower()}"


def sees_all_pids(root: Path = Path("/")) -> bool:
    """True if this process is in the host's PID namespace, whose pids NVML reports."""
    try:
        return (root / "proc/self/ns/pid").readlink().name == FIRST_PID_NAMESPACE
    except OSError:
        return False


def leave_core() -> None:
    """Let this thread and its children run on every core of the job, instead of the one that mpirun bound it to."""
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


SHARE = 0.8  # Usable share of the free memory. The rest is for libraries, temporaries and the page cache


def free_bytes(root: Path = Path("/")) -> int:
    """Return the free memory in bytes: the kernel's MemAvailable, within the limits of control groups."""
    available = re.search(r"^MemAvailable:\s+(\d+)", (root / "proc/meminfo").read_text(), re.MULTILINE)
    return max(0, min([int(available[1]) * 1024 if available else 0, *_control_group_limits(root)]))


def _control_group_limits(root: Path) -> list[int]:
    """Return the free bytes below the memory limit of each control group of this process, versions 1 and 2."""
    limits: list[int] = []
    for entry in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            limits += _walk(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            limits += _walk(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return limits


def _walk(mount: Path, path: str, limit_file: str, usage_file: str) -> list[int]:
    """Read the limits from a group up to the root. Skip missing groups: in a container, its own group is the root."""
    limits: list[int] = []
    group = mount / path.strip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            break
        limit, usage = number_of(directory / limit_file), number_of(directory / usage_file)
        if limit is not None and usage is not None:
            limits.append(limit - usage)
    return limits


PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_CONTROL = "control"

_MAX_CTAS = "NCCL_MAX_CTAS"
_CAPPED_FROM = 4
_CTAS_OF_A_GPU = 64
"""Total of all ranks on a GPU. NCCL then gets its usual number of CTAs from a rank's share of the SMs: on an H100
with 132 SMs, 8 ranks ran with 8 CTAs each and 4 ranks with 16. 4 ranks without a cap hung in an all-reduce of
128 MiB.
"""

# Time of an operation on an H100 by the number of ranks that share it (NCCL 2.32.3)
_TURNS_MS = {2: 4.5, 4: 27.0, 8: 126.0}


def mps_serves(environment: Mapping[str, str]) -> bool:
    """True if a process with this environment reaches an MPS control daemon."""
    control = Path(environment.get(PIPES) or _DEFAULT_PIPES, _CONTROL)
    try:
        kind = control.stat().st_mode
        if stat.S_ISFIFO(kind):
            os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return stat.S_ISSOCK(kind) and _is_heard(control)
    except OSError:
        return False


def _is_heard(control: Path) -> bool:
    """True if a process listens on the socket. It has another type, so the connection is refused after the kernel
    found a listener (unix(7)), and nothing is sent.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(str(control)) in (0, errno.EPROTOTYPE)


def sharing_settings(ranks_per_gpu: int, kernels_at_once: int = 1) -> dict[str, str]:
    """Return the variables that let ranks share a GPU, with room for `kernels_at_once` kernels of a rank.

    Two ranks of an H100 that computed during a collective hung with 50 % of the SMs each, and ran with 25 %.
    """
    if ranks_per_gpu == 1:
        return {}
    parts = ranks_per_gpu * kernels_at_once
    settings = {SHARED_GPU_VARIABLE: "1", MPS_PERCENTAGE: str(max(1, 100 // parts))}
    if ranks_per_gpu >= _CAPPED_FROM:
        settings[_MAX_CTAS] = str(max(1, _CTAS_OF_A_GPU // parts))
    return settings


def sm_percent(environment: Mapping[str, str]) -> float:
    """Return the percentage of a GPU's SMs that MPS grants a process with this environment, 100 without a limit."""
    try:
        return min(100.0, float(environment.get(MPS_PERCENTAGE, "100")))
    except ValueError:
        return 100.0


def cost_of_turns(ranks_per_gpu: int) -> str:
    """Describe the cost of ranks that take turns on a GPU."""
    alike = min(_TURNS_MS, key=lambda ranks: abs(ranks - ranks_per_gpu))
    least = "at least " if ranks_per_gpu > max(_TURNS_MS) else ""
    return (
        f"no MPS server runs, so the {ranks_per_gpu} ranks of a GPU take turns: an operation of any size takes "
        f"{least}about {_TURNS_MS[alike]:g} ms (as on an H100 with {alike} ranks). "
        "Try: nvidia-cuda-mps-control -d, which lets them run at the same time"
    )


def gpus_of_host(root: Path = Path("/")) -> int:
    """Count the GPUs that the driver lists in /proc, which answers even if the driver hangs."""
    try:
        return len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


_MARKS = {"docker": ".dockerenv", "podman": "run/.containerenv", "singularity": ".singularity.d"}
_GROUPS = {
    "kubernetes": "kubepods",
    "docker": "docker",
    "podman": "libpod",
    "containerd": "containerd",
    "lxc": "lxc",
    "slurm": "slurm",
}

RUNTIMES = frozenset((*_MARKS, *_GROUPS)) - {"slurm"}  # Traces of container runtimes


def container_hints(root: Path) -> tuple[str, ...]:
    """Return the traces of a container or a job's control group. No trace is a proof."""
    found = [name for name, mark in _MARKS.items() if exists(root / mark)]
    groups = text_of(root / "proc/self/cgroup") or ""
    found += [name for name, word in _GROUPS.items() if word in groups and name not in found]
    if _root_file_system(text_of(root / "proc/self/mountinfo") or "") in ("overlay", "fuse.fuse-overlayfs", "squashfs"):
        found.append("layered root")
    return tuple(found)


def _root_file_system(mounts: str) -> str | None:
    """Return the file system type of the last mount on / ('ID PARENT DEVICE ROOT PLACE OPTIONS ... - TYPE SOURCE
    OPTIONS').
    """
    kind = None
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        fields = place.split(maxsplit=5)
        if len(fields) > 4 and fields[4] == "/" and source:
            kind = source.split(maxsplit=1)[0]
    return kind


_FIRST_NAMESPACES = {
    "pid": FIRST_PID_NAMESPACE,
    "user": "user:[4026531837]",
    "ipc": "ipc:[4026531839]",
    "uts": "uts:[4026531838]",
    "cgroup": "cgroup:[4026531835]",
}
"""The host's own namespaces (PROC_*_INIT_INO in the kernel's proc_ns.h)."""

# Their files exist only in images. Those of others may remain on a disk that was made from an image
_IMAGES = frozenset({"singularity"})


def container_around(root: Path) -> str | None:
    """Return the runtime of this process's container, 'container' if unnamed, '' on the host, None if unknown.

    A control group proves it. A file proves it only if the process has its own namespaces.
    """
    hints = [hint for hint in container_hints(root) if hint in RUNTIMES]
    groups = text_of(root / "proc/self/cgroup") or ""
    namespaces = {}
    for kind in _FIRST_NAMESPACES:
        with suppress(OSError):
            namespaces[kind] = (root / "proc/self/ns" / kind).readlink().name
    own = {kind for kind, name in namespaces.items() if name != _FIRST_NAMESPACES[kind]}
    for name in hints:
        if own or name in _IMAGES or _GROUPS.get(name, "\0") in groups:
            return name
    if own & {"pid", "user"}:
        return "container"
    return "" if namespaces else None
