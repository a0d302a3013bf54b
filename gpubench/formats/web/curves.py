"""Charts as inline SVG: size to the right, each doubling as wide as the next; the value upwards."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpubench.formats.web.html_text import html_text
from gpubench.model.results.curves import OPEN_ENDED, Chart, CurveLine, Points
from gpubench.model.terms.units import format_size

_WIDTH, _HEIGHT = 480, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 12, 54
_HIT = 8
"""Radius of what answers a pointer where no marker is drawn."""

_MOST_TICKS = 7
_KINDS = 4
"""Colours and dashes that the style sheet has for curves."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scales of a picture: sizes along x, values along y."""

    first: float
    last: float
    low: float
    high: float
    logarithmic: bool

    def x(self, size: int) -> float:
        """Of a size in bytes."""
        span = self.last - self.first or 1.0
        return _LEFT + (math.log2(max(size, 1)) - self.first) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Of a value."""
        at = math.log10(max(value, 1e-12)) if self.logarithmic else value
        return _HEIGHT - _BOTTOM - (at - self.low) / (self.high - self.low or 1.0) * (_HEIGHT - _TOP - _BOTTOM)


def figure(chart: Chart) -> Iterator[str]:
    """The picture with its caption and legend."""
    scale = _scale(chart)
    yield f"<figure><figcaption>{html_text(chart.title)}, {html_text(chart.unit)}</figcaption>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html_text(chart.title)}">'
    yield from _axes(chart, scale)
    for kind, points in (("limit", chart.limit), ("expected", chart.expected)):
        if points:
            yield _path(points, scale, kind)
            for size, value in points:
                told = html_text(f"{kind}: {format_size(size)}, {value:.4g} {chart.unit}")
                yield f'<circle class="hit" cx="{scale.x(size):.1f}" cy="{scale.y(value):.1f}" r="{_HIT}">'
                yield f"<title>{told}</title></circle>"
    for number, line in enumerate(chart.lines):
        kind = f"k{number % _KINDS}"
        yield _path(line.points, scale, f"curve {kind}")
        for size, value in line.points:
            yield _marker(
                number, scale.x(size), scale.y(value), f"{line.name}: {format_size(size)}, {value:.4g} {chart.unit}"
            )
    yield '</svg><ul class="legend">'
    yield from _legend(chart)
    yield "</ul></figure>\n"


def _scale(chart: Chart) -> _Scale:
    drawn: Sequence[Points] = (*(line.points for line in chart.lines), chart.limit, chart.expected)
    sizes = [math.log2(max(size, 1)) for points in drawn for size, _ in points]
    values = [value for points in drawn for _, value in points if value > 0] or [1.0]
    if chart.logarithmic:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return _Scale(min(sizes), max(sizes), low, max(high, low + 1), logarithmic=True)
    return _Scale(min(sizes), max(sizes), 0.0, (chart.highest or 1.0) * 1.05, logarithmic=False)


def _axes(chart: Chart, scale: _Scale) -> Iterator[str]:
    for value in _ticks(scale):
        y = scale.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>'
    sizes = sorted({size for line in chart.lines for size, _ in line.points})
    for size in sizes[:: math.ceil(len(sizes) / _MOST_TICKS)]:
        yield f'<text x="{scale.x(size):.1f}" y="{_HEIGHT - 32}" text-anchor="middle">{format_size(size)}</text>'
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">size, log scale</text>'
    _, named, what = chart.title.rpartition(": ")
    what = what.partition(",")[0] if named else ""
    words = ", ".join(filter(None, (what, chart.unit, "log scale" if scale.logarithmic else "")))
    yield f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{html_text(words)}</text>'


def _ticks(scale: _Scale) -> list[float]:
    if scale.logarithmic:
        step = math.ceil((scale.high - scale.low) / _MOST_TICKS)
        return [10.0**power for power in range(int(scale.low), int(scale.high) + 1, step)]
    step = 10 ** math.floor(math.log10(scale.high))
    step = next(each for each in (step / 5, step / 2, step, step * 2) if scale.high / each <= _MOST_TICKS)
    return [step * number for number in range(int(scale.high / step) + 1)]


def _path(points: Points, scale: _Scale, kind: str) -> str:
    at = [(scale.x(size), scale.y(value)) for size, value in points]
    if len(at) == 1:
        at = [(float(_LEFT), at[0][1]), (float(_WIDTH - _RIGHT), at[0][1])]
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>'


def _marker(number: int, x: float, y: float, words: str) -> str:
    """A circle, square, diamond or triangle: curves can be told apart without colours."""
    shape = (
        f'<circle class="m k{number % _KINDS}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">',
        f'<rect class="m k{number % _KINDS}" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6">',
        f'<path class="m k{number % _KINDS}" d="M{x:.1f} {y - 5:.1f}l5 5-5 5-5-5z">',
        f'<path class="m k{number % _KINDS}" d="M{x:.1f} {y - 5:.1f}l5 8h-10z">',
    )[number % _KINDS]
    return f"{shape}<title>{html_text(words)}</title></{shape[1 : shape.index(' ')]}>"


def _legend(chart: Chart) -> Iterator[str]:
    for number, line in enumerate(chart.lines):
        yield _key(f"curve k{number % _KINDS}", line.name, _marker(number, 17, 6, line.name))
    for line in (CurveLine("limit", chart.limit), CurveLine("expected of a healthy machine", chart.expected)):
        if line.points:
            yield _key(line.name.split(" ")[0], f"{line.name}{_level(line)}")
    if chart.is_open_ended:
        yield f"<li>{html_text(OPEN_ENDED)}</li>"


def _level(line: CurveLine) -> str:
    levels = {value for _, value in line.points}
    return f" {levels.pop():g}" if len(levels) == 1 else ""


def _key(kind: str, words: str, marker: str = "") -> str:
    sample = f'<svg viewBox="0 0 34 12" aria-hidden="true"><polyline class="{kind}" points="0,6 34,6"/>{marker}</svg>'
    return f"<li>{sample}{html_text(words)}</li>"
