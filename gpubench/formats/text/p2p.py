"""Copies for people: a matrix for every way of copying, host memory, managed memory, patterns, and what is odd."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from gpubench.formats.lines import (
    INDENT,
    VERDICT_MARKS,
    Column,
    device_lines,
    figure,
    fitted_lines,
    heading,
    lines,
    matrix_lines,
    note_columns,
    or_dash,
    verdict_mark,
)
from gpubench.formats.table import Page
from gpubench.model.results.report import Matrix, Metadata, PairRow, PatternRow, Report, Row
from gpubench.model.terms import units
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.verdict import Verdict

_OF_MANAGED = ("prefetch", "faults", "in place")
_COPY, _KERNEL = "ce", "sm"
_HOST = "host"
_HEADS = {"prefetch": "prefetch", "faults": "page faults", "in place": "in place"}

Ends = tuple[str, str]


def _is_of_managed(row: PairRow) -> bool:
    """True of a row of managed memory, and of a kernel's on pinned memory, which stands beside it."""
    return row.engine in _OF_MANAGED or (row.engine == _KERNEL and _HOST in (row.source, row.destination))


def _managed_lines(plain: Sequence[PairRow], managed: Sequence[PairRow]) -> Iterator[str]:
    """The table, with what each way reaches of the copy engine's copy between the same ends; nothing without rows."""
    if not managed:
        return
    found = {((row.source, row.destination), row.engine): row for row in (*filter(_stands_beside, plain), *managed)}
    ends = list(dict.fromkeys(pair for pair, _ in found))
    yield ""
    size = units.format_size(managed[0].size_bytes or 0)
    yield f"managed memory beside plain memory, {size}, GB/s (of the copy engine's copy)"
    columns = [Column("from", [source for source, _ in ends]), Column("to", [to for _, to in ends])]
    for engine, head in ((_COPY, "copy engine"), (_KERNEL, "kernel"), *_HEADS.items()):
        cells = [_cell(found.get((pair, engine)), found.get((pair, _COPY))) for pair in ends]
        columns.append(Column(head, cells, right=True))
    yield from lines(columns)


def _stands_beside(row: PairRow) -> bool:
    """Not pageable memory, which the driver copies twice."""
    return HostMemory.of_note(row.note) is not HostMemory.PAGEABLE


def _cell(row: PairRow | None, copied: PairRow | None) -> str:
    if row is None or row.bandwidth_gb_s is None:
        return "ERROR" if row is not None and row.verdict == Verdict.ERROR else "-"
    reached = f"{row.bandwidth_gb_s:.1f}{verdict_mark(row.verdict)}"
    if row.engine == _COPY or copied is None or copied.bandwidth_gb_s is None:
        return reached
    return f"{reached} ({units.format_share(units.percent(row.bandwidth_gb_s, copied.bandwidth_gb_s))} %)"


