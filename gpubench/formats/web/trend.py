"""The trend of a machine from run to run: a small line for each headline figure, its points marked by verdict."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from gpubench.errors import UsageError
from gpubench.formats.document import DocumentRun
from gpubench.formats.web.html_text import html_text
from gpubench.model.results.history import DatedName
from gpubench.model.results.trends import Trend, TrendPoint, headline_figures, trends
from gpubench.model.terms.verdict import WORST_FIRST, Verdict
from gpubench.readers.results.past_runs import PastRun, past_runs

_WIDTH, _HEIGHT = 480, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 14, 34
_LEAST_SPAN = 0.1
"""Of the largest value: what differs by less than that runs flat, and is no drama."""


class Past:
    """The runs before this one on its machine, from a folder of dated results that is read once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._runs: list[PastRun] | None = None
        self._problem = ""

    def section(self, run: DocumentRun) -> Iterator[str]:
        """The part of the page; nothing without a folder, or where neither this run nor those before have figures."""
        if self._folder is None:
            return
        runs = list(self._read(self._folder, run))
        if run.report.complete:
            runs.append((_utc(run.metadata.started_at), run.report.verdict, headline_figures(run.rows)))
        found = list(trends(runs))
        if not found and not self._problem:
            return
        yield f"<h2>Trend of {html_text(DatedName.host_of(run.metadata.hosts))}</h2>"
        words = self._problem or "A point is a run with its verdict, by date; the axes do not begin at 0."
        yield f'<p class="note">{html_text(words)}</p>'
        yield '<div class="charts">\n'
        for trend in found:
            yield from figure(trend)
        yield "</div>\n"

    def _read(self, folder: Path, run: DocumentRun) -> list[PastRun]:
        if self._runs is None:
            try:
                self._runs = past_runs(folder, run.metadata)
            except UsageError as error:
                self._runs, self._problem = [], error.seen
        return self._runs


def _utc(started_at: str) -> str:
    return _time(started_at).isoformat(timespec="seconds")


def _time(started_at: str) -> datetime:
    return datetime.fromisoformat(started_at).astimezone(UTC)


def figure(trend: Trend) -> Iterator[str]:
    """The picture: the line over dates, the newest value, the median of those before it, marks of verdicts."""
    *before, newest = trend.points
    words = f"{trend.name}, {newest.gb_s:.4g} GB/s"
    if before:
        words += f"; median of {len(before)} before {median(point.gb_s for point in before):.4g}"
    yield f"<figure><figcaption>{html_text(words)}</figcaption>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html_text(words)}">'
    low, high = _range(trend.points)
    for value in (low, high):
        y = _y(value, low, high)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{value:.4g}</text>'
    yield from _dates(trend.points)
    at = [(x, _y(point.gb_s, low, high)) for x, point in zip(_xs(trend.points), trend.points, strict=True)]
    yield f'<polyline class="curve k0" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>'
    for (x, y), point in zip(at, trend.points, strict=True):
        told = f"{point.started_at}: {point.gb_s:.4g} GB/s, {point.verdict}"
        yield _mark(point.verdict, x, y, told)
    yield '</svg><ul class="legend">'
    seen = {point.verdict for point in trend.points}
    for verdict in reversed(WORST_FIRST):
        if verdict in seen:
            yield f'<li><svg viewBox="0 0 34 12" aria-hidden="true">{_mark(verdict, 17, 6, verdict)}</svg>'
            yield f"{'not judged' if verdict is Verdict.SKIP else verdict}</li>"
    yield "</ul></figure>\n"


def _range(points: Sequence[TrendPoint]) -> tuple[float, float]:
    """The lowest and the highest value that the picture has, both as numbers beside it: it does not begin at 0."""
    low, high = min(point.gb_s for point in points), max(point.gb_s for point in points)
    missing = max(_LEAST_SPAN * high - (high - low), 0.0)
    low = max(low - missing / 2, 0.0)
    return low, max(high + missing / 2, low + 1e-9)


def _y(value: float, low: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _xs(points: Sequence[TrendPoint]) -> list[float]:
    """By time; a single run stands in the middle."""
    times = [_time(point.started_at).timestamp() for point in points]
    span = times[-1] - times[0]
    width = _WIDTH - _LEFT - _RIGHT
    return [_LEFT + (width * (time - times[0]) / span if span else width / 2) for time in times]


def _dates(points: Sequence[TrendPoint]) -> Iterator[str]:
    """The beginning of the first and the last run: days, or times of one day."""
    first, last = (_time(points[number].started_at) for number in (0, -1))
    layout = "%Y-%m-%d" if first.date() != last.date() else "%Y-%m-%d %H:%M"
    ends = ((_LEFT, "start", first), (_WIDTH - _RIGHT, "end", last)) if first != last else ()
    for x, anchor, time in ends or ((_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, "middle", first),):
        yield f'<text x="{x:.0f}" y="{_HEIGHT - 10}" text-anchor="{anchor}">{time.strftime(layout)}</text>'


def _mark(verdict: Verdict, x: float, y: float, words: str) -> str:
    """A shape for each verdict, so that none is told by its colour alone."""
    title = f"<title>{html_text(words)}</title>"
    if verdict is Verdict.FAIL:
        return f'<path class="t {verdict}" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10">{title}</path>'
    if verdict is Verdict.ERROR:
        return f'<rect class="t {verdict}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{title}</rect>'
    if verdict in (Verdict.WARN, Verdict.INCONCLUSIVE):
        return f'<path class="t {verdict}" d="M{x:.1f} {y - 6:.1f}l6 10h-12z">{title}</path>'
    return f'<circle class="t {verdict}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'
