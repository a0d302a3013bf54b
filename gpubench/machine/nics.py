"""Read a node's NICs from sysfs: devices, RDMA ports, and byte and error counters.

RDMA ports were not tested on hardware. The code follows Documentation/ABI/stable/sysfs-class-infiniband.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpubench.machine.host import (
    UnknownFields,
    exists,
    is_link,
    list_names,
    parse_number,
    printable,
    read_number,
    read_text,
)
from gpubench.machine.pci import driver_name, pci_address, pci_folder, read_place, trained_link
from gpubench.model.facts.snapshot import SOFTWARE_RDMA, Gid, NicFacts, NicKind, RdmaPort
from gpubench.model.facts.traffic import LOOPBACK, NicReading

_COUNTERS = frozenset(
    (
        *("symbol_error", "link_error_recovery", "link_downed", "local_link_integrity_errors", "VL15_dropped"),
        *("port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards", "port_xmit_wait"),
        *("excessive_buffer_overrun_errors",),
    )
)
_HARDWARE_COUNTERS = frozenset(
    (
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err"),
        *("rx_icrc_encapsulated", "roce_slow_restart", "roce_adp_retrans", "duplicate_request"),
        *("rp_cnp_handled", "np_cnp_sent", "np_ecn_marked_roce_packets", "rx_discards_phy", "out_of_buffer"),
        *("retrans_pkts", "retrans_timeout_events", "unresponsive_remote_events", "impaired_remote_conn_events"),
    )
)
"""Counters of mlx5 (kernel document Documentation/ABI/stable/sysfs-class-infiniband) and of EFA."""

_MOST_GIDS = 16


def read_rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """Read every port of every RDMA device."""
    folder, verbs = root / "sys/class/infiniband", root / "sys/class/infiniband_verbs"
    # /sys/class/infiniband_verbs/uverbs0/ibdev contains the name of the RDMA device.
    files = {read_text(verbs / name / "ibdev"): f"/dev/infiniband/{printable(name)}" for name in list_names(verbs)}
    return tuple(
        _read_port(port, nic, files.get(name))
        for name in list_names(folder)
        for nic, port in _port_folders(folder / name).items()
    )


def _port_folders(device: Path) -> dict[str, Path]:
    """Return a device's port directories by NIC name: mlx5_0 for a single port, or else mlx5_0:1 and so on."""
    numbers = sorted((name for name in list_names(device / "ports") if name.isdecimal()), key=int)
    if len(numbers) < 2:
        return {device.name: device / "ports" / (numbers[0] if numbers else "1")}
    return {f"{device.name}:{number}": device / "ports" / number for number in numbers}


def _port_word(text: str | None) -> str | None:
    """Return the word in a port's state, such as 'active' from '4: ACTIVE'."""
    return None if text is None else text.rpartition(":")[2].strip().lower()


def _read_port(folder: Path, nic: str, device_file: str | None) -> RdmaPort:
    unknown = UnknownFields()
    state = _port_word(unknown.text("physical_state", folder / "phys_state"))
    layer = unknown.text("link_layer", folder / "link_layer")
    if device_file is None:
        unknown.reasons["device_file"] = "the kernel has no verbs device for it (ib_uverbs may not be loaded)"
    return RdmaPort(
        nic=printable(nic),
        physical_state=None if state is None else printable(state),
        link_layer=None if layer is None else printable(layer),
        counters=_counters("counters", folder / "counters", _COUNTERS, unknown),
        hardware_counters=_counters("hardware_counters", folder / "hw_counters", _HARDWARE_COUNTERS, unknown),
        gids=_gids(folder, unknown),
        device_file=device_file,
        unknown=unknown.reasons,
    )


def _counters(field: str, folder: Path, wanted: frozenset[str], unknown: UnknownFields) -> dict[str, int] | None:
    """Return those of the wanted counters that the port has. None if it has no counters at all."""
    names = list_names(folder)
    if not names:
        unknown.reasons[field] = f"{folder.name} is empty or cannot be read"
        return None
    return _read_numbers(folder, (name for name in names if name in wanted))


def _read_numbers(folder: Path, names: Iterable[str]) -> dict[str, int]:
    numbers = ((name, read_number(folder / name)) for name in names)
    return {name: number for name, number in numbers if number is not None}


def _gids(folder: Path, unknown: UnknownFields) -> tuple[Gid, ...] | None:
    """Return the used entries among the first 16 of the GID table. Reading the type of an unused entry fails."""
    kinds = folder / "gid_attrs/types"
    if not exists(kinds):
        unknown.reasons["gids"] = "gid_attrs/types does not exist"
        return None
    found = []
    for index in range(_MOST_GIDS):
        kind = read_text(kinds / str(index))
        address = _address_kind(read_text(folder / f"gids/{index}")) if kind is not None else None
        if kind is not None and address is not None:
            found.append(Gid(index=index, kind=printable(kind), address=address))
    return tuple(found)


