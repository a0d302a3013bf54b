"""The GPUs, the NICs and every bridge above them, one by one: links, access control, errors, IOMMU groups."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpubench.hardware.node.pci.config import read_access_control, read_address_translation
from gpubench.hardware.node.pci.errors import read_errors
from gpubench.hardware.node.pci.tree import link_of, ports_of
from gpubench.hardware.system_files import UnknownFields, number_of
from gpubench.model.facts.pci_capabilities import PciKind
from gpubench.model.facts.snapshot import PciDevice, bus_id

_MIB = 2**20
_BAR1 = 1
_ADDRESSES = re.compile(r"(0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16}) 0x[0-9a-f]{1,16}", re.ASCII)
_SIZES = re.compile(r"(?:0x)?[0-9a-f]{1,16}", re.ASCII)
_WIDEST_BAR = 63
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


def read_pci_devices(gpus: Iterable[Path], nics: Iterable[Path], minors: Mapping[str, int]) -> tuple[PciDevice, ...]:
    """All of them, each once, in the order of their bus ids. `gpus` and `nics` are paths that lead to the devices.

    `minors` are the numbers of the GPUs' device files, by bus id, as far as the driver has them.
    """
    found: dict[str, PciDevice] = {}
    for kind, devices in ((PciKind.GPU, gpus), (PciKind.NIC, nics)):
        for device in devices:
            above: str | None = None
            for folder, each in _chain(device, kind):
                name = bus_id(folder.name)
                if name not in found:
                    found[name] = _read(folder, each, above, minors)
                above = name
    return tuple(found[name] for name in sorted(found))


def _chain(device: Path, kind: PciKind) -> Iterable[tuple[Path, PciKind]]:
    """The bridges above a device, from the CPU on, and the device itself. Behind the root port they come in pairs."""
    ports = ports_of(device)
    for position, folder in enumerate(ports[:-1]):
        inner = PciKind.UPSTREAM_PORT if position % 2 else PciKind.DOWNSTREAM_PORT
        yield folder, inner if position else PciKind.ROOT_PORT
    yield from ((folder, kind) for folder in ports[-1:])


def _read(folder: Path, kind: PciKind, above: str | None, minors: Mapping[str, int]) -> PciDevice:
    unknown, name = UnknownFields(), bus_id(folder.name)
    bar1, most, minor = None, None, None
    if kind is PciKind.GPU:
        bar1, most, minor = _bar1(folder, unknown), _bar1_most(folder, unknown), minors.get(name)
        if minor is None:
            unknown.reasons["minor"] = "the driver's page of this GPU in /proc does not tell it"
    is_bridge = kind not in (PciKind.GPU, PciKind.NIC)
    return PciDevice(
        bus_id=name,
        kind=kind,
        above=above,
        link=link_of(folder),
        identity=_identity(folder, unknown),
        access_control=read_access_control(folder, unknown) if is_bridge else None,
        address_translation=None if is_bridge else read_address_translation(folder, unknown),
        errors=read_errors(folder, unknown),
        iommu_group=_iommu_group(folder, unknown),
        bar1_bytes=bar1,
        bar1_most_bytes=most,
        minor=minor,
        unknown=unknown.reasons,
    )


def _identity(folder: Path, unknown: UnknownFields) -> str | None:
    vendor, model = number_of(folder / "vendor"), number_of(folder / "device")
    if vendor is None or model is None:
        unknown.reasons["identity"] = "vendor and device hold no numbers"
        return None
    return f"{vendor:04x}:{model:04x}"


def _iommu_group(folder: Path, unknown: UnknownFields) -> int | None:
    """The group, by the link that every user may read; a device that no IOMMU serves has none."""
    try:
        name = (folder / "iommu_group").readlink().name
    except OSError as error:
        unknown.reasons["iommu_group"] = f"iommu_group: {error.strerror}"
        return None
    if not _NUMBER.fullmatch(name):
        unknown.reasons["iommu_group"] = "iommu_group leads to no number"
        return None
    return int(name)


def _bar1(folder: Path, unknown: UnknownFields) -> int | None:
    """From the line of BAR 1 in `resource`: its first and last address, and flags; zeros where it has no place."""
    lines = (unknown.text("bar1_bytes", folder / "resource") or "").split("\n")
    match = _ADDRESSES.fullmatch(lines[_BAR1].strip()) if len(lines) > _BAR1 else None
    first, last = (int(match[1], 16), int(match[2], 16)) if match else (0, 0)
    if last <= first:
        unknown.reasons.setdefault("bar1_bytes", "resource gives BAR 1 no addresses")
        return None
    return last - first + 1


def _bar1_most(folder: Path, unknown: UnknownFields) -> int | None:
    """Bit n of resource1_resize stands for 2^n MiB; only a device with resizable BARs has the file (Linux 6.1)."""
    text = unknown.text("bar1_most_bytes", folder / "resource1_resize")
    if text is None:
        return None
    sizes = int(text, 16) if _SIZES.fullmatch(text) else 0
    if not 0 < sizes.bit_length() <= _WIDEST_BAR - _MIB.bit_length():
        unknown.reasons["bar1_most_bytes"] = "resource1_resize names no size"
        return None
    return _MIB << sizes.bit_length() - 1
