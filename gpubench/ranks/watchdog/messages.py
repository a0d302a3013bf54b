"""Messages between ranks, watchdogs and the launcher: bounded, without nesting, with few imports."""

import contextlib
import fcntl
import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubench.model.terms.ranks import PHASES, Phase, RankState
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.errors import GpubenchError
    from gpubench.model.results.report import CollectiveRow, Metadata, Report
    from gpubench.model.terms.ranks import LostRank

END_SIGNAL = signal.SIGQUIT  # Exit code 3: its handler is C's `_exit`, called with the signal's number, 3


@dataclass(frozen=True, slots=True)
class Watched:
    """The rank that a watchdog belongs to."""

    rank: int
    ranks: int
    place: str
    host: str
    pid: int
    timeout_s: float


_SECONDS_TO_WRITE = 2.0
_STDERR = 2


def write_stderr_line(text: str) -> None:
    """Print it as gpubench's, unless stderr is full and nobody reads it."""
    _, writable, _ = select.select([], [_STDERR], [], _SECONDS_TO_WRITE)
    if writable:
        with suppress(OSError):
            os.write(_STDERR, f"gpubench: {text}\n".encode(errors="replace"))


_STEP, _PHASE, _DONE, _TOTAL, _LABEL_BYTES, _LEAVING = range(6)
_LABEL_AT = 64
_MOST_LABEL_BYTES = 256


@dataclass(frozen=True, slots=True)
class ProgressReading:
    """The page at one moment. `step` counts the phases entered so far."""

    step: int
    phase: Phase
    label: str
    done: int
    total: int


class ProgressBlock:
    """The page of progress that a rank writes and its watchdog reads: numbers of eight bytes, no clock."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("gpubench-progress")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._numbers = memoryview(self._page).cast("q")

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Begin another phase."""
        text = label.encode()[:_MOST_LABEL_BYTES]
        self._page[_LABEL_AT : _LABEL_AT + len(text)] = text
        numbers = self._numbers
        numbers[_LABEL_BYTES] = len(text)
        numbers[_PHASE] = PHASES.index(phase)
        numbers[_DONE] = 0
        numbers[_TOTAL] = operations
        numbers[_STEP] += 1

    def completed(self, operations: int = 1) -> None:
        """Count so many more completed operations."""
        self._numbers[_DONE] += operations

    def leave(self) -> None:
        """Note that this rank ends on its own."""
        self._numbers[_LEAVING] = 1

    def left(self) -> bool:
        """True where the rank ends, or ended, on its own."""
        return bool(self._numbers[_LEAVING])

    def read(self) -> ProgressReading:
        """The page as it is now."""
        step, phase, done, total, label_bytes = self._numbers[:_LEAVING]
        label = self._page[_LABEL_AT : _LABEL_AT + label_bytes].decode(errors="replace")
        return ProgressReading(step, PHASES[phase], label, done, total)


LOOPBACK = "127.0.0.1"

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_LOCAL_TO_A_HOST = ("127.", "169.254.", "0.")
_MOST_ADDRESSES = 6
_MOST_NAME_BYTES = 100

UdpAddress = tuple[str, int]
Address = UdpAddress | str  # Of UDP, or the name of an abstract socket


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
    """True for a bridge of containers, without a network card, given its folder in sysfs: docker0, cni0."""
    if not (interface / "bridge").exists():
        return False
    ports = [interface.parent / port.name for port in (interface / "brif").glob("*")]
    return not any((port / "device").exists() or list(port.glob("lower_*")) for port in ports)


MOST_BYTES = 2048  # No message is longer
_HEADER = struct.Struct("!BIIQQ")
_NUMBERS = struct.Struct("!IBqqqd")
_SECONDS = struct.Struct("!d")
_RANK = struct.Struct("!I")
_LENGTH = struct.Struct("!H")
_MOST_TEXT_BYTES = {"place": 256, "label": 256, "process": 1, "trouble": 1024}
_MOST_HOST_BYTES = 256


class MessageKind(IntEnum):
    """The kinds of messages."""

    ASK = 1
    STATE = 2
    LOST = 3
    FIRST = 4
    END = 5


@dataclass(frozen=True, slots=True)
class LossClaim:
    """A rank's claim that it was lost, at a time by its host's monotonic clock."""

    at_seconds: float
    host: str


Content = RankState | LossClaim | int | None  # Of STATE, LOST, FIRST (a rank), and of the others


