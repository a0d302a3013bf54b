"""The node as the kernel shows it without the NVIDIA driver: PCI tree, NICs, machine, names."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpubench.hardware.node.driver_settings import read_driver_settings
from gpubench.hardware.node.kernel_machine import read_gpudirect, read_kernel_driver, read_machine
from gpubench.hardware.node.kernel_settings import read_kernel_settings
from gpubench.hardware.node.nics import nic_devices, read_nics
from gpubench.hardware.node.pci.devices import read_pci_devices
from gpubench.hardware.node.pci.tree import (
    driver_of,
    find_nvidia_devices,
    pci_address,
    place_of,
    switches_above,
    trained_link,
)
from gpubench.hardware.node.rdma_ports import read_rdma_ports
from gpubench.hardware.system_files import names_in, number_of, text_of
from gpubench.model.facts.driver_settings import DriverSettings
from gpubench.model.facts.kernel_settings import KernelSettings
from gpubench.model.facts.rdma_port import RdmaPort
from gpubench.model.facts.snapshot import (
    DriverFacts,
    GpuDirectFacts,
    GpuFacts,
    HostFacts,
    NicFacts,
    PciDevice,
    PciSwitch,
    bus_id,
)

SECONDS_FOR_NAMES = 2.0
"""The driver takes its own lock to answer for a GPU's name in /proc: where it is wedged, the reader stays there."""

_DEVICE_FILE = re.compile(r"nvidia\d+", re.ASCII)
_MINOR = re.compile(r"\d{1,6}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SysfsFacts:
    """The node as the kernel shows it.

    `gpus` are numbered in the order of their bus ids. `gpu_drivers` names, by bus id, the kernel driver that has a GPU,
    and `device_files` counts /dev/nvidia0 and on: both tell a GPU that is lost from one of another container or VM.
    """

    machine: HostFacts = field(default_factory=HostFacts)
    driver: DriverFacts = field(default_factory=DriverFacts)
    driver_settings: DriverSettings = field(default_factory=DriverSettings)
    gpudirect: GpuDirectFacts = field(default_factory=GpuDirectFacts)
    gpus: tuple[GpuFacts, ...] = ()
    nics: tuple[NicFacts, ...] = ()
    switches: tuple[PciSwitch, ...] = ()
    pci_devices: tuple[PciDevice, ...] = ()
    rdma_ports: tuple[RdmaPort, ...] = ()
    kernel: KernelSettings = field(default_factory=KernelSettings)
    nvswitches: tuple[str, ...] = ()
    gpu_drivers: Mapping[str, str] = field(default_factory=dict)
    device_files: int = 0


def read_sysfs(root: Path = Path("/")) -> SysfsFacts:
    """Everything that is in /sys, /proc and /dev below `root`; what is missing there is unknown."""
    devices = find_nvidia_devices(root)
    drivers = {bus_id(each.name): driver_of(each) for each in devices.gpus}
    pages = _driver_pages(root) if devices.gpus else {}
    nics = nic_devices(root)
    pci_devices = read_pci_devices(devices.gpus, nics, _minors(pages))
    return SysfsFacts(
        machine=read_machine(root),
        driver=read_kernel_driver(root),
        driver_settings=read_driver_settings(root),
        gpudirect=read_gpudirect(root),
        gpus=tuple(_gpus(devices.gpus, pages)),
        nics=read_nics(root),
        switches=switches_above((*devices.gpus, *nics)),
        pci_devices=pci_devices,
        rdma_ports=read_rdma_ports(root),
        kernel=read_kernel_settings(root, pci_devices),
        nvswitches=tuple(bus_id(each.name) for each in devices.nvswitches),
        gpu_drivers={address: driver for address, driver in drivers.items() if driver is not None},
        device_files=sum(_DEVICE_FILE.fullmatch(name) is not None for name in names_in(root / "dev")),
    )


def _gpus(folders: Sequence[Path], pages: Mapping[str, Mapping[str, str]]) -> Iterator[GpuFacts]:
    for index, folder in enumerate(folders):
        address = pci_address(folder) or bus_id(folder.name)
        information = pages.get(address, {})
        uuid = information.get("GPU UUID", "")
        yield GpuFacts(
            index=index,
            bus_id=address,
            name=information.get("Model") or f"NVIDIA GPU 0x{number_of(folder / 'device') or 0:04x}",
            uuid=uuid if uuid and "?" not in uuid else None,
            pcie=trained_link(folder),
            place=place_of(folder),
        )


def _minors(pages: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """The numbers of the GPUs' device files, by bus id."""
    minors = {address: information.get("Device Minor", "") for address, information in pages.items()}
    return {address: int(text) for address, text in minors.items() if _MINOR.fullmatch(text)}


def _driver_pages(root: Path) -> dict[str, dict[str, str]]:
    """The driver's pages in /proc/driver/nvidia/gpus, by bus id; those that it answers in time."""
    folder = root / "proc/driver/nvidia/gpus"
    named: dict[str, dict[str, str]] = {}

    def read() -> None:
        for name in names_in(folder):
            lines = (text_of(folder / name / "information") or "").split("\n")
            named[bus_id(name)] = {
                key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
            }

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(SECONDS_FOR_NAMES)
    return dict(named)
