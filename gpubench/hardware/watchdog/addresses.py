"""Where watchdogs are found: abstract sockets on one host, and the addresses that a host offers to others."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_LOCAL_TO_A_HOST = ("127.", "169.254.", "0.")
_MOST_ADDRESSES = 6
_MOST_NAME_BYTES = 100

UdpAddress = tuple[str, int]
Address = UdpAddress | str
"""Of UDP, or the name of an abstract socket."""


@dataclass(frozen=True, slots=True)
class WatchdogAddress:
    """The addresses of a rank's watchdog, and the rank in words: 'rank 3 on gpu07 (GPU 3, ...)'."""

    place: str
    host: str
    addresses: Sequence[UdpAddress]

    def addresses_from(self, own_host: str) -> list[UdpAddress]:
        """All addresses by which it may be reached from a host."""
        every = [(address, port) for address, port in self.addresses]
        return [each for each in every if each[0] != LOOPBACK or self.host == own_host]


def job_name(environment: Mapping[str, str]) -> str:
    """The launcher's name of the job, which its ranks on one host share before they have started MPI."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID")
    found = [environment[name] for name in names if name in environment]
    return "-".join(found or [str(os.getppid())])


def local_name(job: str, rank: int) -> str:
    """The abstract socket of a rank's watchdog; its name has no place in the file system."""
    return f"\0gpubench-{os.getuid()}-{rank}-{job}"[:_MOST_NAME_BYTES]


def offered_addresses(root: Path = Path("/")) -> list[str]:
    """The IPv4 addresses of this host that may lead here from another: of interfaces that are up, without those of
    bridges for containers and virtual machines, which are the same on every host.
    """
    return list(_offered(root))[:_MOST_ADDRESSES]


def bound_sockets() -> list[socket.socket]:
    """A UDP socket for loopback and for each offered address; none hears what comes to another interface."""
    every = []
    for address in (LOOPBACK, *offered_addresses()):
        each = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            each.bind((address, 0))
        except OSError:  # an address that has just gone
            each.close()
        else:
            every.append(each)
    return every


def _offered(root: Path) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                flags = struct.unpack_from("H", fcntl.ioctl(asked.fileno(), _SIOCGIFFLAGS, request), 16)[0]
                address = socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24])
                local = address.startswith(_LOCAL_TO_A_HOST) or is_inner_bridge(root / "sys/class/net" / name)
                if flags & _IFF_UP and not local:
                    yield address


def is_inner_bridge(interface: Path) -> bool:
    """True for a bridge without a network card, given its folder in sysfs: docker0, virbr0, cni0.

    A bridge that a card is part of, itself or below a bond or VLAN, has the address of the host.
    """
    if not (interface / "bridge").exists():
        return False
    ports = [interface.parent / port.name for port in (interface / "brif").glob("*")]
    return not any((port / "device").exists() or list(port.glob("lower_*")) for port in ports)
