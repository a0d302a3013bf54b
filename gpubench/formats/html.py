"""A self-contained HTML file: verdict, findings, curves, heat maps, all figures; no script, no network."""

from collections.abc import Iterator

from gpubench.formats.document import DocumentRun, DocumentWriter
from gpubench.formats.web.page import render
from gpubench.formats.web.trend import Past
from gpubench.formats.writer import Style, Target


def writer(target: Target, style: Style) -> DocumentWriter:
    """Writes a page."""
    past = Past(style.history)

    def in_ascii(run: DocumentRun) -> Iterator[str]:
        """The page with references in the place of characters that not every encoding of stdout has."""
        return (piece.encode("ascii", "xmlcharrefreplace").decode("ascii") for piece in render(run, past))

    return DocumentWriter(target, in_ascii)
