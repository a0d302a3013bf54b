"""A ring of workers over TCP: each is connected to the one before it and the one behind."""

import socket
import struct
import time
from dataclasses import dataclass

_SECONDS, _COUNT = struct.Struct("!d"), struct.Struct("!I")
_SECONDS_OF_COPYING, _LEAST_SECONDS = 0.3, 1e-6
_TIMES_AROUND = 50
_MOST_REPEATS = 2**14


PAIR = 2
"""Workers of a pair, which is the smallest ring."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The place of this worker among `size`, from 0, and its connections; what travels goes from `before` to `after`.

    Two workers have one connection, which is both.
    """

    place: int
    size: int
    before: socket.socket
    after: socket.socket

    def pass_on(self, words: bytes) -> bytes:
        """The first one's words, on every worker; the first returns once they came back to it.

        Raises OSError where somebody is gone.
        """
        if self.place:
            words = whole(self.before, len(words))
        self.after.sendall(words)
        if not self.place:
            whole(self.before, len(words))
        return words

    def largest(self, seconds: float) -> float:
        """The largest of what all workers give, on the first one; what it is so far on the others."""
        if not self.place:
            self.after.sendall(_SECONDS.pack(seconds))
            return float(_SECONDS.unpack(whole(self.before, _SECONDS.size))[0])
        found = max(seconds, _SECONDS.unpack(whole(self.before, _SECONDS.size))[0])
        self.after.sendall(_SECONDS.pack(found))
        return float(found)

    def meet(self) -> float:
        """Return once all workers have called it, one after the other; the seconds that words take around."""
        self.pass_on(b"\0")
        start = time.perf_counter()
        self.pass_on(b"\0")
        return time.perf_counter() - start

    def repeats(self, seconds: float, around: float) -> int:
        """How often all are to do what took this worker so long, to copy for some 0.3 s, the first one says.

        Longer in a ring that words take long `around`: they begin and end that much apart.
        """
        slowest = max(self.largest(seconds), _LEAST_SECONDS)
        wanted = max(_SECONDS_OF_COPYING, _TIMES_AROUND * around)
        (count,) = _COUNT.unpack(self.pass_on(_COUNT.pack(max(1, min(_MOST_REPEATS, int(wanted / slowest))))))
        return min(int(count), _MOST_REPEATS)


def whole(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises OSError where the other end is gone before."""
    parts = b""
    while len(parts) < count:
        data = connection.recv(count - len(parts))
        if not data:
            raise ConnectionError("the other end is gone")
        parts += data
    return parts
