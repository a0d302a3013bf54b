"""The report of `--quiet`: what was found, and the last sentence."""

from collections.abc import Sequence

from gpubench.formats.text.page import Page
from gpubench.formats.writer import Style, Target
from gpubench.model.results.report import Metadata, Report, Row


class QuietWriter:
    """Prints findings and sentence at the end, and nothing before."""

    def __init__(self, target: Target, style: Style) -> None:
        self._page = Page(target, style)

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""

    def end(self, report: Report) -> None:
        """Findings and sentence."""
        self._page.brief(report)
