"""Convert a report into blocks (tables, grids and charts), from which the Markdown and HTML writers build a page."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpubench.formats.json import DocumentRun
from gpubench.formats.layout import Column, Grid, GridCell, field_text, four_digits, number_texts
from gpubench.formats.table import text_module
from gpubench.formats.text import collective, kv, overlap, p2p
from gpubench.model.facts.environment import performance_variables
from gpubench.model.results import result_file
from gpubench.model.results.compare import HOST, Chart, ComparisonRow, charts, compared_charts
from gpubench.model.results.ending import is_brief
from gpubench.model.results.kv import KvRow
from gpubench.model.results.overlap import OverlapRow, overlap_charts
from gpubench.model.results.report import CollectiveRow, Matrix, Metadata, OnPage, PairRow, Record, Report, Table
from gpubench.model.results.scaling import ScalingRow, drop_smaller_runs, scaling_charts
from gpubench.model.results.scan import ScanCellRow, ScanPartRow
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.overlap import describe_cap
from gpubench.model.terms.units import compress_names, format_size, group_by, shorten
from gpubench.model.terms.verdict import WORST_FIRST, Verdict, gravity

R = TypeVar("R")

MOST_LINES = OnPage().most
MOST_COLUMNS = 64
_MOST_MAPPED = 2048
_NOT_JUDGED = "not judged"
_HEADS = {"nvlink": "all NVLinks", "pcie": "PCIe"}
_UNITS = {"_gbit_s": " Gbit/s", "_gb_s": " GB/s", "_us": " µs"}
_ABBREVIATIONS = "CPU KV CUDA GPUDirect MB GPU GPUs NIC NICs NUMA NVLink NVLinks PCIe RDMA"
_SPELLING = {word.lower(): word for word in _ABBREVIATIONS.split(" ")}


class Listing(Struct, frozen=True):
    """A table for a page, with one verdict per line, or None for a line that was not judged.

    `note` follows the title. `left_out` is a remark about the rows that the table omits. If `folds` is set, the HTML
    page hides lines that pass until the reader expands them.
    """

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    verdicts: Sequence[Verdict | None]
    left_out: str = ""
    folds: bool = False
    note: str = ""


Block = Listing | Grid | Chart


def facts(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each fact about the run: command, hosts, ranks, libraries and settings."""
    yield "command", " ".join(metadata.command)
    yield "began", metadata.started_at
    hosts = list(dict.fromkeys(metadata.hosts))
    ranges = compress_names(hosts).split(", ")
    yield ("host" if len(hosts) == 1 else f"{len(hosts)} hosts"), shorten(ranges, MOST_LINES)
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
    bearing = performance_variables(metadata.environment)
    others = {name: value for name, value in metadata.environment.items() if name not in bearing}
    for label, settings in (("settings that affect performance", bearing), ("other settings", others)):
        if settings:
            yield label, " ".join(f"{name}={value}" for name, value in settings.items())
    yield "gpubench", metadata.gpubench_version


def title(metadata: Metadata) -> str:
    """Return the page title: the command as typed, and the origin unless the results were measured."""
    name = "gpubench" if is_brief(metadata.options) else f"gpubench {metadata.subject}"
    return name + ("" if metadata.origin == "measured" else f" ({metadata.origin.upper()})")


def outcome(run: DocumentRun) -> str:
    return run.report.sentence or f"{run.report.verdict}"


def blocks(run: DocumentRun) -> Iterator[Block]:
    """Yield the charts, tables and grids that follow the header and the findings on a page."""
    scaling = run.report.rows(ScalingRow)
    drawn = drop_smaller_runs(run.rows, scaling)
    yield from scaling_charts(scaling)
    yield from charts(drawn)
    yield from compared_charts(run.report.rows(ComparisonRow))
    collectives = [row for row in (*run.rows, *run.report.rows(CollectiveRow)) if isinstance(row, CollectiveRow)]
    if collectives:
        columns = collective.page_columns(run.metadata)
        names = ", ".join(dict.fromkeys(row.collective for row in collectives))
        yield _listing(f"Every row of {names}", columns, collectives, note=_expected_note(collectives))
    pairs = [row for row in run.rows if isinstance(row, PairRow)]
    if pairs:
        gpus = run.metadata.options.get("gpus")
        yield from _copy_blocks(pairs, gpus if isinstance(gpus, Mapping) else ())
    transfers = [row for row in run.rows if isinstance(row, KvRow)]
    if transfers:
        yield from _transfer_blocks(transfers)
    yield from _overlap_blocks([row for row in drawn if isinstance(row, OverlapRow)])
    steps = [row for row in run.rows if isinstance(row, OverlapRow)]
    if steps:
        yield _listing("Every step", overlap.page_columns(run.metadata), steps)
    yield from _map(run.report)
    yield from _section_blocks(run.metadata, run.report)


