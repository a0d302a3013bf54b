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
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
targets = [(word.rpartition(":")[0], int(word.rpartition(":")[2])) for word in sys.argv[1:]]
data = bytes(200)
while True:
    for target in targets:
        try:
            sender.sendto(data, target)
        except OSError:
            pass
"""

LOCAL_FLOOD = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
while True:
    for name in sys.argv[2:]:
        try:
            sender.sendto(bytes(200), "\\0" + name)
        except OSError:
            pass
"""

ASK = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
asking = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
asking.bind("")
asking.settimeout(float(sys.argv[4]))
asking.sendto(bytes.fromhex(sys.argv[3]), "\\0" + sys.argv[2])
try:
    print(len(asking.recv(1 << 16)))
except TimeoutError:
    print(0)
"""


def udp_addresses(pid: int) -> list[tuple[str, int]]:
    """The addresses that a process's UDP sockets are bound to; 0.0.0.0 for all interfaces."""
    inodes = _socket_inodes(pid)
    found = []
    for line in Path(f"/proc/{pid}/net/udp").read_text().splitlines()[1:]:
        words = line.split()
        if words[9] in inodes:
            address, port = words[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def local_names(pid: int) -> list[str]:
    """The names of a process's abstract sockets, without the NUL."""
    inodes = _socket_inodes(pid)
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [words[7][1:] for words in lines if len(words) > 7 and words[6] in inodes and words[7].startswith("@")]


def reachable(addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same as a sender of this host has to name them."""
    return [("127.0.0.1" if address == "0.0.0.0" else address, port) for address, port in addresses]


def send_over_udp(data: bytes, addresses: Sequence[tuple[str, int]]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for address in reachable(addresses):
            sender.sendto(data, address)


def send_locally(data: bytes, names: Sequence[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for name in names:
            sender.sendto(data, "\0" + name)


@contextmanager
def flood(addresses: Sequence[tuple[str, int]], senders: int = 1) -> Iterator[None]:
    """Datagrams at full speed over UDP, until the end."""
    words = [f"{address}:{port}" for address, port in reachable(addresses)]
    with _running(FLOOD, *words, count=senders):
        yield


@contextmanager
def local_flood(names: Sequence[str], uid: int = NOBODY, senders: int = 1) -> Iterator[None]:
    """Datagrams at full speed over abstract sockets, until the end."""
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
