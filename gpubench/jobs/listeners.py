"""Listeners of rows that nobody shows."""

from gpubench.model.results.report import Metadata, Report, Row


class NullListener:
    """The listener of every rank but the first: the rows are not its to tell."""

    def begin(self, metadata: Metadata) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, label: str) -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""

    def end(self, report: Report) -> None:
        """Nothing."""
