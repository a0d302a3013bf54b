"""Judges the health of a node's devices: error counters, fabric registration, clocks under load, and hidden GPUs.

A counter that was read once has no rate, so only a large total raises doubt. Growth during a run is a current fault. A
few corrected errors are normal (PCIe allows one bit in 10^12).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, PcieErrors, RdmaPort, Snapshot
from gpubench.model.terms.ranks import GPUS_ARE_SPLIT

ErrorCounts = Mapping[str, Mapping[str, int]]  # By device, as people name it (a bridge by its bus id), and by counter
REPLAYS, MEMORY_ERRORS, CORRECTED = "PCIe replays", "uncorrectable memory errors", "correctable"
_OF_GPUS = (REPLAYS, MEMORY_ERRORS)  # Counters of a GPU that are not its NVLinks'
_GRAVE = ("nonfatal", "fatal")
_ENUMERATION = "nonfatal.UnsupReq"  # Asked for functions it does not have, as at boot
PORT_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")

FEW_MEANWHILE = 10  # Errors that are nothing: corrected ones in a run, earlier ones that stopped nothing
MOST_ERRORS = 1000  # A total without a rate: links that train and a replaced cable leave hundreds behind
MOST_ERRORS_OF_ALL = 100_000  # The same on all siblings: 11 per hour if they were counted during a whole year
_TIMES_SIBLINGS = 10
_SINCE_BOOT = "since boot, when is not known"


class Errors(Struct, frozen=True):
    """Errors of a device: `meanwhile` between two readings, `grave` if uncorrected, `usual` on siblings."""

    device: str
    counts: Mapping[str, int]
    meanwhile: bool
    grave: bool = False
    usual: float | None = None

    @property
    def total(self) -> int:
        """The total of all counters."""
        return sum(self.counts.values())

    @property
    def expected(self) -> str:
        """The usual count as text."""
        if self.usual is not None:
            return f"few; its siblings have {self.usual:g}"
        if not self.meanwhile and not self.grave:
            return f"fewer than {MOST_ERRORS:,}"
        return "none" if self.grave else f"no more than {FEW_MEANWHILE} while it is used"

    @property
    def seen(self) -> str:
        """The errors as text: '5,000 PCIe replays since boot, when is not known'."""
        counted = ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count)
        return f"{counted} {'during this run' if self.meanwhile else _SINCE_BOOT}"


def error_counts(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    """Return all readable error counters of a node's devices."""
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
    """Return the growth of counters that both readings have. A counter that restarted counts fully."""
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
    """Yield errors of GPUs that replayed packets, and of other devices on their paths."""
    grown = snapshot.errors_grown
    for gpu in snapshot.gpus:
        if grown is None:
            others = [each.pcie_replays for each in snapshot.gpus if each is not gpu and each.pcie_replays is not None]
            yield from _standing_out(gpu.device, {REPLAYS: gpu.pcie_replays or 0}, others)
        else:
            yield from _many(gpu.device, {REPLAYS: grown.get(gpu.device, {}).get(REPLAYS, 0)})
    for device in snapshot.pci_devices:
        if grown is not None:
            counts = grown.get(device.bus_id, {})
            grave = {name: counts[name] for name in _GRAVE if counts.get(name)}
            yield from _many(device.bus_id, grave or {CORRECTED: counts.get(CORRECTED, 0)}, grave=bool(grave))
        elif device.errors is not None:
            yield from _counted_once(device.bus_id, device.errors)


def _counted_once(bus_id: str, errors: PcieErrors) -> Iterator[Errors]:
    """Yield errors of a device that was read once, without those that bus enumeration causes."""
    harmless = errors.named.get(_ENUMERATION, 0)
    survived = max((errors.nonfatal or 0) - harmless, 0)
    if errors.fatal or survived > FEW_MEANWHILE or (errors.correctable or 0) >= MOST_ERRORS:
        named = {name: count for name, count in errors.named.items() if name != _ENUMERATION}
        yield Errors(bus_id, named or _severities(errors), meanwhile=False, grave=bool(errors.fatal))


def nvlink_errors(snapshot: Snapshot) -> Iterator[Errors]:
    """Yield errors of GPUs whose NVLinks replayed, recovered or received damaged data."""
    grown = snapshot.errors_grown
    totals = {gpu.device: _link_errors(gpu) for gpu in snapshot.gpus}
    for device, counts in totals.items():
        if grown is None:
            others = [sum(each.values()) for other, each in totals.items() if other != device and each]
            yield from _standing_out(device, counts, others)
        else:
            came = {name: count for name, count in grown.get(device, {}).items() if name not in _OF_GPUS}
            recovered = any(count and name.startswith("recovery ") for name, count in came.items())
            yield from _many(device, came, grave=recovered)


