"""Collectives for people: a header that names machine and conventions, a line a size as it is measured, a footer."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from gpubench.formats.text.page import INDENT, Page, plural, spans
from gpubench.model.operation import Placement
from gpubench.model.report import CollectiveRow, Metadata, RankIdentity, Report, Row
from gpubench.model.sweep import describe_dropped
from gpubench.model.units import compress_names, format_size

_SIZE, _COUNT = 11, 12
_TIME, _ALGBW, _BUSBW, _WRONG = ("time µs", 10), ("algbw", 8), ("busbw", 8), ("wrong", 7)
_FIGURES = ((_TIME, _ALGBW, _BUSBW, _WRONG), (_TIME, _BUSBW, _WRONG), (_BUSBW, _WRONG))
"""What a line shows of a placement: the first of these that fits, or else the last."""

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
        self._waiting: list[CollectiveRow] = []
        self._block: tuple[str, str | None] | None = None
        self._placements = tuple(metadata.options["placements"])
        self._size_width, self._figures = self._fitting()
        self._shows_evidence = metadata.options.get("evidence") == "shown"
        self._many_blocks = len(metadata.options["dtypes"]) * len(metadata.options["ops"]) > 1
        for line in header_lines(metadata):
            page.wrap(line)

    def row(self, row: Row) -> None:
        """A line, once all placements of the size are known."""
        if not isinstance(row, CollectiveRow):
            raise TypeError(f"a collective has no rows of {type(row).__name__}")
        self._rows.append(row)
        self._waiting.append(row)
        if len(self._waiting) == len(self._placements):
            self._print_waiting()

    def end(self, report: Report) -> None:
        """The footer: peak, largest and smallest size, verification, findings, verdict. Never an average over sizes."""
        if self._waiting:
            self._print_waiting()
        self._page.print("")
        for line in footer_lines(self._rows):
            self._page.wrap(line, hanging=_FOOTER_LABEL)
        if self._shows_evidence:
            self._page.evidence(report)
        self._page.outcome(report)

    def _print_waiting(self) -> None:
        rows, self._waiting = self._waiting, []
        block = (rows[0].dtype, rows[0].op)
        if block != self._block:
            self._block = block
            self._page.print("", *self._column_heads(rows[0]))
        style = "bold red" if any(row.wrong for row in rows) else ""
        self._page.print("".join(self._cells(rows)), style=style)

    def _column_heads(self, row: CollectiveRow) -> Iterator[str]:
        if self._many_blocks:
            yield " ".join(filter(None, (row.dtype, row.op)))
        width = sum(width for _, width in self._figures)
        lead = " " * (self._size_width + (_COUNT if self._shows_count else 0))
        yield lead + "".join(placement.replace("_", " ").rjust(width) for placement in self._placements)
        heads = "".join(name.rjust(width) for name, width in self._figures) * len(self._placements)
        spread = "".join(name.rjust(width) for name, width in _SPREAD) if self._shows_spread else ""
        yield "size".rjust(self._size_width) + ("count".rjust(_COUNT) if self._shows_count else "") + heads + spread

    def _cells(self, rows: Sequence[CollectiveRow]) -> Iterator[str]:
        yield format_size(rows[0].size_bytes).rjust(self._size_width)
        if self._shows_count:
            yield str(rows[0].count).rjust(_COUNT)
        for row in rows:
            values = {
                _TIME: _number(row.time_us),
                _ALGBW: _number(row.algbw_gb_s),
                _BUSBW: _number(row.busbw_gb_s),
                _WRONG: _wrong(row.wrong),
            }
            yield from (values[figure].rjust(figure[1]) for figure in self._figures)
        if self._shows_spread:
            row = rows[0]
            spread = (_number(row.time_us_fastest_rank), _number(row.time_us_slowest_rank), str(row.slowest_rank))
            yield from (value.rjust(width) for value, (_, width) in zip(spread, _SPREAD, strict=True))

    def _fitting(self) -> tuple[int, Sequence[tuple[str, int]]]:
        """The width of sizes and the figures of a placement for the page at hand."""
        for figures in _FIGURES:
            needed = sum(width for _, width in figures) * len(self._placements)
            if _SIZE + needed <= self._page.width:
                return _SIZE, figures
        return _NARROW_SIZE, _FIGURES[-1]

    @property
    def _shows_count(self) -> bool:
        figures = sum(width for _, width in _FIGURES[0]) * len(self._placements)
        return self._page.width >= _SIZE + _COUNT + figures

    @property
    def _shows_spread(self) -> bool:
        needed = _SIZE + _COUNT + sum(width for _, width in (*_FIGURES[0], *_SPREAD))
        return len(self._placements) == 1 and self._page.width >= needed


def header_lines(metadata: Metadata) -> Iterator[str]:
    """What was measured, where, with which libraries, and how to read the figures."""
    yield (
        f"gpubench {metadata.gpubench_version}  {metadata.collective}  backend {metadata.backend}  "
        f"{plural(len(metadata.ranks), 'rank')} on {plural(len(metadata.hosts), 'host')}"
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
    loop = f"{options['iters']} iterations{graph} after {options['warmup']} to warm up"
    if options["allocator"] == "nccl":
        types += ", ncclMemAlloc buffers"
    return f"{types}{root}; {loop}; mean over ranks; {check}"


def _rank_lines(ranks: Sequence[RankIdentity]) -> Iterator[str]:
    """Ranks host by host, a line each; beyond 16 ranks a line a host; beyond 16 hosts one for those with equal GPUs."""
    hosts = [list(members) for _, members in groupby(ranks, key=lambda rank: rank.host)]
    if len(hosts) > _MOST_LINES:
        by_gpus: dict[str, list[list[RankIdentity]]] = {}
        for members in hosts:
            by_gpus.setdefault(_gpus(members), []).append(members)
        for gpus, alike in by_gpus.items():
            names = compress_names([members[0].host for members in alike])
            numbers = spans([rank.rank for members in alike for rank in members])
            yield f"{INDENT}rank {numbers} on {plural(len(alike), 'host')}: {names}" + (f": {gpus}" if gpus else "")
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
    peak = max(rows, key=lambda row: row.busbw_gb_s)
    largest = max(rows, key=lambda row: (row.size_bytes, row.busbw_gb_s))
    smallest = min(rows, key=lambda row: (row.size_bytes, row.time_us))
    yield f"peak busbw        {_number(peak.busbw_gb_s)} GB/s at {_where(peak)}{_of_limit(peak)}"
    yield f"at the largest    {_number(largest.busbw_gb_s)} GB/s busbw at {_where(largest)}"
    yield f"at the smallest   {_number(smallest.time_us)} µs at {_where(smallest)}"
    checked = [row.wrong for row in rows if row.wrong is not None]
    yield f"wrong elements    {sum(checked) if checked else 'not checked'}"


def _of_limit(row: CollectiveRow) -> str:
    return "" if row.limit_gb_s is None else f", {row.limit_percent:.0f}% of the limit of {row.limit_gb_s:g}"


def _where(row: CollectiveRow) -> str:
    return f"{format_size(row.size_bytes)}, {row.dtype}, {Placement(row.placement).replace('_', ' ')}"


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
