"""A job's ranks as a group, and the listener for measured rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report
    from gpubench.model.terms.statistics import ClockOffset

T = TypeVar("T")
RowT = TypeVar("RowT", contravariant=True)


class Group(Protocol):
    """Some or all ranks of a job. All ranks in the group must call each method, in the same order."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order, on every rank."""

    def collect(self, value: T) -> list[T] | None:
        """Return the values of all ranks in rank order, on rank 0 only. None on other ranks."""

    def broadcast(self, value: T | None, root: int = 0) -> T: ...

    def barrier(self) -> None: ...

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Return the elementwise maximum over all ranks, on every rank."""

    def clock_offset(self) -> "ClockOffset":
        """Estimate this rank's `perf_counter` minus rank 0's."""

    def split(self, color: int, key: int) -> "Group":
        """Return the group of all ranks with the same color, ordered by key, as `MPI_Comm_split` does."""


@runtime_checkable
class NativeBarrier(Protocol):
    """A group whose barrier can be called from C."""

    def barrier_call(self) -> tuple[int, ...] | None:
        """Return the address of the barrier function and its argument. None if the address is unknown."""


class Listener(Protocol[RowT]):
    """Print and store rows during a measurement, in this process or in the launcher."""

    def begin(self, metadata: "Metadata") -> None: ...

    def progress(self, done: int, total: int, label: str) -> None:
        """Report how many of `total` rows are done, and the label of the next row."""

    def row(self, row: RowT) -> None: ...

    def end(self, report: "Report") -> None: ...
