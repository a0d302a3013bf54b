"""Hangs in dumps and RAS answers.

Four ranks of PyTorch 2.13 with gloo wrote tests/dumps while one had a fault. Frames are shortened, and paths are made
up.
"""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.measure.explain.hangs import find_hangs
from gpubench.measure.explain.report import explain
from gpubench.model.paths.hang import HangReason, RankRecord, RecordedCall
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.hangs import is_ras_answer, read_ras_answer, read_recorder_dump
from gpubench.readers.nccl_log.files import read_logs
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.cli.running import gpubench
from tests.fakes.ras import FakeRank, as_json, as_text
from tests.measure.explain.test_report import ids, rows

DUMPS = Path(__file__).parents[2] / "dumps"


def report_of(*paths: Path) -> Report:
    reader = NcclLogReader()
    read_logs([str(path) for path in paths], reader, io.BytesIO())
    return explain(reader.facts(), ["dumps"])


@pytest.mark.parametrize(
    ("plant", "verdict", "id_", "ranks", "reason"),
    [
        ("never", Verdict.FAIL, "rank-did-not-join", ("rank 1",), HangReason.ABSENT),
        ("left", Verdict.FAIL, "rank-did-not-join", ("rank 1",), HangReason.ABSENT),
        ("other", Verdict.FAIL, "rank-calls-other", ("rank 2",), HangReason.TYPE),
        ("size", Verdict.FAIL, "rank-calls-other", ("rank 2",), HangReason.SIZE),
        ("dtype", Verdict.FAIL, "rank-calls-other", ("rank 2",), HangReason.DTYPE),
        ("dead", Verdict.FAIL, "rank-is-gone", ("rank 1",), HangReason.NO_DUMP),
        ("slow", Verdict.WARN, "rank-is-slow", ("rank 1",), HangReason.SLOW),
    ],
)
def test_the_rank_and_the_reason_are_named(
    plant: str, verdict: Verdict, id_: str, ranks: tuple[str, ...], reason: HangReason
) -> None:
    report = report_of(DUMPS / plant)
    assert (report.verdict, ids(report)) == (verdict, [id_])
    assert report.findings[0].subjects == ranks
    (row,) = rows(report, "hangs")
    assert (row["ranks"], row["reason"]) == (ranks, reason.value)
    assert str(row["operation"]).startswith("all_reduce number ")
    # PyTorch writes no frames into JSON.
    assert str(row["place"]).startswith("/home/user/train.py:" if plant != "other" else "")


def test_ranks_that_wait_for_each_other_in_two_groups_are_both_named() -> None:
    report = report_of(DUMPS / "groups")
    assert ids(report) == ["rank-waits-elsewhere"] * 2
    assert {finding.subject for finding in report.findings} == {"rank 0", "rank 1"}


def test_dumps_of_a_healthy_job_name_no_rank() -> None:
    report = report_of(DUMPS / "healthy")
    assert (report.verdict, ids(report)) == (Verdict.PASS, [])


def test_the_dump_of_one_rank_alone_is_a_doubt() -> None:
    assert ids(report_of(DUMPS / "healthy" / "rank_0")) == ["ranks-missing"]


