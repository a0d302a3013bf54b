"""JSON: one document per run, in a file, a folder of dated results, or a baseline. Also the writer of documents."""

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
    verdict=Verdict.ERROR, complete=False, sentence=f"{Verdict.ERROR}: the run has not ended, or was killed"
)
"""The outcome of a run that is still running or was killed."""

_BETWEEN_LINES = ",\n    "

_AT_EVERY_ROW = 500
"""Up to this number the file is rewritten after each row. Later at most one row in 500 is missing until the end."""


class JsonWriter:
    """Writes the document: to a stream once, at the end, and to a file again as rows come.

    A file is replaced atomically, so that readers and crashes never see half a document. It has `complete: false`
    until the end. With many rows it is not rewritten after each: the time would grow with the square of their number.
    """

    def __init__(self, target: Target, _shown: Presentation) -> None:
        self._target = target
        self._metadata: str | None = None
        self._rows: list[str] | None = None
        self._rows_section = ""
        self._rows_written = 0

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        # Made once: with thousands of ranks this takes longer than writing a row.
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
        """Return the text piece by piece: a job of a thousand ranks has a million paths."""
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
    """Return a value as exact JSON. '##' is escaped so that no CI runner finds a command in a string."""
    return json.dumps(value, indent=indent).replace("##", r"#\u0023")


def _row_texts(section: Section) -> Iterator[str]:
    """Return the rows of a table as JSON. Equal nodes share the text except for their names."""
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
        # Splitting the text takes as long as making it, so do it only for a second node with the same rows.
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
    """Write a whole text to `path`, atomically if possible.

    A file that is not regular, or whose directory is not writable, is written in place.
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
    """Metadata, rows so far and outcome of a run."""

    metadata: Metadata
    rows: Sequence[Row]
    report: Report


Render = Callable[[DocumentRun], Iterable[str]]


class DocumentWriter:
    """Writes the document that `render` returns: to a file as unfinished when the run begins, and when it ends.

    Rows are kept in memory until then, because rewriting the document would take time between measurements. csv, json,
    jsonl and table write every row to disk.
    """

    def __init__(self, target: Target, render: Render, *, marks_unfinished: bool = True) -> None:
        self._target = target
        self._marks_unfinished = marks_unfinished
        self._render = render
        self._metadata: Metadata | None = None
        self._rows: list[Row] = []

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        """Write an unfinished document, so that the file of an earlier run is not mistaken for this one."""
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
    """Return the writer factory of a format from its `render` function."""
    return lambda target, _shown: DocumentWriter(target, render, marks_unfinished=marks_unfinished)


class DatedWriter(JsonWriter):
    """Writes JSON to a new file in the folder that is its target."""

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        if self._target.path is None:
            raise ValueError("dated results go to a folder")
        for number in count(1):
            path = self._target.path / str(DatedName.of(metadata, number))
            try:
                # Exclusively, because runs on several hosts may begin in the same second.
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                continue
            self._target = Target(path=path)
            break
        super().begin(metadata, columns)


class BaselineWriter(JsonWriter):
    """Writes a baseline at the end of a run. Until then, and if the run fails to measure, the old file stays."""

    def _replace_file(self, report: Report) -> None:
        if is_kept(report):
            super()._replace_file(report)


def is_kept(report: Report) -> bool:
    """True if later results can be compared with this one: the run is complete and could measure."""
    return report.complete and report.verdict is not Verdict.ERROR


def fate(report: Report) -> str:
    """Return 'is kept', with a warning if the run failed, or why it is not kept."""
    if not is_kept(report):
        return f"is not kept: {report.verdict}"
    return "is kept" if report.verdict is not Verdict.FAIL else "is kept, though the run is FAIL: it is no healthy one"