def _address_kind(text: str | None) -> str | None:
    """Return a GID's address type: 'ipv4', 'link_local' or 'global'. None if it is unset or invalid."""
    try:
        address = IPv6Address(text or "")
    except AddressValueError:
        return None
    if int(address) == 0:
        return None
    if address.ipv4_mapped is not None:
        return "ipv4"
    return "link_local" if address.is_link_local else "global"


_AMAZON = 0x1D0F
_EFA_FAMILY = 0xEFA
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec", re.ASCII)
_SOFTWARE_NAMES = ("siw", "rxe")
# Values in Mbit/s that drivers and older kernels report if the speed is unknown
_NO_SPEED = (-1, 0, 0xFFFF, 0xFFFFFFFF)
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
"""Model names by `hca_type`, which is MT and the PCI device ID in decimal (pci.ids, vendor 15b3)."""


class _Interface(Struct, frozen=True):
    """A device's network interface. `port` counts from 0."""

    name: str
    folder: Path
    address: str | None
    port: int


def read_nics(root: Path) -> tuple[NicFacts, ...]:
    """Read every port of every RDMA device with its network interfaces, and then all other interfaces."""
    interfaces = _interfaces(root / "sys/class/net")
    folder = root / "sys/class/infiniband"
    rdma = [nic for name in list_names(folder) for nic in _rdma_ports(folder / name, interfaces)]
    taken = {interface for nic in rdma for interface in nic.interfaces}
    return (*rdma, *(_ethernet(interface) for interface in interfaces if interface.name not in taken))


def nic_devices(root: Path) -> tuple[Path, ...]:
    """Return the sysfs paths of all NIC devices."""
    rdma, net = root / "sys/class/infiniband", root / "sys/class/net"
    return (*(rdma / name for name in list_names(rdma)), *(found.folder / "device" for found in _interfaces(net)))


def _interfaces(folder: Path) -> list[_Interface]:
    found = []
    for name in list_names(folder):
        path = folder / name
        if _has_device(path) or (is_link(path) and not exists(path)):
            address = pci_address(path / "device")
            found.append(_Interface(name, path, address, read_number(path / "dev_port") or 0))
    return found


def _has_device(interface: Path) -> bool:
    return is_link(interface / "device") or exists(interface / "device")


def _rdma_ports(device: Path, interfaces: Sequence[_Interface]) -> Iterator[NicFacts]:
    hardware = _hardware(device / "device", hca_type=read_text(device / "hca_type"), name=device.name)
    on_device = [found for found in interfaces if found.address is not None and found.address == hardware.bus_id]
    ports = _port_folders(device)
    for name, port in ports.items():
        # InfiniBand numbers ports from 1, dev_port from 0.
        on_port = [found for found in on_device if len(ports) == 1 or found.port == int(port.name) - 1]
        yield _rdma_port(device, port, replace(hardware, name=name), on_port)


def _rdma_port(device: Path, port: Path, hardware: NicFacts, interfaces: Sequence[_Interface]) -> NicFacts:
    unknown = UnknownFields()
    state = _port_word(unknown.text("state", port / "state"))
    rate_text = unknown.text("rate_gbit_s", port / "rate")
    rate = _RATE.match(rate_text or "")
    if state == "down":
        # The rate file of a port without a link contains a meaningless value.
        unknown.reasons["rate_gbit_s"], rate = "the port is down", None
    elif rate_text is not None and rate is None:
        unknown.reasons["rate_gbit_s"] = f"rate is {rate_text!r}"
    is_infiniband = unknown.text("kind", port / "link_layer") == "InfiniBand"
    # The link layer does not identify EFA. Any other RDMA that is not InfiniBand runs over Ethernet.
    kind = NicKind.EFA if hardware.kind is NicKind.EFA else NicKind.INFINIBAND if is_infiniband else NicKind.ROCE
    # Devices in different slots that share a physical port have the same adapter GUID and port name. NCCL compares the
    # GUID to find ports of one adapter (src/transport/net_ib).
    port_name = read_text(interfaces[0].folder / "phys_port_name") if interfaces and not is_infiniband else None
    adapter = read_text(device / "sys_image_guid") if port_name else None
    return replace(
        hardware,
        kind=kind,
        state=state,
        rate_gbit_s=float(rate[1]) if rate else None,
        interfaces=tuple(interface.name for interface in interfaces),
        firmware=unknown.text("firmware", device / "fw_ver"),
        mtu=read_number(interfaces[0].folder / "mtu") if interfaces else None,
        port=f"{adapter} {port_name}" if adapter else None,
        unknown=unknown.reasons,
    )


