"""Operations that are ready to be issued, and the clock around them."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

Launch = Callable[[], object]
"""An operation with all its arguments bound: calling it issues the operation."""


class BatchedLaunch(Protocol):
    """A launch that knows, once it was timed, how long each batch of its operations took."""

    def __call__(self) -> object:
        """Issue all batches."""

    def batch_seconds(self) -> Sequence[float]:
        """Seconds of every batch but the first, which has the beginning in it."""


class LaunchTimer(Protocol):
    """Launches of many operations, and the time that they take."""

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """One launch that issues all of `launches` in order, or replays a captured graph of them so many times."""

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """One launch that issues all of `launches` in order, with a look at a clock after each so many of them."""

    def once(self, launch: Launch) -> None:
        """Issue an operation and wait for it, untimed and unreported: what comes next finds everything at work."""

    def seconds(self, launch: Launch) -> float:
        """Wall time from issuing `launch` to the completion of all it started, in seconds."""

    def together(self, launch: Launch) -> float:
        """The same from the moment at which every rank was ready to issue it; every rank calls it."""


@runtime_checkable
class IssueClock(Protocol):
    """A timer that knows how long the host took to issue what it timed last."""

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Seconds of the host to issue one operation; None where the device's queue may have been full."""
