"""Print why a job is slow or stuck: communicators, their pairs by transport, hangs, causes and the verdict."""

from collections.abc import Iterable, Iterator, Sequence

from gpubench.formats.layout import INDENT, Column, figure, table_lines
from gpubench.formats.table import Page, ReportView
from gpubench.model.paths.hang import Hang
from gpubench.model.paths.ucx import UcxRoute
from gpubench.model.results.fallback import (
    CommunicatorRow,
    HangRow,
    KvPathRow,
    MemberRow,
    OperationRow,
    TransportRow,
    name_candidates,
)
from gpubench.model.results.report import Report
from gpubench.model.terms.units import compress_names, format_size, group_by, plural, shorten
from gpubench.model.terms.verdict import Verdict

_MOST_HANGS = 10
_MOST_KINDS = 10
_MOST_RANK_LINES = 16
_MOST_WARNINGS = 3
_MOST_SIZES = 16
_MOST_PAIRS = 8
_MOST_KV_PATHS = 16
_PLACES = {"node": "inside a node", "network": "between nodes", "unknown": "?"}
_WORDS = {True: "yes", False: "no", None: "?"}
_VERDICTS = {Verdict.SKIP: "by design"}

Kind = tuple[CommunicatorRow, list[TransportRow], int]
"""A communicator, the transports of its pairs, and the number of other communicators with equal values."""

HANGS = (
    Column("group", "group"),
    Column("who", lambda row: shorten(row.ranks)),
    Column("what", "reason"),
    Column("waiting", "waiting", right=True),
    Column("in", lambda row: row.operation or "-", 1),
    Column("since (UTC)", lambda row: row.since or "?", 2),
    Column("called instead", lambda row: row.theirs or "-", 3),
    Column("at", lambda row: row.place or "-", 4),
)
OPERATIONS = (
    Column("collective", "collective"),
    Column("ranks", "ranks", right=True),
    Column("size", "size_bytes", right=True),
    Column("operations", "operations", right=True),
    Column("time µs", lambda row: figure(row.time_us), right=True),
    Column("busbw GB/s", lambda row: figure(row.busbw_gb_s), right=True),
)
_SHORT_ROUTES: dict[str, str] = {UcxRoute.EMULATED: "emulated"}
KV_PATHS = (
    Column("process", lambda row: row.process or "?", 2),
    Column("operation", "operation", 1),
    Column("memory", lambda row: f"{row.source} → {row.destination or 'the receiver'}"),
    Column("sizes", lambda row: _sizes(row)),
    Column("how", lambda row: _SHORT_ROUTES.get(row.route, row.route) + " (estimate)" * row.protocol.startswith("(?)")),
    Column("transport", "transport"),
    Column("verdict", lambda row: row.verdict),
)
_MEMBERS = (
    Column("rank", "rank", right=True),
    Column("host", "host"),
    Column("for NCCL", "node"),
    Column("pid", "pid", right=True),
    Column("GPU", lambda row: row.bus_id or "?"),
)


def _transport_columns(examples: int) -> list[Column]:
    """Return the columns of the transport table, with up to `examples` pairs per row.

    With 0 examples, a narrow terminal may drop further columns.
    """
    spare = 0 if examples else 1
    columns = [
        Column("communicator", "communicator", page_only=True),
        Column("where", lambda row: _PLACES[row.scope], 2 * spare),
        Column("transport", "transport"),
        Column("pairs", "pairs", right=True),
        Column("channels", lambda row: _range(row.channels_least, row.channels_most), 3 * spare, right=True),
        Column("host memory", lambda row: _WORDS[row.host_staged], spare),
        Column("verdict", lambda row: _VERDICTS.get(Verdict(row.verdict), row.verdict)),
    ]
    return columns + ([Column("who", lambda row: _examples(row, examples))] if examples else [])


COLUMNS = {
    OperationRow: OPERATIONS,
    HangRow: HANGS,
    TransportRow: _transport_columns(_MOST_PAIRS),
    KvPathRow: KV_PATHS,
}