def port_errors(snapshot: Snapshot) -> Iterator[Errors]:
    """Yield errors of RDMA ports."""
    grown = snapshot.errors_grown
    totals = {port.nic: _port_errors(port) for port in snapshot.rdma_ports}
    for nic, counts in totals.items():
        if grown is None:
            others = [sum(each.values()) for other, each in totals.items() if other != nic]
            yield from _standing_out(nic, counts, others)
        else:
            came = {name: count for name, count in grown.get(nic, {}).items() if count}
            yield from _many(nic, came, grave="link_downed" in came)


def _many(device: str, counts: Mapping[str, int], *, grave: bool = False) -> Iterator[Errors]:
    if grave or sum(counts.values()) > FEW_MEANWHILE:
        yield Errors(device, counts, meanwhile=True, grave=grave)


def _standing_out(device: str, counts: Mapping[str, int], others: list[int]) -> Iterator[Errors]:
    usual, total = median(others) if others else 0, sum(counts.values())
    if total >= min(max(MOST_ERRORS, _TIMES_SIBLINGS * usual), MOST_ERRORS_OF_ALL):
        yield Errors(device, counts, meanwhile=False, usual=None if total < _TIMES_SIBLINGS * usual else usual)


def _link_errors(gpu: GpuFacts) -> dict[str, int]:
    return {f"{name} on link {link.number}": count for link in gpu.nvlinks or () for name, count in link.errors.items()}


def _port_errors(port: RdmaPort) -> dict[str, int]:
    return {name: count for name, count in (port.counters or {}).items() if name in PORT_ERRORS}


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
_GOOD_WHEN_TRUE = ("partition_missing", "fabric_manager_disconnected")


def decode_health(mask: int) -> dict[str, bool | None]:
    """Decode a fabric's health mask into bad conditions: true, false, or None if not reported.

    Fields have two bits: 1 true, 2 false. Good conditions are inverted here (`NVML_GPU_FABRIC_HEALTH_MASK_*` in
    nvml.h).
    """
    conditions: dict[str, bool | None] = {}
    for name, shift in _CONDITION_SHIFTS.items():
        value = {1: True, 2: False}.get(mask >> shift & 3)
        conditions[name] = not value if name in _GOOD_WHEN_TRUE and value is not None else value
    configuration = mask >> _CONFIGURATION_SHIFT & 0xF
    conditions["incorrect_configuration"] = None if configuration == 0 else configuration != 1
    return conditions


def describe_health(mask: int) -> str:
    """Describe a health mask: 'healthy', 'not reported', or the bad conditions."""
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
    """A reading of a busy GPU. None is unknown."""

    clock_mhz: int | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()


def mean_load(readings: Sequence[GpuLoad]) -> GpuLoad:
    """Combine readings of one GPU: means, and every throttle reason."""
    clocks = [reading.clock_mhz for reading in readings if reading.clock_mhz is not None]
    powers = [reading.power_w for reading in readings if reading.power_w is not None]
    return GpuLoad(
        clock_mhz=round(fmean(clocks)) if clocks else None,
        power_w=fmean(powers) if powers else None,
        throttle_reasons=tuple(dict.fromkeys(reason for reading in readings for reason in reading.throttle_reasons)),
    )


def job_load(loads: Sequence[GpuLoad]) -> GpuLoad:
    """Combine the GPUs of a job: the slowest clock, the mean power, and every throttle reason."""
    clocks = [load.clock_mhz for load in loads if load.clock_mhz is not None]
    together = mean_load(loads)
    return GpuLoad(min(clocks, default=None), together.power_w, together.throttle_reasons)


HIDDEN = "CUDA_VISIBLE_DEVICES hides it"  # Of a GPU of the driver's, or a pair with it
HIDDEN_GPUS = "hidden_gpus"  # Metadata: how many GPUs were hidden from the run, and so not judged


def drop_hidden(node: Snapshot, processes: Sequence[RankFacts]) -> Snapshot:
    """Remove GPUs that no process names, and count them as other users' GPUs."""
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
    """True if every entry of each process's setting names a GPU of the node, so the number was intended."""
    settings = [process.visible_devices for process in processes]
    return bool(settings) and all(
        setting is not None
        and all(any(_is_named(gpu, entry.strip()) for gpu in node.gpus) for entry in setting.split(","))
        for setting in settings
    )


def _named(node: Snapshot, setting: str | None) -> Iterator[str]:
    """Yield the GPUs in a setting up to the first entry that CUDA does not know, or all without a setting."""
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
    """Return why GPUs are not compared with whole GPUs, if MIG splits any of them, or ''."""
    return GPUS_ARE_SPLIT if any(gpu is not None and gpu.mig for gpu in gpus) else ""
