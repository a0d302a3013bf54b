"""Hangs in lines of PyTorch's watchdog. The texts are made up from its source."""

import io
from collections.abc import Callable

import pytest

from gpubench.measure.explain.report import explain
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.measure.explain.test_report import ids, rows


def report_of(*lines: str) -> Report:
    reader = NcclLogReader()
    reader.read(io.BytesIO("\n".join([*lines, ""]).encode()))
    return explain(reader.facts(), ["log"])


def caught(rank: int, number: int, operation: str = "ALLREDUCE", size: int = 4096) -> str:
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    return (
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: {work} ran for 600060 milliseconds before timing out."
    )


def torch_2_4(rank: int, number: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E321 02:07:08.465 ProcessGroupNCCL.cpp:1664] [PG 0 Rank {rank}] Exception (either an error or "
        f"timeout) detected by watchdog at work: {number}, last enqueued NCCL work: {enqueued}, last completed NCCL "
        f"work: {completed}."
    )


def torch_2_5(rank: int, number: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Timeout at NCCL work: {number}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    )


def torch_2_6(rank: int, number: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  "
        f"failure detected by watchdog at work sequence id: {number} PG status: last enqueued work: {enqueued}, last "
        f"completed work: {completed}"
    )


def dumping(rank: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:45.1 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        "Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug "
        f"info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely "
        "caused by incorrect usages of collectives, e.g., wrong sizes used across ranks"
    )


Status = Callable[[int, int, int, int], str]


@pytest.mark.parametrize("status", [torch_2_4, torch_2_5, torch_2_6])
def test_the_only_rank_without_a_line_is_named(status: Status) -> None:
    lines = [line for rank in (0, 1, 3) for line in (caught(rank, 7), status(rank, 7, 9, 6))]
    report = report_of(*lines)
    assert (report.verdict, ids(report)[0]) == (Verdict.FAIL, "rank-did-not-join")
    (row,) = rows(report, "hangs")
    assert (row["ranks"], row["operation"]) == (("rank 2",), "allreduce number 7 of 4096 elements")
    assert "logged nothing here" in report.findings[0].seen


def test_a_rank_that_enqueued_less_is_behind() -> None:
    lines = [line for rank in (0, 1, 3) for line in (caught(rank, 7), torch_2_5(rank, 7, 9, 6))]
    report = report_of(*lines, dumping(2, 6, 6))
    (row,) = rows(report, "hangs")
    assert (row["ranks"], row["reason"], row["waiting"]) == (("rank 2",), "did not join", 3)
    assert row["theirs"] == "last called operation number 6"


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (caught(2, 7, "BROADCAST"), "called another operation"),
        (caught(2, 7, size=5), "called it with another size"),
    ],
)
def test_a_rank_that_waits_in_another_operation_is_named(odd: str, reason: str) -> None:
    lines = [caught(0, 7), caught(1, 7), odd, caught(3, 7), *(torch_2_6(rank, 7, 7, 6) for rank in range(4))]
    report = report_of(*lines)
    assert ids(report)[0] == "rank-calls-other"
    (row,) = rows(report, "hangs")
    assert (row["ranks"], row["reason"]) == (("rank 2",), reason)


def test_ranks_that_all_wait_in_the_same_operation_are_nobodys_fault() -> None:
    lines = [line for rank in range(4) for line in (caught(rank, 7), torch_2_4(rank, 7, 9, 6))]
    report = report_of(*lines)
    assert ids(report)[0] == "collective-stuck"
    assert "all ranks in this log" in report.findings[0].seen


def test_a_rank_that_others_have_passed_is_behind() -> None:
    report = report_of(caught(0, 122), torch_2_5(0, 122, 127, 121), caught(1, 126), torch_2_5(1, 126, 128, 125))
    (row,) = rows(report, "hangs")
    assert (row["ranks"], row["operation"]) == (("rank 0",), "allreduce number 126 of 4096 elements")
    assert row["theirs"] == "last called allreduce number 122 of 4096 elements"


def test_versions_that_name_no_group_tell_who_says_nothing() -> None:
    report = report_of(*(caught(rank, 7) for rank in (0, 1, 3)))
    assert [row["ranks"] for row in rows(report, "hangs")] == [("rank 2",)]


def test_sends_between_two_name_nobody() -> None:
    lines = [line for rank in (0, 1, 3) for line in (caught(rank, 7 + rank, "RECV"), torch_2_4(rank, 7 + rank, 9, 6))]
    assert not rows(report_of(*lines), "hangs")


def fingerprint(rank: int, operation: str, shape: str) -> str:
    options = "TensorOptions(dtype=float (default), device=cuda, layout=Strided (default))"
    return (
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=485, OpType={operation}, "
        f"TensorShape=[{shape}], TensorDtypes=Float, TensorDeviceTypes={options})"
    )


def test_the_wrapper_names_the_odd_one() -> None:
    lines = [
        f"RuntimeError: Detected mismatch between collectives on ranks. {fingerprint(rank, 'ALLREDUCE', '25')}, "
        f"but {fingerprint(1, 'BROADCAST', '1')}."
        for rank in (0, 2)
    ]
    report = report_of("Traceback (most recent call last):", *lines)
    assert report.verdict is Verdict.FAIL
    (row,) = rows(report, "hangs")
    assert (row["ranks"], row["reason"]) == (("rank 1",), "called another operation")
    assert row["theirs"] == "broadcast number 485 of 1 Float"


def test_a_monitored_barrier_names_who_did_not_come() -> None:
    line = "RuntimeError: Rank 0: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms"
    report = report_of("Traceback (most recent call last):", line)
    assert (report.verdict, ids(report)[0]) == (Verdict.FAIL, "rank-did-not-join")
    (row,) = rows(report, "hangs")
    assert (row["ranks"], row["operation"]) == (("rank 1", "rank 3"), "monitoredBarrier")
