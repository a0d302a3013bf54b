"""The exchange of the host backend: all workers of a ring send and receive at once over TCP, from CPU buffers."""

import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

from gpubench.hardware.scan.ring import Ring, whole
from gpubench.model.results.scan_rounds import BOTH_WAYS

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_CHUNK_BYTES = 256 * 2**10
_BUFFER_BYTES = 2**20
_BYTES_PER_GB = 1e9


class WrongDataError(OSError):
    """What arrived is not what was sent."""


def exchange(ring: Ring) -> float:
    """GB/s that pass a worker in both directions together, over some 0.3 s, as slow as the slowest of the ring.

    A first exchange of 256 KiB shows how fast it is, so that a slow link is measured and not given up. Raises OSError,
    TimeoutError among them.
    """
    buffer, target = bytearray(_BUFFER_BYTES), bytearray(_BUFFER_BYTES)
    _both_ways(ring, buffer, target, _CHUNK_BYTES)
    seconds, around = _both_ways(ring, buffer, target, _CHUNK_BYTES)
    count = ring.repeats(seconds, around) * _CHUNK_BYTES
    seconds, _ = _both_ways(ring, buffer, target, count)
    return BOTH_WAYS * count / seconds / _BYTES_PER_GB


def all_reduce(ring: Ring) -> float:
    """The busbw, GB/s, of an all-reduce of the ring over some 0.3 s: sums go around it once, and results once more.

    Raises WrongDataError where a sum is wrong, OSError, TimeoutError among them, where somebody is gone.
    """
    import numpy

    own = numpy.arange(ring.size * _CHUNK_BYTES // 8, dtype=numpy.int64)

    def seconds(repeats: int) -> "tuple[float, float, NDArray[numpy.int64]]":
        reduced = own
        around = ring.meet()
        start = time.monotonic()
        with ThreadPoolExecutor(1) as sender:
            for _ in range(repeats):
                reduced = _reduced(ring, own + ring.place, sender)
        ring.meet()
        return time.monotonic() - start, around, reduced

    repeats = ring.repeats(*seconds(1)[:2])
    taken, _, reduced = seconds(repeats)
    wrong = int(numpy.count_nonzero(reduced != ring.size * own + ring.size * (ring.size - 1) // 2))
    if wrong:
        raise WrongDataError(f"{wrong} wrong elements")
    return 2 * (ring.size - 1) * _CHUNK_BYTES * repeats / taken / _BYTES_PER_GB


def _reduced(ring: Ring, data: "NDArray[numpy.int64]", sender: Executor) -> "NDArray[numpy.int64]":
    """Put the sum over all ranks in the place of the own data: as in NCCL's rings, a part of it travels each step."""
    import numpy

    parts = data.reshape(ring.size, -1)
    for step in range(2 * (ring.size - 1)):
        out, into = parts[(ring.place - step) % ring.size], parts[(ring.place - step - 1) % ring.size]
        sent = sender.submit(ring.after.sendall, out.tobytes())
        arrived = numpy.frombuffer(whole(ring.before, _CHUNK_BYTES), numpy.int64)
        sent.result()
        into[:] = into + arrived if step < ring.size - 1 else arrived
    return data


def _both_ways(ring: Ring, buffer: bytearray, target: bytearray, count: int) -> tuple[float, float]:
    """Seconds until all have sent and received so many bytes, and those that words take around the ring."""
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
