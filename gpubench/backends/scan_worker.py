"""The worker process of a scan. It measures one rail with a different partner per round, over TCP or NCCL."""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import msgspec
from msgspec import Struct

from gpubench.backends.cuda import CudaDevice, open_device
from gpubench.backends.nccl.communicator import UNIQUE_ID_BYTES, BoundedCommunicator, new_unique_id
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.timing import copy_seconds
from gpubench.errors import ClientRefusedError, mps_refuses_clients
from gpubench.machine.children import die_with_parent
from gpubench.machine.nvml import Driver
from gpubench.model.results.scan import BOTH_WAYS, EXCHANGED_BYTES, LocalQuantity
from gpubench.model.terms.operation import POISON, Block, DataPattern, DataType, ReduceOp
from gpubench.model.terms.units import plural
from gpubench.ranks.scan.messages import REFUSED, WorkerTask, greet, receive_exactly, welcome

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_SECONDS, _COUNT = struct.Struct("!d"), struct.Struct("!I")
_SECONDS_OF_COPYING, _LEAST_SECONDS = 0.3, 1e-6
_TIMES_AROUND = 50
_MOST_REPEATS = 2**14

PAIR = 2  # A pair of workers is the smallest ring


class Ring(Struct, frozen=True):
    """A ring of `size` workers and this worker's connections. Data move from `before` to `after`.

    `place` is the position of this worker in the ring, from 0.
    """

    place: int
    size: int
    before: socket.socket
    after: socket.socket

    def broadcast(self, words: bytes) -> bytes:
        """Broadcast bytes from worker 0 around the ring, and return them. Raises OSError."""
        if self.place:
            words = receive_exactly(self.before, len(words))
        self.after.sendall(words)
        if not self.place:
            receive_exactly(self.before, len(words))
        return words

    def largest(self, seconds: float) -> float:
        """Reduce with max to worker 0. Other workers return their partial maximum."""
        if not self.place:
            self.after.sendall(_SECONDS.pack(seconds))
            return float(_SECONDS.unpack(receive_exactly(self.before, _SECONDS.size))[0])
        found = max(seconds, _SECONDS.unpack(receive_exactly(self.before, _SECONDS.size))[0])
        self.after.sendall(_SECONDS.pack(found))
        return float(found)

    def meet(self) -> float:
        """Wait for all workers, like a barrier. Return the time in seconds of one more message around the ring."""
        self.broadcast(b"\0")
        start = time.perf_counter()
        self.broadcast(b"\0")
        return time.perf_counter() - start

    def repeats(self, seconds: float, around: float) -> int:
        """Return how many repetitions take about 0.3 s, chosen by worker 0.

        If one message `around` the ring is slow, the repetitions take 50 times as long as that message.
        """
        slowest = max(self.largest(seconds), _LEAST_SECONDS)
        wanted = max(_SECONDS_OF_COPYING, _TIMES_AROUND * around)
        (count,) = _COUNT.unpack(self.broadcast(_COUNT.pack(max(1, min(_MOST_REPEATS, int(wanted / slowest))))))
        return min(int(count), _MOST_REPEATS)


_CHUNK_BYTES = 256 * 2**10
_BUFFER_BYTES = 2**20
_BYTES_PER_GB = 1e9


class WrongDataError(OSError):
    """The received data differ from the sent data."""


def exchange(ring: Ring) -> float:
    """Return the bandwidth through a worker in GB/s, both directions added. Measures for about 0.3 s. Raises
    OSError.
    """
    buffer, target = bytearray(_BUFFER_BYTES), bytearray(_BUFFER_BYTES)
    _both_ways(ring, buffer, target, _CHUNK_BYTES)
    seconds, around = _both_ways(ring, buffer, target, _CHUNK_BYTES)
    count = ring.repeats(seconds, around) * _CHUNK_BYTES
    seconds, _ = _both_ways(ring, buffer, target, count)
    return BOTH_WAYS * count / seconds / _BYTES_PER_GB


