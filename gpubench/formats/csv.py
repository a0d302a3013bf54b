"""CSV: one line a row, the columns of the schema, unknown values empty; flushed row by row."""

import csv
from collections.abc import Sequence
from typing import Any, TextIO

from gpubench.formats.writer import Format, Style, Target
from gpubench.model.report import CollectiveRow, Metadata, Report


class CsvWriter:
    """Writes rows as CSV with a header line. Metadata and findings have no place in it: JSON holds them."""

    def __init__(self, target: Target, _style: Style) -> None:
        self._target = target
        self._stream: TextIO | None = None

    def begin(self, _metadata: Metadata, columns: Sequence[str]) -> None:
        """Open the file and write the header line."""
        self._stream = self._target.open()
        self._columns = columns
        self._write(list(columns))

    def row(self, row: CollectiveRow) -> None:
        """One line."""
        record = row.to_record()
        self._write([_cell(record[column]) for column in self._columns])

    def end(self, _report: Report) -> None:
        """Close a file of our own."""
        if self._stream is not None and self._target.path is not None:
            self._stream.close()

    def _write(self, cells: Sequence[Any]) -> None:
        if self._stream is None:
            return
        csv.writer(self._stream, lineterminator="\n").writerow(cells)
        self._stream.flush()


def _cell(value: object) -> object:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value


CSV = Format("csv", ".csv", "one line a row, unknown values empty", CsvWriter)
