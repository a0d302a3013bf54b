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
