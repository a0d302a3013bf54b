"""A port of an RDMA device beyond its state and rate: its addresses, what it counted, and its device file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_ROCE_HEADERS_BYTES = 40 + 8 + 12 + 4 + 28 + 4
"""Bytes of a packet that the kernel leaves for RoCE: GRH, UDP, BTH, XRC, atomics, ICRC (`iboe_get_mtu`)."""

RDMA_MTUS = (256, 512, 1024, 2048, 4096)
"""The sizes that RDMA knows (`enum ibv_mtu`). Every adapter of a GPU server can do the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An address of a port, by its place in the port's table.

    `kind` is the kernel's word: 'IB/RoCE v1' or 'RoCE v2'; `address` says of which sort it is (ipv4, link_local,
    global), and never the address itself.
    """

    index: int
    kind: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port. None is unknown, and `unknown` says why, by field.

    `nic` is the NIC's name in the snapshot. `physical_state` and `link_layer` are the kernel's words. `counters` and
    `hardware_counters` are those that tell of errors, waits and congestion, by their names in sysfs, counted since the
    driver was loaded. `gids` are the first that are set; `device_file` is what a process opens to use the device, which
    a container may lack (`RankFacts.device_files`). Not seen on hardware.
    """

    nic: str
    physical_state: str | None = None
    link_layer: str | None = None
    counters: Mapping[str, int] | None = None
    hardware_counters: Mapping[str, int] | None = None
    gids: tuple[Gid, ...] | None = None
    device_file: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


def roce_mtu_bytes(interface_mtu_bytes: int) -> int | None:
    """The MTU that RoCE uses over an interface: the largest that fits with all headers; None where none does.

    So an interface's usual 1500 leaves 1024, and 4200 is the least for 4096 (Linux, include/rdma/ib_addr.h).
    """
    room_bytes = interface_mtu_bytes - _ROCE_HEADERS_BYTES
    return max((size for size in RDMA_MTUS if size <= room_bytes), default=None)
