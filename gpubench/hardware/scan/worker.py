"""A worker: the process that measures one rail of one node with one partner a round, and that may hang or die.

It is told what to do by its supervisor over a socket pair, and ends with it.
"""

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from gpubench.hardware.launch.launcher import die_with_parent
from gpubench.hardware.scan.host_exchange import WrongDataError, all_reduce, exchange
from gpubench.hardware.scan.messages import greet, welcome
from gpubench.hardware.scan.ring import PAIR, Ring
from gpubench.hardware.timing.host_copy import copy_seconds
from gpubench.model.results.scan_rounds import LocalQuantity

_MEMORY_BYTES = 64 * 2**20
_MEMORY_SAMPLES = 5
_BYTES_PER_GB = 1e9
_SECONDS_TO_CONNECT = 1.0
_SECONDS_BETWEEN_TRIES = 0.05
_HELLO = struct.Struct("!IIB")


class RailBackend(Protocol):
    """What measures: GPUs, or CPU buffers."""

    def local(self) -> list[tuple[str, float]]:
        """Phase 0: quantities by name, GB/s."""
        ...

    def exchange(self, ring: Ring, deadline: float) -> float:
        """GB/s both ways together, with those of the ring. Raises OSError, or RuntimeError."""
        ...

    def all_reduce(self, ring: Ring, deadline: float) -> float:
        """The busbw of an all-reduce of the ring, GB/s. Raises OSError, or RuntimeError."""
        ...


class HostRail:
    """CPU buffers, and TCP between them; `device` is the place of the rail in its node."""

    def __init__(self, device: int) -> None:
        self.device = device

    def local(self) -> list[tuple[str, float]]:
        """Copies in memory by one thread."""
        seconds = min(copy_seconds(_MEMORY_BYTES, _MEMORY_SAMPLES))
        return [(LocalQuantity.MEMORY.value, _MEMORY_BYTES / seconds / _BYTES_PER_GB)]

    def exchange(self, ring: Ring, deadline: float) -> float:  # noqa: ARG002 - the connections know it
        """Bytes to and fro, in a stream."""
        return exchange(ring)

    def all_reduce(self, ring: Ring, deadline: float) -> float:  # noqa: ARG002 - the connections know it
        """Sums that go around the ring twice."""
        return all_reduce(ring)


def _nccl_rail(device: int) -> RailBackend:
    from gpubench.hardware.node.nvml.library import read_driver
    from gpubench.hardware.scan.nccl_rail import NcclRail

    return NcclRail(device, read_driver(os.environ))


BACKENDS: Mapping[str, Callable[[int], RailBackend]] = {"nccl": _nccl_rail, "host": HostRail}
"""What may measure, by name, made with the device of the rail."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a supervisor tells its worker: to measure by itself where `number` is 0, else with a partner.

    `addresses` are the partner's, none where this end listens. In a ring of `ring` workers, in which it has a `place`,
    it listens for the partner before it, which is of rail `partner_rail`, and `addresses` are of the one behind; with
    `reduces` they reduce together. None is the rail of its own.
    """

    number: int
    rail: int
    partner: int
    rank: int
    deadline_s: float
    addresses: tuple[tuple[str, int], ...] = ()
    ring: int = 0
    place: int = 0
    partner_rail: int | None = None
    reduces: bool = False


def main() -> None:
    """Do what the supervisor says, until it is gone. Settings are in the arguments, the job's secret on the socket."""
    die_with_parent()
    backend_name, control_fd, listener_fd, device = sys.argv[1], *map(int, sys.argv[2:5])
    control = socket.socket(fileno=control_fd)
    listener = socket.socket(fileno=listener_fd)
    lines = control.makefile("rb")
    secret = bytes.fromhex(lines.readline().decode().strip())
    backend = BACKENDS[backend_name](device)
    for line in lines:
        plain = json.loads(line)
        addresses = tuple((str(host), int(port)) for host, port in plain.pop("addresses"))
        answer = _done(backend, listener, secret, WorkerTask(**plain, addresses=addresses))
        control.sendall(json.dumps(answer).encode() + b"\n")


def _done(backend: RailBackend, listener: socket.socket, secret: bytes, task: WorkerTask) -> dict[str, object]:
    """The answer to a task: figures, or what went wrong."""
    try:
        if not task.number:
            return {"number": 0, "local": backend.local()}
        deadline = time.monotonic() + task.deadline_s
        with ExitStack() as connections:
            ring = _ring(listener, secret, task, deadline, connections)
            measure = backend.all_reduce if task.reduces else backend.exchange
            return {"number": task.number, "gb_s": measure(ring, deadline)}
    except TimeoutError:
        return {"number": task.number, "failure": "deadline"}
    except WrongDataError as error:
        return {"number": task.number, "failure": "wrong", "remark": str(error)}
    except OSError as error:
        return {"number": task.number, "failure": "broken", "remark": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a library raises is this worker's own fault, and told
        return {"number": task.number, "failure": "failed", "remark": f"{type(error).__name__}: {error}"}


def _ring(listener: socket.socket, secret: bytes, task: WorkerTask, deadline: float, connections: ExitStack) -> Ring:
    """The workers of this task, connected: of a pair the one that listens is the first."""
    if task.ring:
        # Who connects waits until it is greeted: all would, if none listened meanwhile.
        with ThreadPoolExecutor(1) as other:
            connecting = other.submit(_connected, secret, task, deadline)
            before = connections.enter_context(_accepted(listener, secret, task, deadline))
            after = connections.enter_context(connecting.result())
        ring = Ring(task.place, task.ring, before, after)
    else:
        connect = _connected(secret, task, deadline) if task.addresses else None
        one = connections.enter_context(connect or _accepted(listener, secret, task, deadline))
        ring = Ring(int(bool(task.addresses)), PAIR, one, one)
    for each in (ring.before, ring.after):
        each.settimeout(max(0.01, deadline - time.monotonic()))
    return ring


def _accepted(listener: socket.socket, secret: bytes, task: WorkerTask, deadline: float) -> socket.socket:
    """The connection of this round from this partner; of earlier rounds some may still wait to be accepted."""
    expected = _HELLO.pack(task.number, task.partner, task.rail if task.partner_rail is None else task.partner_rail)
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        try:
            connection.settimeout(max(0.01, min(_SECONDS_TO_CONNECT, deadline - time.monotonic())))
            if welcome(connection, secret) == expected:
                _set_up(connection)
                return connection
        except OSError:
            pass
        connection.close()


def _connected(secret: bytes, task: WorkerTask, deadline: float) -> socket.socket:
    while True:
        for address in task.addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                connection = socket.create_connection(address, min(left, _SECONDS_TO_CONNECT * 2))
            except OSError:
                continue
            try:
                connection.settimeout(left)
                greet(connection, secret, _HELLO.pack(task.number, task.rank, task.rail))
                _set_up(connection)
            except OSError:
                connection.close()
            else:
                return connection
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError, ConnectionError):
        os._exit(1)
