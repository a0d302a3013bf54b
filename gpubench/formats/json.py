"""JSON: one document per run, in a file, a folder of dated results, or a baseline.

`DocumentWriter` also writes the other formats whose files are written as a whole.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from gpubench.formats.registry import Presentation, Target
from gpubench.model.results.history import DatedName
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    SCHEMA_VERSION,
    Matrix,
    Metadata,
    Report,
    Row,
    RowsOfNode,
    Section,
    Table,
)
from gpubench.model.results.result_file import ALIKE, alike_rows
from gpubench.model.terms.verdict import Verdict

UNFINISHED = Report(
    verdict=Verdict.ERROR, complete=False, sentence=f"{Verdict.ERROR}: the run has not ended, or it was killed"
)
"""The report in a file during the run. It stays there if the run is killed."""

_BETWEEN_LINES = ",\n    "

_AT_EVERY_ROW = 500
"""Rewrite the file after each row up to this number of rows. Later, the file may lack one row in 500."""


class JsonWriter:
    """Writes the document to a stream once, at the end, or to a file repeatedly while rows arrive.

    A file is replaced atomically, so that no reader sees half a document, even after a crash. It has `complete: false`
    until the end. Long runs do not rewrite it after each row, because the time would grow quadratically with the number
    of rows.
    """

    def __init__(self, target: Target, _shown: Presentation) -> None:
        self._target = target
        self._metadata: str | None = None
        self._rows: list[str] | None = None
        self._rows_section = ""
        self._rows_written = 0

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        # Convert the metadata once, because with thousands of ranks this takes longer than writing a row.
        self._metadata = json_text(metadata.to_record(), indent=2).replace("\n", "\n  ")
        self._rows_section = metadata.rows_section
        self._rows = [] if columns else None
        self._replace_file(UNFINISHED)

    def row(self, row: Row) -> None:
        if self._rows is None:
            return
        self._rows.append(f"\n    {json_text(row.to_record())}")
        rows = len(self._rows)
        if rows - self._rows_written > rows // _AT_EVERY_ROW:
            self._replace_file(UNFINISHED)
            self._rows_written = rows

    def end(self, report: Report) -> None:
        if self._metadata is None:
            return
        if self._target.stream is not None:
            self._target.stream.writelines(self._document(self._metadata, report))
            self._target.stream.flush()
        self._replace_file(report)

    def _replace_file(self, report: Report) -> None:
        if self._target.path is not None and self._metadata is not None:
            replace_atomically(self._target.path, self._document(self._metadata, report))

    def _document(self, metadata: str, report: Report) -> Iterator[str]:
        """Yield the document in pieces, because a job with a thousand ranks has a million paths."""
        separator = "{\n"
        for name, pieces in self._sections(metadata, report):
            yield f"{separator}  {json_text(name)}: "
            yield from pieces
            separator = ",\n"
        yield "\n}\n"

    def _sections(self, metadata: str, report: Report) -> Iterator[tuple[str, Iterable[str]]]:
        outcome = report.to_record()
        head = {"schema_version": SCHEMA_VERSION, "complete": outcome["complete"], "verdict": outcome["verdict"]}
        head |= {"sentence": outcome["sentence"], "duration_s": outcome["duration_s"]}
        for name, value in head.items():
            yield name, [json_text(value)]
        yield "metadata", [metadata]
        if self._rows is not None:
            yield self._rows_section, ["[", ",".join(self._rows), "\n  ]" if self._rows else "]"]
        alike: dict[str, Iterable[str]] = {}
        for name, section in report.sections.items():
            if isinstance(section, Matrix):
                members = (f"{json_text(row)}: {json_text(cells)}" for row, cells in section.cells.items())
                yield name, _lines("{", members, "}")
                continue
            found = alike_rows(name, section)
            if found is None:
                yield name, _lines("[", _row_texts(section), "]")
                continue
            alike[name] = _lines("[", map(json_text, found.nodes), "]")
            yield name, _lines("[", (json_text(row.to_record()) for part in found.written for row in part), "]")
        if alike:
            yield ALIKE, _lines("{", (f"{json_text(name)}: {''.join(texts)}" for name, texts in alike.items()), "}")
        yield FINDINGS_SECTION, _lines("[", map(json_text, outcome["findings"]), "]")


def json_text(value: object, indent: int | None = None) -> str:
    """Convert a value to JSON. '##' is escaped because CI runners search their logs for commands that begin with it."""
    return json.dumps(value, indent=indent).replace("##", r"#\u0023")


def _row_texts(section: Section) -> Iterator[str]:
    """Yield the rows of a table as JSON. For nodes with equal rows, only the host name in the text is replaced."""
    if not isinstance(section, Table):
        return
    if section.parts is None:
        yield from (json_text(row.to_record()) for row in section.rows())
        return
    shared, cut = None, list[str]()
    for part in section.parts():
        if not part.rows:
            continue
        if part.rows is not shared:
            shared, cut = part.rows, []
            yield _joined(part)
            continue
        # Split the text only for a second node with the same rows, because splitting is as slow as converting the rows.
        if not cut:
            name = f"node-{uuid4()}"
            cut = _joined(replace(part, host=name)).split(json_text(name))
        yield json_text(part.host).join(cut)


def _joined(part: RowsOfNode) -> str:
    return _BETWEEN_LINES.join(json_text(row.to_record()) for row in part)


def _lines(opening: str, items: Iterable[str], closing: str) -> Iterator[str]:
    separator = f"{opening}\n    "
    for item in items:
        yield f"{separator}{item}"
        separator = _BETWEEN_LINES
    yield f"\n  {closing}" if separator == _BETWEEN_LINES else opening + closing


def replace_atomically(path: Path, text: Iterable[str]) -> None:
    """Write `text` to `path`, atomically if possible.

    If the path is not a regular file, or its directory is not writable, overwrite it in place.
    """
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        with path.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.writelines(text)
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.writelines(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class DocumentRun(Struct, frozen=True):
    """The metadata, the rows so far and the report of a run."""

    metadata: Metadata
    rows: Sequence[Row]
    report: Report


Render = Callable[[DocumentRun], Iterable[str]]


class DocumentWriter:
    """Writes a document as a whole, from the text that `render` returns.

    The run writes a file twice: an unfinished document at the beginning, and the final one at the end. Rows stay in
    memory, because rewriting the document would take time between measurements. The formats csv, json, jsonl and table
    write rows to disk during the run.
    """

    def __init__(self, target: Target, render: Render, *, marks_unfinished: bool = True) -> None:
        self._target = target
        self._marks_unfinished = marks_unfinished
        self._render = render
        self._metadata: Metadata | None = None
        self._rows: list[Row] = []

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        """Write an unfinished document, so that the file of an earlier run is not mistaken for the result of this
        run.
        """
        self._metadata = metadata
        if self._marks_unfinished and self._target.path is not None:
            self._write(UNFINISHED)

    def row(self, row: Row) -> None:
        self._rows.append(row)

    def end(self, report: Report) -> None:
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


def documents(render: Render, *, marks_unfinished: bool = True) -> Callable[[Target, Presentation], DocumentWriter]:
    """Return a function that creates the writer of a format with this `render` function."""
    return lambda target, _shown: DocumentWriter(target, render, marks_unfinished=marks_unfinished)


class DatedWriter(JsonWriter):
    """Writes JSON to a new file in a folder, with the date in its name."""

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        if self._target.path is None:
            raise ValueError("dated results are written to a folder")
        for number in count(1):
            path = self._target.path / str(DatedName.of(metadata, number))
            try:
                # Fail if the file exists, because runs on several hosts may begin in the same second.
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                continue
            self._target = Target(path=path)
            break
        super().begin(metadata, columns)


class BaselineWriter(JsonWriter):
    """Writes a baseline at the end of a run. If the run is incomplete or ends with ERROR, the old baseline stays."""

    def _replace_file(self, report: Report) -> None:
        if is_kept(report):
            super()._replace_file(report)


def is_kept(report: Report) -> bool:
    """True if the report may become a baseline: the run is complete and its verdict is not ERROR."""
    return report.complete and report.verdict is not Verdict.ERROR


def fate(report: Report) -> str:
    """Return the end of the note about a new baseline: kept, kept although the run failed, or not kept."""
    if not is_kept(report):
        return f"is not kept: {report.verdict}"
    unfit = ", although the run is FAIL and so not a healthy baseline" if report.verdict is Verdict.FAIL else ""
    return f"is kept{unfit}"
