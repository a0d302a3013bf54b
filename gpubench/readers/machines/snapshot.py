"""Reads, checks and writes snapshots, which are the JSON files for `--record`, `--replay` and `--from`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpubench.errors import UPGRADE, UsageError
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import SNAPSHOT_VERSION, Snapshot
from gpubench.model.paths.topology import PATH_CLASSES, PCIE, SELF, XGMI
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits
from gpubench.readers.documents import check_printable, load_json

_DEVICES = ("gpus", "nics", "switches")
_NAMES = ("name", "bus_id", "model", "place")  # Device fields that reports print unchanged
# Sections whose texts can appear in the cause of a finding
_SAID = ("pci_devices", "rdma_ports", "kernel", "driver_settings")
_SAID_OF_RANKS = ("nccl_files", "topology_file", "container", "loadable", "verbs_providers", "mpi", "unknown")

_MAY_BE_UNKNOWN = (".numa_node", ".iommu_group")
_NVLINK_PATH = re.compile(r"NV\d{1,3}", re.ASCII)

_MOST = {
    "gpus": "MOST_GPUS",
    "nics": "MOST_NICS",
    "switches": "MOST_SWITCHES",
    "pci_devices": "MOST_PCI_DEVICES",
    "rdma_ports": "MOST_NICS",
    "pairs": "MOST_MACHINE_PAIRS",
}
"""Names of constants in `limits` that limit the number of entries in each field."""


def _check_snapshot(snapshot: Snapshot) -> None:
    """Raise UsageError if a snapshot contradicts itself or cannot describe a machine.

    Examples are duplicate or unprintable names, unknown path classes, and more devices than a node can have.
    """
    for name, limit in _MOST.items():
        count, most = len(getattr(snapshot, name)), getattr(limits, limit)
        if count > most:
            raise UsageError(f"snapshot.{name} has {count} entries", expected=f"one node, with at most {most} {name}")
    check_printable(snapshot.host, "snapshot.host")
    for field in _DEVICES:
        names = [
            {name: to_plain(getattr(device, name, None)) for name in _NAMES} for device in getattr(snapshot, field)
        ]
        check_printable(names, f"snapshot.{field}")
    for field in _SAID:
        check_printable(to_plain(getattr(snapshot, field)), f"snapshot.{field}")
    _check_numbers(to_plain(snapshot), "snapshot")
    _check_bridges(snapshot)
    for field in ("bus_id", "uuid"):
        _check_unique("gpus", [value for gpu in snapshot.gpus if (value := getattr(gpu, field))], set())
    _check_unique("gpus", [gpu.device for gpu in snapshot.gpus], set())
    _check_unique("nics", [nic.device for nic in snapshot.nics], {gpu.device for gpu in snapshot.gpus})
    for field in _DEVICES:
        for number, device in enumerate(getattr(snapshot, field)):
            if len(above := device.place.switches) > limits.MOST_SWITCHES_ABOVE:
                where = f"snapshot.{field}[{number}].place.switches"
                raise UsageError(f"{where} has {len(above)} entries", expected=f"at most {limits.MOST_SWITCHES_ABOVE}")
    _check_gpus(snapshot)
    _check_paths(snapshot)


def check_rank(rank: RankFacts, where: str) -> None:
    """Raise UsageError for unprintable texts in the facts about a rank. `where` is its place in error messages."""
    for field in _SAID_OF_RANKS:
        check_printable(to_plain(getattr(rank, field)), f"{where}: {field}")


_MOST_LINK_GB_S = 200.0  # More than any NVLink has per direction. NVLink 5 has a line rate of 53 GB/s


def _check_gpus(snapshot: Snapshot) -> None:
    usual: dict[tuple[str, str], tuple[int, str | None]] = {}
    for number, gpu in enumerate(snapshot.gpus):
        where, links = f"snapshot.gpus[{number}]", gpu.nvlinks or ()
        _check_unique(f"gpus[{number}].nvlinks", [f"link {link.number}" for link in links], set())
        for link in links:
            if link.raw_gb_s is not None and not 0 < link.raw_gb_s <= _MOST_LINK_GB_S:
                seen = f"{where}.nvlinks: link {link.number} has {link.raw_gb_s:g} GB/s"
                raise UsageError(seen, expected=f"above 0 and at most {_MOST_LINK_GB_S:g}")
        for name, value, most in (
            ("pcie.width", gpu.pcie.width, gpu.pcie.max_width),
            ("pcie.generation", gpu.pcie.generation, gpu.pcie.max_generation),
            ("memory_used_bytes", gpu.memory_used_bytes, gpu.memory_bytes),
        ):
            if value is not None and most is not None and value > most:
                raise UsageError(f"{where}.{name} is {value}", expected=f"at most {most}, as for the same GPU")
        versions = ", ".join(sorted({link.version for link in links if link.version is not None})) or None
        for name, own in (("compute_capability", gpu.compute_capability), ("nvlinks.version", versions)):
            first, other = usual.setdefault((gpu.name or "", name), (number, own)) if own is not None else (number, own)
            if gpu.name is not None and own != other:
                said = f"{where}.{name} is {own}, and that of snapshot.gpus[{first}] {other}"
                raise UsageError(said, expected=f"the same: both are {gpu.name}")


def _check_paths(snapshot: Snapshot) -> None:
    devices = {gpu.device for gpu in snapshot.gpus} | {nic.device for nic in snapshot.nics}
    ends = [f"{pair.source} → {pair.destination}" for pair in snapshot.pairs]
    _check_unique("pairs", ends, set())
    for number, pair in enumerate(snapshot.pairs):
        where = f"snapshot.pairs[{number}]"
        for end in (pair.source, pair.destination):
            if end not in devices:
                raise UsageError(f"{where} is of {end!a}, which does not exist", expected="a device of gpus or nics")
        if pair.source == pair.destination and pair.path != SELF:
            raise UsageError(f"{where} has only {pair.source}", expected="two devices")
        if pair.path is not None and not (
            pair.path in (*PATH_CLASSES, XGMI, PCIE, SELF) or _NVLINK_PATH.fullmatch(pair.path)
        ):
            raise UsageError(f"{where}.path is {pair.path!a}", expected=f"NV18, {', '.join(PATH_CLASSES)} or {SELF}")
        if pair.pcie_path is not None and pair.pcie_path not in PATH_CLASSES:
            raise UsageError(f"{where}.pcie_path is {pair.pcie_path!a}", expected=f"one of {', '.join(PATH_CLASSES)}")


def _check_numbers(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for name, held in value.items():
            _check_numbers(held, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for number, held in enumerate(value):
            _check_numbers(held, f"{where}[{number}]")
    elif isinstance(value, int | float) and value < (-1 if where.endswith(_MAY_BE_UNKNOWN) else 0):
        raise UsageError(f"{where} is {value}", expected="0 or more")


def _check_bridges(snapshot: Snapshot) -> None:
    above = {device.bus_id: device.above for device in snapshot.pci_devices}
    _check_unique("pci_devices", [device.bus_id for device in snapshot.pci_devices], set())
    for number, device in enumerate(snapshot.pci_devices):
        where, bridge, hops = f"snapshot.pci_devices[{number}].above", device.above, 0
        while bridge is not None:
            if bridge not in above:
                raise UsageError(
                    f"{where} points to {bridge}, which does not exist", expected="a device of pci_devices"
                )
            bridge, hops = above[bridge], hops + 1
            if hops > limits.MOST_BRIDGES_ABOVE:
                most = f"at most {limits.MOST_BRIDGES_ABOVE} bridges to the CPU"
                raise UsageError(f"{where} has no end", expected=most)


def _check_unique(field: str, names: Sequence[str], others: set[str]) -> None:
    taken = set(others)
    for number, name in enumerate(names):
        if name in taken:
            raise UsageError(f"snapshot.{field}[{number}] is a second {name}", expected="a unique name")
        taken.add(name)


_EXPECTED = "a snapshot that gpubench recorded"
_NEXT_STEP = "record it again: gpubench topo --record DIRECTORY"
_WIDTH = 160


def recognises(text: str) -> bool:
    """Return True if a text starts like a JSON object."""
    return text.lstrip("\ufeff \t\r\n").startswith("{")


def read(text: str, name: str) -> Snapshot:
    """Read a snapshot from the text of the file `name`. If its origin is 'measured', change it to 'recorded'.

    Raises UsageError for invalid JSON (with line and column), an invalid field, or a snapshot from a newer gpubench.
    """
    document = _parsed(text.lstrip("\ufeff"), name)
    _check_version(document, name)
    try:
        snapshot = from_plain(Snapshot, document, "snapshot")
        _check_snapshot(snapshot)
    except UsageError as error:
        raise _refused(
            f"{name}: {error.seen}",
            expected=error.expected or _EXPECTED,
            reason=error.reason or "it was edited by hand, or it is another program's JSON",
        ) from None
    return replace(snapshot, origin=Origin.RECORDED) if snapshot.origin is Origin.MEASURED else snapshot


def write_snapshot(snapshot: Snapshot) -> str:
    """Convert a snapshot to JSON that is easy to read and to diff, with one GPU, NIC or pair per line."""
    document = {"schema_version": snapshot.schema_version} | to_plain(snapshot)
    entries = []
    for key, value in document.items():
        has_records = isinstance(value, list) and any(isinstance(item, dict) for item in value)
        rendered = _one_a_line(value, indent=2) if has_records else _rendered(value, indent=2)
        entries.append(f"  {json.dumps(key)}: {rendered}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _rendered(value: Any, *, indent: int) -> str:
    line = json.dumps(value, allow_nan=False)
    if indent + len(line) <= _WIDTH or not value:
        return line
    if isinstance(value, list):
        return _one_a_line(value, indent=indent)
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(key)}: {_rendered(held, indent=indent)}" for key, held in value.items()) + "}"
        )
    return line


def _one_a_line(values: list[Any], *, indent: int) -> str:
    inner = " " * (indent + 2)
    return "[\n" + ",\n".join(inner + _rendered(value, indent=indent + 2) for value in values) + f"\n{' ' * indent}]"


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        document = load_json(text)
    except json.JSONDecodeError as error:
        raise _refused(
            f"{name}, line {error.lineno}: the JSON is broken at column {error.colno}: {error.msg}",
            reason="the file was cut off, or edited by hand",
        ) from None
    except ValueError as error:
        raise _refused(f"{name}: the JSON has {error}", reason="it was edited by hand") from None
    if not isinstance(document, dict):
        raise _refused(f"{name}, line 1: the JSON is not an object", reason="it is another program's JSON")
    return document


def _check_version(document: dict[str, Any], name: str) -> None:
    version = document.get("schema_version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        seen = "has no schema_version" if version is None else f"has schema_version {version!r}"
        raise _refused(f"{name}: the JSON {seen}", reason="it is another program's JSON")
    if version > SNAPSHOT_VERSION:
        raise _refused(
            f"{name}: the snapshot has schema_version {version}",
            expected=f"at most {SNAPSHOT_VERSION}, which this gpubench reads",
            reason="it was recorded by a newer gpubench",
            next_step=UPGRADE,
        )


def _refused(seen: str, *, reason: str, expected: str = _EXPECTED, next_step: str = _NEXT_STEP) -> UsageError:
    return UsageError(seen, expected=expected, reason=reason, next_step=next_step)
