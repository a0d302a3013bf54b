"""The last sentence of a report, alone on stdout: `--summary`."""

from collections.abc import Iterator

from gpubench.formats.document import DocumentRun, documents


def render(run: DocumentRun) -> Iterator[str]:
    """The sentence."""
    yield f"{run.report.sentence or run.report.verdict}\n"


writer = documents(render)
