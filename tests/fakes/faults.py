"""A backend that corrupts results, on any hardware, to test verification."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubench.ports.backend import Array, Backend, BatchedLaunch, Launch, Memory

if TYPE_CHECKING:
    from gpubench.ports.backend import CollectiveCalls

Fault = Callable[[Array], None]


def wrong_block(data: Array) -> None:
    """Corrupt a block of 64 bytes."""
    data[64:128] ^= 0xFF


def swapped_blocks(data: Array) -> None:
    """Swap two blocks of a kilobyte."""
    first = data[:1024].copy()
    data[:1024] = data[1024:2048]
    data[1024:2048] = first


def one_bit(data: Array) -> None:
    """Flip a single bit."""
    data[777] ^= 0x10


def nothing() -> None:
    """An empty launch."""


class FaultyBackend:
    """A backend whose timed results are corrupted by `fault`, or, with `skip`, not computed.

    Warm-ups run normally, so a skipped timed operation leaves stale data.
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
