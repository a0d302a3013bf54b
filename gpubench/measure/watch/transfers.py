"""Find transfers between the GPUs of two processes that pass through host memory, at any rate above idle noise.

`signals` judges a job by one interval, and ignores rates below 0.5 GB/s. The fallback of UCX carries only 0.4 GB/s.
Here the evidence is that several links carry the same rate, at the same times.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, permutations, product

from msgspec import Struct, field
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
    "the processes have not loaded UCX: they send copies in host memory, which may be their wish",
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
                evidence = f"{found.cause} ({found.seen.partition(': ')[2]})"
                return Explanation(found.id, evidence, found.cure, in_doubt=found.severity is not Verdict.FAIL)
        return _UNEXPLAINED

    def _is_refused(self, node: Topology | None) -> bool:
        gpus = {} if node is None else {gpu.bus_id: gpu for gpu in node.gpus}
        ends = ([gpus[gpu.bus_id] for gpu in side if gpu.bus_id in gpus] for side in (self.senders, self.receivers))
        return node is not None and any(node.peer_access(*pair).possible is False for pair in product(*ends))


Ends = tuple[frozenset[str], frozenset[str]]  # Bus IDs of the GPUs that send, and of those that receive


class _History(Struct):
    """What some GPUs moved: the intervals since the last pause, and the last bursts between two pauses."""

    current: deque[MovedData] = field(default_factory=lambda: deque(maxlen=MOST_INTERVALS))
    bursts: deque[MovedData] = field(default_factory=lambda: deque(maxlen=MOST_BURSTS))
    after_pause: bool = False

    def add(self, flow: MovedData) -> None:
        if not flow.is_quiet:
            self.current.append(flow)
            return
        if self.current and self.after_pause:
            self.bursts.append(total(self.current))
        self.current.clear()
        self.after_pause = True

    @property
    def seen(self) -> MovedData | None:
        """The data of all bursts that agree, with those since the last pause. None if too few agree."""
        present = total(self.current)
        flows = [] if len(self.current) == MOST_INTERVALS else [*self.bursts]
        if present.agrees or len(self.current) >= LEAST_INTERVALS:  # A new burst may have reached one GPU only
            flows.append(present)
        alike = total(flow for flow in flows if flow.agrees)
        is_seen = alike.intervals >= LEAST_INTERVALS and sum(not flow.agrees for flow in flows) <= MOST_OTHER
        return alike if is_seen else None


class TransferFinder:
    """Compares the rates of a node's GPUs and its loopback interface over several intervals."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.histories: dict[Ends, _History] = {}
        self._is_running = False

    def observe(self, rates: NodeRates, jobs: Sequence[RunningJob]) -> tuple[HostTransfer, ...]:
        """Add an interval, and return the transfers that moved data in it."""
        pairs = permutations([frozenset((gpu.bus_id,)) for gpu in rates.gpus], 2)
        for ends in (*pairs, group(rates)):
            self.histories.setdefault(ends, _History(after_pause=self._is_running))
        self._is_running = True
        found: list[tuple[MovedData, Ends]] = []
        for ends, history in self.histories.items():
            flow = measure_flow(rates, ends)
            history.add(flow)
            seen = history.seen
            if seen is None or flow.is_quiet or not are_apart(rates, ends, jobs):
                continue
            # Without NVLinks, direct copies over PCIe show the same rates.
            if seen.by_loopback or all(self.joined(one, other) for one in ends[0] for other in ends[1]):
                found.append((seen, ends))
        self._drop_groups()
        # Two pairs that transfer at the same time agree as one group of four GPUs.
        chosen: list[HostTransfer] = []
        taken: set[str] = set()
        for seen, ends in sorted(found, key=lambda one: (-one[0].intervals, -len(one[1][0]))):
            if taken.isdisjoint(chain(*ends)):
                taken.update(*ends)
                chosen.append(self._transfer(rates, ends, seen))
        return tuple(chosen)

    def _drop_groups(self) -> None:
        """Drop groups of GPUs whose rates disagree, because their number grows. Keep all pairs."""
        for ends, history in list(self.histories.items()):
            is_begun = 0 < len(history.current) < LEAST_INTERVALS
            last = [total(history.current)] if history.current else [*history.bursts][-1:]
            if any(len(side) != 1 for side in ends) and not is_begun and not any(data.agrees for data in last):
                del self.histories[ends]

    def _transfer(self, rates: NodeRates, ends: Ends, seen: MovedData) -> HostTransfer:
        sides = [tuple(gpu for gpu in rates.gpus if gpu.bus_id in side) for side in ends]
        before, after = map(_pids, sides)
        tasks = [
            tuple(task for task in rates.tasks if task.pid in pids)
            for pids in (before - after or before, after - before or after)
        ]
        return HostTransfer(
            senders=sides[0],
            receivers=sides[1],
            tasks=(tasks[0], tasks[1]),
            seen=seen,
            in_step=sum(burst.agrees for burst in self.histories[ends].bursts) >= LEAST_BURSTS,
        )


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
