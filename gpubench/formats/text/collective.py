"""Collectives for people: a header, a line a size as it is measured, a footer, and backends side by side."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from statistics import median

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.formats import lines
from gpubench.formats.table import Page
from gpubench.model.facts.process import TrialOutcome
from gpubench.model.paths.wiring import NVLS_ASSUMED
from gpubench.model.results.backends import BackendRow, MpiTrialRow, WinnerRow, speed_words
from gpubench.model.results.report import CollectiveRow, Metadata, Report, Row
from gpubench.model.terms.operation import KERNELS, NCCL, TORCH_NCCL, Placement
from gpubench.model.terms.ranks import why_not_judged
from gpubench.model.terms.settings import repeated_name, taken_name
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import format_bandwidth, format_share, format_size, format_time, grouped
from gpubench.model.terms.verdict import Verdict, doubt_in, gravity

_UNKNOWN = "-"


def backend_lines(report: Report, width: int) -> Iterator[str]:
    """A table by type, reduction and placement: the first backend's time, and the speed of the others."""
    rows = report.rows(BackendRow)
    for series in grouped(rows, lambda row: (row.dtype, row.op, row.placement)).values():
        yield from ("", *_table(series, width))
    if rows:
        yield ""
    for series in grouped(rows, lambda row: row.backend).values():
        yield f"beside            {speed_words(series)}"


def _table(rows: Sequence[BackendRow], width: int) -> Iterator[str]:
    first = rows[0]
    what = ", ".join(filter(None, (first.dtype, first.op, first.placement.replace("_", " "))))
    yield f"speed, % of {first.first}'s, {what}"
    by_size = grouped(rows, lambda row: row.size_bytes)
    names = list(dict.fromkeys(row.backend for row in rows))
    at = [{row.backend: row for row in here} for here in by_size.values()]
    columns = [
        lines.Column("size", [format_size(size) for size in by_size], right=True),
        lines.Column(
            f"{first.first} µs", [lines.figure(here[0].first_time_us) for here in by_size.values()], right=True
        ),
    ]
    for name in names:
        cells = [_UNKNOWN if name not in here else _share_of_first(here[name].speed_percent) for here in at]
        columns.append(lines.Column(name, cells, right=True))
    columns += _issue_columns(rows, list(by_size.values()), at)
    yield from lines.fitted_lines(columns, width)
    for note, here in grouped([row for row in rows if row.note], lambda row: row.note).items():
        yield f"  {', '.join(dict.fromkeys(row.backend for row in here))}: {note}"


def _issue_columns(
    rows: Sequence[BackendRow], by_size: Sequence[Sequence[BackendRow]], at: Sequence[Mapping[str, BackendRow]]
) -> list[lines.Column]:
    known = list(dict.fromkeys(row.backend for row in rows if row.issue_us is not None))
    if not known:
        return []
    firsts = [lines.figure(here[0].first_issue_us) for here in by_size]
    columns = [
        lines.Column("issued in µs:", [""] * len(at), spare=1),
        lines.Column(rows[0].first, firsts, spare=1, right=True),
    ]
    for name in known:
        cells = [_UNKNOWN if name not in here else lines.figure(here[name].issue_us) for here in at]
        columns.append(lines.Column(name, cells, spare=1, right=True))
    return columns


def support_lines(report: Report, width: int) -> Iterator[str]:
    """Every operation that MPI was handed GPU memory for, and how that ended."""
    rows = report.rows(MpiTrialRow)
    if not rows:
        return
    by_operation = grouped(rows, lambda row: row.operation)
    sizes = list(dict.fromkeys(row.size_bytes for row in rows))
    yield from ("", "MPI on GPU memory, each operation in a job of its own")
    columns = [lines.Column("operation", list(by_operation))]
    for size in sizes:
        cells = [next((row.outcome for row in here if row.size_bytes == size), "") for here in by_operation.values()]
        columns.append(lines.Column(format_size(size), cells))
    columns.append(lines.Column("after s", [_seconds(here) for here in by_operation.values()], right=True, spare=1))
    columns.append(lines.Column("its words", [_said(here) for here in by_operation.values()], spare=2))
    yield from lines.fitted_lines(columns, width)


def _said(rows: Sequence[MpiTrialRow]) -> str:
    return next((row.said for row in rows if row.outcome != TrialOutcome.RIGHT and row.said), "")


