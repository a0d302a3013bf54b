"""Judge the health of a node's devices: error counters, fabric registration, clocks under load, and hidden GPUs.

A counter that was read only once has no rate, so only a large total is suspicious. If it grows during a run, the fault
is current. A few corrected errors are normal, because PCIe allows one wrong bit in 10^12.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, PcieErrors, RdmaPort, Snapshot
from gpubench.model.terms.ranks import GPUS_ARE_SPLIT

# Error counts by device name (bus id for a bridge), then by the name of the counter
ErrorCounts = Mapping[str, Mapping[str, int]]
REPLAYS, MEMORY_ERRORS, CORRECTED = "PCIe replays", "uncorrectable memory errors", "correctable"
# While the kernel enumerates the PCI bus at boot, it addresses functions that do not exist.
_ENUMERATION = "nonfatal.UnsupReq"
_PORT_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")

_FEW_ERRORS = 10  # Ignore up to this many corrected errors during a run, or non-fatal errors before it.
_MOST_ERRORS = 1000  # Link training and cable replacements leave hundreds of errors.
# Report this many errors even if sibling devices have as many. It is 11 errors per hour for a year.
_MOST_ERRORS_OF_SIBLINGS = 100_000
_TIMES_SIBLINGS = 10


class Errors(Struct, frozen=True):
    """The errors of one device.

    - `meanwhile`: the errors occurred between two readings, during this run
    - `grave`: the errors were not corrected
    - `usual`: the error count of sibling devices
    """

    device: str
    counts: Mapping[str, int]
    meanwhile: bool
    grave: bool = False
    usual: float | None = None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def expected(self) -> str:
        if self.usual is not None:
            return f"few (its siblings have {self.usual:g})"
        if not self.meanwhile and not self.grave:
            return f"fewer than {_MOST_ERRORS:,}"
        return "none" if self.grave else f"at most {_FEW_ERRORS} during use"

    @property
    def seen(self) -> str:
        """The errors as text: '5,000 PCIe replays since boot, when is not known'."""
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count)
        return f"{counts} {'during this run' if self.meanwhile else 'since boot, at unknown times'}"


def error_counts(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for gpu in snapshot.gpus:
        known = {REPLAYS: gpu.pcie_replays, MEMORY_ERRORS: gpu.memory_errors}
        found[gpu.device] = {name: count for name, count in known.items() if count is not None} | _link_errors(gpu)
    for device in snapshot.pci_devices:
        if device.errors is not None:
            found[device.bus_id] = _severities(device.errors)
    for port in snapshot.rdma_ports:
        found[port.nic] = _port_errors(port)
    return found


def growth(before: ErrorCounts, after: ErrorCounts) -> dict[str, dict[str, int]]:
    """Return the increase of counters that both readings have. If a counter was reset, return its new value."""
    return {
        device: {
            name: count - earlier[name] if count >= earlier[name] else count
            for name, count in counts.items()
            if name in earlier
        }
        for device, counts in after.items()
        if (earlier := before.get(device)) is not None
    }


def pcie_errors(snapshot: Snapshot) -> Iterator[Errors]:
    """Yield PCIe replays of GPUs, and PCIe errors of other devices on their paths."""
    grown = snapshot.errors_grown
    for gpu in snapshot.gpus:
        if grown is None:
            siblings = [other.pcie_replays for other in snapshot.gpus if other is not gpu]
            known = [count for count in siblings if count is not None]
            yield from _compare_totals(gpu.device, {REPLAYS: gpu.pcie_replays or 0}, known)
        else:
            yield from _judge_growth(gpu.device, {REPLAYS: grown.get(gpu.device, {}).get(REPLAYS, 0)})
    for device in snapshot.pci_devices:
        if grown is not None:
            counts = grown.get(device.bus_id, {})
            grave = {name: counts[name] for name in ("nonfatal", "fatal") if counts.get(name)}
            yield from _judge_growth(device.bus_id, grave or {CORRECTED: counts.get(CORRECTED, 0)}, grave=bool(grave))
        elif (errors := device.errors) is not None:
            survived = (errors.nonfatal or 0) - errors.named.get(_ENUMERATION, 0)
            if errors.fatal or survived > _FEW_ERRORS or (errors.correctable or 0) >= _MOST_ERRORS:
                named = {name: count for name, count in errors.named.items() if name != _ENUMERATION}
                yield Errors(device.bus_id, named or _severities(errors), meanwhile=False, grave=bool(errors.fatal))


def nvlink_errors(snapshot: Snapshot) -> Iterator[Errors]:
    """Yield errors of GPUs whose NVLinks replayed packets, recovered, or received damaged data."""
    grown = snapshot.errors_grown
    totals = {gpu.device: _link_errors(gpu) for gpu in snapshot.gpus}
    for device, counts in totals.items():
        if grown is None:
            siblings = [sum(others.values()) for other, others in totals.items() if other != device and others]
            yield from _compare_totals(device, counts, siblings)
        else:
            new = {name: count for name, count in grown.get(device, {}).items() if name not in (REPLAYS, MEMORY_ERRORS)}
            recovered = any(count and name.startswith("recovery ") for name, count in new.items())
            yield from _judge_growth(device, new, grave=recovered)


def port_errors(snapshot: Snapshot) -> Iterator[Errors]:
    """Yield the errors of RDMA ports."""
    grown = snapshot.errors_grown
    totals = {port.nic: _port_errors(port) for port in snapshot.rdma_ports}
    for nic, counts in totals.items():
        if grown is None:
            siblings = [sum(others.values()) for other, others in totals.items() if other != nic]
            yield from _compare_totals(nic, counts, siblings)
        else:
            new = {name: count for name, count in grown.get(nic, {}).items() if count}
            yield from _judge_growth(nic, new, grave="link_downed" in new)


def _judge_growth(device: str, counts: Mapping[str, int], *, grave: bool = False) -> Iterator[Errors]:
    if grave or sum(counts.values()) > _FEW_ERRORS:
        yield Errors(device, counts, meanwhile=True, grave=grave)


def _compare_totals(device: str, counts: Mapping[str, int], siblings: list[int]) -> Iterator[Errors]:
    usual, total = median(siblings) if siblings else 0, sum(counts.values())
    if total >= min(max(_MOST_ERRORS, _TIMES_SIBLINGS * usual), _MOST_ERRORS_OF_SIBLINGS):
        yield Errors(device, counts, meanwhile=False, usual=None if total < _TIMES_SIBLINGS * usual else usual)


def _link_errors(gpu: GpuFacts) -> dict[str, int]:
    return {f"{name} on link {link.number}": count for link in gpu.nvlinks or () for name, count in link.errors.items()}


def _port_errors(port: RdmaPort) -> dict[str, int]:
    return {name: count for name, count in (port.counters or {}).items() if name in _PORT_ERRORS}


def _severities(errors: PcieErrors) -> dict[str, int]:
    known = {CORRECTED: errors.correctable, "nonfatal": errors.nonfatal, "fatal": errors.fatal}
    return {name: count for name, count in known.items() if count is not None}


_CONDITION_SHIFTS = {
    "degraded_bandwidth": 0,
    "route_recovery": 2,
    "route_unhealthy": 4,
    "access_timeout_recovery": 6,
    "partition_missing": 12,
    "fabric_manager_disconnected": 14,
}
_CONFIGURATION_SHIFT = 8
_CONFIGURATIONS = {
    2: "incorrect system GUID",
    3: "incorrect chassis serial number",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "GPU state invalid",
}
HEALTH_CONDITIONS = (*_CONDITION_SHIFTS, "incorrect_configuration")


def decode_health(mask: int) -> dict[str, bool | None]:
    """Decode the health mask of an NVLink fabric. Each condition is true if it is bad, and None if it is not
    reported.

    Each field has two bits: 1 is true, 2 is false (`NVML_GPU_FABRIC_HEALTH_MASK_*` in nvml.h).
    """
    conditions: dict[str, bool | None] = {}
    for name, shift in _CONDITION_SHIFTS.items():
        value = {1: True, 2: False}.get(mask >> shift & 3)
        # These two fields are true on a healthy GPU.
        inverted = name in ("partition_missing", "fabric_manager_disconnected") and value is not None
        conditions[name] = not value if inverted else value
    configuration = mask >> _CONFIGURATION_SHIFT & 0xF
    conditions["incorrect_configuration"] = None if configuration == 0 else configuration != 1
    return conditions


def describe_health(mask: int) -> str:
    """Describe a health mask: 'healthy', 'not reported', or the names of the bad conditions."""
    conditions = decode_health(mask)
    configuration = _CONFIGURATIONS.get(mask >> _CONFIGURATION_SHIFT & 0xF)
    bad = [
        name.replace("_", " ") + (f" ({configuration})" if name == "incorrect_configuration" and configuration else "")
        for name, holds in conditions.items()
        if holds
    ]
    if bad:
        return ", ".join(bad)
    return "not reported" if all(holds is None for holds in conditions.values()) else "healthy"


class GpuLoad(Struct, frozen=True):
    """Clock, power and throttle reasons of a busy GPU. None is unknown."""

    clock_mhz: int | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()


def mean_load(readings: Sequence[GpuLoad]) -> GpuLoad:
    """Combine readings of one GPU: the mean clock and power, and all throttle reasons."""
    clocks = [reading.clock_mhz for reading in readings if reading.clock_mhz is not None]
    powers = [reading.power_w for reading in readings if reading.power_w is not None]
    return GpuLoad(
        clock_mhz=round(fmean(clocks)) if clocks else None,
        power_w=fmean(powers) if powers else None,
        throttle_reasons=tuple(dict.fromkeys(reason for reading in readings for reason in reading.throttle_reasons)),
    )


def job_load(loads: Sequence[GpuLoad]) -> GpuLoad:
    """Combine the GPUs of a job: the lowest clock, the mean power, and all throttle reasons."""
    clocks = [load.clock_mhz for load in loads if load.clock_mhz is not None]
    together = mean_load(loads)
    return GpuLoad(min(clocks, default=None), together.power_w, together.throttle_reasons)


HIDDEN = "CUDA_VISIBLE_DEVICES hides it"
HIDDEN_GPUS = "hidden_gpus"  # Metadata key for the number of GPUs that CUDA_VISIBLE_DEVICES hides. They are not judged.


def drop_hidden(node: Snapshot, processes: Sequence[RankFacts]) -> Snapshot:
    """Remove GPUs that CUDA_VISIBLE_DEVICES hides from all processes. Count them as GPUs of other users."""
    hidden = {gpu.device for gpu in node.gpus if gpu.unknown.get("cuda_index") == HIDDEN}
    settings = {process.visible_devices for process in processes}
    if len(settings) > 1:
        hidden -= {device for setting in settings for device in _named(node, setting)}
    if not hidden:
        return node
    return replace(
        node,
        gpus=tuple(gpu for gpu in node.gpus if gpu.device not in hidden),
        gpus_of_others=node.gpus_of_others + len(hidden),
        pairs=tuple(pair for pair in node.pairs if hidden.isdisjoint((pair.source, pair.destination))),
    )


def name_every_gpu(node: Snapshot, processes: Sequence[RankFacts]) -> bool:
    """True if all processes have CUDA_VISIBLE_DEVICES, and each of its entries is a GPU of this node.

    In this case the user chose the number of GPUs on purpose.
    """
    settings = [process.visible_devices for process in processes]
    return bool(settings) and all(
        setting is not None
        and all(any(_is_named(gpu, entry.strip()) for gpu in node.gpus) for entry in setting.split(","))
        for setting in settings
    )


def _named(node: Snapshot, setting: str | None) -> Iterator[str]:
    """Yield the GPUs that CUDA_VISIBLE_DEVICES lists before its first unknown entry. Yield all GPUs if it is unset."""
    everything = [gpu.device for gpu in node.gpus]
    if setting is None or "MIG-" in setting or ("GPU-" in setting and not all(gpu.uuid for gpu in node.gpus)):
        yield from everything
        return
    for entry in map(str.strip, setting.split(",")):
        known = [gpu.device for gpu in node.gpus if _is_named(gpu, entry)]
        if len(known) != 1:
            return
        yield from known


def _is_named(gpu: GpuFacts, entry: str) -> bool:
    if entry.startswith("GPU-"):
        return (gpu.uuid or "").startswith(entry)
    return entry.isdecimal() and int(entry) == gpu.index


def describe_mig_split(gpus: Iterable[GpuFacts | None]) -> str:
    """Return the reason why speeds cannot be compared if MIG splits any of these GPUs. '' without MIG."""
    return GPUS_ARE_SPLIT if any(gpu is not None and gpu.mig for gpu in gpus) else ""
