"""Print a collective: a header, one line per size while it is measured, a footer, and a comparison of backends."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import Any

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.formats import layout
from gpubench.formats.layout import INDENT, VERDICT_MARKS, Column, figure, or_dash, verdict_mark
from gpubench.formats.table import Page, heading, software_lines
from gpubench.formats.text.scaling import SCALING, print_scaling
from gpubench.model.facts.process import TrialOutcome
from gpubench.model.paths.wiring import NVLS_LIMIT
from gpubench.model.results.backends import BackendRow, MpiTrialRow, RefusedRow, WinnerRow, crossings, describe_speed
from gpubench.model.results.report import BACKENDS, CollectiveRow, Metadata, Report, Row
from gpubench.model.results.scaling import ScalingRow
from gpubench.model.terms import operation, settings
from gpubench.model.terms.operation import NCCL, Placement
from gpubench.model.terms.ranks import RankIdentity, count_nccl_hosts, group_by_device, why_not_judged
from gpubench.model.terms.statistics import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode
from gpubench.model.terms.units import (
    compress_names,
    describe_dropped,
    format_bandwidth,
    format_percent,
    format_ranges,
    format_share,
    format_size,
    format_time,
    group_by,
    plural,
)
from gpubench.model.terms.verdict import Verdict, gravity, parse_doubt

_SIZE, _NARROW_SIZE = 9, 8
_LIMITED_FROM_BYTES = 64 * 2**10
"""Show no share of the limit below this size, because launch time dominates there."""

_FOOTER_LABEL = 18
_MOST_LINES = 2
_MOST_LINES_IN_FULL = 16
_FIRST_MILLISECOND_US = 1000
_STYLES = {Verdict.FAIL: "bold red", Verdict.WARN: "yellow"}


def _describe_series(row: BackendRow | WinnerRow) -> str:
    return ", ".join(filter(None, (row.dtype, row.op, row.placement.replace("_", " "))))


def _are_alone(metadata: Metadata) -> bool:
    """True in latency mode, which shows percentiles in place of bandwidths, unless a program of others had none."""
    options = metadata.options
    return options.get("mode") == Mode.LATENCY and options.get("percentiles") is not False


def _have_percentiles(metadata: Metadata) -> bool:
    """True with --percentiles, which are those of a loop of its own. Latency mode has them in place of bandwidth."""
    return metadata.options.get("percentiles") is True


def _are_many(metadata: Metadata) -> bool:
    return not _are_alone(metadata)


def _has_one_placement(metadata: Metadata) -> bool:
    return len(metadata.options.get("placements", ())) == 1


def _logs_choices(metadata: Metadata) -> bool:
    """True if the run compares settings and NCCL logs which algorithm and protocol it chose.

    NCCL chooses no algorithm for collectives that it composes from sends and receives.
    """
    is_nccl = metadata.backend == NCCL or metadata.backend in operation.KERNELS
    name = metadata.collective
    has_algorithms = name not in SUMMARIES or not collective_named(name).point_to_point
    return bool(way_names(metadata)) and is_nccl and has_algorithms


_BUSBW = Column("busbw", lambda row: figure(row.busbw_gb_s), width=7, on_page="busbw GB/s", when=_are_many)
_MARKED_BUSBW = Column("busbw", lambda row: figure(row.busbw_gb_s) + _mark(row), width=8)
_TAKEN = Column("took", lambda row: _taken(row), width=14, when=_logs_choices)
_SPREAD = (
    Column(
        "fastest",
        lambda row: figure(row.time_us_fastest_rank),
        6,
        width=10,
        on_page="fastest µs",
        when=_has_one_placement,
    ),
    Column("slowest µs", lambda row: figure(row.time_us_slowest_rank), 6, width=11, when=_has_one_placement),
    Column(
        "rank", lambda row: or_dash(row.slowest_rank, "d"), 6, width=5, on_page="slowest rank", when=_has_one_placement
    ),
)
FIGURES = (
    Column("time µs", lambda row: figure(row.time_us), 3, width=9),
    Column("±%", lambda row: _percent(row.ci95_percent), 4, width=5, when=lambda run: "budget_s" in run.options),
    Column("p50", lambda row: figure(row.p50_us) + _mark(row), width=9, on_page="p50 µs", when=_are_alone),
    Column("p95", lambda row: figure(row.p95_us), 3, width=9, on_page="p95 µs", when=_are_alone),
    Column("p99", lambda row: figure(row.p99_us), 1, width=9, on_page="p99 µs", when=_are_alone),
    Column("p50", lambda row: figure(row.p50_us), 4, width=9, on_page="p50 µs", when=_have_percentiles),
    Column("p95", lambda row: figure(row.p95_us), 4, width=9, on_page="p95 µs", when=_have_percentiles),
    Column("p99", lambda row: figure(row.p99_us), 2, width=9, on_page="p99 µs", when=_have_percentiles),
    Column("algbw", lambda row: figure(row.algbw_gb_s), 5, width=7, on_page="algbw GB/s", when=_are_many),
    _BUSBW,
    Column("% exp", lambda row: _share(row), 1, width=8, when=_are_many),
    Column("expected GB/s", lambda row: figure(row.expected_gb_s), page_only=True, when=_are_many),
    Column("% limit", lambda row: format_share(row.limit_percent), page_only=True, when=_are_many),
    Column("wrong", lambda row: or_dash(row.wrong, "d"), width=6),
    *_SPREAD,
    _TAKEN,
    Column("transport", "transport", page_only=True),
    Column("verdict", lambda row: row.verdict or "not judged", page_only=True),
)
"""The columns for collectives. A terminal repeats them for each placement, except those in `_SPREAD` and `took`."""

WINNERS = (
    Column("type", lambda row: " ".join(filter(None, (row.dtype, row.op))), page_only=True),
    Column("placement", lambda row: row.placement.replace("_", " "), page_only=True),
    Column("size", "size_bytes", right=True),
    Column("fastest", lambda row: row.fastest if row.beyond_noise else "-"),
    Column("time µs", lambda row: figure(row.time_us), right=True),
    Column("own choice", lambda row: settings.format_choice(row.own_algorithm, row.own_protocol) or "-"),
    Column("time µs", lambda row: figure(row.own_time_us), right=True),
    Column("loses", lambda row: f"{row.loss_percent:.1f}%{'*' if row.beyond_noise else ' '}", right=True),
    Column("noise", lambda row: format_percent(row.noise_percent, "?", 1), 1, right=True),
    Column("drift", lambda row: format_percent(row.own_drift_percent, "?", 1), 2, right=True),
)
COLUMNS = {WinnerRow: WINNERS, ScalingRow: SCALING}


def page_columns(metadata: Metadata) -> list[Column]:
    """Return the columns for a page, which shows one row per line."""
    head, label = _labels(metadata)
    return [
        Column(head, label),
        Column("size", "size_bytes"),
        Column("type", lambda row: " ".join(filter(None, (row.dtype, row.op)))),
        Column("placement", lambda row: row.placement.replace("_", " ")),
        *(column for column in FIGURES if column.when is None or column.when(metadata)),
    ]


def _labels(metadata: Metadata) -> tuple[str, Callable[[CollectiveRow], str]]:
    """Return the first column: the setting, the number of ranks or the group of ranks, whichever the run varies."""
    if "np" in metadata.options:
        return "ranks", lambda row: str(row.ranks)
    if not way_names(metadata):
        return "group", lambda row: row.group or ""
    several = bool(other_backends(metadata))
    return "asked", lambda row: way_name(row.backend, row.setting, several=several)


class CollectiveView:
    """Prints one line of fixed width per message size, as soon as it is measured.

    In-place and out-of-place results share a line, as in nccl-tests. If only one of them is measured, columns for the
    fastest and slowest rank are added.
    """

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._rows: list[CollectiveRow] = []
        self._waiting: dict[tuple[str | None, ...], list[CollectiveRow]] = {}
        self._block: tuple[str, str | None] | None = None
        self._placements = tuple(metadata.options["placements"])
        self._shows_evidence = metadata.options.get("evidence") == "shown"
        self._why_not_judged = why_not_judged(metadata.ranks)
        names = metadata.options.get("groups") or way_names(metadata)
        names = ["ranks"] if "np" in metadata.options else names
        if "turns" in metadata.options:
            names = [settings.repeated_name(name) for name in names[1:-1]]
        self._head, self._label = _labels(metadata)
        self._group_width = max(map(len, names)) + 1 if names else 0
        self._size_width, columns = self._fitting(
            [column for column in FIGURES if column.width and (column.when is None or column.when(metadata))]
        )
        self._columns = [
            (column, row) for row in range(len(self._placements)) for column in columns if not _is_once(column)
        ]
        self._columns += [(column, -1) for column in columns if _is_once(column)]
        self._many_blocks = len(metadata.options["dtypes"]) * len(metadata.options["ops"]) > 1
        for line in collective_lines(metadata, verbose=page.verbose):
            page.wrap(line)

    def row(self, row: Row) -> None:
        """Print a line once all placements of a size have been measured."""
        if not isinstance(row, CollectiveRow):
            raise TypeError(f"a collective has no rows of {type(row).__name__}")
        self._rows.append(row)
        line = row.group, row.backend, row.setting
        self._waiting.setdefault(line, []).append(row)
        if len(self._waiting[line]) == len(self._placements):
            self._print(self._waiting.pop(line))

    def end(self, report: Report) -> None:
        """Print the footer: peak, largest and smallest size, verification and findings.

        The footer never averages over message sizes.
        """
        for rows in self._waiting.values():
            self._print(rows)
        self._page.print("")
        print_scaling(self._page, report)
        for line in _footer_lines(self._rows, self._why_not_judged):
            self._page.wrap(line, hanging=_FOOTER_LABEL)
        self._winners(report)
        self._backends(report.rows(BackendRow))
        self._trials(report.rows(MpiTrialRow))
        if self._shows_evidence:
            self._page.evidence(report)
        self._page.outcome(report)

    def _print(self, rows: Sequence[CollectiveRow]) -> None:
        block = (rows[0].dtype, rows[0].op)
        if block != self._block:
            self._block = block
            self._page.print("", *self._heads(rows[0]))
        worst = min((Verdict(row.verdict) for row in rows if row.verdict), key=gravity, default=Verdict.SKIP)
        measured = [(column, rows[number]) for column, number in self._columns if number < len(rows)]
        size = format_size(rows[0].size_bytes).rjust(self._size_width)
        values = layout.row_line([(column, column.text(row)) for column, row in measured])
        self._page.print(self._label(rows[0]).ljust(self._group_width) + size + values, style=_STYLES.get(worst, ""))

    def _heads(self, row: CollectiveRow) -> Iterator[str]:
        if self._many_blocks:
            yield " ".join(filter(None, (row.dtype, row.op)))
        width = sum(column.width for column, number in self._columns if number == 0)
        lead = " " * (self._group_width + self._size_width)
        yield lead + "".join(placement.replace("_", " ").rjust(width) for placement in self._placements)
        group = self._head.ljust(self._group_width) if self._group_width else ""
        heads = "".join(column.head.rjust(column.width) for column, _ in self._columns)
        yield group + "size".rjust(self._size_width) + heads

    def _fitting(self, columns: Sequence[Column]) -> tuple[int, list[Column]]:
        """Return the width of the size column, and the columns that fit. Without '% exp', busbw shows the mark."""

        def total_width(column: Column) -> int:
            return column.width * (1 if _is_once(column) else len(self._placements))

        kept: list[Column] = []
        for size in (_SIZE, _NARROW_SIZE):
            kept = layout.fitting(columns, self._page.width - self._group_width - size, total_width)
            if all(column in kept for column in columns if column.spare == 1):
                return size, kept
        kept = [_MARKED_BUSBW if column is _BUSBW else column for column in kept]
        fits = self._group_width + _NARROW_SIZE + sum(map(total_width, kept)) <= self._page.width
        return _NARROW_SIZE, kept if fits else [column for column in kept if column is not _TAKEN]

    def _winners(self, report: Report) -> None:
        """Print a table of the fastest setting per size, for each data type, reduction and placement.

        Then print the settings that could not run.
        """
        best = report.rows(WinnerRow)
        if all(row.setting is None and row.candidates <= 2 for row in best):
            best = []  # `_backends` prints the comparison of two backends
        for what, rows in group_by(best, _describe_series).items():
            self._page.print("", f"fastest by size, {what}")
            self._page.table(WINNERS, rows)
            self._remark(f"cross-over  {_crossings(rows)}")
        if best:
            self._page.print("")
            self._remark(_legend_of_ways(best))
        for remark in dict.fromkeys(
            remark for row in best for remark in settings.NcclSetting.parse(row.setting).remarks
        ):
            self._remark(f"mind              {remark}")
        for refused in report.rows(RefusedRow):
            self._remark(f"could not run     {_refused(refused)}")

    def _backends(self, rows: Sequence[BackendRow]) -> None:
        """Print the time of the first backend and the relative speed of the others, for each data type and
        placement.
        """
        for what, series in group_by(rows, _describe_series).items():
            self._page.print("", f"speed, % of {series[0].first}'s, {what}")
            alike = list(group_by(series, lambda row: row.size_bytes).values())
            self._page.table(_backend_columns(series), [{row.backend: row for row in members} for members in alike])
            for note, noted in group_by([row for row in series if row.note], lambda row: row.note).items():
                self._remark(f"  {', '.join(dict.fromkeys(row.backend for row in noted))}: {note}")
        if rows:
            self._page.print("")
        for series in group_by(rows, lambda row: row.backend).values():
            self._remark(f"beside            {describe_speed(series)}")

    def _trials(self, rows: Sequence[MpiTrialRow]) -> None:
        """Print the result of each trial of MPI with GPU memory."""
        if rows:
            sizes = dict.fromkeys(row.size_bytes for row in rows)
            self._page.print("", "MPI on GPU memory, each operation in a separate job")
            columns = [
                Column("operation", lambda trials: trials[0].operation),
                *(_outcome_column(size) for size in sizes),
                Column("after s", _seconds, 1, right=True),
                Column("its words", _error_text, 2),
            ]
            self._page.table(columns, list(group_by(rows, lambda row: row.operation).values()))

    def _remark(self, line: str) -> None:
        self._page.wrap(line, hanging=_FOOTER_LABEL)


def _is_once(column: Column) -> bool:
    """True if a column appears once per line instead of once per placement."""
    return column in (*_SPREAD, _TAKEN)


def way_name(backend: str, setting: str | None, *, several: bool) -> str:
    """Return the setting of a row, with its backend in front if the run compares several backends."""
    if not several:
        return setting or settings.OWN_CHOICE
    return " ".join(filter(None, (backend, setting)))


def way_names(metadata: Metadata) -> list[str]:
    """Return the settings and backends that the run compares, or an empty list if it compares none."""
    names = list(metadata.options.get("settings") or ())
    if not names:
        return []
    beside, backend = other_backends(metadata), str(metadata.backend)
    own = [name for name in (None, *names, settings.AGAIN) if name not in beside]
    ways = [way_name(backend, name, several=bool(beside)) for name in own]
    for other in beside:
        more = [*operation.KERNELS.get(other, ())]
        more += [settings.HIERARCHICAL] if settings.HIERARCHICAL in names else []
        ways += [other, *(f"{other} {name}" for name in more)]
    return ways


def other_backends(metadata: Metadata) -> list[str]:
    names = metadata.options.get("settings") or ()
    return [name for name in names if name in BACKENDS and name != metadata.backend]


def collective_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """Yield the header of a collective: the machine, the libraries, and how the values were measured."""
    beside = "".join(f" and {backend}" for backend in other_backends(metadata))
    job = ranks_on_hosts(metadata)
    if any(rank.nccl_host is not None and rank.device is not None for rank in metadata.ranks):
        job += f", {plural(count_nccl_hosts(metadata.ranks), 'host')} for NCCL, according to NCCL_HOSTID"
    yield heading(metadata, str(metadata.collective), f"backend {metadata.backend}{beside}", job)
    is_gloo = metadata.backend == "torch:gloo" and not any(rank.gpu for rank in metadata.ranks)
    if metadata.backend == "host" or is_gloo:
        yield f"{INDENT}{'Gloo' if is_gloo else 'MPI'} on CPU buffers: the result does not apply to GPUs or their links"
    if metadata.backend == "simulated" and metadata.profile:
        yield f"{INDENT}a model from profile {metadata.profile['name']}, nothing was measured"
        yield f"{INDENT}{metadata.source}"
    if "read_from" in metadata.options:
        yield f"{INDENT}measured by another program, read from {metadata.options['read_from']}"
    yield from rank_lines(metadata, verbose=verbose)
    yield from software_lines(metadata, verbose=verbose)
    yield f"{INDENT}{_method(metadata)}"
    ways = way_names(metadata)
    if ways:
        how = f"every size in {len(ways)} variants, one after the other"
        if "turns" in metadata.options:
            how, ways = f"{len(ways) - 1} variants, each in two separate jobs that run in alternating order", ways[:-1]
        yield f"{INDENT}{how}: {', '.join(ways)}"
    yield from _clock_lines(metadata)
    yield f"{INDENT}size: larger buffer of a rank; K, M, G are 1024-based; GB/s is 1e9 bytes/s"
    for line in describe_dropped(metadata.dropped_sizes):
        yield f"{INDENT}not measured: {line}"


def _clock_lines(metadata: Metadata) -> Iterator[str]:
    """Yield which backends are timed by the GPU and which by the host, unless the host times all of them."""
    if metadata.options.get("clock") != operation.GATE:
        return
    names = [str(metadata.backend), *other_backends(metadata)]
    timed_by_gpu = operation.gated_backends(names)
    how = "timed by the GPU, starting when a gate releases the queued operations"
    yield f"{INDENT}{' and '.join(timed_by_gpu)}: {how}"
    timed_by_host = [name for name in names if name not in timed_by_gpu]
    if timed_by_host:
        yield f"{INDENT}{' and '.join(timed_by_host)}: timed by the host, which waits for every operation"


def _method(metadata: Metadata) -> str:
    options = metadata.options
    graph = f" in a CUDA graph, replayed {options['graph']} times" if options["graph"] else ""
    root = f", root {options['root']}" if options["root"] is not None else ""
    types = ", ".join((*options["dtypes"], *options["ops"]))
    if "skew" in options:
        types += f", alltoallv: the last rank receives {options['skew']:.0%} less than rank 0"
    single = "; p50 to p99 of single operations on the slowest rank" if options.get("percentiles") else ""
    if metadata.backend == "simulated":
        return f"{types}{root}; one time per row, with noise from seed {options['seed']}; mean over ranks{single}"
    check = "data verified on every rank" if options["check"] else "data not verified"
    warmup = f"{options['warmup']} warm-up, then " if options["warmup"] else ""
    if options["allocator"] == "nccl":
        types += ", ncclMemAlloc buffers"
    return f"{types}{root}; {warmup}{_loop(options)}{graph}; mean over ranks{single}; {check}"


def _counted(options: Mapping[str, Any]) -> str:
    return "operations" if options.get("mode") == Mode.LATENCY else "iterations"


def _loop(options: Mapping[str, Any]) -> str:
    single = ", one at a time" if options.get("mode") == Mode.LATENCY else ""
    if "budget_s" in options:
        return (
            f"{_counted(options)}{single} until ±{INTERVAL:.0%} (95 % confidence) or {options['budget_s']:g} s per row"
        )
    if options["iters"] is None:
        return "unknown number of iterations"
    refused = "graphs" if options["graph"] else "groups" if options.get("split") else ""
    is_fallback = refused and not single and options["iters"] == DEFAULT_ITERATIONS[Mode.THROUGHPUT]
    no_auto = f" (--iters {AUTO} is not for {refused})" if is_fallback else ""
    return f"{options['iters']} {_counted(options)}{single}{no_auto}"


def ranks_on_hosts(metadata: Metadata) -> str:
    return f"{plural(len(metadata.ranks), 'rank')} on {plural(len(metadata.hosts), 'host')}"


def rank_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """List the ranks of each host and the ranks that share a GPU. With many hosts, equal hosts share a line."""
    ranks = metadata.ranks
    hosts = [list(members) for _, members in groupby(ranks, key=lambda rank: rank.host)]
    if len(hosts) > (_MOST_LINES_IN_FULL if verbose else _MOST_LINES):
        for gpus, alike in group_by(hosts, _gpus).items():
            names = compress_names([members[0].host for members in alike])
            numbers = format_ranges([rank.rank for members in alike for rank in members])
            where = f"rank {numbers} on {plural(len(alike), 'host')}: {names}"
            yield f"{INDENT}{where}" + (f": {gpus}" if gpus else "")
    else:
        for members in hosts:
            yield from _lines_of_host(members, verbose=verbose and len(ranks) <= _MOST_LINES_IN_FULL)
    yield from _sharing_lines(ranks)


def _lines_of_host(ranks: Sequence[RankIdentity], *, verbose: bool) -> Iterator[str]:
    gpus = _gpus(ranks)
    if verbose and gpus:
        for rank in ranks:
            yield f"{INDENT}rank {rank.rank} on {rank.host}: GPU {rank.gpu_index} {rank.gpu_bus_id} {rank.gpu}"
        return
    indices = sorted({rank.gpu_index for rank in ranks if rank.gpu_index is not None})
    numbers = f"GPU {format_ranges(indices)}, " if indices else ""
    where = f"rank {format_ranges([rank.rank for rank in ranks])} on {ranks[0].host}"
    yield f"{INDENT}{where}" + (f": {numbers}{gpus}" if gpus else "")


def _gpus(ranks: Sequence[RankIdentity]) -> str:
    return ", ".join(dict.fromkeys(rank.gpu for rank in ranks if rank.gpu))


def _sharing_lines(ranks: Sequence[RankIdentity]) -> Iterator[str]:
    """Yield lines such as '4 ranks share GPU 0 (MPS, 25 % of its SMs each)'. Equally shared GPUs have one line."""
    shared: dict[str, list[RankIdentity]] = {}
    for members in group_by_device(ranks):
        if len(members) > 1:
            percents = sorted({rank.sm_percent for rank in members if rank.sm_percent is not None})
            shares = " or ".join(f"{percent:g} %" for percent in percents)
            how = f"MPS, {shares} of its SMs each" if percents else "taking turns"
            shared.setdefault(f"{len(members)} ranks share {{}} ({how})", []).append(members[0])
    for text, firsts in shared.items():
        names = f"GPU {format_ranges(sorted({rank.gpu_index or 0 for rank in firsts}))}"
        yield INDENT + text.format(names if len(firsts) == 1 else f"each of {names}")


def _crossings(rows: Sequence[WinnerRow]) -> str:
    """Return the fastest setting by size, for example 'ring/ll up to 2M, ring/simple from 4M on'."""
    if all(row.beyond_noise is None for row in rows):
        return "not known"
    (_, name), *further = crossings(rows)
    if not further:
        return f"none: nothing is faster than {name} beyond noise"
    before = max(row.size_bytes for row in rows if row.size_bytes < further[0][0])
    later = (f"{name} from {format_size(size)}" for size, name in further)
    return f"{name} up to {format_size(before)}, {', '.join(later)} on"


def _legend_of_ways(rows: Sequence[WinnerRow]) -> str:
    if all(row.beyond_noise is None for row in rows):
        return "noise unknown: too few sizes. Try: more sizes, or --iters auto"
    beyond = [row for row in rows if row.beyond_noise]
    if not beyond:
        return "own choice        nothing is faster beyond the noise"
    worst = max(beyond, key=lambda row: row.loss_percent)
    where = f"{format_size(worst.size_bytes)} {worst.placement.replace('_', ' ')}"
    most = f"loses {worst.loss_percent:.1f}% at most, at {where}, compared with {worst.fastest}"
    return f"own choice        {most} (* beyond the noise)"


def _refused(row: RefusedRow) -> str:
    where = "" if row.size_bytes is None else f" from {format_size(row.size_bytes)}"
    what = " ".join(filter(None, (row.dtype, row.op)))
    name = (
        row.setting
        if settings.NcclSetting.parse(row.setting) != settings.NcclSetting()
        else f"{row.backend} {row.setting}"
    )
    name = row.backend if row.setting == row.backend else name
    return f"{name}{f', {what}' if what else ''}{where}: {row.reason}"


def _backend_columns(rows: Sequence[BackendRow]) -> list[Column]:
    """Return the columns of a table with one line per size and one column per backend."""

    def speed(name: str) -> Column:
        return Column(name, lambda by: _share_of_first(by[name].speed_percent) if name in by else "-", right=True)

    def issued(name: str) -> Column:
        return Column(name, lambda by: figure(by[name].issue_us) if name in by else "-", 1, right=True)

    def first(by: Mapping[str, BackendRow]) -> BackendRow:
        return next(iter(by.values()))

    name = rows[0].first
    columns = [
        Column("size", lambda by: format_size(first(by).size_bytes), right=True),
        Column(f"{name} µs", lambda by: figure(first(by).first_time_us), right=True),
        *map(speed, dict.fromkeys(row.backend for row in rows)),
    ]
    known = dict.fromkeys(row.backend for row in rows if row.issue_us is not None)
    if known:
        columns.append(Column("issued in µs:", lambda _: "", 1))
        columns.append(Column(name, lambda by: figure(first(by).first_issue_us), 1, right=True))
        columns += map(issued, known)
    return columns


def _outcome_column(size: int) -> Column:
    return Column(format_size(size), lambda trials: next((row.outcome for row in trials if row.size_bytes == size), ""))


def _error_text(rows: Sequence[MpiTrialRow]) -> str:
    return next((row.said for row in rows if row.outcome != TrialOutcome.RIGHT and row.said), "")


def _seconds(rows: Sequence[MpiTrialRow]) -> str:
    known = [row.seconds for row in rows if row.seconds is not None]
    return f"{max(known):.1f}" if known else "-"


def _share_of_first(percent: float) -> str:
    if percent >= 1000:
        return f"{percent / 100:.3g} ×"
    return f"{percent:.1f}" if percent >= 10 else f"{percent:.2g}"


def _taken(row: CollectiveRow) -> str:
    """Return the algorithm and protocol that NCCL used: '?' if NCCL did not log them, '-' for other libraries."""
    name = settings.format_choice(row.algorithm, row.protocol) or (
        "?" if row.backend in (NCCL, operation.TORCH_NCCL) else "-"
    )
    return name if len(name) < _TAKEN.width else name.partition("/")[0]


def _footer_lines(rows: Sequence[CollectiveRow], why_not_judged: str = "") -> Iterator[str]:
    """Yield the peak busbw, the busbw at the largest size and the time at the smallest size of the first backend.

    If the run varies the number of ranks, only the most ranks count.

    In latency mode, yield percentiles instead. `why_not_judged` is the reason why these ranks have no expected values,
    or ''.
    """
    if not rows:
        yield "no row was measured"
        return
    every, first = rows, rows[0]
    where = _place_namer(rows)
    rows = [row for row in rows if row.backend == first.backend and (row.group or row.ranks == first.ranks)]
    smallest = min(rows, key=lambda row: (row.size_bytes, row.time_us))
    if rows[0].mode == Mode.LATENCY:
        largest = max(rows, key=lambda row: (row.size_bytes, -row.time_us))
        for name, row in (("smallest", smallest), ("largest", largest)):
            times = f"{_time(row.p50_us)} (p50), {_time(row.p99_us)} (p99)"
            if row.p50_us is None:
                times = f"{_time(row.time_us)} (mean)"
            yield f"at the {name:<8}   {times} at {where(row)}"
    else:
        largest = max(rows, key=lambda row: (row.size_bytes, row.reached_gb_s))
        peak = max(rows, key=lambda row: row.reached_gb_s)
        if peak.busbw_gb_s is not None:
            shares = _expected_share(peak)
            if peak.limit_gb_s is not None:
                nvls = " with NVLS" if NVLS_LIMIT in (peak.note or "") else ""
                shares += f", {peak.limit_percent:.0f}% of the limit of {peak.limit_gb_s:g}{nvls}"
            yield f"peak busbw        {_bandwidth(peak)} at {where(peak)}{shares}"
            yield f"at the largest    {_bandwidth(largest)} busbw at {where(largest)}"
        yield f"at the smallest   {_time(smallest.time_us)} at {where(smallest)}"
    yield from _slowest_group([row for row in rows if row.size_bytes == largest.size_bytes])
    yield _expected_line(every, why_not_judged)
    yield from _slow_lines(every)
    checked = [row.wrong for row in every if row.wrong is not None]
    yield f"wrong elements    {f'{sum(checked):,}' if checked else 'not checked'}"


def _bandwidth(row: CollectiveRow) -> str:
    """Format the busbw with as many digits as in the table. Below 1 GB/s, use MB/s or kB/s."""
    return f"{figure(row.busbw_gb_s)} GB/s" if row.reached_gb_s >= 1 else format_bandwidth(row.reached_gb_s)


def _time(microseconds: float | None) -> str:
    """Format the time with as many digits as in the table. From 1 ms on, use ms or s."""
    is_short = microseconds is None or microseconds < _FIRST_MILLISECOND_US
    return f"{figure(microseconds)} µs" if is_short else format_time(microseconds or 0.0)


def _slowest_group(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """Yield the slowest group of ranks at one size, and by how much it exceeds the median of all groups."""
    kind = attrgetter("dtype", "op", "placement")
    alike = [row for row in rows if kind(row) == kind(rows[0])]
    if len({row.group for row in alike}) > 1:
        slowest, middle = max(alike, key=lambda row: row.time_us), median(row.time_us for row in alike)
        over = slowest.time_us / middle - 1
        yield f"slowest group     {slowest.group}: {_time(slowest.time_us)}, {over:.1%} over the median of groups"


def _expected_line(rows: Sequence[CollectiveRow], why_not_judged: str) -> str:
    """Return the line with the source of the expected values, or the reason why speed was not judged."""
    sources = dict.fromkeys(row.expected_source for row in rows if row.expected_source)
    legend = "; lim: % of the limit" if any(map(_limited, rows)) else ""
    why = why_not_judged or next(filter(None, (parse_doubt(row.note) for row in rows)), "")
    unknown = f"speed not judged: {why}" if why else "unknown, so speed is not judged"
    judged = [row.size_bytes for row in rows if row.expected_source]
    others = [row.size_bytes for row in rows if not row.expected_source]
    extent = ""
    if judged and others:
        extent = f"; speed judged for {len(judged)} of {len(rows)} rows"
        if max(others) < min(judged):
            extent = f"; speed judged from {format_size(min(judged))}"
    return f"expected          {'; '.join(sources) or unknown}{extent}{legend}"


def _slow_lines(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    marked = [row for row in rows if _mark(row)]
    if not marked:
        return
    verdicts = Counter(Verdict(row.verdict) for row in marked if row.verdict)
    counts = ", ".join(
        f"{verdicts[verdict]} {verdict} ({mark})" for verdict, mark in VERDICT_MARKS.items() if verdict in verdicts
    )
    known = [row for row in marked if row.expected_percent is not None]
    worst = min(known, key=lambda row: row.expected_percent or 0.0, default=None)
    slowest = "" if worst is None else f"; the slowest at {_place_namer(rows)(worst)}{_expected_share(worst)}"
    yield f"marked rows       {counts}{slowest}"


def _mark(row: CollectiveRow) -> str:
    """Return the mark of a slow row, or '' if it has wrong elements, because these have their own column."""
    return "" if row.wrong else verdict_mark(row.verdict)


def _limited(row: CollectiveRow) -> bool:
    known = row.expected_percent is None and row.limit_percent is not None
    return known and row.size_bytes >= _LIMITED_FROM_BYTES


def _share(row: CollectiveRow) -> str:
    """Return the percentage of the expected bandwidth, such as '98', or else of the limit, such as '76 lim'."""
    if _limited(row):
        return f"{format_share(row.limit_percent)}{_mark(row) or ' '}lim"
    return format_share(row.expected_percent) + _mark(row)


def _expected_share(row: CollectiveRow) -> str:
    return "" if row.expected_percent is None else f", {format_share(row.expected_percent)}% of expected"


def _place_namer(rows: Sequence[CollectiveRow]) -> Callable[[CollectiveRow], str]:
    """Return a function that describes one of the rows, with its number of ranks if the run varies it."""
    varies = len({row.ranks for row in rows if not row.group}) > 1

    def describe(row: CollectiveRow) -> str:
        words = [format_size(row.size_bytes), row.dtype, Placement(row.placement).replace("_", " ")]
        ranks = plural(row.ranks, "rank") if varies else ""
        return ", ".join(filter(None, (*words, row.setting, row.group, ranks)))

    return describe


def _percent(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
