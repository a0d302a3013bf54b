"""The table of `explain`: communicators that are alike once, their pairs by transport, causes, verdict."""

from collections.abc import Iterable, Iterator, Sequence

from gpubench.formats.lines import INDENT, Column, figure, fitted_lines, fitting, heading, lines
from gpubench.formats.table import ReportView
from gpubench.formats.text.hangs import hang_columns, print_hangs
from gpubench.model.results.fallback import CommunicatorRow, HangRow, MemberRow, OperationRow, TransportRow, either
from gpubench.model.results.report import Report
from gpubench.model.terms.units import compress_names, counted, format_size, grouped
from gpubench.model.terms.verdict import Verdict

_MOST_KINDS = 10
_MOST_RANK_LINES = 16
_MOST_WARNINGS = 3
_MOST_SIZES = 16
_PLACES = {"node": "inside a node", "network": "between nodes", "unknown": "?"}
_WORDS = {True: "yes", False: "no", None: "?"}
_VERDICTS = {Verdict.SKIP: "by design"}

Kind = tuple[CommunicatorRow, list[TransportRow], int]
"""A communicator, its pairs by transport, and how many more there are that are like it."""


class ExplainView(ReportView):
    """Communicators, their pairs by transport, causes, verdict."""

    def end(self, report: Report) -> None:
        """The whole; of a run that was cut short there is nothing but the verdict."""
        if report.sections:
            communicators = report.rows(CommunicatorRow)
            transports = report.rows(TransportRow)
            self._header(communicators)
            kinds = list(_kinds(communicators, transports))
            for kind in kinds[:_MOST_KINDS]:
                self._kind(kind)
            if len(kinds) > _MOST_KINDS:
                left = sum(1 + more for _, _, more in kinds[_MOST_KINDS:])
                self._page.wrap(f"and {counted(left, 'communicator')} more: --format csv --section transports")
            self._ranks(communicators, report.rows(MemberRow))
            self._operations(report.rows(OperationRow))
            print_hangs(self._page, report.rows(HangRow))
            self._page.print("")
            if transports:
                self._page.wrap(_total(transports))
        self._page.outcome(report)

    def _header(self, communicators: Sequence[CommunicatorRow]) -> None:
        metadata, options = self._metadata, self._metadata.options
        largest = max((row.ranks or 0 for row in communicators), default=0)
        found = counted(len(communicators), "communicator") if communicators else ""
        ranks = f"up to {counted(largest, 'rank')}" if largest else ""
        self._page.wrap(heading(metadata, "explain", found, ranks))
        without = options["files_without_nccl"]
        files = counted(options["files"], "file") + (f", {without} without a line of NCCL's" if without else "")
        self._page.wrap(f"{INDENT}{metadata.source}: {files}")
        dumps = f", and dumps of {counted(options['dumps'], 'rank')}" if options.get("dumps") else ""
        self._page.wrap(f"{INDENT}{counted(options['lines'], 'line')}, {options['nccl_lines']} of NCCL's{dumps}")
        self._page.software(metadata)
        warnings = sorted(options["warnings"].items(), key=lambda item: -item[1])
        for text, count in warnings[:_MOST_WARNINGS]:
            self._page.wrap(f"{INDENT}NCCL warns{f' {count} times' if count > 1 else ''}: {text}")
        if len(warnings) > _MOST_WARNINGS:
            self._page.wrap(f"{INDENT}and of {len(warnings) - _MOST_WARNINGS} things more")

    def _kind(self, kind: Kind) -> None:
        communicator, transports, more = kind
        self._page.print("")
        self._page.wrap(_described(communicator, more))
        if not transports:
            self._page.wrap(f"{INDENT}no connection: NCCL connects ranks when they first communicate")
            return
        width = self._page.width
        tables = [list(lines(fitting(_columns(transports, examples), width))) for examples in (8, 4, 3, 2, 1, 0)]
        self._page.table(next((table for table in tables if max(map(len, table)) <= width), tables[-1]))

    def _operations(self, rows: Sequence[OperationRow]) -> None:
        if not rows:
            return
        shown = sorted(sorted(rows, key=lambda row: -row.size_bytes)[:_MOST_SIZES], key=rows.index)
        self._page.print("", "collectives of the job, by NCCL's Inspector")
        self._page.table(fitted_lines(_operation_columns(shown), self._page.width))
        if len(rows) > len(shown):
            self._page.wrap(f"and {len(rows) - len(shown)} more: --format csv --section {OperationRow.section}")

    def _ranks(self, communicators: Sequence[CommunicatorRow], members: Sequence[MemberRow]) -> None:
        """The ranks of the largest communicator with their GPUs; of many, their hosts alone."""
        largest = max((row for row in communicators if row.hosts), key=lambda row: row.ranks or 0, default=None)
        if largest is None:
            return
        own = [member for member in members if member.communicator == largest.id]
        self._page.print("")
        if len(own) > _MOST_RANK_LINES:
            self._page.wrap(f"{counted(len(own), 'rank')} on {compress_names(sorted(largest.hosts, key=_natural))}")
            return
        columns = [
            Column("rank", [str(member.rank) for member in own], right=True),
            Column("host", [member.host for member in own]),
            Column("pid", [str(member.pid) for member in own], right=True),
            Column("GPU", [member.bus_id or "?" for member in own]),
        ]
        if any(member.node != member.host for member in own):
            columns.insert(2, Column("for NCCL", [member.node for member in own]))
        self._page.table(fitted_lines(columns, self._page.width))