class ExplainView(ReportView):
    """Prints communicators, their pairs by transport, causes and the verdict."""

    def end(self, report: Report) -> None:
        """Print all sections, or only the verdict if the run was cut short."""
        if report.sections:
            communicators = report.rows(CommunicatorRow)
            transports = report.rows(TransportRow)
            self._header(communicators, len(report.rows(KvPathRow)))
            kinds = list(_kinds(communicators, transports))
            for kind in kinds[:_MOST_KINDS]:
                self._kind(kind)
            if len(kinds) > _MOST_KINDS:
                left = sum(1 + more for _, _, more in kinds[_MOST_KINDS:])
                self._page.wrap(f"and {plural(left, 'communicator')} more: --format csv --section transports")
            self._ranks(communicators, report.rows(MemberRow))
            self._kv_paths(report.rows(KvPathRow))
            self._operations(report.rows(OperationRow))
            print_hangs(self._page, report.rows(HangRow))
            self._page.print("")
            if transports:
                self._page.wrap(_total(transports))
        self._page.outcome(report)

    def _header(self, communicators: Sequence[CommunicatorRow], kv_paths: int) -> None:
        metadata, options = self._metadata, self._metadata.options
        largest = max((row.ranks or 0 for row in communicators), default=0)
        found = plural(len(communicators), "communicator") if communicators else ""
        self._page.heading(metadata, "explain", found, f"up to {plural(largest, 'rank')}" if largest else "")
        is_of_ucx_alone = (kv_paths or options.get("ucx_lines")) and not options["nccl_lines"]
        without = 0 if is_of_ucx_alone else options["files_without_nccl"]
        files = plural(options["files"], "file") + (f", {without} without NCCL lines" if without else "")
        self._page.wrap(f"{INDENT}{metadata.source}: {files}")
        dumps = f", and dumps of {plural(options['dumps'], 'rank')}" if options.get("dumps") else ""
        lines = f"{INDENT}{plural(options['lines'], 'line')}"
        self._page.wrap(lines if is_of_ucx_alone else f"{lines}, {options['nccl_lines']} of NCCL's{dumps}")
        self._page.software(metadata)
        warnings = sorted(options["warnings"].items(), key=lambda item: -item[1])
        for text, count in warnings[:_MOST_WARNINGS]:
            self._page.wrap(f"{INDENT}NCCL warns{f' {count} times' if count > 1 else ''}: {text}")
        if len(warnings) > _MOST_WARNINGS:
            self._page.wrap(f"{INDENT}and {len(warnings) - _MOST_WARNINGS} more warnings")

    def _kind(self, kind: Kind) -> None:
        communicator, transports, more = kind
        self._page.print("")
        self._page.wrap(_described(communicator, more))
        if not transports:
            self._page.wrap(f"{INDENT}no connection, because NCCL connects ranks when they first communicate")
            return
        columns: list[Column] = []
        # Show as many example pairs as fit.
        for examples in (_MOST_PAIRS, 4, 3, 2, 1, 0):
            columns = _transport_columns(examples)
            lines = list(table_lines(columns, transports, self._page.width))
            if "" not in lines and max(map(len, lines)) <= self._page.width:
                break
        self._page.table(columns, transports)

    def _operations(self, rows: Sequence[OperationRow]) -> None:
        if not rows:
            return
        shown = sorted(sorted(rows, key=lambda row: -row.size_bytes)[:_MOST_SIZES], key=rows.index)
        self._page.print("", "collectives of the job, from NCCL Inspector")
        self._page.table(OPERATIONS, shown)
        if len(rows) > len(shown):
            self._page.wrap(f"and {len(rows) - len(shown)} more: --format csv --section {OperationRow.section}")

    def _kv_paths(self, rows: Sequence[KvPathRow]) -> None:
        """Print how large messages go. Small messages are often copied by design."""
        large = [row for row in rows if row.last_bytes is None or row.verdict != Verdict.SKIP]
        if large:
            self._page.print("", "GPU memory that UCX moves between processes")
            self._page.table(KV_PATHS, large[:_MOST_KV_PATHS])
        if len(rows) > len(large[:_MOST_KV_PATHS]):
            hidden = plural(len(rows) - len(large[:_MOST_KV_PATHS]), "row")
            self._page.wrap(f"and {hidden} more: --format csv --section {KvPathRow.section}")

    def _ranks(self, communicators: Sequence[CommunicatorRow], members: Sequence[MemberRow]) -> None:
        """Print each rank of the largest communicator with its GPU. With many ranks, print only their hosts."""
        largest = max((row for row in communicators if row.hosts), key=lambda row: row.ranks or 0, default=None)
        if largest is None:
            return
        own = [member for member in members if member.communicator == largest.id]
        self._page.print("")
        if len(own) > _MOST_RANK_LINES:
            hosts = sorted(largest.hosts, key=lambda name: (len(name), name))
            self._page.wrap(f"{plural(len(own), 'rank')} on {compress_names(hosts)}")
            return
        has_other_names = any(member.node != member.host for member in own)
        self._page.table([column for column in _MEMBERS if has_other_names or column.head != "for NCCL"], own)


