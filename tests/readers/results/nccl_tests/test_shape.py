"""The collective of rows that do not name it."""

import pytest

from gpubench.errors import UsageError
from gpubench.readers.results.nccl_tests.table import OutputLine, Placed, collective_of
from gpubench.readers.results.nccl_tests.text import read
from tests.fakes.old_nccl_tests import old_output
from tests.together import together


def a_line(count: int = 256, reduction: str = "none", root: int = -1, factor: float = 1.0) -> OutputLine:
    placed = Placed(placement="out_of_place", time_us=1.0, algbw_gb_s=2.0, busbw_gb_s=2.0 * factor, wrong=0)
    return OutputLine(
        size_bytes=1024, count=count, element_type="float", reduction=reduction, root=root, placed=(placed,)
    )


@together(
    "line, ranks, expected",
    [
        (a_line(reduction="sum", factor=1.75), 8, "allreduce"),
        (a_line(reduction="sum"), 8, "sendrecv"),
        (a_line(reduction="sum", count=32), 8, "reducescatter"),
        (a_line(reduction="sum", root=0), 8, "reduce"),
        (a_line(root=0), 8, "broadcast"),
    ],
)
def test_the_only_collective_with_such_rows(line: OutputLine, ranks: int, expected: str) -> None:
    assert collective_of([line], ranks, None, "x") == expected


@together(
    "line, ranks, possible",
    [
        (a_line(count=32), 8, "allgather, alltoall, alltoallv, hypercube"),
        (a_line(count=32, root=0), 8, "gather, scatter"),
        (a_line(), 8, "sendrecv, alltoallv"),
        (a_line(reduction="sum"), 2, "allreduce, sendrecv"),
        (a_line(reduction="sum"), 1, "allreduce, reducescatter, sendrecv"),
    ],
)
def test_several_collectives_need_a_person(line: OutputLine, ranks: int, possible: str) -> None:
    with pytest.raises(UsageError, match=f"rows like these are of {possible}"):
        collective_of([line], ranks, None, "x")
    for name in possible.split(", "):
        assert collective_of([line], ranks, name, "x") == name


@together(
    "program, ranks, found",
    [
        ("all_reduce", 2, "allreduce"),
        ("reduce_scatter", 2, "reducescatter"),
        ("alltoall", 8, "alltoall"),
        ("sendrecv", 8, "sendrecv"),
        ("broadcast", 8, "broadcast"),
        ("reduce", 8, "reduce"),
        ("all_gather", 8, "allgather, hypercube"),
        ("gather", 8, "gather, scatter"),
    ],
)
def test_columns_of_older_versions_tell_more(program: str, ranks: int, found: str) -> None:
    text = old_output(program, ranks=ranks)
    if ", " in found:
        with pytest.raises(UsageError, match=f"rows like these are of {found}$|rows like these are of {found}\n"):
            read(text, "x")
    else:
        assert {row.collective for row in read(text, "x").rows} == {found}


def test_what_a_person_says_has_to_fit() -> None:
    with pytest.raises(UsageError, match="its rows are not of allreduce, as --collective says"):
        collective_of([a_line(root=0)], 8, "allreduce", "x")
