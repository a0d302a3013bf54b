"""The last sentence of a report, alone on stdout: `--summary`."""

from collections.abc import Iterator

from gpubench.formats.document import DocumentRun, documents
from gpubench.model.terms.foreign_text import printable_line


def render(run: DocumentRun) -> Iterator[str]:
    """The sentence."""
    yield printable_line(run.report.sentence or run.report.verdict) + "\n"


writer = documents(render)
