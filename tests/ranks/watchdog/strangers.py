"""Attacks on the watchdogs of a job by another user of the host."""

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
    """Return the addresses at which a process listens. 0.0.0.0 means all interfaces."""
    inodes = _socket_inodes(pid)
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[9] in inodes and words[3] == LISTENS:
            address, port = words[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def local_names(pid: int) -> list[str]:
    """Return the names of a process's abstract sockets, without the NUL."""
    inodes = _socket_inodes(pid)
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    found = [words[7][1:] for words in lines if len(words) > 7 and words[6] in inodes and words[7].startswith("@")]
    return list(dict.fromkeys(found))  # accepted connections have the same name


def line_to(address: tuple[str, int] | str) -> socket.socket:
    """Connect to a TCP address or an abstract socket."""
    line = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    line.connect("\0" + address if isinstance(address, str) else address)
    return line


@contextmanager
def flood(addresses: Sequence[tuple[str, int]], senders: int = 1) -> Iterator[None]:
    """Connect over TCP as fast as possible."""
    words = [f"{address}:{port}" for address, port in addresses]
    with _running(FLOOD, *words, count=senders):
        yield


@contextmanager
def local_flood(names: Sequence[str], uid: int = NOBODY, senders: int = 1) -> Iterator[None]:
    """Connect to abstract sockets as fast as possible."""
    with _running(LOCAL_FLOOD, str(uid), *names, count=senders):
        yield


def answer_to_stranger(name: str, data: bytes) -> int:
    """Return how many bytes a watchdog answers to another user."""
    return answer_to(name, data, NOBODY, 0.5)


def answer_to(name: str, data: bytes, uid: int, seconds: float = 60) -> int:
    """Return how many bytes a watchdog answers to a user within these seconds."""
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
