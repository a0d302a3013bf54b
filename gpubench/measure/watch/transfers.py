"""Find transfers between the GPUs of two processes that pass through host memory, at any rate above idle noise.

`signals` judges a job by one interval, and ignores rates below 0.5 GB/s. The fallback of UCX carries only 0.4 GB/s.
Here the evidence is that several links carry the same rate, at the same times.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain

from msgspec import Struct, field

from gpubench.conditions.checks import transfer_findings
from gpubench.measure.watch.jobs import RunningJob, gpu_users
from gpubench.measure.watch.signals import MATCHING, QUIET_GB_S, Joined, data_sent, nvlink_rate
from gpubench.model.facts.traffic import LOOPBACK, GpuRates, NodeRates, TaskFacts
from gpubench.model.paths.ucx import Transfer, UcxRoute
from gpubench.model.results.fallback import Explanation
from gpubench.model.results.watch import Way
from gpubench.model.terms.verdict import Cure

IDLE_GB_S = 0.02  # Idle PCIe links of four H200s carried up to this rate
MOVING_GB_S = 2 * IDLE_GB_S  # From this rate on, a link carries data
ONE_WAY_SHARE = 0.5  # A GPU only sends if it receives at most this share of what it sends, and the reverse
WINDOW, LEAST_ALIKE, MOST_OTHER = 10, 3, 1
"""Report a transfer if the rates agreed in at least 3 of the last 10 intervals with data, and disagreed in at most 1.
An interval that begins or ends within a transfer may count its bytes on one link only.
"""

LEAST_STARTS = 3  # Unrelated copies may have the same rate, but they do not also start at the same time this often

_UCX = "libucp"

_UNEXPLAINED = Explanation(
    "kv-staged-unexplained",
    "UCX moves a KV cache without CUDA IPC",
    Cure.of("gpubench kv", comment="It names the cause. UCX_PROTO_INFO=y in the job prints the path."),
)
_UNREAD = Explanation(
    "unknown",
    "the libraries of the processes cannot be read",
    Cure.of("sudo gpubench watch", comment="Or run it as the user of these processes."),
)
_WITHOUT_UCX = Explanation(
    "unknown",
    "the processes have not loaded UCX: they send copies in host memory, which may be their wish",
    Cure.of("gpubench kv", comment="It measures what a direct transfer reaches here."),
)


class Agreement(StrEnum):
    """How the PCIe rate out of some GPUs compares with the rate into others in one interval.

    QUIET     the GPUs move no data
    LOOPBACK  the GPUs and the loopback interface carry the same rate
    ALIKE     the GPUs carry the same rate, and no network carries as much
    OTHER     anything else
    """

    QUIET = "quiet"
    LOOPBACK = "loopback"
    ALIKE = "alike"
    OTHER = "other"


class HostTransfer(Struct, frozen=True, kw_only=True):
    """A transfer through host memory in one interval, with the processes on both sides.

    `in_step` means that both sides started at the same time repeatedly.
    """

    senders: tuple[GpuRates, ...]
    receivers: tuple[GpuRates, ...]
    tasks: tuple[tuple[TaskFacts, ...], tuple[TaskFacts, ...]]
    loopback: bool
    in_step: bool

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the GPUs that send, and of those that receive."""
        return tuple(gpu.device for gpu in self.senders), tuple(gpu.device for gpu in self.receivers)

    @property
    def job(self) -> RunningJob:
        """Both sides as one job: 'process 100 (python) → process 101 (python)'."""
        names = [", ".join(f"process {task.pid} ({task.name or '?'})" for task in side) for side in self.tasks]
        return RunningJob(
            name=" → ".join(name or "a process that cannot be seen" for name in names),
            gpus=(*self.senders, *self.receivers),
            tasks=tuple({task.pid: task for task in chain(*self.tasks)}.values()),
            exchanges=True,
        )

    @property
    def by_ucx(self) -> bool | None:
        """True if a process on each side has loaded UCX, which should take the direct path. None if unknown."""
        if all(any(task.facts is not None and _UCX in task.facts.libraries for task in side) for side in self.tasks):
            return True
        # The libraries of a process are read together with its communicators.
        is_known = all(side and all(task.communicators is not None for task in side) for side in self.tasks)
        return False if is_known else None

    @property
    def way(self) -> Way:
        if self.loopback:
            return Way.SOCKETS
        return Way.UNKNOWN if self.by_ucx or self.in_step else Way.NOT_TOLD

    @property
    def meaning(self) -> str:
        sides = " what ".join((f"{', '.join(self.ends[0])} sends over PCIe", f"{', '.join(self.ends[1])} receives"))
        if self.loopback:
            return f"{sides}, and the loopback interface carries the same"
        alike = "" if self.way is Way.UNKNOWN else "; unrelated copies may look alike"
        return f"{sides}, as in transfers through shared memory or a container's network{alike}"

    def explain(self) -> Explanation:
        """Return the most likely cause, from the environment and the namespaces of the processes."""
        if not self.by_ucx:
            return _UNREAD if self.by_ucx is None else _WITHOUT_UCX
        facts = [[task.facts for task in side if task.facts is not None] for side in self.tasks]
        before, after = ({known.namespaces.get("pid") for known in side} for side in facts)
        transfer = Transfer(
            name="",
            route=UcxRoute.STAGED,
            same_node=True,
            same_pid_namespace=None if None in before | after else not before.isdisjoint(after),
            variables={name: value for known in chain(*facts) for name, value in known.environment.items()},
        )
        found = next(iter(transfer_findings([transfer])), None)
        if found is None or found.id == _UNEXPLAINED.id:
            return _UNEXPLAINED
        return Explanation(found.id, f"{found.cause} ({found.seen.partition(': ')[2]})", found.cure)


