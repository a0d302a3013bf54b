"""Traffic and utilization of a node's GPUs: readings, rates between two readings, and use by other programs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta, field
from msgspec.structs import astuple

from gpubench.model.facts.process import GpuCondition, GpuProcess, RankFacts
from gpubench.model.terms.plain import Count, Seconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import BYTES_PER_GB

FOREIGN_GB_S = 0.5
"""From this rate on, a link of an idle job carries another program's data.

On four H200s, idle NVLinks carried 0.0 GB/s and idle PCIe links up to 0.02 GB/s. Copies by another process reached 371
to 396 GB/s over NVLink and 59 GB/s over PCIe.
"""

# Traffic from other programs above this share of a link's limit makes the link's counters unreliable.
FOREIGN_SHARE = 0.1
_LEAST_HELD_BYTES = 2**30  # The CUDA context of a process occupies about 500 MiB even without data.
_BUSY_PERCENT = 50  # A GPU this busy while the job is idle runs another program.


Number = TypeVar("Number", int, float)


class LinkRates(Struct, frozen=True):
    """Bandwidth of a GPU's NVLinks together and of its PCIe link, in GB/s. None if it was not counted."""

    nvlink_sent: float | None = None
    nvlink_received: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None

    def combine(self, later: "LinkRates") -> "LinkRates":
        """Return the higher bandwidth for each link and direction."""
        return LinkRates(*map(_greater, astuple(self), astuple(later)))


class GpuUse(Struct, frozen=True, kw_only=True):
    """Use of a GPU by other programs.

    - `utilization_percent`: share of time in which the GPU was busy
    - `users`: the processes of other programs
    - `held_bytes`: GPU memory that was in use before this job started
    """

    utilization_percent: int | None = None
    users: tuple[GpuProcess, ...] = ()
    held_bytes: int | None = None

    def combine(self, later: "GpuUse") -> "GpuUse":
        """Combine two readings: the higher utilization, and the processes of both."""
        return GpuUse(
            utilization_percent=_greater(self.utilization_percent, later.utilization_percent),
            users=tuple({user.pid: user for user in (*self.users, *later.users)}.values()),
            held_bytes=later.held_bytes if self.held_bytes is None else self.held_bytes,
        )

    @property
    def is_busy(self) -> bool:
        return (self.utilization_percent or 0) >= _BUSY_PERCENT


class IdleGpu(Struct, frozen=True, kw_only=True):
    """Traffic and other users of a GPU while this job was idle. None is unknown.

    `at_work` is the GPU's condition just before. `waited` is the share of time in which the rank waited for a CPU.
    """

    rates: LinkRates = field(default_factory=LinkRates)
    use: GpuUse = field(default_factory=GpuUse)
    at_work: GpuCondition | None = None
    waited: float | None = None

    def combine(self, later: "IdleGpu") -> "IdleGpu":
        """Combine two readings. For each value, keep the worse one."""
        return IdleGpu(
            rates=self.rates.combine(later.rates),
            use=self.use.combine(later.use),
            at_work=later.at_work or self.at_work,
            waited=_greater(self.waited, later.waited),
        )


def combine_idle_gpus(earlier: Sequence[IdleGpu], later: Sequence[IdleGpu]) -> tuple[IdleGpu, ...]:
    """Combine two readings for all GPUs of a job. One of the readings may be empty."""
    if not earlier or not later:
        return tuple(earlier or later)
    return tuple(one.combine(other) for one, other in zip(earlier, later, strict=True))


def exceeds_idle(gb_s: float | None) -> bool:
    return gb_s is not None and gb_s >= FOREIGN_GB_S


def describe_holders(use: GpuUse, words: Callable[[int], str]) -> str:
    """Describe the processes that occupy a GPU's memory, or return ''. `words` formats a number of bytes."""
    if use.held_bytes is not None and any(user.memory_bytes is None for user in use.users):
        return f"{', '.join(user.label for user in use.users)}: {words(use.held_bytes)}"
    named = [f"{user.label}: {words(user.memory_bytes)}" for user in use.users if user.memory_bytes]
    unseen = (use.held_bytes or 0) - sum(user.memory_bytes or 0 for user in use.users)
    if use.held_bytes is not None and unseen > _LEAST_HELD_BYTES:
        named.append(f"a process that is not visible here: {words(unseen)}")
    return ", ".join(named)


