"""Who hears of a measurement while it runs."""

from typing import Protocol, TypeVar

from gpubench.model.results.report import Metadata, Report

RowT = TypeVar("RowT", contravariant=True)


class Listener(Protocol[RowT]):
    """Who hears of a measurement while it runs: what prints and stores, here or in another process."""

    def begin(self, metadata: Metadata) -> None:
        """The run is set up; rows follow."""
        ...

    def progress(self, done: int, total: int, label: str) -> None:
        """`done` of `total` rows are measured and `label` is next."""
        ...

    def row(self, row: RowT) -> None:
        """One more row is measured."""
        ...

    def end(self, report: Report) -> None:
        """All rows were measured."""
        ...
