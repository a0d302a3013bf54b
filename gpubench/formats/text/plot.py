"""Curves in a terminal: a mark where something was measured, the limit as a line, the expectation as dots.

Marks differ in shape, not in colour, and nothing is drawn between them: that was not measured.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence

from gpubench.model.results.curves import OPEN_ENDED, Chart, Points
from gpubench.model.terms.units import format_size

_HEIGHT = 15
_LABEL = 9
_NARROWEST = 16
_MARKS = "ox+#"
_LIMIT, _EXPECTED, _SEVERAL = "-", ".", "@"


def plot_lines(chart: Chart, width: int) -> Iterator[str]:
    """The chart, its marks, and a value axis from 0; as wide as asked for, if that is wide enough for a picture."""
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
    """Rows of characters, the highest value first."""

    def __init__(self, columns: int, sizes: Sequence[int], highest: float) -> None:
        self.columns = columns
        self.rows = [[" "] * columns for _ in range(_HEIGHT)]
        self._first = math.log2(max(sizes[0], 1))
        self._span = math.log2(max(sizes[-1], 1)) - self._first or 1.0
        self._highest = highest

    def column(self, size: int) -> int:
        """The column of a size: each doubling is as far from the next."""
        return round((math.log2(max(size, 1)) - self._first) / self._span * (self.columns - 1))

    def marks(self, points: Points, mark: str) -> None:
        """A mark a point; where two lines meet, one that says so."""
        for size, value in points:
            row, column = self._row(value), self.column(size)
            self.rows[row][column] = _SEVERAL if self.rows[row][column] in _MARKS.replace(mark, "") else mark

    def across(self, points: Points, mark: str) -> None:
        """A level, held from each size to the next."""
        for number, (size, value) in enumerate(points):
            following = self.column(points[number + 1][0]) if number + 1 < len(points) else self.columns
            for column in range(self.column(size), following):
                self.rows[self._row(value)][column] = mark

    def _row(self, value: float) -> int:
        return _HEIGHT - 1 - round(max(value, 0.0) / self._highest * (_HEIGHT - 1))


def _size_labels(sizes: Sequence[int], canvas: _Canvas) -> str:
    """Sizes below their columns, as many as have room."""
    cells = [" "] * canvas.columns
    free = 0
    for size in sizes:
        text = format_size(size)
        start = min(canvas.column(size), canvas.columns - len(text))
        if start >= free:
            cells[start : start + len(text)] = text
            free = start + len(text) + 2
    return "".join(cells)


def _legend(chart: Chart) -> Iterator[str]:
    words = [f"{mark} {line.name}" for line, mark in zip(chart.lines, _MARKS, strict=False)]
    if len(chart.lines) > 1:
        words.append(f"{_SEVERAL} several")
    if chart.limit:
        words.append(f"{_LIMIT} limit")
    if chart.expected:
        words.append(f"{_EXPECTED} expected")
    if chart.is_open_ended:
        words.append(OPEN_ENDED)
    yield from words