def all_reduce(ring: Ring) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s. Measures for about 0.3 s.

    Raises:
        WrongDataError: The result of the reduction is wrong.
        OSError: A connection broke.
        TimeoutError: The deadline has passed.
    """
    import numpy

    own = numpy.arange(ring.size * _CHUNK_BYTES // 8, dtype=numpy.int64)

    def seconds(repeats: int) -> "tuple[float, float, NDArray[numpy.int64]]":
        reduced = own
        around = ring.meet()
        start = time.monotonic()
        with ThreadPoolExecutor(1) as sender:
            for _ in range(repeats):
                reduced = _ring_reduce(ring, own + ring.place, sender)
        ring.meet()
        return time.monotonic() - start, around, reduced

    repeats = ring.repeats(*seconds(1)[:2])
    taken, _, reduced = seconds(repeats)
    wrong = int(numpy.count_nonzero(reduced != ring.size * own + ring.size * (ring.size - 1) // 2))
    if wrong:
        raise WrongDataError(plural(wrong, "wrong element"))
    return 2 * (ring.size - 1) * _CHUNK_BYTES * repeats / taken / _BYTES_PER_GB


def _ring_reduce(ring: Ring, data: "NDArray[numpy.int64]", sender: Executor) -> "NDArray[numpy.int64]":
    """Reduce data in place over all workers. Each step passes one chunk to the next worker, as in NCCL's ring
    algorithm.
    """
    import numpy

    parts = data.reshape(ring.size, -1)
    for step in range(2 * (ring.size - 1)):
        out, into = parts[(ring.place - step) % ring.size], parts[(ring.place - step - 1) % ring.size]
        sent = sender.submit(ring.after.sendall, out.tobytes())
        arrived = numpy.frombuffer(receive_exactly(ring.before, _CHUNK_BYTES), numpy.int64)
        sent.result()
        into[:] = into + arrived if step < ring.size - 1 else arrived
    return data


def _both_ways(ring: Ring, buffer: bytearray, target: bytearray, count: int) -> tuple[float, float]:
    """Return two times in seconds: until all workers have sent and received `count` bytes, and one message around
    the ring.
    """
    around = ring.meet()
    start = time.monotonic()
    failed: list[OSError] = []
    sender = threading.Thread(target=_send, args=(ring, buffer, count, failed), daemon=True)
    sender.start()
    left, view = count, memoryview(target)
    while left:
        received = ring.before.recv_into(view, min(left, len(target)))
        if not received:
            raise ConnectionError("the other end is gone")
        left -= received
    sender.join()
    if failed:
        raise failed[0]
    ring.meet()
    return time.monotonic() - start, around


def _send(ring: Ring, buffer: bytearray, count: int, failed: list[OSError]) -> None:
    view = memoryview(buffer)
    try:
        while count:
            sent = ring.after.send(view[: min(count, len(buffer))])
            count -= sent
    except OSError as error:
        failed.append(error)


_MOST_ROWS = 0x7FFFFFFF
_HOST_BYTES = 64 * 2**20
_HOST_SAMPLES = 5
_SECONDS_BETWEEN_LOOKS = 50e-6


class _Operation(Struct, frozen=True):
    """An operation to time.

    `put` enqueues the operation on a stream of a communicator, with a send and a receive address. `op` is its
    reduction. `source` is the rank whose data arrive, or None for a reduction over all ranks.
    """

    put: Callable[[BoundedCommunicator, tuple[int, int], int], None]
    op: ReduceOp | None
    source: int | None


class NcclRail:
    """A rail on the GPU with index `place`, or on the only visible GPU."""

    def __init__(self, place: int, driver: Driver) -> None:
        self._place, self._driver = place, driver
        self._opened: tuple[CudaDevice, NcclLibrary] | None = None

    def local(self) -> list[tuple[str, float]]:
        """Measure the bandwidth of copies from and to pinned host memory in GB/s."""
        device, _ = self._open()
        runtime = device.cupy.cuda.runtime
        host, on_gpu = device.cupy.cuda.alloc_pinned_memory(_HOST_BYTES), self._buffers[0]
        ways = (
            (LocalQuantity.FROM_HOST, on_gpu.address, host.ptr, runtime.memcpyHostToDevice),
            (LocalQuantity.TO_HOST, host.ptr, on_gpu.address, runtime.memcpyDeviceToHost),
        )
        found = []
        for quantity, to, source, kind in ways:
            seconds = []
            for _ in range(_HOST_SAMPLES):
                start = time.perf_counter()
                runtime.memcpyAsync(to, source, _HOST_BYTES, kind, device.stream.ptr)
                device.stream.synchronize()
                seconds.append(time.perf_counter() - start)
            found.append((quantity.value, _HOST_BYTES / min(seconds) / _BYTES_PER_GB))
        return found

    def exchange(self, ring: Ring, deadline: float) -> float:
        """Return the bandwidth through the GPU in GB/s, both directions added, with verified data. Raises OSError."""
        before, after = (ring.place - 1) % ring.size, (ring.place + 1) % ring.size

        def put(communicator: BoundedCommunicator, addresses: tuple[int, int], stream: int) -> None:
            communicator.exchange(addresses, (after, before), EXCHANGED_BYTES, stream, deadline)

        return BOTH_WAYS * self._measured(ring, _Operation(put, None, before), deadline)

    def all_reduce(self, ring: Ring, deadline: float) -> float:
        """Return the bus bandwidth of an all-reduce in GB/s, with verified data. Raises OSError."""

        def put(communicator: BoundedCommunicator, addresses: tuple[int, int], stream: int) -> None:
            communicator.all_reduce(addresses, EXCHANGED_BYTES // DataType.INT64.size_bytes, stream, deadline)

        factor = 2 * (ring.size - 1) / ring.size
        return factor * self._measured(ring, _Operation(put, ReduceOp.SUM, None), deadline)

    def _measured(self, ring: Ring, operation: _Operation, deadline: float) -> float:
        """Measure in a new communicator. Under MPS, report a CUDA error as ConnectionError."""
        device, library = self._open()
        try:
            return self._run_in_communicator(device, library, ring, operation, deadline)
        except OSError:
            raise
        except Exception as error:
            if not device.identity.mps:
                raise
            raise ConnectionError(f"under MPS, a client that crashes breaks the others: {error}") from error

    def _run_in_communicator(
        self, device: CudaDevice, library: NcclLibrary, ring: Ring, operation: _Operation, deadline: float
    ) -> float:
        send, receive = self._buffers
        unique_id = ring.broadcast(bytes(UNIQUE_ID_BYTES) if ring.place else new_unique_id(library))
        communicator = BoundedCommunicator(library, unique_id, ring.place, ring.size, deadline)
        try:
            data = DataPattern(DataType.INT64, operation.op, ring.size)
            count = EXCHANGED_BYTES // DataType.INT64.size_bytes
            block = Block(crc32(unique_id) & _MOST_ROWS, 1, count, 0, count)
            send.fill_sent(data, block, ring.place)
            receive.fill_byte(EXCHANGED_BYTES, POISON)
            put = partial(operation.put, communicator, (send.address, receive.address), device.stream.ptr)
            gb_s = self._timed(device, communicator, ring, put, deadline)
            wrong = receive.count_wrong(data, [(block, operation.source)])
            if wrong:
                raise WrongDataError(plural(wrong, "wrong element"))
            ring.meet()
            communicator.close(deadline)
        except BaseException:
            communicator.abort()
            raise
        return gb_s

    def _timed(
        self,
        device: CudaDevice,
        communicator: BoundedCommunicator,
        ring: Ring,
        put: Callable[[], None],
        deadline: float,
    ) -> float:
        def seconds(repeats: int) -> tuple[float, float]:
            device.stream.synchronize()
            around = ring.meet()
            start = time.perf_counter()
            for _ in range(repeats):
                put()
            while not device.stream.done:
                communicator.check()
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            return time.perf_counter() - start, around

        seconds(1)
        repeats = ring.repeats(*seconds(1))
        taken, _ = seconds(repeats)
        return repeats * EXCHANGED_BYTES / taken / _BYTES_PER_GB

    def open(self) -> None:
        """Open the GPU in phase 0, so that later rounds need no time for it. Raises ClientRefusedError under MPS."""
        device, _ = self._open()
        if device.identity.mps:
            runtime = device.cupy.cuda.runtime
            try:
                runtime.deviceSynchronize()
            except runtime.CUDARuntimeError as error:
                raise mps_refuses_clients(str(error)) from error

    def _open(self) -> tuple[CudaDevice, NcclLibrary]:
        if self._opened is None:
            device = open_device(self._place, self._place + 1, socket.gethostname(), self._driver, shared=True)
            self._opened = device, NcclLibrary()
            self._buffers: tuple[Any, Any] = device.allocate(EXCHANGED_BYTES), device.allocate(EXCHANGED_BYTES)
        return self._opened


_MEMORY_BYTES = 64 * 2**20
_MEMORY_SAMPLES = 5
_SECONDS_TO_CONNECT = 1.0
_SECONDS_BETWEEN_TRIES = 0.05
_HELLO = struct.Struct("!IIB")


class RailBackend(Protocol):
    """A device that measures one rail: a GPU or CPU buffers."""

    def open(self) -> None:
        """Open the device. Raise CouldNotMeasureError, or ClientRefusedError if a retry may succeed."""

    def local(self) -> list[tuple[str, float]]:
        """Measure phase 0, which needs no partner. Return pairs of a quantity's name and its value in GB/s."""

    def exchange(self, ring: Ring, deadline: float) -> float:
        """Return a ring's bandwidth in GB/s, the sum of both directions. Raise OSError or RuntimeError if it fails."""

    def all_reduce(self, ring: Ring, deadline: float) -> float:
        """Return the bus bandwidth of an all-reduce in the ring in GB/s. Raise OSError or RuntimeError."""


