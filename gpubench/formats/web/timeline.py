"""The timeline of a plan's step as inline SVG: computation above communication, what is waited for marked."""

from collections.abc import Iterator, Sequence

from gpubench.formats.web.html_text import html_text
from gpubench.model.results.report import Metadata, Report
from gpubench.model.results.rows.plan import TIMELINE_SECTION, TimelineRow

_WIDTH, _LEFT, _RIGHT = 1160, 150, 12
_LANE, _GAP, _AXIS = 22, 6, 24
_MOST_SPANS = 6000
_MOST_DEVICES = 8
_LEAST_WIDTH = 0.4
_TICKS = 8

_COMPUTE, _WAITING = "compute", "waiting"


def timeline_figure(metadata: Metadata, report: Report) -> Iterator[str]:
    """The picture, and what the step follows from; nothing of a report that has no such section."""
    rows = report.rows(TIMELINE_SECTION, TimelineRow)
    if not rows:
        return
    devices = sorted({row.device for row in rows})[:_MOST_DEVICES]
    shown = [row for row in rows if row.device in devices]
    lanes = [lane for device in devices for lane in _lanes(device, shown)]
    end_us = max(row.end_us for row in shown)
    height = len(lanes) * (_LANE + _GAP) + _AXIS
    yield "<h2>The step: computation above communication</h2>"
    yield '<figure class="timeline"><div class="scroll">'
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of a step of {end_us / 1e3:.1f} ms">'
    yield from _axis(end_us, height)
    for place, (device, stream) in enumerate(lanes):
        top = place * (_LANE + _GAP)
        label = stream if len(devices) == 1 else f"{stream} {device}"
        yield f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{html_text(label)}</text>'
        own = [row for row in shown if (row.device, row.stream) == (device, stream)]
        for row in own[:_MOST_SPANS]:
            yield _span(row, top, end_us)
    yield '</svg></div><ul class="legend">'
    for kind, words in (
        ("compute", "computes"),
        ("hidden", "communicates beside computation"),
        ("exposed", "communicates, and is waited for"),
        ("bubble", "waits for another stage"),
    ):
        sample = f'<rect class="{kind}" width="34" height="12"/>'
        yield f'<li><svg viewBox="0 0 34 12" aria-hidden="true">{sample}</svg>{words}</li>'
    yield "</ul></figure>\n"
    yield '<h2>What it follows from</h2><ul class="note">'
    yield from (f"<li>{html_text(str(note))}</li>" for note in metadata.options.get("notes", ()))
    yield "</ul>\n"


def _lanes(device: int, rows: Sequence[TimelineRow]) -> list[tuple[int, str]]:
    """Computation, what was waited for, then what communicates."""
    streams = list(dict.fromkeys(row.stream for row in rows if row.device == device))
    order = {_COMPUTE: 0, _WAITING: 1}
    return [(device, stream) for stream in sorted(streams, key=lambda name: (order.get(name, 2), name))]


def _axis(end_us: float, height: int) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        at = _LEFT + tick / _TICKS * (_WIDTH - _LEFT - _RIGHT)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - _AXIS}"/>'
        anchor = "end" if tick == _TICKS else "middle"
        shown = f"{end_us * tick / _TICKS / 1e3:.1f}" + (" ms" if tick == _TICKS else "")
        yield f'<text x="{at:.1f}" y="{height - 6}" text-anchor="{anchor}">{shown}</text>'


def _span(row: TimelineRow, top: int, end_us: float) -> str:
    scale = (_WIDTH - _LEFT - _RIGHT) / (end_us or 1.0)
    kind = _COMPUTE if row.stream == _COMPUTE else "exposed" if row.exposed else "hidden"
    if row.stream == _WAITING and not row.exposed:
        kind = "bubble"
    width = max(_LEAST_WIDTH, (row.end_us - row.start_us) * scale)
    words = f"{row.name}: {row.start_us / 1e3:.3f} to {row.end_us / 1e3:.3f} ms"
    return (
        f'<rect class="{kind}" x="{_LEFT + row.start_us * scale:.2f}" y="{top}" width="{width:.2f}" height="{_LANE}">'
        f"<title>{html_text(words)}</title></rect>"
    )
