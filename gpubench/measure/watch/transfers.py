"""Find transfers between the GPUs of two processes that pass through host memory, at any rate above idle noise.

`signals` judges a job by one interval, and ignores rates below 0.5 GB/s. The fallback of UCX carries only 0.4 GB/s.
Here the evidence is that several links carry the same rate, at the same times.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, product

from msgspec import Struct
from msgspec.structs import astuple

from gpubench.conditions.checks import transfer_findings
from gpubench.measure.watch.jobs import RunningJob, gpu_users
from gpubench.measure.watch.signals import QUIET_GB_S, Joined, data_sent, nvlink_rate
from gpubench.model.facts.traffic import LOOPBACK, GpuRates, NodeRates, TaskFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.ucx import Transfer, UcxRoute
from gpubench.model.results.fallback import Explanation
from gpubench.model.results.watch import Way
from gpubench.model.terms.verdict import Cure, Verdict

IDLE_GB_S = 0.02  # Idle PCIe links of four H200s carried up to this rate
MOVING_GB_S = 2 * IDLE_GB_S  # From this rate on, a link carries data
ONE_WAY_SHARE = 0.5  # A GPU counts as a sender if it receives at most this share of what it sends, and vice versa
REMEMBERED_INTERVALS = 60  # Requests may be far apart
LEAST_INTERVALS, MOST_INTERVALS = 3, 10
"""Compare rates over at least 3 intervals with data. Without a pause, compare the last 10 intervals.

