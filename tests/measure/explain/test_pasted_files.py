"""What people paste into one file, in any order: the worst part decides, and nothing is left unread."""

import io
from pathlib import Path

from gpubench.measure.explain.report import explain
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.measure.explain.test_report import ids
from tests.together import together

FILES = Path(__file__).parents[2] / "pasted"
FAIL, WARN, PASS = Verdict.FAIL, Verdict.WARN, Verdict.PASS


def report_of(text: str) -> Report:
    reader = NcclLogReader()
    reader.read(io.BytesIO(text.encode()))
    return explain(reader.facts(), ["log"])


def text_of(name: str) -> str:
    return (FILES / name).read_text()


@together(
    "name, verdict, first, seen",
    [
        ("ras-first-hides-rest.txt", FAIL, "collective-timed-out", "[Rank 3] Watchdog caught"),
        ("ras-status-mismatch.txt", WARN, "rank-did-not-join", "status INIT): 7 ranks have status RUNNING"),
        ("ras-details-cut.txt", WARN, "ras-names-no-rank", "MISMATCH"),
        ("ras-after-a-line.txt", WARN, "rank-did-not-join", "launched 11 AllReduce"),
        ("spark-excerpt.log", WARN, "host-staged", "through host memory (NET/IB)"),
        ("watchdog-half-with-group.log", FAIL, "collective-timed-out", "SeqNum=50, OpType=ALLREDUCE"),
        (
            "watchdog-two-operations.log",
            FAIL,
            "rank-calls-other",
            "allreduce number 80 of 2106881 elements; rank 7 in b",
        ),
        ("watchdog-zero-ranks.log", FAIL, "collective-stuck", "all ranks in this log; 3 ranks in allreduce number 808"),
        ("torch-stack-only.log", FAIL, "collective-timed-out", "rank 3: failed collective broadcast, called at /app/t"),
        ("xla-nccl-failed.log", FAIL, "cuda-out-of-memory", "'Cuda failure 2 'out of memory''"),
        ("colon-summary.log", FAIL, "nccl-ranks-disagree", "collective mismatch error, local size 496640"),
        ("inspector-pretty.json", WARN, "rank-is-slow", "came last in 20 of 20 operations"),
    ],
)
def test_a_file_is_answered_right(name: str, verdict: Verdict, first: str, seen: str) -> None:
    report = report_of(text_of(name))
    assert (report.verdict, ids(report)[0]) == (verdict, first)
    assert seen in report.findings[0].seen


RAS_OK = text_of("ras-first-hides-rest.txt").partition("[rank3]")[0]
RAS_BEHIND = text_of("ras-after-a-line.txt").partition("\n")[2]
TIMED_OUT = text_of("ras-first-hides-rest.txt").removeprefix(RAS_OK)
XID = "[ 12.5] NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, GPU has fallen off the bus.\n"
KILLED = "srun: error: nid001: task 3: Exited with exit code 137\n"
BEFORE = ["", "$ ncclras -v\n", "root@box:~# kubectl exec w-0 -- ncclras\n", "Defaulted container w out of: w\n"]


@together(
    "text, verdict, first",
    [
        (RAS_OK, PASS, ""),
        (RAS_OK + XID, FAIL, "gpu-xid"),
        (XID + RAS_OK, FAIL, "gpu-xid"),
        (RAS_OK + KILLED, FAIL, "program-failed"),
        (KILLED + RAS_OK, FAIL, "program-failed"),
        (TIMED_OUT + RAS_OK, FAIL, "collective-timed-out"),
        (RAS_BEHIND, WARN, "rank-did-not-join"),
        (RAS_BEHIND + RAS_BEHIND, FAIL, "rank-did-not-join"),
        (RAS_BEHIND + TIMED_OUT, FAIL, "rank-did-not-join"),
    ],
)
def test_an_answer_of_ras_hides_nothing_and_is_hidden_by_nothing(text: str, verdict: Verdict, first: str) -> None:
    for before in BEFORE:
        report = report_of(before + text)
        assert (report.verdict, (ids(report) or [""])[0]) == (verdict, first), before


