"""A report as a page of blocks: facts, tables, grids, charts, for formats that are pages."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from gpubench.formats.json import DocumentRun
from gpubench.formats.lines import Column
from gpubench.formats.table import text_module
from gpubench.formats.text.collective import collective_columns
from gpubench.formats.text.overlap import overlap_columns
from gpubench.formats.text.p2p import copy_columns, copying_way, expected_lines, most_expected, series_title
from gpubench.model.facts.environment import bearing_on_performance
from gpubench.model.results.compare import HOST, Chart, ComparisonRow, charts, compared_charts
from gpubench.model.results.overlap import OverlapRow, overlap_charts
from gpubench.model.results.report import (
    CollectiveRow,
    Matrix,
    Metadata,
    OnPage,
    PairRow,
    Record,
    Report,
    Row,
    Table,
)
from gpubench.model.results.result_file import MATRICES, TABLES
from gpubench.model.results.scan import ScanCellRow
from gpubench.model.terms.overlap import cap_name
from gpubench.model.terms.units import compress_names, format_memory, format_size, grouped, some_of
from gpubench.model.terms.verdict import WORST_FIRST, Verdict, gravity
from gpubench.records import dataclass

R = TypeVar("R")

MOST_LINES = OnPage().most
MOST_COLUMNS = 64
_NOT_JUDGED = "not judged"
_EMPTY = ("", "-")
_NVLINK = re.compile(r"NV\d+", re.ASCII)

_BYTES = "_bytes"
_SPELLINGS = (
    "CPU",
    "CUDA",
    "GPUDirect",
    "MB",
    "GPU",
    "GPUs",
    "NIC",
    "NICs",
    "NUMA",
    "NVLink",
    "NVLinks",
    "PCIe",
    "RDMA",
)
_SPELLING = {each.lower(): each for each in _SPELLINGS}


@dataclass(frozen=True, slots=True)
class Listing:
    """A table of words. `verdicts` has one a line, None where nothing was judged; `left_out` counts further lines.

    Where it `folds`, lines that pass are of interest only to who looks for them.
    """

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    verdicts: Sequence[Verdict | None]
    left_out: str = ""
    folds: bool = False


@dataclass(frozen=True, slots=True)
class GridCell:
    """A cell: its words, how near it is to what is expected or to the best over the same kind of link (0 to 1, None
    where it is no number), its verdict. Cells that are only compared with each other are not known to be good.
    """

    text: str
    share: float | None = None
    verdict: Verdict | None = None
    is_relative: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix between devices."""

    title: str
    corner: str
    columns: Sequence[str]
    lines: Mapping[str, Mapping[str, GridCell]]


def _link_kind(path_class: str) -> str:
    """What cells are comparable: any number of NVLinks is one kind of link, every other path class is its own."""
    return "NVLink" if _NVLINK.fullmatch(path_class) else path_class


def _kinds(report: Report) -> dict[tuple[str, str], str]:
    """The kind of link between two devices of the matrices, as far as a matrix of paths says."""
    paths = report.sections.get("matrix")
    cells = paths.cells if isinstance(paths, Matrix) else {}
    kind_of = {
        (row, column): f"{_device_kind(row)} {_device_kind(column)} {_link_kind(str(path))}"
        for row, columns in cells.items()
        for column, path in columns.items()
    }
    return {ends: " ".join(sorted(kind.split(" "))) for ends, kind in kind_of.items()}


def _device_kind(name: str) -> str:
    return "GPU" if name.startswith("GPU") else "NIC"


def _section_blocks(metadata: Metadata, report: Report) -> Iterator[Listing | Grid]:
    kinds = _kinds(report)
    columns_of = getattr(text_module(metadata), "COLUMNS", {})
    for name, section in report.sections.items():
        kind = TABLES.get(name, Record)
        on_page: OnPage = MATRICES.get(name, getattr(kind, "on_page", OnPage()))
        if on_page.is_hidden:
            continue
        if isinstance(section, Matrix):
            if section.cells:
                yield _matrix(name, section, kinds)
            continue
        rows, more = gravest(section.rows(), on_page.most, name, sort=on_page.folds)
        if rows:
            make = columns_of.get(kind, partial(_plain_columns, section, on_page.columns))
            yield _listing(on_page.title or _title_of(name), make(rows), rows, more, folds=on_page.folds)


