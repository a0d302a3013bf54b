"""Print copies: one matrix per kind of copy, then host memory, managed memory, and patterns of concurrent pairs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from gpubench.formats.layout import INDENT, VERDICT_MARKS, Column, Grid, GridCell, figure, or_dash, verdict_mark
from gpubench.formats.table import Page
from gpubench.model.results.report import Matrix, Metadata, PairRow, PatternRow, Report, Row
from gpubench.model.terms import units
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.verdict import Verdict

_OF_MANAGED = ("prefetch", "faults", "in place")
_COPY, _KERNEL = "ce", "sm"
_HOST = "host"
_HEADS = {
    _COPY: "copy engine",
    _KERNEL: "kernel",
    "prefetch": "prefetch",
    "faults": "page faults",
    "in place": "in place",
}
_LATENCY_BYTES = 16
_TIMED_BELOW_BYTES = 64 * 2**10
"""Show the time instead of the bandwidth for smaller copies, whose bandwidth would round to zero."""

_MOST_KINDS = 4
_DIRECTIONS = {
    "write": "written by the source",
    "read": "read by the destination",
    "both": "both directions at once, summed",
}
_ENGINES = {
    "ce": "copy engine",
    "sm": "kernel",
    "nccl": "NCCL send and receive",
    "rdma": "RDMA between NICs, by perftest",
    "mpi": "MPI, by OSU",
    "ucx": "UCX, by ucx_perftest",
    "nixl": "NIXL, by nixlbench",
    "prefetch": "managed memory, prefetched",
    "faults": "managed memory, fetched by page faults of a kernel",
    "in place": "managed memory, used in place by a kernel",
}
_ACCESS = {"on": "peer access on", "off": "peer access off: through host memory"}
_COPIES = {"write": "writes", "read": "reads", "both": "copies both ways at once"}
_SCOPES = {"ipc": "between processes (CUDA IPC)", "network": "between nodes"}

_MARKS = "GB/s is 1e9 bytes/s; " + ", ".join(f"{mark} {verdict}" for verdict, mark in VERDICT_MARKS.items())

Ends = tuple[str, str]
Key = tuple[str | None, str | None, str | None, int | None]

PATTERNS = (
    Column("pattern", lambda row: row.pattern.replace("_", " ")),
    Column("way", "direction"),
    Column("pairs", "pairs", right=True),
    Column("together", lambda row: figure(row.total_gb_s), right=True, on_page="together GB/s"),
    Column(
        "one at a time, summed",
        lambda row: figure(row.parts_gb_s),
        right=True,
        on_page="one at a time, summed GB/s",
    ),
    Column("share", lambda row: units.format_percent(row.share_percent, "-"), right=True),
    Column("wrong", lambda row: or_dash(row.wrong, "d"), right=True),
)
COLUMNS = {PatternRow: PATTERNS}


class P2pView:
    """Prints a matrix once all its pairs are measured. If only some pairs are measured, it prints a table."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._waiting: list[PairRow] = []
        self._host: list[PairRow] = []
        self._plain: list[PairRow] = []
        self._managed: list[PairRow] = []
        gpus = metadata.options["gpus"]
        page.heading(metadata, "p2p", _subject(metadata))
        print_source_and_devices(page, metadata)
        if metadata.profile and metadata.origin != "simulated":
            page.wrap(f"{INDENT}profile {metadata.profile['name']}")
        page.software(metadata)
        page.wrap(f"{INDENT}{_method(metadata) if gpus else _MARKS}")
        for words, alike in units.group_by(metadata.options.get("managed", ()), _managed_memory).items():
            names = units.compress_names([str(gpu["device"]) for gpu in alike])
            page.wrap(f"{INDENT}managed memory of {names}: {words}")
        if len(gpus) == 1 and not metadata.ranks:
            page.wrap(f"{INDENT}one GPU: copies with host memory only")
        self._names = list(gpus)
        self._shows_matrices = bool(gpus) and len(metadata.options["pairs"]) == len(gpus) * (len(gpus) - 1)
        self._keeps_plain = metadata.options.get("memory") == "managed"
        self._shows_evidence = metadata.options.get("evidence") == "shown"

    def row(self, row: Row) -> None:
        if not isinstance(row, PairRow):
            raise TypeError(f"p2p has no rows of {type(row).__name__}")
        is_with_host = _HOST in (row.source, row.destination)
        if row.engine in _OF_MANAGED or (row.engine == _KERNEL and is_with_host):
            self._managed.append(row)  # Printed next to kernel copies with managed memory
        elif is_with_host:
            self._host.append(row)
        else:
            self._print_host()
            if self._waiting and self._key(self._waiting[0]) != self._key(row):
                self._print_waiting()
            self._waiting.append(row)

    def end(self, report: Report) -> None:
        self._print_host()
        self._print_waiting()
        self._print_managed()
        ratios = report.sections.get("ratios")
        if isinstance(ratios, Matrix) and ratios.cells and len(ratios.cells) == len(self._names):
            cells = {
                source: {name: GridCell(f"{ratio:.3g}") for name, ratio in row.items()}
                for source, row in ratios.cells.items()
            }
            self._grid("on / off", "bandwidth with peer access on, divided by bandwidth with it off", cells)
        patterns = report.rows(PatternRow)
        if patterns:
            size = units.format_size(patterns[0].size_bytes)
            self._page.print("")
            self._page.wrap(f"many pairs at once, {size} each, copy engine, GB/s")
            self._page.table(PATTERNS, patterns, keys=2)
        if self._shows_evidence:
            self._page.evidence(report)
        else:
            self._page.print("")
        self._page.outcome(report)

    def _key(self, row: PairRow) -> Key:
        """Return the values that all rows of one block share. A table covers all sizes, a matrix only one."""
        return row.engine, row.direction, row.peer, row.size_bytes if self._shows_matrices else None

    def _taken(self, rows: list[PairRow]) -> list[PairRow]:
        taken = [*rows]
        rows.clear()
        self._plain += taken if self._keeps_plain else ()
        return taken

    def _print_waiting(self) -> None:
        rows = self._taken(self._waiting)
        if not rows:
            return
        if self._shows_matrices:
            self._grid("µs" if is_timed(rows[0]) else "GB/s", series_title(rows[0]), copy_cells(rows, _cell_text))
        else:
            self._page.print("")
            self._page.wrap(copying_way(rows[0]))
            self._page.table(copy_columns(rows), rows, keys=2)
        for line in (*expected_lines(rows), *(limit_lines(rows) if self._shows_matrices else ())):
            self._page.wrap(line)

    def _grid(self, corner: str, title: str, cells: Mapping[str, Mapping[str, GridCell]]) -> None:
        """Print a matrix of all devices. Pairs that are missing in `cells` appear as '-', for example between nodes."""
        self._page.print("")
        self._page.grid(Grid(title, corner, self._names, {name: cells.get(name, {}) for name in self._names}))

    def _print_host(self) -> None:
        rows = self._taken(self._host)
        if not rows:
            return
        self._page.print("")
        self._page.wrap(f"host memory, {units.format_size(rows[0].size_bytes or 0)}, copy engine, GB/s")
        columns = [Column("GPU", str)]
        for (kind, is_to_gpu), members in groupby(
            rows, key=lambda row: ((row.note or "").split(" ")[0], row.source == _HOST)
        ):
            words = {row.destination if is_to_gpu else row.source: _marked(row) for row in members}
            columns.append(_column(f"{'to' if is_to_gpu else 'from'} GPU, {kind}", words))
        self._page.table(columns, self._names)
        for line in expected_lines(rows):
            self._page.wrap(line)

    def _print_managed(self) -> None:
        """Print copies with managed memory, each in percent of the copy engine's bandwidth between the same devices."""
        if not self._managed:
            return
        plain = (row for row in self._plain if HostMemory.parse_note(row.note) is not HostMemory.PAGEABLE)
        found = {((row.source, row.destination), row.engine): row for row in (*plain, *self._managed)}
        ends = list(dict.fromkeys(pair for pair, _ in found))
        size = units.format_size(self._managed[0].size_bytes or 0)
        self._page.print("", f"managed memory compared with plain memory, {size}, GB/s (of the copy engine's copy)")
        columns = [Column("from", itemgetter(0)), Column("to", itemgetter(1))]
        for engine, head in _HEADS.items():
            words = {
                pair: _compare_with_copy_engine(found.get((pair, engine)), found.get((pair, _COPY))) for pair in ends
            }
            columns.append(_column(head, words))
        self._page.table(columns, ends, keys=2)