def _seconds(rows: Sequence[MpiTrialRow]) -> str:
    known = [row.seconds for row in rows if row.seconds is not None]
    return f"{max(known):.1f}" if known else _UNKNOWN


def _share_of_first(percent: float) -> str:
    if percent >= 1000:
        return f"{percent / 100:.3g} ×"
    return f"{percent:.1f}" if percent >= 10 else f"{percent:.2g}"


_SIZE, _NARROW_SIZE = 9, 8

_LIMITED_FROM_BYTES = 64 * 2**10
"""Smaller operations take the time of a launch: their share of the limit says nothing."""


def _are_alone(metadata: Metadata) -> bool:
    """Of operations alone no bandwidth is shown, which is made by many at once."""
    return metadata.options.get("mode") == Mode.LATENCY


def _are_many(metadata: Metadata) -> bool:
    return not _are_alone(metadata)


def _has_one_placement(metadata: Metadata) -> bool:
    return len(metadata.options.get("placements", ())) == 1


def _hears_choices(metadata: Metadata) -> bool:
    """True if settings are compared and NCCL says which algorithm and protocol it used."""
    tells = metadata.backend == NCCL or metadata.backend in KERNELS
    return bool(lines.way_names(metadata)) and tells and _has_algorithms(metadata)


_BUSBW = lines.Figure("busbw", lambda row: lines.figure(row.busbw_gb_s), 7, on_page="busbw GB/s", when=_are_many)
_MARKED_BUSBW = lines.Figure("busbw", lambda row: lines.figure(row.busbw_gb_s) + _mark(row), 8)
_EXPECTED = lines.Figure("% exp", lambda row: _share(row), 8, spare=1, when=_are_many)
_TAKEN = lines.Figure("took", lambda row: _taken(row), 14, when=_hears_choices)
_SPREAD = (
    lines.Figure(
        "fastest", lambda row: lines.figure(row.time_us_fastest_rank), 10, 6, "fastest µs", _has_one_placement
    ),
    lines.Figure("slowest µs", lambda row: lines.figure(row.time_us_slowest_rank), 11, 6, when=_has_one_placement),
    lines.Figure("rank", lambda row: lines.or_dash(row.slowest_rank, "d"), 5, 6, "slowest rank", _has_one_placement),
)
FIGURES = (
    lines.Figure("time µs", lambda row: lines.figure(row.time_us), 9, spare=3),
    lines.Figure("±%", lambda row: _percent(row.ci95_percent), 5, spare=4, when=lambda run: "budget_s" in run.options),
    lines.Figure("p50", lambda row: lines.figure(row.p50_us) + _mark(row), 9, on_page="p50 µs", when=_are_alone),
    lines.Figure("p95", lambda row: lines.figure(row.p95_us), 9, 3, "p95 µs", _are_alone),
    lines.Figure("p99", lambda row: lines.figure(row.p99_us), 9, 1, "p99 µs", _are_alone),
    lines.Figure("algbw", lambda row: lines.figure(row.algbw_gb_s), 7, 5, "algbw GB/s", _are_many),
    _BUSBW,
    _EXPECTED,
    lines.Figure("expected GB/s", lambda row: lines.figure(row.expected_gb_s), when=_are_many),
    lines.Figure("% limit", lambda row: format_share(row.limit_percent), when=_are_many),
    lines.Figure("wrong", lambda row: lines.or_dash(row.wrong, "d"), 6),
    *_SPREAD,
    _TAKEN,
    lines.Figure("transport", lambda row: row.transport or ""),
    lines.Figure("verdict", lambda row: row.verdict or "not judged"),
)
"""The columns of collectives in the terminal, where each placement has them, and on pages."""

_FOOTER_LABEL = 18
_FIRST_MILLISECOND_US = 1000
_STYLES = {Verdict.FAIL: "bold red", Verdict.WARN: "yellow"}


def collective_columns(metadata: Metadata, rows: Sequence[CollectiveRow]) -> list[lines.Column]:
    """The columns of a page, a line a row."""
    head, labels = _labels(metadata)
    return [
        lines.Column(head, [labels(row) for row in rows]),
        lines.Column("size", [format_size(row.size_bytes) for row in rows]),
        lines.Column("type", [" ".join(filter(None, (row.dtype, row.op))) for row in rows]),
        lines.Column("placement", [row.placement.replace("_", " ") for row in rows]),
        *lines.page_columns([each for each in FIGURES if each.when(metadata)], rows),
    ]


