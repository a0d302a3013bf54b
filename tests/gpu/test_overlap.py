"""On real GPUs: a collective concurrent with computation, its caps, its data, and the slowdown of both."""

import json
from typing import Any

import pytest

from tests.cli.running import gpubench, mpirun
from tests.gpu.machine import between_gpus, launch, launched, several_ranks, under_mpirun

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, *several_ranks]

SHORT = ("--seconds", "0.05", "--format", "json")


def measured(*arguments: str, **variables: str) -> dict[str, Any]:
    result = gpubench("overlap", *arguments, *launch(), *SHORT, env=launched(NCCL_NVLS_ENABLE="0", **variables))
    assert result.returncode == 0, result.stdout + result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_caps_are_taken_and_every_row_is_verified() -> None:
    document = measured("--sizes", "16M,64M", "--ctas", "own,8,2")
    rows = document["overlap"]
    assert [(row["size_bytes"] >> 20, row["ctas"]) for row in rows] == [
        (size, ctas) for size in (16, 64) for ctas in (None, 8, 2)
    ]
    assert {(row["wrong"], row["verified"], row["origin"]) for row in rows} == {(0, "last", "measured")}
    assert [row["channels"] for row in rows if row["ctas"] is not None] == [8, 2] * 2
    assert all(row["sm_clock_mhz"] and row["power_w"] for row in rows)
    by_cap = {row["ctas"]: row for row in rows if row["size_bytes"] == 64 << 20}
    assert by_cap[2]["communication_alone_us"] > 1.5 * by_cap[None]["communication_alone_us"]
    assert len(document["shortest_steps"]) == len(document["rows"]) == 2


def test_a_collective_waits_for_a_gemm_and_both_parts_make_up_its_slow_down() -> None:
    (row,) = measured("--sizes", "64M", "--ctas", "own")["overlap"]
    assert row["communication_slowdown"] > 1
    parts = 1 + row["waiting_slowdown"] + row["sharing_slowdown"]
    assert row["communication_slowdown"] == pytest.approx(parts)
    assert row["step_us"] >= 0.9 * max(row["partner_together_us"], row["communication_together_us"])


@pytest.mark.parametrize("partner", ["copy", "chain"])
def test_other_partners_compute_right_beside_it(partner: str) -> None:
    (row,) = measured("--sizes", "16M", "--ctas", "own", "--partner", partner)["overlap"]
    assert (row["wrong"], row["partner"]) == (0, partner)


@pytest.mark.parametrize("collective", ["allgather", "reducescatter", "broadcast", "alltoall", "sendrecv"])
def test_other_collectives_are_right_beside_it(collective: str) -> None:
    (row,) = measured("--collective", collective, "--sizes", "4M", "--ctas", "8", "--gemm", "2048")["overlap"]
    assert (row["wrong"], row["collective"]) == (0, collective)


@between_gpus("ranks of one are connected directly whatever is switched off")
def test_a_staged_fabric_is_a_finding_and_makes_steps_longer() -> None:
    words = ("--sizes", "64M", "--ctas", "own")
    staged, direct = measured(*words, "--exit-zero", NCCL_P2P_DISABLE="1"), measured(*words)
    assert "host-staged" in {each["id"] for each in staged["findings"]}
    assert staged["overlap"][0]["communication_alone_us"] > 3 * direct["overlap"][0]["communication_alone_us"]


def test_ranks_of_the_users_mpirun_measure_it_too() -> None:
    result = mpirun(2, "overlap", "--sizes", "16M", "--ctas", "own", *SHORT, env=under_mpirun(2, kernels_at_once=2))
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads(result.stdout[result.stdout.index("{\n") :])["overlap"]
    assert row["wrong"] == 0


def test_caps_beside_a_cap_of_the_user_are_refused() -> None:
    result = gpubench("overlap", "--sizes", "1M", *launch(), env=launched(NCCL_MAX_CTAS="8"))
    assert result.returncode == 2
    assert "NCCL_MAX_CTAS=8, which is already set" in result.stderr
    assert "Traceback" not in result.stderr
