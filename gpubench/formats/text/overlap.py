"""An overlap for people: a line a cap and size as it is measured, the caps with the shortest steps, the verdict."""

from collections.abc import Iterator, Sequence

from gpubench.formats import lines
from gpubench.formats.table import Page
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.overlap import OverlapRow, ShortestStepRow
from gpubench.model.results.report import Metadata, Report, Row
from gpubench.model.terms.overlap import OWN_CTAS, Partner
from gpubench.model.terms.units import counted, describe_dropped, format_size

_NAMES = {Partner.GEMM: "GEMMs", Partner.COPY: "copies", Partner.CHAIN: "chains"}

_COMMUNICATION = (
    lines.Figure("alone", lambda row: lines.figure(row.communication_alone_us), 8, on_page="collective alone µs"),
    lines.Figure("both", lambda row: lines.figure(row.communication_together_us), 8, 1, "collective beside it µs"),
    lines.Figure("κm", lambda row: _ratio(row.communication_slowdown), 6),
    lines.Figure("wait", lambda row: _ratio(row.waiting_slowdown), 6, 3, "waiting"),
    lines.Figure("share", lambda row: _ratio(row.sharing_slowdown), 6, 4, "sharing"),
)
_COMPUTATION = (
    lines.Figure("ops", lambda row: str(row.partner_count), 6, 5, "operations"),
    lines.Figure("alone", lambda row: lines.figure(row.partner_alone_us), 8, 6, "operations alone µs"),
    lines.Figure("both", lambda row: lines.figure(row.partner_together_us), 8, 7, "operations beside it µs"),
    lines.Figure("κc", lambda row: _ratio(row.compute_slowdown), 6),
)
FIGURES = (
    lines.Figure("size", lambda row: format_size(row.size_bytes), 5),
    lines.Figure("CTAs", lambda row: OWN_CTAS if row.ctas is None else str(row.ctas), 5),
    lines.Figure("channels", lambda row: lines.or_dash(row.channels, "d")),
    *_COMMUNICATION,
    *_COMPUTATION,
    lines.Figure("step µs", lambda row: lines.figure(row.step_us) + ("!" if row.wrong else ""), 8),
    lines.Figure("hidden", lambda row: "-" if row.hidden_share is None else f"{100 * row.hidden_share:.0f}%", 7, 2),
    lines.Figure("MHz", lambda row: lines.or_dash(row.sm_clock_mhz, ".0f"), 6, 8),
    lines.Figure("W", lambda row: lines.or_dash(row.power_w, ".0f"), 5, 9),
    lines.Figure("note", lambda row: row.note or ""),
    lines.Figure("verdict", lambda row: row.verdict or "not judged"),
)
"""The columns of steps in the terminal and on pages."""

_MOST_NOTES = 6
_TWO_DECIMALS = 99.995
"""A ratio from here on has none, for the columns are six wide."""


def overlap_columns(rows: Sequence[OverlapRow]) -> list[lines.Column]:
    """The columns of a page, a line a row."""
    return [lines.Column("beside", [row.partner for row in rows]), *lines.page_columns(FIGURES, rows)]