def _column(head: str, words: Mapping[Any, str]) -> Column:
    return Column(head, lambda row: words.get(row, "-"), right=True)


def _compare_with_copy_engine(row: PairRow | None, copied: PairRow | None) -> str:
    if row is None or row.bandwidth_gb_s is None or row.engine == _COPY or copied is None or not copied.bandwidth_gb_s:
        return "-" if row is None else _marked(row)
    return f"{_marked(row)} ({units.format_share(units.percent(row.bandwidth_gb_s, copied.bandwidth_gb_s))} %)"


def _managed_memory(gpu: Mapping[str, Any]) -> str:
    if gpu["managed"] is False:
        return "none"
    words = ["prefetch, advice and page faults" if gpu["concurrent"] else "moved whole at every launch of a kernel"]
    if gpu["pageable"] is not None:
        way = "by the host's page tables" if gpu["host_page_tables"] else "HMM"
        words.append(f"kernels read memory of malloc ({way})" if gpu["pageable"] else "no HMM")
    return "; ".join(words)


def print_source_and_devices(page: Page, metadata: Metadata) -> None:
    """Print whether the report is simulated or replayed, and its GPUs."""
    if metadata.origin == "simulated" and metadata.profile:
        page.wrap(f"{INDENT}a model from profile {metadata.profile['name']}, nothing was measured")
    if metadata.source:
        page.wrap(f"{INDENT}{metadata.source}")
    label = "rank " if metadata.ranks else ""
    for line in _device_lines(metadata.options["gpus"], label, verbose=page.verbose):
        page.wrap(line)