def _greater(one: Number | None, other: Number | None) -> Number | None:
    return max((value for value in (one, other) if value is not None), default=None)


LOOPBACK = "lo"  # NCCL uses sockets over this interface if it finds no faster path inside a node.

_Counter = Annotated[int, Meta(ge=0)]  # Byte counters of NVLinks and InfiniBand ports exceed 2**64


class _GpuState(Struct, frozen=True, kw_only=True):
    """Fields that a reading has in common with the rates between two readings.

    `utilization_percent` includes copies. `kernels_percent` counts only kernels, and is read only if the GPU sends data
    over PCIe. `lost` is the driver's message about a GPU that fell off the bus.
    """

    index: Count
    bus_id: str
    utilization_percent: Count | None = None
    kernels_percent: float | None = None
    clock_mhz: Count | None = None
    throttle_reasons: tuple[str, ...] | None = None
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


class GpuReading(_GpuState, frozen=True, kw_only=True):
    """The state of a GPU at one moment. None is unknown, and `unknown` has the reason by field.

    Byte counters count the payload of all NVLinks. Rates in GB/s are the driver's averages since the previous reading.

    Without driver averages, PCIe rates cover `pcie_sampled_seconds`, because PCIe's 32-bit counters overflow within 34
    ms. `errors` has error counters by name.
    """

    nvlink_sent_bytes: _Counter | None = None
    nvlink_received_bytes: _Counter | None = None
    nvlink_sent_gb_s: float | None = None
    nvlink_received_gb_s: float | None = None
    pcie_sent_gb_s: float | None = None
    pcie_received_gb_s: float | None = None
    pcie_sampled_seconds: Seconds | None = None
    errors: Mapping[str, _Counter] = field(default_factory=dict)


class NicReading(Struct, frozen=True, kw_only=True):
    """Bytes that a NIC port or the loopback interface has sent and received so far. Counters overflow at
    `counts_to`.
    """

    name: str
    rdma: bool
    sent_bytes: _Counter | None = None
    received_bytes: _Counter | None = None
    counts_to: Annotated[int, Meta(ge=1)] = 2**64
    active: bool | None = None
    errors: Mapping[str, _Counter] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


class TaskFacts(Struct, frozen=True, kw_only=True):
    """A process that uses GPUs, with the facts that this user may read from /proc.

    - `facts`: the facts of a rank; None if they could not be read, with the reason in `unread`
    - `together`: jobs of the process: 'torchrun 127.0.0.1:29500', 'Slurm 4711.0'; processes of one job share an entry
    - `communicators`: whether the process has an NCCL communicator; None if it was not checked
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
    """The state of a node at one moment. `seconds` is the time on a monotonic clock.

    `driver_silent` is the reason if the driver did not respond, so that GPUs are missing.
    """

    host: str
    seconds: Seconds
    gpus: tuple[GpuReading, ...] = ()
    nics: tuple[NicReading, ...] = ()
    tasks: tuple[TaskFacts, ...] = ()
    driver_silent: str | None = None


_NOT_BEFORE = "there is no earlier value"
_WENT_BACK = "the counter decreased, because it was reset or the driver was reloaded"
_NVLINK_MOST_GB_S = 4000.0  # Above NVLink 5, which carries 900 GB/s per GPU and direction
_PCIE_MOST_GB_S = 400.0  # Above PCIe 6 x16, which carries 121 GB/s per direction
_NIC_MOST_GB_S = 400.0


class GpuRates(_GpuState, frozen=True, kw_only=True):
    """Average bandwidth of a GPU's links over an interval in GB/s, and the GPU's state at its end. None is unknown.

    `errors_grown` has the increase of each error counter.
    """

    nvlink_sent: float | None = None
    nvlink_received: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None
    errors_grown: Mapping[str, int] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return f"GPU{self.index}"


class NicRates(Struct, frozen=True, kw_only=True):
    """Average bandwidth of an RDMA port or an Ethernet interface over an interval, in GB/s. None is unknown."""

    name: str
    rdma: bool
    active: bool | None = None
    sent: float | None = None
    received: float | None = None
    errors_grown: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


class NodeRates(Struct, frozen=True, kw_only=True):
    """The traffic of a node over an interval. `begin` and `end` are times on the node's monotonic clock in seconds."""

    host: str
    begin: float
    end: float
    gpus: tuple[GpuRates, ...] = ()
    nics: tuple[NicRates, ...] = ()
    tasks: tuple[TaskFacts, ...] = ()
    driver_silent: str | None = None


