"""Byte counters of NICs and of the loopback, from sysfs: RDMA ports by their own, other interfaces by the kernel's.

Those of RDMA ports were not seen on hardware: written after Documentation/ABI/stable/sysfs-class-infiniband.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpubench.hardware.node.rdma_ports import port_folders, port_word
from gpubench.hardware.system_files import UnknownFields, exists, is_link, names_in, number_of, text_of
from gpubench.model.facts.traffic import LOOPBACK, NicReading

_WORD_BYTES = 4
"""port_xmit_data and port_rcv_data count words of four bytes."""

_FULL_32 = 2**32 - 1
_FULL = "the counter has 32 bits, and is full"
_ERRORS = ("port_rcv_errors", "port_xmit_discards", "link_downed", "symbol_error")
_SELDOM = 10


class NicCounters:
    """Reads every port of every NIC, and the loopback. Interfaces of RDMA devices are left out: their ports count."""

    def __init__(self, root: Path = Path("/")) -> None:
        infiniband, net = root / "sys/class/infiniband", root / "sys/class/net"
        self._ports = {
            nic: folder for name in names_in(infiniband) for nic, folder in port_folders(infiniband / name).items()
        }
        devices = {_device(infiniband / name / "device") for name in names_in(infiniband)}
        interfaces = [
            net / name
            for name in names_in(net)
            if is_link(net / name / "device") or exists(net / name / "device")
            if _device(net / name / "device") not in devices
        ]
        loopback = [net / LOOPBACK] if exists(net / LOOPBACK) else []
        self._interfaces = [_InterfaceFiles.of(folder) for folder in (*interfaces, *loopback)]
        self._count = 0
        self._errors: dict[str, dict[str, int]] = {}

    def read(self) -> tuple[NicReading, ...]:
        """All of them at one moment; errors, each a question to the NIC's firmware, at one of ten."""
        seldom = self._count % _SELDOM == 0
        self._count += 1
        ports = [self._port(name, folder, seldom=seldom) for name, folder in self._ports.items()]
        return (*ports, *(each.read() for each in self._interfaces))

    def _port(self, name: str, folder: Path, *, seldom: bool) -> NicReading:
        unknown: dict[str, str] = {}
        counters = folder / "counters"
        state = port_word(text_of(folder / "state"))
        if seldom:
            self._errors[name] = dict(_numbers(counters, _ERRORS))
        return NicReading(
            name=name,
            rdma=True,
            sent_bytes=_words("sent", counters / "port_xmit_data", unknown),
            received_bytes=_words("received", counters / "port_rcv_data", unknown),
            counts_to=_WORD_BYTES * 2**64,
            active=None if state is None else state == "active",
            errors=self._errors.get(name, {}),
            unknown=unknown,
        )


def _device(path: Path) -> Path | None:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):
        return None


def _words(name: str, path: Path, unknown: dict[str, str]) -> int | None:
    reader = UnknownFields()
    reader.text(name, path)
    words = number_of(path)
    if words is None:
        unknown[name] = reader.reasons.get(name, f"{path.name} holds no number")
        return None
    if words == _FULL_32:
        unknown[name] = _FULL
        return None
    return words * _WORD_BYTES


def _numbers(folder: Path, names: Iterable[str]) -> Iterable[tuple[str, int]]:
    for name in names:
        count = number_of(folder / name)
        if count is not None:
            yield name, count


@dataclass(frozen=True, slots=True)
class _InterfaceFiles:
    """The files of an interface of the kernel's, each named once: they are read at every interval."""

    name: str
    sent: Path
    received: Path
    state: Path

    @classmethod
    def of(cls, folder: Path) -> "_InterfaceFiles":
        """Those in its folder."""
        counters = folder / "statistics"
        return cls(folder.name, counters / "tx_bytes", counters / "rx_bytes", folder / "operstate")

    def read(self) -> NicReading:
        """Its counters now."""
        sent, received, state = number_of(self.sent), number_of(self.received), text_of(self.state)
        unread = {"sent": (sent, self.sent), "received": (received, self.received)}
        return NicReading(
            name=self.name,
            rdma=False,
            sent_bytes=sent,
            received_bytes=received,
            active=None if state is None else state in ("up", "unknown"),
            unknown={way: f"{file.name} cannot be read" for way, (count, file) in unread.items() if count is None},
        )
