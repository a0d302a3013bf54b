"""Reads the use of this node's GPUs and links: clocks, throttling, traffic, and the processes behind it."""

import contextlib
import json
import os
import pwd
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.machine.children import die_with_parent, module_command, package_environment
from gpubench.machine.drivers import Answers, text
from gpubench.machine.environment import read_nccl_files
from gpubench.machine.gpus import (
    MEMORY_VERSION,
    MULTIPROCESSORS,
    is_idle,
    read_clock_reasons,
    read_memory_errors,
    read_processes,
    throttle_reasons,
)
from gpubench.machine.host import container_of, names_in, printable, process_name, sees_all_pids, text_of
from gpubench.machine.nics import NicCounters
from gpubench.machine.nvml import open_library
from gpubench.machine.process import in_time, mapped_libraries, namespaces_in, no_answer, read_shared_memory
from gpubench.model.facts.health import GpuLoad
from gpubench.model.facts.process import GpuCondition, GpuProcess, RankFacts
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.facts.traffic import GpuReading, GpuUse, NodeReading, TaskFacts
from gpubench.model.terms.plain import from_plain

_ALL = "throttling, clocks and other users"


class NvmlCondition:
    """Reads the condition of the GPU with a PCI bus id between rows."""

    def __init__(self, bus_id: str) -> None:
        self._bus_id = bus_id
        self._library = open_library()

    def read(self) -> GpuCondition:
        """Read the condition. `unread` lists facts without an answer."""
        library = self._library
        if library is None:
            return GpuCondition(unread={_ALL: "NVML does not start"})
        try:
            answers = Answers(library, library.nvmlDeviceGetHandleByPciBusId(self._bus_id))
        except library.NVMLError as error:
            return GpuCondition(unread={_ALL: str(error)})
        reasons = read_clock_reasons(answers)
        clock_mhz = answers.ask("clock", "nvmlDeviceGetClockInfo", MULTIPROCESSORS)
        return GpuCondition(
            throttle_reasons=throttle_reasons(reasons) or (),
            clock_mhz=None if is_idle(reasons) else clock_mhz,
            most_clock_mhz=answers.call("nvmlDeviceGetMaxClockInfo", MULTIPROCESSORS).value,
            memory_errors=read_memory_errors(answers) or 0,
            others=others(read_processes(answers) or (), os.getpid()),
            unread=answers.unknown,
        )

    def close(self) -> None:
        """Shut NVML down."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library = None


def others(processes: Sequence[GpuProcess], own: int) -> tuple[GpuProcess, ...]:
    """Return the processes other than this one.

    Inside a container NVML may report the host's pids. Then one of them is this process, but which one is unknown. A
    single one is this process.
    """
    if any(process.pid == own for process in processes):
        return tuple(process for process in processes if process.pid != own)
    return tuple(processes) if len(processes) > 1 else ()


_MILLIWATTS = 1000

_INSTANT_POWER = (186, 0)  # NVML_FI_DEV_POWER_INSTANT. On H200 nvmlDeviceGetPowerUsage is the mean of a second


class NvmlLoad:
    """Reads the load of the GPU with a PCI bus id."""

    def __init__(self, bus_id: str) -> None:
        self._library = open_library()
        self._answers = Answers.of_gpu(self._library, bus_id)

    def read(self) -> GpuLoad:
        """Read clock, power and throttle reasons."""
        answers = self._answers
        if answers is None:
            return GpuLoad()
        power = answers.fields([_INSTANT_POWER]).get(_INSTANT_POWER)
        if power is None:
            power = answers.ask("power", "nvmlDeviceGetPowerUsage")
        return GpuLoad(
            clock_mhz=answers.ask("clock", "nvmlDeviceGetClockInfo", MULTIPROCESSORS),
            power_w=None if power is None else power / _MILLIWATTS,
            throttle_reasons=throttle_reasons(read_clock_reasons(answers)) or (),
        )

    def close(self) -> None:
        """Shut NVML down."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library = self._answers = None