def _operation_columns(rows: Sequence[OperationRow]) -> list[Column]:
    return [
        Column("collective", [row.collective for row in rows]),
        Column("ranks", [str(row.ranks) for row in rows], right=True),
        Column("size", [format_size(row.size_bytes) for row in rows], right=True),
        Column("operations", [str(row.operations) for row in rows], right=True),
        Column("time µs", [figure(row.time_us) for row in rows], right=True),
        Column("busbw GB/s", [figure(row.busbw_gb_s) for row in rows], right=True),
    ]


def _transports_on_page(rows: Sequence[TransportRow]) -> list[Column]:
    """The table of the terminal, which is one for each communicator, in one."""
    return [Column("communicator", [row.communicator or "" for row in rows]), *_columns(rows, _PAIRS_ON_PAGE)]


_PAIRS_ON_PAGE = 8
COLUMNS = {OperationRow: _operation_columns, HangRow: hang_columns, TransportRow: _transports_on_page}


def _kinds(communicators: Iterable[CommunicatorRow], transports: Iterable[TransportRow]) -> Iterator[Kind]:
    by_name = grouped(transports, lambda row: row.communicator)
    alike: dict[object, list[CommunicatorRow]] = {}
    for communicator in communicators:
        own = by_name.get(communicator.id, [])
        key = communicator.ranks, communicator.nodes, communicator.missing_ranks, communicator.candidates
        shape = tuple((row.scope, row.transport, row.pairs, row.channels_most, row.verdict) for row in own)
        alike.setdefault((key, shape), []).append(communicator)
    for first, *more in sorted(alike.values(), key=lambda each: (-(each[0].ranks or 0), -each[0].pairs)):
        yield first, by_name.get(first.id, []), len(more)


def _described(communicator: CommunicatorRow, more: int) -> str:
    name = communicator.id or either(communicator.candidates) or "without a name"
    ranks = "" if communicator.ranks is None else f": {counted(communicator.ranks, 'rank')}"
    nodes = "" if communicator.nodes is None else f" on {counted(communicator.nodes, 'node')}"
    missing = len(communicator.missing_ranks)
    lost = f", {missing} without a log" if missing else ""
    return f"communicator {name}{f' and {more} alike' if more else ''}{ranks}{nodes}{lost}"


def _columns(transports: Sequence[TransportRow], examples: int) -> list[Column]:
    """Some of the pairs go first where there is no room; without any, whole columns do."""
    spare = 0 if examples else 1
    columns = [
        Column("where", [_PLACES[row.scope] for row in transports], 2 * spare),
        Column("transport", [row.transport for row in transports]),
        Column("pairs", [str(row.pairs) for row in transports], right=True),
        Column(
            "channels", [_range(row.channels_least, row.channels_most) for row in transports], 3 * spare, right=True
        ),
        Column("host memory", [_WORDS[row.host_staged] for row in transports], spare),
        Column("verdict", [_VERDICTS.get(Verdict(row.verdict), row.verdict) for row in transports]),
    ]
    return columns + ([Column("who", [_who(row, examples) for row in transports])] if examples else [])


def _who(row: TransportRow, examples: int) -> str:
    shown = [f"{src}→{'switch' if src == dst else dst}" for src, dst in row.first[:examples]]
    return ", ".join((*shown, "...") if row.pairs > len(shown) else shown)


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


def _total(transports: Sequence[TransportRow]) -> str:
    counts = {verdict: sum(row.pairs for row in transports if row.verdict == verdict) for verdict in Verdict}
    staged = sum(row.pairs for row in transports if row.host_staged)
    unknown = f"; {counts[Verdict.ERROR]} not known" if counts[Verdict.ERROR] else ""
    total = counted(sum(counts.values()), "path")
    if not staged:
        return f"through host memory: 0 of {total}, as NCCL logged them{unknown}"
    by_design = f", {counts[Verdict.SKIP]} of them by design" if counts[Verdict.SKIP] else ""
    return f"through host memory: {staged} of {total}{by_design}{unknown}"


def _natural(name: str) -> tuple[int, str]:
    return len(name), name
