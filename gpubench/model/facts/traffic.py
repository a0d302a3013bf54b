"""Traffic and use of a node's GPUs: readings, rates between readings, throttling, and use by other programs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, field

from gpubench.model.facts.process import GpuCondition, GpuProcess, RankFacts
from gpubench.model.terms.plain import Count, Seconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import BYTES_PER_GB

FOREIGN_GB_S = 0.5
"""A link with this rate while the job is idle carries another program's data. On four H200s idle NVLinks carried
0.0 and idle PCIe links up to 0.02 GB/s, and copies of another process 371 to 396 and 59.
"""

FOREIGN_SHARE = 0.1  # Of what links carry: foreign traffic that may have moved their counters
LEAST_HELD_BYTES = 2**30  # A process without data holds some 500 MiB of a GPU: its context
BUSY_PERCENT = 50  # Of the time with something running while this job is idle: somebody else's work


class LinkRates(Struct, frozen=True, kw_only=True):
    """GB/s of all NVLinks of a GPU together, and of its PCIe link. None if not counted."""

    nvlink_sent: float | None = None
    nvlink_received: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None

    def combine(self, later: "LinkRates") -> "LinkRates":
        """Return the higher rate of each."""
        pairs = {name: (getattr(self, name), getattr(later, name)) for name in self.__struct_fields__}
        return LinkRates(**{name: _greatest(rates) for name, rates in pairs.items()})


class GpuUse(Struct, frozen=True, kw_only=True):
    """The use of a GPU by others: busy share, processes, and the bytes that they held before this job."""

    utilization_percent: int | None = None
    users: tuple[GpuProcess, ...] = ()
    held_bytes: int | None = None

    def combine(self, later: "GpuUse") -> "GpuUse":
        """Return the higher use, with the processes of both."""
        percent = _greatest((self.utilization_percent, later.utilization_percent))
        users = {each.pid: each for each in (*self.users, *later.users)}
        held = later.held_bytes if self.held_bytes is None else self.held_bytes
        return GpuUse(
            utilization_percent=None if percent is None else int(percent), users=tuple(users.values()), held_bytes=held
        )

    @property
    def is_busy(self) -> bool:
        """True if the GPU computes."""
        return (self.utilization_percent or 0) >= BUSY_PERCENT


class IdleGpu(Struct, frozen=True, kw_only=True):
    """Traffic and users of a GPU while this job was idle. None if not observed.

    `at_work` is its condition just before. `waited` is the share of time in which its rank waited for a CPU.
    """

    rates: LinkRates = field(default_factory=LinkRates)
    use: GpuUse = field(default_factory=GpuUse)
    at_work: GpuCondition | None = None
    waited: float | None = None

    def combine(self, later: "IdleGpu") -> "IdleGpu":
        """Combine two moments, keeping the worse of each fact."""
        return IdleGpu(
            rates=self.rates.combine(later.rates),
            use=self.use.combine(later.use),
            at_work=later.at_work or self.at_work,
            waited=_greatest((self.waited, later.waited)),
        )


def combine_idle_gpus(earlier: Sequence[IdleGpu], later: Sequence[IdleGpu]) -> tuple[IdleGpu, ...]:
    """Combine a job's GPUs over two moments, or return the only known one."""
    if not earlier or not later:
        return tuple(earlier or later)
    return tuple(one.combine(other) for one, other in zip(earlier, later, strict=True))


def exceeds_idle(gb_s: float | None) -> bool:
    """True if a rate is above that of an idle link."""
    return gb_s is not None and gb_s >= FOREIGN_GB_S


def describe_holders(use: GpuUse, words: Callable[[int], str]) -> str:
    """Describe who holds memory of a GPU, or ''. `words` formats a number of bytes."""
    if use.held_bytes is not None and any(user.memory_bytes is None for user in use.users):
        return f"{', '.join(user.label for user in use.users)}: {words(use.held_bytes)}"
    named = [f"{user.label}: {words(user.memory_bytes)}" for user in use.users if user.memory_bytes]
    unseen = (use.held_bytes or 0) - sum(user.memory_bytes or 0 for user in use.users)
    if use.held_bytes is not None and unseen > LEAST_HELD_BYTES:
        named.append(f"a process that is not visible here: {words(unseen)}")
    return ", ".join(named)


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


LOOPBACK = "lo"  # Where NCCL finds no other way inside a node, it takes sockets over this interface