class OverlapView:
    """Prints lines of fixed width, so that rows can be shown as they are measured."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._metadata = metadata
        self._rows: list[OverlapRow] = []
        self._figures = lines.fitting_figures(FIGURES, page.width)
        for line in _header(metadata, verbose=page.verbose):
            page.wrap(line)

    def row(self, row: Row) -> None:
        """A line; before the first of a partner the heads."""
        if not isinstance(row, OverlapRow):
            raise TypeError(f"an overlap has no rows of {type(row).__name__}")
        if not self._rows or self._rows[-1].partner != row.partner:
            self._page.print("", *self._heads(row))
        elif self._rows[-1].size_bytes != row.size_bytes and len(self._metadata.options["ctas"]) > 1:
            self._page.print("")
        self._rows.append(row)
        cells = "".join(each.text(row).rjust(each.width) for each in self._figures)
        self._page.print(cells, style="bold red" if row.wrong else "")

    def end(self, report: Report) -> None:
        """What was odd, the shortest steps, findings, verdict."""
        self._page.print("")
        for line in _note_lines(self._rows):
            self._page.wrap(f"{lines.INDENT}{line}")
        for refused in report.rows(RefusedRow):
            self._page.wrap(f"{lines.INDENT}{refused.setting}: NCCL refused: {refused.reason}")
        self._shortest(report.rows(ShortestStepRow))
        if self._metadata.options.get("evidence") == "shown":
            self._page.evidence(report)
        self._page.outcome(report)

    def _heads(self, row: OverlapRow) -> Iterator[str]:
        yield f"{_NAMES[Partner(row.partner)]}: each a {row.partner_operation}"
        groups = [next((name for name, own in _GROUPS.items() if each in own), "") for each in self._figures]
        widths = [each.width for each in self._figures]
        if all(len(name) < sum(w for w, own in zip(widths, groups, strict=True) if own == name) for name in _GROUPS):
            yield _group_line(groups, widths)
        yield "".join(each.head.rjust(each.width) for each in self._figures)

    def _shortest(self, rows: Sequence[ShortestStepRow]) -> None:
        if not rows:
            return
        several = len({row.partner for row in rows}) > 1
        self._page.print("the cap with the shortest step:")
        for line in lines.fitted_lines(_shortest_columns(rows), self._page.width - len(lines.INDENT), keys=1 + several):
            self._page.print(lines.INDENT + line)
        self._page.print("")


def _shortest_columns(rows: Sequence[ShortestStepRow]) -> list[lines.Column]:
    several = len({row.partner for row in rows}) > 1
    doubts = [_doubt(row) for row in rows]
    return [
        *([lines.Column("beside", [_NAMES[Partner(row.partner)] for row in rows])] if several else []),
        lines.Column("size", [format_size(row.size_bytes) for row in rows], right=True),
        lines.Column("CTAs", [OWN_CTAS if row.ctas is None else str(row.ctas) for row in rows], right=True),
        lines.Column("shortest step µs", [lines.figure(row.step_us) for row in rows], right=True),
        lines.Column("NCCL's own µs", [lines.figure(row.own_step_us) for row in rows], right=True),
        lines.Column("shorter by", [_gain(row) for row in rows], right=True),
        *([lines.Column("note", doubts, 1)] if any(doubts) else ()),
    ]


COLUMNS = {ShortestStepRow: _shortest_columns}

_GROUPS = {"communication µs, slowed ×": _COMMUNICATION, "computation µs, slowed ×": _COMPUTATION}


def _group_line(groups: Sequence[str], widths: Sequence[int]) -> str:
    """The line above the heads: the name of a group over its columns."""
    line, start = "", 0
    while start < len(groups):
        end = start
        while end < len(groups) and groups[end] == groups[start]:
            end += 1
        width = sum(widths[start:end])
        line += groups[start][: width - 1].rjust(width)
        start = end
    return line.rstrip()


def _header(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    options = metadata.options
    job = f"{counted(len(metadata.ranks), 'rank')} on {counted(len(metadata.hosts), 'host')}"
    yield lines.heading(metadata, f"overlap of {options['collective']}", f"backend {metadata.backend}", job)
    if metadata.origin == "simulated" and metadata.profile:
        model = f"a model from profile {metadata.profile['name']}"
        yield f"{lines.INDENT}{model}, contention as on 2 H200s: nothing was measured"
        yield f"{lines.INDENT}{metadata.source}"
    yield from lines.rank_lines(metadata.ranks, verbose=verbose)
    yield from lines.sharing_lines(metadata.ranks)
    yield from lines.software_lines(metadata, verbose=verbose)
    types = ", ".join((*options["dtypes"], *options["ops"]))
    if metadata.origin == "simulated":
        yield f"{lines.INDENT}{types}; one time a row, with noise from seed {options['seed']}"
    else:
        check = "every rank's data verified" if options["check"] else "data not verified"
        steps = f"steps of one collective and some operations, {options['seconds']:g} s a phase"
        yield f"{lines.INDENT}{types}; {steps}; {check}"
    yield (
        lines.INDENT + "a collective begins as the partner's first operation does; size is the larger buffer of a rank"
    )
    yield f"{lines.INDENT}κm = 1 + wait for SMs + share of bandwidth and power; κc while the collective is in flight"
    for line in describe_dropped(metadata.dropped_sizes):
        yield f"{lines.INDENT}not measured: {line}"


def _note_lines(rows: Sequence[OverlapRow]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        throttled = f"clocks were held down: {row.throttled_by}" if row.throttled_by else ""
        where = f"{format_size(row.size_bytes)}/{OWN_CTAS if row.ctas is None else row.ctas}"
        noisy = "steps differ by more than the collective takes, and so do not tell what is hidden of it"
        for note in filter(None, (row.note, throttled, noisy if row.hidden_share is None else "")):
            found.setdefault(note, []).append(where)
    for note, places in list(found.items())[:_MOST_NOTES]:
        where = "every row" if len(places) == len(rows) else ", ".join(places)
        yield f"{note} ({where})"


def _gain(row: ShortestStepRow) -> str:
    if row.gain_percent is None:
        return "-"
    return "its own" if row.ctas is None else f"{row.gain_percent:.1f} %"


def _doubt(row: ShortestStepRow) -> str:
    if row.ctas is None or row.beyond_noise is not False:
        return ""
    return f"within noise, {row.noise_percent:.1f} %"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if abs(value) < _TWO_DECIMALS else f"{value:.0f}"
