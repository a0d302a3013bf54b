"""A backend that spoils results, on any hardware: what verification has to catch."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubench.ports.backend import Array, Backend, BatchedLaunch, Launch, Memory

if TYPE_CHECKING:
    from gpubench.ports.backend import CollectiveCalls

Fault = Callable[[Array], None]


def wrong_block(data: Array) -> None:
    """A block of 64 bytes is not what was sent."""
    data[64:128] ^= 0xFF


def swapped_blocks(data: Array) -> None:
    """Two blocks of a kilobyte changed places."""
    first = data[:1024].copy()
    data[:1024] = data[1024:2048]
    data[1024:2048] = first


def one_bit(data: Array) -> None:
    """A single bit flipped."""
    data[777] ^= 0x10


def nothing() -> None:
    """A launch of no operation."""


class FaultyBackend:
    """Another backend whose timed results are spoiled: by `fault`, or, with `skip`, by not running at all.

    Warm-ups run untouched, so a skipped timed operation leaves the buffer as it was: stale.
    """

    def __init__(self, backend: Backend, fault: Fault | None, *, skip: bool = False, timed: int) -> None:
        self._backend = backend
        self._fault = fault
        self._skip = skip
        self._timed = timed
        self._bound = 0
        self._memories: list[Memory] = []
        self.name = backend.name
        self.calls: CollectiveCalls = backend.calls
        self.buffers = backend.buffers

    def libraries(self) -> Mapping[str, str]:
        return self._backend.libraries()

    def free_bytes(self) -> int:
        return self._backend.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        self._memories.append(self._backend.allocate(size_bytes))
        return self._memories[-1]

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        self._bound = len(launches)
        return self._backend.bind(launches, graph_replays)

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        self._bound = len(launches)
        return self._backend.batch_launches(launches, operations)

    def once(self, launch: Launch) -> None:
        self._backend.once(launch)

    def seconds(self, launch: Launch) -> float:
        return self._spoilt(self._backend.seconds, launch)

    def together(self, launch: Launch) -> float:
        return self._spoilt(self._backend.together, launch)

    def _spoilt(self, timed: Callable[[Launch], float], launch: Launch) -> float:
        if self._bound != self._timed:
            return timed(launch)
        seconds = timed(nothing if self._skip else launch)
        if self._fault is not None:
            receive = self._memories[1]
            self._fault(receive.array(0, receive.size_bytes, "uint8"))
        return seconds

    def close(self) -> None:
        self._backend.close()