def _plain_columns(section: Table, names: Sequence[str], rows: Sequence[Row]) -> list[Column]:
    """The values of rows in words: of these columns, else of all."""
    records = [row.to_record() for row in rows]
    columns = [name for name in names or section.columns if name in section.columns]
    return [Column(_words(name), [_value_words(name, record[name]) for record in records]) for name in columns]


def _value_words(column: str, value: Any) -> str:
    if not column.endswith((_BYTES, "bytes")) or not isinstance(value, int):
        return spelled(value)
    return format_size(value) if column == "size_bytes" else format_memory(value)


def _words(name: str) -> str:
    """A column or a section as a person would write it: units as units, abbreviations as they are used."""
    for ending, unit in (("_gbit_s", " Gbit/s"), ("_gb_s", " GB/s"), ("_us", " µs")):
        name = name.replace(ending, unit)
    text = name.removesuffix(_BYTES).replace("_", " ")
    return " ".join(_SPELLING.get(word, word) for word in text.split(" "))


def _matrix(name: str, section: Matrix, kinds: Mapping[tuple[str, str], str]) -> Grid:
    known = dict.fromkeys(column for row in section.cells.values() for column in row)
    columns = [
        *(name for name in section.cells if name in known),
        *(each for each in known if each not in section.cells),
    ]
    rest = f"; {MOST_COLUMNS} of {len(columns)} shown, all in --format csv --section {name}"
    more = rest if len(columns) > MOST_COLUMNS else ""
    columns = columns[:MOST_COLUMNS]
    best: dict[str, float] = {}
    for row, cells in section.cells.items():
        for column, value in cells.items():
            if isinstance(value, float) and name != "ratios":  # no ratio is good or bad
                kind = kinds.get((row, column), column)
                best[kind] = max(best.get(kind, 0.0), value)
    lines = {
        row: {
            column: GridCell(
                _cell_words(cells[column]),
                _share(cells[column], best.get(kinds.get((row, column), column), 0.0)),
                is_relative=True,
            )
            for column in columns
            if column in cells
        }
        for row, cells in islice(section.cells.items(), MOST_COLUMNS)
    }
    return Grid(_title_of(name) + more, "", columns, lines)


def _title_of(section: str) -> str:
    words = _words(section)
    return words[0].upper() + words[1:]


def _cell_words(value: object) -> str:
    if isinstance(value, Mapping):
        return " / ".join(spelled(each) or "?" for key, each in value.items() if key != "reason")
    return spelled(value)


def _share(value: object, best: float) -> float | None:
    return value / best if isinstance(value, float) and best else None


