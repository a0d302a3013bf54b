"""The collective of rows that do not name it."""

import pytest

from gpubench.errors import IncompleteResultError, UsageError
from gpubench.readers.results.nccl_tests.table import OutputLine, Placed, collective_of
from gpubench.readers.results.nccl_tests.text import read
from tests.fakes.old_nccl_tests import old_output


def a_line(count: int = 256, reduction: str = "none", root: int = -1, factor: float = 1.0) -> OutputLine:
    placed = Placed(placement="out_of_place", time_us=1.0, algbw_gb_s=2.0, busbw_gb_s=2.0 * factor, wrong=0)
    return OutputLine(
        size_bytes=1024, count=count, element_type="float", reduction=reduction, root=root, placed=(placed,)
    )


@pytest.mark.parametrize(
    ("line", "ranks", "expected"),
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


@pytest.mark.parametrize(
    ("line", "ranks", "possible"),
    [
        (a_line(count=32), 8, "allgather, alltoall, alltoallv, hypercube"),
        (a_line(count=32, root=0), 8, "gather, scatter"),
        (a_line(), 8, "sendrecv, alltoallv"),
        (a_line(reduction="sum"), 2, "allreduce, sendrecv"),
        (a_line(reduction="sum"), 1, "allreduce, reducescatter, sendrecv"),
    ],
)
def test_several_collectives_need_a_person(line: OutputLine, ranks: int, possible: str) -> None:
    with pytest.raises(UsageError, match=f"such rows can be from {possible}"):
        collective_of([line], ranks, None, "x")
    for name in possible.split(", "):
        assert collective_of([line], ranks, name, "x") == name


@pytest.mark.parametrize(
    ("program", "ranks", "found"),
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
        with pytest.raises(UsageError, match=f"such rows can be from {found}$|such rows can be from {found}\n"):
            read(text, "x")
    else:
        assert {row.collective for row in read(text, "x").rows} == {found}


def test_what_a_person_says_has_to_fit() -> None:
    with pytest.raises(UsageError, match="its rows are not of allreduce, the collective of --collective"):
        collective_of([a_line(root=0)], 8, "allreduce", "x")


@pytest.mark.parametrize(
    ("settings", "busbw", "expected"),
    [
        ("nThread 1 nGpus 8", 36.0, 8),  # a rounded value in one column, two decimals in the other
        ("nThread 2 nGpus 4", 36.01, 8),
        ("nThread 1 nGpus 4", 36.0, None),  # rows of 8 ranks: two processes, on one or two nodes
        ("nThread 1 nGpus 1", 36.0, None),
        ("", 36.0, None),
    ],
)
def test_a_table_without_its_devices_has_the_ranks_of_its_only_process(
    settings: str, busbw: float, expected: int | None
) -> None:
    text = f"# {settings} minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1\n"
    text += f"{2**26} {2**24} float sum -1 3262.0 20.57 {busbw} 0 3262.0 20.57 {busbw} 0\n"
    if expected is None:
        with pytest.raises(IncompleteResultError):
            read(text, "pasted.txt")
    else:
        rows = read(text, "pasted.txt").rows
        assert {(row.ranks, row.nodes, row.iterations) for row in rows} == {(expected, 1, 20)}