class NvmlUse:
    """Remembers who had a context on this host's GPUs before this job. In a container pids may be the host's."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._library = open_library()
        self._before: dict[str, tuple[tuple[GpuProcess, ...], int | None]] = {}
        for name, answers in self._every_gpu():
            ways = ("nvmlDeviceGetMemoryInfo", MEMORY_VERSION), ("nvmlDeviceGetMemoryInfo",)
            memory = answers.ask_in_turn("memory_used_bytes", *ways)
            self._before[name] = read_processes(answers) or (), None if memory is None else int(memory.used)

    def of(self, bus_ids: Sequence[str], own_pids: Collection[int]) -> "OthersOnGpus":
        """Return the use of GPUs with these PCI bus ids by others than these processes."""
        return OthersOnGpus(self, bus_ids, own_pids)

    def read(self, name: str, own_pids: Collection[int]) -> GpuUse:
        """Read the use of a GPU by others while this job is idle."""
        answers = Answers.of_gpu(self._library, name)
        if answers is None:
            return GpuUse()
        rates = answers.call("nvmlDeviceGetUtilizationRates").value
        before, held = self._before.get(normalize_bus_id(name), ((), None))
        if held is not None:  # a CUDA-aware MPI may have opened contexts for ranks already
            held -= sum(each.memory_bytes or 0 for each in before if each.pid in own_pids)
        return GpuUse(
            utilization_percent=None if rates is None else rates.gpu,
            users=self._others(read_processes(answers) or (), own_pids, {each.pid for each in before}),
            held_bytes=held,
        )

    def close(self) -> None:
        """Shut NVML down."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library = None

    def _others(
        self, processes: Sequence[GpuProcess], own_pids: Collection[int], before: Collection[int]
    ) -> tuple[GpuProcess, ...]:
        if sees_all_pids(self._root) or any(process.pid in own_pids for process in processes):
            named = (self._named(process) for process in processes if process.pid not in own_pids)
            return tuple(each for each in named if not each.is_mps_server)
        return tuple(process for process in processes if process.pid in before and not process.is_mps_server)

    def _named(self, process: GpuProcess) -> GpuProcess:
        name = process_name(process.pid, self._root) or process.name
        return replace(process, name=name, container=container_of(process.pid, self._root))

    def _every_gpu(self) -> Iterator[tuple[str, Answers]]:
        library: Any = self._library
        if library is None:
            return
        try:
            count = library.nvmlDeviceGetCount()
        except library.NVMLError:
            return
        for index in range(count):
            try:
                answers = Answers(library, library.nvmlDeviceGetHandleByIndex(index))
            except library.NVMLError:
                continue
            place = answers.call("nvmlDeviceGetPciInfo").value
            if place is not None:
                yield normalize_bus_id(text(place.busId) or ""), answers


class OthersOnGpus:
    """`ports.GpuUsers` of some GPUs by position."""

    def __init__(self, use: NvmlUse, bus_ids: Sequence[str], own_pids: Collection[int]) -> None:
        self._use, self._bus_ids, self._own_pids = use, bus_ids, own_pids

    def read(self, gpu: int) -> GpuUse:
        """Read the use of the GPU at a position."""
        return self._use.read(self._bus_ids[gpu], self._own_pids)


_MODULE = "gpubench.machine.gpu_child"
_CHUNK_BYTES = 2**16
_SECONDS_TO_END = 1.0


