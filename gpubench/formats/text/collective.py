"""Collectives for people: a header that names machine and conventions, a line a size as it is measured, a footer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import Any

from gpubench.formats.text.page import INDENT, Page
from gpubench.formats.text.winners import has_host_beside, way_name, way_names, winner_lines
from gpubench.model.results.report import CollectiveRow, Metadata, Report, Row
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.nccl_choice import taken_name
from gpubench.model.terms.operation import Placement
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.sampling import INTERVAL, Mode
from gpubench.model.terms.sweep import describe_dropped
from gpubench.model.terms.units import compress_names, counted, format_size, spans

_SIZE, _COUNT, _TOOK = 11, 12, 14

_Figure = tuple[str, int, Callable[[CollectiveRow], str]]
"""A column: its head, its width, and what a row has in it."""

_TIME: _Figure = ("time µs", 10, lambda row: _number(row.time_us))
_INTERVAL: _Figure = ("±%", 6, lambda row: _percent(row.ci95_percent))
_ALGBW: _Figure = ("algbw", 8, lambda row: _number(row.algbw_gb_s))
_BUSBW: _Figure = ("busbw", 8, lambda row: _number(row.busbw_gb_s))
_P50: _Figure = ("p50", 9, lambda row: _number(row.p50_us))
_P95: _Figure = ("p95", 9, lambda row: _number(row.p95_us))
_P99: _Figure = ("p99", 9, lambda row: _number(row.p99_us))
_WRONG: _Figure = ("wrong", 7, lambda row: _wrong(row.wrong))

_NARROW_SIZE = 8
_FOOTER_LABEL = 18
_SPREAD = (("fastest", 10), ("slowest µs", 11), ("rank", 5))
_MOST_LINES = 16


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
        self._choices = _figures(metadata.options)
        self._shows_evidence = metadata.options.get("evidence") == "shown"
        self._several_backends = has_host_beside(metadata)
        self._ways = way_names(metadata)
        self._hears_choices = bool(self._ways) and metadata.backend != "host"
        names = metadata.options.get("groups") or self._ways
        self._group_width = max(map(len, names)) + 1 if names else 0
        self._size_width, self._figures = self._fitting()
        self._many_blocks = len(metadata.options["dtypes"]) * len(metadata.options["ops"]) > 1
        for line in header_lines(metadata):
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
        for line in footer_lines(self._rows):
            self._page.wrap(line, hanging=_FOOTER_LABEL)
        for line in winner_lines(report, self._page.width):
            self._page.wrap(line, hanging=_FOOTER_LABEL) if len(line) > self._page.width else self._page.print(line)
        if self._shows_evidence:
            self._page.evidence(report)
        self._page.outcome(report)

    def _print(self, rows: Sequence[CollectiveRow]) -> None:
        block = (rows[0].dtype, rows[0].op)
        if block != self._block:
            self._block = block
            self._page.print("", *self._column_heads(rows[0]))
        style = "bold red" if any(row.wrong for row in rows) else ""
        self._page.print("".join(self._cells(rows)), style=style)

    def _column_heads(self, row: CollectiveRow) -> Iterator[str]:
        if self._many_blocks:
            yield " ".join(filter(None, (row.dtype, row.op)))
        lead = " " * (self._group_width + self._size_width + (_COUNT if self._shows_count else 0))
        placed = _width(self._figures)
        yield lead + "".join(placement.replace("_", " ").rjust(placed) for placement in self._placements)
        heads = "".join(name.rjust(width) for name, width, _ in self._figures) * len(self._placements)
        spread = "".join(name.rjust(width) for name, width in _SPREAD) if self._shows_spread else ""
        head = "asked" if self._ways else "group"
        size = (head.ljust(self._group_width) if self._group_width else "") + "size".rjust(self._size_width)
        yield (
            size
            + ("count".rjust(_COUNT) if self._shows_count else "")
            + heads
            + spread
            + ("took".rjust(_TOOK) if self._shows_taken else "")
        )

    def _cells(self, rows: Sequence[CollectiveRow]) -> Iterator[str]:
        yield self._label(rows[0]).ljust(self._group_width) + format_size(rows[0].size_bytes).rjust(self._size_width)
        if self._shows_count:
            yield str(rows[0].count).rjust(_COUNT)
        for row in rows:
            yield from (value(row).rjust(width) for _, width, value in self._figures)
        if self._shows_spread:
            row = rows[0]
            spread = (_number(row.time_us_fastest_rank), _number(row.time_us_slowest_rank), str(row.slowest_rank))
            yield from (value.rjust(width) for value, (_, width) in zip(spread, _SPREAD, strict=True))

        if self._shows_taken:
            yield (taken_name(rows[-1].algorithm, rows[-1].protocol) or "?").rjust(_TOOK)

    def _label(self, row: CollectiveRow) -> str:
        return way_name(row.backend, row.setting, several=self._several_backends) if self._ways else row.group or ""

    def _fitting(self) -> tuple[int, Sequence[_Figure]]:
        """The width of sizes and the figures of a placement for the page at hand."""
        for figures in self._choices:
            if self._group_width + _SIZE + _width(figures) * len(self._placements) <= self._page.width:
                return _SIZE, figures
        return _NARROW_SIZE, self._choices[-1]

    @property
    def _shows_count(self) -> bool:
        figures = _width(self._choices[0]) * len(self._placements)
        return self._page.width >= self._group_width + _SIZE + _COUNT + figures

    @property
    def _shows_taken(self) -> bool:
        needed = self._group_width + self._size_width + _width(self._figures) * len(self._placements) + _TOOK
        counted = _COUNT if self._shows_count else 0
        return self._hears_choices and not self._shows_spread and self._page.width >= needed + counted

    @property
    def _shows_spread(self) -> bool:
        needed = self._group_width + _SIZE + _COUNT + _width(self._choices[0]) + sum(width for _, width in _SPREAD)
        return len(self._placements) == 1 and self._page.width >= needed


def _figures(options: Mapping[str, Any]) -> Sequence[Sequence[_Figure]]:
    """The columns of a placement: the first of these sets that fits, or else the last.

    Of operations alone no bandwidth is shown, which is made by many at once.
    """
    if options.get("mode") == Mode.LATENCY:
        return ((_TIME, _P50, _P95, _P99, _WRONG), (_P50, _P99, _WRONG), (_P50, _WRONG))
    time = (_TIME, _INTERVAL) if "budget_s" in options else (_TIME,)
    if options.get("settings"):  # with room for what NCCL took
        return ((*time, _BUSBW, _WRONG), (_BUSBW, _WRONG))
    return ((*time, _ALGBW, _BUSBW, _WRONG), (*time, _BUSBW, _WRONG), (_BUSBW, _WRONG))


def _width(figures: Sequence[_Figure]) -> int:
    return sum(width for _, width, _ in figures)


def header_lines(metadata: Metadata) -> Iterator[str]:
    """The header: the collective, the machine, the libraries, and how to read the figures."""
    beside = " and host" if has_host_beside(metadata) else ""
    yield (
        f"gpubench {metadata.gpubench_version}  {metadata.collective}  backend {metadata.backend}{beside}  "
        f"{counted(len(metadata.ranks), 'rank')} on {counted(len(metadata.hosts), 'host')}"
        + ("" if metadata.origin == "measured" else f"  ({metadata.origin.upper()})")
    )
    if metadata.backend == "host":
        yield f"{INDENT}MPI on CPU buffers: says nothing about GPUs or their links"
    if metadata.backend == "simulated" and metadata.profile:
        yield f"{INDENT}a model from profile {metadata.profile['name']}: nothing was measured"
        yield f"{INDENT}{metadata.source}"
    yield from _rank_lines(metadata.ranks)
    for name, text in metadata.libraries.items():
        yield f"{INDENT}{name} {text}"
    for name, value in metadata.environment.items():
        yield f"{INDENT}{name}={value}"
    yield f"{INDENT}{_method(metadata)}"
    ways = way_names(metadata)
    if ways:
        yield f"{INDENT}every size in {len(ways)} ways, one after the other: {', '.join(ways)}"
    yield f"{INDENT}size: larger buffer of a rank, as nccl-tests has it; K, M, G are 1024-based; GB/s is 1e9 bytes/s"
    for line in describe_dropped(metadata.dropped_sizes):
        yield f"{INDENT}not measured: {line}"


def _method(metadata: Metadata) -> str:
    options = metadata.options
    graph = f" in a CUDA graph, replayed {options['graph']} times" if options["graph"] else ""
    root = f", root {options['root']}" if options["root"] is not None else ""
    types = ", ".join((*options["dtypes"], *options["ops"]))
    check = "every rank's data verified" if options["check"] else "data not verified"
    if metadata.backend == "simulated":
        return f"{types}{root}; one time a row, with noise from seed {options['seed']}; mean over ranks"
    loop = f"{_loop(options)}{graph} after {options['warmup']} to warm up"
    if options["allocator"] == "nccl":
        types += ", ncclMemAlloc buffers"
    return f"{types}{root}; {loop}; mean over ranks; {check}"


def _loop(options: Mapping[str, Any]) -> str:
    alone = options.get("mode") == Mode.LATENCY
    if "budget_s" in options:
        what = "operations, each alone," if alone else "iterations"
        return f"{what} until the mean is within {INTERVAL:.0%} (95 %) or for {options['budget_s']:g} s a row"
    return f"{options['iters']} " + ("operations, each alone," if alone else "iterations")


def _rank_lines(ranks: Sequence[RankIdentity]) -> Iterator[str]:
    """Ranks host by host, a line each; beyond 16 ranks a line a host; beyond 16 hosts one for those with equal GPUs."""
    hosts = [list(members) for _, members in groupby(ranks, key=lambda rank: rank.host)]
    if len(hosts) > _MOST_LINES:
        for gpus, alike in grouped(hosts, _gpus).items():
            names = compress_names([members[0].host for members in alike])
            numbers = spans([rank.rank for members in alike for rank in members])
            yield f"{INDENT}rank {numbers} on {counted(len(alike), 'host')}: {names}" + (f": {gpus}" if gpus else "")
        return
    for members in hosts:
        if len(ranks) > _MOST_LINES or not _gpus(members):
            gpus = _gpus(members)
            numbers = spans([rank.rank for rank in members])
            yield f"{INDENT}rank {numbers} on {members[0].host}" + (f": {gpus}" if gpus else "")
        else:
            yield from (
                f"{INDENT}rank {each.rank} on {each.host}: GPU {each.gpu_index} {each.gpu_bus_id} {each.gpu}"
                for each in members
            )


def _gpus(ranks: Sequence[RankIdentity]) -> str:
    return ", ".join(dict.fromkeys(rank.gpu for rank in ranks if rank.gpu))


def footer_lines(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """Peak busbw, busbw at the largest size, time at the smallest, wrong elements."""
    if not rows:
        yield "no row was measured"
        return
    if rows[0].mode == Mode.LATENCY:
        yield from _latency_footer(rows)
        return
    peak = max(rows, key=lambda row: row.busbw_gb_s)
    largest = max(rows, key=lambda row: (row.size_bytes, row.busbw_gb_s))
    smallest = min(rows, key=lambda row: (row.size_bytes, row.time_us))
    yield f"peak busbw        {_number(peak.busbw_gb_s)} GB/s at {_where(peak)}{_of_limit(peak)}"
    yield f"at the largest    {_number(largest.busbw_gb_s)} GB/s busbw at {_where(largest)}"
    yield f"at the smallest   {_number(smallest.time_us)} µs at {_where(smallest)}"
    yield from _slowest_group([row for row in rows if row.size_bytes == largest.size_bytes])
    yield _wrong_line(rows)


def _latency_footer(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    smallest = min(rows, key=lambda row: (row.size_bytes, row.time_us))
    largest = max(rows, key=lambda row: (row.size_bytes, -row.time_us))
    for name, row in (("smallest", smallest), ("largest", largest)):
        times = f"{_number(row.p50_us)} µs (p50), {_number(row.p99_us)} µs (p99)"
        yield f"at the {name:<8}   {times} at {_where(row)}"
    yield from _slowest_group([row for row in rows if row.size_bytes == largest.size_bytes])
    yield _wrong_line(rows)


def _slowest_group(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """The group that was slowest at one size, against the median of all, where there are several."""
    kind = attrgetter("dtype", "op", "placement")
    alike = [row for row in rows if kind(row) == kind(rows[0])]
    if len({row.group for row in alike}) > 1:
        slowest, middle = max(alike, key=lambda row: row.time_us), median(row.time_us for row in alike)
        over = slowest.time_us / middle - 1
        yield f"slowest group     {slowest.group}: {_number(slowest.time_us)} µs, {over:.1%} over the median of groups"


def _wrong_line(rows: Sequence[CollectiveRow]) -> str:
    checked = [row.wrong for row in rows if row.wrong is not None]
    return f"wrong elements    {sum(checked) if checked else 'not checked'}"


def _of_limit(row: CollectiveRow) -> str:
    return "" if row.limit_gb_s is None else f", {row.limit_percent:.0f}% of the limit of {row.limit_gb_s:g}"


def _where(row: CollectiveRow) -> str:
    where = f"{format_size(row.size_bytes)}, {row.dtype}, {Placement(row.placement).replace('_', ' ')}"
    where = f"{where}, {row.setting}" if row.setting else where
    return f"{where}, {row.group}" if row.group else where


def _percent(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _number(value: float | None) -> str:
    """Four or five significant digits in at most nine characters."""
    if value is None:
        return "-"
    if value >= 100_000:
        return f"{value:.0f}"
    if value >= 1_000:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _wrong(wrong: int | None) -> str:
    return "-" if wrong is None else str(wrong)
