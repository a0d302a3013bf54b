"""On real GPUs: the replay of a recorded collective has the rows, paths and causes of the run."""

import json
from pathlib import Path

import pytest

from tests.cli.running import gpubench
from tests.cli.test_collective_replay import comparable
from tests.gpu.machine import launch, launched, several_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, *several_ranks]


@pytest.mark.parametrize("variables", [{}, {"NCCL_P2P_DISABLE": "1"}], ids=["plain", "p2p-disabled"])
@pytest.mark.parametrize("arguments", [(), ("--mode", "latency", "--iters", "50"), ("--algo", "ring,tree")])
def test_a_replay_says_what_the_run_said(tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    folder = tmp_path / "recorded"
    words = (*launch(2), "--sizes", "1K,64M", *arguments, "--record", str(folder), "--format", "json")
    measured = gpubench("allreduce", *words, env=launched(**variables))
    assert measured.returncode == 0, measured.stderr
    replayed = gpubench("allreduce", "--replay", str(folder), "--format", "json")
    assert (replayed.returncode, replayed.stderr) == (measured.returncode, measured.stderr)
    was, now = json.loads(measured.stdout), json.loads(replayed.stdout)
    assert was["evidence"]
    assert comparable(now) == comparable(was)
    assert (folder / "nccl" / "rank0.log").stat().st_size > 0
    assert gpubench("explain", str(folder / "nccl")).returncode in (0, 1)
