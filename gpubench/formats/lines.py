"""Parts of pages for people: columns, matrices, curves in a terminal, and the headers of tables.

Marks differ in shape, not in colour, and nothing is drawn between them: that was not measured.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubench.model.facts.environment import bearing_on_performance
from gpubench.model.results.backends import RefusedRow, WinnerRow, crossings
from gpubench.model.results.compare import OPEN_ENDED, Chart, Points
from gpubench.model.results.report import BACKENDS, Metadata, Report
from gpubench.model.terms import units
from gpubench.model.terms.operation import GATE, KERNELS, gated
from gpubench.model.terms.ranks import RankIdentity, by_device, hosts_of_nccl
from gpubench.model.terms.settings import AGAIN, HIERARCHICAL, OWN_CHOICE, NcclSetting, taken_name
from gpubench.model.terms.statistics import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode
from gpubench.model.terms.verdict import Origin, Verdict
from gpubench.records import dataclass

if TYPE_CHECKING:
    from rich.text import Text


def figure(value: float | None) -> str:
    """A measured time or bandwidth: four or five significant digits in at most nine characters, '-' if unknown."""
    if value is None:
        return "-"
    if value >= 100_000:
        return f"{value:.0f}"
    if value >= 1_000:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def heading(metadata: Metadata, *words: str) -> str:
    """The first line of a page, with the origin in capitals unless it was measured."""
    origin = "" if metadata.origin == Origin.MEASURED else f"({metadata.origin.upper()})"
    return "  ".join(filter(None, (f"gpubench {metadata.gpubench_version}", *words, origin)))


def or_dash(value: float | None, form: str) -> str:
    """A number in a form, '.4g', and '-' for an unknown one."""
    return "-" if value is None else format(value, form)


def line_text(line: str, style: str = "") -> "Text":
    """A line as rich prints it; whatever others wrote into it, it is one line and only shows something."""
    from rich.text import Text

    return Text(units.printable_line(line), style=style)


_GAP = "  "

VERDICT_MARKS = {Verdict.FAIL: "!", Verdict.WARN: "*", Verdict.INCONCLUSIVE: "~"}
"""Behind a figure that is not as it should be, so that it is seen without colours too."""


def verdict_mark(verdict: str | None) -> str:
    """The mark of a verdict; none where nothing is wrong, or nothing was judged."""
    return VERDICT_MARKS.get(Verdict(verdict), "") if verdict else ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, a cell a line, and when it goes: the highest `spare` first, 0 never.

    Cells are as they are shown: escapes take more room than the characters that they stand for.
    """

    head: str
    cells: Sequence[str]
    spare: int = 0
    right: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(map(units.printable_line, self.cells)))

    @property
    def width(self) -> int:
        """Of its widest cell."""
        return max(map(len, (self.head, *self.cells)))


class Figure(NamedTuple):
    """A column of rows that the terminal prints one by one, so that its width is fixed; pages have it too.

    `on_page` is a longer head for pages. A `width` of 0 is for columns of pages alone; the highest `spare` goes first
    from a narrow terminal, 0 never. It is shown in runs for which `when` is true.
    """

    head: str
    text: Callable[[Any], str]
    width: int = 0
    spare: int = 0
    on_page: str = ""
    when: Callable[[Metadata], bool] = lambda _metadata: True


def width_of(figures: Sequence[Figure]) -> int:
    """The columns of a terminal that a line of these takes."""
    return sum(each.width for each in figures)


def fitting_figures(
    figures: Sequence[Figure], width: int, needed: Callable[[Sequence[Figure]], int] = width_of
) -> list[Figure]:
    """The figures that a width has room for; those that are equally spare go together."""
    kept = [each for each in figures if each.width]
    while needed(kept) > width and (most := max((each.spare for each in kept), default=0)):
        kept = [each for each in kept if each.spare != most]
    return kept


def page_columns(figures: Sequence[Figure], rows: Sequence[Any]) -> list[Column]:
    """The figures as columns of a page, which has room for all."""
    return [Column(each.on_page or each.head, [each.text(row) for row in rows]) for each in figures]


def note_columns(rows: Sequence[Any], spare: int = 0) -> list[Column]:
    """A column of notes, where rows have any."""
    notes = [row.note or "" for row in rows]
    return [Column("note", notes, spare)] if any(notes) else []


