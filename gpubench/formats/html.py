"""A self-contained HTML page with verdict, findings, curves, heat maps and all values.

The page has no script and loads nothing. The colours are from the Okabe-Ito palette, which people with colour vision
deficiency can distinguish. Shapes or text repeat everything that colours show.
"""

import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, count, groupby
from pathlib import Path
from statistics import median

from msgspec import Struct

from gpubench.errors import UsageError
from gpubench.formats.blocks import Listing, blocks, capitalised, copies_of_report, facts, outcome, title
from gpubench.formats.json import DocumentRun, DocumentWriter
from gpubench.formats.layout import Grid, GridCell, number_texts
from gpubench.formats.machine_picture import html_text, machines
from gpubench.formats.machine_picture import machine_figure as picture_of
from gpubench.formats.registry import Presentation, Target
from gpubench.formats.table import fallback_lines
from gpubench.model.results.compare import OPEN_ENDED, Chart, Points
from gpubench.model.results.history import DatedName, Trend, TrendPoint, headline_figures, trends
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import WORST_FIRST, Finding, Verdict
from gpubench.readers.results.history import PastRun, past_runs

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --good: 0,114,178; --bad: 213,94,0; --pass: #00694e; --warn: #8f5a00; --fail: #b03a00; --error: #84335f;
  --c0: #0072b2; --c1: #b84f00;
  --c2: #00785a; --c3: #a4447c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9da7b3; --line: #30363d;
  --card: #161b22; --good: 86,180,233; --bad: 200,80,30; --pass: #3ddbaa; --warn: #f0b429; --fail: #ff8552;
  --error: #e39ac3; --c0: #56b4e9; --c1: #ff8c42; --c2: #2fd6a3; --c3: #dd9ac2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1340px; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: .2rem 0 .8rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.verdict { border: 2px solid currentColor; border-radius: .5rem; padding: .6rem .9rem; font-weight: 700; }
.PASS { color: var(--pass); } .WARN, .INCONCLUSIVE { color: var(--warn); } .FAIL { color: var(--fail); }
.ERROR { color: var(--error); } .SKIP { color: var(--faint); }
.verdict p { color: var(--ink); font-weight: 400; margin: .3rem 0 0; }
.finding { border-left: 4px solid currentColor; background: var(--card); padding: .5rem .8rem; margin: .8rem 0; }
.finding dl, .finding span { color: var(--ink); } .finding code { font-size: .9em; }
dl { display: grid; grid-template-columns: fit-content(40%) 1fr; gap: .1rem .8rem; margin: .4rem 0 0;
  font-size: .9rem; }
