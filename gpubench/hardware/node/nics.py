"""NICs from /sys/class/infiniband and /sys/class/net. One odd device never hides the others."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpubench.hardware.node.pci.tree import driver_of, pci_address, pci_folder, place_of, trained_link
from gpubench.hardware.node.rdma_ports import port_folders, port_word
from gpubench.hardware.system_files import UnknownFields, exists, is_link, names_in, number_of, text_of
from gpubench.model.facts.snapshot import SOFTWARE_RDMA, NicFacts, NicKind

_AMAZON = 0x1D0F
_EFA_FAMILY = 0xEFA
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec", re.ASCII)
_SOFTWARE_NAMES = ("siw", "rxe")
_NO_SPEED = (-1, 0, 0xFFFF, 0xFFFFFFFF)
"""Values of drivers and older kernels for a speed that they do not know, in Mbit/s."""

_MODELS = {
    "MT4115": "ConnectX-4",
    "MT4117": "ConnectX-4 Lx",
    "MT4119": "ConnectX-5",
    "MT4121": "ConnectX-5 Ex",
    "MT4123": "ConnectX-6",
    "MT4125": "ConnectX-6 Dx",
    "MT4127": "ConnectX-6 Lx",
    "MT4129": "ConnectX-7",
    "MT4131": "ConnectX-8",
    "MT41682": "BlueField",
    "MT41686": "BlueField-2",
    "MT41692": "BlueField-3",
}
"""Names by `hca_type`: MT and the PCI device id in decimal (pci.ids, vendor 15b3)."""


@dataclass(frozen=True, slots=True)
class _Interface:
    """A network interface with a device behind it; `port` counts from 0 on the device."""

    name: str
    folder: Path
    address: str | None
    port: int


def read_nics(root: Path) -> tuple[NicFacts, ...]:
    """Every port of every RDMA device, with its interfaces, then the interfaces that no RDMA device has."""
    interfaces = _interfaces(root / "sys/class/net")
    folder = root / "sys/class/infiniband"
    rdma = [nic for name in names_in(folder) for nic in _rdma_ports(folder / name, interfaces)]
    taken = {interface for nic in rdma for interface in nic.interfaces}
    return (*rdma, *(_ethernet(each) for each in interfaces if each.name not in taken))


def nic_devices(root: Path) -> tuple[Path, ...]:
    """The sysfs paths that lead to the devices of the NICs."""
    rdma, net = root / "sys/class/infiniband", root / "sys/class/net"
    return (*(rdma / name for name in names_in(rdma)), *(each.folder / "device" for each in _interfaces(net)))


def _interfaces(folder: Path) -> list[_Interface]:
    """The interfaces that a device stands behind; bridges, loopback and the like have none."""
    found = []
    for name in names_in(folder):
        path = folder / name
        has_device = is_link(path / "device") or exists(path / "device")
        if has_device or (is_link(path) and not exists(path)):
            address = pci_address(path / "device")
            found.append(_Interface(name, path, address, number_of(path / "dev_port") or 0))
    return found


def _rdma_ports(device: Path, interfaces: Sequence[_Interface]) -> Iterator[NicFacts]:
    hardware = _hardware(device / "device", hca_type=text_of(device / "hca_type"), name=device.name)
    own = [each for each in interfaces if each.address is not None and each.address == hardware.bus_id]
    ports = port_folders(device)
    for name, port in ports.items():
        # InfiniBand counts ports from 1, the network from 0.
        of_port = own if len(ports) == 1 else [each for each in own if each.port == int(port.name) - 1]
        yield _rdma_port(device, port, replace(hardware, name=name), of_port)


def _rdma_port(device: Path, port: Path, hardware: NicFacts, interfaces: Sequence[_Interface]) -> NicFacts:
    unknown = UnknownFields()
    state = port_word(unknown.text("state", port / "state"))
    rate_text = unknown.text("rate_gbit_s", port / "rate")
    rate = _RATE.match(rate_text or "")
    if state == "down":
        # A port without a link still prints a rate, which is none that it had or will have.
        unknown.reasons["rate_gbit_s"], rate = "the port is down", None
    elif rate_text is not None and rate is None:
        unknown.reasons["rate_gbit_s"] = f"rate is {rate_text!r}"
    is_infiniband = unknown.text("kind", port / "link_layer") == "InfiniBand"
    # EFA's link layer does not tell it; what is RDMA and not InfiniBand runs over Ethernet.
    kind = NicKind.EFA if hardware.kind is NicKind.EFA else NicKind.INFINIBAND if is_infiniband else NicKind.ROCE
    return replace(
        hardware,
        kind=kind,
        state=state,
        rate_gbit_s=float(rate[1]) if rate else None,
        interfaces=tuple(each.name for each in interfaces),
        firmware=unknown.text("firmware", device / "fw_ver"),
        mtu=number_of(interfaces[0].folder / "mtu") if interfaces else None,
        port=None if is_infiniband else _physical_port(device, interfaces),
        unknown=unknown.reasons,
    )


def _physical_port(device: Path, interfaces: Sequence[_Interface]) -> str | None:
    """The adapter's GUID and the name of its port: equal for devices that reach one port through slots of their own.

    NCCL compares the same GUID to find ports of one adapter (src/transport/net_ib). None where either is not told.
    """
    port = text_of(interfaces[0].folder / "phys_port_name") if interfaces else None
    adapter = text_of(device / "sys_image_guid") if port else None
    return f"{adapter} {port}" if adapter else None


def _ethernet(interface: _Interface) -> NicFacts:
    unknown = UnknownFields()
    operational = unknown.text("state", interface.folder / "operstate")
    speed_text = unknown.text("rate_gbit_s", interface.folder / "speed")
    speed = number_of(interface.folder / "speed")
    if speed_text is not None and (speed is None or speed in _NO_SPEED):
        unknown.reasons["rate_gbit_s"], speed = f"speed is {speed_text}", None
    return replace(
        _hardware(interface.folder / "device", hca_type=None, name=""),
        name=interface.name,
        kind=NicKind.ETHERNET,
        state="active" if operational == "up" else operational,
        rate_gbit_s=None if speed is None else speed / 1000,
        interfaces=(interface.name,),
        mtu=number_of(interface.folder / "mtu"),
        unknown=unknown.reasons,
    )


def _hardware(device: Path, *, hca_type: str | None, name: str) -> NicFacts:
    """The facts of the device behind a NIC, whose kind is EFA or left open.

    An emulated one may hang below the interface it runs over, and is not that one's.
    """
    folder = None if name.startswith(_SOFTWARE_NAMES) else pci_folder(device)
    if folder is None:
        model = SOFTWARE_RDMA if name and (exists(device.parent) or name.startswith(_SOFTWARE_NAMES)) else None
        return NicFacts(name=name, kind=NicKind.ETHERNET, driver=None if name else driver_of(device), model=model)
    vendor, number, driver = number_of(folder / "vendor"), number_of(folder / "device"), driver_of(device)
    model = None if vendor is None or number is None else f"PCI {vendor:04x}:{number:04x}"
    if hca_type is not None:
        model = f"{_MODELS[hca_type]} ({hca_type})" if hca_type in _MODELS else hca_type
    is_efa = driver == "efa" or (vendor == _AMAZON and (number or 0) >> 4 == _EFA_FAMILY)
    return NicFacts(
        name=name,
        kind=NicKind.EFA if is_efa else NicKind.ETHERNET,
        bus_id=pci_address(device),
        model=model,
        driver=driver,
        pcie=trained_link(folder),
        place=place_of(device),
    )
