"""CSV: one section, one line a row, unknown values empty; rows of a running measurement are flushed one by one."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from gpubench.formats.writer import Style, Target
from gpubench.model.results.csv_text import marked_text
from gpubench.model.results.report import FINDING_COLUMNS, FINDINGS_SECTION, Matrix, Metadata, Report, Row


class CsvWriter:
    """Writes a section with a header line. Metadata has no place in it: JSON holds it."""

    def __init__(self, target: Target, style: Style) -> None:
        self._target = target
        self._section = style.section
        self._stream: TextIO | None = None
        self._columns: Sequence[str] = ()

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        """Open the file; where rows will follow and are wanted, write the header line."""
        self._stream = self._target.open()
        if columns and self._section in (None, metadata.rows_section):
            self._columns = columns
            self._write([columns])

    def row(self, row: Row) -> None:
        """One line."""
        if self._columns:
            record = row.to_record()
            self._write([[record[column] for column in self._columns]])

    def end(self, report: Report) -> None:
        """A section that the report brings, and the end of a file of our own."""
        if not self._columns:
            self._write(lines(report, self._section or report.main))
        if self._stream is not None and self._target.path is not None:
            self._stream.close()

    def _write(self, lines_of_cells: "Sequence[Sequence[Any]] | Iterator[Sequence[Any]]") -> None:
        if self._stream is not None:
            writer = csv.writer(self._stream, lineterminator="\n")
            writer.writerows(map(_cell, line) for line in lines_of_cells)
            self._stream.flush()


def lines(report: Report, name: str) -> Iterator[Sequence[Any]]:
    """A section's header and lines; a matrix has the row names in its first column."""
    section = report.sections.get(name)
    if name == FINDINGS_SECTION:
        yield FINDING_COLUMNS
        for finding in report.to_record()["findings"]:
            yield [finding[column] for column in FINDING_COLUMNS]
    elif isinstance(section, Matrix):
        columns = list(dict.fromkeys(column for row in section.cells.values() for column in row))
        yield ["", *columns]
        for row_name, cells in section.cells.items():
            yield [row_name, *(cells.get(column) for column in columns)]
    elif section is not None:
        yield section.columns
        for row in section.rows():
            record = row.to_record()
            yield [record[column] for column in section.columns]


def _cell(value: object) -> object:
    """A cell: numbers and truths as they are, everything else as text that does nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return value
    return marked_text(_text(value))


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)) and all(isinstance(each, (str, int)) for each in value):
        return ";".join(map(str, value))
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value) if value else ""
    return "" if value is None else str(value)
