"""The processes of a job, and who listens to their rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report
    from gpubench.model.terms.statistics import ClockOffset

T = TypeVar("T")
RowT = TypeVar("RowT", contravariant=True)


class Group(Protocol):
    """The processes of a job, as MPI knows them; `hardware.mpi.one_process` has one of a single process."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""

    def collect(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on the first rank; None on the others."""

    def broadcast(self, value: T | None, root: int = 0) -> T:
        """Root's value, on every rank."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Each of the values as it is on the rank where it is largest; every rank has as many, and gets them."""

    def clock_offset(self) -> "ClockOffset":
        """The difference of this rank's `perf_counter` to the first rank's; every rank has to call it."""

    def split(self, color: int, key: int) -> "Group":
        """The group of the ranks with the same color, ordered by key."""


@runtime_checkable
class NativeBarrier(Protocol):
    """A group whose barrier is a C call."""

    def barrier_call(self) -> tuple[int, ...] | None:
        """The address of the function and its argument; None where the library does not tell its address."""


class Listener(Protocol[RowT]):
    """The receiver of rows while a measurement runs: it prints and stores them, here or in another process."""

    def begin(self, metadata: "Metadata") -> None:
        """The run is set up; rows follow."""

    def progress(self, done: int, total: int, label: str) -> None:
        """`done` of `total` rows are measured and `label` is next."""

    def row(self, row: RowT) -> None:
        """One more row is measured."""

    def end(self, report: "Report") -> None:
        """All rows were measured."""
