"""Read a node's PCI tree from sysfs: devices, links, access control (ACS), address translation (ATS), and error
counters (AER).

The code follows Linux's pci_regs.h and Documentation/ABI/testing/sysfs-bus-pci-devices-aer. Reading ACS, ATS and AER
was not tested on hardware, and only root may read them.
"""

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpubench.machine.host import UnknownFields, list_names, read_number, read_text
from gpubench.model.facts import snapshot
from gpubench.model.paths.topology import PCIE_GENERATION_OF_GT_S

# PCI domains may have more than four digits with Intel VMD (10000:e1:00.0). With Hyper-V they may be eb75, for example.
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s", re.ASCII)

_GPU_CLASSES = (0x0300, 0x0302)
_NVSWITCH_CLASS = 0x0680
_NVIDIA = 0x10DE
_UNKNOWN_WIDTHS = (0, 63, 255)  # 0: no link, as in virtual machines. 63 and 255: the device is off the bus


class PciDevices(Struct, frozen=True):
    """The sysfs directories of a host's NVIDIA devices, in address order."""

    gpus: tuple[Path, ...] = ()
    nvswitches: tuple[Path, ...] = ()


def find_nvidia_devices(root: Path) -> PciDevices:
    """Find all GPUs and NVSwitches on the PCI bus, whether or not a driver is bound to them."""
    folder = root / "sys/bus/pci/devices"
    gpus: list[Path] = []
    nvswitches: list[Path] = []
    width = len("ffffffff:ff:ff.f")
    for name in sorted(list_names(folder), key=lambda name: snapshot.normalize_bus_id(name).rjust(width, "0")):
        number = read_number(folder / name / "class") or 0
        found = {_NVSWITCH_CLASS: nvswitches, **dict.fromkeys(_GPU_CLASSES, gpus)}.get(number >> 8)
        if found is not None and read_number(folder / name / "vendor") == _NVIDIA:
            found.append(folder / name)
    return PciDevices(tuple(gpus), tuple(nvswitches))


def pci_address(device: Path) -> str | None:
    """Return the bus ID of the PCI device in a sysfs path. The path may continue below it, as for a virtio
    interface.
    """
    ports = _find_ports(device)
    return snapshot.normalize_bus_id(ports[-1].name) if ports else None


def pci_folder(device: Path) -> Path | None:
    """Return the sysfs directory of the PCI device in a sysfs path."""
    ports = _find_ports(device)
    return ports[-1] if ports else None


def read_place(device: Path) -> snapshot.PciPlace:
    """Return a device's location in the PCI tree. A PCIe switch appears as two bridges."""
    ports = _find_ports(device)
    if not ports:
        return snapshot.PciPlace()
    bridges = ports[:-1]
    numa_node = read_number(ports[-1] / "numa_node")
    host_bridge = ports[0].parent.name
    return snapshot.PciPlace(
        host_bridge=host_bridge if _HOST_BRIDGE.fullmatch(host_bridge) else None,
        root_port=snapshot.normalize_bus_id(bridges[0].name) if bridges else None,
        switches=tuple(snapshot.normalize_bus_id(port.name) for port in bridges[1::2]),
        numa_node=None if numa_node is None or numa_node < 0 else numa_node,
    )


def read_link(device: Path) -> snapshot.PcieLink:
    """Return the current and maximum PCIe link towards the CPU, as the device itself reports them."""
    return snapshot.PcieLink(
        generation=_generation(device / "current_link_speed"),
        width=_width(device / "current_link_width"),
        max_generation=_generation(device / "max_link_speed"),
        max_width=_width(device / "max_link_width"),
    )


def trained_link(device: Path) -> snapshot.PcieLink:
    """Return a device's PCIe link towards the CPU. Each maximum is the lower one of the link's two ends."""
    ports = _find_ports(device)
    link = read_link(ports[-1] if ports else device)
    if len(ports) < 2:
        return link
    above = read_link(ports[-2])
    return replace(
        link,
        max_generation=_best(link.max_generation, above.max_generation, link.generation),
        max_width=_best(link.max_width, above.max_width, link.width),
    )


