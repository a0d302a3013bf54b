"""The processes that use GPUs, by /proc: whose they are, what joins them, and, looked at closely, what NCCL has there.

Nothing is sent to them and nothing is opened in them. What another user's process has is closed to all but root.
"""

import pwd
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpubench.hardware.process.facts import mapped_libraries, namespaces_in, shared_memory_at
from gpubench.hardware.process.names import container_of, process_name, sees_all_pids
from gpubench.hardware.process.nccl_settings import read_nccl_files
from gpubench.hardware.process.user_files import in_time, no_answer
from gpubench.hardware.system_files import names_in, printable, text_of
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.traffic import TaskFacts

_NCCL, _PYTORCH_WITH_NCCL = "libnccl", "pt_nccl"
"""The name of the library; and how PyTorch's threads are named that watch over a communicator (2.4 and later)."""

_GPU_FILE = "/dev/nvidia"
_SHARED = re.compile(r"/dev/shm/nccl-", re.ASCII)
_UID = re.compile(r"^Uid:\s*(\d+)", re.ASCII | re.MULTILINE)
_PARENT = re.compile(r"^PPid:\s*(\d+)", re.ASCII | re.MULTILINE)
_SLURM_GROUP = re.compile(r"job_(\d{1,12})(?:/step_(\w{1,20}))?", re.ASCII)
_LOOPBACK = re.compile(r"127\.|localhost[.:]|::1", re.ASCII)
_PYTHON = re.compile(r"python[\d.]*$|^pt_main|^ray::", re.ASCII)
_SECONDS_TO_SECOND_LOOK, _MOST_SECONDS_BETWEEN_LOOKS = 2.0, 5.0
"""The maps of a process of PyTorch have thousands of lines: one in which NCCL had nothing is looked at less often."""

Settings = Callable[[Mapping[str, str]], dict[str, str]]
"""What of an environment is read: settings that change results, never the whole."""


@dataclass(frozen=True, slots=True)
class _KnownTask:
    task: TaskFacts
    stat: Path
    started: str
    launched: bool
    look_again_at: float = 0.0
    looks: int = 0


