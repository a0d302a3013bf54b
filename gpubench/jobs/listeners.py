"""Listeners of measurements whose rows nobody shows: one that forgets them, one that keeps them."""

from gpubench.model.results.report import CollectiveRow, Metadata, PairRow, Report, Row


class NullListener:
    """The listener of every rank but the first: the first rank hands on the rows of all."""

    def begin(self, metadata: Metadata) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, label: str) -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""

    def end(self, report: Report) -> None:
        """Nothing."""


class ReportCollector(NullListener):
    """Keeps metadata, rows and report of a measurement that is a part of another job."""

    def __init__(self) -> None:
        self.metadata: Metadata | None = None
        self.pairs: list[PairRow] = []
        self.collectives: list[CollectiveRow] = []
        self.report: Report | None = None

    def begin(self, metadata: Metadata) -> None:
        """Keep the metadata."""
        self.metadata = metadata

    def row(self, row: Row) -> None:
        """Keep the row."""
        if isinstance(row, PairRow):
            self.pairs.append(row)
        elif isinstance(row, CollectiveRow):
            self.collectives.append(row)

    def end(self, report: Report) -> None:
        """Keep the report."""
        self.report = report
