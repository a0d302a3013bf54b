"""Group processes into running jobs, select the jobs to watch, and find out why a job is host-staged."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, user_settings
from gpubench.conditions.ranking import UNKNOWN
from gpubench.measure.paths import first_cause
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuRates, NodeRates, NodeReading, TaskFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Pair, Transport, parse_transport
from gpubench.model.paths.wiring import GpuLocation, GpuPlace, Wiring
from gpubench.model.results.fallback import Explanation
from gpubench.model.results.watch import Way
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import format_ranges
from gpubench.model.terms.verdict import Cure

_SERVICES = ("nvidia-cuda-mps-server", "Xorg", "Xwayland", "gnome-shell")
"""Programs that open a context on every GPU but are not jobs."""


class RunningJob(Struct, frozen=True, kw_only=True):
    """The processes of one job and the GPUs that they use.

    `exchanges` is true if its GPUs exchange data with each other, or None if unknown.
    """

    name: str
    gpus: tuple[GpuRates, ...]
    tasks: tuple[TaskFacts, ...] = ()
    exchanges: bool | None = False
    doubt: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    shared_with: str = ""

    @property
    def devices(self) -> str:
        """The names of the job's GPUs, for example 'GPU0-3'."""
        return f"GPU{format_ranges(sorted(gpu.index for gpu in self.gpus))}"

    @property
    def by_nccl(self) -> bool:
        """True if a process of the job has an NCCL communicator."""
        return any(task.communicators for task in self.tasks)

    @property
    def one_process(self) -> bool:
        """True if the job has a single process."""
        return len(self.tasks) == 1


def running_jobs(rates: NodeRates) -> tuple[RunningJob, ...]:
    """Return the jobs on a node.

    If several jobs share a GPU, it belongs to the job with the most GPUs. GPUs whose processes cannot be seen, as in
    containers, form one job.
    """
    tasks = {task.pid: task for task in rates.tasks}
    hidden = [gpu for gpu in rates.gpus if gpu.processes is None]
    groups = group_by_job(tasks.values())
    on_gpu = {gpu.bus_id: {process.pid for process in gpu.processes or ()} for gpu in rates.gpus}
    sizes = {group: sum(bool(pids & set(group)) for pids in on_gpu.values()) for group in groups}
    owned: dict[tuple[int, ...], list[GpuRates]] = {}
    for gpu in rates.gpus:
        having = [group for group in groups if on_gpu[gpu.bus_id] & set(group)]
        having = [group for group in having if not all(_is_service(tasks[pid].name) for pid in group)] or having
        if having:
            owned.setdefault(max(having, key=lambda group: (sizes[group], -group[0])), []).append(gpu)
    closed = [group for group in owned if len(group) == 1 and _is_closed(tasks[group[0]])]
    jobs = [
        replace(
            _job([tasks[pid] for pid in group], gpus),
            others=_others(group, gpus),
            shared_with=_partners_over_nvlink(group, gpus, rates),
        )
        for group, gpus in owned.items()
        if group not in closed
    ]
    if closed:
        jobs.append(
            _unread_job([tasks[group[0]] for group in closed], [gpu for group in closed for gpu in owned[group]])
        )
    if hidden:
        doubt = next(
            (gpu.unknown["processes"] for gpu in hidden if "processes" in gpu.unknown), "their owner is unknown"
        )
        jobs.append(RunningJob(name="processes that cannot be seen", gpus=tuple(hidden), exchanges=None, doubt=doubt))
    return tuple(jobs)


def _others(group: tuple[int, ...], gpus: Sequence[GpuRates]) -> dict[str, str]:
    return {
        gpu.bus_id: _also_uses(process, gpu)
        for gpu in gpus
        if len(gpu.processes or ()) > 1
        for process in gpu_users(gpu)
        if process.pid not in group
    }


