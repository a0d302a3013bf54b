"""The time that this process takes to copy within host memory."""

import time

from gpubench.hardware.timing.clock import no_garbage_collection


def copy_seconds(size_bytes: int, samples: int) -> list[float]:
    """Seconds of each of some copies of so many bytes from one buffer to another, by this thread alone.

    Both are written before: pages that nobody wrote to are all the same one, and stay in a cache.
    """
    source, destination = bytearray(b"\1") * size_bytes, bytearray(b"\2") * size_bytes
    into = memoryview(destination)
    seconds = []
    with no_garbage_collection():
        for _ in range(samples):
            started = time.perf_counter()
            into[:] = source
            seconds.append(time.perf_counter() - started)
    return seconds
