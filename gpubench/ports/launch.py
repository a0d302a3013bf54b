"""Operations that are ready to be issued."""

from collections.abc import Callable, Sequence
from typing import Protocol

Launch = Callable[[], object]
"""An operation with all its arguments bound: calling it issues the operation."""


class BatchedLaunch(Protocol):
    """A launch that knows, once it was timed, how long each batch of its operations took."""

    def __call__(self) -> object:
        """Issue all batches."""
        ...

    def batch_seconds(self) -> Sequence[float]:
        """Seconds of every batch but the first, which has the beginning in it."""
        ...
