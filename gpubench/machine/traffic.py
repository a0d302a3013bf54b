"""Read how this node's GPUs and links are used: clocks, throttling, traffic, and the processes that cause it."""

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
from gpubench.machine.drivers import GpuQueries, decode
from gpubench.machine.environment import read_nccl_files
from gpubench.machine.gpus import (
    MULTIPROCESSORS,
    is_idle,
    read_clock_reasons,
    read_memory,
    read_memory_errors,
    read_processes,
    throttle_reasons,
)
from gpubench.machine.host import (
    call_with_deadline,
    find_container,
    list_names,
    parse_fields,
    parse_number,
    printable,
    process_name,
    process_stat,
    read_text,
    sees_all_pids,
)
from gpubench.machine.nics import NicCounters
from gpubench.machine.nvml import NvmlReader
from gpubench.machine.process import (
    NO_ANSWER,
    SECONDS_TO_ANSWER,
    mapped_libraries,
    read_namespaces,
    read_shared_memory,
)
from gpubench.model.facts.health import GpuLoad
from gpubench.model.facts.process import GpuCondition, GpuProcess, RankFacts
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.facts.traffic import GpuReading, GpuUse, NodeReading, TaskFacts
from gpubench.model.terms.plain import from_plain

_ALL = "throttling, clocks and other users"


class NvmlCondition(NvmlReader):
    """Read the condition of one GPU, chosen by PCI bus ID, between measured rows."""

    def __init__(self, bus_id: str) -> None:
        super().__init__()
        self._bus_id = bus_id

    def read(self) -> GpuCondition:
        """Read throttling, clocks, memory errors and other users. `unread` lists facts that NVML did not report."""
        library = self.library
        if library is None:
            return GpuCondition(unread={_ALL: "NVML does not start"})
        try:
            queries = GpuQueries(library, library.nvmlDeviceGetHandleByPciBusId(self._bus_id))
        except library.NVMLError as error:
            return GpuCondition(unread={_ALL: str(error)})
        reasons = read_clock_reasons(queries)
        clock_mhz = queries.read("clock", "nvmlDeviceGetClockInfo", MULTIPROCESSORS)
        return GpuCondition(
            throttle_reasons=throttle_reasons(reasons) or (),
            clock_mhz=None if is_idle(reasons) else clock_mhz,
            most_clock_mhz=queries.call("nvmlDeviceGetMaxClockInfo", MULTIPROCESSORS).value,
            memory_errors=read_memory_errors(queries) or 0,
            others=others(read_processes(queries) or (), os.getpid()),
            unread=queries.unknown,
        )


def others(processes: Sequence[GpuProcess], own_pid: int) -> tuple[GpuProcess, ...]:
    """Return all processes except this one.

    Inside a container, NVML may report the host's PIDs, which do not match this process's. A single process is then
    this one. Of several, return all, because it is unknown which one is this process.
    """
    if any(process.pid == own_pid for process in processes):
        return tuple(process for process in processes if process.pid != own_pid)
    return tuple(processes) if len(processes) > 1 else ()


_INSTANT_POWER = (186, 0)  # NVML_FI_DEV_POWER_INSTANT. On H200, nvmlDeviceGetPowerUsage is an average over one second


class NvmlLoad(NvmlReader):
    """Read the load of one GPU, chosen by PCI bus ID."""

    def __init__(self, bus_id: str) -> None:
        super().__init__()
        self._queries = GpuQueries.find(self.library, bus_id)

    def read(self) -> GpuLoad:
        """Read clock, power and throttle reasons. All are unknown if NVML has no such GPU."""
        queries = self._queries
        if queries is None:
            return GpuLoad()
        power_mw = queries.fields([_INSTANT_POWER]).get(_INSTANT_POWER)
        if power_mw is None:
            power_mw = queries.read("power", "nvmlDeviceGetPowerUsage")
        return GpuLoad(
            clock_mhz=queries.read("clock", "nvmlDeviceGetClockInfo", MULTIPROCESSORS),
            power_w=None if power_mw is None else power_mw / 1000,
            throttle_reasons=throttle_reasons(read_clock_reasons(queries)) or (),
        )


