"""Print KV transfers: one line per pair of GPUs, then all sizes and numbers of blocks of the slowest pair."""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from gpubench.formats.layout import INDENT, Column, figure, verdict_mark
from gpubench.formats.table import Page, ReportView
from gpubench.formats.text.p2p import print_source_and_devices
from gpubench.formats.text.scaling import SCALING, print_scaling
from gpubench.model.results.kv import KvRow
from gpubench.model.results.report import Metadata, Report, Row
from gpubench.model.results.scaling import ScalingRow
from gpubench.model.terms.operation import Direction
from gpubench.model.terms.units import format_share, format_size, group_by
from gpubench.model.terms.verdict import Verdict, worst_verdict

_HOST = "host"


def describe_path(row: KvRow) -> str:
    if row.transport is None:
        return "-"
    path = {True: "host-staged, ", False: "direct, ", None: ""}[row.host_staged]
    return f"{path}{row.transport}"


def _percent(percent: float | None) -> str:
    return "-" if percent is None else f"{format_share(percent)}%"


class _KvPair:
    """The rows from one GPU to another, with one kind of memory. `largest` are those of one block, or the fewest."""

    def __init__(self, rows: Sequence[KvRow]) -> None:
        self.rows, self.first = rows, rows[0]
        fewest, most = max((-row.blocks, row.size_bytes) for row in rows)
        self.largest = [row for row in rows if (-row.blocks, row.size_bytes) == (fewest, most)]
        known = [row for row in self.largest if row.bandwidth_gb_s is not None]
        self.slowest = min(known, key=lambda row: row.bandwidth_gb_s or 0.0, default=self.largest[0])
        verdicts = [Verdict(row.verdict) for row in rows if row.verdict]
        self.verdict = worst_verdict(verdicts) if verdicts else None

    def gb_s(self, direction: str) -> float | None:
        return next((row.bandwidth_gb_s for row in self.largest if row.direction == direction), None)


def pairs(rows: Sequence[KvRow]) -> list[_KvPair]:
    """Group the transfers between GPUs by pair and kind of memory."""
    between = (row for row in rows if row.destination != _HOST)
    return [_KvPair(alike) for alike in group_by(between, attrgetter("source", "destination", "memory")).values()]


def pairs_title(found: Sequence[_KvPair]) -> str:
    return f"one block of {format_size(found[0].largest[0].size_bytes)}, from GPU to GPU"


_PAIRS = (
    Column("from", lambda pair: pair.first.source),
    Column("to", lambda pair: pair.first.destination),
    Column("memory", lambda pair: pair.first.memory, 1),
    Column("path", lambda pair: describe_path(pair.slowest)),
    Column("write GB/s", lambda pair: figure(pair.gb_s("write")), right=True),
    Column("read GB/s", lambda pair: figure(pair.gb_s("read")), right=True),
    Column("of a copy", lambda pair: _percent(pair.slowest.expected_percent), 2, right=True),
    Column("verdict", lambda pair: pair.verdict or "not judged"),
)
_SIZES = (
    Column("size", lambda row: format_size(row.size_bytes), right=True),
    Column("blocks", lambda row: str(row.blocks), right=True),
    Column("", "direction", on_page="direction"),
    Column("GB/s", lambda row: figure(row.bandwidth_gb_s), right=True),
    Column("p50 µs", lambda row: figure(row.p50_us), right=True),
    Column("p99 µs", lambda row: figure(row.p99_us), 2, right=True),
    Column("µs/block", lambda row: figure(row.block_us), 1, right=True),
    Column("path", describe_path, 3),
    Column("", lambda row: verdict_mark(row.verdict), 4),
)
COLUMNS = {
    KvRow: (
        Column("from", "source"),
        Column("to", "destination"),
        Column("memory", "memory"),
        *_SIZES[:-1],
        Column("verdict", lambda row: row.verdict or "not judged"),
    ),
    ScalingRow: SCALING,
}


class KvView(ReportView):
    """Prints all transfers at the end."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        super().__init__(page, metadata)
        self._rows: list[KvRow] = []
        self._to_host: list[KvRow] = []

    def row(self, row: Row) -> None:
        if not isinstance(row, KvRow):
            raise TypeError(f"kv has no rows of {type(row).__name__}")
        (self._to_host if row.destination == _HOST else self._rows).append(row)

    def end(self, report: Report) -> None:
        page, metadata = self._page, self._metadata
        page.heading(metadata, "kv", f"backend {metadata.backend}", ", ".join(metadata.hosts))
        print_source_and_devices(page, metadata)
        page.software(metadata)
        page.wrap(f"{INDENT}{_processes(metadata)}")
        self._tables()
        page.print("")
        print_scaling(page, report)
        page.outcome(report)

    def _tables(self) -> None:
        found = pairs(self._rows)
        if not found:
            return
        self._page.print("")
        self._page.wrap(pairs_title(found))
        self._page.table(_PAIRS, found, keys=2)
        worst = min(found, key=lambda pair: pair.slowest.bandwidth_gb_s or 0.0)
        for pair in found if self._page.verbose else [worst]:
            first = pair.first
            self._page.print("")
            self._page.wrap(f"all sizes, {first.source} → {first.destination}, {first.memory}")
            self._page.table(_SIZES, sorted(pair.rows, key=_by_size), keys=3)
        self._page.print("")
        for line in self._notes():
            self._page.wrap(line)

    def _notes(self) -> Iterator[str]:
        direct = [row for row in self._rows if row.blocks > 1 and row.host_staged is False and row.block_us is not None]
        if direct:
            most = max(row.blocks for row in direct)
            slowest = max((row for row in direct if row.blocks == most), key=lambda row: row.size_bytes)
            size, rate = format_size(slowest.size_bytes), figure(slowest.bandwidth_gb_s)
            cost = f"{most:,} blocks take {figure(slowest.block_us)} µs each, which limits {size} to {rate} GB/s"
            yield f"{cost}. This is a cost per block, not a fallback"
        rates = [row for row in self._to_host if row.bandwidth_gb_s is not None]
        if rates:
            slowest = min(rates, key=lambda row: row.bandwidth_gb_s or 0.0)
            yield (
                f"to host memory of the other process: {figure(slowest.bandwidth_gb_s)} GB/s or more, with "
                f"{slowest.protocol or '?'} over {slowest.transport or '?'} (not judged)"
            )


def _by_size(row: KvRow) -> tuple[int, int, bool]:
    return row.size_bytes, row.blocks, row.direction == Direction.READ


def _processes(metadata: Metadata) -> str:
    options = metadata.options
    visible = "only its own GPU" if options["visible"] == "own" else "all GPUs"
    apart = f", in a {options['isolate'].upper()} namespace" if options["isolate"] else ""
    check = "data not verified" if metadata.origin == "simulated" else "data verified"
    return f"two processes per pair, each sees {visible}{apart}; {check}"
