"""On real GPUs: the replay of a recorded collective says what the run said, of rows, paths and causes."""

import json
import os
from pathlib import Path

import pytest

from gpubench.hardware.node.nvml.library import read_driver
from tests.cli.running import environment, gpubench
from tests.cli.test_collective_replay import comparable

DRIVER = read_driver(os.environ)
RANKS = 2

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.skipif(DRIVER.visible < RANKS, reason="needs two GPUs")]


@pytest.mark.parametrize("variables", [{}, {"NCCL_P2P_DISABLE": "1"}], ids=["direct", "staged"])
@pytest.mark.parametrize("arguments", [(), ("--mode", "latency", "--iters", "50"), ("--algo", "ring,tree")])
def test_a_replay_says_what_the_run_said(tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    folder = tmp_path / "recorded"
    words = ("--np", str(RANKS), "--sizes", "1K,64M", *arguments, "--record", str(folder), "--format", "json")
    measured = gpubench("allreduce", *words, env=environment(**variables))
    assert measured.returncode == 0, measured.stderr
    replayed = gpubench("allreduce", "--replay", str(folder), "--format", "json")
    assert (replayed.returncode, replayed.stderr) == (measured.returncode, measured.stderr)
    was, now = json.loads(measured.stdout), json.loads(replayed.stdout)
    assert was["evidence"]
    assert comparable(now) == comparable(was)
    assert (folder / "nccl" / "rank0.log").stat().st_size > 0
    assert gpubench("explain", str(folder / "nccl")).returncode in (0, 1)