def copies_of_report(report: Report) -> Iterator[Block]:
    """Yield the copy matrices and tables for the section `pairs` of a report, if its rows are from a single node."""
    table = report.sections.get(PairRow.section)
    if isinstance(table, Table) and table.parts is not None and len(list(islice(table.parts(), 2))) > 1:
        return
    rows = [row for row in report.rows(PairRow) if row.bandwidth_gb_s is not None]
    if rows and len({row.source_node for row in rows}) == 1:
        yield from _copy_blocks(rows)


def gravest(rows: Iterable[R], most: int, section: str, *, sort: bool = False) -> tuple[list[R], str]:
    """Return the first `most` rows, and a remark with the number of omitted rows and the format that lists them.

    If rows are omitted, or if `sort` is set, sort rows by verdict, worst first. The sort is stable.
    """
    found = list(rows)
    if sort or len(found) > most:
        found.sort(key=lambda row: len(WORST_FIRST) if (verdict := _verdict(row)) is None else gravity(verdict))
    cut = Counter(_verdict(row) or _NOT_JUDGED for row in found[most:])
    if not cut:
        return found, ""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in cut.items())
    verdicts = "" if cut.keys() == {_NOT_JUDGED} else f" ({counts})"
    return found[:most], f"{cut.total()} more{verdicts} in --format csv --section {section}"


def _verdict(row: object) -> Verdict | None:
    found = getattr(row, "verdict", None)
    return None if found is None else Verdict(found)


def _listing(
    title: str, columns: Sequence[Column], rows: Sequence[Any], more: str = "", *, folds: bool = False, note: str = ""
) -> Listing:
    """Return a table without the columns that are empty in every row."""
    texts = {column: _column_texts(column, rows) for column in columns}
    kept = {column: cells for column, cells in texts.items() if not {"", "-", "?"}.issuperset(cells)}
    heads = [column.on_page or column.head for column in kept]
    return Listing(title, heads, list(zip(*kept.values(), strict=True)), [*map(_verdict, rows)], more, folds, note)


def _column_texts(column: Column, rows: Sequence[Any]) -> list[str]:
    values = [getattr(row, column.cell) if isinstance(column.cell, str) else None for row in rows]
    numbers = number_texts([value for value in values if isinstance(value, float)])
    return [
        numbers[value] if isinstance(value, float) else column.text(row)
        for value, row in zip(values, rows, strict=True)
    ]


def _section_blocks(metadata: Metadata, report: Report) -> Iterator[Listing | Grid]:
    shared_columns = getattr(text_module(metadata), "COLUMNS", {})
    for name, section in report.sections.items():
        kind = result_file.TABLES.get(name, Record)
        on_page: OnPage = result_file.MATRICES.get(name, getattr(kind, "on_page", OnPage()))
        if on_page.is_hidden:
            continue
        if isinstance(section, Matrix):
            if section.cells:
                yield _matrix(name, section, on_page.title)
            continue
        rows, more = gravest(section.rows(), on_page.most, name, sort=on_page.folds)
        if rows:
            names = [
                name for name in on_page.columns or section.columns if name in section.columns and name != "origin"
            ]
            columns = shared_columns.get(kind) or [Column(_words(column), column) for column in names]
            yield _listing(on_page.title or capitalised(_words(name)), columns, rows, more, folds=on_page.folds)


def _words(name: str) -> str:
    """Convert the name of a column or section to words, for example 'pcie_gb_s' to 'PCIe GB/s'."""
    for ending, unit in _UNITS.items():
        name = name.replace(ending, unit)
    return " ".join(_SPELLING.get(word, word) for word in name.removesuffix("_bytes").replace("_", " ").split(" "))


def capitalised(words: str) -> str:
    return words[:1].upper() + words[1:]