def dump(*entries: dict[str, object]) -> bytes:
    return json.dumps({"version": "2.9", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": entries}).encode()


SENT = {"process_group": ["0", "default"], "is_p2p": True, "profiling_name": "nccl:send 0->1"}
REDUCED = SENT | {"is_p2p": False, "profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "state": "completed"}


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([REDUCED, SENT | {"state": "completed"}], []),
        ([REDUCED, SENT | {"state": "started"}], ["sends-unfinished"]),
        ([SENT | {"state": "scheduled"}], ["sends-unfinished"]),
        ([], ["dumps-empty"]),
    ],
)
def test_dumps_without_a_collective_do_not_pass(
    entries: list[dict[str, object]], found: list[str], tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"dump_{rank}").write_bytes(dump(*entries))
    report = report_of(tmp_path)
    assert (ids(report), report.verdict) == (found, Verdict.WARN if found else Verdict.PASS)


def call(operation: str, sequence: int = 1, size: int = 8, *, done: bool = False) -> RecordedCall:
    return RecordedCall("0", sequence, operation, ((size,),), ("Float",), done)


def record(rank: int, *calls: RecordedCall) -> RankRecord:
    return RankRecord(rank, calls, {"0": (0, 1, 2)})


def reasons(*records: RankRecord) -> list[tuple[HangReason, tuple[str, ...]]]:
    return [(each.reason, each.ranks) for each in find_hangs(records, ())]


def test_a_hang_begins_at_the_first_different_operation() -> None:
    own = [
        (call("gather", done=True), call("all_reduce", 2)),
        (call("gather"),),
        (call("scatter", done=True), call("all_reduce", 2)),
    ]
    assert reasons(*(record(rank, *calls) for rank, calls in enumerate(own))) == [(HangReason.TYPE, ("rank 2",))]


def test_a_missing_dump_is_a_doubt_if_the_others_wait_in_no_collective() -> None:
    """The connections of the others broke when it died, so their calls ended with an error."""
    (found,) = find_hangs([record(rank, call("all_reduce", done=True)) for rank in (0, 2)], ())
    assert (found.reason, found.ranks, found.is_sure) == (HangReason.NO_DUMP, ("rank 1",), False)


def test_the_ranks_of_an_unlisted_group_are_uncertain() -> None:
    unlisted = [RankRecord(rank, (call("all_reduce"),), {}) for rank in range(2)]
    (found,) = find_hangs(unlisted, ())
    assert (found.reason, found.is_sure) == (HangReason.TOGETHER, False)


def test_absent_ranks_that_wait_in_another_group_are_not_blamed() -> None:
    other = replace(call("all_gather"), group="1")
    records = [record(0, call("all_reduce")), record(1, call("barrier", 0, done=True)), record(2, other)]
    assert (HangReason.ABSENT, ("rank 1",)) in reasons(*records)


def late(seconds: dict[int, tuple[float, ...]], calls: int = 10) -> list[tuple[HangReason, tuple[str, ...]]]:
    return reasons(
        *(
            record(
                rank,
                *(
                    replace(
                        call("all_reduce", number, done=True),
                        called_ns=10**18 + int(1e9 * (20 * number + 0.01 * rank + by)),
                    )
                    for number, by in enumerate((*((0.0,) * (calls - len(own))), *own))
                ),
            )
            for rank in range(3)
            for own in (seconds.get(rank, ()),)
        )
    )


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        ({1: (2.0,) * 6}, 1),
        ({1: (2.0,)}, None),
        ({1: (2.0, 0.0, 2.0)}, None),
        ({1: (0.5,) * 6}, None),
        ({0: (2.0, 0.0) * 3, 1: (0.0, 2.0) * 3}, None),
        ({1: (50.0,) * 10}, None),
    ],
    ids=["again and again", "once", "twice", "by little", "each in turn", "its clock differs"],
)
def test_a_rank_that_is_late_repeatedly_is_slow(seconds: dict[int, tuple[float, ...]], named: int | None) -> None:
    assert late(seconds) == ([] if named is None else [(HangReason.SLOW, (f"rank {named}",))])


def test_no_rank_is_blamed_if_all_wait_in_the_same_operation() -> None:
    everybody = tuple(f"rank {rank}" for rank in range(3))
    assert reasons(*(record(rank, call("all_reduce")) for rank in range(3))) == [(HangReason.TOGETHER, everybody)]


