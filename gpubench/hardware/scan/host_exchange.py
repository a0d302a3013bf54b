"""The exchange of the host backend: all workers of a ring send and receive at once over TCP, from CPU buffers."""

import threading
import time

from gpubench.hardware.scan.ring import Ring

_CHUNK_BYTES = 256 * 2**10
_BUFFER_BYTES = 2**20
_BYTES_PER_GB = 1e9
BOTH_WAYS = 2


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