class HostRail:
    """A rail with CPU buffers and TCP. `device` is the index of the rail on its node."""

    def __init__(self, device: int) -> None:
        self.device = device

    def open(self) -> None:
        """Do nothing, because CPU buffers need no device."""

    def local(self) -> list[tuple[str, float]]:
        """Measure the bandwidth of single-threaded memory copies in GB/s."""
        seconds = min(copy_seconds(_MEMORY_BYTES, _MEMORY_SAMPLES))
        return [(LocalQuantity.MEMORY.value, _MEMORY_BYTES / seconds / _BYTES_PER_GB)]

    def exchange(self, ring: Ring, deadline: float) -> float:  # noqa: ARG002 - the connections have it as time-out
        return exchange(ring)

    def all_reduce(self, ring: Ring, deadline: float) -> float:  # noqa: ARG002 - the connections have it as time-out
        return all_reduce(ring)


def _nccl_rail(device: int) -> RailBackend:
    from gpubench.machine.nvml import read_driver

    return NcclRail(device, read_driver(os.environ))


BACKENDS: Mapping[str, Callable[[int], RailBackend]] = {"nccl": _nccl_rail, "host": HostRail}
"""Constructors of rail backends by name. The argument is the index of the rail's device."""


def main() -> None:
    """Execute tasks until the supervisor closes the socket. The job's secret arrives on the socket, not as an
    argument.
    """
    die_with_parent()
    backend_name, control_fd, listener_fd, device = sys.argv[1], *map(int, sys.argv[2:5])
    control = socket.socket(fileno=control_fd)
    listener = socket.socket(fileno=listener_fd)
    lines = control.makefile("rb")
    secret = bytes.fromhex(lines.readline().decode().strip())
    backend = BACKENDS[backend_name](device)
    for line in lines:
        answer = _execute(backend, listener, secret, msgspec.json.decode(line, type=WorkerTask))
        control.sendall(json.dumps(answer).encode() + b"\n")
    # All errors were sent to the supervisor. CuPy's destructors would print them again for every object.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _execute(backend: RailBackend, listener: socket.socket, secret: bytes, task: WorkerTask) -> dict[str, object]:
    try:
        deadline = time.monotonic() + task.deadline_s
        backend.open()
        if not task.number:
            return {"number": 0, "local": backend.local()}
        with ExitStack() as connections:
            ring = _ring(listener, secret, task, deadline, connections)
            measure = backend.all_reduce if task.reduces else backend.exchange
            return {"number": task.number, "gb_s": measure(ring, deadline)}
    except TimeoutError:
        return {"number": task.number, "failure": "deadline"}
    except ClientRefusedError as error:
        return {"number": task.number, "failure": REFUSED, "remark": str(error)}
    except WrongDataError as error:
        return {"number": task.number, "failure": "wrong", "remark": str(error)}
    except OSError as error:
        return {"number": task.number, "failure": "broken", "remark": str(error)}
    except Exception as error:  # noqa: BLE001 - report whatever a library raises
        return {"number": task.number, "failure": "failed", "remark": f"{type(error).__name__}: {error}"}