def _parts(figures: Sequence[lines.Figure]) -> tuple[list[lines.Figure], list[lines.Figure]]:
    """The figures of each placement, and those that a line has once."""
    of_line = [each for each in figures if each in (*_SPREAD, _TAKEN)]
    return [each for each in figures if each not in of_line], of_line


def _winners_on_page(rows: Sequence[WinnerRow]) -> list[lines.Column]:
    """The table of the terminal, which is one for each type, reduction and placement, in one."""
    return [
        lines.Column("type", [" ".join(filter(None, (row.dtype, row.op))) for row in rows]),
        lines.Column("placement", [row.placement.replace("_", " ") for row in rows]),
        *lines.winner_columns(rows),
    ]


COLUMNS = {WinnerRow: _winners_on_page}


def _labels(metadata: Metadata) -> tuple[str, Callable[[CollectiveRow], str]]:
    """What is said before the size: what was asked for in a sweep of settings, else the group of ranks."""
    if not lines.way_names(metadata):
        return "group", lambda row: row.group or ""
    several = bool(lines.backends_beside(metadata))
    return "asked", lambda row: lines.way_name(row.backend, row.setting, several=several)


class CollectiveView:
    """Prints lines of fixed width, so that rows can be shown as they are measured.

    Both placements of a size stand in one line, as nccl-tests has them; a single placement leaves room for the fastest
    and slowest rank.
    """

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._rows: list[CollectiveRow] = []
        self._waiting: dict[tuple[str | None, ...], list[CollectiveRow]] = {}
        self._block: tuple[str, str | None] | None = None
        self._placements = tuple(metadata.options["placements"])
        self._shows_evidence = metadata.options.get("evidence") == "shown"
        self._why_not_judged = why_not_judged(metadata.ranks)
        names = metadata.options.get("groups") or lines.way_names(metadata)
        if "turns" in metadata.options:
            names = [repeated_name(name) for name in names[1:-1]]
        self._head, self._label = _labels(metadata)
        self._group_width = max(map(len, names)) + 1 if names else 0
        self._size_width, self._figures = self._fitting([each for each in FIGURES if each.when(metadata)])
        self._many_blocks = len(metadata.options["dtypes"]) * len(metadata.options["ops"]) > 1
        for line in lines.collective_lines(metadata, verbose=page.verbose):
            page.wrap(line)

    def row(self, row: Row) -> None:
        """A line, once all placements of the size are known."""
        if not isinstance(row, CollectiveRow):
            raise TypeError(f"a collective has no rows of {type(row).__name__}")
        self._rows.append(row)
        line = row.group, row.backend, row.setting
        self._waiting.setdefault(line, []).append(row)
        if len(self._waiting[line]) == len(self._placements):
            self._print(self._waiting.pop(line))

    def end(self, report: Report) -> None:
        """The footer: peak, largest and smallest size, verification, findings, verdict. Never an average over sizes."""
        for rows in self._waiting.values():
            self._print(rows)
        self._page.print("")
        for line in _footer_lines(self._rows, self._why_not_judged):
            self._page.wrap(line, hanging=_FOOTER_LABEL)
        width = self._page.width
        for line in chain(
            lines.winner_lines(report, width), backend_lines(report, width), support_lines(report, width)
        ):
            self._page.wrap(line, hanging=_FOOTER_LABEL) if len(line) > self._page.width else self._page.print(line)
        if self._shows_evidence:
            self._page.evidence(report)
        self._page.outcome(report)

    def _print(self, rows: Sequence[CollectiveRow]) -> None:
        block = (rows[0].dtype, rows[0].op)
        if block != self._block:
            self._block = block
            self._page.print("", *self._column_heads(rows[0]))
        worst = min((Verdict(row.verdict) for row in rows if row.verdict), key=gravity, default=Verdict.SKIP)
        self._page.print("".join(self._cells(rows)), style=_STYLES.get(worst, ""))

    def _column_heads(self, row: CollectiveRow) -> Iterator[str]:
        if self._many_blocks:
            yield " ".join(filter(None, (row.dtype, row.op)))
        lead = " " * (self._group_width + self._size_width)
        placed, of_line = _parts(self._figures)
        width = lines.width_of(placed)
        yield lead + "".join(placement.replace("_", " ").rjust(width) for placement in self._placements)
        heads = "".join(each.head.rjust(each.width) for each in (*placed * len(self._placements), *of_line))
        size = (self._head.ljust(self._group_width) if self._group_width else "") + "size".rjust(self._size_width)
        yield size + heads

    def _cells(self, rows: Sequence[CollectiveRow]) -> Iterator[str]:
        placed, of_line = _parts(self._figures)
        yield self._label(rows[0]).ljust(self._group_width) + format_size(rows[0].size_bytes).rjust(self._size_width)
        for row in rows:
            yield from (_cell(each.text(row), each.width) for each in placed)
        yield from (_cell(each.text(rows[-1]), each.width) for each in of_line)

    def _fitting(self, figures: Sequence[lines.Figure]) -> tuple[int, Sequence[lines.Figure]]:
        """The width of sizes, and the figures that fit beside them; busbw has the mark where % exp has no room."""
        kept: list[lines.Figure] = []
        for size in (_SIZE, _NARROW_SIZE):
            kept = lines.fitting_figures(figures, self._page.width - self._group_width - size, self._needed)
            if all(each in kept for each in figures if each.spare == 1):
                return size, kept
        kept = [_MARKED_BUSBW if each is _BUSBW else each for each in kept]
        fits = self._group_width + _NARROW_SIZE + self._needed(kept) <= self._page.width
        return _NARROW_SIZE, kept if fits else [each for each in kept if each is not _TAKEN]

    def _needed(self, figures: Sequence[lines.Figure]) -> int:
        placed, of_line = _parts(figures)
        return lines.width_of(placed) * len(self._placements) + lines.width_of(of_line)


