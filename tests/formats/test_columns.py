import io
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from gpubench.formats.layout import Column, Grid, fitting_table, grid_lines, grid_of_words, table_lines
from gpubench.formats.registry import TABLE, Format, Presentation, Target
from gpubench.formats.table import text_module
from gpubench.formats.text import collective, overlap
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.results.report import Metadata, Record, Report, Row, Table
from gpubench.model.results.result_file import TABLES
from gpubench.model.terms.commands import AFTER_COLLECTIVES, BEFORE_COLLECTIVES, COLLECTIVE
from gpubench.model.terms.units import format_ranges, plural
from tests.formats.sample import HTML, MARKDOWN, METADATA, REPORT, ROWS

ROWS_OF_LETTERS = ({"name": "a", "n": "1", "letters": 10}, {"name": "bb", "n": "10", "letters": 1})
NAME = Column("name", itemgetter("name"))
WIDE = Column("wide", lambda row: "x" * row["letters"], spare=1)
WIDER = Column("wider", lambda row: "x" * (2 * row["letters"]), spare=3)
COUNT = Column("n", itemgetter("n"), spare=2, right=True)


def heads(columns: Sequence[Column]) -> list[str]:
    return [column.head for column in columns]


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (42, ["name", "wide", "wider", "n"]),
        (41, ["name", "wide", "n"]),
        (20, ["name", "wide", "n"]),
        (19, ["name", "wide"]),
        (16, ["name", "wide"]),
        (15, ["name"]),
        (1, ["name"]),
    ],
)
def test_columns_go_in_order_of_what_can_be_spared(width: int, kept: list[str]) -> None:
    assert heads(fitting_table([NAME, WIDE, WIDER, COUNT], ROWS_OF_LETTERS, width)) == kept


def test_of_equally_spare_columns_the_first_goes() -> None:
    columns = [Column("a", lambda _: "1", spare=1), Column("b", lambda _: "1", spare=1)]
    assert heads(fitting_table(columns, [None], 1)) == ["b"]


def test_nothing_fits_into_nothing() -> None:
    assert fitting_table([], [], 10) == []


def test_an_optional_column_goes_if_no_row_has_a_value() -> None:
    note = Column("note", lambda row: row, optional=True)
    assert list(table_lines([note], ["", "-"], 80)) == []
    assert list(table_lines([note], ["", "old"], 80)) == ["note", "", "old"]


def test_lines_are_aligned_and_end_with_their_text() -> None:
    shown = list(table_lines([NAME, COUNT, WIDE], ROWS_OF_LETTERS, 80))
    assert shown == ["name   n  wide", "a      1  xxxxxxxxxx", "bb    10  x"]


CELLS = st.lists(st.text("abc ", max_size=6).map(str.strip), min_size=2, max_size=2)


def column_of(head: str, cells: list[str], spare: int) -> Column:
    return Column(head, lambda row: cells[row], spare)


COLUMNS = st.lists(st.builds(column_of, st.text("hd", min_size=1, max_size=4), CELLS, st.integers(0, 3)))


@given(COLUMNS, st.integers(1, 60))
def test_what_is_kept_fits_or_may_not_go_and_is_never_cut(columns: list[Column], width: int) -> None:
    rows = (0, 1)
    kept = fitting_table(columns, rows, width)
    assert [column for column in columns if column in kept] == kept
    shown = list(table_lines(columns, rows, width, keys=len(columns)))
    if any(column.spare for column in kept):
        assert max(map(len, shown)) <= width
    gone = [column for column in columns if column not in kept]
    assert all(column.spare for column in gone)
    assert min((column.spare for column in gone), default=9) >= max((column.spare for column in kept), default=0)
    for number, line in enumerate(shown):
        for column in kept:
            assert (column.head if number == 0 else column.text(number - 1)) in line


NAMES = [f"GPU{index}" for index in range(6)]
CELLS_OF_SIX = {row: {column: "NODE" for column in NAMES if column != row} for row in NAMES}


def grid_texts(grid: Grid, width: int) -> list[str]:
    return ["".join(text for text, _ in pieces) for pieces in grid_lines(grid, width)]


def test_a_matrix_has_its_title_in_the_corner() -> None:
    cells = {"GPU0": {"GPU1": "NV18"}, "GPU1": {"GPU0": "SYS", "GPU1": "X"}}
    assert grid_texts(grid_of_words("path", cells, ["GPU0", "GPU1"], ["GPU0", "GPU1"]), 80) == [
        "path  GPU0  GPU1",
        "GPU0     X  NV18",
        "GPU1   SYS     X",
    ]