def spelled(value: Any) -> str:
    """A value as a person reads it: four digits, nothing for what is unknown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return some_of([spelled(each) for each in value], 8)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {spelled(each)}" for key, each in value.items())
    return str(value)


def verdict_of(text: str | None) -> Verdict | None:
    """A verdict by its word."""
    return None if text is None else Verdict(text)


def gravest(rows: Iterable[R], most: int, section: str, *, sort: bool = False) -> tuple[list[R], str]:
    """The rows that a table has room for, and in words how many it leaves out, by verdict, and where those are.

    Where it leaves some out, or has to `sort`, the gravest verdict comes first; rows that fare alike keep their order.
    """
    found = list(rows)
    if sort or len(found) > most:
        found.sort(key=lambda row: len(WORST_FIRST) if (fared := _verdict(row)) is None else gravity(fared))
    cut = Counter(_verdict(row) or _NOT_JUDGED for row in found[most:])
    if not cut:
        return found, ""
    fared = ", ".join(f"{many} {each}" for each, many in cut.items())
    by_verdict = "" if cut.keys() == {_NOT_JUDGED} else f" ({fared})"
    return found[:most], f"{cut.total()} more{by_verdict} in --format csv --section {section}"


def _verdict(row: object) -> str | None:
    found = getattr(row, "verdict", None)
    return None if found is None else str(found)


def _listing(
    title: str, columns: Sequence[Column], rows: Sequence[Any], more: str = "", *, folds: bool = False
) -> Listing:
    """The columns in which anything stands."""
    kept = [column for column in columns if any(cell not in _EMPTY for cell in column.cells)]
    lines = list(zip(*(column.cells for column in kept), strict=True))
    verdicts = [verdict_of(getattr(row, "verdict", None)) for row in rows]
    return Listing(title, [column.head for column in kept], lines, verdicts, more, folds)


def _overlap_blocks(rows: Sequence[OverlapRow]) -> Iterator[Listing | Grid | Chart]:
    """Curves; a grid of steps for every partner, by size and cap; all rows."""
    yield from overlap_charts(rows)
    for partner, members in grouped(rows, lambda row: row.partner).items():
        lines: dict[str, dict[str, GridCell]] = {}
        for size, of_size in grouped(members, lambda row: row.size_bytes).items():
            best = min(row.step_us for row in of_size)
            lines[format_size(size)] = {
                cap_name(row.ctas): GridCell(
                    spelled(row.step_us), best / row.step_us, verdict_of(row.verdict), is_relative=True
                )
                for row in of_size
            }
        columns = list(dict.fromkeys(cap_name(row.ctas) for row in members))
        yield Grid(f"Step, by size and cap, µs, beside {partner}", "size", columns, lines)
    if rows:
        yield _listing("Every row", overlap_columns(rows), rows)


_MOST_MAPPED = 2048

Block = Listing | Grid | Chart


def facts(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """The circumstances that a reader needs to believe a number, as labels and words."""
    yield "command", " ".join(metadata.command)
    yield "began", metadata.started_at
    hosts = list(dict.fromkeys(metadata.hosts))
    ranges = compress_names(hosts).split(", ")
    yield ("host" if len(hosts) == 1 else f"{len(hosts)} hosts"), some_of(ranges, MOST_LINES)
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
    for label, settings in (("settings that affect performance", bearing), ("other settings", others)):
        if settings:
            yield label, " ".join(f"{name}={value}" for name, value in settings.items())
    yield "gpubench", metadata.gpubench_version


def title(metadata: Metadata) -> str:
    """The subject, and that it was not measured where it was not."""
    return f"gpubench {metadata.subject}" + ("" if metadata.origin == "measured" else f" ({metadata.origin.upper()})")


def blocks(run: DocumentRun) -> Iterator[Block]:
    """The page, below header and findings."""
    yield from charts(run.rows)
    yield from compared_charts(run.report.rows(ComparisonRow))
    every = (*run.rows, *run.report.rows(CollectiveRow))
    collectives = [row for row in every if isinstance(row, CollectiveRow)]
    if collectives:
        columns = collective_columns(run.metadata, collectives)
        yield _listing(_title(collectives, "Every row"), columns, collectives)
    pairs = [row for row in run.rows if isinstance(row, PairRow)]
    if pairs:
        gpus = run.metadata.options.get("gpus")
        yield from _copy_blocks(pairs, gpus if isinstance(gpus, Mapping) else ())
    yield from _overlap_blocks([row for row in run.rows if isinstance(row, OverlapRow)])
    yield from _map(run.report)
    yield from _section_blocks(run.metadata, run.report)


def copies_of_report(report: Report) -> Iterator[Block]:
    """The copies that a report of one node holds in a section of its own, as a check does; nothing of many nodes."""
    table = report.sections.get(PairRow.section)
    if isinstance(table, Table) and table.parts is not None and len(list(islice(table.parts(), 2))) > 1:
        return
    rows = [row for row in report.rows(PairRow) if row.bandwidth_gb_s is not None]
    if rows and len({row.source_node for row in rows}) == 1:
        yield from _copy_blocks(rows)


def _map(report: Report) -> Iterator[Grid]:
    """The rails of all nodes of a scan; of very many nodes those of leaves where something is wrong."""
    cells = report.rows(ScanCellRow)
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
    lines = dict(sorted(lines.items(), key=lambda line: min(map(_badness, line[1].values()))))
    yield Grid(f"Nodes × rails, % of what the others deliver, bad nodes first{left}", "node", columns, lines)


def _badness(cell: GridCell) -> tuple[int, float]:
    return gravity(cell.verdict or Verdict.SKIP), -1.0 if cell.share is None else cell.share


def _title(rows: Sequence[CollectiveRow] | Sequence[PairRow], what: str) -> str:
    sources = ", ".join(dict.fromkeys(row.expected_source for row in rows if row.expected_source))
    return f"{what}; expected: {sources}" if sources else what


def _copy_blocks(rows: Sequence[PairRow], gpus: Collection[str] = ()) -> Iterator[Block]:
    """Matrices; a list of the copies where only some pairs of these GPUs were measured, or many sizes."""
    between = [row for row in rows if HOST not in (row.source, row.destination)]
    series = grouped(between, lambda row: (row.size_bytes, row.engine, row.direction, row.peer, row.scope))
    ways = {key[1:] for key in series}
    pairs = {(row.source, row.destination) for row in between}
    if len(series) <= 2 * len(ways) and len(pairs) >= len(gpus) * (len(gpus) - 1):
        grids = sorted((members for members in series.values() if len(members) > 1), key=_tells_less)
        yield from map(_grid_of, grids)
        listed = [row for row in rows if HOST in (row.source, row.destination)]
        listed += [row for members in series.values() if len(members) == 1 for row in members]
    else:
        listed = list(rows)
    if listed:
        shown, more = gravest(listed, MOST_LINES, "pairs")
        pair, *columns = copy_columns(shown)
        columns = [pair, Column("how", [copying_way(row) for row in shown]), *columns]
        yield _listing(_title(listed, "Copies"), columns, shown, more)


def _four_digits(value: float | None) -> str:
    """36.90 next to 36.91: numbers of a matrix keep their zeros."""
    if value is None or value >= _DIGITS:
        return spelled(value)
    return f"{value:#.4g}".rstrip(".")


_DIGITS = 1000.0


def _tells_less(rows: Sequence[PairRow]) -> tuple[bool, bool]:
    """Order matrices: direct copies first, then baselines with peer access off, then what could not be measured."""
    return all(row.bandwidth_gb_s is None for row in rows), rows[0].peer == "off"


def _grid_of(rows: Sequence[PairRow]) -> Grid:
    is_latency = (rows[0].size_bytes or 0) < 64 * 2**10
    values = {(row.source, row.destination): row.latency_us if is_latency else row.bandwidth_gb_s for row in rows}
    lines: dict[str, dict[str, GridCell]] = {}
    for members in grouped(rows, lambda row: _link_kind(row.path_class or "")).values():
        known = [value for row in members if (value := values[row.source, row.destination])]
        healthy = max((row.healthy_gb_s or 0.0 for row in members), default=0.0)
        expected = most_expected(members) if is_latency else healthy
        best = expected or (min if is_latency else max)(known, default=0.0)
        for row in members:
            value = values[row.source, row.destination]
            share = None if not value or not best else best / value if is_latency else value / best
            if row.verdict == Verdict.PASS and row.expected_percent is not None:
                share = max(share or 0.0, row.expected_percent / 100)  # of one NVLink where others have two
            if row.peer == "off" and row.verdict is None:
                share = None  # a baseline: through host memory on purpose
            shown = _four_digits(value) or ("–" if row.verdict == Verdict.SKIP else "ERROR")
            cell = GridCell(shown, share and min(share, 1.0), verdict_of(row.verdict), not expected)
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