_Counter = Annotated[int, Meta(ge=0)]  # In bytes: those of NVLinks and InfiniBand ports count beyond 2**64


class GpuReading(Struct, frozen=True, kw_only=True):
    """A GPU at one moment. None is unknown, and `unknown` has the reason by field.

    `nvlink_sent_bytes` and `nvlink_received_bytes` count the payload of all its NVLinks. Rates in GB/s are the driver's
    averages since the last reading. Without these, PCIe rates cover `pcie_sampled_seconds`, because its 32-bit counters
    wrap in 34 ms. `kernels_percent` is the share of time in which kernels ran, without copies, which
    `utilization_percent` includes. It is read only if PCIe sends data. `errors` are counters by name.
    """

    index: Count
    bus_id: str
    nvlink_sent_bytes: _Counter | None = None
    nvlink_received_bytes: _Counter | None = None
    nvlink_sent_gb_s: float | None = None
    nvlink_received_gb_s: float | None = None
    pcie_sent_gb_s: float | None = None
    pcie_received_gb_s: float | None = None
    pcie_sampled_seconds: Seconds | None = None
    utilization_percent: Count | None = None
    kernels_percent: float | None = None
    clock_mhz: Count | None = None
    throttle_reasons: tuple[str, ...] | None = None
    errors: Mapping[str, _Counter] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


class NicReading(Struct, frozen=True, kw_only=True):
    """A port or the loopback at one moment: bytes sent and received. Counters wrap at `counts_to`."""

    name: str
    rdma: bool
    sent_bytes: _Counter | None = None
    received_bytes: _Counter | None = None
    counts_to: Annotated[int, Meta(ge=1)] = 2**64
    active: bool | None = None
    errors: Mapping[str, _Counter] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


class TaskFacts(Struct, frozen=True, kw_only=True):
    """A process that uses GPUs, as far as this user may read /proc.

    `facts` are those of a rank, with the process's own environment and files. If None, `unread` has the reason.
    `together` lists what joins processes to a job, each with its source: 'torchrun 127.0.0.1:29500', 'Slurm 4711.0'.
    `communicators` tells whether NCCL has a communicator in it, None if not checked.
    """

    pid: int
    name: str | None = None
    user: int | None = None
    container: str | None = None
    slurm_job: str | None = None
    together: tuple[str, ...] = ()
    communicators: bool | None = None
    facts: RankFacts | None = None
    unread: str = ""


class NodeReading(Struct, frozen=True, kw_only=True):
    """A node at one moment of a monotonic clock in seconds. `driver_silent` says why GPUs are missing."""

    host: str
    seconds: Seconds
    gpus: tuple[GpuReading, ...] = ()
    nics: tuple[NicReading, ...] = ()
    tasks: tuple[TaskFacts, ...] = ()
    driver_silent: str | None = None


_NOT_BEFORE = "nothing was read before"
_WENT_BACK = "the counter went back: it was reset, or the driver was loaded again"
_TOO_MUCH = "the counter jumped by more than the links carry: it was reset"
_NVLINK_MOST_GB_S = 4000.0  # More than the NVLinks of any GPU carry in one direction: NVLink 5 has 900 GB/s
_PCIE_MOST_GB_S = 400.0  # More than the PCIe link of any GPU carries in one direction: PCIe 6 x16 has 121 GB/s
_NIC_MOST_GB_S = 400.0
_NO_RATE = "the driver's rate is none that links carry"


