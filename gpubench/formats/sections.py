"""Sections of a report as tables of words and grids of cells, for formats that are pages."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from gpubench.model.results.report import OVERLAP_SECTION, Matrix, Report, Table
from gpubench.model.results.rows.checks import CHECKS_SECTION, VERDICTS_SECTION
from gpubench.model.results.rows.comparison import COMPARISON_SECTION, ComparisonRow
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION
from gpubench.model.results.rows.plan import TIMELINE_SECTION
from gpubench.model.results.rows.scan import CELLS_SECTION
from gpubench.model.terms.units import format_memory, format_percent, format_size, some_of
from gpubench.model.terms.verdict import WORST_FIRST, Verdict, gravity

R = TypeVar("R")

MOST_LINES = 200
_MOST_COMPARED = 1000
MOST_COLUMNS = 64
_HIDDEN = (
    *("rows", "nvlinks", "kinds", "tree", "ranks", "members", "paths", "pairs", "matrices"),
    *(CELLS_SECTION, OVERLAP_SECTION, TIMELINE_SECTION),
)
"""Sections that are too long for a page, or stand on it in another shape. JSON and CSV have them."""

_SHOWN: Mapping[str, Sequence[str]] = {
    "gpus": (
        *("node", "gpu", "bus_id", "name", "pcie_generation", "pcie_width", "nvlinks_active", "nvlinks"),
        *("nvlink_gb_s", "nvlink_errors", "fabric_state", "throttle_reasons", "lost"),
    ),
    "nics": ("node", "nic", "link_layer", "state", "rate_gbit_s", "nearest_gpus", "nearest_path", "gpudirect_rdma"),
    "nodes": ("node", "node_kind", "differences", "gpus", "nics", "driver", "cuda", "kernel", "cpu"),
    "fallback": (
        *("conclusion", "verdict", "confidence", "count", "pairs", "transport", "bandwidth_gb_s", "limit_gb_s"),
        *("cause_seen", "advice", "how"),
    ),
    CHECKS_SECTION: ("check", "verdict", "findings", "looks_for", "note", "nodes_in_error"),
    VERDICTS_SECTION: ("scope", "node", "subject", "verdict", "findings"),
    EVIDENCE_SECTION: (
        *("source", "destination", "path_class", "capability", "selection", "measurement", "correctness"),
        *("transport", "bandwidth_gb_s", "limit_gb_s", "conclusion", "confidence", "verdict"),
    ),
}
"""The columns of sections that have many; of others a page shows all."""


_FOLDED = (CHECKS_SECTION, VERDICTS_SECTION, COMPARISON_SECTION)
_NOT_JUDGED = "not judged"
_NVLINK = re.compile(r"NV\d+", re.ASCII)

_BYTES = "_bytes"
_SPELLINGS = ("GPU", "GPUs", "NIC", "NICs", "NUMA", "NVLink", "NVLinks", "PCIe", "RDMA")
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
    where it is no number), its verdict.
    """

    text: str
    share: float | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix between devices."""

    title: str
    corner: str
    columns: Sequence[str]
    lines: Mapping[str, Mapping[str, GridCell]]


def link_kind(path_class: str) -> str:
    """What cells are comparable: any number of NVLinks is one kind of link, every other path class is its own."""
    return "NVLink" if _NVLINK.fullmatch(path_class) else path_class


def _kinds(report: Report) -> dict[tuple[str, str], str]:
    """The kind of link between two devices of the matrices, as far as a matrix of paths says."""
    paths = report.sections.get("matrix")
    cells = paths.cells if isinstance(paths, Matrix) else {}
    kind_of = {
        (row, column): f"{_device_kind(row)} {_device_kind(column)} {link_kind(str(path))}"
        for row, columns in cells.items()
        for column, path in columns.items()
    }
    return {ends: " ".join(sorted(kind.split(" "))) for ends, kind in kind_of.items()}


def _device_kind(name: str) -> str:
    return "GPU" if name.startswith("GPU") else "NIC"


def section_blocks(report: Report) -> Iterator[Listing | Grid]:
    """A table or a grid of every section that a page has room for."""
    kinds = _kinds(report)
    for name, section in report.sections.items():
        if name in _HIDDEN:
            continue
        if isinstance(section, Table):
            listing = _comparison(section) if name == COMPARISON_SECTION else listing_of(name, section)
            if listing.lines:
                yield listing
        elif section.cells:
            yield _matrix(name, section, kinds)


def listing_of(name: str, section: Table) -> Listing:
    """The rows of a section as a table of words, in the columns that a page has room for."""
    columns = [column for column in _SHOWN.get(name, section.columns) if column in section.columns]
    rows, more = gravest(section.rows(), MOST_LINES, name, sort=name in _FOLDED)
    records = [row.to_record() for row in rows]
    lines = [[_word_of(column, record[column]) for column in columns] for record in records]
    heads = [_words(column) for column in columns]
    verdicts = [verdict_of(record.get("verdict")) for record in records]
    title_ = _words(name)[0].upper() + _words(name)[1:]
    return without_empty(Listing(title_, heads, lines, verdicts, more, folds=name in _FOLDED))


def _comparison(section: Table) -> Listing:
    """What was compared by its name, with both sides, the difference and what that has to exceed."""
    compared = (row for row in section.rows() if isinstance(row, ComparisonRow))
    rows, more = gravest(compared, _MOST_COMPARED, COMPARISON_SECTION, sort=True)
    heads = ("what", "before µs", "after µs", "before GB/s", "after GB/s", "slower", "noise", "verdict", "reason")
    lines = [
        (
            row.name,
            *map(word, (row.base_time_us, row.new_time_us, row.base_gb_s, row.new_gb_s)),
            *(format_percent(each) for each in (row.slower_percent, row.noise_percent)),
            row.verdict,
            row.reason or "",
        )
        for row in rows
    ]
    verdicts = [verdict_of(row.verdict) for row in rows]
    return without_empty(Listing("Comparison", heads, lines, verdicts, more, folds=True))


def _word_of(column: str, value: Any) -> str:
    """A value of a section; sizes exactly, other amounts of memory rounded, both as people write them."""
    if not column.endswith(_BYTES) or not isinstance(value, int):
        return word(value)
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
            if isinstance(value, float):
                kind = kinds.get((row, column), column)
                best[kind] = max(best.get(kind, 0.0), value)
    lines = {
        row: {
            column: GridCell(
                _cell(cells[column]), _share(cells[column], best.get(kinds.get((row, column), column), 0.0))
            )
            for column in columns
            if column in cells
        }
        for row, cells in islice(section.cells.items(), MOST_COLUMNS)
    }
    return Grid(_words(name)[0].upper() + _words(name)[1:] + more, "", columns, lines)


def _cell(value: object) -> str:
    """A cell's words; peer access says what CUDA and NVML say."""
    if isinstance(value, Mapping):
        return " / ".join(word(each) or "?" for key, each in value.items() if key != "reason")
    return word(value)


def _share(value: object, best: float) -> float | None:
    return value / best if isinstance(value, float) and best else None


def word(value: Any) -> str:
    """A value as a person reads it: four digits, nothing for what is unknown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return some_of([word(each) for each in value], 8)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {word(each)}" for key, each in value.items())
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


def without_empty(listing: Listing) -> Listing:
    """Without the columns in which nothing is known."""
    kept = [number for number in range(len(listing.heads)) if any(line[number] for line in listing.lines)]
    return Listing(
        listing.title,
        [listing.heads[number] for number in kept],
        [[line[number] for number in kept] for line in listing.lines],
        listing.verdicts,
        listing.left_out,
        listing.folds,
    )