The driver's PCIe rates lag behind by up to 0.2 s, differently on each GPU. A burst may therefore appear in the next
interval on one GPU and not on the other, so single intervals cannot be compared.
"""

MOST_BURSTS, MOST_OTHER = 5, 1  # Of the last 5 bursts, one may disagree
LEAST_BURSTS = 3  # Unrelated copies may have the same rate, but do not start and end together this often
MATCHING = 1.2
"""Rates agree within this factor, so that the launches of kernels do not hide a transfer. On two H200s, a GPU sent
1.01 bytes per byte that the other received, and 1.09 per byte on the loopback.
"""

EQUAL = 1.03  # Rates within this factor of each other are the same

_UCX = "libucp"

_UNEXPLAINED = Explanation(
    "kv-staged-unexplained",
    "UCX moves a KV cache without CUDA IPC",
    Cure.of("gpubench kv", comment="It names the cause. UCX_PROTO_INFO=y in the job prints the path."),
)
_UNREAD = Explanation("unknown", "the libraries of the processes cannot be read", Cure.of("sudo gpubench watch"))
_WITHOUT_UCX = Explanation(
    "unknown",
    "the processes have not loaded UCX, so they send copies in host memory, perhaps on purpose",
    Cure.of("gpubench kv", comment="It measures what a direct transfer reaches here."),
)


class MovedData(Struct, frozen=True):
    """Data out of some GPUs, into others, in the reverse direction, over the loopback, and over the busiest network.

    In one interval, these are rates in GB/s. For several intervals, they are sums of rates. `together` is the lower of
    `out` and `into` in each interval.
    """

    out: float = 0.0
    into: float = 0.0
    together: float = 0.0
    reverse: float = 0.0
    loopback: float = 0.0
    network: float = 0.0
    intervals: int = 1

    @property
    def is_quiet(self) -> bool:
        return max(self.out, self.into, self.loopback) < MOVING_GB_S

    @property
    def agrees(self) -> bool:
        """True if the GPUs receive what the others send, at the same time, and no other network carries it."""
        is_one_way = self.together >= ONE_WAY_SHARE * self.out and self.reverse <= ONE_WAY_SHARE * self.out
        elsewhere = self.network > ONE_WAY_SHARE * self.out and not self.by_loopback
        return is_one_way and not elsewhere and _differ(self.out, self.into) <= MATCHING

    @property
    def by_loopback(self) -> bool:
        """True if the loopback carries what the GPUs send."""
        return _differ(self.out, self.loopback) <= MATCHING

    @property
    def is_equal(self) -> bool:
        """True if the rates are so similar that a coincidence is unlikely."""
        return _differ(self.out, self.into) <= EQUAL


def _differ(one: float, other: float) -> float:
    return max(one, other) / max(min(one, other), 1e-9)


def total(flows: Iterable[MovedData]) -> MovedData:
    sums = [sum(values) for values in zip(*map(astuple, flows), strict=True)]
    return MovedData(*sums) if sums else MovedData(intervals=0)


class HostTransfer(Struct, frozen=True, kw_only=True):
    """A transfer through host memory: the GPUs and processes on both sides, and the data of several intervals.

    `in_step` means that several bursts began and ended together.
    """

    senders: tuple[GpuRates, ...]
    receivers: tuple[GpuRates, ...]
    tasks: tuple[tuple[TaskFacts, ...], tuple[TaskFacts, ...]]
    seen: MovedData
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
        if self.seen.by_loopback:
            return Way.SOCKETS if self.by_ucx or self.seen.is_equal or self.in_step else Way.NOT_TOLD
        return Way.UNKNOWN if (self.by_ucx and self.seen.is_equal) or self.in_step else Way.NOT_TOLD

    @property
    def meaning(self) -> str:
        senders, receivers = map(", ".join, self.ends)
        through = (
            "through the loopback" if self.seen.by_loopback else "as through shared memory or a container's network"
        )
        doubt = "; unrelated copies may look alike" if self.way is Way.NOT_TOLD else ""
        return f"{receivers} receives over PCIe what {senders} sends, {through}{doubt}"

    def explain(self, node: Topology | None) -> Explanation:
        """Return the most likely cause, from the node and from the environment and namespaces of the processes."""
        if not self.by_ucx:
            return _UNREAD if self.by_ucx is None else _WITHOUT_UCX
        facts = [[task.facts for task in side if task.facts is not None] for side in self.tasks]
        before, after = ({known.namespaces.get("pid") for known in side} for side in facts)
        transfer = Transfer(
            name="",
            route=UcxRoute.STAGED,
            same_node=True,
            peer_access=False if self._is_refused(node) else None,
            same_pid_namespace=None if None in before | after else not before.isdisjoint(after),
            variables={name: value for known in chain(*facts) for name, value in known.environment.items()},
        )
        for found in transfer_findings([transfer]):
            if found.id != _UNEXPLAINED.id:
                evidence = f"{found.cause} ({found.seen.partition(' (')[0]})"
                return Explanation(found.id, evidence, found.cure, in_doubt=found.severity is not Verdict.FAIL)
        return _UNEXPLAINED

    def _is_refused(self, node: Topology | None) -> bool:
        gpus = {} if node is None else {gpu.bus_id: gpu for gpu in node.gpus}
        ends = ([gpus[gpu.bus_id] for gpu in side if gpu.bus_id in gpus] for side in (self.senders, self.receivers))
        return node is not None and any(node.peer_access(*pair).possible is False for pair in product(*ends))


Ends = tuple[frozenset[str], frozenset[str]]  # Bus IDs of the GPUs that send, and of those that receive


class TransferFinder:
    """Compares the rates of a node's GPUs and its loopback interface over the last intervals."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self._past: deque[NodeRates] = deque(maxlen=REMEMBERED_INTERVALS)

    def observe(self, rates: NodeRates, jobs: Sequence[RunningJob]) -> tuple[HostTransfer, ...]:
        """Add an interval, and return the transfers that moved data in it."""
        self._past.append(rates)
        recent = list(self._past)[-2:]  # PCIe rates lag
        senders = {gpu.bus_id for one in recent for gpu in one.gpus if data_sent(gpu) >= MOVING_GB_S}
        receivers = {gpu.bus_id for one in recent for gpu in one.gpus if (gpu.pcie_received or 0.0) >= MOVING_GB_S}
        pairs = {(frozenset((one,)), frozenset((other,))) for one in senders for other in receivers - {one}}
        found = [
            transfer
            for ends in pairs | {group(rates)}
            if are_apart(rates, ends, jobs) and (transfer := self._find(ends)) is not None
        ]
        # Two pairs that transfer at the same time agree as one group of four GPUs.
        found.sort(key=lambda one: (-one.seen.intervals, -len(one.senders), one.ends))
        chosen: list[HostTransfer] = []
        taken: set[str] = set()
        for transfer in found:
            names = set(chain(*transfer.ends))
            if taken.isdisjoint(names):
                taken |= names
                chosen.append(transfer)
        return tuple(chosen)

    def _find(self, ends: Ends) -> HostTransfer | None:
        """Compare what some GPUs send with what others receive, in this interval, and in bursts before."""
        if measure_flow(self._past[-1], ends).is_quiet:
            return None
        flows = [measure_flow(rates, ends) for rates in self._past]
        *before, present = [
            list(burst) for is_quiet, burst in groupby(flows, lambda flow: flow.is_quiet) if not is_quiet
        ]
        if before and not flows[0].is_quiet:
            del before[0]  # Its beginning is not known
        bursts = [total(burst[-MOST_INTERVALS:]) for burst in before[-MOST_BURSTS:]]
        compared = [] if len(present) >= MOST_INTERVALS else [*bursts]
        now = total(present[-MOST_INTERVALS:])
        if now.agrees or len(present) >= LEAST_INTERVALS:  # A new burst may have reached one GPU only
            compared.append(now)
        alike = total(burst for burst in compared if burst.agrees)
        if alike.intervals < LEAST_INTERVALS or sum(not burst.agrees for burst in compared) > MOST_OTHER:
            return None
        # Without NVLinks, direct copies over PCIe show the same rates.
        if not alike.by_loopback and not all(self.joined(*pair) for pair in product(*ends)):
            return None
        in_step = sum(burst.agrees for burst in bursts) >= LEAST_BURSTS
        return _transfer(self._past[-1], ends, alike, in_step=in_step)


