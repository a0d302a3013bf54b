"""Collectives on four ranks with fake GPUs: logs are read and merged, and paths are judged."""

import csv
import io
import re
from pathlib import Path

import pytest

from gpubench.model.results.report import COLLECTIVE_COLUMNS
from tests.cli.running import broken, gpubench
from tests.mpi.jobs import FAKE_GPUS, document_of, mpirun_on_fake_gpus, on_fake_gpus

pytestmark = pytest.mark.mpi

SWEEP = ("allreduce", "--sizes", "1K,2K,1M", "--iters", "3", "--warmup", "1", "--no-progress")
SMALL = ("allreduce", "--sizes", "1K", "--iters", "3")
RING = ["0 → 1", "1 → 2", "2 → 3", "3 → 0"]


def test_a_healthy_job_that_launches_itself() -> None:
    result = on_fake_gpus(*SWEEP, "--format", "json")
    assert result.returncode == 1, "GPUs that copy in Python are slow"
    assert "gpubench: fallback: none. All 4 pairs are direct over P2P/CUMEM (proven)" in result.stderr
    document = document_of(result)
    # The fake H200s copy in Python, and their counters move at each reading, as if others sent data.
    assert {each["id"] for each in document["findings"]} == {"foreign-nvlink-traffic"}
    assert {row["expected_source"] for row in document["rows"]} == {"profile hgx-h200-4"}
    ways = {(row["size_bytes"], row["algorithm"], row["protocol"], row["channels"]) for row in document["rows"]}
    assert ways == {(1024, "RING", "LL", 1), (2048, "RING", "LL", 1), (2**20, "RING", "LL", 1)}
    assert {(row["transport"], row["host_staged"]) for row in document["rows"]} == {("P2P/CUMEM", False)}
    assert {row["measurement"] for row in document["evidence"]} == {"present"}
    assert [row["pairs"] for row in document["fallback"]] == [RING]
    assert not {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"} & set(document["metadata"]["environment"])
    assert document["metadata"]["options"]["evidence"] == "kept"


SHARING = {"GPUBENCH_TEST_GPUS": "2", "GPUBENCH_TEST_NCCL_CODE": "23203"}


def test_ranks_that_share_gpus_are_started_said_and_not_judged(tmp_path: Path) -> None:
    """The four ranks on two GPUs are not compared with a machine of four H200s."""
    table = tmp_path / "table.txt"
    asked = (*SWEEP, "--ranks-per-gpu", "2", "--format", "json", "--output", str(table))
    result = on_fake_gpus(*asked, GPUBENCH_TEST_MPS="1", **SHARING)
    assert result.returncode == 0, result.stderr
    assert "no MPS server runs, so the 2 ranks of a GPU take turns" in result.stderr  # because the MPS is fake
    document = document_of(result)
    assert {(row["ranks"], row["ranks_per_gpu"], row["nodes"]) for row in document["rows"]} == {(4, 2, 1)}
    judged = {(row["expected_source"], row["limit_gb_s"]) for row in document["rows"]}
    assert judged == {(None, None)}
    assert not [each["id"] for each in document["findings"] if each["id"].startswith("slow")]
    assert {each["sm_percent"] for each in document["metadata"]["ranks"]} == {50}
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in document["metadata"]["environment"]
    text = table.read_text()
    assert "  2 ranks share each of GPU 0-1 (MPS, 50 % of its SMs each)" in text
    assert "expected          speed not judged: ranks share a GPU" in text


@pytest.mark.slow
def test_under_a_users_own_mpirun_nccl_is_asked_whether_ranks_may_share_a_gpu() -> None:
    one_gpu = {**SHARING, "GPUBENCH_TEST_GPUS": "1"}
    for settings, options, seen in (
        ({"GPUBENCH_TEST_GPUS": "1"}, (), "NCCL 2.28.9 from /fake/libnccl.so.2 refuses that"),
        (one_gpu, (), "NCCL_MULTI_RANK_GPU_ENABLE is not 1"),
        (
            {**one_gpu, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "GPUBENCH_TEST_MPS": "1"},
            (),
            "with 200 % of its SMs in total",
        ),
        (one_gpu, ("--ranks-per-gpu", "2"), "--ranks-per-gpu only if gpubench starts the ranks"),
    ):
        result = mpirun_on_fake_gpus(2, *SMALL, *options, **settings)
        assert result.returncode == 2, result.stderr
        assert result.stderr.count(seen) == 1, result.stderr
    taken = mpirun_on_fake_gpus(4, *SMALL, NCCL_MULTI_RANK_GPU_ENABLE="1", **SHARING)
    assert taken.returncode == 0, taken.stderr
    assert "  2 ranks share each of GPU 0-1 (taking turns)" in taken.stdout


def test_a_staged_job_under_a_users_own_mpirun() -> None:
    asked = (*SWEEP, "--evidence", "--width", "100")
    result = mpirun_on_fake_gpus(4, *asked, logs="p2p-disabled", NCCL_P2P_DISABLE="1")
    assert result.returncode == 1, result.stderr
    text = " ".join(result.stdout.split())
    assert "fallback: HOST-STAGED: ranks 0 → 1, 1 → 2, 2 → 3, 3 → 0 through host memory over SHM/direct" in text
    assert "NCCL_P2P_DISABLE=1 in the environment try: gpubench p2p && unset NCCL_P2P_DISABLE" in text
    assert "FAIL host-staged" in text
    assert "FAIL: " in text
    assert "rank 0 rank 1 NV18 + - - + SHM/direct" in text
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100


@pytest.mark.slow
def test_csv_is_parseable_and_the_verdict_is_on_stderr() -> None:
    result = on_fake_gpus(*SWEEP, "--format", "csv", logs="p2p-disabled", NCCL_P2P_DISABLE="1")
    assert result.returncode == 1
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert list(rows[0]) == list(COLLECTIVE_COLUMNS)
    assert {row["host_staged"] for row in rows} == {"true"}
    assert result.stderr.startswith("gpubench: fallback: HOST-STAGED")
    section = on_fake_gpus(*SWEEP, "--format", "csv", "--section", "fallback")
    assert [row["conclusion"] for row in csv.DictReader(io.StringIO(section.stdout))] == ["direct"]


@pytest.mark.parametrize("own_mpirun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_nccl_refuses_is_one_error_with_the_pair_and_the_cause(own_mpirun: bool) -> None:
    refused = {"logs": "refused", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    arguments = (*SWEEP, "--strict")
    result = mpirun_on_fake_gpus(4, *arguments, **refused) if own_mpirun else on_fake_gpus(*arguments, **refused)
    said = result.stdout + result.stderr
    assert result.returncode == 3, said
    assert said.count("NCCL finds no path: rank 0 → rank 1") == 1
    assert "NCCL_P2P_DISABLE=1 in the environment" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_rank_that_gets_stuck_while_paths_are_found_out_is_named() -> None:
    """The first operation connects the ranks, so it may take as long as an initialisation: here 4 s."""
    start = broken("") | {"GPUBENCH_TEST_START_SECONDS": "4", "GPUBENCH_TEST_STUCK": "2"}
    result = gpubench(*SWEEP, "--timeout", "1", env=start, program=FAKE_GPUS)
    assert result.returncode == 3, result.stderr
    assert re.search("no progress for [0-9]+ s: the others wait for rank 2", result.stderr)
    missing = next(line for line in result.stderr.splitlines() if "missing:" in line)
    assert "in try-out 1K out of place, 1 of 1 done" in missing


@pytest.mark.slow
def test_no_evidence_is_nothing_at_all() -> None:
    result = on_fake_gpus(*SWEEP, "--no-evidence", "--format", "json")
    document = document_of(result)
    assert {(row["transport"], row["algorithm"]) for row in document["rows"]} == {(None, None)}
    assert document["evidence"] == []
    assert [row["conclusion"] for row in document["fallback"]] == ["unknown"]
    assert "fallback: not known: --no-evidence" in result.stderr
    refused = on_fake_gpus(*SWEEP, "--no-evidence", "--strict")
    assert refused.returncode == 2
    assert "--strict with --no-evidence" in refused.stderr


@pytest.mark.slow
def test_a_log_that_cannot_be_heard_is_said_so_in_one_line() -> None:
    deaf = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL"}
    result = on_fake_gpus("allreduce", "--sizes", "1K", "--format", "json", "--exit-zero", **deaf)
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    assert {(row["transport"], row["host_staged"]) for row in document["rows"]} == {(None, None)}
    line = "NCCL's log was not captured: rank 0: NCCL_DEBUG_SUBSYS=COLL leaves INIT out, which shows connections"
    assert result.stderr.count(line) == 1


@pytest.mark.slow
def test_the_host_backend_has_no_paths_to_speak_of() -> None:
    result = gpubench("allreduce", "--backend", "host", "--sizes", "1K", "--format", "json", "--no-progress")
    document = document_of(result)
    assert (result.returncode, result.stderr) == (0, "")
    assert (document["evidence"], document["fallback"]) == ([], [])


@pytest.mark.slow
def test_strict_judges_paths() -> None:
    """That a healthy job passes it too, no believed GPU can show: all are slow."""
    staged = on_fake_gpus(*SWEEP, "--strict", logs="p2p-disabled", NCCL_P2P_DISABLE="1")
    assert staged.returncode == 1
    assert "FAIL host-staged" in staged.stdout