@together(
    "status, errors, below, verdict, seen",
    [
        ("RUNNING", "OK", "", PASS, ""),
        ("FINALIZE", "OK", "", PASS, ""),
        ("INIT", "OK", "", WARN, "all ranks have status INIT"),
        ("ABORT", "OK", "", WARN, "all ranks have status ABORT"),
        ("RUNNING", "INCOMPLETE", "", WARN, "INCOMPLETE in the table"),
        ("RUNNING", "ERROR,MISMATCH", "", WARN, "ERROR,MISMATCH in the table"),
        (
            "RUNNING",
            "OK",
            "TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n",
            WARN,
            "2",
        ),
        ("RUNNING", "OK", "INCOMPLETE\n  Missing communicator data from 3 job processes\n", WARN, "3 job processes"),
        (
            "INIT",
            "MISMATCH",
            (
                "#0-0 (aa) MISMATCH\n  Communicator ranks have different status\n  6 ranks have status RUNNING\n"
                "  2 ranks have status INIT\n  Rank 1 -- GPU 1 managed by process 8 on node a\n"
                "  Rank 5 -- GPU 1 managed by process 9 on node b\n"
            ),
            WARN,
            "6 ranks have status RUNNING",
        ),
        (
            "FINALIZE",
            "MISMATCH",
            (
                "#0-0 (aa) MISMATCH\n  Communicator ranks have different status\n  7 ranks have status FINALIZE\n"
                "  Rank 2 has status RUNNING -- GPU 2 managed by process 8 on node a\n"
            ),
            WARN,
            "rank 2 (a:8) has status RUNNING",
        ),
    ],
)
def test_every_status_and_error_of_ras_counts(
    status: str, errors: str, below: str, verdict: Verdict, seen: str
) -> None:
    report = report_of(RAS_OK.replace("RUNNING      OK", f"{status}  {errors}") + below)
    assert report.verdict is verdict
    assert seen in (report.findings[0].seen if report.findings else "")


FRAMES = text_of("torch-stack-only.log").partition("\n")[2]
WORK = "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=1)"
TORCH = "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632"
XLA = "INTERNAL: external/xla/nccl_utils.cc:275: NCCL operation ncclCommInitRank(&comm, n, id, rank) failed"


@together(
    "text, first, seen",
    [
        ("[rank1]:[E PG.cpp:7] Stack trace of the failed collective:\n" + FRAMES, "collective-timed-out", "broadcast"),
        (
            "Stack trace of the failed collective:\n" + FRAMES + "next line",
            "collective-timed-out",
            "train.py:41 (step)",
        ),
        ("[rank2]: Stack trace of the failed collective: ", "collective-timed-out", "failed collective"),
        (f"Exception raised from checkTimeout at {TORCH} (most recent", "collective-timed-out", "checkTimeout"),
        (f"Exception raised from checkForNCCLErrors at {TORCH} (most recent", "nccl-call-failed", "raised from"),
        ("frame #2: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(a) + 0x1e6", "collective-timed-out", "frame #2"),
        (
            '  File "/v/torch/distributed/distributed_c10d.py", line 2801, in all_reduce',
            "program-exception",
            "Traceback",
        ),
        ("ank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,", "collective-timed-out", "SeqNum=5"),
        (f"Rank 3] Watchdog caught collective operation timeout: {WORK} ran", "collective-timed-out", "SeqNum=5"),
        (f"W external/xla/support.cc:58] Intercepted:\n{XLA}: unhandled system error", "nccl-call-failed", "system"),
        (f"jaxlib.xla_extension.XlaRuntimeError: {XLA}: invalid usage", "nccl-invalid-usage", "invalid usage"),
    ],
)
def test_fragments_of_frameworks_are_failures(text: str, first: str, seen: str) -> None:
    report = report_of(text + "\n")
    assert ids(report)[0] == first
    assert report.verdict is FAIL or first == "program-exception"
    assert seen in report.findings[0].seen