def _device_lines(devices: Mapping[str, str], label: str, *, verbose: bool) -> Iterator[str]:
    """List the devices. Unless `verbose`, devices of the same model share a line.

    `devices` maps names to descriptions, for example 'GPU0' to '0000:06:00.0 NVIDIA H200'.
    """
    if verbose:
        yield from (f"{INDENT}{label}{name} {text}" for name, text in devices.items())
        return
    alike = units.group_by(
        devices, lambda name: " ".join(word for word in devices[name].split(" ") if word.count(":") < 2)
    )
    mark = "" if label else ":"  # A rank's text begins with 'on', as in 'on node0: NVIDIA H200'
    for model, names in list(alike.items())[:_MOST_KINDS]:
        yield f"{INDENT}{label}{units.compress_names(names)}{mark} {model}"
    if len(alike) > _MOST_KINDS:
        yield f"{INDENT}and {len(alike) - _MOST_KINDS} more kinds: -v shows all"


def _subject(metadata: Metadata) -> str:
    gpus, hosts = len(metadata.options["gpus"]), len(set(metadata.hosts))
    if not gpus:
        return "transfers between two ends"
    if not metadata.ranks:
        return f"{units.plural(gpus, 'GPU')} of {metadata.hosts[0]}"
    return f"{units.plural(gpus, 'rank')} on {metadata.hosts[0] if hosts == 1 else units.plural(hosts, 'node')}"


def _method(metadata: Metadata) -> str:
    options = metadata.options
    copies = (
        f"{options['repeats']} copies" if options["repeats"] else f"copies of {options['sample_seconds'] * 1e3:g} ms"
    )
    loop = f"median of {options['samples']} samples, each {copies} after {options['warmup']} warm-up copies"
    check = "every destination verifies the data" if options["check"] else "data not verified"
    return f"{loop}; {check}; {_MARKS}"


def series_title(row: PairRow) -> str:
    """Describe the size and the method of the copies in a matrix."""
    size = row.size_bytes or 0
    return f"{'a copy of 16 bytes' if size == _LATENCY_BYTES else units.format_size(size)}, {copying_way(row)}"


def page_title(row: PairRow) -> str:
    """Return a short title for a matrix of copies on a page, such as 'Reads of 256M'."""
    engine = "kernel " if row.engine == _KERNEL else "" if row.engine == _COPY else f"{(row.engine or '').upper()} "
    what = f"{engine}{_COPIES[row.direction or 'write'] if row.peer or row.direction == 'both' else 'transfers'}"
    size = "16 bytes" if row.size_bytes == _LATENCY_BYTES else units.format_size(row.size_bytes or 0)
    words = (
        f"{'latency of ' if is_timed(row) else ''}{what} of {size}",
        "peer access off" if row.peer == "off" else "",
    )
    return ", ".join(filter(None, (*words, _SCOPES.get(row.scope or ""))))


def page_note(rows: Sequence[PairRow]) -> str:
    """Describe on a page how the copies of a matrix were made, what is expected, and why pairs have no value."""
    sentences = [copying_way(rows[0])]
    if expected := _expected(rows, " %"):
        reached, sources = expected
        sentences.append(f"Expected: {sources}. Reached: {reached}")
    reasons = dict.fromkeys(row.note for row in rows if row.bandwidth_gb_s is None and row.verdict == Verdict.SKIP)
    sentences += [f"–: not measured ({reason})" for reason in reasons]
    if any(row.bandwidth_gb_s is not None and row.verdict in (None, Verdict.SKIP) for row in rows):
        sentences.append("Copies without a colour are not judged")
    return ". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences) + "."


