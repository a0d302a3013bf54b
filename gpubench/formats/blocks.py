"""A report as a page of blocks: facts, tables, grids, charts. Formats for pages say how a block looks."""

from collections.abc import Iterator, Sequence

from gpubench.formats.document import DocumentRun
from gpubench.formats.overlap_blocks import overlap_blocks
from gpubench.formats.sections import (
    MOST_COLUMNS,
    MOST_LINES,
    Grid,
    GridCell,
    Listing,
    gravest,
    link_kind,
    section_blocks,
    verdict_of,
    without_empty,
    word,
)
from gpubench.formats.text.p2p import copying_way, expected_lines, most_expected, series_title
from gpubench.model.facts.performance_settings import bearing_on_performance
from gpubench.model.results.curves import HOST, Chart, charts, compared_charts
from gpubench.model.results.report import (
    PAIRS_SECTION,
    ROWS_SECTION,
    CollectiveRow,
    Metadata,
    PairRow,
    Report,
)
from gpubench.model.results.rows.comparison import COMPARISON_SECTION, ComparisonRow
from gpubench.model.results.rows.overlap import OverlapRow
from gpubench.model.results.rows.scan import CELLS_SECTION, ScanCellRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.units import compress_names, format_percent, format_size, some_of
from gpubench.model.terms.verdict import Verdict, gravity

_MOST_MAPPED = 2048

Block = Listing | Grid | Chart


