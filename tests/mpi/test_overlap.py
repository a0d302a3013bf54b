"""`gpubench overlap` under mpirun without GPUs, and how a user's NCCL settings affect caps."""

import json
import os
import sys
from pathlib import Path

import pytest

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.machine.nvml import read_driver
from gpubench.model.terms.overlap import DEFAULT_CTAS, Partner
from gpubench.training.overlap_options import OverlapPlan
from gpubench.training.overlap_rank import check_caps, check_memory, check_ranks
from tests.cli.running import environment, gpubench, mpirun
from tests.mpi.jobs import document_of

PROGRAM = (sys.executable, "-m", "tests.mpi.fake_overlap")
SHORT = (
    *("overlap", "--seconds", "0.01", "--dtype", "float32", "--ctas", "own,1,8", "--sizes", "4K"),
    *("--partner", "chain", "--width", "100"),
)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(read_driver(os.environ).visible > 0, reason="this machine has GPUs")
def test_ranks_without_gpus_refuse_once_and_name_the_simulation() -> None:
    result = mpirun(2, "overlap", "--sizes", "1M")
    assert result.returncode == 3
    assert result.stderr.count("no usable GPU") == 1
    assert "--simulate hgx-h200-4" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.mpi
def test_a_whole_job_on_fake_gpus(tmp_path: Path) -> None:
    table = tmp_path / "overlap.txt"
    as_data = ("--format", "json", "--exit-zero")  # CPUs compute more slowly than GPUs are expected to
    result = gpubench(*SHORT, *as_data, "--output", str(table), program=PROGRAM)
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    rows = document["overlap"]
    assert [(row["partner"], row["size_bytes"], row["ctas"]) for row in rows] == [
        ("chain", 2**12, None),
        ("chain", 2**12, 8),
    ]
    assert {(row["ranks"], row["origin"], row["backend"]) for row in rows} == {(4, "measured", "nccl")}
    assert {(row["wrong"], row["verified"]) for row in rows} == {(0, "last")}
    assert [row["capped_by"] for row in rows] == [None, "configuration"]
    assert [row["channels"] for row in rows] == [1, 8], "as logged"
    assert {(row["sm_clock_mhz"], row["power_w"], row["throttled_by"]) for row in rows} == {
        (1695, 690.0, "sw_power_cap")
    }
    assert len(document["rows"]) == 1
    assert [row["own_drift_percent"] is not None for row in document["shortest_steps"]] == [True]
    assert [row["conclusion"] for row in document["fallback"]] == ["direct"]
    assert document["metadata"]["subject"] == "overlap"
    text = table.read_text()
    assert "1 CTA: NCCL refused: Error : maxCTAs 1 is less than minCTAs" in text
    assert "the cap with the shortest step:" in text


@pytest.mark.mpi
def test_wrong_data_beside_computation_and_a_staged_path_under_a_users_own_mpirun(tmp_path: Path) -> None:
    output = tmp_path / "overlap.json"
    ill = environment(GPUBENCH_TEST_LOGS="p2p-disabled", NCCL_P2P_DISABLE="1", GPUBENCH_TEST_SPOILED_STEPS="1")
    result = mpirun(4, *SHORT, "--output", str(output), env=ill, program=PROGRAM)
    assert result.returncode == 1, result.stdout + result.stderr
    lines = [line.split()[:2] for line in result.stdout.splitlines()]
    assert ["4K", "own"] in lines
    assert ["4K", "8"] in lines
    document = json.loads(output.read_text())
    assert document["verdict"] == "FAIL"
    assert [each["id"] for each in document["findings"]][:2] == ["wrong-data", "host-staged"]
    assert all(row["wrong"] for row in document["overlap"])


@pytest.mark.mpi
def test_a_rank_that_hangs_beside_computation_ends_the_run() -> None:
    stuck = environment(GPUBENCH_TEST_STUCK_STEPS="1")
    result = gpubench(*SHORT, "--timeout", "2", env=stuck, program=PROGRAM)
    assert result.returncode == 3
    assert "no progress for" in result.stderr
    assert "rank 1" in result.stderr


@pytest.mark.parametrize("name", ["NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"])
def test_caps_beside_a_cap_of_the_user_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=8, which is already set") as caught:
        check_caps(DEFAULT_CTAS, {name: "8"})
    assert "--ctas own" in str(caught.value.next_step)
    with pytest.raises(UsageError) as ours:
        check_caps(DEFAULT_CTAS, {name: "8"}, own=[name])
    assert ours.value.next_step == "--ctas own, or fewer --ranks-per-gpu"
    check_caps((None,), {name: "8"})
    check_caps(DEFAULT_CTAS, {"NCCL_DEBUG": "INFO"})


def test_partners_that_do_not_fit_are_refused_before_anything_is_taken() -> None:
    asked = OverlapPlan(partners=(Partner.GEMM, Partner.COPY), gemm_side=16384)
    check_memory(asked, 3 * 2**30)
    with pytest.raises(CouldNotMeasureError, match=r"gemm, copy and the collective together need 2.5 GiB") as caught:
        check_memory(asked, 2 * 2**30)
    assert "--gemm 4096" in str(caught.value.next_step)


def test_one_rank_has_nobody_to_talk_to() -> None:
    with pytest.raises(UsageError, match="one rank"):
        check_ranks(1)
    check_ranks(2)


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_do_not_simulate() -> None:
    result = mpirun(2, "overlap", "--simulate", "hgx-h200-4")
    assert result.returncode == 2
    assert result.stderr.count("overlap --simulate under") == 1
