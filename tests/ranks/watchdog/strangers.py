"""Attacks on the watchdogs of a job by somebody who knows nothing but what every user of the host may see."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cli.running import ROOT, environment

NOBODY = 65534

FLOOD = """
import socket, struct, sys
targets = [(word.rpartition(":")[0], int(word.rpartition(":")[2])) for word in sys.argv[1:]]
while True:
    for target in targets:
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # or ports run out
            line.settimeout(0.2)
            try:
                line.connect(target)
                line.sendall(bytes(200))
            except OSError:
                pass
"""

LOCAL_FLOOD = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
while True:
    for name in sys.argv[2:]:
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect("\\0" + name)
                line.sendall(bytes(200))
            except OSError:
                pass
"""

ASK = """
import os, socket, sys
from multiprocessing.connection import Connection
os.setuid(int(sys.argv[1]))
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + sys.argv[2])
asking = Connection(line.detach())
try:
    asking.send_bytes(bytes.fromhex(sys.argv[3]))
    print(len(asking.recv_bytes()) if asking.poll(float(sys.argv[4])) else 0)
except (EOFError, OSError):
    print(0)
"""


LISTENS = "0A"


def tcp_addresses(pid: int) -> list[tuple[str, int]]:
    """The addresses at which a process listens; 0.0.0.0 for all interfaces."""
    inodes = _socket_inodes(pid)
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[9] in inodes and words[3] == LISTENS:
            address, port = words[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def local_names(pid: int) -> list[str]:
    """The names of a process's abstract sockets, without the NUL."""
    inodes = _socket_inodes(pid)
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    found = [words[7][1:] for words in lines if len(words) > 7 and words[6] in inodes and words[7].startswith("@")]
    return list(dict.fromkeys(found))  # what was accepted has the name too


def line_to(address: tuple[str, int] | str) -> socket.socket:
    """A connection to a TCP address, or to an abstract socket of that name."""
    line = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    line.connect("\0" + address if isinstance(address, str) else address)
    return line


@contextmanager
def flood(addresses: Sequence[tuple[str, int]], senders: int = 1) -> Iterator[None]:
    """Connections at full speed over TCP, until the end."""
    words = [f"{address}:{port}" for address, port in addresses]
    with _running(FLOOD, *words, count=senders):
        yield


@contextmanager
def local_flood(names: Sequence[str], uid: int = NOBODY, senders: int = 1) -> Iterator[None]:
    """Connections at full speed over abstract sockets, until the end."""
    with _running(LOCAL_FLOOD, str(uid), *names, count=senders):
        yield


def answer_to_stranger(name: str, data: bytes) -> int:
    """The bytes that a watchdog answers another user of this host; 0 for silence."""
    return answer_to(name, data, NOBODY, 0.5)


def answer_to(name: str, data: bytes, uid: int, seconds: float = 60) -> int:
    """The same for a user of one's choice, who waits so long."""
    command = [sys.executable, "-c", ASK, str(uid), name, data.hex(), str(seconds)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)


@contextmanager
def _running(script: str, *words: str, count: int) -> Iterator[None]:
    command = [sys.executable, "-c", script, *words]
    every = [subprocess.Popen(command, cwd=ROOT, env=environment()) for _ in range(count)]
    try:
        yield
    finally:
        for each in every:
            each.kill()
            each.wait()


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found