class NvmlUse(NvmlReader):
    """Record which processes had a context on this host's GPUs before the job. In a container, NVML may report the
    host's PIDs.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__()
        self._root = root
        self._before: dict[str, tuple[tuple[GpuProcess, ...], int | None]] = {}
        for name, queries in self._find_gpus():
            memory = read_memory(queries)
            self._before[name] = read_processes(queries) or (), None if memory is None else int(memory.used)

    def other_users(self, bus_ids: Sequence[str], own_pids: Collection[int]) -> "OtherUsers":
        """Return a reader for the use of these GPUs by processes other than `own_pids`."""
        return OtherUsers(self, bus_ids, own_pids)

    def read(self, name: str, own_pids: Collection[int]) -> GpuUse:
        """Read how much other processes use the GPU with bus ID `name`. Call this while the job is idle."""
        queries = GpuQueries.find(self.library, name)
        if queries is None:
            return GpuUse()
        rates = queries.call("nvmlDeviceGetUtilizationRates").value
        before, held_bytes = self._before.get(normalize_bus_id(name), ((), None))
        if held_bytes is not None:  # a CUDA-aware MPI may already have created contexts for this job's ranks
            held_bytes -= sum(process.memory_bytes or 0 for process in before if process.pid in own_pids)
        processes = read_processes(queries) or ()
        if sees_all_pids(self._root) or any(process.pid in own_pids for process in processes):
            users = [self._add_name(process) for process in processes if process.pid not in own_pids]
        else:
            pids_before = {process.pid for process in before}
            users = [process for process in processes if process.pid in pids_before]
        return GpuUse(
            utilization_percent=None if rates is None else rates.gpu,
            users=tuple(user for user in users if not user.is_mps_server),
            held_bytes=held_bytes,
        )

    def _add_name(self, process: GpuProcess) -> GpuProcess:
        name = process_name(process.pid, self._root) or process.name
        return replace(process, name=name, container=find_container(process.pid, self._root))

    def _find_gpus(self) -> Iterator[tuple[str, GpuQueries]]:
        library = self.library
        if library is None:
            return
        count = 0
        with contextlib.suppress(library.NVMLError):
            count = library.nvmlDeviceGetCount()
        for index in range(count):
            with contextlib.suppress(library.NVMLError):
                handle = library.nvmlDeviceGetHandleByIndex(index)
                name = decode(library.nvmlDeviceGetPciInfo(handle).busId) or ""
                yield normalize_bus_id(name), GpuQueries(library, handle)


class OtherUsers:
    """Implement `ports.GpuUsers` for several GPUs, which are addressed by their position in `bus_ids`."""

    def __init__(self, use: NvmlUse, bus_ids: Sequence[str], own_pids: Collection[int]) -> None:
        self._use, self._bus_ids, self._own_pids = use, bus_ids, own_pids

    def read(self, gpu: int) -> GpuUse:
        return self._use.read(self._bus_ids[gpu], self._own_pids)


_CHUNK_BYTES = 2**16
_SECONDS_TO_END = 1.0


class GpuChild:
    """Request readings from a child process, one at a time, so that a driver that hangs blocks only the child."""

    def __init__(
        self,
        environment: Mapping[str, str],
        start_seconds: float,
        deadline_seconds: float,
        indices: Sequence[int] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        arguments = [] if indices is None else [",".join(map(str, indices))]
        self._seconds, self._deadline_seconds = start_seconds, deadline_seconds
        self._written = b""
        self._request_time: float | None = None
        self._why_ended = ""
        self._process = subprocess.Popen(
            command or module_command("gpubench.machine.gpu_child", *arguments),
            env=package_environment(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )

    def read(self) -> tuple[tuple[GpuReading, ...], str | None]:
        """Return readings of all GPUs, and the reason if there are none. Late answers to earlier requests are
        discarded.
        """
        if self._why_ended:
            return (), self._why_ended
        if self._request_time is not None and self._read_line(0.0) is None:
            waited_s = time.monotonic() - self._request_time
            return (), self._why_silent(f"the driver has not answered for {waited_s:.0f} s")
        self._request_time = time.monotonic()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        seconds, self._seconds = self._seconds, self._deadline_seconds
        line = self._read_line(seconds)
        if line is None:
            return (), self._why_silent(f"the driver did not answer within {seconds:g} s")
        try:
            document: dict[str, Any] = json.loads(line)
            return tuple(from_plain(GpuReading, gpu) for gpu in document.get("gpus", ())), document.get("silent")
        except (ValueError, UsageError):
            return (), "the process that reads the driver returned an invalid answer"

    def _why_silent(self, default: str) -> str:
        return self._why_ended or default

    def close(self) -> None:
        """Kill the child, and do not wait for it if it hangs in the driver."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read_line(self, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._written:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    return None
                chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
                if not chunk:
                    self._why_ended = "the process that reads the driver has ended"
                    return None
                self._written += chunk
        line, _, self._written = self._written.partition(b"\n")
        self._request_time = None
        return line