def _matrix(name: str, section: Matrix, title: str) -> Grid:
    known = dict.fromkeys(column for row in section.cells.values() for column in row)
    columns = [row for row in section.cells if row in known]
    columns += [column for column in known if column not in section.cells]
    note = ""
    if len(columns) > MOST_COLUMNS:
        note = f"{MOST_COLUMNS} of {len(columns)} shown, all in --format csv --section {name}"
        columns = columns[:MOST_COLUMNS]
    rows = dict(islice(section.cells.items(), MOST_COLUMNS))
    lines: dict[str, dict[str, GridCell]] = {row: {} for row in rows}
    for column in columns:
        values = {row: cells[column] for row, cells in rows.items() if column in cells}
        numbers = number_texts([value for value in values.values() if isinstance(value, float)])
        for row, value in values.items():
            words = numbers[value] if isinstance(value, float) else _cell_words(value)
            lines[row][_HEADS.get(column, column)] = GridCell(words)
    return Grid(title, "from", [_HEADS.get(column, column) for column in columns], lines, note)


def _cell_words(value: object) -> str:
    if isinstance(value, Mapping):
        return " / ".join(field_text("", part) or "?" for key, part in value.items() if key != "reason")
    return field_text("", value)


def _overlap_blocks(rows: Sequence[OverlapRow]) -> Iterator[Block]:
    """Yield curves, and one grid of step times (size × CTA limit) per computation."""
    yield from overlap_charts(rows)
    for partner, members in group_by(rows, lambda row: row.partner).items():
        lines: dict[str, dict[str, GridCell]] = {}
        for row in members:
            cell = GridCell(field_text("", row.step_us), verdict=_verdict(row))
            lines.setdefault(format_size(row.size_bytes), {})[describe_cap(row.ctas)] = cell
        columns = list(dict.fromkeys(describe_cap(row.ctas) for row in members))
        yield Grid(f"Step with {partner}, µs, by size and limit on CTAs", "size", columns, lines)


def _transfer_blocks(rows: Sequence[KvRow]) -> Iterator[Block]:
    """Yield a matrix of the pairs of GPUs per kind of memory, then every transfer."""
    for memory, pairs in group_by(kv.pairs(rows), lambda pair: pair.first.memory).items():
        lines: dict[str, dict[str, GridCell]] = {}
        for pair in pairs:
            percent, gb_s = pair.slowest.expected_percent, pair.slowest.bandwidth_gb_s
            share = None if percent is None else min(percent / 100, 1.0)
            words = "ERROR" if gb_s is None else four_digits(gb_s)
            lines.setdefault(pair.first.source, {})[pair.first.destination] = GridCell(words, share, pair.verdict)
        names = list(dict.fromkeys(name for pair in pairs for name in (pair.first.source, pair.first.destination)))
        paths = ", ".join(dict.fromkeys(kv.describe_path(pair.slowest) for pair in pairs))
        note = f"The slower of write and read, compared with a plain copy. Path: {paths}."
        yield Grid(f"{capitalised(kv.pairs_title(pairs))}, {memory}", "GB/s", names, lines, note)
    shown, more = gravest(rows, MOST_LINES, KvRow.section)
    yield _listing("Every transfer", kv.COLUMNS[KvRow], shown, more, folds=True)


def _map(report: Report) -> Iterator[Grid]:
    """Yield the grid of nodes and rails of a scan. A large scan shows only leaves that have a bad node."""
    cells = report.rows(ScanCellRow)
    if not cells:
        return
    nodes = len({row.node for row in cells})
    bad = {node for row in report.rows(ScanPartRow) for node in row.nodes if len(row.nodes) == 1}
    wrong = {row.leaf or row.node for row in cells if row.verdict != Verdict.PASS or row.node in bad}
    chosen = cells if nodes <= _MOST_MAPPED else [row for row in cells if (row.leaf or row.node) in wrong]
    lines: dict[str, dict[str, GridCell]] = {}
    for row in chosen:
        share = None if row.score_percent is None else min(1.0, max(0.0, row.score_percent / 100))
        shown = "–" if row.score_percent is None else f"{row.score_percent:.0f}"
        name = f"{row.node}{' ✗' if row.node in bad else ''}" + ("" if row.leaf is None else f" ({row.leaf})")
        lines.setdefault(name, {})[row.subject] = GridCell(shown, share, _verdict(row))
    left = "" if len(lines) == nodes else f" Only the {len(lines)} nodes on leaves where something is wrong."
    columns = list(dict.fromkeys(row.subject for row in cells))

    def worst(line: tuple[str, dict[str, GridCell]]) -> tuple[bool, int, float]:
        return min(
            ("✗" not in line[0], gravity(cell.verdict or Verdict.SKIP), -1.0 if cell.share is None else cell.share)
            for cell in line[1].values()
        )

    lines = dict(sorted(lines.items(), key=worst))
    note = f"Percent of what the other nodes deliver, bad nodes (✗) and slow rails first.{left}"
    yield Grid("Nodes and rails", "node", columns, lines, note)


