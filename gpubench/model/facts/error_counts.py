"""Errors that devices of a node counted: which are worth a word, of one reading or of what came between two.

A counter that was read once does not tell when: drivers stay loaded for months, links train, cables are plugged, and
a bus is searched at boot. So a total counts only where it stands out from those of siblings, and is weak; growth during
a run shows a fault that is there now. Links correct errors by design (PCIe allows one bit in 10^12, which is one in two
seconds on a busy x16 of generation 5), so a few that were corrected are nothing either.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from gpubench.model.facts.pci_capabilities import PcieErrors
from gpubench.model.facts.rdma_port import RdmaPort
from gpubench.model.facts.snapshot import GpuFacts, Snapshot

ErrorCounts = Mapping[str, Mapping[str, int]]
"""By device, as people name it (a bridge by its bus id), and by counter."""

REPLAYS, MEMORY_ERRORS, CORRECTED = "PCIe replays", "uncorrectable memory errors", "correctable"
_OF_GPUS = (REPLAYS, MEMORY_ERRORS)
"""Counters of a GPU that are not its NVLinks'."""
_GRAVE = ("nonfatal", "fatal")
_ENUMERATION = "nonfatal.UnsupReq"
"""The error of a device that is asked for functions it does not have, as when the bus is searched at boot."""

PORT_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")

FEW_MEANWHILE = 10
"""Errors of a device that are nothing: corrected ones during a run, and before it those that stopped nothing."""

MOST_REPLAYS, MOST_CORRECTED, MOST_LINK_ERRORS, MOST_PORT_ERRORS = 100, 1000, 100, 10
"""Totals that are nothing, whatever siblings have: links that train and cables that are plugged leave them behind."""

_TIMES_SIBLINGS = 10
_SINCE_BOOT = "since boot, when is not known"


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a device that are worth a word.

    `meanwhile` is whether they came between two readings, `grave` whether any could not be corrected; `usual` is what
    siblings have, None where nothing is compared.
    """

    device: str
    counts: Mapping[str, int]
    meanwhile: bool
    grave: bool = False
    usual: float | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    @property
    def expected(self) -> str:
        """The usual count, in words."""
        if self.usual is not None:
            return f"few; its siblings have {self.usual:g}"
        return "none" if self.grave else f"no more than {FEW_MEANWHILE} while it is used"

    @property
    def seen(self) -> str:
        """In words: '5,000 PCIe replays since boot, when is not known'."""
        counted = ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count)
        return f"{counted} {'during this run' if self.meanwhile else _SINCE_BOOT}"


def error_counts(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    """All that devices of a node have counted, as far as it could be read."""
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
    """The growth of counters that two readings have; of a counter that began anew, all that it shows."""
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
    """Of GPUs that replay packets, and of devices on the way that had errors."""
    grown = snapshot.errors_grown
    for gpu in snapshot.gpus:
        if grown is None:
            others = [each.pcie_replays for each in snapshot.gpus if each is not gpu and each.pcie_replays is not None]
            yield from _standing_out(gpu.device, {REPLAYS: gpu.pcie_replays or 0}, others, MOST_REPLAYS)
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
    """Those of a device that were read once, without what searching the bus leaves behind."""
    harmless = errors.named.get(_ENUMERATION, 0)
    survived = max((errors.nonfatal or 0) - harmless, 0)
    if errors.fatal or survived > FEW_MEANWHILE or (errors.correctable or 0) >= MOST_CORRECTED:
        named = {name: count for name, count in errors.named.items() if name != _ENUMERATION}
        yield Errors(bus_id, named or _severities(errors), meanwhile=False, grave=bool(errors.fatal))


def nvlink_errors(snapshot: Snapshot) -> Iterator[Errors]:
    """Of GPUs whose NVLinks replayed, recovered or saw damaged data."""
    grown = snapshot.errors_grown
    totals = {gpu.device: _link_errors(gpu) for gpu in snapshot.gpus}
    for device, counts in totals.items():
        if grown is None:
            others = [sum(each.values()) for other, each in totals.items() if other != device and each]
            yield from _standing_out(device, counts, others, MOST_LINK_ERRORS)
        else:
            came = {name: count for name, count in grown.get(device, {}).items() if name not in _OF_GPUS}
            recovered = any(count and name.startswith("recovery ") for name, count in came.items())
            yield from _many(device, came, grave=recovered)


def port_errors(snapshot: Snapshot) -> Iterator[Errors]:
    """Of RDMA ports."""
    grown = snapshot.errors_grown
    totals = {port.nic: _port_errors(port) for port in snapshot.rdma_ports}
    for nic, counts in totals.items():
        if grown is None:
            others = [sum(each.values()) for other, each in totals.items() if other != nic]
            yield from _standing_out(nic, counts, others, MOST_PORT_ERRORS)
        else:
            came = {name: count for name, count in grown.get(nic, {}).items() if count}
            yield from _many(nic, came, grave="link_downed" in came)


def _many(device: str, counts: Mapping[str, int], *, grave: bool = False) -> Iterator[Errors]:
    """Errors during a run: grave ones, and corrected ones where they are more than a few."""
    if grave or sum(counts.values()) > FEW_MEANWHILE:
        yield Errors(device, counts, meanwhile=True, grave=grave)


def _standing_out(device: str, counts: Mapping[str, int], others: list[int], most: int) -> Iterator[Errors]:
    """Totals that are large, and far above those of siblings."""
    usual = median(others) if others else 0
    if sum(counts.values()) > max(most, _TIMES_SIBLINGS * usual):
        yield Errors(device, counts, meanwhile=False, usual=usual)


def _link_errors(gpu: GpuFacts) -> dict[str, int]:
    return {f"{name} on link {link.number}": count for link in gpu.nvlinks or () for name, count in link.errors.items()}


def _port_errors(port: RdmaPort) -> dict[str, int]:
    return {name: count for name, count in (port.counters or {}).items() if name in PORT_ERRORS}


def _severities(errors: PcieErrors) -> dict[str, int]:
    known = {CORRECTED: errors.correctable, "nonfatal": errors.nonfatal, "fatal": errors.fatal}
    return {name: count for name, count in known.items() if count is not None}