def support_lines(managed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What CUDA says of managed memory, GPUs that are alike in one line."""
    for words, gpus in units.grouped(managed, _support).items():
        yield f"managed memory of {units.compress_names([str(each['device']) for each in gpus])}: {words}"


def _support(gpu: Mapping[str, Any]) -> str:
    if gpu["managed"] is False:
        return "none"
    words = ["prefetch, advice and page faults" if gpu["concurrent"] else "moved whole at every launch of a kernel"]
    if gpu["pageable"] is not None:
        way = "by the host's page tables" if gpu["host_page_tables"] else "HMM"
        words.append(f"kernels read memory of malloc ({way})" if gpu["pageable"] else "no HMM")
    return "; ".join(words)


_LATENCY_BYTES = 16
_TIMED_BELOW_BYTES = 64 * 2**10
"""Smaller copies are shown by what they take: their bandwidth would be a column of zeros."""

_MICROSECONDS = "µs"
_DIRECTIONS = {"write": "written by the source", "read": "read by the destination", "both": "both ways at once, summed"}
_ENGINES = {
    "ce": "copy engine",
    "sm": "kernel",
    "nccl": "NCCL send and receive",
    "prefetch": "managed memory, prefetched",
    "faults": "managed memory, fetched by page faults of a kernel",
    "in place": "managed memory, used where it is by a kernel",
}
_ACCESS = {"on": "peer access on", "off": "peer access off: through host memory"}

_SCOPES = {"ipc": "between processes (CUDA IPC)", "network": "between nodes"}

Key = tuple[str | None, str | None, str | None, int | None]


class P2pView:
    """Prints a matrix as soon as all its pairs are measured; a sweep of a few pairs as lines."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._waiting: list[PairRow] = []
        self._host: list[PairRow] = []
        self._plain: list[PairRow] = []
        self._managed: list[PairRow] = []
        gpus = metadata.options["gpus"]
        page.wrap(heading(metadata, "p2p", _subject(metadata)))
        if metadata.origin == "simulated" and metadata.profile:
            page.wrap(f"{INDENT}a model from profile {metadata.profile['name']}: nothing was measured")
        if metadata.source:
            page.wrap(f"{INDENT}{metadata.source}")
        for line in device_lines(gpus, "rank " if metadata.ranks else "", verbose=page.verbose):
            page.wrap(line)
        if metadata.profile and metadata.origin != "simulated":
            page.wrap(f"{INDENT}profile {metadata.profile['name']}")
        page.software(metadata)
        page.wrap(f"{INDENT}{_method(metadata)}")
        for line in support_lines(metadata.options.get("managed", ())):
            page.wrap(f"{INDENT}{line}")
        if len(gpus) < 2 and not metadata.ranks:
            page.wrap(f"{INDENT}one GPU: copies with host memory only")
        self._names = list(gpus)
        self._pairs = len(metadata.options["pairs"])
        self._beside_managed = metadata.options.get("memory") == "managed"
        self._shows_evidence = metadata.options.get("evidence") == "shown"

    def row(self, row: Row) -> None:
        """Part of a matrix."""
        if not isinstance(row, PairRow):
            raise TypeError(f"p2p has no rows of {type(row).__name__}")
        if _is_of_managed(row):
            self._managed.append(row)
            return
        if _HOST in (row.source, row.destination):
            self._host.append(row)
            return
        self._print_host()
        if self._waiting and self._key(self._waiting[0]) != self._key(row):
            self._print_waiting()
        self._waiting.append(row)

    def end(self, report: Report) -> None:
        """The rest of the rows, then ratios, patterns, findings and the verdict."""
        self._print_host()
        self._print_waiting()
        self._page.table(_managed_lines(self._plain, self._managed))
        ratios = report.sections.get("ratios")
        if isinstance(ratios, Matrix) and ratios.cells and len(ratios.cells) == len(self._names):
            cells = self._blank()
            for source, row in ratios.cells.items():
                cells[source] |= {destination: f"{ratio:.3g}" for destination, ratio in row.items()}
            self._matrix("on / off", "bandwidth with peer access on over that with it off", cells)
        self._patterns(report.rows(PatternRow))
        if self._shows_evidence:
            self._page.evidence(report)
        else:
            self._page.print("")
        self._page.outcome(report)

    def _print_waiting(self) -> None:
        rows, self._waiting = self._waiting, []
        self._plain += rows if self._beside_managed else ()
        if not rows:
            return
        if not self._shows_matrices:
            self._lines(rows)
            return
        latency = _is_timed(rows[0])
        words = self._blank()
        for row in rows:
            words[row.source][row.destination] = _word(row, latency=latency)
        what = _MICROSECONDS if latency else "GB/s"
        self._matrix(what, series_title(rows[0]), words, most_expected(rows))
        for line in (*expected_lines(rows), *limit_lines(rows)):
            self._page.wrap(line)

    @property
    def _shows_matrices(self) -> bool:
        return self._pairs == len(self._names) * (len(self._names) - 1)

    def _key(self, row: PairRow) -> Key:
        """The columns that rows of one block have in common; lines hold all sizes."""
        return row.engine, row.direction, row.peer, row.size_bytes if self._shows_matrices else None

    def _blank(self) -> dict[str, dict[str, str]]:
        """A matrix of pairs that nothing was measured of: a scope holds only those of one node, or only the others."""
        return {source: {each: "-" for each in self._names if each != source} for source in self._names}

    def _matrix(self, corner: str, title: str, words: dict[str, dict[str, str]], expected: float | None = None) -> None:
        self._page.print("")
        self._page.wrap(title)
        lines_of_matrix = list(matrix_lines(corner, words, list(words), self._names, self._page.width))
        self._page.heat(lines_of_matrix, expected=expected, less_is_better=corner == _MICROSECONDS)

    def _lines(self, rows: Sequence[PairRow]) -> None:
        self._page.print("")
        self._page.wrap(copying_way(rows[0]))
        self._page.table(fitted_lines(copy_columns(rows), self._page.width, keys=2))
        for line in expected_lines(rows):
            self._page.wrap(line)

    def _print_host(self) -> None:
        rows, self._host = self._host, []
        self._plain += rows if self._beside_managed else ()
        if not rows:
            return
        self._page.print("")
        self._page.wrap(f"host memory, {units.format_size(rows[0].size_bytes or 0)}, copy engine, GB/s")
        columns = [Column("GPU", self._names)]
        for kind, members in groupby(rows, key=lambda row: ((row.note or "").split(" ")[0], row.source == _HOST)):
            head = f"{'to' if kind[1] else 'from'} GPU, {kind[0]}"
            words = {row.destination if kind[1] else row.source: _word(row, latency=False) for row in members}
            columns.append(Column(head, [words.get(name, "-") for name in self._names], right=True))
        self._page.table(fitted_lines(columns, self._page.width))
        for line in expected_lines(rows):
            self._page.wrap(line)

    def _patterns(self, rows: Sequence[PatternRow]) -> None:
        if not rows:
            return
        self._page.print("")
        self._page.wrap(f"many pairs at once, {units.format_size(rows[0].size_bytes)} each, copy engine, GB/s")
        self._page.table(fitted_lines(_pattern_columns(rows), self._page.width, keys=2))


def _pattern_columns(rows: Sequence[PatternRow]) -> list[Column]:
    return [
        Column("pattern", [row.pattern.replace("_", " ") for row in rows]),
        Column("way", [row.direction for row in rows]),
        Column("pairs", [str(row.pairs) for row in rows], right=True),
        Column("together", [figure(row.total_gb_s) for row in rows], right=True),
        Column("one at a time, summed", [figure(row.parts_gb_s) for row in rows], right=True),
        Column("share", [units.format_percent(row.share_percent, "-") for row in rows], right=True),
        Column("wrong", [or_dash(row.wrong, "d") for row in rows], right=True),
    ]


COLUMNS = {PatternRow: _pattern_columns}


def _subject(metadata: Metadata) -> str:
    """The devices that copy: the GPUs of a host, or the ranks of a job."""
    gpus, hosts = len(metadata.options["gpus"]), len(set(metadata.hosts))
    if not metadata.ranks:
        return f"{units.counted(gpus, 'GPU')} of {metadata.hosts[0]}"
    return f"{units.counted(gpus, 'rank')} on {metadata.hosts[0] if hosts == 1 else units.counted(hosts, 'node')}"


def _method(metadata: Metadata) -> str:
    options = metadata.options
    copies = (
        f"{options['repeats']} copies" if options["repeats"] else f"copies of {options['sample_seconds'] * 1e3:g} ms"
    )
    loop = f"median of {options['samples']} samples, each {copies} after {options['warmup']} to warm up"
    check = "every destination checks what arrived" if options["check"] else "data not checked"
    marks = ", ".join(f"{mark} {verdict}" for verdict, mark in VERDICT_MARKS.items())
    return f"{loop}; {check}; GB/s is 1e9 bytes/s; {marks}"


def series_title(row: PairRow) -> str:
    """The way in which the copies of a matrix are made, in words."""
    size = row.size_bytes or 0
    return f"{'a copy of 16 bytes' if size == _LATENCY_BYTES else units.format_size(size)}, {copying_way(row)}"


def copying_way(row: PairRow) -> str:
    """The way in which rows copy; with NCCL both ends take part, and it chooses the way."""
    words = [_ENGINES[row.engine or "ce"]]
    if row.peer is not None:
        words += [_DIRECTIONS[row.direction or "write"], _ACCESS[row.peer]]
    return ", ".join(filter(None, (*words, _SCOPES.get(row.scope or ""))))


def copy_columns(rows: Sequence[PairRow]) -> list[Column]:
    """A list of copies for people, a line each: the same columns in the terminal and on pages."""
    return [
        Column("pair", [f"{row.source} → {row.destination}" for row in rows]),
        Column("size", [units.format_size(row.size_bytes or 0) for row in rows], right=True),
        Column("µs", [figure(row.latency_us) for row in rows], right=True),
        Column("GB/s", [figure(row.bandwidth_gb_s) for row in rows], right=True),
        _shares(rows),
        Column("path", [row.path_class or "?" for row in rows]),
        Column("verdict", [row.verdict or "" for row in rows]),
        *note_columns(rows),
    ]


def _shares(rows: Sequence[PairRow]) -> Column:
    """Percent of what is expected; of the limit where nothing is."""
    if any(row.expected_percent is not None for row in rows):
        return Column("% exp", [_share(row) for row in rows], right=True)
    return Column("% limit", [units.format_share(_limit_percent(row)) for row in rows], right=True)


def _share(row: PairRow) -> str:
    only_limit = row.expected_percent is None and _limit_percent(row) is not None
    return f"{units.format_share(_limit_percent(row))} lim" if only_limit else units.format_share(row.expected_percent)


def _limit_percent(row: PairRow) -> float | None:
    """The share of the limit; of what is shown by its time it says nothing."""
    return None if _is_timed(row) else row.limit_percent


def most_expected(rows: Sequence[PairRow]) -> float | None:
    """The best that is expected of rows of one size: the shortest time of small copies, else the highest bandwidth."""
    if _is_timed(rows[0]):
        return min((row.expected_us for row in rows if row.expected_us is not None), default=None)
    return max((row.expected_gb_s for row in rows if row.expected_gb_s is not None), default=None)


def expected_lines(rows: Sequence[PairRow]) -> Iterator[str]:
    """What pairs reach of what is expected of them, and where that is from."""
    known = [(row.expected_percent, row) for row in rows if row.expected_percent is not None]
    if known:
        (lowest, row), (highest, _) = (pick(known, key=itemgetter(0)) for pick in (min, max))
        reached, sources = _range(lowest, highest), dict.fromkeys(row.expected_source for _, row in known)
        which = f", lowest {row.source} → {row.destination}" if " to " in reached else ""
        yield f"% exp: {reached}{which}; expected: {', '.join(filter(None, sources))}"


def limit_lines(rows: Sequence[PairRow]) -> Iterator[str]:
    """What pairs reach of the limit, where nothing is expected of them and bytes are meant to go straight there."""
    limited = [share for row in rows if row.peer != "off" and (share := _limit_percent(row)) is not None]
    if limited and all(row.expected_percent is None for row in rows):
        yield f"% limit: {_range(min(limited), max(limited))}"


def _is_timed(row: PairRow) -> bool:
    return (row.size_bytes or 0) < _TIMED_BELOW_BYTES


def _range(lowest: float, highest: float) -> str:
    return " to ".join(dict.fromkeys((units.format_share(lowest), units.format_share(highest))))


def _word(row: PairRow, *, latency: bool) -> str:
    value = row.latency_us if latency else row.bandwidth_gb_s
    if value is None:
        return "ERROR" if row.verdict == Verdict.ERROR else "-"
    mark = verdict_mark(row.verdict)
    return f"{value:.2f}{mark}" if latency else f"{value:.1f}{mark}"