def _kinds(communicators: Iterable[CommunicatorRow], transports: Iterable[TransportRow]) -> Iterator[Kind]:
    rows_by_communicator = group_by(transports, lambda row: row.communicator)
    alike: dict[object, list[CommunicatorRow]] = {}
    for communicator in communicators:
        own = rows_by_communicator.get(communicator.id, [])
        key = communicator.ranks, communicator.nodes, communicator.missing_ranks, communicator.candidates
        shape = tuple((row.scope, row.transport, row.pairs, row.channels_most, row.verdict) for row in own)
        alike.setdefault((key, shape), []).append(communicator)
    for first, *more in sorted(alike.values(), key=lambda members: (-(members[0].ranks or 0), -members[0].pairs)):
        yield first, rows_by_communicator.get(first.id, []), len(more)


def _described(communicator: CommunicatorRow, more: int) -> str:
    name = communicator.id or name_candidates(communicator.candidates) or "without a name"
    ranks = "" if communicator.ranks is None else f": {plural(communicator.ranks, 'rank')}"
    nodes = "" if communicator.nodes is None else f" on {plural(communicator.nodes, 'node')}"
    missing = len(communicator.missing_ranks)
    lost = f", {missing} without a log" if missing else ""
    return f"communicator {name}{f' and {more} alike' if more else ''}{ranks}{nodes}{lost}"


def _examples(row: TransportRow, most: int) -> str:
    shown = [f"{source}→{'switch' if source == target else target}" for source, target in row.first[:most]]
    return ", ".join((*shown, "...") if row.pairs > len(shown) else shown)


def _sizes(row: KvPathRow) -> str:
    last = "inf" if row.last_bytes is None else format_size(row.last_bytes)
    return f"{format_size(row.first_bytes)}..{last}"


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


def _total(transports: Sequence[TransportRow]) -> str:
    counts = {verdict: sum(row.pairs for row in transports if row.verdict == verdict) for verdict in Verdict}
    staged = sum(row.pairs for row in transports if row.host_staged)
    unknown = f"; {counts[Verdict.ERROR]} unknown" if counts[Verdict.ERROR] else ""
    total = plural(sum(counts.values()), "path")
    if not staged:
        return f"through host memory: 0 of {total}, as NCCL logged them{unknown}"
    designed = f", {counts[Verdict.SKIP]} of them by design" if counts[Verdict.SKIP] else ""
    return f"through host memory: {staged} of {total}{designed}{unknown}"


def print_hangs(page: Page, hangs: Sequence[HangRow]) -> None:
    """Print the ranks that keep others waiting, with the reason and the operation."""
    if hangs:
        page.print("")
        page.table(HANGS, hangs[:_MOST_HANGS])
    if len(hangs) > _MOST_HANGS:
        page.wrap(f"and {len(hangs) - _MOST_HANGS} more: --format csv --section {HangRow.section}")


def status_line(seconds: float, communicators: int | None, hangs: Sequence[Hang]) -> str:
    """Return a status line such as '   20.0 s  rank 2 (10.0.0.1:4711): did not join, AllReduce number 6650'.

    Without hangs, the line has the number of communicators instead. `communicators` is None if no process answered in
    time.
    """
    said = [f"{shorten(hang.ranks)}: {', '.join(filter(None, (hang.reason.value, hang.operation)))}" for hang in hangs]
    if not said:
        said = ["no answer in time"]
        if communicators is not None:
            said = [f"{plural(communicators, 'communicator')}, and no rank keeps others waiting"]
    return f"{seconds:8.1f} s  {'; '.join(said)}"