@dataclass(frozen=True, slots=True)
class WatchdogMessage:
    """A message of one rank's watchdog to another's; `answers` is the counter of the message that it answers, or 0."""

    kind: MessageKind
    sender: int
    receiver: int
    counter: int
    answers: int = 0
    content: Content = None

    def to_bytes(self) -> bytes:
        """The message as `from_bytes` reads it; texts that are too long are cut."""
        head = _HEADER.pack(self.kind, self.sender, self.receiver, self.counter, self.answers)
        return head + _packed(self.content)

    @classmethod
    def from_bytes(cls, data: bytes) -> "WatchdogMessage":
        """The message in those bytes. Raises ValueError, IndexError or struct.error: they hold none."""
        number, sender, receiver, counter, answers = _HEADER.unpack_from(data)
        kind = MessageKind(number)
        return cls(kind, sender, receiver, counter, answers, _content(kind, sender, data[_HEADER.size :]))


def _packed(content: Content) -> bytes:
    if isinstance(content, RankState):
        phase = PHASES.index(content.phase)
        numbers = (content.pid, phase, content.step, content.done, content.total, content.idle_seconds)
        texts = (_packed_text(getattr(content, name), most) for name, most in _MOST_TEXT_BYTES.items())
        return _NUMBERS.pack(*numbers) + b"".join(texts)
    if isinstance(content, LossClaim):
        return _SECONDS.pack(content.at_seconds) + _packed_text(content.host, _MOST_HOST_BYTES)
    return b"" if content is None else _RANK.pack(content)


def _content(kind: MessageKind, sender: int, data: bytes) -> Content:
    if kind is MessageKind.STATE:
        pid, phase, step, done, total, idle_seconds = _NUMBERS.unpack_from(data)
        texts, rest = {}, data[_NUMBERS.size :]
        for name, most in _MOST_TEXT_BYTES.items():
            texts[name], rest = _text(rest, most)
        return RankState(
            rank=sender,
            pid=pid,
            phase=PHASES[phase],
            step=step,
            done=done,
            total=total,
            idle_seconds=_finite(idle_seconds),
            **texts,
        )
    if kind is MessageKind.LOST:
        return LossClaim(_finite(*_SECONDS.unpack_from(data)), _text(data[_SECONDS.size :], _MOST_HOST_BYTES)[0])
    return int(_RANK.unpack(data)[0]) if kind is MessageKind.FIRST else None


def _packed_text(text: str, most: int) -> bytes:
    data = text.encode(errors="replace")[:most]
    return _LENGTH.pack(len(data)) + data


def _text(data: bytes, most: int) -> tuple[str, bytes]:
    length = _LENGTH.unpack_from(data)[0]
    end = _LENGTH.size + length
    if length > most or end > len(data):
        message = f"a text of {length} bytes where {most} are allowed and {len(data)} are there"
        raise ValueError(message)
    return data[_LENGTH.size : end].decode(errors="replace"), data[end:]


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        message = f"{seconds} is no time"
        raise ValueError(message)
    return seconds


def connect(path: str) -> socket.socket:
    """A line to the gpubench that listens there, which goes on listening until the last one is closed."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(path)
    return line


def remove_if_abandoned(line: socket.socket) -> None:
    """Remove the folder in which a launcher listened that was killed: nobody else can, and nobody answers there."""
    path = line.getpeername()
    try:
        connect(path).close()
    except ConnectionRefusedError:
        import shutil

        shutil.rmtree(os.path.dirname(path), ignore_errors=True)  # noqa: PTH120 - pathlib takes long to import
    except OSError:
        pass  # it has ended and removed it


class ChannelSender:
    """The rank's end: a listener that sends what it gets over a line, a hello first where the rank is alive."""

    def __init__(self, way: str | socket.socket, *, alive: bool = True) -> None:
        self._socket = connect(way) if isinstance(way, str) else way
        if alive:
            self._send({"kind": "hello"})

    def begin(self, metadata: "Metadata") -> None:
        """The run is set up."""
        self._send({"kind": "begin", "metadata": metadata.to_record()})

    def progress(self, done: int, total: int, label: str) -> None:
        """`done` of `total` rows are measured and `label` is next."""
        self._send({"kind": "progress", "done": done, "total": total, "label": label})

    def row(self, row: "CollectiveRow") -> None:
        """One more row is measured."""
        self._send({"kind": "row", "row": row.to_record()})

    def end(self, report: "Report") -> None:
        """All rows were measured."""
        from gpubench.model.results.report import Table
        from gpubench.model.terms.plain import to_plain

        sections = {
            name: [to_plain(row) for row in section.rows()]
            for name, section in report.sections.items()
            if isinstance(section, Table)
        }
        self._send({"kind": "end", "report": report.to_record(), "sections": sections})

    def error(self, error: "GpubenchError") -> None:
        """Send the error that ends this rank."""
        self._send({"kind": "error", "error": error.to_record(), "at_seconds": time.monotonic()})

    def lost(self, lost: "LostRank") -> None:
        """Send a rank that ended without an error of its own."""
        state = lost.state.to_record()
        self._send({"kind": "lost", "state": state, "at_seconds": lost.at_seconds, "status": lost.status})

    def close(self) -> None:
        """Close the line."""
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