def _partners_over_nvlink(group: tuple[int, ...], gpus: Sequence[GpuRates], rates: NodeRates) -> str:
    if not any(len(gpu.processes or ()) > 1 for gpu in gpus):
        return ""
    tasks = {task.pid: task for task in rates.tasks if not _is_closed(task)}
    owner = {pid: group for group in group_by_job(tasks.values()) for pid in group}
    used: dict[tuple[int, ...], set[str]] = {}
    for gpu in rates.gpus:
        for process in gpu_users(gpu):
            used.setdefault(owner.get(process.pid, ()), set()).add(gpu.bus_id)
    for gpu in gpus:
        for process in gpu_users(gpu):
            if process.pid not in group and len(used[owner.get(process.pid, ())]) > 1:
                return _also_uses(process, gpu)
    return ""


def _also_uses(process: GpuProcess, gpu: GpuRates) -> str:
    return f"{process.label} also uses {gpu.device}"


def gpu_users(gpu: GpuRates) -> Iterator[GpuProcess]:
    """Yield the processes that use a GPU, without services such as the MPS server."""
    return (process for process in gpu.processes or () if not _is_service(process.name))


def _is_service(name: str | None) -> bool:
    return (name or "").rpartition("/")[2] in _SERVICES


def _is_closed(task: TaskFacts) -> bool:
    return task.facts is None and not task.together


def _unread_job(tasks: Sequence[TaskFacts], gpus: Sequence[GpuRates]) -> RunningJob:
    """Return one job for all processes that cannot be read, although they may belong to several jobs."""
    if len(tasks) == 1:
        return _job(tasks, gpus)
    name = f"{len(tasks)} processes that cannot be read"
    return RunningJob(name=name, gpus=tuple(gpus), tasks=tuple(tasks), exchanges=None, doubt=tasks[0].unread)


def group_by_job(tasks: Iterable[TaskFacts]) -> list[tuple[int, ...]]:
    """Group process IDs by job."""
    members: dict[int, set[int]] = {}
    by_key: dict[str, set[int]] = {}
    for task in tasks:
        group = {task.pid}
        for key in task.together:
            group |= by_key.get(key, set())
        for pid in group:
            members[pid] = group
        for key in {key for key, pids in by_key.items() if pids & group} | set(task.together):
            by_key[key] = group
    return sorted({tuple(sorted(group)) for group in members.values()})


def _job(tasks: Sequence[TaskFacts], gpus: Sequence[GpuRates]) -> RunningJob:
    exchanges: bool | None = False
    doubt = ""
    if len(gpus) > 1:
        unread = [task.unread for task in tasks if task.communicators is None]
        if len(tasks) == 1 or sum(bool(task.communicators) for task in tasks) > 1:
            exchanges = True
        elif unread:
            exchanges, doubt = None, unread[0] or "NCCL in its processes was not examined"
    return RunningJob(name=_name(tasks), gpus=tuple(gpus), tasks=tuple(tasks), exchanges=exchanges, doubt=doubt)


def _name(tasks: Sequence[TaskFacts]) -> str:
    program = next((task.name for task in tasks if task.name), "?")
    if len(tasks) == 1:
        return f"process {tasks[0].pid} ({program})"
    shared = set(tasks[0].together).intersection(*(task.together for task in tasks))
    key = next((key for key in tasks[0].together if key in shared), f"{len(tasks)} processes")
    return f"{program} ({key})"


_SHORT_ID = 12  # Digits of a shortened container ID, as container runtimes print it


class WatchedJobs(Struct, frozen=True):
    """Selects the jobs to watch, by process ID or job ID. Without either, all jobs are watched.

    `job` is a Slurm job ID or the start of a container ID.
    """

    pids: tuple[int, ...] = ()
    job: str | None = None

    @property
    def is_all(self) -> bool:
        return not self.pids and self.job is None

    @property
    def text(self) -> str:
        """The command-line options that select these jobs."""
        named = [f"--pid {pid}" for pid in self.pids] + ([f"--job {self.job}"] if self.job is not None else [])
        return " ".join(named)

    def of(self, reading: NodeReading) -> NodeReading:
        """Reduce a reading to the GPUs and processes of the selected jobs. Keep all NICs and lost GPUs."""
        if self.is_all:
            return reading
        tasks = {task.pid: task for task in reading.tasks}
        chosen = {
            pid
            for group in group_by_job(reading.tasks)
            if any(self._is_chosen(tasks[pid]) for pid in group)
            for pid in group
        }
        return replace(
            reading,
            tasks=tuple(task for task in reading.tasks if task.pid in chosen),
            gpus=tuple(
                gpu
                for gpu in reading.gpus
                if gpu.lost is not None or any(process.pid in chosen for process in gpu.processes or ())
            ),
        )

    def _is_chosen(self, task: TaskFacts) -> bool:
        if task.pid in self.pids:
            return True
        if self.job is None:
            return False
        if task.slurm_job == self.job:
            return True
        if self.job.isdecimal() and len(self.job) < _SHORT_ID:
            return False  # A short decimal number is a Slurm job ID, which a container ID may start with by chance
        return (task.container or "").rpartition(" ")[2].startswith(self.job[:_SHORT_ID].lower())