Ends = tuple[frozenset[str], frozenset[str]]  # Bus IDs of the GPUs that send, and of those that receive


class _History(Struct):
    """The last intervals in which these GPUs moved data. `starts` is true for each that followed a quiet interval."""

    agreements: deque[Agreement] = field(default_factory=lambda: deque(maxlen=WINDOW))
    starts: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    was_quiet: bool = False

    def add(self, agreement: Agreement) -> None:
        if agreement is not Agreement.QUIET:
            self.agreements.append(agreement)
            self.starts.append(self.was_quiet)
        self.was_quiet = agreement is Agreement.QUIET

    def shows(self, agreement: Agreement) -> bool:
        """True if the intervals agree often enough for a report."""
        count = self.agreements.count(agreement)
        return count >= LEAST_ALIKE and len(self.agreements) - count <= MOST_OTHER


class TransferFinder:
    """Compares the rates of a node's GPUs and its loopback interface over several intervals."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self._histories: dict[Ends, _History] = {}

    def observe(self, rates: NodeRates, jobs: Sequence[RunningJob]) -> tuple[HostTransfer, ...]:
        """Add an interval, and return the transfers that moved data in it."""
        found: list[tuple[Ends, Agreement]] = []
        for ends in candidates(rates, jobs):
            self._histories.setdefault(ends, _History())
        for ends, history in list(self._histories.items()):
            agreement = compare(rates, ends)
            history.add(agreement)
            is_seen = agreement is Agreement.LOOPBACK or (agreement is Agreement.ALIKE and self._have_nvlinks(ends))
            if is_seen and history.shows(agreement):
                found.append((ends, agreement))
            elif len(history.agreements) == WINDOW:
                del self._histories[ends]
        # Two pairs that transfer at the same time also agree as one group of four GPUs
        found.sort(key=lambda one: -len(self._histories[one[0]].agreements))
        taken: set[str] = set()
        chosen = []
        for ends, agreement in found:
            if taken.isdisjoint(chain(*ends)):
                taken.update(*ends)
                chosen.append(self._transfer(rates, ends, agreement))
        return tuple(chosen)

    def _have_nvlinks(self, ends: Ends) -> bool:
        """True if NVLinks connect all GPUs. Otherwise direct copies over PCIe show the same rates."""
        return all(self.joined(one, other) for one in ends[0] for other in ends[1])

    def _transfer(self, rates: NodeRates, ends: Ends, agreement: Agreement) -> HostTransfer:
        senders, receivers = (tuple(gpu for gpu in rates.gpus if gpu.bus_id in side) for side in ends)
        tasks = {task.pid: task for task in rates.tasks}
        before, after = (
            tuple(tasks[pid] for pid in sorted(_pids(side)) if pid in tasks) for side in (senders, receivers)
        )
        return HostTransfer(
            senders=senders,
            receivers=receivers,
            tasks=(before, after),
            loopback=agreement is Agreement.LOOPBACK,
            in_step=sum(self._histories[ends].starts) >= LEAST_STARTS,
        )


def candidates(rates: NodeRates, jobs: Sequence[RunningJob]) -> Iterator[Ends]:
    """Yield the GPUs that may send to others through host memory: all together, and each pair.

    The GPUs of a job that uses its NVLinks do not count, because it would use them for this transfer too.
    """
    out = [gpu for gpu in rates.gpus if data_sent(gpu) >= MOVING_GB_S and _is_one_way(gpu, sends=True)]
    into = [gpu for gpu in rates.gpus if (gpu.pcie_received or 0.0) >= MOVING_GB_S and _is_one_way(gpu, sends=False)]
    groups = [(out, into)] + [([one], [other]) for one in out for other in into]
    job_of = {gpu.bus_id: job.name for job in jobs for gpu in job.gpus}
    for senders, receivers in groups:
        within = {job_of.get(gpu.bus_id) for gpu in senders} & {job_of.get(gpu.bus_id) for gpu in receivers}
        links = max((nvlink_rate(gpu) for gpu in (*senders, *receivers)), default=0.0)
        are_apart = senders and receivers and _pids(senders).isdisjoint(_pids(receivers))
        if are_apart and (not within or links <= QUIET_GB_S):
            yield frozenset(gpu.bus_id for gpu in senders), frozenset(gpu.bus_id for gpu in receivers)


def transferring_pids(rates: NodeRates, jobs: Sequence[RunningJob]) -> frozenset[int]:
    """Return the processes that may send to each other through host memory, to find out whether they use UCX."""
    moving = [ends for ends in candidates(rates, jobs) if compare(rates, ends) is not Agreement.OTHER]
    gpus = [gpu for gpu in rates.gpus if any(gpu.bus_id in side for ends in moving for side in ends)]
    return frozenset(_pids(gpus))


def _is_one_way(gpu: GpuRates, *, sends: bool) -> bool:
    sent, received = data_sent(gpu), gpu.pcie_received or 0.0
    return received <= ONE_WAY_SHARE * sent if sends else sent <= ONE_WAY_SHARE * received


def _pids(gpus: Sequence[GpuRates]) -> set[int]:
    return {process.pid for gpu in gpus for process in gpu_users(gpu)}


def compare(rates: NodeRates, ends: Ends) -> Agreement:
    """Compare the rates of these GPUs and of the node's networks in one interval."""
    senders, receivers = ([gpu for gpu in rates.gpus if gpu.bus_id in side] for side in ends)
    if any(gpu.pcie_sent is None or gpu.pcie_received is None for gpu in (*senders, *receivers)):
        return Agreement.OTHER
    out, back = sum(map(data_sent, senders)), sum(gpu.pcie_received or 0.0 for gpu in senders)
    into, answer = sum(gpu.pcie_received or 0.0 for gpu in receivers), sum(map(data_sent, receivers))
    if max(out, into) < MOVING_GB_S:
        return Agreement.QUIET
    if back > ONE_WAY_SHARE * out or answer > ONE_WAY_SHARE * into or not _alike(out, into):
        return Agreement.OTHER
    loopback = next((nic.sent or 0.0 for nic in rates.nics if nic.name == LOOPBACK), 0.0)
    if _alike(loopback, out):
        return Agreement.LOOPBACK
    networks = [rate or 0.0 for nic in rates.nics for rate in (nic.sent, nic.received)]
    return Agreement.OTHER if max(networks, default=0.0) > ONE_WAY_SHARE * out else Agreement.ALIKE


def _alike(one: float, other: float) -> bool:
    return max(one, other) - IDLE_GB_S <= MATCHING * min(one, other)
