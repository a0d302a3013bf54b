"""JSON Lines: one object per line, with `kind` as its first key.

The first line has the metadata. Rows or sections follow, and the last line has the report.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from gpubench.formats.json import json_text
from gpubench.formats.registry import Presentation, Target
from gpubench.model.results.report import SCHEMA_VERSION, Matrix, Metadata, Report, Row


class JsonLinesWriter:
    """Writes each object as soon as it is available."""

    def __init__(self, target: Target, _shown: Presentation) -> None:
        self._target = target
        self._stream: TextIO | None = None
        self._row_kind = ""

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        self._stream = self._target.open()
        self._row_kind = "row" if metadata.collective is not None else metadata.rows_section
        self._write("metadata", metadata.to_record())

    def row(self, row: Row) -> None:
        self._write(self._row_kind, row.to_record())

    def end(self, report: Report) -> None:
        """Write one line per row of each section, with the section's name as `kind`. Then write the line `report`."""
        for name, section in report.sections.items():
            if isinstance(section, Matrix):
                for row_name, cells in section.cells.items():
                    self._write(name, {"name": row_name, "cells": cells})
            else:
                for row in section.rows():
                    self._write(name, row.to_record())
        sections = {"sections": list(report.sections)}  # Also name the sections without rows
        self._write("report", {"schema_version": SCHEMA_VERSION} | report.to_record() | sections)
        if self._stream is not None and self._target.path is not None:
            self._stream.close()

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json_text({"kind": kind, **record}) + "\n")
            self._stream.flush()
