"""Lay out tables, grids and curves for a terminal. The Markdown and HTML writers use the same columns and grids.

`table.py` prints these lines, and `blocks.py` builds the tables and grids of pages.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from gpubench.model.results import compare
from gpubench.model.terms import units
from gpubench.model.terms.verdict import Verdict

INDENT = "  "
VERDICT_MARKS = {Verdict.FAIL: "!", Verdict.WARN: "*", Verdict.INCONCLUSIVE: "~"}
"""Marks after values that do not pass, so that they are visible without colours."""

_GAP = 2
_UNKNOWN = {"", "-", "?"}


class Column(NamedTuple):
    """A column of a table. `cell` is a field name of the row, or a function that returns the text of the cell.

    - `spare`: a narrow terminal drops the column with the highest value first, and never one with 0.
    - `right`: align the cells to the right.
    - `width`: fixed width, for views that print one row at a time.
    - `on_page`: longer head for Markdown and HTML pages.
    - `page_only`: omit the column on a terminal.
    - `optional`: omit the column on a terminal if no row has a value.
    - `when`: tests the metadata of a run, and omits the column if the result is false.
    """

    head: str
    cell: Callable[[Any], str] | str
    spare: int = 0
    right: bool = False
    width: int = 0
    on_page: str = ""
    page_only: bool = False
    optional: bool = False
    when: Callable[[Any], bool] | None = None

    def text(self, row: Any) -> str:
        """Return the text of the cell for a row, with control characters escaped."""
        found = field_text(self.cell, getattr(row, self.cell)) if isinstance(self.cell, str) else self.cell(row)
        return units.printable_line(found)


def field_text(field: str, value: Any) -> str:
    """Format the value of a field: sizes with a unit, other numbers with four digits, unknown values as ''."""
    if isinstance(value, int) and field.endswith("bytes"):
        return units.format_size(value) if field == "size_bytes" else units.format_memory(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return units.shorten([field_text("", member) for member in value], 8)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {field_text('', member)}" for key, member in value.items())
    return str(value)


def four_digits(value: float) -> str:
    """Format a number with four digits and its trailing zeros, so that 36.90 lines up with 36.91."""
    return f"{value:#.4g}".rstrip(".") if 0 < abs(value) < 9999.5 else f"{value:.0f}"


def number_texts(values: Sequence[float]) -> dict[float, str]:
    """Format the numbers of a column alike: without decimals if none has any, else with four digits each."""
    plain = {value: field_text("", value) for value in values}
    return plain if "." not in "".join(plain.values()) else {value: four_digits(value) for value in plain}


def figure(value: float | None) -> str:
    """Format a measured time or bandwidth in at most nine characters. None becomes '-'."""
    if value is None:
        return "-"
    if value >= 100_000:
        return f"{value:.0f}"
    if value >= 1_000:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def or_dash(value: float | None, form: str) -> str:
    """Format a number with the format specification `form`, for example '.4g'. None becomes '-'."""
    return "-" if value is None else format(value, form)


def verdict_mark(verdict: str | None) -> str:
    """Return the mark for a verdict, or '' if there is no verdict or it needs no mark."""
    return VERDICT_MARKS.get(Verdict(verdict), "") if verdict else ""


def _cells(columns: Sequence[Column], rows: Sequence[Any]) -> dict[Column, list[str]]:
    """Return the head and the cells of every column that a terminal may show."""
    found = {column: [column.text(row) for row in rows] for column in columns if not column.page_only}
    return {
        column: [column.head, *cells]
        for column, cells in found.items()
        if not column.optional or not _UNKNOWN.issuperset(cells)
    }


def fitting(columns: Sequence[Column], width: int, measure: Callable[[Column], int]) -> list[Column]:
    """Drop the column with the highest `spare` until the others fit the width, or none of them can be dropped."""
    kept = list(columns)
    while sum(map(measure, kept)) > width and (spare := max(kept, key=lambda column: column.spare)).spare:
        kept.remove(spare)
    return kept


def fitting_table(columns: Sequence[Column], rows: Sequence[Any], width: int) -> list[Column]:
    """Return the columns that fit a terminal of this width, for a table of these rows."""
    cells = _cells(columns, rows)
    return fitting([*cells], width + _GAP, lambda column: max(map(len, cells[column])) + _GAP)


def table_lines(columns: Sequence[Column], rows: Sequence[Any], width: int, keys: int = 1) -> Iterator[str]:
    """Lay out a table within a width.

    Columns that may be dropped are dropped first. If the others still do not fit, print a second table below, which
    repeats the first `keys` columns to identify its rows.
    """
    cells = _cells(columns, rows)
    widths = {column: max(map(len, texts)) for column, texts in cells.items()}
    kept = fitting([*cells], width + _GAP, lambda column: widths[column] + _GAP)
    names, rest = kept[:keys], kept[keys:]
    while True:
        most = len(rest)
        while most > 1 and sum(widths[column] + _GAP for column in (*names, *rest[:most])) > width + _GAP:
            most -= 1
        shown = [*names, *rest[:most]]
        for line in zip(*(cells[column] for column in shown), strict=True):
            aligned = (
                text.rjust(widths[column]) if column.right else text.ljust(widths[column])
                for text, column in zip(line, shown, strict=True)
            )
            yield (" " * _GAP).join(aligned).rstrip()
        rest = rest[most:]
        if not rest:
            return
        yield ""


def described_lines(columns: Sequence[Column], rows: Sequence[Any], width: int) -> Iterator[str]:
    """Lay out a table whose last column has sentences. They are wrapped in the width that the other columns leave."""
    *first, last = columns
    lines = list(table_lines(first, rows, 10 * width))
    begin = max(map(len, lines)) + _GAP
    for line, text in zip(lines, (last.head, *(last.text(row) for row in rows)), strict=True):
        words, *more = wrapped(text, max(20, width - begin))
        yield line.ljust(begin) + words
        yield from (" " * begin + further for further in more)


def row_line(cells: Sequence[tuple[Column, str]]) -> str:
    """Lay out a row whose columns have fixed widths. A cell that is too wide still has one blank before it."""
    return "".join(text.rjust(column.width) if len(text) < column.width else f" {text}" for column, text in cells)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a sentence, and indent all lines but the first. An empty sentence becomes one empty line."""
    return textwrap.wrap(units.printable_line(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]


class GridCell(Struct, frozen=True):
    """A cell of a grid, with its text, its verdict, and the share that decides its colour.

    `share` is the fraction of the expected value. It is None if nothing is expected.
    """

    text: str
    share: float | None = None
    verdict: Verdict | None = None


class Grid(Struct, frozen=True):
    """A matrix of cells, for example the bandwidth between all pairs of devices. Pages print `note` below the title."""

    title: str
    corner: str
    columns: Sequence[str]
    lines: Mapping[str, Mapping[str, GridCell]]
    note: str = ""


def grid_of_words(
    corner: str, cells: Mapping[str, Mapping[str, str]], rows: Sequence[str], columns: Sequence[str]
) -> Grid:
    """Return a grid of texts without verdicts."""
    return Grid("", corner, columns, {row: {name: GridCell(text) for name, text in cells[row].items()} for row in rows})


def grid_lines(grid: Grid, width: int) -> Iterator[list[tuple[str, GridCell]]]:
    """Lay out a grid within a width, split into several blocks of columns if needed.

    Yield one line at a time, as pairs of the padded text (with the mark for the verdict) and the cell.
    """
    words = {
        (row, column): cells.get(column, GridCell("X" if row == column else "-"))
        for row, cells in grid.lines.items()
        for column in grid.columns
    }
    texts = {place: f"{cell.text}{verdict_mark(cell.verdict)}" for place, cell in words.items()}
    head = GridCell("")
    lead = max(map(len, (grid.corner, *grid.lines)))
    wide = max(map(len, (*grid.columns, *texts.values()))) + _GAP
    columns_per_block = max(1, (width - lead) // wide)
    for start in range(0, len(grid.columns), columns_per_block):
        block = grid.columns[start : start + columns_per_block]
        yield [(grid.corner.ljust(lead), head), *((column.rjust(wide), head) for column in block)]
        for row in grid.lines:
            cells = ((texts[row, column].rjust(wide), words[row, column]) for column in block)
            yield [(row.ljust(lead), head), *cells]


_HEIGHT = 15
_LABEL = 9
_NARROWEST = 16
_MARKS = "ox+#"
_LIMIT, _EXPECTED, _SEVERAL = "-", ".", "@"


def plot_lines(chart: compare.Chart, width: int) -> Iterator[str]:
    """Draw a chart in characters, at least 16 columns wide. The value axis begins at 0."""
    columns = max(width - _LABEL - 3, _NARROWEST)
    highest = chart.highest or 1.0
    sizes = sorted({size for line in chart.lines for size, _ in line.points})
    canvas = _Canvas(columns, sizes, highest)
    canvas.across(chart.limit, _LIMIT)
    canvas.across(chart.expected, _EXPECTED)
    for line, mark in zip(chart.lines, _MARKS, strict=False):
        canvas.marks(line.points, mark)
    yield from textwrap.wrap(f"{chart.title}, {chart.unit}", width)
    for number, cells in enumerate(canvas.rows):
        value = highest * (_HEIGHT - 1 - number) / (_HEIGHT - 1)
        label = f"{value:.4g}" if number % 2 == 0 else ""
        yield f"{label:>{_LABEL}} │{''.join(cells)}".rstrip()
    yield f"{'':>{_LABEL}} └{'─' * columns}"
    yield f"{'':>{_LABEL}}  {_size_labels(sizes, canvas)}".rstrip()
    for words in _legend(chart):
        indent = f"{'':>{_LABEL}}  "
        yield from textwrap.wrap(
            words, max(width, _NARROWEST + len(indent)), initial_indent=indent, subsequent_indent=indent
        )


class _Canvas:
    def __init__(self, columns: int, sizes: Sequence[int], highest: float) -> None:
        self.columns = columns
        self.rows = [[" "] * columns for _ in range(_HEIGHT)]
        self._first = math.log2(max(sizes[0], 1))
        self._span = math.log2(max(sizes[-1], 1)) - self._first or 1.0
        self._highest = highest

    def column(self, size: int) -> int:
        """Return the canvas column for a message size, on a logarithmic axis."""
        return round((math.log2(max(size, 1)) - self._first) / self._span * (self.columns - 1))

    def marks(self, points: compare.Points, mark: str) -> None:
        """Draw a mark at each point, or '@' if another line already has a mark there."""
        for size, value in points:
            row, column = self._line_of(value), self.column(size)
            self.rows[row][column] = _SEVERAL if self.rows[row][column] in _MARKS.replace(mark, "") else mark

    def across(self, points: compare.Points, mark: str) -> None:
        for number, (size, value) in enumerate(points):
            following = self.column(points[number + 1][0]) if number + 1 < len(points) else self.columns
            for column in range(self.column(size), following):
                self.rows[self._line_of(value)][column] = mark

    def _line_of(self, value: float) -> int:
        return _HEIGHT - 1 - round(max(value, 0.0) / self._highest * (_HEIGHT - 1))


def _size_labels(sizes: Sequence[int], canvas: _Canvas) -> str:
    """Return the axis labels: as many sizes as fit, each below its column."""
    cells = [" "] * canvas.columns
    free = 0
    for size in sizes:
        text = units.format_size(size)
        start = min(canvas.column(size), canvas.columns - len(text))
        if start >= free:
            cells[start : start + len(text)] = text
            free = start + len(text) + 2
    return "".join(cells)


def _legend(chart: compare.Chart) -> Iterator[str]:
    words = [f"{mark} {line.name}" for line, mark in zip(chart.lines, _MARKS, strict=False)]
    if len(chart.lines) > 1:
        words.append(f"{_SEVERAL} several")
    if chart.limit:
        words.append(f"{_LIMIT} limit")
    if chart.expected:
        words.append(f"{_EXPECTED} expected")
    if chart.is_open_ended:
        words.append(compare.OPEN_ENDED)
    yield from words
