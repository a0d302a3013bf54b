"""A group of one process, so that nothing needs MPI to be imported or tested."""

from collections.abc import Sequence
from typing import Self, TypeVar

from gpubench.model.terms.statistics.lateness import ClockOffset

T = TypeVar("T")


class AloneGroup:
    """The only rank of its job."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        """The one value there is."""
        return [value]

    def collect(self, value: T) -> list[T] | None:
        """The one value there is."""
        return [value]

    def broadcast(self, value: T | None, root: int = 0) -> T:  # noqa: ARG002
        """The value itself."""
        if value is None:
            raise ValueError("the root of a broadcast has a value")
        return value

    def barrier(self) -> None:
        """Nothing to wait for."""

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """The values themselves."""
        return values

    def clock_offset(self) -> ClockOffset:
        """None from itself."""
        return ClockOffset(0.0, 0.0)

    def split(self, color: int, key: int) -> Self:  # noqa: ARG002
        """This group: it has one process, whatever the color."""
        return self
