"""A GPU as the rail of a node: NCCL between two or more of them, in a communicator that each round makes anew."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

from gpubench.hardware.cuda.device import CudaDevice, open_device
from gpubench.hardware.nccl.backend import NcclLibrary
from gpubench.hardware.nccl.bounded import BoundedCommunicator, new_unique_id
from gpubench.hardware.nccl.configuration import UNIQUE_ID_BYTES
from gpubench.hardware.node.nvml.library import Driver
from gpubench.hardware.scan.host_exchange import WrongDataError
from gpubench.hardware.scan.ring import Ring
from gpubench.model.results.scan_rounds import BOTH_WAYS, EXCHANGED_BYTES, LocalQuantity
from gpubench.model.terms.data_pattern import POISON, Block, DataPattern
from gpubench.model.terms.operation import DataType, ReduceOp

_MOST_ROWS = 0x7FFFFFFF
_HOST_BYTES = 64 * 2**20
_HOST_SAMPLES = 5
_BYTES_PER_GB = 1e9
_SECONDS_BETWEEN_LOOKS = 50e-6


_Put = Callable[[BoundedCommunicator, tuple[int, int], int], None]
"""Puts an operation of a communicator on a stream, from the first address to the second."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """What is timed: how it is put on a stream, its reduction, and the rank whose data arrive, None of all."""

    put: _Put
    op: ReduceOp | None
    source: int | None


class NcclRail:
    """The GPU that a rank's place on its node selects, or the only one that the process sees."""

    def __init__(self, place: int, driver: Driver) -> None:
        self._place, self._driver = place, driver
        self._opened: tuple[CudaDevice, NcclLibrary] | None = None

    def local(self) -> list[tuple[str, float]]:
        """Copies from and to pinned host memory."""
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
        """GB/s that pass the GPU in both directions together, over some 0.3 s; what arrived is verified.

        Raises OSError where another end is gone or NCCL fails, TimeoutError among them, and where data are wrong.
        """
        before, after = (ring.place - 1) % ring.size, (ring.place + 1) % ring.size

        def put(communicator: BoundedCommunicator, addresses: tuple[int, int], stream: int) -> None:
            communicator.exchange(addresses, (after, before), EXCHANGED_BYTES, stream, deadline)

        return BOTH_WAYS * self._measured(ring, _Operation(put, None, before), deadline)

    def all_reduce(self, ring: Ring, deadline: float) -> float:
        """The busbw of an all-reduce of the ring's GPUs, GB/s, over some 0.3 s; the sums are verified.

        Raises as `exchange`.
        """

        def put(communicator: BoundedCommunicator, addresses: tuple[int, int], stream: int) -> None:
            communicator.all_reduce(addresses, EXCHANGED_BYTES // DataType.INT64.size_bytes, stream, deadline)

        factor = 2 * (ring.size - 1) / ring.size
        return factor * self._measured(ring, _Operation(put, ReduceOp.SUM, None), deadline)

    def _measured(self, ring: Ring, operation: _Operation, deadline: float) -> float:
        """GB/s: a buffer over the time of an operation, in a communicator made for this, whose id makes the data."""
        device, library = self._open()
        send, receive = self._buffers
        unique_id = ring.pass_on(bytes(UNIQUE_ID_BYTES) if ring.place else new_unique_id(library))
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
                raise WrongDataError(f"{wrong} wrong elements")
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

    def _open(self) -> tuple[CudaDevice, NcclLibrary]:
        """The GPU and NCCL, when they are first needed: in phase 0, which has time for it."""
        if self._opened is None:
            device = open_device(self._place, self._place + 1, socket.gethostname(), self._driver, shared=True)
            self._opened = device, NcclLibrary()
            self._buffers: tuple[Any, Any] = device.allocate(EXCHANGED_BYTES), device.allocate(EXCHANGED_BYTES)
        return self._opened