def compute_rates(before: NodeReading, after: NodeReading) -> NodeRates:
    """Compute the rates between two readings of one node. If only one reading has a value, its rate is unknown."""
    seconds = after.seconds - before.seconds
    gpus = {gpu.bus_id: gpu for gpu in before.gpus}
    nics = {nic.name: nic for nic in before.nics}
    return NodeRates(
        host=after.host,
        begin=before.seconds,
        end=after.seconds,
        gpus=tuple(_gpu_rates(gpus.get(gpu.bus_id), gpu, seconds) for gpu in after.gpus),
        nics=tuple(_nic_rates(nics.get(nic.name), nic, seconds) for nic in after.nics),
        tasks=after.tasks,
        driver_silent=after.driver_silent,
    )


def _gpu_rates(before: GpuReading | None, after: GpuReading, seconds: float) -> GpuRates:
    unknown = dict(after.unknown)
    if after.lost is not None:
        unknown = dict.fromkeys(("nvlink_sent", "nvlink_received", "pcie_sent", "pcie_received"), after.lost)
    found: dict[str, float | None] = {}
    for name in ("nvlink_sent", "nvlink_received"):
        found[name] = _driver_rate(name, after, _NVLINK_MOST_GB_S, unknown)
        if found[name] is None and name not in unknown:
            counts = [None if gpu is None else getattr(gpu, f"{name}_bytes") for gpu in (before, after)]
            found[name] = _rate(name, counts[0], counts[1], seconds, _NVLINK_MOST_GB_S, None, unknown)
    for name in ("pcie_sent", "pcie_received"):
        found[name] = _driver_rate(name, after, _PCIE_MOST_GB_S, unknown)
        if found[name] is None:
            unknown.setdefault(name, _NOT_BEFORE)
    state: dict[str, Any] = {name: getattr(after, name) for name in _GpuState.__struct_fields__}
    errors_grown = count_growth({} if before is None else before.errors, after.errors)
    return GpuRates(**state | found | {"unknown": unknown}, errors_grown=errors_grown)


def _driver_rate(name: str, reading: GpuReading, most_gb_s: float, unknown: dict[str, str]) -> float | None:
    rate: float | None = getattr(reading, f"{name}_gb_s")
    if rate is None or reading.lost is not None:
        return None
    if not 0 <= rate <= most_gb_s:
        unknown[name] = "the driver's rate is higher than the links allow"
        return None
    return rate


def _nic_rates(before: NicReading | None, after: NicReading, seconds: float) -> NicRates:
    unknown = dict(after.unknown)
    pairs = {
        name: (None if before is None else getattr(before, f"{name}_bytes"), getattr(after, f"{name}_bytes"))
        for name in ("sent", "received")
    }
    found = {
        name: _rate(name, *pair, seconds, _NIC_MOST_GB_S, after.counts_to, unknown) for name, pair in pairs.items()
    }
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
    """Compute a rate in GB/s from a counter that may overflow once, at `counts_to`.

    If the rate is unknown, return None and write the reason to `unknown`.
    """
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
        unknown[name] = "the counter increased by more than the links allow, so it was reset"
        return None
    return rate


def count_growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each error counter that has grown. Skip counters that were reset."""
    return {name: count - before[name] for name, count in after.items() if count > before.get(name, count)}


def sum_rates(values: Sequence[float | None]) -> float | None:
    """Return the sum of rates. None if any rate is unknown, because the unknown rate might be the largest."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