def switches_above(devices: Iterable[Path]) -> tuple[snapshot.PciSwitch, ...]:
    """Return the PCIe switches above these devices, without duplicates, sorted by bus ID."""
    ports = {snapshot.normalize_bus_id(port.name): port for device in devices for port in _find_ports(device)[1:-1:2]}
    return tuple(
        snapshot.PciSwitch(bus_id=name, link=trained_link(port), place=read_place(port))
        for name, port in sorted(ports.items())
    )


def driver_name(device: Path) -> str | None:
    """Return the name of the kernel driver that is bound to the device."""
    try:
        return (device / "driver").readlink().name
    except OSError:
        return None


def _find_ports(device: Path) -> list[Path]:
    """Return the directories of the bridges above a PCI device, from the CPU down, and of the device itself.

    Return [] if the path contains no PCI device.
    """
    return list(_ports_in_path(os.path.realpath(device)))


@lru_cache(maxsize=4096)
def _ports_in_path(path: str) -> tuple[Path, ...]:
    parts = path.split("/")
    ports: list[Path] = []
    for end in range(len(parts), 0, -1):
        if _HOST_BRIDGE.fullmatch(parts[end - 1]) and ports:
            break
        if _ADDRESS.fullmatch(parts[end - 1]):
            ports.insert(0, Path("/".join(parts[:end])))
    return tuple(ports)


def _best(own: int | None, above: int | None, now: int | None) -> int | None:
    """Return the lower of both maxima. If it is below the current value, as for a hypervisor's virtual port, return
    `own`.
    """
    smaller = min((most for most in (own, above) if most is not None), default=None)
    return own if now is not None and smaller is not None and smaller < now else smaller


def _generation(path: Path) -> int | None:
    match = _SPEED.match(read_text(path) or "")
    return PCIE_GENERATION_OF_GT_S.get(float(match[1])) if match else None


def _width(path: Path) -> int | None:
    width = read_number(path)
    return None if width in _UNKNOWN_WIDTHS else width


ACCESS_CONTROL, ADDRESS_TRANSLATION = "access_control", "address_translation"
NEEDS_ROOT = "needs root, because other users can read only the first 64 bytes of the configuration space"

_READABLE_BY_ALL = 64  # Bytes of the configuration space that users other than root may read
_EXTENDED = 0x100
_END = 0x1000
_ALL_ONES = 0xFFFFFFFF
_ACS, _ATS = 0x000D, 0x000F
_ATS_ENABLED = 1 << 31  # The highest bit of the ATS control register, which is the upper half of the word
_WORD_BYTES = 4


def read_access_control(device: Path, unknown: UnknownFields) -> snapshot.AccessControl | None:
    """Read a port's ACS registers. If they are unreadable, store the reason and return None."""
    registers = _capability(device, _ACS, ACCESS_CONTROL, unknown)
    if registers is None:
        return None if ACCESS_CONTROL in unknown.reasons else snapshot.AccessControl()
    return snapshot.AccessControl(capable=_names(registers & 0xFFFF), enabled=_names(registers >> 16))


def _read_address_translation(device: Path, unknown: UnknownFields) -> bool | None:
    """True if the device uses Address Translation Services (ATS). PCIe switches then forward directly in spite of
    ACS.
    """
    registers = _capability(device, _ATS, ADDRESS_TRANSLATION, unknown)
    if registers is None:
        return None if ADDRESS_TRANSLATION in unknown.reasons else False
    return bool(registers & _ATS_ENABLED)


def _names(bits: int) -> tuple[str, ...]:
    return tuple(name for position, name in enumerate(snapshot.ACCESS_CONTROLS) if bits >> position & 1)