_TRANSPORTS = {Way.STAGED: parse_transport("SHM/direct/direct"), Way.SOCKETS: parse_transport("NET/Socket/0")}
"""The transports that NCCL names for these paths."""

_WITHOUT_NCCL = Explanation(
    UNKNOWN.id,
    "NCCL has no communicator in this process, so it copies without peer access, perhaps on purpose",
    Cure.of(
        "gpubench p2p",
        comment="It compares copies with and without peer access. To enable peer access, call "
        "cudaDeviceEnablePeerAccess in the program.",
    ),
)

_UNREAD = "the environment and files of its processes cannot be read: {}"

Ends = tuple[tuple[str, ...], tuple[str, ...]]  # Host-staged senders and receivers. If empty, any GPU may be one


def explain(job: RunningJob, way: Way, node: Topology, ends: Ends = ((), ())) -> Explanation:
    """Return the most likely cause for a job's path.

    The cause is unknown without evidence, or if the processes belong to other users and cannot be read.
    """
    if way is Way.STAGED and job.one_process and not job.by_nccl:
        return _WITHOUT_NCCL
    found = first_cause(_pairs(job, way, ends), _circumstances(job, node))
    unread = next((task.unread for task in job.tasks if task.facts is None and task.unread), "")
    if found.id == UNKNOWN.id and unread:
        return replace(
            found,
            evidence=_UNREAD.format(unread),
            cure=Cure.of("sudo gpubench watch", comment="Or run it as that user."),
        )
    return found


def _pairs(job: RunningJob, way: Way, ends: Ends) -> Mapping[Pair, Sequence[Transport]]:
    """Return the host-staged pairs of GPUs by position, or all pairs if the senders and receivers are unknown."""
    senders, receivers = (
        [position for position, gpu in enumerate(job.gpus) if gpu.device in side or not all(ends)] for side in ends
    )
    return {(one, other): (_TRANSPORTS[way],) for one in senders for other in receivers if one != other}


def _circumstances(job: RunningJob, node: Topology) -> Circumstances:
    places: list[GpuLocation] = []
    facts = []
    host = node.snapshot.host
    owners = [_owner(job, position) for position in range(len(job.gpus))]
    one_process_a_gpu = len({task.pid for task in owners if task is not None}) == len(job.gpus)
    for position, (gpu, task) in enumerate(zip(job.gpus, owners, strict=True)):
        if one_process_a_gpu and task is not None:
            places.append(
                RankIdentity(rank=position, host=host, node=0, local_rank=position, pid=task.pid, gpu_bus_id=gpu.bus_id)
            )
            if task.facts is not None:
                facts.append(replace(task.facts, rank=position, host=host, node=0, local_rank=position))
        else:
            places.append(GpuPlace(host, 0, gpu.bus_id))
    if not one_process_a_gpu:
        known = (task.facts for task in job.tasks if task.facts is not None)
        facts = [replace(task_facts, rank=number, host=host, node=0) for number, task_facts in enumerate(known)]
    return Circumstances(wiring=Wiring(places, {0: node}), facts=facts, settings=user_settings(facts))


def _owner(job: RunningJob, position: int) -> TaskFacts | None:
    """Return the job's process on a GPU, or None. If there are several, return the one that uses most GPU memory."""
    on_gpu = {process.pid: process.memory_bytes or 0 for process in job.gpus[position].processes or ()}
    having = [task for task in job.tasks if task.pid in on_gpu]
    return max(having, key=lambda task: on_gpu[task.pid], default=None)
