"""The receiver of rows while a measurement runs."""

from typing import Protocol, TypeVar

from gpubench.model.results.report import Metadata, Report

RowT = TypeVar("RowT", contravariant=True)


class Listener(Protocol[RowT]):
    """The receiver of rows while a measurement runs: it prints and stores them, here or in another process."""

    def begin(self, metadata: Metadata) -> None:
        """The run is set up; rows follow."""

    def progress(self, done: int, total: int, label: str) -> None:
        """`done` of `total` rows are measured and `label` is next."""

    def row(self, row: RowT) -> None:
        """One more row is measured."""

    def end(self, report: Report) -> None:
        """All rows were measured."""
