"""Print an overlap run: one line per CTA limit and size during the run, the limits with the shortest step, and the
verdict.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from gpubench.formats import layout
from gpubench.formats.layout import INDENT, Column, figure, or_dash
from gpubench.formats.table import Page, heading, software_lines
from gpubench.formats.text.collective import rank_lines, ranks_on_hosts
from gpubench.formats.text.scaling import SCALING, print_scaling
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.overlap import OverlapRow, ShortestStepRow
from gpubench.model.results.report import Metadata, Report, Row
from gpubench.model.results.scaling import ScalingRow
from gpubench.model.terms.overlap import OWN_CTAS, Partner
from gpubench.model.terms.units import describe_dropped, format_size

_NAMES = {Partner.GEMM: "GEMMs", Partner.COPY: "copies", Partner.CHAIN: "chains"}
_COMMUNICATION, _COMPUTATION = "communication µs, slowed ×", "computation µs, slowed ×"
_MOST_NOTES = 6
_TWO_DECIMALS = 99.995
"""Show ratios from this value on without decimals, so that they fit six columns."""


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if abs(value) < _TWO_DECIMALS else f"{value:.0f}"


def _ctas(row: OverlapRow | ShortestStepRow) -> str:
    return OWN_CTAS if row.ctas is None else str(row.ctas)


_GROUPS = {
    _COMMUNICATION: (
        Column("alone", lambda row: figure(row.communication_alone_us), width=8, on_page="collective alone µs"),
        Column(
            "both", lambda row: figure(row.communication_together_us), 1, width=8, on_page="collective beside it µs"
        ),
        Column("κm", lambda row: _ratio(row.communication_slowdown), width=6),
        Column("wait", lambda row: _ratio(row.waiting_slowdown), 3, width=6, on_page="waiting"),
        Column("share", lambda row: _ratio(row.sharing_slowdown), 4, width=6, on_page="sharing"),
    ),
    _COMPUTATION: (
        Column("ops", lambda row: str(row.partner_count), 5, width=6, on_page="operations"),
        Column("alone", lambda row: figure(row.partner_alone_us), 6, width=8, on_page="operations alone µs"),
        Column("both", lambda row: figure(row.partner_together_us), 7, width=8, on_page="operations beside it µs"),
        Column("κc", lambda row: _ratio(row.compute_slowdown), width=6),
    ),
}
STEPS = (
    Column("beside", "partner", page_only=True),
    Column("size", "size_bytes", width=5),
    Column("CTAs", _ctas, width=5),
    Column("channels", lambda row: or_dash(row.channels, "d"), page_only=True),
    *_GROUPS[_COMMUNICATION],
    *_GROUPS[_COMPUTATION],
    Column("step µs", lambda row: figure(row.step_us) + ("!" if row.wrong else ""), width=8),
    Column("hidden", lambda row: "-" if row.hidden_share is None else f"{100 * row.hidden_share:.0f}%", 2, width=7),
    Column("MHz", lambda row: or_dash(row.sm_clock_mhz, ".0f"), 8, width=6),
    Column("W", lambda row: or_dash(row.power_w, ".0f"), 9, width=5),
    Column("note", "note", page_only=True),
    Column("verdict", lambda row: row.verdict or "not judged", page_only=True),
)
SHORTEST = (
    Column("beside", lambda row: _NAMES[Partner(row.partner)]),
    Column("size", "size_bytes", right=True),
    Column("CTAs", _ctas, right=True),
    Column("shortest step µs", lambda row: figure(row.step_us), right=True),
    Column("NCCL's own µs", lambda row: figure(row.own_step_us), right=True),
    Column("shorter by", lambda row: _gain(row), right=True),
    Column("note", lambda row: _doubt(row), 1, optional=True),
)
COLUMNS = {ShortestStepRow: SHORTEST, ScalingRow: SCALING}
_RANKS = Column("ranks", "ranks", width=6)


def page_columns(metadata: Metadata) -> tuple[Column, ...]:
    """Return the columns of each step. The number of ranks is the first if the run varies it."""
    return (_RANKS, *STEPS) if "np" in metadata.options else STEPS


class OverlapView:
    """Prints one line of fixed width per row, as soon as it is measured."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._metadata = metadata
        self._rows: list[OverlapRow] = []
        columns = [column for column in page_columns(metadata) if column.width]
        self._columns = layout.fitting(columns, page.width, lambda column: column.width)
        for line in _header_lines(metadata, verbose=page.verbose):
            page.wrap(line)

    def row(self, row: Row) -> None:
        """Print the row, and the column heads before the first row of each computation."""
        if not isinstance(row, OverlapRow):
            raise TypeError(f"an overlap has no rows of {type(row).__name__}")
        if not self._rows or self._rows[-1].partner != row.partner:
            self._page.print("", *self._heads(row))
        elif self._rows[-1].size_bytes != row.size_bytes and len(self._metadata.options["ctas"]) > 1:
            self._page.print("")
        self._rows.append(row)
        cells = "".join(column.text(row).rjust(column.width) for column in self._columns)
        self._page.print(cells, style="bold red" if row.wrong else "")

    def end(self, report: Report) -> None:
        self._page.print("")
        for line in _note_lines(self._rows):
            self._page.wrap(f"{INDENT}{line}")
        for refused in report.rows(RefusedRow):
            self._page.wrap(f"{INDENT}{refused.setting}: NCCL refused: {refused.reason}")
        shortest = report.rows(ShortestStepRow)
        if shortest:
            several = len({row.partner for row in shortest}) > 1
            self._page.print("the cap with the shortest step:")
            self._page.table(SHORTEST if several else SHORTEST[1:], shortest, keys=1 + several, indent=INDENT)
            self._page.print("")
        print_scaling(self._page, report)
        if self._metadata.options.get("evidence") == "shown":
            self._page.evidence(report)
        self._page.outcome(report)

    def _heads(self, row: OverlapRow) -> Iterator[str]:
        yield f"{_NAMES[Partner(row.partner)]}: each a {row.partner_operation}"
        groups = [next((name for name, own in _GROUPS.items() if column in own), "") for column in self._columns]
        spans = [
            (name, sum(column.width for _, column in members))
            for name, members in groupby(zip(groups, self._columns, strict=True), key=lambda pair: pair[0])
        ]
        if all(len(name) < width for name, width in spans):
            yield "".join(name.rjust(width) for name, width in spans).rstrip()
        yield "".join(column.head.rjust(column.width) for column in self._columns)


