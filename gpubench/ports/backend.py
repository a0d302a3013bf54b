"""What runs collectives on one rank."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import BatchedLaunch, Launch
from gpubench.ports.memory import Memory


class Backend(Protocol):
    """What runs collectives on one rank: memory, calls, and a clock around them."""

    @property
    def name(self) -> str:
        """Its word on the command line and in rows."""
        ...

    @property
    def calls(self) -> CollectiveCalls:
        """The library's collectives."""
        ...

    @property
    def buffers(self) -> int:
        """Buffers of the largest size that a sweep holds at once, the backend's own working space included."""
        ...

    def libraries(self) -> Mapping[str, str]:
        """Versions and files of what does the work, by name, for the metadata."""
        ...

    def free_bytes(self) -> int:
        """Memory this rank can still take for buffers."""
        ...

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation of that size, kept until `close`."""
        ...

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """One launch that issues all of `launches` in order, or replays a captured graph of them so many times."""
        ...

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """One launch that issues all of `launches` in order, with a look at a clock after each so many of them."""
        ...

    def seconds(self, launch: Launch) -> float:
        """Wall time from issuing `launch` to the completion of all it started, in seconds."""
        ...

    def close(self) -> None:
        """Give back memory and communicators."""
        ...
