"""The ports of RDMA devices beyond state and rate, from /sys/class/infiniband, which everyone may read.

A counter costs the NIC a question to its firmware, so those alone are read that tell of trouble. Not seen on hardware:
written after the kernel's documentation of its files, and checked against trees made of it.
"""

from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from gpubench.hardware.system_files import UnknownFields, exists, names_in, number_of, printable, text_of
from gpubench.model.facts.rdma_port import Gid, RdmaPort

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
"""Of mlx5's counters (the kernel's Documentation/ABI/stable/sysfs-class-infiniband) and of EFA's."""

_MOST_GIDS = 16


def read_rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """Every port of every RDMA device, named as its NIC is."""
    folder = root / "sys/class/infiniband"
    files = _device_files(root / "sys/class/infiniband_verbs")
    return tuple(
        _port(port, nic, files.get(name))
        for name in names_in(folder)
        for nic, port in port_folders(folder / name).items()
    )


def _device_files(folder: Path) -> dict[str, str]:
    """The device file of each RDMA device: /sys/class/infiniband_verbs/uverbs0/ibdev holds the device's name."""
    devices = {name: text_of(folder / name / "ibdev") for name in names_in(folder)}
    return {device: f"/dev/infiniband/{printable(name)}" for name, device in devices.items() if device is not None}


def port_folders(device: Path) -> dict[str, Path]:
    """The folders of a device's ports by the NICs' names: mlx5_0, or mlx5_0:2 where there are several."""
    numbers = sorted((name for name in names_in(device / "ports") if name.isdecimal()), key=int)
    if len(numbers) < 2:
        return {device.name: device / "ports" / (numbers[0] if numbers else "1")}
    return {f"{device.name}:{number}": device / "ports" / number for number in numbers}


def port_word(text: str | None) -> str | None:
    """'4: ACTIVE' → 'active'."""
    return None if text is None else text.rpartition(":")[2].strip().lower()


def _port(folder: Path, nic: str, device_file: str | None) -> RdmaPort:
    unknown = UnknownFields()
    state = port_word(unknown.text("physical_state", folder / "phys_state"))
    layer = unknown.text("link_layer", folder / "link_layer")
    if device_file is None:
        unknown.reasons["device_file"] = "no verbs device of the kernel belongs to it: ib_uverbs may not be loaded"
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
    """Those wanted that the port has and that hold a number; None where it has no such counters at all."""
    names = names_in(folder)
    if not names:
        unknown.reasons[field] = f"{folder.name} is empty or cannot be read"
        return None
    numbers = {name: number_of(folder / name) for name in names if name in wanted}
    return {name: number for name, number in numbers.items() if number is not None}


def _gids(folder: Path, unknown: UnknownFields) -> tuple[Gid, ...] | None:
    """The first entries of the table that are set: the kernel answers an error for the type of one that is not."""
    kinds, addresses = folder / "gid_attrs/types", folder / "gids"
    if not exists(kinds):
        unknown.reasons["gids"] = "gid_attrs/types is not there"
        return None
    found = []
    for index in map(str, range(_MOST_GIDS)):
        kind = text_of(kinds / index)
        address = _address(text_of(addresses / index)) if kind is not None else None
        if kind is not None and address is not None:
            found.append(Gid(index=int(index), kind=printable(kind), address=address))
    return tuple(found)


def _address(text: str | None) -> str | None:
    """Of which sort a GID is; None for one that is not set, or is none."""
    try:
        address = IPv6Address(text or "")
    except AddressValueError:
        return None
    if int(address) == 0:
        return None
    if address.ipv4_mapped is not None:
        return "ipv4"
    return "link_local" if address.is_link_local else "global"
