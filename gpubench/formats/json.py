"""JSON: one document with metadata, sections, findings, verdict; `report.schema.json` beside this file describes it."""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpubench.formats.writer import Format, Style, Target
from gpubench.model.report import FINDINGS_SECTION, SCHEMA_VERSION, Matrix, Metadata, Report, Row
from gpubench.model.verdict import Verdict

_UNFINISHED = Report(verdict=Verdict.ERROR, complete=False)


class JsonWriter:
    """Writes the document: to a stream once, at the end; to a file anew at every row, `complete: false` until then.

    The file is replaced atomically, so that a reader, or a crash, never meets half a document.
    """

    def __init__(self, target: Target, _style: Style) -> None:
        self._target = target
        self._metadata: dict[str, Any] | None = None
        self._rows: list[str] | None = None
        self._rows_section = ""

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        """A document without rows."""
        self._metadata = metadata.to_record()
        self._rows_section = metadata.rows_section
        self._rows = [] if columns else None
        self._replace_file(_UNFINISHED)

    def row(self, row: Row) -> None:
        """A document with one row more."""
        if self._rows is not None:
            self._rows.append(json.dumps(row.to_record()))
            self._replace_file(_UNFINISHED)

    def end(self, report: Report) -> None:
        """The final document."""
        if self._metadata is None:
            return
        if self._target.stream is not None:
            self._target.stream.write(self._document(report))
            self._target.stream.flush()
        self._replace_file(report)

    def _replace_file(self, report: Report) -> None:
        if self._target.path is not None:
            replace_atomically(self._target.path, self._document(report))

    def _document(self, report: Report) -> str:
        outcome = report.to_record()
        head = {"schema_version": SCHEMA_VERSION, "complete": outcome["complete"], "verdict": outcome["verdict"]}
        sections = {name: json.dumps(value) for name, value in head.items()}
        sections["metadata"] = json.dumps(self._metadata, indent=2).replace("\n", "\n  ")
        if self._rows is not None:
            sections[self._rows_section] = _list(self._rows)
        for name, section in report.sections.items():
            if isinstance(section, Matrix):
                sections[name] = _object(section.cells)
            else:
                sections[name] = _list(json.dumps(row.to_record()) for row in section.rows())
        sections[FINDINGS_SECTION] = _list(map(json.dumps, outcome["findings"]))
        return "{\n" + ",\n".join(f"  {json.dumps(name)}: {text}" for name, text in sections.items()) + "\n}\n"


def _list(items: Iterable[str]) -> str:
    """A JSON array, an element a line."""
    text = ",\n    ".join(items)
    return f"[\n    {text}\n  ]" if text else "[]"


def _object(rows: Mapping[str, Any]) -> str:
    """A JSON object, a member a line."""
    text = ",\n    ".join(f"{json.dumps(name)}: {json.dumps(cells)}" for name, cells in rows.items())
    return f"{{\n    {text}\n  }}" if text else "{}"


def replace_atomically(path: Path, text: str) -> None:
    """Have `path` hold `text`, whole, whatever happens in between; a file that is no regular one is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


JSON = Format("json", ".json", "one document: metadata, sections, findings, verdict", JsonWriter)
