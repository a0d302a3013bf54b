"""CSV: one section of the result, one line per row. Unknown values are empty.

While a measurement runs, each row is flushed as soon as it is written.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, TextIO

from gpubench.formats.registry import Presentation, Target
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    Matrix,
    Metadata,
    Report,
    Row,
    RowsOfNode,
    Table,
)
from gpubench.model.results.result_file import WIDE_COLUMNS, mark_text, wide_cells
from gpubench.model.terms.verdict import FINDING_COLUMNS


class CsvWriter:
    """Writes one section with a header line. CSV has no metadata, so use JSON if you need it."""

    def __init__(self, target: Target, shown: Presentation) -> None:
        self._target = target
        self._section, self._is_wide = shown.section, shown.wide
        self._own_heads: Sequence[str] = ()
        self._own_cells: Sequence[str] = ()
        self._stream: TextIO | None = None
        self._columns: Sequence[str] = ()

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        """Open the file, and write the header line if rows will follow before the report."""
        self._stream = self._target.open()
        if self._is_wide:
            self._own_heads, self._own_cells = WIDE_COLUMNS, wide_cells(metadata)
        if columns and self._section in (None, metadata.rows_section):
            self._columns = columns
            self._write([(*columns, *self._own_heads)])

    def row(self, row: Row) -> None:
        if self._columns:
            record = row.to_record()
            self._write([[_cell(value) for value in (*(record[column] for column in self._columns), *self._own_cells)]])

    def end(self, report: Report) -> None:
        """Write one section of the report, unless `row` wrote the rows. Close the file if this writer opened it."""
        if not self._columns:
            own = chain([self._own_heads], repeat(list(map(_cell, self._own_cells))))
            self._write([*line, *cells] for line, cells in zip(_lines(report, self._section or report.main), own))  # noqa: B905 - the second iterator is infinite
        if self._stream is not None and self._target.path is not None:
            self._stream.close()

    def _write(self, lines_of_cells: Iterable[Sequence[Any]]) -> None:
        if self._stream is not None:
            writer = csv.writer(self._stream, lineterminator="\n")
            writer.writerows(lines_of_cells)
            self._stream.flush()


def _lines(report: Report, name: str) -> Iterator[Sequence[object]]:
    """Yield the header and the lines of a section as cells. Nodes with equal rows reuse the same converted cells."""
    section = report.sections.get(name)
    if not isinstance(section, Table) or section.parts is None:
        yield from ([*map(_cell, line)] for line in lines(report, name))
        return
    yield section.columns
    made: dict[int, tuple[RowsOfNode, list[list[object]]]] = {}
    for part in section.parts():
        if id(part.rows) not in made:
            records = (row.to_record() for row in part.rows)
            cells = [[_cell(record[column]) for column in section.columns] for record in records]
            made[id(part.rows)] = part, cells
            if len(made) > _MOST_KINDS:
                del made[next(iter(made))]
        host, places = _cell(part.host), [section.columns.index(name) for name in part.host_fields]
        for line in made[id(part.rows)][1]:
            own = list(line)
            for place in places:
                own[place] = host
            yield own


_MOST_KINDS = 32
"""Number of nodes whose converted cells are cached, for reuse by other nodes with equal rows."""


def lines(report: Report, name: str) -> Iterator[Sequence[Any]]:
    """Yield the header and the lines of a section. The first column of a matrix has its row names."""
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
    """Return a CSV cell. Numbers stay numbers, other values become text that no spreadsheet evaluates as a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return value
    return mark_text(_text(value))


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)) and all(isinstance(part, (str, int)) for part in value):
        return ";".join(map(str, value))
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value) if value else ""
    return "" if value is None else str(value)