class GpuRates(Struct, frozen=True, kw_only=True):
    """GB/s of a GPU's links over an interval. None is unknown, and `unknown` has the reason by field.

    `errors_grown` are counters that grew. `lost` is the driver's message about a GPU that fell off the bus.
    """

    index: int
    bus_id: str
    nvlink_sent: float | None = None
    nvlink_received: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None
    utilization_percent: int | None = None
    kernels_percent: float | None = None
    clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    errors_grown: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Its name: GPU0."""
        return f"GPU{self.index}"


class NicRates(Struct, frozen=True, kw_only=True):
    """GB/s of an RDMA port or an Ethernet interface over an interval. None is unknown."""

    name: str
    rdma: bool
    active: bool | None = None
    sent: float | None = None
    received: float | None = None
    errors_grown: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


class NodeRates(Struct, frozen=True, kw_only=True):
    """A node over an interval, from `begin` to `end` in seconds of its clock."""

    host: str
    begin: float
    end: float
    gpus: tuple[GpuRates, ...] = ()
    nics: tuple[NicRates, ...] = ()
    tasks: tuple[TaskFacts, ...] = ()
    driver_silent: str | None = None


def compute_rates(before: NodeReading, after: NodeReading) -> NodeRates:
    """Compute the rates between two readings of one node. Values in only one of them are unknown."""
    seconds = after.seconds - before.seconds
    gpus = {each.bus_id: each for each in before.gpus}
    nics = {nic.name: nic for nic in before.nics}
    return NodeRates(
        host=after.host,
        begin=before.seconds,
        end=after.seconds,
        gpus=tuple(_gpu(gpus.get(each.bus_id), each, seconds) for each in after.gpus),
        nics=tuple(_nic(nics.get(nic.name), nic, seconds) for nic in after.nics),
        tasks=after.tasks,
        driver_silent=after.driver_silent,
    )


def _gpu(before: GpuReading | None, after: GpuReading, seconds: float) -> GpuRates:
    unknown = dict(after.unknown)
    if after.lost is not None:
        unknown = dict.fromkeys(("nvlink_sent", "nvlink_received", "pcie_sent", "pcie_received"), after.lost)
    found: dict[str, float | None] = {}
    for name in ("nvlink_sent", "nvlink_received"):
        counts = [None if each is None else getattr(each, f"{name}_bytes") for each in (before, after)]
        found[name] = _driver_rate(name, after, _NVLINK_MOST_GB_S, unknown)
        if found[name] is None and name not in unknown:
            found[name] = _rate(name, counts[0], counts[1], seconds, _NVLINK_MOST_GB_S, None, unknown)
    for name in ("pcie_sent", "pcie_received"):
        found[name] = _driver_rate(name, after, _PCIE_MOST_GB_S, unknown)
        if found[name] is None:
            unknown.setdefault(name, _NOT_BEFORE)
    return GpuRates(
        index=after.index,
        bus_id=after.bus_id,
        **found,
        utilization_percent=after.utilization_percent,
        kernels_percent=after.kernels_percent,
        clock_mhz=after.clock_mhz,
        throttle_reasons=after.throttle_reasons,
        errors_grown=count_growth({} if before is None else before.errors, after.errors),
        processes=after.processes,
        lost=after.lost,
        unknown=unknown,
    )


def _driver_rate(name: str, reading: GpuReading, most_gb_s: float, unknown: dict[str, str]) -> float | None:
    rate: float | None = getattr(reading, f"{name}_gb_s")
    if rate is None or reading.lost is not None:
        return None
    if not 0 <= rate <= most_gb_s:
        unknown[name] = _NO_RATE
        return None
    return rate


def _nic(before: NicReading | None, after: NicReading, seconds: float) -> NicRates:
    unknown = dict(after.unknown)
    pairs = {
        name: (None if before is None else getattr(before, f"{name}_bytes"), getattr(after, f"{name}_bytes"))
        for name in ("sent", "received")
    }
    counts_to = after.counts_to
    found = {name: _rate(name, *pair, seconds, _NIC_MOST_GB_S, counts_to, unknown) for name, pair in pairs.items()}
    return NicRates(
        name=after.name,
        rdma=after.rdma,
        active=after.active,
        **found,
        errors_grown=count_growth({} if before is None else before.errors, after.errors),
        unknown=unknown,
    )


def _rate(
    name: str,
    before: int | None,
    after: int | None,
    seconds: float,
    most_gb_s: float,
    counts_to: int | None,
    unknown: dict[str, str],
) -> float | None:
    """Return GB/s from a counter that may wrap once. If that is ambiguous, note the reason and return None."""
    if before is None or after is None or seconds <= 0:
        unknown.setdefault(name, _NOT_BEFORE)
        return None
    moved = after - before
    if moved < 0 and counts_to is not None:
        moved += counts_to
        if moved < 0 or moved / BYTES_PER_GB / seconds > most_gb_s:
            unknown[name] = _WENT_BACK
            return None
    if moved < 0:
        unknown[name] = _WENT_BACK
        return None
    rate = moved / BYTES_PER_GB / seconds
    if rate > most_gb_s:
        unknown[name] = _TOO_MUCH
        return None
    return rate


def count_growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of error counters. A counter that restarted counts as unchanged."""
    return {name: count - before[name] for name, count in after.items() if count > before.get(name, count)}


def sum_rates(values: Sequence[float | None]) -> float | None:
    """Return the sum of rates. None if any is unknown, because it might be the largest."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
