"""JSON Lines: one object a line, `kind` first: metadata, then rows, then the report."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from gpubench.formats.writer import Format, Style, Target
from gpubench.model.report import SCHEMA_VERSION, CollectiveRow, Metadata, Report


class JsonLinesWriter:
    """Writes each line as soon as it is known."""

    def __init__(self, target: Target, _style: Style) -> None:
        self._target = target
        self._stream: TextIO | None = None

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        """The line `metadata`."""
        self._stream = self._target.open()
        self._write("metadata", metadata.to_record())

    def row(self, row: CollectiveRow) -> None:
        """A line `row`."""
        self._write("row", row.to_record())

    def end(self, report: Report) -> None:
        """The line `report`."""
        self._write("report", {"schema_version": SCHEMA_VERSION} | report.to_record())
        if self._stream is not None and self._target.path is not None:
            self._stream.close()

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps({"kind": kind} | dict(record)) + "\n")
            self._stream.flush()


JSONL = Format("jsonl", ".jsonl", "one JSON object a line: metadata, rows, report", JsonLinesWriter)