def facts(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """The circumstances that a reader needs to believe a number, as labels and words."""
    yield "command", " ".join(metadata.command)
    yield "began", metadata.started_at
    hosts = list(dict.fromkeys(metadata.hosts))
    yield ("host" if len(hosts) == 1 else f"{len(hosts)} hosts"), _hosts_named(hosts)
    if metadata.ranks:
        gpus = ", ".join(dict.fromkeys(rank.gpu for rank in metadata.ranks if rank.gpu))
        yield "ranks", f"{len(metadata.ranks)}" + (f": {gpus}" if gpus else "")
    if metadata.backend:
        yield "backend", metadata.backend
    if metadata.profile:
        yield "profile", " ".join(filter(None, (metadata.profile["name"], metadata.profile.get("note"))))
    if metadata.source:
        yield "source", metadata.source
    yield from metadata.libraries.items()
    bearing = bearing_on_performance(metadata.environment)
    others = {name: value for name, value in metadata.environment.items() if name not in bearing}
    for label, settings in (("bears on performance", bearing), ("other settings", others)):
        if settings:
            yield label, " ".join(f"{name}={value}" for name, value in settings.items())
    yield "gpubench", metadata.gpubench_version


def _hosts_named(hosts: Sequence[str]) -> str:
    """All hosts, in ranges; of very many names without numbers those that a page has room for."""
    ranges = compress_names(hosts).split(", ")
    return some_of(ranges, MOST_LINES)


def title(metadata: Metadata) -> str:
    """The subject, and that it was not measured where it was not."""
    return f"gpubench {metadata.subject}" + ("" if metadata.origin == "measured" else f" ({metadata.origin.upper()})")


def blocks(run: DocumentRun) -> Iterator[Block]:
    """The page, below header and findings."""
    yield from charts(run.rows)
    yield from compared_charts(run.report.rows(COMPARISON_SECTION, ComparisonRow))
    every = (*run.rows, *run.report.rows(ROWS_SECTION, CollectiveRow))
    collectives = [row for row in every if isinstance(row, CollectiveRow)]
    if collectives:
        yield _collective(collectives)
    pairs = [row for row in run.rows if isinstance(row, PairRow)]
    if pairs:
        yield from _copies(pairs)
    yield from overlap_blocks([row for row in run.rows if isinstance(row, OverlapRow)])
    yield from _map(run.report)
    yield from section_blocks(run.report)


def copies_of_report(report: Report) -> Iterator[Block]:
    """The copies that a report of one node holds in a section of its own, as a check does; nothing of many nodes."""
    rows = [row for row in report.rows(PAIRS_SECTION, PairRow) if row.bandwidth_gb_s is not None]
    if rows and len({row.source_node for row in rows}) == 1:
        yield from _copies(rows)


def _map(report: Report) -> Iterator[Grid]:
    """The rails of all nodes of a scan; of very many nodes those of leaves where something is wrong."""
    cells = report.rows(CELLS_SECTION, ScanCellRow)
    if not cells:
        return
    nodes = len({row.node for row in cells})
    wrong = {row.leaf or row.node for row in cells if row.verdict != Verdict.PASS}
    chosen = cells if nodes <= _MOST_MAPPED else [row for row in cells if (row.leaf or row.node) in wrong]
    lines: dict[str, dict[str, GridCell]] = {}
    for row in chosen:
        share = None if row.score_percent is None else min(1.0, max(0.0, row.score_percent / 100))
        shown = "–" if row.score_percent is None else f"{row.score_percent:.0f}"
        name = row.node if row.leaf is None else f"{row.node} ({row.leaf})"
        lines.setdefault(name, {})[row.subject] = GridCell(shown, share, verdict_of(row.verdict))
    left = "" if len(lines) == nodes else f", of the {len(lines)} nodes on leaves where something is wrong"
    columns = list(dict.fromkeys(row.subject for row in cells))
    yield Grid(f"Nodes × rails, % of what the others deliver{left}", "node", columns, lines)


def _collective(rows: Sequence[CollectiveRow]) -> Listing:
    heads = ("size", "type", "placement", "time µs", "algbw GB/s", "busbw GB/s", "of expected", "expected GB/s",
             "of limit", "transport", "wrong", "verdict")  # fmt: skip
    lines = [
        (
            *(format_size(row.size_bytes), " ".join(filter(None, (row.dtype, row.op)))),
            *(row.placement.replace("_", " "), word(row.time_us), word(row.algbw_gb_s), word(row.busbw_gb_s)),
            *(format_percent(row.expected_percent), word(row.expected_gb_s), format_percent(row.limit_percent)),
            *(row.transport or "", word(row.wrong), row.verdict or Verdict.SKIP.value),
        )
        for row in rows
    ]
    return without_empty(Listing(_of(rows, "Every row"), heads, lines, [verdict_of(row.verdict) for row in rows]))


def _of(rows: Sequence[CollectiveRow] | Sequence[PairRow], what: str) -> str:
    """The title of rows, with where what is expected of them is from."""
    sources = ", ".join(dict.fromkeys(row.expected_source for row in rows if row.expected_source))
    return f"{what}; expected: {sources}" if sources else what


def _copies(rows: Sequence[PairRow]) -> Iterator[Block]:
    """A grid for every way of copying; host memory, and pairs in more than one size, as lines."""
    between = [row for row in rows if HOST not in (row.source, row.destination)]
    series = grouped(between, lambda row: (row.size_bytes, row.engine, row.direction, row.peer, row.scope))
    ways = {key[1:] for key in series}
    if len(series) <= 2 * len(ways):
        yield from (_grid_of(members) for members in series.values() if len(members) > 1)
        listed = [row for row in rows if HOST in (row.source, row.destination)]
        listed += [row for members in series.values() if len(members) == 1 for row in members]
    else:
        listed = list(rows)
    if listed:
        shown, more = gravest(listed, MOST_LINES, "pairs")
        heads = ("from", "to", "size", "how", "GB/s", "µs", "of expected", "of limit", "path", "verdict", "note")
        lines = [
            (
                *(row.source, row.destination, format_size(row.size_bytes or 0), copying_way(row)),
                *(word(row.bandwidth_gb_s), word(row.latency_us), format_percent(row.expected_percent)),
                *(
                    format_percent(row.limit_percent),
                    row.path_class or "",
                    row.verdict or Verdict.SKIP.value,
                    row.note or "",
                ),
            )
            for row in shown
        ]
        verdicts = [verdict_of(row.verdict) for row in shown]
        yield without_empty(Listing(_of(listed, "Copies"), heads, lines, verdicts, more))


def _grid_of(rows: Sequence[PairRow]) -> Grid:
    is_latency = (rows[0].size_bytes or 0) < 64 * 2**10
    values = {(row.source, row.destination): row.latency_us if is_latency else row.bandwidth_gb_s for row in rows}
    lines: dict[str, dict[str, GridCell]] = {}
    for members in grouped(rows, lambda row: link_kind(row.path_class or "")).values():
        known = [value for row in members if (value := values[row.source, row.destination])]
        best = most_expected(members) or (min if is_latency else max)(known, default=0.0)
        for row in members:
            value = values[row.source, row.destination]
            share = None if not value or not best else best / value if is_latency else value / best
            cell = GridCell(word(value) or "ERROR", share and min(share, 1.0), verdict_of(row.verdict))
            lines.setdefault(row.source, {})[row.destination] = cell
    ordered = list(rows)
    if len(lines) > MOST_COLUMNS:  # what does not pass has its place on the page
        ordered.sort(key=lambda row: gravity(row.verdict or Verdict.SKIP))
    names = list(dict.fromkeys(name for row in ordered for name in (row.source, row.destination)))
    rest = f"{MOST_COLUMNS} of {len(names)} shown, all in --format csv --section pairs"
    cut = rest if len(names) > MOST_COLUMNS else ""
    way = "; ".join(filter(None, (series_title(rows[0]), *expected_lines(rows), cut)))
    names = names[:MOST_COLUMNS]
    lines = {name: lines[name] for name in names if name in lines} if cut else lines
    return Grid(way, "µs" if is_latency else "GB/s", names, lines)


def outcome(run: DocumentRun) -> str:
    """The verdict in a sentence."""
    return run.report.sentence or f"{run.report.verdict}"