def _has_algorithms(metadata: Metadata) -> bool:
    """False of a collective that NCCL makes of sends and receives: it then chooses no algorithm."""
    name = metadata.collective
    return name not in SUMMARIES or not collective_named(name).point_to_point


def _taken(row: CollectiveRow) -> str:
    """What NCCL took; '?' where it did not say, '-' where another library moved the data."""
    name = taken_name(row.algorithm, row.protocol) or ("?" if row.backend in (NCCL, TORCH_NCCL) else "-")
    return name if len(name) < _TAKEN.width else name.partition("/")[0]


def _cell(text: str, width: int) -> str:
    """At least a blank before it: what is wider than its column still stands apart."""
    return text.rjust(width) if len(text) < width else f" {text}"


def _footer_lines(rows: Sequence[CollectiveRow], why_not_judged: str = "") -> Iterator[str]:
    """Peak busbw, busbw at the largest size and time at the smallest of the first backend; of all, wrong elements.

    `why_not_judged` is the reason why nothing is expected of these ranks, where there is one.
    """
    if not rows:
        yield "no row was measured"
        return
    if rows[0].mode == Mode.LATENCY:
        yield from _latency_footer(rows, why_not_judged)
        return
    every, rows = rows, [row for row in rows if row.backend == rows[0].backend]
    peak = max(rows, key=lambda row: row.reached_gb_s)
    largest = max(rows, key=lambda row: (row.size_bytes, row.reached_gb_s))
    smallest = min(rows, key=lambda row: (row.size_bytes, row.time_us))
    if peak.busbw_gb_s is not None:
        shares = f"{_of_expected(peak)}{_of_limit(peak)}"
        yield f"peak busbw        {_bandwidth(peak)} at {_where(peak)}{shares}"
        yield f"at the largest    {_bandwidth(largest)} busbw at {_where(largest)}"
    yield f"at the smallest   {_time(smallest.time_us)} at {_where(smallest)}"
    yield from _slowest_group([row for row in rows if row.size_bytes == largest.size_bytes])
    yield _expected_line(every, why_not_judged)
    yield from _slow_lines(every)
    yield _wrong_line(every)


def _bandwidth(row: CollectiveRow) -> str:
    """The busbw with all digits of the table, below 1 GB/s in MB/s or kB/s."""
    return f"{lines.figure(row.busbw_gb_s)} GB/s" if row.reached_gb_s >= 1 else format_bandwidth(row.reached_gb_s)


def _time(microseconds: float | None) -> str:
    """The time with all digits of the table, from 1 ms on in ms or s."""
    is_short = microseconds is None or microseconds < _FIRST_MILLISECOND_US
    return f"{lines.figure(microseconds)} µs" if is_short else format_time(microseconds or 0.0)


