"""Rates between two readings of a node: what went around, began anew or is not counted is unknown, and never 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.traffic import GpuReading, NicReading, NodeReading, TaskFacts
from gpubench.model.terms.units import BYTES_PER_GB

_NOT_BEFORE = "nothing was read before"
_WENT_BACK = "the counter went back: it was reset, or the driver was loaded again"
_TOO_MUCH = "the counter jumped by more than the links carry: it was reset"
_NVLINK_MOST_GB_S = 4000.0
"""More than the NVLinks of any GPU carry in one direction: NVLink 5 has 900 GB/s."""

_PCIE_MOST_GB_S = 400.0
"""More than the PCIe link of any GPU carries in one direction: PCIe 6 x16 has 121 GB/s."""

_NIC_MOST_GB_S = 400.0
_NO_RATE = "the driver's rate is none that links carry"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """GB/s that the links of a GPU carried over an interval; None is unknown, and `unknown` says why, by field.

    `errors_grown` are counters that went up in it; `lost` is what the driver says of a GPU that fell off the bus.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NicRates:
    """GB/s that a port carried over an interval, of RDMA or of an Ethernet interface; None is unknown."""

    name: str
    rdma: bool
    active: bool | None = None
    sent: float | None = None
    received: float | None = None
    errors_grown: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """A node over an interval: from `begin` to `end`, in seconds of its clock."""

    host: str
    begin: float
    end: float
    gpus: tuple[GpuRates, ...] = ()
    nics: tuple[NicRates, ...] = ()
    tasks: tuple[TaskFacts, ...] = ()
    driver_silent: str | None = None


def rates(before: NodeReading, after: NodeReading) -> NodeRates:
    """The rates between two readings of one node. What only one of them has is unknown."""
    seconds = after.seconds - before.seconds
    gpus = {each.bus_id: each for each in before.gpus}
    nics = {each.name: each for each in before.nics}
    return NodeRates(
        host=after.host,
        begin=before.seconds,
        end=after.seconds,
        gpus=tuple(_gpu(gpus.get(each.bus_id), each, seconds) for each in after.gpus),
        nics=tuple(_nic(nics.get(each.name), each, seconds) for each in after.nics),
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
        found[name] = _of_driver(name, after, _NVLINK_MOST_GB_S, unknown)
        if found[name] is None and name not in unknown:
            found[name] = _rate(name, counts[0], counts[1], seconds, _NVLINK_MOST_GB_S, None, unknown)
    for name in ("pcie_sent", "pcie_received"):
        found[name] = _of_driver(name, after, _PCIE_MOST_GB_S, unknown)
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
        errors_grown=grown({} if before is None else before.errors, after.errors),
        processes=after.processes,
        lost=after.lost,
        unknown=unknown,
    )


def _of_driver(name: str, reading: GpuReading, most_gb_s: float, unknown: dict[str, str]) -> float | None:
    """The driver's average; None where it gives none, or one that no link carries, and of a GPU that is lost."""
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
        errors_grown=grown({} if before is None else before.errors, after.errors),
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
    """GB/s by a counter; None, with the reason noted, where that cannot be told.

    A counter with a known end that went back went around once where that is fewer bytes than the links carry.
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
        unknown[name] = _TOO_MUCH
        return None
    return rate


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The counters of errors that went up, by how much; one that began anew shows nothing."""
    return {name: count - before[name] for name, count in after.items() if count > before.get(name, count)}


def total(values: Sequence[float | None]) -> float | None:
    """The sum of rates; None where any of them is unknown, which might be the largest."""
    known = [each for each in values if each is not None]
    return sum(known) if len(known) == len(values) else None
