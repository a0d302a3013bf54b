"""JSON: one document with metadata, rows, findings and verdict; `report.schema.json` beside this file describes it."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpubench.formats.writer import Format, Style, Target
from gpubench.model.report import ROWS_SECTION, SCHEMA_VERSION, CollectiveRow, Metadata, Report
from gpubench.model.verdict import Verdict

_UNFINISHED = Report(verdict=Verdict.ERROR, complete=False)


class JsonWriter:
    """Writes the document: to a stream once, at the end; to a file anew at every row, `complete: false` until then.

    The file is replaced atomically, so that a reader, or a crash, never meets half a document.
    """

    def __init__(self, target: Target, _style: Style) -> None:
        self._target = target
        self._metadata: dict[str, Any] | None = None
        self._rows: list[dict[str, Any]] = []

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        """A document without rows."""
        self._metadata = metadata.to_record()
        self._replace_file(_UNFINISHED)

    def row(self, row: CollectiveRow) -> None:
        """A document with one row more."""
        self._rows.append(row.to_record())
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
        document = {
            "schema_version": SCHEMA_VERSION,
            "complete": outcome["complete"],
            "verdict": outcome["verdict"],
            "metadata": self._metadata,
            ROWS_SECTION: self._rows,
            "findings": outcome["findings"],
        }
        return json.dumps(document, indent=2) + "\n"


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


JSON = Format("json", ".json", "one document: metadata, rows, findings, verdict", JsonWriter)