def _ring(listener: socket.socket, secret: bytes, task: WorkerTask, deadline: float, connections: ExitStack) -> Ring:
    """Connect the workers of a task. In a pair, the listening worker has position 0."""
    if task.ring:
        # Connect in a thread. If all workers waited for a connection first, the ring would deadlock.
        with ThreadPoolExecutor(1) as other:
            connecting = other.submit(_connected, secret, task, deadline)
            before = connections.enter_context(_accepted(listener, secret, task, deadline))
            after = connections.enter_context(connecting.result())
        ring = Ring(task.place, task.ring, before, after)
    else:
        connect = _connected(secret, task, deadline) if task.addresses else None
        one = connections.enter_context(connect or _accepted(listener, secret, task, deadline))
        ring = Ring(int(bool(task.addresses)), PAIR, one, one)
    for connection in (ring.before, ring.after):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
    return ring


def _accepted(listener: socket.socket, secret: bytes, task: WorkerTask, deadline: float) -> socket.socket:
    """Accept the partner of this round. Skip connections from earlier rounds that are still in the backlog."""
    expected = _HELLO.pack(task.number, task.partner, task.rail if task.partner_rail is None else task.partner_rail)
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        try:
            connection.settimeout(max(0.01, min(_SECONDS_TO_CONNECT, deadline - time.monotonic())))
            if welcome(connection, secret) == expected:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                connection.close()
            else:
                return connection
        time.sleep(_SECONDS_BETWEEN_TRIES)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError, ConnectionError):
        os._exit(1)