def fitting(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """The columns that fit a width; what may not go stays, however narrow it is."""
    kept = list(columns)
    while _width(kept) > width:
        spare = max(kept, key=lambda column: column.spare)
        if not spare.spare:
            break
        kept.remove(spare)
    return tuple(kept)


def fitted_lines(columns: Sequence[Column], width: int, keys: int = 1) -> Iterator[str]:
    """The lines of a table that fits a width: columns that can be spared go, and of the others a further table below
    has those that have no room. The first `keys` columns, which say what a line is of, stand in each.
    """
    kept = fitting(columns, width)
    names, rest = kept[:keys], kept[keys:]
    while rest:
        most = len(rest)
        while most > 1 and _width((*names, *rest[:most])) > width:
            most -= 1
        yield from lines((*names, *rest[:most]))
        rest = rest[most:]
        if rest:
            yield ""
    if len(kept) <= keys:
        yield from lines(kept)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + len(_GAP) for column in columns) - len(_GAP)


def lines(columns: Sequence[Column]) -> Iterator[str]:
    """The head, then line by line."""
    for cells in zip(*((column.head, *column.cells) for column in columns), strict=True):
        yield _GAP.join(
            cell.rjust(column.width) if column.right else cell.ljust(column.width)
            for cell, column in zip(cells, columns, strict=True)
        ).rstrip()


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """A sentence broken at a width, its further lines indented; an empty one is an empty line."""
    return textwrap.wrap(units.printable_line(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def described_lines(columns: Sequence[Column], head: str, texts: Sequence[str], width: int) -> Iterator[str]:
    """The lines of a table whose last column is a sentence for each line, wrapped in the width that is left."""
    begin = _width(columns) + len(_GAP)
    for line, text in zip(lines(columns), (head, *texts), strict=True):
        first, *more = wrapped(text, max(20, width - begin))
        yield line.ljust(begin) + first
        yield from (" " * begin + each for each in more)


_GAP_OF_MATRICES = 2


def matrix_lines(
    title: str, cells: Mapping[str, Mapping[str, str]], rows: Sequence[str], columns: Sequence[str], width: int
) -> Iterator[str]:
    """A matrix with its title in the corner, in as many blocks of columns as the width asks for."""
    lead = max(map(len, (title, *rows)))
    cell = max(map(len, (*columns, *(cells[row].get(column, "X") for row in rows for column in columns))))
    per_block = max(1, (width - lead) // (cell + _GAP_OF_MATRICES))
    for start in range(0, len(columns), per_block):
        block = columns[start : start + per_block]
        yield title.ljust(lead) + "".join(column.rjust(cell + _GAP_OF_MATRICES) for column in block)
        for row in rows:
            words = (cells[row].get(column, "X") for column in block)
            yield row.ljust(lead) + "".join(cell_text.rjust(cell + _GAP_OF_MATRICES) for cell_text in words)


_HEIGHT = 15
_LABEL = 9
_NARROWEST = 16
_MARKS = "ox+#"
_LIMIT, _EXPECTED, _SEVERAL = "-", ".", "@"


def plot_lines(chart: Chart, width: int) -> Iterator[str]:
    """The chart, its marks, and a value axis from 0; as wide as asked for, if that is wide enough for a picture."""
    columns = max(width - _LABEL - 3, _NARROWEST)
    highest = chart.highest or 1.0
    sizes = sorted({size for line in chart.lines for size, _ in line.points})
    canvas = _Canvas(columns, sizes, highest)
    canvas.across(chart.limit, _LIMIT)
    canvas.across(chart.expected, _EXPECTED)
    for line, mark in zip(chart.lines, _MARKS, strict=False):
        canvas.marks(line.points, mark)
    yield from textwrap.wrap(f"{chart.title}, {chart.unit}", width)
    for number, cells in enumerate(canvas.rows):
        value = highest * (_HEIGHT - 1 - number) / (_HEIGHT - 1)
        label = f"{value:.4g}" if number % 2 == 0 else ""
        yield f"{label:>{_LABEL}} │{''.join(cells)}".rstrip()
    yield f"{'':>{_LABEL}} └{'─' * columns}"
    yield f"{'':>{_LABEL}}  {_size_labels(sizes, canvas)}".rstrip()
    for words in _legend(chart):
        indent = f"{'':>{_LABEL}}  "
        yield from textwrap.wrap(
            words, max(width, _NARROWEST + len(indent)), initial_indent=indent, subsequent_indent=indent
        )


class _Canvas:
    def __init__(self, columns: int, sizes: Sequence[int], highest: float) -> None:
        self.columns = columns
        self.rows = [[" "] * columns for _ in range(_HEIGHT)]
        self._first = math.log2(max(sizes[0], 1))
        self._span = math.log2(max(sizes[-1], 1)) - self._first or 1.0
        self._highest = highest

    def column(self, size: int) -> int:
        """The column of a size: each doubling is as far from the next."""
        return round((math.log2(max(size, 1)) - self._first) / self._span * (self.columns - 1))

    def marks(self, points: Points, mark: str) -> None:
        """A mark a point; where two lines meet, one that says so."""
        for size, value in points:
            row, column = self._row(value), self.column(size)
            self.rows[row][column] = _SEVERAL if self.rows[row][column] in _MARKS.replace(mark, "") else mark

    def across(self, points: Points, mark: str) -> None:
        for number, (size, value) in enumerate(points):
            following = self.column(points[number + 1][0]) if number + 1 < len(points) else self.columns
            for column in range(self.column(size), following):
                self.rows[self._row(value)][column] = mark

    def _row(self, value: float) -> int:
        return _HEIGHT - 1 - round(max(value, 0.0) / self._highest * (_HEIGHT - 1))


def _size_labels(sizes: Sequence[int], canvas: _Canvas) -> str:
    """Sizes below their columns, as many as have room."""
    cells = [" "] * canvas.columns
    free = 0
    for size in sizes:
        text = units.format_size(size)
        start = min(canvas.column(size), canvas.columns - len(text))
        if start >= free:
            cells[start : start + len(text)] = text
            free = start + len(text) + 2
    return "".join(cells)


def _legend(chart: Chart) -> Iterator[str]:
    words = [f"{mark} {line.name}" for line, mark in zip(chart.lines, _MARKS, strict=False)]
    if len(chart.lines) > 1:
        words.append(f"{_SEVERAL} several")
    if chart.limit:
        words.append(f"{_LIMIT} limit")
    if chart.expected:
        words.append(f"{_EXPECTED} expected")
    if chart.is_open_ended:
        words.append(OPEN_ENDED)
    yield from words


_BEYOND_NOISE = "*"


def way_name(backend: str, setting: str | None, *, several: bool) -> str:
    """The size and setting of a line; with several backends, the backend too."""
    if not several:
        return setting or OWN_CHOICE
    return " ".join(filter(None, (backend, setting)))


def way_names(metadata: Metadata) -> list[str]:
    """The names of all ways of a sweep; none where there is only one."""
    names = list(metadata.options.get("settings") or ())
    if not names:
        return []
    beside, backend = backends_beside(metadata), str(metadata.backend)
    own = [name for name in (None, *names, AGAIN) if name not in beside]
    ways = [way_name(backend, name, several=bool(beside)) for name in own]
    for other in beside:
        more = (*KERNELS.get(other, ()), *((HIERARCHICAL,) if HIERARCHICAL in names else ()))
        ways += [other, *(f"{other} {each}" for each in more)]
    return ways


def backends_beside(metadata: Metadata) -> list[str]:
    """The backends that were measured beside the first."""
    return [each for each in metadata.options.get("settings") or () if each in BACKENDS and each != metadata.backend]


_BOTH = 2


def winner_lines(report: Report, width: int) -> Iterator[str]:
    """Tables by type, reduction and placement, each with its cross-overs; then what could not run."""
    best = report.rows(WinnerRow)
    if all(row.setting is None and row.candidates <= _BOTH for row in best):
        best = []  # two backends have a table of their own, by size
    for _, series in groupby(best, key=lambda row: (row.dtype, row.op, row.placement)):
        yield from ("", *_series(list(series), width))
    if best:
        yield from ("", _legend_of_ways(best))
        remarks = dict.fromkeys(remark for row in best for remark in NcclSetting.of(row.setting).remarks)
        yield from (f"mind              {remark}" for remark in remarks)
    yield from map(_refused, report.rows(RefusedRow))


def _series(rows: Sequence[WinnerRow], width: int) -> Iterator[str]:
    first = rows[0]
    what = ", ".join(filter(None, (first.dtype, first.op, first.placement.replace("_", " "))))
    yield f"fastest by size, {what}"
    yield from fitted_lines(winner_columns(rows), width)
    yield f"cross-over  {_crossings(rows)}"


def winner_columns(rows: Sequence[WinnerRow]) -> list[Column]:
    """The fastest way by size, beside the own choice."""
    return [
        Column("size", [units.format_size(row.size_bytes) for row in rows], right=True),
        Column("fastest", [row.fastest for row in rows]),
        Column("time µs", [figure(row.time_us) for row in rows], right=True),
        Column("own choice", [(taken_name(row.own_algorithm, row.own_protocol) or row.own_backend) for row in rows]),
        Column("time µs", [figure(row.own_time_us) for row in rows], right=True),
        Column("loses", [_loss(row) for row in rows], right=True),
        Column("noise", [units.format_percent(row.noise_percent, "?", 1) for row in rows], spare=1, right=True),
        Column("drift", [units.format_percent(row.own_drift_percent, "?", 1) for row in rows], spare=2, right=True),
    ]


def _crossings(rows: Sequence[WinnerRow]) -> str:
    """'ring/ll up to 2M, ring/simple from 4M on'."""
    (_, name), *further = crossings(rows)
    if not further:
        return f"none: {name} at all sizes, or no slower than noise"
    before = max(row.size_bytes for row in rows if row.size_bytes < further[0][0])
    return (
        ", ".join(
            (
                f"{name} up to {units.format_size(before)}",
                *(f"{each} from {units.format_size(size)}" for size, each in further),
            )
        )
        + " on"
    )


def _loss(row: WinnerRow) -> str:
    mark = _BEYOND_NOISE if row.beyond_noise else " "
    return f"{row.loss_percent:.1f}%{mark}"


def _legend_of_ways(rows: Sequence[WinnerRow]) -> str:
    worst = max(rows, key=lambda row: row.loss_percent if row.beyond_noise else float("-inf"))
    if all(row.beyond_noise is None for row in rows):
        return "noise unknown: sizes were too few; more of them, or --iters auto, tell"
    if not worst.beyond_noise:
        return "own choice        nothing is faster beyond the noise"
    where = f"{units.format_size(worst.size_bytes)} {worst.placement.replace('_', ' ')}"
    return (
        f"own choice        loses {worst.loss_percent:.1f}% at most, at {where} to {worst.fastest} (* beyond the noise)"
    )


def _refused(row: RefusedRow) -> str:
    where = "" if row.size_bytes is None else f" from {units.format_size(row.size_bytes)}"
    what = " ".join(filter(None, (row.dtype, row.op)))
    name = row.setting if NcclSetting.of(row.setting) != NcclSetting() else f"{row.backend} {row.setting}"
    name = row.backend if row.setting == row.backend else name
    return f"could not run     {name}{f', {what}' if what else ''}{where}: {row.reason}"


INDENT = "  "
_MOST_LINES = 2
_MOST_LINES_IN_FULL = 16
_MOST_KINDS = 4
_BEARING = "! affects performance"


def software_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """Libraries and settings: in a line each where all is asked for, else versions, and settings that bear on speed."""
    if verbose:
        yield from (f"{INDENT}{name} {text}" for name, text in metadata.libraries.items())
    elif metadata.libraries:
        yield INDENT + "; ".join(f"{name} {text.partition(' from ')[0]}" for name, text in metadata.libraries.items())
    yield from setting_lines(metadata.environment, verbose=verbose)
    if verbose:
        yield from default_lines(metadata)


def default_lines(metadata: Metadata) -> Iterator[str]:
    """Options that have their value from the environment or a file, and the file that was read."""
    if metadata.defaults_file is not None:
        yield f"{INDENT}options from {metadata.defaults_file} of this folder"
    for option, source in metadata.defaults.items():
        yield f"{INDENT}{option} by {source}"


def setting_lines(environment: Mapping[str, str], *, verbose: bool) -> Iterator[str]:
    """Variables of the environment; those that bear on performance are marked, and of others there is a number."""
    bearing = bearing_on_performance(environment)
    if verbose:
        for name, value in environment.items():
            yield f"{INDENT}{name}={value}" + (f"  {_BEARING}" if name in bearing else "")
        return
    if bearing:
        yield f"{INDENT}{_BEARING}: " + ", ".join(f"{name}={value}" for name, value in bearing.items())
    if others := len(environment) - len(bearing):
        yield f"{INDENT}{units.counted(others, 'other setting')}: -v shows all"


def device_lines(devices: Mapping[str, str], label: str, *, verbose: bool) -> Iterator[str]:
    """Devices by name, 'GPU0': '0000:06:00.0 NVIDIA H200'; in a line each, else those of one model in one line."""
    if verbose:
        yield from (f"{INDENT}{label}{name} {text}" for name, text in devices.items())
        return
    alike = units.grouped(
        devices, lambda name: " ".join(word for word in devices[name].split(" ") if word.count(":") < 2)
    )
    mark = "" if label else ":"  # of a rank 'on node0: NVIDIA H200' follows
    for model, names in list(alike.items())[:_MOST_KINDS]:
        yield f"{INDENT}{label}{units.compress_names(names)}{mark} {model}"
    if len(alike) > _MOST_KINDS:
        yield f"{INDENT}and {len(alike) - _MOST_KINDS} more kinds: -v shows all"


def collective_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """The header of a collective: the machine, the libraries, and how to read the figures."""
    beside = "".join(f" and {each}" for each in backends_beside(metadata))
    ranks, hosts = units.counted(len(metadata.ranks), "rank"), units.counted(len(metadata.hosts), "host")
    job = f"{ranks} on {hosts}{_hosts_of_nccl(metadata)}"
    yield heading(metadata, str(metadata.collective), f"backend {metadata.backend}{beside}", job)
    if metadata.backend == "host" or (
        metadata.backend == "torch:gloo" and not any(each.gpu for each in metadata.ranks)
    ):
        what = "MPI" if metadata.backend == "host" else "Gloo"
        yield f"{INDENT}{what} on CPU buffers: says nothing about GPUs or their links"
    if metadata.backend == "simulated" and metadata.profile:
        yield f"{INDENT}a model from profile {metadata.profile['name']}: nothing was measured"
        yield f"{INDENT}{metadata.source}"
    if "read_from" in metadata.options:
        yield f"{INDENT}measured by another program, read from {metadata.options['read_from']}"
    yield from rank_lines(metadata.ranks, verbose=verbose)
    yield from sharing_lines(metadata.ranks)
    yield from software_lines(metadata, verbose=verbose)
    yield f"{INDENT}{_method(metadata)}"
    ways = way_names(metadata)
    if ways:
        how = f"every size in {len(ways)} ways, one after the other"
        if "turns" in metadata.options:
            how, ways = f"{len(ways) - 1} ways, each in two jobs of its own that take turns there and back", ways[:-1]
        yield f"{INDENT}{how}: {', '.join(ways)}"
    yield from _clock_lines(metadata)
    yield f"{INDENT}size: larger buffer of a rank; K, M, G are 1024-based; GB/s is 1e9 bytes/s"
    for line in units.describe_dropped(metadata.dropped_sizes):
        yield f"{INDENT}not measured: {line}"


def _clock_lines(metadata: Metadata) -> Iterator[str]:
    """By which clock each backend is timed, where it is not the host's of all."""
    if metadata.options.get("clock") != GATE:
        return
    names = [str(metadata.backend), *backends_beside(metadata)]
    by_gpu = gated(names)
    yield f"{INDENT}{' and '.join(by_gpu)}: timed by the GPU, from a gate that opens once operations wait behind it"
    by_host = [name for name in names if name not in by_gpu]
    if by_host:
        yield f"{INDENT}{' and '.join(by_host)}: timed by the host, which waits for every operation"


def _method(metadata: Metadata) -> str:
    options = metadata.options
    graph = f" in a CUDA graph, replayed {options['graph']} times," if options["graph"] else ""
    root = f", root {options['root']}" if options["root"] is not None else ""
    types = ", ".join((*options["dtypes"], *options["ops"]))
    if "skew" in options:
        types += f", alltoallv: the last rank receives {options['skew']:.0%} less than rank 0"
    check = "every rank's data verified" if options["check"] else "data not verified"
    if metadata.backend == "simulated":
        return f"{types}{root}; one time a row, with noise from seed {options['seed']}; mean over ranks"
    warmup = "" if options["warmup"] is None else f" after {options['warmup']} to warm up"
    loop = f"{_loop(options)}{graph}{warmup}"
    if options["allocator"] == "nccl":
        types += ", ncclMemAlloc buffers"
    return f"{types}{root}; {loop}; mean over ranks; {check}"


def _loop(options: Mapping[str, Any]) -> str:
    is_latency = options.get("mode") == Mode.LATENCY
    if "budget_s" in options:
        what = "operations, each alone," if is_latency else "iterations"
        return f"{what} until the mean is within {INTERVAL:.0%} (95 %) or for {options['budget_s']:g} s a row"
    if options["iters"] is None:
        return "how many iterations is not said"
    if is_latency:
        return f"{options['iters']} operations, each alone,"
    return f"{options['iters']} iterations{_why_counted(options)}"


def _why_counted(options: Mapping[str, Any]) -> str:
    """Why there is nccl-tests' number of iterations, where as many as it takes are refused."""
    refused = "graphs" if options["graph"] else "groups" if options.get("split") else ""
    is_fallback = refused and options["iters"] == DEFAULT_ITERATIONS[Mode.THROUGHPUT]
    return f" (--iters {AUTO} is not for {refused})" if is_fallback else ""


def rank_lines(ranks: Sequence[RankIdentity], *, verbose: bool) -> Iterator[str]:
    """A line a host, and one for all with equal GPUs where hosts are many; in full a line a rank, as far as they go."""
    hosts = [list(members) for _, members in groupby(ranks, key=lambda rank: rank.host)]
    if len(hosts) > (_MOST_LINES_IN_FULL if verbose else _MOST_LINES):
        for gpus, alike in units.grouped(hosts, _gpus).items():
            names = units.compress_names([members[0].host for members in alike])
            numbers = units.spans([rank.rank for members in alike for rank in members])
            yield f"{INDENT}rank {numbers} on {units.counted(len(alike), 'host')}: {names}" + (
                f": {gpus}" if gpus else ""
            )
        return
    for members in hosts:
        if not verbose or len(ranks) > _MOST_LINES_IN_FULL or not _gpus(members):
            gpus = _gpus(members)
            numbers = units.spans([rank.rank for rank in members])
            yield f"{INDENT}rank {numbers} on {members[0].host}" + (f": {_indices(members)}{gpus}" if gpus else "")
        else:
            yield from (
                f"{INDENT}rank {each.rank} on {each.host}: GPU {each.gpu_index} {each.gpu_bus_id} {each.gpu}"
                for each in members
            )


def _hosts_of_nccl(metadata: Metadata) -> str:
    """', 2 hosts for NCCL, by NCCL_HOSTID' where NCCL counts other hosts than there are."""
    counted_by_nccl = hosts_of_nccl(metadata.ranks)
    if all(each.nccl_host is None or each.device is None for each in metadata.ranks):
        return ""
    return f", {units.counted(counted_by_nccl, 'host')} for NCCL, by NCCL_HOSTID"


def sharing_lines(ranks: Sequence[RankIdentity]) -> Iterator[str]:
    """Which ranks share a GPU and how: '4 ranks share GPU 0 (MPS, 25 % of its SMs each)'; alike GPUs in one line."""
    shared: dict[str, list[RankIdentity]] = {}
    for each in by_device(ranks):
        if len(each) > 1:
            percents = sorted({rank.sm_percent for rank in each if rank.sm_percent is not None})
            shares = " or ".join(f"{percent:g} %" for percent in percents)
            how = f"MPS, {shares} of its SMs each" if percents else "taking turns"
            shared.setdefault(f"{len(each)} ranks share {{}} ({how})", []).append(each[0])
    for text, firsts in shared.items():
        names = f"GPU {units.spans(sorted({each.gpu_index or 0 for each in firsts}))}"
        yield INDENT + text.format(names if len(firsts) == 1 else f"each of {names}")


def _gpus(ranks: Sequence[RankIdentity]) -> str:
    return ", ".join(dict.fromkeys(rank.gpu for rank in ranks if rank.gpu))


def _indices(ranks: Sequence[RankIdentity]) -> str:
    known = sorted({rank.gpu_index for rank in ranks if rank.gpu_index is not None})
    return f"GPU {units.spans(known)}, " if known else ""
