"""The page of the html format: verdict, findings, curves, matrices as heat maps, all figures; no script, no network."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

from gpubench.formats.blocks import Block, blocks, copies_of_report, facts, outcome, title
from gpubench.formats.document import DocumentRun
from gpubench.formats.sections import Grid, GridCell, Listing
from gpubench.formats.text.machine.fallback import fallback_lines
from gpubench.formats.web.curves import figure
from gpubench.formats.web.html_text import html_text
from gpubench.formats.web.look import STYLE
from gpubench.formats.web.machine import figure as picture_of
from gpubench.formats.web.timeline import timeline_figure
from gpubench.formats.web.trend import Past
from gpubench.formats.web.wiring import machines
from gpubench.model.results.curves import Chart
from gpubench.model.terms.verdict import Finding, Verdict

_SIGNS = {Verdict.PASS: "✓", Verdict.FAIL: "✗", Verdict.WARN: "!", Verdict.ERROR: "?", Verdict.SKIP: "–"}
_MARKS = {Verdict.FAIL: "✗", Verdict.WARN: "!", Verdict.INCONCLUSIVE: "~", Verdict.ERROR: "?"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""No script and nothing from elsewhere, should text ever become markup; the page's own style is inline."""

_LOW_SHARE = 2 / 3
"""Cells below this share are framed."""


def render(run: DocumentRun, past: Past) -> Iterator[str]:
    """The page; `past` has what dated results tell of the machine."""
    name = html_text(title(run.metadata))
    verdict = run.report.verdict
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{name}: {verdict}</title><style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n"
    yield f'<div class="verdict {verdict}">{_SIGNS.get(verdict, "~")} {html_text(outcome(run))}</div>\n'
    yield from (f'<p class="note">{html_text(line)}</p>' for line in fallback_lines(run.report))
    for finding in run.report.findings:
        yield from _finding(finding)
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
    yield from timeline_figure(run.metadata, run.report)
    for is_chart, members in groupby(
        chain(blocks(run), copies_of_report(run.report)), key=lambda block: isinstance(block, Chart)
    ):
        if is_chart:
            yield '<h2>Curves</h2><div class="charts">\n'
        for block in members:
            yield from _block(block)
        if is_chart:
            yield "</div>\n"
    yield "<footer>GB/s is 1e9 bytes/s, K, M and G in sizes are 1024-based; ✗ FAIL, ! WARN, ~ INCONCLUSIVE, "
    yield "? ERROR; dashed frames: below two thirds of what is expected, else of the best over the same kind of link."
    yield "</footer></body></html>\n"


def _finding(finding: Finding) -> Iterator[str]:
    yield f'<section class="finding {finding.severity}"><strong>{finding.severity} {html_text(finding.id)}</strong> '
    yield f"<span>{html_text(finding.subject)}</span><dl>"
    for label, words in finding.details:
        if words:
            shown = f"<code>{html_text(words)}</code>" if label == "try" else html_text(words)
            yield f"<dt>{label}</dt><dd>{shown}</dd>"
    yield "</dl></section>\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Chart):
        yield from figure(block)
    elif isinstance(block, Grid):
        yield from _grid(block)
    else:
        yield from _listing(block)


def _grid(grid: Grid) -> Iterator[str]:
    yield f'<h2>{html_text(grid.title)}</h2><div class="scroll"><table><tr><th>{html_text(grid.corner)}</th>'
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
    words = html_text(cell.text) + (f' <b title="{cell.verdict}">{mark}</b>' if mark else "")
    if cell.share is None:
        return f"<td>{words}</td>"
    low = " low" if cell.share < _LOW_SHARE else ""
    return f'<td class="h{low}" style="--s:{cell.share:.2f}">{words}</td>'


def _listing(listing: Listing) -> Iterator[str]:
    """A table; where it folds, lines that pass are behind their number."""
    yield f"<h2>{html_text(listing.title)}</h2>"
    lines = list(zip(listing.lines, listing.verdicts, strict=False))
    passed = [each for each in lines if each[1] is Verdict.PASS] if listing.folds else []
    others = [each for each in lines if each not in passed]
    if others or not passed:
        yield from _table(listing.heads, others)
    if passed:
        is_cut = " of those shown" if listing.left_out else ""
        yield f"<details><summary>{len(passed)} passed{is_cut}</summary>"
        yield from _table(listing.heads, passed)
        yield "</details>\n"
    if listing.left_out:
        yield f'<p class="note">{html_text(listing.left_out)}</p>\n'


def _table(heads: Sequence[str], lines: Sequence[tuple[Sequence[str], Verdict | None]]) -> Iterator[str]:
    yield '<div class="scroll"><table><tr>'
    yield from (f"<th>{html_text(head)}</th>" for head in heads)
    yield "</tr>\n"
    for line, verdict in lines:
        yield "<tr>"
        for words in line:
            kinds = ("n" if _is_number(words) else "") + (f" {verdict}" if verdict and words == verdict.value else "")
            kind = f' class="{kinds.strip()}"' if kinds.strip() else ""
            yield f"<td{kind}>{html_text(words)}</td>"
        yield "</tr>\n"
    yield "</table></div>\n"


def _is_number(words: str) -> bool:
    return words.rstrip("%KMGT").replace(".", "", 1).isdigit()