@pytest.mark.parametrize(("width", "blocks"), [(40, [6]), (39, [5, 1]), (28, [4, 2]), (16, [2, 2, 2]), (3, [1] * 6)])
def test_a_matrix_is_split_into_blocks_of_columns(width: int, blocks: list[int]) -> None:
    found = grid_texts(grid_of_words("path", CELLS_OF_SIX, NAMES, NAMES), width)
    corners = [line.split()[1:] for line in found if line.startswith("path")]
    assert list(map(len, corners)) == blocks
    assert [name for corner in corners for name in corner] == NAMES
    assert len(found) == len(blocks) * 7
    if width > 10:
        assert max(map(len, found)) <= width


def test_counts_and_ranges_in_words() -> None:
    assert [plural(count, "GPU") for count in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert format_ranges([]) == ""
    assert format_ranges([3]) == "3"
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


FOR_PEOPLE = (TABLE, MARKDOWN, HTML)
ADDED = Column("added", lambda _row: "7.77", width=6)


def printed(format_: Format, metadata: Metadata, rows: Sequence[Row] = (), report: Report = REPORT) -> str:
    stream = io.StringIO()
    writer = format_.writer(Target(stream=stream), Presentation(width=200))
    writer.begin(metadata, ())
    for row in rows:
        writer.row(row)
    writer.end(report)
    return stream.getvalue()


@pytest.mark.parametrize("format_", FOR_PEOPLE, ids=lambda each: each.name)
def test_a_column_added_to_collectives_or_overlap_appears_in_every_format_for_people(
    monkeypatch: pytest.MonkeyPatch, format_: Format
) -> None:
    monkeypatch.setattr(collective, "FIGURES", (ADDED, *collective.FIGURES))
    monkeypatch.setattr(overlap, "STEPS", (ADDED, *overlap.STEPS))
    for metadata, rows in ((METADATA, ROWS), (OVERLAP, [step()])):
        text = printed(format_, metadata, rows)
        assert "added" in text
        assert text.count("7.77") == len(rows)


STEPS = {"collective": "allreduce", "dtypes": ["float32"], "ops": ["sum"], "check": True, "seconds": 1, "ctas": [2]}
OVERLAP = replace(METADATA, subject="overlap", collective=None, options=STEPS)


def example(kind: type[Record]) -> Record:
    """A row of any type: 1 of every number, the word of every text, the first of what a column may hold."""
    values: dict[str, Any] = {}
    for each in fields(kind):
        words: list[Any] = [part for part in getattr(each.type, "__metadata__", ()) if isinstance(part, type)]
        text = str(each.type)
        values[each.name] = (
            next(iter(words[0])) if words
            else 1 if "int" in text or "float" in text
            else ("GPU0",) if "tuple" in text
            else "PASS" if each.name == "verdict"
            else "some text"
        )  # fmt: skip
    return kind(**values)


def step() -> OverlapRow:
    row = example(OverlapRow)
    assert isinstance(row, OverlapRow)
    return replace(row, partner="gemm", verdict="PASS")


SHARED = [
    (command.page, kind)
    for command in {each.page: each for each in (*BEFORE_COLLECTIVES, COLLECTIVE, *AFTER_COLLECTIVES)}.values()
    for kind in getattr(text_module(replace(METADATA, subject=command.name or "allreduce")), "COLUMNS", {})
]


def test_the_tables_that_pages_share_with_the_terminal_are_known() -> None:
    assert {page for page, _ in SHARED} == {"collective", "p2p", "kv", "plan", "compare", "explain", "watch", "overlap"}


@pytest.mark.parametrize(("page", "kind"), SHARED, ids=lambda each: getattr(each, "section", each))
def test_a_column_added_to_another_shared_table_appears_on_pages(
    monkeypatch: pytest.MonkeyPatch, page: str, kind: type[Record]
) -> None:
    metadata = replace(METADATA, subject=page, collective=None if page != "collective" else "allreduce")
    columns = text_module(metadata).COLUMNS
    monkeypatch.setitem(columns, kind, (ADDED,))
    report = replace(REPORT, sections={kind.section: Table(kind.columns(), lambda: [example(kind)])})
    for format_ in (MARKDOWN, HTML):
        assert "7.77" in printed(format_, metadata, report=report)


def test_every_section_has_a_type_of_row_that_says_how_it_stands_on_a_page() -> None:
    for kind in TABLES.values():
        if issubclass(kind, Record):
            assert set(kind.on_page.columns) <= set(kind.columns())
            assert "kind" not in kind.columns(), "a line of JSON Lines begins with its own"