def _expected_note(rows: Sequence[CollectiveRow] | Sequence[PairRow]) -> str:
    sources = ", ".join(dict.fromkeys(row.expected_source for row in rows if row.expected_source))
    return f"Expected: {sources}." if sources else ""


def _copy_blocks(rows: Sequence[PairRow], gpus: Collection[str] = ()) -> Iterator[Block]:
    """Yield one matrix per kind of copy. If some pairs of `gpus` are missing, or there are many sizes, yield a
    table.
    """
    between = [row for row in rows if HOST not in (row.source, row.destination)]
    series = group_by(between, lambda row: (row.size_bytes, row.engine, row.direction, row.peer, row.scope))
    ways = {key[1:] for key in series}
    pairs = {(row.source, row.destination) for row in between}
    if len(series) <= 2 * len(ways) and len(pairs) >= len(gpus) * (len(gpus) - 1):
        # Show direct copies first, then baselines with peer access off, then copies that could not be measured.
        grids = [members for members in series.values() if len(members) > 1]
        grids.sort(key=lambda rows: (all(row.bandwidth_gb_s is None for row in rows), rows[0].peer == "off"))
        yield from map(_copy_grid, grids)
        listed = [row for row in rows if HOST in (row.source, row.destination)]
        hosted = [row for row in listed if row.engine == "ce" and HostMemory.parse_note(row.note)]
        if len({row.size_bytes for row in hosted}) == 1:
            yield _host_grid(hosted)
            listed = [row for row in listed if row not in hosted]
        listed += [row for members in series.values() if len(members) == 1 for row in members]
    else:
        listed = list(rows)
    if listed:
        shown, more = gravest(listed, MOST_LINES, "pairs")
        yield _listing(
            "Further copies" if len(listed) < len(rows) else "Copies",
            p2p.copy_columns(shown),
            shown,
            more,
            note=_expected_note(listed),
        )


def _copy_words(row: PairRow) -> str:
    value = row.latency_us if p2p.is_timed(row) else row.bandwidth_gb_s
    return four_digits(value) if value is not None else "–" if row.verdict == Verdict.SKIP else "ERROR"


def _host_grid(rows: Sequence[PairRow]) -> Grid:
    """Return the bandwidth of each GPU to and from each kind of host memory."""
    named = []
    for row in rows:
        gpu, way = (row.destination, "to") if row.source == HOST else (row.source, "from")
        named.append(replace(row, source=gpu, destination=f"{way} GPU, {HostMemory.parse_note(row.note)}"))
    columns = list(dict.fromkeys(row.destination for row in named))
    title = f"Copies with host memory, {format_size(rows[0].size_bytes or 0)}"
    return Grid(title, "GB/s", columns, p2p.copy_cells(named, _copy_words), p2p.page_note(rows))


def _copy_grid(rows: Sequence[PairRow]) -> Grid:
    lines = p2p.copy_cells(rows, _copy_words)
    ordered = list(rows)
    if len(lines) > MOST_COLUMNS:  # Prefer pairs that do not pass
        ordered.sort(key=lambda row: gravity(row.verdict or Verdict.SKIP))
    names = list(dict.fromkeys(name for row in ordered for name in (row.source, row.destination)))
    note = p2p.page_note(rows)
    if len(names) > MOST_COLUMNS:
        note += f" {MOST_COLUMNS} of {len(names)} shown, all in --format csv --section pairs."
        names = names[:MOST_COLUMNS]
        lines = {name: lines[name] for name in names if name in lines}
    return Grid(capitalised(p2p.page_title(rows[0])), "µs" if p2p.is_timed(rows[0]) else "GB/s", names, lines, note)