def _capability(device: Path, identity: int, field: str, unknown: UnknownFields) -> int | None:
    """Return the 32-bit word after a PCI capability's header, or None if the device lacks the capability.

    If the configuration space is unreadable, store the reason and return None. Search word by word, because each read
    takes time.
    """
    try:
        file = os.open(device / "config", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _find_capability(file, identity)
        finally:
            os.close(file)
    except OSError as error:
        unknown.reasons[field] = f"config: {error.strerror}"
    except _UnreadableError as unreadable:
        unknown.reasons[field] = str(unreadable)
    return None


class _UnreadableError(Exception):
    """The configuration space is unreadable, for the reason in the message."""


def _find_capability(file: int, identity: int) -> int | None:
    first = _read_word(file, _EXTENDED)
    if first is None:
        has_more = _read_word(file, _READABLE_BY_ALL) is not None
        raise _UnreadableError("this machine shows no extended configuration space" if has_more else NEEDS_ROOT)
    if first == _ALL_ONES:
        raise _UnreadableError("the device returns only ones, as if it were gone")
    offset, seen = _EXTENDED, set[int]()
    while _EXTENDED <= offset < _END and offset not in seen:
        seen.add(offset)
        header = _require_word(file, offset)
        if header & 0xFFFF == identity:
            return _require_word(file, offset + _WORD_BYTES)
        offset = header >> 20 & 0xFFC
    return None


def _require_word(file: int, offset: int) -> int:
    value = _read_word(file, offset)
    if value is None:
        raise _UnreadableError("config ends in the middle of the list of capabilities")
    return value


def _read_word(file: int, offset: int) -> int | None:
    content = os.pread(file, _WORD_BYTES, offset)
    return int.from_bytes(content, "little") if len(content) == _WORD_BYTES else None


_SEVERITIES = ("correctable", "nonfatal", "fatal")
_TOTAL = "TOTAL_ERR_"
_MOST_DIGITS = 19


def read_errors(device: Path, unknown: UnknownFields) -> snapshot.PcieErrors | None:
    """Read a device's AER error counters. If they are unreadable, store the reason under `errors` and return None."""
    totals: dict[str, int] = {}
    named: dict[str, int] = {}
    for severity in _SEVERITIES:
        reader = UnknownFields()
        text = reader.text("errors", device / f"aer_dev_{severity}")
        counts = _parse_counts(text or "")
        total = next((count for name, count in counts.items() if name.startswith(_TOTAL)), None)
        if total is None:
            unknown.reasons.setdefault("errors", reader.reasons.get("errors") or f"aer_dev_{severity} has no total")
            if severity == _SEVERITIES[0] and text is None:
                # The kernel creates either all three files or none.
                return None
            continue
        totals[severity] = total
        named |= {
            f"{severity}.{name}": count for name, count in counts.items() if count and not name.startswith(_TOTAL)
        }
    return snapshot.PcieErrors(**totals, named=named) if totals else None


def _parse_counts(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, count = line.strip().rpartition(" ")
        if name.isprintable() and name and count.isascii() and count.isdecimal() and len(count) <= _MOST_DIGITS:
            found[name] = int(count)
    return found


_MIB = 2**20
_BAR1 = 1
_ADDRESSES = re.compile(r"(0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16}) 0x[0-9a-f]{1,16}", re.ASCII)
_SIZES = re.compile(r"(?:0x)?[0-9a-f]{1,16}", re.ASCII)
_WIDEST_BAR = 63
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


def read_pci_devices(
    gpus: Iterable[Path], nics: Iterable[Path], minors: Mapping[str, int]
) -> tuple[snapshot.PciDevice, ...]:
    """Return all PCI devices on the paths from the CPU to GPUs and NICs, sorted by bus ID.

    `minors` are the minor numbers of the GPUs' device files.
    """
    found: dict[str, snapshot.PciDevice] = {}
    for kind, devices in ((snapshot.PciKind.GPU, gpus), (snapshot.PciKind.NIC, nics)):
        for device in devices:
            above: str | None = None
            for folder, folder_kind in _chain(device, kind):
                name = snapshot.normalize_bus_id(folder.name)
                if name not in found:
                    found[name] = _read_device(folder, folder_kind, above, minors)
                above = name
    return tuple(found[name] for name in sorted(found))


def _chain(device: Path, kind: snapshot.PciKind) -> Iterable[tuple[Path, snapshot.PciKind]]:
    """Yield the bridges above a device, from the CPU down, and the device. Below the root port, bridges come in
    pairs.
    """
    ports = _find_ports(device)
    for position, folder in enumerate(ports[:-1]):
        inner = snapshot.PciKind.UPSTREAM_PORT if position % 2 else snapshot.PciKind.DOWNSTREAM_PORT
        yield folder, inner if position else snapshot.PciKind.ROOT_PORT
    yield from ((folder, kind) for folder in ports[-1:])


def _read_device(
    folder: Path, kind: snapshot.PciKind, above: str | None, minors: Mapping[str, int]
) -> snapshot.PciDevice:
    unknown, name = UnknownFields(), snapshot.normalize_bus_id(folder.name)
    bar1, most, minor = None, None, None
    if kind is snapshot.PciKind.GPU:
        bar1, most, minor = _bar1(folder, unknown), _bar1_most(folder, unknown), minors.get(name)
        if minor is None:
            unknown.reasons["minor"] = "the driver's /proc file of this GPU does not have it"
    vendor, model = read_number(folder / "vendor"), read_number(folder / "device")
    if vendor is None or model is None:
        unknown.reasons["identity"] = "vendor and device are not numbers"
    is_bridge = kind not in (snapshot.PciKind.GPU, snapshot.PciKind.NIC)
    return snapshot.PciDevice(
        bus_id=name,
        kind=kind,
        above=above,
        link=read_link(folder),
        identity=None if vendor is None or model is None else f"{vendor:04x}:{model:04x}",
        access_control=read_access_control(folder, unknown) if is_bridge else None,
        address_translation=None if is_bridge else _read_address_translation(folder, unknown),
        errors=read_errors(folder, unknown),
        iommu_group=_iommu_group(folder, unknown),
        bar1_bytes=bar1,
        bar1_most_bytes=most,
        minor=minor,
        unknown=unknown.reasons,
    )


def _iommu_group(folder: Path, unknown: UnknownFields) -> int | None:
    """Return the IOMMU group, which every user may read. None without an IOMMU."""
    try:
        name = (folder / "iommu_group").readlink().name
    except OSError as error:
        unknown.reasons["iommu_group"] = f"iommu_group: {error.strerror}"
        return None
    if not _NUMBER.fullmatch(name):
        unknown.reasons["iommu_group"] = "iommu_group does not point to a number"
        return None
    return int(name)


def _bar1(folder: Path, unknown: UnknownFields) -> int | None:
    """Return the size of BAR 1 in bytes. Its line in `resource` has first address, last address and flags."""
    lines = (unknown.text("bar1_bytes", folder / "resource") or "").split("\n")
    match = _ADDRESSES.fullmatch(lines[_BAR1].strip()) if len(lines) > _BAR1 else None
    first, last = (int(match[1], 16), int(match[2], 16)) if match else (0, 0)
    if last <= first:
        unknown.reasons.setdefault("bar1_bytes", "resource has no addresses for BAR 1")
        return None
    return last - first + 1


def _bar1_most(folder: Path, unknown: UnknownFields) -> int | None:
    """Return the largest possible size of BAR 1 in bytes.

    Bit n of resource1_resize means 2^n MiB. The file needs Linux 6.1 and exists only for resizable BARs.
    """
    text = unknown.text("bar1_most_bytes", folder / "resource1_resize")
    if text is None:
        return None
    sizes = int(text, 16) if _SIZES.fullmatch(text) else 0
    if not 0 < sizes.bit_length() <= _WIDEST_BAR - _MIB.bit_length():
        unknown.reasons["bar1_most_bytes"] = "resource1_resize has no size"
        return None
    return _MIB << sizes.bit_length() - 1