def _transfer(rates: NodeRates, ends: Ends, seen: MovedData, *, in_step: bool) -> HostTransfer:
    senders, receivers = (tuple(gpu for gpu in rates.gpus if gpu.bus_id in side) for side in ends)
    before, after = _pids(senders), _pids(receivers)
    sending, receiving = (
        tuple(task for task in rates.tasks if task.pid in pids)
        for pids in (before - after or before, after - before or after)
    )
    return HostTransfer(senders=senders, receivers=receivers, tasks=(sending, receiving), seen=seen, in_step=in_step)


def group(rates: NodeRates) -> Ends:
    """Return all GPUs that only send, and all that only receive."""
    sent = {gpu.bus_id: data_sent(gpu) for gpu in rates.gpus}
    received = {gpu.bus_id: gpu.pcie_received or 0.0 for gpu in rates.gpus}
    return (
        frozenset(gpu for gpu in sent if sent[gpu] >= MOVING_GB_S and received[gpu] <= ONE_WAY_SHARE * sent[gpu]),
        frozenset(gpu for gpu in sent if received[gpu] >= MOVING_GB_S and sent[gpu] <= ONE_WAY_SHARE * received[gpu]),
    )


def are_apart(rates: NodeRates, ends: Ends, jobs: Sequence[RunningJob]) -> bool:
    """True if different processes use the GPUs on both sides.

    If they belong to one job, its NVLinks must be idle. Otherwise the job would use them for this transfer too.
    """
    senders, receivers = ([gpu for gpu in rates.gpus if gpu.bus_id in side] for side in ends)
    job_of = {gpu.bus_id: job.name for job in jobs for gpu in job.gpus}
    within = {job_of.get(bus_id) for bus_id in ends[0]} & {job_of.get(bus_id) for bus_id in ends[1]}
    links = max((nvlink_rate(gpu) for gpu in (*senders, *receivers)), default=0.0)
    users = _pids(senders), _pids(receivers)
    return (users[0] != users[1] or not users[0]) and (not within or links <= QUIET_GB_S)


def transferring_pids(rates: NodeRates) -> frozenset[int]:
    """Return the processes that may send to each other through host memory, to find out whether they use UCX."""
    senders, receivers = (_pids([gpu for gpu in rates.gpus if gpu.bus_id in side]) for side in group(rates))
    return frozenset(senders | receivers if senders and receivers else ())


def _pids(gpus: Sequence[GpuRates]) -> set[int]:
    return {process.pid for gpu in gpus for process in gpu_users(gpu)}


def measure_flow(rates: NodeRates, ends: Ends) -> MovedData:
    """Return the rates of these GPUs and of the node's networks in one interval. Unknown rates count as 0."""
    senders, receivers = ([gpu for gpu in rates.gpus if gpu.bus_id in side] for side in ends)
    out, into = _sum(map(data_sent, senders)), _sum(gpu.pcie_received or 0.0 for gpu in receivers)
    back, answer = _sum(gpu.pcie_received or 0.0 for gpu in senders), _sum(map(data_sent, receivers))
    return MovedData(
        out=out,
        into=into,
        together=min(out, into),
        reverse=max(back, answer),
        loopback=next((nic.sent or 0.0 for nic in rates.nics if nic.name == LOOPBACK), 0.0),
        network=max((rate or 0.0 for nic in rates.nics for rate in (nic.sent, nic.received)), default=0.0),
    )


def _sum(rates: Iterable[float]) -> float:
    """Return the sum without idle noise, which adds up on many GPUs."""
    return sum(rate for rate in rates if rate > IDLE_GB_S)
