"""The PCI tree as sysfs shows it: which devices there are, where they hang, and how their links are trained."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from gpubench.hardware.system_files import names_in, number_of, text_of
from gpubench.model.facts.snapshot import PcieLink, PciPlace, PciSwitch, bus_id
from gpubench.model.paths.links import PCIE_GENERATION_OF_GT_S

# Domains have more than four digits under Intel VMD (10000:e1:00.0) and Hyper-V counts them up from odd numbers.
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s", re.ASCII)

_GPU_CLASSES = (0x0300, 0x0302)
_NVSWITCH_CLASS = 0x0680
_NVIDIA = 0x10DE
_UNKNOWN_WIDTHS = (0, 63, 255)
"""0 where there is no link (virtual machines), 63 and 255 where a device that has dropped off answers all ones."""


@dataclass(frozen=True, slots=True)
class PciDevices:
    """The folders of the NVIDIA devices of a host, in the order of their addresses."""

    gpus: tuple[Path, ...] = ()
    nvswitches: tuple[Path, ...] = ()


def find_nvidia_devices(root: Path) -> PciDevices:
    """The GPUs and NVSwitches on the PCI bus, with or without a driver: one file is read for every other device."""
    folder = root / "sys/bus/pci/devices"
    gpus: list[Path] = []
    nvswitches: list[Path] = []
    for name in sorted(names_in(folder), key=lambda each: bus_id(each).rjust(len("ffffffff:ff:ff.f"), "0")):
        number = number_of(folder.joinpath(name, "class"))
        kind = None if number is None else number >> 8
        if kind in (*_GPU_CLASSES, _NVSWITCH_CLASS) and number_of(folder / name / "vendor") == _NVIDIA:
            (nvswitches if kind == _NVSWITCH_CLASS else gpus).append(folder / name)
    return PciDevices(tuple(gpus), tuple(nvswitches))


def pci_address(device: Path) -> str | None:
    """The bus id of the PCI device that a sysfs path leads to or through: a virtio interface lies below one."""
    ports = ports_of(device)
    return bus_id(ports[-1].name) if ports else None


def pci_folder(device: Path) -> Path | None:
    """The folder of that PCI device."""
    ports = ports_of(device)
    return ports[-1] if ports else None


def place_of(device: Path) -> PciPlace:
    """The place in the PCI tree of the device that a sysfs path leads to.

    Of the bridges above it the first is the port of the CPU; behind it PCIe switches show as two bridges each, the
    upstream and a downstream port. A bridge left over counts as a switch of its own.
    """
    ports = ports_of(device)
    if not ports:
        return PciPlace()
    bridges = ports[:-1]
    numa_node = number_of(ports[-1] / "numa_node")
    host_bridge = ports[0].parent.name
    return PciPlace(
        host_bridge=host_bridge if _HOST_BRIDGE.fullmatch(host_bridge) else None,
        root_port=bus_id(bridges[0].name) if bridges else None,
        switches=tuple(bus_id(port.name) for port in bridges[1::2]),
        numa_node=None if numa_node is None or numa_node < 0 else numa_node,
    )


def link_of(device: Path) -> PcieLink:
    """The link of a device towards the CPU as it is trained, and at most, as this end of it has them."""
    return PcieLink(
        generation=_generation(device / "current_link_speed"),
        width=_width(device / "current_link_width"),
        max_generation=_generation(device / "max_link_speed"),
        max_width=_width(device / "max_link_width"),
    )


def trained_link(device: Path) -> PcieLink:
    """The link of a PCI device towards the CPU: neither end can make it better than the other one allows."""
    ports = ports_of(device)
    link = link_of(ports[-1] if ports else device)
    if len(ports) < 2:
        return link
    above = link_of(ports[-2])
    return replace(
        link,
        max_generation=_best(link.max_generation, above.max_generation, link.generation),
        max_width=_best(link.max_width, above.max_width, link.width),
    )


def switches_above(devices: Iterable[Path]) -> tuple[PciSwitch, ...]:
    """The PCIe switches above some devices, each once, in the order of their bus ids."""
    ports = {bus_id(port.name): port for device in devices for port in ports_of(device)[1:-1:2]}
    return tuple(
        PciSwitch(bus_id=name, link=trained_link(port), place=place_of(port)) for name, port in sorted(ports.items())
    )


def driver_of(device: Path) -> str | None:
    """The name of the kernel driver that has the device."""
    try:
        return (device / "driver").readlink().name
    except OSError:
        return None


def ports_of(device: Path) -> list[Path]:
    """The folders of the bridges above a PCI device, from the CPU on, and its own; empty where there is none."""
    return list(_ports_on(os.path.realpath(device)))


@lru_cache(maxsize=4096)
def _ports_on(path: str) -> tuple[Path, ...]:
    """The PCI devices that a path without links leads through; it is asked for the same one again and again."""
    parts = path.split("/")
    ports: list[Path] = []
    for end in range(len(parts), 0, -1):
        if _HOST_BRIDGE.fullmatch(parts[end - 1]) and ports:
            break
        if _ADDRESS.fullmatch(parts[end - 1]):
            ports.insert(0, Path("/".join(parts[:end])))
    return tuple(ports)


def _best(own: int | None, above: int | None, now: int | None) -> int | None:
    """The smaller of two maxima, unless it is below what is: a hypervisor's made-up port tells less than it does."""
    smaller = min((each for each in (own, above) if each is not None), default=None)
    return own if now is not None and smaller is not None and smaller < now else smaller


def _generation(path: Path) -> int | None:
    match = _SPEED.match(text_of(path) or "")
    return PCIE_GENERATION_OF_GT_S.get(float(match[1])) if match else None


def _width(path: Path) -> int | None:
    width = number_of(path)
    return None if width in _UNKNOWN_WIDTHS else width
