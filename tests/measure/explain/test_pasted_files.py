"""Texts of several programs in one file, in any order."""

import html
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpubench.measure.explain.report import explain
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.fakes.nccl_logs import Job
from tests.measure.explain.test_report import ids, via

FILES = Path(__file__).parents[2] / "pasted"
FAIL, WARN, PASS = Verdict.FAIL, Verdict.WARN, Verdict.PASS


def report_of(text: str) -> Report:
    reader = NcclLogReader()
    reader.read(io.BytesIO(text.encode()))
    return explain(reader.facts(), ["log"])


def test_a_log_from_the_source_of_a_web_page_is_read_as_it_was_printed() -> None:
    for log in sorted((FILES.parent / "logs/h200x4-p2p-disabled").iterdir())[:1]:
        text = log.read_text()
        plain, escaped = report_of(text), report_of(html.escape(text))
        assert (escaped.verdict, escaped.findings) == (plain.verdict, plain.findings)
        assert [finding.id for finding in escaped.findings][:1] == ["host-staged"]


def text_of(name: str) -> str:
    return (FILES / name).read_text()


@pytest.mark.parametrize(
    ("name", "verdict", "first", "seen"),
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
        ("warn-text-on-next-lines.log", FAIL, "network-plugin-failed", "completed with error. RC: 107. Error: Inappr"),
        ("no-prefix.log", PASS, "excerpt", "2 pairs of ranks"),
        ("explain-p2p-off-on-command-line.log", FAIL, "nccl-shm-disabled", "over the network inside a node"),
        ("inspector-v40.jsonl", WARN, "rank-is-slow", "came last in 20 of 20 operations"),
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


@pytest.mark.parametrize(
    ("text", "verdict", "first"),
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


@pytest.mark.parametrize(
    ("status", "errors", "below", "verdict", "seen"),
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


@pytest.mark.parametrize(
    ("text", "first", "seen"),
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


PLUGIN = "n1:5:7 [0] ofi_process_cq:196 NCCL WARN"
CHANNEL = "n1:5:5 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/AWS Libfabric/0/GDRDMA\n"


@pytest.mark.parametrize(
    "warning",
    [
        f"{PLUGIN} NET/OFI Request 0x40 completed with error. RC: 107. Error: Inappropriate ioctl.\n",
        f"{PLUGIN}\n    NET/OFI Request 0x40 completed with error.\n    RC: 107. Error: Inappropriate ioctl.\n",
        f"{PLUGIN} \nNET/OFI Request 0x40 completed with error. RC: 107. Error: Inappropriate ioctl.\n",
        f"{PLUGIN} NET/OFI Request 0x40 completed with error.\n\tRC: 107. Error: Inappropriate ioctl.\n",
        f"[2026-05-13 18:01:41] {PLUGIN}\n  NET/OFI Request 0x40\n  completed with error.\n  RC: 107.\n",
    ],
)
def test_a_warning_goes_on_in_indented_lines(warning: str) -> None:
    report = report_of(CHANNEL + warning + CHANNEL)
    assert (report.verdict, ids(report)[0]) == (FAIL, "network-plugin-failed")
    assert "RC: 107" in report.findings[0].seen


def test_an_indented_line_behind_another_one_continues_no_warning() -> None:
    warning = f"{PLUGIN} Could not find real path of /sys/class/x\n"
    assert ids(report_of(CHANNEL + warning + CHANNEL + "    RC: 107\n")) == ["excerpt"]


MESSAGES = text_of("no-prefix.log").splitlines()[1:]


@pytest.mark.parametrize("head", ["", "  ", "[0] ", "INFO ", "NCCL INFO ", "[0] NCCL INFO ", "2026-01-01 00:00:00 "])
def test_lines_without_host_process_and_level_are_nccls(head: str) -> None:
    report = report_of("".join(f"{head}{line}\n" for line in MESSAGES))
    assert (report.verdict, ids(report)) == (PASS, ["excerpt"])
    assert "2 pairs" in report.findings[0].seen


@pytest.mark.parametrize(
    ("message", "id_"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct", "host-staged"),
        ("transport/shm.cc:551 -> 2", "nccl-call-failed"),
    ],
)
def test_what_is_wrong_counts_also_without_the_head_of_its_line(message: str, id_: str) -> None:
    assert ids(report_of("\n".join([*MESSAGES, message, ""])))[0] == id_


OFF = "NCCL_P2P_DISABLE=1"


@pytest.mark.parametrize(
    ("command", "is_off"),
    [
        (f"$ {OFF} NCCL_SHM_DISABLE=1 ./all_reduce_perf -g 2", True),
        (f"root@box:~# mpirun -np 2 -x {OFF} -x NCCL_SHM_DISABLE=1 ./all_reduce_perf", True),
        (f"mpirun -np 2 -x {OFF} \\\n  -x NCCL_SHM_DISABLE=1 ./all_reduce_perf", True),
        (f"$ export {OFF} NCCL_SHM_DISABLE=1", True),
        (f"export {OFF}\nexport NCCL_SHM_DISABLE='1'", True),
        ("% setenv NCCL_P2P_DISABLE 1 && setenv NCCL_SHM_DISABLE 1", True),
        (f"$ docker run --gpus all --env {OFF} -e NCCL_SHM_DISABLE=1 image all_reduce_perf", True),
        (f"$ srun --export=ALL,{OFF},NCCL_SHM_DISABLE=1 ./all_reduce_perf", True),
        ("$ mpiexec -genv NCCL_P2P_DISABLE 1 -genv NCCL_SHM_DISABLE 1 ./all_reduce_perf", True),
        ("$ NCCL_P2P_DISABLE=0 ./all_reduce_perf -g 2", False),
        (f"# {OFF} and NCCL_SHM_DISABLE=1 are not set", False),
        ("$ ./all_reduce_perf -g 2", False),
    ],
)
def test_variables_of_a_command_count_as_set(command: str, is_off: bool) -> None:
    _, _, rest = text_of("explain-p2p-off-on-command-line.log").partition("\n")
    report = report_of(f"{command}\n{rest}")
    assert (report.verdict, "disabled" in ids(report)[0]) == ((FAIL, True) if is_off else (WARN, False))
    assert not is_off or "export NCCL_P2P_DISABLE" not in " ".join(finding.next_command for finding in report.findings)


def test_a_variable_that_a_process_logs_counts_more_than_a_command() -> None:
    line = "box:11:20 [1] NCCL INFO {} set by environment to 0.\n"
    text = text_of("explain-p2p-off-on-command-line.log")
    report = report_of(text + line.format("NCCL_P2P_DISABLE") + line.format("NCCL_SHM_DISABLE"))
    assert report.verdict is WARN


JOB = Job()
HEALTHY = {
    "nothing": "",
    "log": "".join(JOB.logs()),
    "RAS": RAS_OK,
    "matrix": "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n",
    "stack": 'Process 7: python a.py\nPython v3.11.4 (python3)\n\nThread 7 (idle): "MainThread"\n    a (b.py:1)\n',
    "prose": "# The job\n\nIt ends with exit code 1, see [this](https://example.org).\n\n```text\nhello\n```\n\n",
}
ILL = {
    "host-staged": "".join(Job(via=via(inside="SHM/direct/direct")).logs()),
    "gpu-xid": XID,
    "collective-timed-out": TIMED_OUT,
    "rank-did-not-join": RAS_BEHIND,
    "program-failed": KILLED,
    "cuda-out-of-memory": text_of("xla-nccl-failed.log"),
    "nccl-ranks-disagree": text_of("colon-summary.log"),
}
BETWEEN = ["", "\n\n", "root@box:~# cat next\n", "```\n"]


@pytest.mark.parametrize(("healthy", "ill"), [(healthy, ill) for healthy in HEALTHY for ill in ILL])
def test_neither_order_nor_neighbours_change_what_is_wrong(healthy: str, ill: str) -> None:
    for between in BETWEEN:
        for text in (HEALTHY[healthy] + between + ILL[ill], ILL[ill] + between + HEALTHY[healthy]):
            report = report_of(text)
            assert ill in ids(report), between
            assert report.verdict in (FAIL, WARN)


DOCS = Path(__file__).parents[3]


@pytest.mark.parametrize("page", [DOCS / "README.md", *sorted((DOCS / "docs").rglob("*.md"))])
def test_no_page_about_failures_is_one(page: Path) -> None:
    report = report_of(page.read_text())
    assert report.verdict is not FAIL, report.findings[0].seen


OBJECTS = [json.loads(line) for line in text_of("inspector-v40.jsonl").splitlines()]


def v4_1(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stats = {"header": objects[0]["header"], "metadata": objects[0]["metadata"], "dump_stats": {"coll_records": 20}}
    return [stats, *objects]


def v4_3(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, each in enumerate(objects):
        if number == 0 or each["header"] != objects[number - 1]["header"]:
            found.append({"header": each["header"], "metadata": each["metadata"], "dump_stats": {"coll_records": 20}})
        found.append({"coll_perf": {**each["coll_perf"], "coll_algo": "RING", "coll_proto": "LL"}})
    return found


@pytest.mark.parametrize("form", [list, v4_1, v4_3])
def test_every_format_of_the_inspector_reads_the_same(form: Callable[[list[Any]], list[dict[str, Any]]]) -> None:
    objects = form(OBJECTS)
    for text in (
        "\n".join(json.dumps(each) for each in objects),
        "\n".join(json.dumps(each, indent=4) for each in objects),
        json.dumps(objects, indent=2),
        "$ cat inspector/*.log\n" + "\n".join(json.dumps(each) for each in objects),
        "".join(JOB.logs()) + "\n".join(json.dumps(each) for each in objects),
    ):
        report = report_of(text + "\n")
        assert (report.verdict, ids(report)[0]) == (WARN, "rank-is-slow")
        assert "came last in 20 of 20 operations" in report.findings[0].seen