dt { color: var(--faint); } dd { margin: 0; min-width: 0; }
.scroll, .machine { overflow-x: auto; } .machine svg[role] { min-width: 480px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; border: 1px solid var(--line); text-align: left; overflow-wrap: normal; }
th { background: var(--card); font-weight: 600; } td.n { text-align: right; white-space: nowrap; }
td.w { min-width: 14rem; } td.h { text-align: right; white-space: nowrap; } .h { background: rgba(var(--good), .3); }
.h.near { background: rgba(var(--good), .12); } .h.far { background: rgba(var(--bad), calc(.75 - var(--s) * .7)); }
.scale span { display: inline-block; width: 34px; height: 1.1em; border: 1px solid var(--line); }
nav { columns: 18rem; font-size: .9rem; margin: 1rem 0; } nav ul { margin: 0; padding-left: 1.2rem; }
nav li { break-inside: avoid; }
nav a { color: var(--ink); } code { user-select: all; }
td.low { outline: 2px dashed var(--fail); outline-offset: -2px; font-weight: 700; }
td b { color: inherit; } td.own { color: var(--faint); text-align: center; }
summary { cursor: pointer; color: var(--faint); font-size: .9rem; margin: .3rem 0; }
.hit { fill: transparent; stroke: none; }
.note { color: var(--faint); font-size: .85rem; margin: .3rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .5rem; padding: .6rem; max-width: 620px; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--faint); font: 14px system-ui, sans-serif; }
.grid { stroke: var(--line); stroke-width: 1; } .curve { fill: none; stroke-width: 2.5; }
.limit { fill: none; stroke: var(--ink); stroke-width: 2; stroke-dasharray: 9 4; }
.expected { fill: none; stroke: var(--faint); stroke-width: 2.5; stroke-dasharray: 2 4; }
.k0 { stroke: var(--c0); } .k1 { stroke: var(--c1); stroke-dasharray: 12 3; } .k2 { stroke: var(--c2); }
.k3 { stroke: var(--c3); stroke-dasharray: 6 3 2 3; } .m { fill: var(--paper); stroke-width: 2; }
.t { fill: var(--paper); stroke: currentColor; stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; padding: 0; margin: .3rem 0 0; }
.legend li { list-style: none; display: flex; align-items: center; gap: .4rem; }
.legend svg { width: 34px; height: 12px; flex: none; }
.box, .gpu, .nic { fill: var(--card); stroke: var(--line); stroke-width: 1.5; } .gpu { fill: var(--paper); }
.gpu { stroke: var(--faint); } rect.odd { stroke: currentColor; stroke-width: 3; }
svg .b { fill: var(--ink); font-weight: 600; font-size: 13px; }
svg .d { font-weight: 400; font-size: 11px; fill: var(--faint); }
svg .f { font-size: 11px; } svg .tag { fill: currentColor; font-weight: 700; font-size: 13px; }
svg .tag.f { font-size: 11px; }
svg .tag { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
.w { fill: none; stroke: var(--line); stroke-width: 2; } .s3 { stroke: var(--c2); stroke-width: 3; }
.s2 { stroke: var(--c0); stroke-width: 3; } .s1 { stroke: var(--warn); stroke-width: 3.5; stroke-dasharray: 7 3; }
.s0 { stroke: var(--fail); stroke-width: 4; stroke-dasharray: 3 3; } .w.odd { stroke-width: 4.5; }
@media (max-width: 700px) { .scroll table { width: max-content; } td, th { max-width: 16rem; }
  .scroll th:first-child { position: sticky; left: 0; } h1 { font-size: 1.2rem; } }
footer { color: var(--faint); font-size: .8rem; margin: 2.5rem 0 1rem; }
@media print { :root { color-scheme: light; --ink: #000; --paper: #fff; --faint: #444; --line: #aaa; --card: #f6f8fa;
  --good: 0,114,178; --bad: 213,94,0; --pass: #00694e; --warn: #8f5a00; --fail: #b03a00; --error: #84335f; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } body { max-width: none; font-size: 10pt; }
  nav { display: none; } .scroll { overflow: visible; } table { font-size: 7.5pt; }
  .finding, figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
"""The style sheet of the page."""


_WIDTH, _HEIGHT = 480, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 12, 54
_HIT = 8
"""Radius, in SVG units, of the invisible circle that shows the tooltip of a point without a marker."""

_MOST_TICKS = 7
_KINDS = 4
"""Number of curve styles in the style sheet. Further curves repeat them."""


class _Scale(Struct, frozen=True):
    """Maps sizes to x coordinates and values to y coordinates of a chart."""

    first: float
    last: float
    low: float
    high: float
    logarithmic: bool

    def x(self, size: int) -> float:
        span = self.last - self.first or 1.0
        return _LEFT + (math.log2(max(size, 1)) - self.first) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        at = math.log10(max(value, 1e-12)) if self.logarithmic else value
        return _HEIGHT - _BOTTOM - (at - self.low) / (self.high - self.low or 1.0) * (_HEIGHT - _TOP - _BOTTOM)


def _curves_figure(chart: Chart) -> Iterator[str]:
    scale = _scale(chart)
    yield f"<figure><figcaption>{html_text(capitalised(chart.title))}, {html_text(chart.unit)}</figcaption>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html_text(chart.title)}">'
    yield from _axes(chart, scale)
    for kind, points in (("limit", chart.limit), ("expected", chart.expected)):
        if points:
            yield _path(points, scale, kind)
            for size, value in points:
                title = html_text(f"{kind}: {format_size(size)}, {value:.4g} {chart.unit}")
                yield f'<circle class="hit" cx="{scale.x(size):.1f}" cy="{scale.y(value):.1f}" r="{_HIT}">'
                yield f"<title>{title}</title></circle>"
    for number, line in enumerate(chart.lines):
        kind = f"k{number % _KINDS}"
        yield _path(line.points, scale, f"curve {kind}")
        for size, value in line.points:
            yield _marker(
                number, scale.x(size), scale.y(value), f"{line.name}: {format_size(size)}, {value:.4g} {chart.unit}"
            )
    for size, words in chart.marks:
        x = f"{scale.x(size):.1f}"
        yield f'<line class="limit" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        yield f'<circle class="hit" cx="{x}" cy="{_TOP + _HIT}" r="{_HIT}"><title>{html_text(words)}</title></circle>'
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
        yield f'<text x="{_LEFT - 9}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>'
    sizes = sorted({size for line in chart.lines for size, _ in line.points})
    for size in sizes[:: math.ceil(len(sizes) / _MOST_TICKS)]:
        yield f'<text x="{scale.x(size):.1f}" y="{_HEIGHT - 32}" text-anchor="middle">{format_size(size)}</text>'
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{chart.axis}</text>'
    _, named, what = chart.title.rpartition(": ")
    what = what.partition(",")[0] if named else ""
    words = ", ".join(filter(None, (what, chart.unit, "log scale" if scale.logarithmic else "")))
    yield f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{html_text(words)}</text>'


def _ticks(scale: _Scale) -> list[float]:
    if scale.logarithmic:
        step = math.ceil((scale.high - scale.low) / _MOST_TICKS)
        return [10.0**power for power in range(int(scale.low), int(scale.high) + 1, step)]
    step = 10 ** math.floor(math.log10(scale.high))
    step = next(width for width in (step / 5, step / 2, step, step * 2) if scale.high / width <= _MOST_TICKS)
    return [step * number for number in range(int(scale.high / step) + 1)]


def _path(points: Points, scale: _Scale, kind: str) -> str:
    at = [(scale.x(size), scale.y(value)) for size, value in points]
    if len(at) == 1:
        at = [(float(_LEFT), at[0][1]), (float(_WIDTH - _RIGHT), at[0][1])]
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>'


def _marker(number: int, x: float, y: float, words: str) -> str:
    """Return a circle, square, diamond or triangle, so that curves differ in shape as well as colour."""
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
    for kind, name, points in (
        ("limit", "limit", chart.limit),
        ("expected", "expected of a healthy machine", chart.expected),
    ):
        if points:
            levels = {value for _, value in points}
            yield _key(kind, f"{name} {levels.pop():g}" if len(levels) == 1 else name)
    for size, words in chart.marks:
        yield _key("limit", f"breaks at {size}: {words}")
    if chart.is_open_ended:
        yield f"<li>{html_text(OPEN_ENDED)}</li>"


def _key(kind: str, words: str, marker: str = "") -> str:
    sample = f'<svg viewBox="0 0 34 12" aria-hidden="true"><polyline class="{kind}" points="0,6 34,6"/>{marker}</svg>'
    return f"<li>{sample}{html_text(words)}</li>"


_TREND_WIDTH, _TREND_HEIGHT = 480, 150
_TREND_LEFT, _TREND_RIGHT, _TREND_TOP, _TREND_BOTTOM = 58, 24, 14, 34
_LEAST_SPAN = 0.1
"""Least height of the value axis, relative to the largest value, so that small differences look small."""


class Past:
    """The earlier runs of this machine, from a folder of dated results. The folder is read only once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._runs: list[PastRun] | None = None
        self._problem = ""

    def section(self, run: DocumentRun) -> Iterator[str]:
        """Yield the section with the trends of earlier results, or the reason why the folder cannot be read."""
        if self._folder is None:
            return
        runs = list(self._read(self._folder, run))
        if run.report.complete:
            began = _parse_time(run.metadata.started_at).isoformat(timespec="seconds")
            runs.append((began, run.report.verdict, headline_figures(run.rows)))
        found = list(trends(runs))
        if not found and not self._problem:
            return
        yield f"<h2>Trend of {html_text(DatedName.format_hosts(run.metadata.hosts))}</h2>"
        words = self._problem or "A point is a run with its verdict, by date; the axes do not begin at 0."
        yield f'<p class="note">{html_text(words)}</p>'
        yield '<div class="charts">\n'
        for trend in found:
            yield from trend_figure(trend)
        yield "</div>\n"

    def _read(self, folder: Path, run: DocumentRun) -> list[PastRun]:
        if self._runs is None:
            try:
                self._runs = past_runs(folder, run.metadata)
            except UsageError as error:
                self._runs, self._problem = [], error.seen
        return self._runs


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def trend_figure(trend: Trend) -> Iterator[str]:
    """Yield a chart of one value over time. Markers show verdicts, and the caption has the median of earlier runs."""
    *before, newest = trend.points
    what, _, which = trend.name.rpartition(": ")
    words = f"{capitalised(which)}{f' of {what}' if what else ''}: {newest.gb_s:.4g} GB/s"
    if before:
        words += f"; median of {len(before)} before {median(point.gb_s for point in before):.4g}"
    yield f"<figure><figcaption>{html_text(words)}</figcaption>"
    yield f'<svg viewBox="0 0 {_TREND_WIDTH} {_TREND_HEIGHT}" role="img" aria-label="{html_text(words)}">'
    low, high = _range(trend.points)
    digits = number_texts([low, high])
    for value in (low, high):
        y = _y(value, low, high)
        yield f'<line class="grid" x1="{_TREND_LEFT}" x2="{_TREND_WIDTH - _TREND_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_TREND_LEFT - 9}" y="{y + 5:.1f}" text-anchor="end">{digits[value]}</text>'
    # Centre the point if there is only one run.
    times = [_parse_time(point.started_at) for point in trend.points]
    width, span = _TREND_WIDTH - _TREND_LEFT - _TREND_RIGHT, (times[-1] - times[0]).total_seconds()
    places = [_TREND_LEFT + (width * (time - times[0]).total_seconds() / span if span else width / 2) for time in times]
    days = "%Y-%m-%d" if times[0].date() != times[-1].date() else "%Y-%m-%d %H:%M"
    ends = ((places[0], "start", times[0]), (places[-1], "end", times[-1])) if span else ()
    for x, anchor, time in ends or ((places[0], "middle", times[0]),):
        yield f'<text x="{x:.0f}" y="{_TREND_HEIGHT - 10}" text-anchor="{anchor}">{time.strftime(days)}</text>'
    at = [(x, _y(point.gb_s, low, high)) for x, point in zip(places, trend.points, strict=True)]
    yield f'<polyline class="curve k0" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>'
    for (x, y), point in zip(at, trend.points, strict=True):
        title = f"{point.started_at}: {point.gb_s:.4g} GB/s, {point.verdict}"
        yield _mark(point.verdict, x, y, title)
    yield '</svg><ul class="legend">'
    seen = {point.verdict for point in trend.points}
    for verdict in reversed(WORST_FIRST):
        if verdict in seen:
            yield f'<li><svg viewBox="0 0 34 12" aria-hidden="true">{_mark(verdict, 17, 6, verdict)}</svg>'
            yield f"{'not judged' if verdict is Verdict.SKIP else verdict}</li>"
    yield "</ul></figure>\n"


def _range(points: Sequence[TrendPoint]) -> tuple[float, float]:
    """Return the lowest and highest value of the value axis in GB/s. The axis does not begin at 0."""
    low, high = min(point.gb_s for point in points), max(point.gb_s for point in points)
    missing = max(_LEAST_SPAN * high - (high - low), 0.0)
    low = max(low - missing / 2, 0.0)
    return low, max(high + missing / 2, low + 1e-9)


def _y(value: float, low: float, high: float) -> float:
    return _TREND_HEIGHT - _TREND_BOTTOM - (value - low) / (high - low) * (_TREND_HEIGHT - _TREND_TOP - _TREND_BOTTOM)


def _mark(verdict: Verdict, x: float, y: float, words: str) -> str:
    """Return the marker for a verdict. Shapes differ as well as colours."""
    title = f"<title>{html_text(words)}</title>"
    if verdict is Verdict.FAIL:
        return f'<path class="t {verdict}" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10">{title}</path>'
    if verdict is Verdict.ERROR:
        return f'<rect class="t {verdict}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{title}</rect>'
    if verdict in (Verdict.WARN, Verdict.INCONCLUSIVE):
        return f'<path class="t {verdict}" d="M{x:.1f} {y - 6:.1f}l6 10h-12z">{title}</path>'
    return f'<circle class="t {verdict}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'


_SIGNS = {Verdict.PASS: "✓", Verdict.FAIL: "✗", Verdict.WARN: "!", Verdict.ERROR: "?", Verdict.SKIP: "–"}
_MARKS = {Verdict.FAIL: "✗", Verdict.WARN: "!", Verdict.INCONCLUSIVE: "~", Verdict.ERROR: "?"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy: if text from outside ever became markup, it could run no script and load nothing."""

_BAD = (Verdict.FAIL, Verdict.WARN)
_GOOD_SHARE = 0.95
_MILDEST = 0.85
"""Bad cells above this share of the expected value are as orange as this share, so that they are still visible."""

_LOW_SHARE = 2 / 3
"""Heat map cells below this share of the expected value get a dashed frame."""


def render(run: DocumentRun, past: Past) -> Iterator[str]:
    """Yield the page in pieces. `past` has the earlier results of the machine."""
    name = html_text(title(run.metadata))
    verdict = run.report.verdict
    below = list(map(_Headings(), _plain_sections(run, past)))
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{name}: {verdict}</title><style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n"
    yield f'<div class="verdict {verdict}">{_SIGNS.get(verdict, "~")} {html_text(outcome(run))}</div>\n'
    yield from (f'<p class="note">{html_text(line)}</p>' for line in fallback_lines(run.report))
    for finding in run.report.findings:
        yield from _finding(finding)
    yield from _contents(below)
    yield from below
    yield "<footer>GB/s is 1e9 bytes/s, K, M and G in sizes are 1024-based; ✗ FAIL, ! WARN, ~ INCONCLUSIVE, "
    yield "? ERROR; dashed frames: bad, and below two thirds of what is expected."
    yield "</footer></body></html>\n"


def _contents(pieces: Sequence[str]) -> Iterator[str]:
    heads = [head for piece in pieces for head in _HEAD.findall(piece)]
    if len(heads) >= _LEAST_HEADS:
        yield '<nav aria-label="Contents"><ul>'
        yield from (f'<li><a href="#{place}">{words}</a></li>' for place, words in heads)
        yield "</ul></nav>\n"


_HEAD = re.compile(r'<h2 id="([^"]+)">(.*?)</h2>')
_LEAST_HEADS = 4


class _Headings:
    """Adds a unique id to each heading, so that the table of contents can link to it."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __call__(self, piece: str) -> str:
        return _PLAIN_HEAD.sub(self._named, piece)

    def _named(self, head: "re.Match[str]") -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", head[1].lower()).strip("-") or "part"
        name = next(
            candidate
            for candidate in chain([plain], (f"{plain}-{number}" for number in count(2)))
            if candidate not in self._names
        )
        self._names.add(name)
        return f'<h2 id="{name}">{head[1]}</h2>'


_PLAIN_HEAD = re.compile(r"<h2>(.*?)</h2>")


def _plain_sections(run: DocumentRun, past: Past) -> Iterator[str]:
    drawn = machines(run)
    if drawn:
        yield '<h2>The machine</h2><div class="charts">\n'
        for machine in drawn:
            yield from picture_of(machine)
        yield "</div>\n"
    yield "<h2>The run</h2><dl>"
    yield from (f"<dt>{html_text(label)}</dt><dd>{html_text(words)}</dd>" for label, words in facts(run.metadata))
    yield "</dl>\n"
    yield from past.section(run)
    if notes := run.metadata.options.get("notes"):
        yield '<h2>What it follows from</h2><ul class="note">'
        yield from (f"<li>{html_text(str(note))}</li>" for note in notes)
        yield "</ul>\n"
    is_explained = False
    for is_chart, members in groupby(
        chain(blocks(run), copies_of_report(run.report)), key=lambda block: isinstance(block, Chart)
    ):
        if is_chart:
            yield '<h2>Curves</h2><div class="charts">\n'
        for block in members:
            if isinstance(block, Chart):
                yield from _curves_figure(block)
            else:
                yield from _grid(block) if isinstance(block, Grid) else _listing(block)
            if not is_explained and isinstance(block, Grid):
                is_explained = any(cell.share is not None for cells in block.lines.values() for cell in cells.values())
                yield from _SCALE if is_explained else ()
        if is_chart:
            yield "</div>\n"


_SCALE = (
    '<ul class="legend scale"><li><span class="h"></span>95 % and more</li>',
    '<li><span class="h near"></span>less, passed</li>',
    *(
        f'<li><span class="h far" style="--s:{share}"></span>{share:.0%}</li>'.replace("%<", " %<")
        for share in (0.8, 0.5, 0.1)
    ),
    "<li>of what is expected, WARN or FAIL; no colour: not judged</li></ul>\n",
)
"""Legend for the colours of heat maps. Blue is good and orange is bad."""


def _finding(finding: Finding) -> Iterator[str]:
    yield f'<section class="finding {finding.severity}"><strong>{finding.severity} {html_text(finding.id)}</strong> '
    yield f"<span>{html_text(finding.subject)}</span><dl>"
    before = ""
    for label, words, is_command in finding.details:
        shown = f"<code>{html_text(words)}</code>" if is_command else _sentence_html(words)
        yield f"<dt>{'' if label == before else label}</dt><dd>{shown}</dd>"
        before = label
    yield "</dl></section>\n"


def _sentence_html(words: str) -> str:
    """Convert a sentence to HTML. Text in backquotes becomes a code element, which one click selects."""
    pieces = enumerate(words.split("`"))
    return "".join(f"<code>{html_text(piece)}</code>" if number % 2 else html_text(piece) for number, piece in pieces)


def _grid(grid: Grid) -> Iterator[str]:
    yield f"<h2>{html_text(capitalised(grid.title))}</h2>"
    yield _note(grid.note)
    yield f'<div class="scroll"><table><tr><th>{html_text(grid.corner)}</th>'
    yield from (f"<th>{html_text(column)}</th>" for column in grid.columns)
    yield "</tr>\n"
    for name, cells in grid.lines.items():
        yield f"<tr><th>{html_text(name)}</th>"
        for column in grid.columns:
            cell = cells.get(column)
            own = "X" if name == column else ""
            yield f'<td class="own">{own}</td>' if cell is None else _cell(cell)
        yield "</tr>\n"
    yield "</table></div>\n"


def _cell(cell: GridCell) -> str:
    mark = "" if cell.verdict is None else _MARKS.get(cell.verdict, "")
    words = (f'<b title="{cell.verdict}">{mark}</b> ' if mark else "") + html_text(cell.text)
    share = cell.share or 0.0
    if cell.verdict in _BAD:
        low = " low" if share < _LOW_SHARE else ""
        return f'<td class="h far{low}" style="--s:{min(share, _MILDEST):.2f}">{words}</td>'
    if cell.verdict is Verdict.PASS and share >= _LOW_SHARE:
        return f'<td class="h{"" if share >= _GOOD_SHARE else " near"}">{words}</td>'
    return f'<td class="n">{words}</td>'


def _listing(listing: Listing) -> Iterator[str]:
    """Yield a table. If it folds, lines that pass are hidden behind a summary with their number."""
    yield f"<h2>{html_text(capitalised(listing.title))}</h2>"
    yield _note(listing.note)
    lines = list(zip(listing.lines, listing.verdicts, strict=False))
    passed = [line for line in lines if line[1] is Verdict.PASS] if listing.folds else []
    others = [line for line in lines if line not in passed]
    if others or not passed:
        yield from _table(listing.heads, others)
    if passed:
        is_cut = " of those shown" if listing.left_out else ""
        yield f"<details><summary>{len(passed)} passed{is_cut}</summary>"
        yield from _table(listing.heads, passed)
        yield "</details>\n"
    yield _note(listing.left_out)


def _note(words: str) -> str:
    return f'<p class="note">{html_text(words)}</p>\n' if words else ""


_LONG = 40
"""Cells with more characters have a least width, so that a table does not break them into single words."""


def _table(heads: Sequence[str], lines: Sequence[tuple[Sequence[str], Verdict | None]]) -> Iterator[str]:
    yield '<div class="scroll"><table><tr>'
    yield from (f"<th>{html_text(head)}</th>" for head in heads)
    yield "</tr>\n"
    for line, verdict in lines:
        yield "<tr>"
        for words in line:
            is_number = words.rstrip("%KMGT!*~").replace(".", "", 1).isdigit()
            kinds = ["n"] * is_number + [str(verdict)] * (words == verdict) + ["w"] * (len(words) > _LONG)
            kind = f' class="{" ".join(kinds)}"' if kinds else ""
            yield f"<td{kind}>{html_text(words)}</td>"
        yield "</tr>\n"
    yield "</table></div>\n"


def writer(target: Target, shown: Presentation) -> DocumentWriter:
    past = Past(shown.history)

    def render_ascii(run: DocumentRun) -> Iterator[str]:
        """Yield the page with character references for non-ASCII characters, which stdout may be unable to encode."""
        return (piece.encode("ascii", "xmlcharrefreplace").decode("ascii") for piece in render(run, past))

    return DocumentWriter(target, render_ascii)