def _ethernet(interface: _Interface) -> NicFacts:
    unknown = UnknownFields()
    operational = unknown.text("state", interface.folder / "operstate")
    speed_text = unknown.text("rate_gbit_s", interface.folder / "speed")
    speed = parse_number(speed_text)
    if speed_text is not None and (speed is None or speed in _NO_SPEED):
        unknown.reasons["rate_gbit_s"], speed = f"speed is {speed_text}", None
    return replace(
        _hardware(interface.folder / "device", hca_type=None, name=""),
        name=interface.name,
        kind=NicKind.ETHERNET,
        state="active" if operational == "up" else operational,
        rate_gbit_s=None if speed is None else speed / 1000,
        interfaces=(interface.name,),
        mtu=read_number(interface.folder / "mtu"),
        unknown=unknown.reasons,
    )


def _hardware(device: Path, *, hca_type: str | None, name: str) -> NicFacts:
    """Read the PCI device behind a NIC. Software RDMA has none, although its sysfs directory may be below a real
    NIC.
    """
    folder = None if name.startswith(_SOFTWARE_NAMES) else pci_folder(device)
    if folder is None:
        model = SOFTWARE_RDMA if name and (exists(device.parent) or name.startswith(_SOFTWARE_NAMES)) else None
        return NicFacts(name=name, kind=NicKind.ETHERNET, driver=None if name else driver_name(device), model=model)
    vendor, number, driver = read_number(folder / "vendor"), read_number(folder / "device"), driver_name(device)
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
        place=read_place(device),
    )


_WORD_BYTES = 4  # port_xmit_data and port_rcv_data count words of 4 bytes
_FULL_32 = 2**32 - 1
_ERRORS = ("port_rcv_errors", "port_xmit_discards", "link_downed", "symbol_error")
_SELDOM = 10


class NicCounters:
    """Read the byte counters of every NIC port and of the loopback. RDMA devices are counted per port, not per
    interface.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        infiniband, net = root / "sys/class/infiniband", root / "sys/class/net"
        self._ports = {
            nic: folder for name in list_names(infiniband) for nic, folder in _port_folders(infiniband / name).items()
        }
        devices = {_resolve(infiniband / name / "device") for name in list_names(infiniband)}
        self._interfaces = [
            net / name
            for name in list_names(net)
            if _has_device(net / name) and _resolve(net / name / "device") not in devices
        ]
        self._interfaces += [net / LOOPBACK] if exists(net / LOOPBACK) else []
        self._count = 0
        self._errors: dict[str, dict[str, int]] = {}

    def read(self) -> tuple[NicReading, ...]:
        """Read all ports at the same time. Read error counters only in every tenth call, because each queries the
        NIC's firmware.
        """
        if self._count % _SELDOM == 0:
            self._errors = {name: _read_numbers(folder / "counters", _ERRORS) for name, folder in self._ports.items()}
        self._count += 1
        ports = [self._read_port(name, folder) for name, folder in self._ports.items()]
        return (*ports, *map(_read_interface, self._interfaces))

    def _read_port(self, name: str, folder: Path) -> NicReading:
        unknown = UnknownFields()
        state = _port_word(read_text(folder / "state"))
        return NicReading(
            name=name,
            rdma=True,
            sent_bytes=_read_words("sent", folder / "counters/port_xmit_data", unknown),
            received_bytes=_read_words("received", folder / "counters/port_rcv_data", unknown),
            counts_to=_WORD_BYTES * 2**64,
            active=None if state is None else state == "active",
            errors=self._errors[name],
            unknown=unknown.reasons,
        )


def _resolve(path: Path) -> Path | None:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):
        return None


def _read_words(name: str, path: Path, unknown: UnknownFields) -> int | None:
    """Read a counter of 4-byte words and return it in bytes."""
    words = parse_number(unknown.text(name, path))
    if words is None:
        unknown.reasons.setdefault(name, f"{path.name} does not contain a number")
        return None
    if words == _FULL_32:
        unknown.reasons[name] = "the counter has 32 bits and has reached its maximum"
        return None
    return words * _WORD_BYTES


def _read_interface(folder: Path) -> NicReading:
    files = {"sent": "tx_bytes", "received": "rx_bytes"}
    counts = {way: read_number(folder / "statistics" / file) for way, file in files.items()}
    state = read_text(folder / "operstate")
    return NicReading(
        name=folder.name,
        rdma=False,
        sent_bytes=counts["sent"],
        received_bytes=counts["received"],
        active=None if state is None else state in ("up", "unknown"),
        unknown={way: f"{file} cannot be read" for way, file in files.items() if counts[way] is None},
    )
