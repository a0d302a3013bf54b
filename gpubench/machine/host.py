"""Read the host from /proc, /sys and /dev: files, processes, CPUs, free memory, GPUs, and CUDA MPS."""

import errno
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from gpubench.errors import MPS_PERCENTAGE, SHARED_GPU_VARIABLE

T = TypeVar("T")

_LONGEST = 300
_CHUNK_BYTES = 2**16
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]{1,16}|\d{1,20})", re.ASCII | re.IGNORECASE)
"""The number of digits is limited to that of the kernel's 64-bit numbers."""


def read_text(path: Path) -> str | None:
    """Return a file's stripped text, or None if the file is empty or unreadable."""
    return UnknownFields().text("", path)


def read_number(path: Path) -> int | None:
    """Return the number in a file, decimal or 0x..., or None if there is none."""
    return parse_number(read_text(path))


def parse_number(text: str | None) -> int | None:
    if text is None or not _NUMBER.fullmatch(text):
        return None
    return int(text, 16 if "x" in text.lower() else 10)


def parse_fields(text: str | None) -> dict[str, str]:
    """Parse lines of the form 'Name: value', as in /proc/self/status."""
    lines = (line.partition(":") for line in (text or "").splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def rebase_path(root: Path, path: Path) -> Path:
    """Move an absolute path below another root. Return a relative path unchanged."""
    return root / str(path).lstrip("/") if path.is_absolute() else path


def exists(path: Path) -> bool:
    """True if this process can access the path. Unlike Path.exists, never raises."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def is_link(path: Path) -> bool:
    """True for a symbolic link, even a broken one. Never raises."""
    try:
        path.readlink()
    except (OSError, ValueError):
        return False
    return True


def printable(text: str) -> str:
    """Make text from an untrusted file safe to print: replace control characters and truncate."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text[:_LONGEST])


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in a directory, or [] if it is unreadable."""
    return UnknownFields().names("", folder) or []


def _content(path: Path) -> bytes:
    """Read a file in half the time of Path.read_bytes, because a node has thousands of small files."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(file, _CHUNK_BYTES), b""))
    finally:
        os.close(file)


def call_with_deadline(function: Callable[[], T], seconds: float) -> T | None:
    """Call a function in a thread and return its result. None if it takes longer, for example in a driver that
    hangs.

    The thread keeps running after the deadline.
    """
    answer: list[T] = []
    thread = threading.Thread(target=lambda: answer.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


class UnknownFields:
    """Read files and directories. If one is unreadable, store the reason in `reasons` under the name of the field."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def text(self, field: str, path: Path) -> str | None:
        """Return a file's text. If there is none, store the reason and return None."""
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
        """Return the sorted names in a directory. If it is unreadable, store the reason and return None."""
        try:
            return sorted(os.listdir(folder))  # noqa: PTH208 - four times as fast as iterdir, for folders of thousands
        except OSError as error:
            self.reasons[field] = f"{folder.name}: {error.strerror}"
            return None

    def tail(self, field: str, path: Path, most_bytes: int) -> bytes | None:
        """Return the last `most_bytes` of a file, such as a log. If it is unreadable, store the reason and return
        None.
        """
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


# The host's PID namespace (PROC_PID_INIT_INO). Any other PID namespace belongs to a container.
FIRST_PID_NAMESPACE = "pid:[4026531836]"
_CONTAINER = re.compile(
    r"(?P<runtime>kubepods|docker|containerd|crio|libpod)[^\n]*?(?P<id>[0-9a-f]{12})[0-9a-f]{52}", re.IGNORECASE
)


def process_name(pid: int, root: Path = Path("/")) -> str | None:
    """Return a process's program name: the last component of its command path, or else the kernel's name for the
    process.
    """
    folder = root / "proc" / str(pid)
    command = (read_text(folder / "cmdline") or "").partition("\0")[0].rpartition("/")[2]
    return command or (read_text(folder / "comm") or "").strip() or None


def process_stat(pid: int, root: Path = Path("/")) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one (the state) on. The second field may contain spaces."""
    return (read_text(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state, for example 'T' if it is stopped. '?' if the process is
    gone.
    """
    return next(iter(process_stat(pid)), "?")


def mapped_paths(maps: Path) -> Iterator[str]:
    """Yield the absolute paths in a /proc/PID/maps file in address order, once per mapping."""
    for line in (read_text(maps) or "").splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) == 6 and columns[5].startswith("/"):
            yield columns[5].removesuffix(" (deleted)")


def find_container(pid: int, root: Path = Path("/")) -> str | None:
    """Return a process's container as runtime and 12-digit ID, read from its control groups. None if it is in no
    container.
    """
    found = _CONTAINER.search(read_text(root / "proc" / str(pid) / "cgroup") or "")
    if found is None:
        return None
    runtime = found["runtime"].lower()
    return f"{'container' if runtime == 'kubepods' else runtime} {found['id'].lower()}"


class RunDelay(NamedTuple):
    """The time that a process's main thread ran, and the time that it was runnable but waited for a CPU, in
    nanoseconds.
    """

    ran_ns: int
    waited_ns: int


def run_delay(pid: int | str = "self", root: Path = Path("/")) -> RunDelay | None:
    """Read a process's run and wait times since its main thread started (the kernel's sched-stats.rst).

    None if the kernel does not record them.
    """
    fields = (read_text(root / f"proc/{pid}/schedstat") or "").split()
    if len(fields) < 2 or not all(field.isdecimal() for field in fields):
        return None
    return RunDelay(int(fields[0]), int(fields[1]))


def waited_share(before: RunDelay | None, after: RunDelay | None) -> float | None:
    """Return the fraction of runnable time that a thread waited for a CPU. None if it was runnable for less than 20
    ms.
    """
    if before is None or after is None:
        return None
    waited_ns = after.waited_ns - before.waited_ns
    ready_ns = after.ran_ns - before.ran_ns + waited_ns
    return waited_ns / ready_ns if ready_ns >= 20_000_000 else None


def sees_all_pids(root: Path = Path("/")) -> bool:
    """True if this process is in the host's PID namespace, so that NVML's PIDs are valid here."""
    try:
        return (root / "proc/self/ns/pid").readlink().name == FIRST_PID_NAMESPACE
    except OSError:
        return False


def leave_core() -> None:
    """Let this thread and its children run on every CPU of the job, instead of the core that mpirun bound it to."""
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups, from its own group up to the root, for cgroup v1 and
    v2.

    Some may not exist, because a container mounts its own group as the root.
    """
    for entry in (read_text(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, path = entry.partition(":")[2].partition(":")
        if entry.startswith("0::"):
            mounts: tuple[str, ...] = ("",)
        else:
            mounts = (controller, controllers) if controller in controllers.split(",") else ()
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            group = top / path.strip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


USABLE_SHARE = 0.8  # Fraction of free memory to use. The rest is for libraries, temporary buffers and the page cache
_LIMITS_AND_USAGES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def free_bytes(root: Path = Path("/")) -> int:
    """Return the free memory in bytes: the kernel's MemAvailable, but no more than the control groups allow."""
    available_kib = parse_fields((root / "proc/meminfo").read_text()).get("MemAvailable", "0").split()[0]
    free = [int(available_kib) * 1024]
    for folder in control_groups(root, "memory"):
        for limit_file, usage_file in _LIMITS_AND_USAGES:
            limit, usage = read_number(folder / limit_file), read_number(folder / usage_file)
            free += [] if limit is None or usage is None else [limit - usage]
    return max(0, min(free))


MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"

_CAPPED_FROM_RANKS = 4
_CTAS_PER_GPU = 64
"""Limit for all ranks on one GPU together. A rank's CTAs must fit into its share of the SMs. On an H100 with 132
SMs, 8 ranks ran with 8 CTAs each and 4 ranks with 16. Without a limit, 4 ranks hung in a 128 MiB all-reduce.
"""

# Time of one operation on an H100 in ms, by the number of ranks that share the GPU (NCCL 2.32.3).
_TURNS_MS = {2: 4.5, 4: 27.0, 8: 126.0}


def is_mps_running(environment: Mapping[str, str]) -> bool:
    """True if an MPS control daemon listens at the location that this environment specifies."""
    control = Path(environment.get(MPS_PIPES) or _DEFAULT_PIPES, "control")
    try:
        kind = control.stat().st_mode
        if stat.S_ISFIFO(kind):
            os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
            return True
        if not stat.S_ISSOCK(kind):
            return False
        # A datagram socket cannot connect to a stream socket. The kernel returns EPROTOTYPE only if a process listens
        # (unix(7)), and sends no data.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex(str(control)) in (0, errno.EPROTOTYPE)
    except OSError:
        return False


def sharing_settings(ranks_per_gpu: int, kernels_at_once: int = 1) -> dict[str, str]:
    """Return the environment variables for ranks that share a GPU. Each rank may run `kernels_at_once` kernels.

    On an H100, two ranks that computed during a collective hung with 50 % of the SMs each, and ran with 25 %.
    """
    if ranks_per_gpu == 1:
        return {}
    parts = ranks_per_gpu * kernels_at_once
    settings = {SHARED_GPU_VARIABLE: "1", MPS_PERCENTAGE: str(max(1, 100 // parts))}
    if ranks_per_gpu >= _CAPPED_FROM_RANKS:
        settings["NCCL_MAX_CTAS"] = str(max(1, _CTAS_PER_GPU // parts))
    return settings


def sm_percent(environment: Mapping[str, str]) -> float:
    """Return the percentage of a GPU's SMs that MPS grants with this environment. 100 if there is no limit."""
    try:
        return min(100.0, float(environment.get(MPS_PERCENTAGE, "100")))
    except ValueError:
        return 100.0


def cost_of_turns(ranks_per_gpu: int) -> str:
    """Describe how slow an operation is when ranks share a GPU by time slicing, without MPS."""
    nearest = min(_TURNS_MS, key=lambda ranks: abs(ranks - ranks_per_gpu))
    least = "at least " if ranks_per_gpu > max(_TURNS_MS) else ""
    return (
        f"no MPS server runs, so the {ranks_per_gpu} ranks of a GPU take turns. An operation of any size takes "
        f"{least}about {_TURNS_MS[nearest]:g} ms (as on an H100 with {nearest} ranks). Try: nvidia-cuda-mps-control "
        "-d, which lets them run at the same time"
    )


def count_gpus(root: Path = Path("/")) -> int:
    """Count the GPUs that the driver lists in /proc. This works even if the driver hangs."""
    return len(list_names(root / "proc/driver/nvidia/gpus"))


_MARK_FILES = {"docker": ".dockerenv", "podman": "run/.containerenv", "singularity": ".singularity.d"}
_GROUP_WORDS = {
    "kubernetes": "kubepods",
    "docker": "docker",
    "podman": "libpod",
    "containerd": "containerd",
    "lxc": "lxc",
    "slurm": "slurm",
}

RUNTIMES = frozenset((*_MARK_FILES, *_GROUP_WORDS)) - {"slurm"}  # Hints that name a container runtime


def container_hints(root: Path) -> tuple[str, ...]:
    """Return hints that this process is in a container or in a job's control group. None of them is proof."""
    found = [name for name, mark in _MARK_FILES.items() if exists(root / mark)]
    groups = read_text(root / "proc/self/cgroup") or ""
    found += [name for name, word in _GROUP_WORDS.items() if word in groups and name not in found]
    # A line is 'ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS ... - TYPE SOURCE OPTIONS'. The last mount on / is the visible
    # one.
    on_root = re.findall(r"^(?:\S+ ){4}/ .*? - (\S+)", read_text(root / "proc/self/mountinfo") or "", re.MULTILINE)
    if on_root and on_root[-1] in ("overlay", "fuse.fuse-overlayfs", "squashfs"):
        found.append("layered root")
    return tuple(found)


_FIRST_NAMESPACES = {
    "pid": FIRST_PID_NAMESPACE,
    "user": "user:[4026531837]",
    "ipc": "ipc:[4026531839]",
    "uts": "uts:[4026531838]",
    "cgroup": "cgroup:[4026531835]",
}
"""The host's own namespaces (PROC_*_INIT_INO in the kernel's proc_ns.h)."""


def container_around(root: Path) -> str | None:
    """Return the runtime of this process's container, or 'container' if its runtime is unknown.

    Return '' on the host, and None if neither can be shown. A control group proves a container, but a marker file does
    so only if the process has its own namespaces.
    """
    groups = read_text(root / "proc/self/cgroup") or ""
    namespaces = {}
    for kind in _FIRST_NAMESPACES:
        with suppress(OSError):
            namespaces[kind] = (root / "proc/self/ns" / kind).readlink().name
    private = {kind for kind, name in namespaces.items() if name != _FIRST_NAMESPACES[kind]}
    for hint in container_hints(root):
        # Singularity's directory exists only in images. Marker files of other runtimes may remain on a disk that was
        # made from an image.
        proven = private or hint == "singularity" or _GROUP_WORDS.get(hint, "\0") in groups
        if hint in RUNTIMES and proven:
            return hint
    if private & {"pid", "user"}:
        return "container"
    return "" if namespaces else None