_NCCL, _PYTORCH_WITH_NCCL = "libnccl", "pt_nccl"
"""The NCCL library's name, and the prefix of PyTorch threads that watch a communicator (2.4 and later)."""

_GPU_FILE = "/dev/nvidia"
_SHARED = re.compile(r"/dev/shm/nccl-", re.ASCII)
_SLURM_GROUP = re.compile(r"job_(\d{1,12})(?:/step_(\w{1,20}))?", re.ASCII)
_LOOPBACK = re.compile(r"127\.|localhost[.:]|::1", re.ASCII)
_PYTHON = re.compile(r"python[\d.]*$|^pt_main|^ray::", re.ASCII)
_SECONDS_TO_SECOND_LOOK, _MOST_SECONDS_BETWEEN_LOOKS = 2.0, 5.0
"""A PyTorch process has thousands of lines in its maps file, so it is inspected less often after each look."""

# Selects, from an environment, the variables that change results. It never returns the whole environment.
Settings = Callable[[Mapping[str, str]], dict[str, str]]


class _KnownTask(Struct, frozen=True):
    task: TaskFacts
    start_ticks: str
    launched: bool
    next_look_s: float = 0.0
    looks: int = 0


class Tasks:
    """Read each process once, and its NCCL state every few seconds if requested.

    `settings` selects the environment variables that may be recorded.
    """

    def __init__(self, host: str, settings: Settings, root: Path = Path("/")) -> None:
        self._host, self._settings, self._root = host, settings, root
        self._sees_all = sees_all_pids(root)
        self._known: dict[int, _KnownTask] = {}

    def read(self, pids: Iterable[int]) -> tuple[TaskFacts, ...]:
        """Read the processes with these PIDs, and drop all others."""
        found: dict[int, _KnownTask] = {}
        for pid in sorted(set(pids)):
            known = self._known.get(pid)
            if known is None or known.start_ticks != self._start_ticks(pid):
                known = self._first_look(pid, self._root / "proc" / str(pid))
            found[pid] = known
        self._known = found
        return self.tasks()

    def look_closely(self, pids: Collection[int], now: float) -> bool:
        """Read the NCCL state of these processes, unless it was read recently. Return True if any was read."""
        has_looked = False
        for pid in pids:
            known = self._known.get(pid)
            if known is None or known.task.facts is None or (known.looks and now < known.next_look_s):
                continue
            folder = self._root / "proc" / str(pid)
            libraries = mapped_libraries(folder / "maps")
            communicators = (
                bool(_SHARED.search(read_text(folder / "maps") or ""))
                or any(
                    (read_text(folder / "task" / thread / "comm") or "").startswith(_PYTORCH_WITH_NCCL)
                    for thread in list_names(folder / "task")
                )
                or (known.launched and _NCCL in libraries)
            )
            facts = replace(known.task.facts, libraries=libraries)
            task = replace(known.task, communicators=communicators, facts=facts)
            wait_s = min(_SECONDS_TO_SECOND_LOOK * 2**known.looks, _MOST_SECONDS_BETWEEN_LOOKS)
            self._known[pid] = replace(known, task=task, looks=known.looks + 1, next_look_s=now + wait_s)
            has_looked = True
        return has_looked

    def tasks(self) -> tuple[TaskFacts, ...]:
        """Return the processes as they were last read."""
        return tuple(known.task for known in self._known.values())

    def _start_ticks(self, pid: int) -> str:
        """Return a process's start time in kernel ticks, which detects that a PID was reused."""
        fields = process_stat(pid, self._root)
        return fields[19] if len(fields) > 19 else ""

    def _first_look(self, pid: int, folder: Path) -> _KnownTask:
        start_ticks = self._start_ticks(pid)
        status = read_text(folder / "status")
        name = process_name(pid, self._root)
        # NVML may report PIDs from the host's namespace. A process with the same PID in this container uses no GPU.
        if status is None or not (self._sees_all or _GPU_FILE in (read_text(folder / "maps") or _GPU_FILE)):
            unseen = TaskFacts(pid=pid, unread=f"process {pid} is not visible here")
            return _KnownTask(unseen, start_ticks, launched=False)
        fields = parse_fields(status)
        user = parse_number(next(iter(fields.get("Uid", "").split()), None))
        parent = parse_number(fields.get("PPid")) or 0
        slurm = _SLURM_GROUP.search(read_text(folder / "cgroup") or "")
        environment = _environment(folder)
        container = find_container(pid, self._root)
        launched = [] if environment is None else list(_launched(environment, container))
        if slurm is not None and slurm[2] and environment is None:
            launched.append(f"Slurm {slurm[1]}.{slurm[2]}")
        # multiprocessing and torchrun start all ranks from one Python parent. A shared shell as parent proves nothing.
        parent_name = process_name(parent, self._root) if parent > 1 else None
        siblings = [f"children of {parent}"] if parent_name is not None and _PYTHON.search(parent_name) else []
        task = TaskFacts(
            pid=pid,
            name=None if name is None else printable(name),
            user=user,
            container=container,
            slurm_job=slurm[1] if slurm else (environment or {}).get("SLURM_JOB_ID"),
            together=(*launched, *siblings),
            facts=None if environment is None else self._facts(pid, folder, environment, user),
            unread="" if environment is not None else f"process {pid} belongs to {_user_name(user)}",
        )
        return _KnownTask(task, start_ticks, launched=bool(launched))

    def _facts(self, pid: int, folder: Path, environment: Mapping[str, str], user: int | None) -> RankFacts:
        settings = self._settings(environment)
        root = folder / "root"
        answer = call_with_deadline(lambda: read_nccl_files(settings, root, user), SECONDS_TO_ANSWER)
        nccl_files, unknown = ({}, {"nccl_files": NO_ANSWER}) if answer is None else answer
        return RankFacts(
            rank=0,
            host=self._host,
            node=0,
            local_rank=0,
            pid=pid,
            boot_id=read_text(self._root / "proc/sys/kernel/random/boot_id"),
            namespaces=read_namespaces(folder / "ns"),
            **read_shared_memory(root / "dev/shm"),
            visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
            environment=settings,
            nccl_files=nccl_files,
            unknown=unknown,
        )


def _environment(folder: Path) -> dict[str, str] | None:
    try:
        raw = (folder / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: printable(value) for name, equals, value in pairs if equals}


def _launched(environment: Mapping[str, str], container: str | None) -> Iterator[str]:
    """Yield an identifier of the job for each launcher that started the process.

    A loopback address is unique only within a container, so add the container's name to it.
    """
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
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


def _user_name(user: int | None) -> str:
    if user is None:
        return "another user"
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


class NodeTraffic:
    """Read a node repeatedly. `indices` selects GPUs, and None selects all. `start_seconds` is the first reading's
    deadline.
    """

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
        # The driver may have taken a while, so read the NICs and the clock after it, at the same time.
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
        """Read the NCCL state of these processes, unless it was read recently.

        Return all processes, or None if nothing was read.
        """
        return self._tasks.tasks() if self._tasks.look_closely(pids, self._clock()) else None

    def close(self) -> None:
        self._gpus.close()
