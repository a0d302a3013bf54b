"""Documents that are written whole: nobody can read half of one, so it says that it is unfinished until it is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpubench.formats.json import UNFINISHED, replace_atomically
from gpubench.formats.writer import Style, Target
from gpubench.model.results.report import Metadata, Report, Row


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """All that is known of a run: its metadata, the rows until now, and how it ended."""

    metadata: Metadata
    rows: Sequence[Row]
    report: Report


Render = Callable[[DocumentRun], Iterable[str]]


class DocumentWriter:
    """Writes what a function makes of a run: a file when it begins, as unfinished, and again when it ends.

    In between rows are kept and the machine left alone: making a document of each of them would cost time between
    measurements. csv, json, jsonl and table have every row on disk.
    """

    def __init__(self, target: Target, render: Render, *, marks_unfinished: bool = True) -> None:
        self._target = target
        self._marks_unfinished = marks_unfinished
        self._render = render
        self._metadata: Metadata | None = None
        self._rows: list[Row] = []

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        """A file that says ERROR: nothing of an earlier run may pass for this one's."""
        self._metadata = metadata
        if self._marks_unfinished and self._target.path is not None:
            self._write(UNFINISHED)

    def row(self, row: Row) -> None:
        """Keep it."""
        self._rows.append(row)

    def end(self, report: Report) -> None:
        """The document."""
        self._write(report)

    def _write(self, report: Report) -> None:
        if self._metadata is None:
            return
        pieces = self._render(DocumentRun(self._metadata, self._rows, report))
        if self._target.path is not None:
            replace_atomically(self._target.path, pieces)
        elif self._target.stream is not None:
            self._target.stream.writelines(pieces)
            self._target.stream.flush()


def documents(render: Render, *, marks_unfinished: bool = True) -> Callable[[Target, Style], DocumentWriter]:
    """Makes the writers of a format that `render` makes of a run."""
    return lambda target, _style: DocumentWriter(target, render, marks_unfinished=marks_unfinished)
