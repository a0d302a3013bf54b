"""Rings of connected sockets in one process."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TypeVar

from gpubench.backends.scan_worker import PAIR, Ring

T = TypeVar("T")

SECONDS = 20.0


def everywhere(size: int, does: Callable[[Ring], T]) -> list[T]:
    """Call a function as every worker of a ring, in threads that hang up when they are done. A pair has one
    connection.
    """
    with ExitStack() as stack, ThreadPoolExecutor(size) as threads:
        pairs = [socket.socketpair() for _ in range(1 if size == PAIR else size)]
        for each in (end for pair in pairs for end in pair):
            stack.enter_context(each).settimeout(SECONDS)
        if size == PAIR:
            found = [Ring(place, PAIR, end, end) for place, end in enumerate(pairs[0])]
        else:
            found = [Ring(place, size, pairs[place - 1][1], pairs[place][0]) for place in range(size)]

        def until_done(ring: Ring) -> T:
            try:
                return does(ring)
            finally:
                with suppress(OSError):  # the other end has already closed it
                    for own in {ring.before, ring.after}:
                        own.shutdown(socket.SHUT_WR)

        return list(threads.map(until_done, found))
