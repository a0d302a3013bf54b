"""On real GPUs: copies between processes through CUDA IPC, and by NCCL with each rank as a node."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.running import ROOT, gpubench, mpirun_command
from tests.gpu.machine import DRIVER, between_gpus, gpu_of_rank, several_ranks, under_mpirun

NODE_PER_RANK = "a-node-per-rank"

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, *several_ranks]
copies_between = between_gpus("copies from the GPU of one rank to that of another")


def started(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=under_mpirun(2), cwd=ROOT
    )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@copies_between
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_pair_of_ranks_as_fast_as_in_one_process(ranks: int, tmp_path: Path) -> None:
    if ranks > DRIVER.visible:
        pytest.skip("fewer GPUs")
    output = tmp_path / "p2p.json"
    result = started(mpirun_command(ranks, "p2p", "--output", str(output)))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("PASS: ")
    found = json.loads(output.read_text())["pairs"]
    assert len(found) == 3 * ranks * (ranks - 1)
    assert {(row["scope"], row["verified"]) for row in found} == {("ipc", "last")}
    alone = gpubench("p2p", "--pairs", "0-1", "--sizes", "256M", "--format", "csv")
    in_one_process = next(row for row in rows(alone.stdout) if row["peer"] == "on")
    written = [row["bandwidth_gb_s"] for row in found if row["size_bytes"] == 2**28 and row["direction"] == "write"]
    assert min(written) > 0.95 * float(in_one_process["bandwidth_gb_s"])
    assert all(row["host_staged"] is False for row in found if row["nvlink_bytes"] and row["size_bytes"] == 2**28)


@copies_between
def test_each_rank_may_see_a_single_gpu() -> None:
    words = [sys.executable, "-m", "gpubench", "p2p", "--sizes", "8,1001,4M", "--format", "csv"]
    script = f"{gpu_of_rank()} exec " + " ".join(words)
    result = started([mpirun_command(1)[0], "-n", "2", "bash", "-c", script])
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(result.stdout)
    assert len(found) == 2 * 3
    assert {row["verified"] for row in found} == {"last"}
    assert "?" not in {row["path_class"] for row in found}


def test_between_nodes_nccl_moves_the_right_data() -> None:
    words = [sys.executable, "-m", "tests.gpu.test_p2p_ranks", NODE_PER_RANK]
    result = started([mpirun_command(1)[0], "-n", "2", *words])
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(result.stdout)
    assert [(row["engine"], row["path_class"], row["verified"]) for row in found] == [("nccl", "NET", "last")] * 4
    assert all(float(row["bandwidth_gb_s"]) > 0 for row in found)


def node_per_rank() -> int:
    """Start a rank that is alone on its node for gpubench and NCCL."""
    from gpubench.backends.mpi import group as mpi
    from gpubench.cli.commands.machine import checked_p2p as checked
    from gpubench.jobs import rank
    from gpubench.jobs.p2p import STEPS
    from gpubench.jobs.plans import P2pPlan
    from gpubench.jobs.runner import CommandRankJob
    from gpubench.model.facts.environment import detect_launcher
    from tests.cli.running import planned

    launch = detect_launcher(os.environ)
    assert launch is not None
    os.environ |= {"CUDA_VISIBLE_DEVICES": str(launch.rank % DRIVER.visible), "NCCL_HOSTID": f"node{launch.rank}"}
    mpi.nodes = lambda group: (list(range(group.size)), 0)
    options = planned(P2pPlan, checked, {"sizes": "1001,16M", "format": "csv"})
    return rank.run(
        lambda group, watch: CommandRankJob(STEPS, options, [], group, watch), launch, options.timeout_s, {}
    )


if __name__ == "__main__":
    sys.exit(node_per_rank())