@pytest.mark.parametrize("size", [8, 16])
def test_a_call_that_usually_follows_is_another_order(size: int) -> None:
    usual = (call("all_reduce", 1, done=True), call("broadcast", 2, size, done=True))
    others = [record(rank, *usual, call("all_reduce", 3)) for rank in range(2)]
    assert reasons(*others, record(2, *usual, call("broadcast", 3, size))) == [(HangReason.ORDER, ("rank 2",))]
    never = record(2, *usual, call("all_gather", 3))
    assert reasons(*others, never) == [(HangReason.TYPE, ("rank 2",))]


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("/tmp/executed-by-a-pickle"),)


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (pickle.dumps({"entries": [Evil()]}), "which is not plain data"),
        (pickle.dumps({"entries": [{}]}), "not a readable dump"),
        (pickle.dumps([1]), "not a readable dump"),
        (pickle.dumps({"entries": []})[:-3], "not a readable dump"),
        (b'{"entries": [', "not a readable dump"),
    ],
)
def test_a_dump_with_objects_is_refused(data: bytes, seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        read_recorder_dump(data, "rank_0")
    assert not Path("/tmp/executed-by-a-pickle").exists()


RAS_TEXT = b"""NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 6650
  1 ranks have launched up to operation 6649
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
"""
RAS_DEAD = b"""NCCL version 2.28.9 compiled with CUDA 13.0

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213
"""
RAS_JSON = b"""{"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [{"hash": "0xae", "size": 3,
"ranks": [{"rank": 0, "host": "a", "pid": 1, "status": {"finalize_called": false, "destroy_flag": false,
"abort_flag": false}, "collective_counts": {"AllReduce": 5}}, {"rank": 1, "host": "a", "pid": 2, "status":
{"finalize_called": false, "destroy_flag": false, "abort_flag": false}, "collective_counts": {"AllReduce": 4}}],
"missing_ranks": [{"rank": 2, "host": "b", "pid": 3, "status": {"unresponsive": true, "considered_dead": false}}]}]}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RAS_TEXT, [(HangReason.ABSENT, "rank 2 (172.16.64.210:483074)", "AllReduce number 6650", False)]),
        (RAS_DEAD, [(HangReason.DEAD, "rank 21 (172.16.64.213:3487984)", "", True)]),
        (RAS_JSON, [(HangReason.SILENT, "rank 2 (b:3)", "", True)]),
    ],
)
def test_an_answer_of_ras_names_the_rank(text: bytes, expected: list[tuple[HangReason, str, str, bool]]) -> None:
    """The texts are made up from NCCL's documentation and source."""
    assert is_ras_answer(text)
    found = find_hangs((), read_ras_answer(text, "ras"))
    assert [(each.reason, each.ranks[0], each.operation, each.is_sure) for each in found] == expected


def test_two_answers_of_ras_tell_a_hang_from_progress() -> None:
    (first,) = read_ras_answer(RAS_TEXT, "ras")
    assert [each.is_sure for each in find_hangs((), (first, first))] == [True]
    moved = replace(first.ranks[0], counts={"AllReduce": 6648})
    assert find_hangs((), (replace(first, ranks=(moved,)), first)) == ()


@pytest.mark.parametrize(("plant", "pid"), [("ras-killed", 601), ("ras-stopped", 494)])
def test_a_rank_without_an_answer_is_named_from_what_nccl_2_28_9_wrote(plant: str, pid: int) -> None:
    """Two answers of four ranks on one H100, as JSON without one comma."""
    report = report_of(DUMPS / plant)
    assert (report.verdict, ids(report)) == (Verdict.FAIL, ["rank-is-gone"])
    assert report.findings[0].subjects == (f"rank 2 (192.0.2.2:{pid})",)


PY_SPY = b"""Process 4711: /usr/bin/python train.py --epochs 3
Python v3.11.4 (/usr/bin/python3.11)

Thread 4712 (idle): "Thread-1"
    wait (threading.py:324)
    other (elsewhere.py:1)
Thread 4711 (idle): "MainThread"
    _wait (multiprocessing/connection.py:948)
    next_batch (data.py:12)
    <module> (train.py:90)
"""


def test_py_spy_next_to_dumps_shows_the_place_of_a_rank(tmp_path: Path) -> None:
    for number, text in ((0, b"Process 1: a\nPython v3.11\n"), (1, PY_SPY)):
        (tmp_path / f"py-spy-{number}.txt").write_bytes(text)
    (finding,) = report_of(DUMPS / "never", tmp_path).findings
    assert "; is at multiprocessing/connection.py:948 (_wait), called from data.py:12 (next_batch); 3 ranks in" in (
        finding.seen
    )


@pytest.mark.parametrize("form", [as_json, as_text])
def test_a_ras_answer_without_a_rank_behind_passes(form: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "ras").write_text(f"OK\nOK\n{form([FakeRank(rank, {'AllReduce': 7}) for rank in range(4)])}")
    done = gpubench("explain", str(tmp_path))
    last = done.stdout.splitlines()[-1]
    assert (done.returncode, last) == (0, "PASS: no rank lags behind in 1 communicator of NCCL's RAS")


def test_py_spy_and_ras_meet_by_the_process(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_bytes(RAS_TEXT)
    (tmp_path / "stuck.txt").write_bytes(PY_SPY.replace(b"4711", b"483074"))
    (finding,) = report_of(tmp_path).findings
    assert "is at multiprocessing/connection.py:948 (_wait), called from data.py:12 (next_batch)" in finding.seen
    assert "py-spy dump --pid 483074" not in finding.next_command