def copying_way(row: PairRow) -> str:
    """Describe how a row was copied: by engine, direction and peer access.

    Direction and peer access are omitted for rows without `peer`, such as copies by NCCL, which chooses the transport.
    """
    words = [_ENGINES[row.engine or "ce"]]
    if row.peer is not None:
        words += [_DIRECTIONS[row.direction or "write"], _ACCESS[row.peer]]
    elif row.direction == "both":
        words.append(_DIRECTIONS["both"])
    return ", ".join(filter(None, (*words, _SCOPES.get(row.scope or ""))))


def copy_columns(rows: Sequence[PairRow]) -> list[Column]:
    """Return the columns of a table of copies, with the percentage of the expected value.

    If no row has an expected value, the percentage is that of the limit.
    """
    is_expected = any(row.expected_percent is not None for row in rows)
    return [
        Column("pair", lambda row: f"{row.source} → {row.destination}"),
        Column("how", copying_way, page_only=True),
        Column("size", lambda row: units.format_size(row.size_bytes or 0), right=True),
        Column("µs", lambda row: figure(row.latency_us), right=True),
        Column("GB/s", lambda row: figure(row.bandwidth_gb_s), right=True),
        Column("% exp", _share, right=True)
        if is_expected
        else Column("% limit", lambda row: units.format_share(_limit_percent(row)), right=True),
        Column("path", lambda row: row.path_class or "?"),
        Column("verdict", "verdict"),
        Column("note", "note", optional=True),
    ]


def _share(row: PairRow) -> str:
    only_limit = row.expected_percent is None and _limit_percent(row) is not None
    return f"{units.format_share(_limit_percent(row))} lim" if only_limit else units.format_share(row.expected_percent)


def _limit_percent(row: PairRow) -> float | None:
    """Return the percentage of the limit, or None for small copies, which the table shows by time."""
    return None if is_timed(row) else row.limit_percent


def copy_cells(rows: Sequence[PairRow], words: Callable[[PairRow], str]) -> dict[str, dict[str, GridCell]]:
    """Return the cells of a matrix by source and destination. The share of a judged cell is that of a healthy pair."""
    lines: dict[str, dict[str, GridCell]] = {}
    for row in rows:
        share = None
        if row.verdict is not None:
            percent = row.expected_percent if is_timed(row) else units.percent(row.bandwidth_gb_s, row.healthy_gb_s)
            share = None if percent is None else min(percent / 100, 1.0)
        verdict = None if row.verdict is None else Verdict(row.verdict)
        lines.setdefault(row.source, {})[row.destination] = GridCell(words(row), share, verdict)
    return lines


def expected_lines(rows: Sequence[PairRow]) -> Iterator[str]:
    """Yield a line with the percentage of the expected value that pairs reach, and its source."""
    if expected := _expected(rows):
        yield f"% exp: {expected[0]}; expected: {expected[1]}"


def _expected(rows: Sequence[PairRow], unit: str = "") -> tuple[str, str] | None:
    """Return the percentage of the expected value that pairs reach, and its sources. None if nothing is expected."""
    known = [(row.expected_percent, row) for row in rows if row.expected_percent is not None]
    if not known:
        return None
    (lowest, row), (highest, _) = (pick(known, key=itemgetter(0)) for pick in (min, max))
    reached, sources = f"{_range(lowest, highest)}{unit}", dict.fromkeys(row.expected_source for _, row in known)
    which = f", lowest {row.source} → {row.destination}" if " to " in reached else ""
    return f"{reached}{which}", ", ".join(filter(None, sources))


def limit_lines(rows: Sequence[PairRow]) -> Iterator[str]:
    """Yield a line with the percentage of the limit that direct copies reach, if no row has an expected value."""
    limited = [share for row in rows if row.peer != "off" and (share := _limit_percent(row)) is not None]
    if limited and all(row.expected_percent is None for row in rows):
        yield f"% limit: {_range(min(limited), max(limited))}"


def is_timed(row: PairRow) -> bool:
    """True if the copy is so small that tables show its time instead of its bandwidth."""
    return (row.size_bytes or 0) < _TIMED_BELOW_BYTES


def _range(lowest: float, highest: float) -> str:
    return " to ".join(dict.fromkeys((units.format_share(lowest), units.format_share(highest))))


def _cell_text(row: PairRow) -> str:
    return f"{row.latency_us:.2f}" if is_timed(row) and row.latency_us is not None else _bandwidth(row)


def _bandwidth(row: PairRow) -> str:
    if row.bandwidth_gb_s is None:
        return "ERROR" if row.verdict == Verdict.ERROR else "-"
    return f"{row.bandwidth_gb_s:.1f}"


def _marked(row: PairRow) -> str:
    return _bandwidth(row) + ("" if row.bandwidth_gb_s is None else verdict_mark(row.verdict))
