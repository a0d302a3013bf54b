"""The columns of nccl-tests' tables, which other versions and rccl-tests have in other ways."""

import pytest

from gpubench.errors import UsageError
from gpubench.model.results.result_file import ResultFile, UserFacts
from gpubench.readers.results.nccl_tests.cut import CutColumns, CutLine
from gpubench.readers.results.nccl_tests.table import COLLECTIVE_NAMES
from gpubench.readers.results.nccl_tests.text import read
from tests.fakes.nccl_tests import Half, Output, Result
from tests.fakes.old_nccl_tests import COLUMNS, RCCL, RCCL_OLD, old_output

FIGURES = "     time   algbw   busbw #wrong"
VALUES = "    60.00   17.48    8.74      0"


def rows_of(text: str, collective: str | None = None) -> ResultFile:
    return read(text, "out.txt", UserFacts(collective=collective))


@pytest.mark.parametrize("program", COLUMNS)
def test_columns_that_a_program_does_not_need_were_left_out_before_2_11(program: str) -> None:
    found = rows_of(old_output(program), COLLECTIVE_NAMES[program])
    assert (len(found.rows), found.complete, found.remarks) == (4, True, ())
    assert {row.collective for row in found.rows} == {COLLECTIVE_NAMES[program]}
    assert {row.root for row in found.rows} == {0 if "root" in COLUMNS[program] else None}
    reduces = program in ("all_reduce", "reduce", "reduce_scatter")
    assert {row.op for row in found.rows} == {"sum" if reduces else None}
    assert [row.time_us for row in found.rows[::2]] == [20.01, 355.5]
    assert {row.wrong for row in found.rows} == {0}


def test_a_row_without_the_root_that_its_header_names_is_damaged() -> None:
    text = old_output("reduce").replace("sum       0", "sum        ", 1)
    found = rows_of(text)
    assert ([row.size_bytes for row in found.rows], len(found.left_out)) == ([2**25] * 2, 1)


@pytest.mark.parametrize(
    ("placements", "expected"),
    [("out-of-place", ["out_of_place"]), ("in-place", ["in_place"]), ("out-of-place in-place", None)],
)
def test_rccl_tests_may_leave_a_placement_out(placements: str, expected: list[str] | None) -> None:
    times = 2 if expected is None else 1
    found = rows_of(RCCL.format(placements=placements, columns=times * FIGURES, values=times * VALUES), "allgather")
    assert [row.placement for row in found.rows] == expected or ["out_of_place", "in_place"]
    assert {(row.backend, row.ranks, row.wrong) for row in found.rows} == {("rccl", 2, 0)}
    assert (found.kind, found.circumstances.tool) == ("rccl-tests text", "rccl-tests develop:12ab34c")
    assert found.circumstances.libraries == {"RCCL": "2.22.3"}


def test_an_older_rccl_tests_with_several_ranks_a_gpu() -> None:
    found = rows_of(RCCL_OLD)
    assert [(row.collective, row.ranks, row.wrong) for row in found.rows] == [("reduce", 2, None), ("reduce", 2, 0)]
    assert found.circumstances.wrong_elements == 1


def test_rows_of_size_0_are_left_out_and_counted() -> None:
    found = rows_of(old_output("all_gather", sizes=(0, 0, 1024)), "allgather")
    assert ([row.size_bytes for row in found.rows], found.remarks) == (
        [1024, 1024],
        ("2 rows of size 0 left out, because no data moved",),
    )
    with pytest.raises(UsageError, match="has only rows of size 0"):
        rows_of(old_output("all_gather", sizes=(0,)))


def test_a_whole_run_without_second_halves_is_one_that_leaves_them_out() -> None:
    lines = [line[:-32] if " float " in line else line for line in old_output("all_reduce").split("\n")]
    found = rows_of("\n".join(lines))
    assert [row.placement for row in found.rows] == ["out_of_place"] * 2
    assert (found.complete, found.remarks) == (True, ("its rows have only one half, read as out of place",))


@pytest.mark.parametrize("keep", range(1, 8))
def test_a_row_with_too_few_values_is_damaged_and_no_corruption(keep: int) -> None:
    text = Output(results=(Result(), Result(size=2048))).text()
    row = next(line for line in text.split("\n") if " 1024 " in line and "float" in line)
    cut = " ".join(row.split()[: 5 + keep])
    found = rows_of(text.replace(row, f"{cut}\n38\n"))
    assert [(each.size_bytes, each.wrong) for each in found.rows] == [(2048, 0)] * 2
    assert len(found.left_out) == 1


def test_a_number_of_elements_that_is_not_whole_is_another_column() -> None:
    text = Output(results=(Result(halves=(Half(wrong=65.12), Half())), Result(size=2048))).text()
    assert {row.size_bytes for row in rows_of(text).rows} == {2048}


@pytest.mark.parametrize(
    ("row", "collective", "wrong"),
    [
        (
            "1073741824  268435456  float  sum  8142.6  131.87  230.77  2e-07  8141.2  131.89  230.81  0e+00",
            "allreduce",
            None,
        ),
        ("1073741824  268435456  float  sum  -1  8142.6  131.87  230.77  3  8141.2  131.89  230.81  0", "allreduce", 3),
        ("1073741824  268435456  float  0  8142.6  131.87  131.87  0  8141.2  131.89  131.89  0", "broadcast", 0),
    ],
)
def test_a_row_without_any_header_has_the_columns_that_fit(row: str, collective: str, wrong: int | None) -> None:
    found = read(row, "out.txt", UserFacts(collective=collective, ranks=8))
    assert [each.wrong for each in found.rows] == [wrong, 0]
    assert (found.rows[0].time_us, found.rows[0].algbw_gb_s) == (8142.6, 131.87)


def test_small_figures_of_a_table_that_was_cut_are_figures() -> None:
    columns = CutColumns.of("size(B) time(us) algbw(GB/s) busbw(GB/s)")
    assert columns is not None
    assert columns.line("8 0.52 0.01 0.02") == CutLine(8, ({"time": 0.52, "algbw": 0.01, "busbw": 0.02},))
    assert columns.line("8 52.1 0.00 0.00") == CutLine(8, ({"time": 52.1},)), "bandwidths that were rounded"


@pytest.mark.parametrize(
    "row", ["8 0 0.01 0.02", "8 -5.2 0.01 0.02", "8 nan 1 1", "8 inf 0 0", "8 5.2 -1 -2", "8 5.2 1"]
)
def test_a_row_of_a_cut_table_with_an_impossible_or_missing_value_is_named(row: str) -> None:
    columns = CutColumns.of("size(B) time(us) algbw(GB/s) busbw(GB/s)")
    assert columns is not None
    assert isinstance(columns.line(row), str)
