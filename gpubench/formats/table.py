"""The table for people: each subject has a view of its own, on the same page."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from gpubench.formats.writer import Style, Target
from gpubench.model.results.ending import is_brief
from gpubench.model.results.report import Metadata, Report, Row

if TYPE_CHECKING:
    from gpubench.formats.text.page import Page


class View(Protocol):
    """The part of a table that shows one subject."""

    def row(self, row: Row) -> None:
        """One more row."""
        ...

    def end(self, report: Report) -> None:
        """The last lines: findings, verdict."""
        ...


_SUBJECTS = ("collective", "p2p", "compare", "check", "explain", "scan", "libraries", "watch", "overlap")
"""The subjects with a view of their own; others are shown as topo is."""


class TableWriter:
    """Prints a run as it happens."""

    def __init__(self, target: Target, style: Style) -> None:
        self._target = target
        self._style = style
        self._page: Page | None = None
        self._view: View | None = None
        self._rows: list[Row] = []

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        """The header."""
        from gpubench.formats.text.page import Page

        self._page = Page(self._target, self._style)
        self._view = _view(self._page, metadata)

    def row(self, row: Row) -> None:
        """A line, or what it adds to one."""
        if self._style.plot:
            self._rows.append(row)
        if self._view is not None:
            self._view.row(row)

    def end(self, report: Report) -> None:
        """The footer."""
        if self._view is not None and self._page is not None:
            if self._style.plot:
                from gpubench.model.results.curves import charts

                self._page.charts = [chart for chart in charts(self._rows) if not chart.logarithmic]
            self._view.end(report)
            self._page.close()


def _view(page: "Page", metadata: Metadata) -> View:
    """The view of the run's subject, `P2pView` of `text.p2p`; only that one is imported."""
    subject = "collective" if metadata.collective is not None else metadata.subject
    name = "brief" if is_brief(metadata.options) else subject if subject in _SUBJECTS else "topo"
    make: Callable[[Page, Metadata], View] = getattr(
        import_module(f"gpubench.formats.text.{name}"), f"{name.capitalize()}View"
    )
    return make(page, metadata)
