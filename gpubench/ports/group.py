"""The ranks of a job as a group, and the receiver of their rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report
    from gpubench.model.terms.statistics import ClockOffset

T = TypeVar("T")
RowT = TypeVar("RowT", contravariant=True)


class Group(Protocol):
    """The ranks of a job, or some of them. All of them have to call each method, in the same order."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""

    def collect(self, value: T) -> list[T] | None:
        """Return every rank's value, in rank order, on rank 0. None on other ranks."""

    def broadcast(self, value: T | None, root: int = 0) -> T: ...

    def barrier(self) -> None: ...

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Return the elementwise maximum over all ranks, on every rank."""

    def clock_offset(self) -> "ClockOffset":
        """Return this rank's `perf_counter` minus rank 0's."""

    def split(self, color: int, key: int) -> "Group":
        """Return the group of the ranks with the same color, ordered by key (`MPI_Comm_split`)."""


@runtime_checkable
class NativeBarrier(Protocol):
    """A group whose barrier is a C call."""

    def barrier_call(self) -> tuple[int, ...] | None:
        """Return the address of the function and its argument. None if the address is unknown."""


class Listener(Protocol[RowT]):
    """Prints and stores rows while a measurement runs, here or in another process."""

    def begin(self, metadata: "Metadata") -> None: ...

    def progress(self, done: int, total: int, label: str) -> None:
        """Report that `done` of `total` rows are measured, and the label of the next row."""

    def row(self, row: RowT) -> None: ...

    def end(self, report: "Report") -> None: ...