class Tasks:
    """Reads processes once, and closely where asked, not more often than every few seconds.

    `settings` is the allow-list of an environment; `host` the name of this node.
    """

    def __init__(self, host: str, settings: Settings, root: Path = Path("/")) -> None:
        self._host, self._settings, self._root = host, settings, root
        self._sees_all = sees_all_pids(root)
        self._known: dict[int, _KnownTask] = {}

    def read(self, pids: Iterable[int]) -> tuple[TaskFacts, ...]:
        """The processes with these numbers that are there; those that ended are forgotten."""
        found: dict[int, _KnownTask] = {}
        for pid in sorted(set(pids)):
            known = self._known.get(pid)
            if known is None or known.started != _started(known.stat):
                known = self._first_look(pid, self._root / "proc" / str(pid))
            found[pid] = known
        self._known = found
        return tuple(each.task for each in found.values())

    def look_closely(self, pids: Collection[int], now: float) -> bool:
        """Read what NCCL has in these processes; true where anything was read anew."""
        anew = False
        for pid in pids:
            known = self._known.get(pid)
            if known is None or known.task.facts is None:
                continue
            if known.looks and now < known.look_again_at:
                continue
            folder = self._root / "proc" / str(pid)
            maps = text_of(folder / "maps") or ""
            libraries = mapped_libraries(folder / "maps")
            communicators = (
                bool(_SHARED.search(maps))
                or _has_thread(folder, _PYTORCH_WITH_NCCL)
                or (known.launched and _NCCL in libraries)
            )
            task = replace(
                known.task,
                communicators=communicators,
                facts=replace(known.task.facts, libraries=libraries),
            )
            wait = min(_SECONDS_TO_SECOND_LOOK * 2**known.looks, _MOST_SECONDS_BETWEEN_LOOKS)
            self._known[pid] = replace(known, task=task, looks=known.looks + 1, look_again_at=now + wait)
            anew = True
        return anew

    def tasks(self) -> tuple[TaskFacts, ...]:
        """As they were read last."""
        return tuple(each.task for each in self._known.values())

    def _first_look(self, pid: int, folder: Path) -> _KnownTask:
        stat = folder / "stat"
        started = _started(stat)
        status = text_of(folder / "status")
        name = process_name(pid, self._root)
        if status is None or not self._is_it(folder):
            unseen = TaskFacts(pid=pid, unread=f"process {pid} is not visible here")
            return _KnownTask(unseen, stat, started, launched=False)
        user = int(found[1]) if (found := _UID.search(status)) else None
        parent = int(found[1]) if (found := _PARENT.search(status)) else 0
        slurm = _SLURM_GROUP.search(text_of(folder / "cgroup") or "")
        environment = _environment(folder)
        container = container_of(pid, self._root)
        launched = [] if environment is None else list(_launched(environment, container))
        if slurm is not None and slurm[2] and not launched and environment is None:
            launched.append(f"Slurm {slurm[1]}.{slurm[2]}")
        task = TaskFacts(
            pid=pid,
            name=None if name is None else printable(name),
            user=user,
            container=container,
            slurm_job=slurm[1] if slurm else (environment or {}).get("SLURM_JOB_ID"),
            together=(*launched, *self._siblings(parent)),
            facts=None if environment is None else self._facts(pid, folder, environment, user),
            unread="" if environment is not None else f"process {pid} belongs to {_user_name(user)}",
        )
        return _KnownTask(task, stat, started, launched=bool(launched))

    def _is_it(self, folder: Path) -> bool:
        """False where NVML may count the host's processes, and the one with that number here uses no GPU."""
        return self._sees_all or _GPU_FILE in (text_of(folder / "maps") or _GPU_FILE)

    def _siblings(self, parent: int) -> Iterator[str]:
        """Processes of one Python parent, as multiprocessing and torchrun start them; a shell joins nothing."""
        name = process_name(parent, self._root) if parent > 1 else None
        if name is not None and _PYTHON.search(name):
            yield f"children of {parent}"

    def _facts(self, pid: int, folder: Path, environment: Mapping[str, str], user: int | None) -> RankFacts:
        settings = self._settings(environment)
        own_root = folder / "root"
        answer = in_time(lambda: read_nccl_files(settings, own_root, user))
        nccl_files, unknown = ({}, {"nccl_files": no_answer()}) if answer is None else answer
        device, size, free = shared_memory_at(own_root / "dev/shm")
        return RankFacts(
            rank=0,
            host=self._host,
            node=0,
            local_rank=0,
            pid=pid,
            boot_id=text_of(self._root / "proc/sys/kernel/random/boot_id"),
            namespaces=namespaces_in(folder / "ns"),
            shm_device=device,
            shm_bytes=size,
            shm_free_bytes=free,
            visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
            environment=settings,
            nccl_files=nccl_files,
            unknown=unknown,
        )


def _started(stat: Path) -> str:
    """When a process started, in the kernel's ticks: a number is given to another one later."""
    fields = (text_of(stat) or "").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _environment(folder: Path) -> dict[str, str] | None:
    """The environment that a process was started with; None where it may not be read. It may be empty."""
    try:
        raw = (folder / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: printable(value) for name, equals, value in pairs if equals}


def _launched(environment: Mapping[str, str], container: str | None) -> Iterator[str]:
    """What a launcher of several processes gave this one in common with the others.

    Every container has a loopback of its own, where jobs of several have the same address and port.
    """
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    several = {name for name in sizes if environment.get(name, "").isdecimal() and int(environment[name]) > 1}
    if "WORLD_SIZE" in several and "MASTER_ADDR" in environment:
        run = environment.get("TORCHELASTIC_RUN_ID", "none")
        address = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '?')}"
        inside = f" in {container}" if container and _LOOPBACK.match(address) else ""
        yield (f"torch {address}" if run == "none" else f"torchrun {run} {address}") + inside
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"):
        if "OMPI_COMM_WORLD_SIZE" in several and name in environment:
            yield f"mpirun {environment[name]}"
            break
    if "SLURM_STEP_NUM_TASKS" in several and "SLURM_JOB_ID" in environment:
        yield f"Slurm {environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '?')}"


def _has_thread(folder: Path, beginning: str) -> bool:
    tasks = folder / "task"
    return any((text_of(tasks / name / "comm") or "").startswith(beginning) for name in names_in(tasks))


def _user_name(user: int | None) -> str:
    if user is None:
        return "another user"
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