def _header_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    options = metadata.options
    yield heading(
        metadata, f"overlap of {options['collective']}", f"backend {metadata.backend}", ranks_on_hosts(metadata)
    )
    if metadata.origin == "simulated" and metadata.profile:
        yield f"{INDENT}a model from profile {metadata.profile['name']}, contention as on 2 H200s, nothing was measured"
        yield f"{INDENT}{metadata.source}"
    yield from rank_lines(metadata, verbose=verbose)
    yield from software_lines(metadata, verbose=verbose)
    types = ", ".join((*options["dtypes"], *options["ops"]))
    if metadata.origin == "simulated":
        yield f"{INDENT}{types}; one time per row, with noise from seed {options['seed']}"
    else:
        check = "data verified on every rank" if options["check"] else "data not verified"
        steps = f"steps of one collective and some operations, {options['seconds']:g} s per phase"
        yield f"{INDENT}{types}; {steps}; {check}"
    yield f"{INDENT}a collective starts with the partner's first operation; size is the larger buffer of a rank"
    yield f"{INDENT}κm = 1 + wait for SMs + share of bandwidth and power; κc while the collective is in flight"
    for line in describe_dropped(metadata.dropped_sizes):
        yield f"{INDENT}not measured: {line}"


def _note_lines(rows: Sequence[OverlapRow]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        throttled = f"clocks were throttled: {row.throttled_by}" if row.throttled_by else ""
        noisy = "steps vary by more than the time of the collective, so the hidden share is unknown"
        for note in filter(None, (row.note, throttled, noisy if row.hidden_share is None else "")):
            found.setdefault(note, []).append(f"{format_size(row.size_bytes)}/{_ctas(row)}")
    for note, places in list(found.items())[:_MOST_NOTES]:
        yield f"{note} ({'every row' if len(places) == len(rows) else ', '.join(places)})"


def _gain(row: ShortestStepRow) -> str:
    if row.gain_percent is None:
        return "-"
    return "its own" if row.ctas is None else f"{row.gain_percent:.1f} %"


def _doubt(row: ShortestStepRow) -> str:
    if row.ctas is None or row.beyond_noise is not False:
        return ""
    return f"within noise, {row.noise_percent:.1f} %"