def _latency_footer(every: Sequence[CollectiveRow], why_not_judged: str) -> Iterator[str]:
    rows = [row for row in every if row.backend == every[0].backend]
    smallest = min(rows, key=lambda row: (row.size_bytes, row.time_us))
    largest = max(rows, key=lambda row: (row.size_bytes, -row.time_us))
    for name, row in (("smallest", smallest), ("largest", largest)):
        times = f"{_time(row.p50_us)} (p50), {_time(row.p99_us)} (p99)"
        if row.p50_us is None:
            times = f"{_time(row.time_us)} (mean)"
        yield f"at the {name:<8}   {times} at {_where(row)}"
    yield from _slowest_group([row for row in rows if row.size_bytes == largest.size_bytes])
    yield _expected_line(every, why_not_judged)
    yield from _slow_lines(every)
    yield _wrong_line(every)


def _slowest_group(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """The group that was slowest at one size, against the median of all, where there are several."""
    kind = attrgetter("dtype", "op", "placement")
    alike = [row for row in rows if kind(row) == kind(rows[0])]
    if len({row.group for row in alike}) > 1:
        slowest, middle = max(alike, key=lambda row: row.time_us), median(row.time_us for row in alike)
        over = slowest.time_us / middle - 1
        yield f"slowest group     {slowest.group}: {_time(slowest.time_us)}, {over:.1%} over the median of groups"


def _wrong_line(rows: Sequence[CollectiveRow]) -> str:
    checked = [row.wrong for row in rows if row.wrong is not None]
    return f"wrong elements    {sum(checked) if checked else 'not checked'}"


def _expected_line(rows: Sequence[CollectiveRow], why_not_judged: str) -> str:
    """Where expected figures are from, or that speed was not judged."""
    sources = dict.fromkeys(row.expected_source for row in rows if row.expected_source)
    legend = "; lim: % of the limit" if any(map(_limited, rows)) else ""
    why = why_not_judged or next(filter(None, (doubt_in(row.note) for row in rows)), "")
    unknown = f"speed not judged: {why}" if why else "not known: speed not judged"
    return f"expected          {'; '.join(sources) or unknown}{_judged_part(rows)}{legend}"


def _judged_part(rows: Sequence[CollectiveRow]) -> str:
    """Of which rows the speed was judged, where it was of some: from a size on, or so many of them."""
    judged = [row.size_bytes for row in rows if row.expected_source]
    others = [row.size_bytes for row in rows if not row.expected_source]
    if not judged or not others:
        return ""
    if max(others) < min(judged):
        return f"; speed judged from {format_size(min(judged))} on"
    return f"; speed judged of {len(judged)} of {len(rows)} rows"


def _slow_lines(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    marked = [row for row in rows if _mark(row)]
    if not marked:
        return
    verdicts = Counter(Verdict(row.verdict) for row in marked if row.verdict)
    counts = ", ".join(
        f"{verdicts[each]} {each} ({mark})" for each, mark in lines.VERDICT_MARKS.items() if each in verdicts
    )
    known = [row for row in marked if row.expected_percent is not None]
    worst = min(known, key=lambda row: row.expected_percent or 0.0, default=None)
    slowest = "" if worst is None else f"; the slowest at {_where(worst)}{_of_expected(worst)}"
    yield f"marked rows       {counts}{slowest}"


def _mark(row: CollectiveRow) -> str:
    """The mark of a row that is slow; wrong elements have a column of their own."""
    return "" if row.wrong else lines.verdict_mark(row.verdict)


def _limited(row: CollectiveRow) -> bool:
    known = row.expected_percent is None and row.limit_percent is not None
    return known and row.size_bytes >= _LIMITED_FROM_BYTES


def _share(row: CollectiveRow) -> str:
    """'98': percent of what is expected; '76 lim': of the limit, where nothing is."""
    if _limited(row):
        return f"{format_share(row.limit_percent)}{_mark(row) or ' '}lim"
    return format_share(row.expected_percent) + _mark(row)


def _of_expected(row: CollectiveRow) -> str:
    return "" if row.expected_percent is None else f", {format_share(row.expected_percent)}% of expected"


def _of_limit(row: CollectiveRow) -> str:
    if row.limit_gb_s is None:
        return ""
    with_nvls = " with NVLS" if NVLS_ASSUMED in (row.note or "") else ""
    return f", {row.limit_percent:.0f}% of the limit of {row.limit_gb_s:g}{with_nvls}"


def _where(row: CollectiveRow) -> str:
    where = f"{format_size(row.size_bytes)}, {row.dtype}, {Placement(row.placement).replace('_', ' ')}"
    where = f"{where}, {row.setting}" if row.setting else where
    return f"{where}, {row.group}" if row.group else where


def _percent(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