class GpuChild:
    """Requests readings from a child process, and the next one only after it answered, so a wedged driver blocks
    only it.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        start_seconds: float,
        deadline_seconds: float,
        indices: Sequence[int] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        asked = [] if indices is None else [",".join(map(str, indices))]
        self._seconds, self._deadline_seconds = start_seconds, deadline_seconds
        self._written = b""
        self._asked_at: float | None = None
        self._ended = ""
        self._process = subprocess.Popen(
            command or module_command(_MODULE, *asked),
            env=package_environment(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )

    def read(self) -> tuple[tuple[GpuReading, ...], str | None]:
        """Return a reading of all GPUs, or the reason why there is none. Ignore answers that come too late."""
        if self._ended:
            return (), self._ended
        if self._asked_at is not None and self._line(0.0) is None:
            return (), self._why(f"the driver has not answered for {time.monotonic() - self._asked_at:.0f} s")
        self._ask()
        seconds, self._seconds = self._seconds, self._deadline_seconds
        line = self._line(seconds)
        if line is None:
            return (), self._why(f"the driver did not answer within {seconds:g} s")
        return self._understood(line)

    def _why(self, silent: str) -> str:
        return self._ended or silent

    def close(self) -> None:
        """End the child, without waiting if it hangs in the driver."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()

    def _line(self, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._written:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    return None
                chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
                if not chunk:
                    self._ended = "the process that asks the driver has ended"
                    return None
                self._written += chunk
        line, _, self._written = self._written.partition(b"\n")
        self._asked_at = None
        return line

    def _understood(self, line: bytes) -> tuple[tuple[GpuReading, ...], str | None]:
        try:
            document: dict[str, Any] = json.loads(line)
            silent = document.get("silent")
            return tuple(from_plain(GpuReading, each) for each in document.get("gpus", ())), silent
        except (ValueError, UsageError):
            return (), "the process that asks the driver gave an answer that is none"


_NCCL, _PYTORCH_WITH_NCCL = "libnccl", "pt_nccl"
"""The name of the library, and the prefix of PyTorch threads that watch a communicator (2.4 and later)."""

_GPU_FILE = "/dev/nvidia"
_SHARED = re.compile(r"/dev/shm/nccl-", re.ASCII)
_UID = re.compile(r"^Uid:\s*(\d+)", re.ASCII | re.MULTILINE)
_PARENT = re.compile(r"^PPid:\s*(\d+)", re.ASCII | re.MULTILINE)
_SLURM_GROUP = re.compile(r"job_(\d{1,12})(?:/step_(\w{1,20}))?", re.ASCII)
_LOOPBACK = re.compile(r"127\.|localhost[.:]|::1", re.ASCII)
_PYTHON = re.compile(r"python[\d.]*$|^pt_main|^ray::", re.ASCII)
_SECONDS_TO_SECOND_LOOK, _MOST_SECONDS_BETWEEN_LOOKS = 2.0, 5.0
"""The maps of a PyTorch process have thousands of lines, so processes without NCCL are inspected less often."""

# Returns the settings that change results, never the whole environment
Settings = Callable[[Mapping[str, str]], dict[str, str]]


class _KnownTask(Struct, frozen=True):
    task: TaskFacts
    stat: Path
    started: str
    launched: bool
    look_again_at: float = 0.0
    looks: int = 0


class Tasks:
    """Reads each process once, and its NCCL state every few seconds on request. `settings` is an allow-list."""

    def __init__(self, host: str, settings: Settings, root: Path = Path("/")) -> None:
        self._host, self._settings, self._root = host, settings, root
        self._sees_all = sees_all_pids(root)
        self._known: dict[int, _KnownTask] = {}

    def read(self, pids: Iterable[int]) -> tuple[TaskFacts, ...]:
        """Read the processes with these pids, and forget those that ended."""
        found: dict[int, _KnownTask] = {}
        for pid in sorted(set(pids)):
            known = self._known.get(pid)
            if known is None or known.started != _started(known.stat):
                known = self._first_look(pid, self._root / "proc" / str(pid))
            found[pid] = known
        self._known = found
        return tuple(each.task for each in found.values())

    def look_closely(self, pids: Collection[int], now: float) -> bool:
        """Read the NCCL state of these processes. True if anything was read again."""
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
        """Return the processes as last read."""
        return tuple(each.task for each in self._known.values())

    def _first_look(self, pid: int, folder: Path) -> _KnownTask:
        stat = folder / "stat"
        started = _started(stat)
        status = text_of(folder / "status")
        name = process_name(pid, self._root)
        # NVML may report pids of the host. A process with that pid here uses no GPU.
        if status is None or not (self._sees_all or _GPU_FILE in (text_of(folder / "maps") or _GPU_FILE)):
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

    def _siblings(self, parent: int) -> Iterator[str]:
        """Yield processes of one Python parent, as multiprocessing and torchrun start them. A common shell means
        nothing.
        """
        name = process_name(parent, self._root) if parent > 1 else None
        if name is not None and _PYTHON.search(name):
            yield f"children of {parent}"

    def _facts(self, pid: int, folder: Path, environment: Mapping[str, str], user: int | None) -> RankFacts:
        settings = self._settings(environment)
        own_root = folder / "root"
        answer = in_time(lambda: read_nccl_files(settings, own_root, user))
        nccl_files, unknown = ({}, {"nccl_files": no_answer()}) if answer is None else answer
        device, size, free = read_shared_memory(own_root / "dev/shm")
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
    """Return when a process started, in kernel ticks, because pids are reused."""
    fields = (text_of(stat) or "").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _environment(folder: Path) -> dict[str, str] | None:
    try:
        raw = (folder / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: printable(value) for name, equals, value in pairs if equals}


def _launched(environment: Mapping[str, str], container: str | None) -> Iterator[str]:
    """Yield variables that a launcher gave to all its processes, without addresses in a container's own loopback."""
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


class NodeTraffic:
    """Reads a node repeatedly. `indices` selects GPUs (None: all). The first answer has its own deadline."""

    def __init__(
        self,
        host: str,
        environment: Mapping[str, str],
        settings: Settings,
        start_seconds: float,
        deadline_seconds: float,
        indices: Sequence[int] | None = None,
        *,
        root: Path = Path("/"),
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._clock = host, clock
        self._gpus = GpuChild(environment, start_seconds, deadline_seconds, indices, command)
        self._nics = NicCounters(root)
        self._tasks = Tasks(host, settings, root)

    def read(self) -> NodeReading:
        gpus, silent = self._gpus.read()
        pids = [process.pid for gpu in gpus for process in gpu.processes or ()]
        # The driver may have taken a while. Read the NICs and the clock after it, so that they belong together.
        nics, seconds = self._nics.read(), self._clock()
        return NodeReading(
            host=self._host,
            seconds=seconds,
            gpus=gpus,
            nics=nics,
            tasks=self._tasks.read(pids) if silent is None else self._tasks.tasks(),
            driver_silent=silent,
        )

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:
        """Read all processes again, and the NCCL state of these. None if nothing was read."""
        return self._tasks.tasks() if self._tasks.look_closely(pids, self._clock()) else None

    def close(self) -> None:
        self._gpus.close()
