"""`gpubench watch` under mpirun: the first rank of a node reads it, and rank 0 shows all nodes."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.running import environment, mpirun

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.mpi


def watched(ranks: int, machine: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Watch on ranks that are the nodes of a simulated machine."""
    program = (sys.executable, "-m", "tests.mpi.fake_traffic")
    return mpirun(ranks, "watch", *arguments, env=environment(GPUBENCH_TEST_TRAFFIC=machine), program=program)


def test_every_node_is_seen_and_the_odd_one_named(tmp_path: Path) -> None:
    output, recorded = tmp_path / "watch.json", tmp_path / "recorded"
    result = watched(
        3,
        "hgx-h100-8*3 node1:traffic=staged",
        *("--for", "1500ms", "--interval", "300ms", "--strict", "--width", "160"),
        *("--output", str(output), "--record", str(recorded)),
    )
    assert result.returncode == 1, result.stderr
    lines = result.stdout.splitlines()
    assert any("s  host0, host2  direct" in line for line in lines)
    assert any("s  host1  staged" in line for line in lines)
    assert "FAIL host-staged: python (torch node0:29500) on host1 GPU0-7" in result.stdout
    document = json.loads(output.read_text())
    assert document["metadata"]["hosts"] == ["host0", "host1", "host2"]
    assert {row["node"]: row["way"] for row in document["jobs"]} == {
        "host0": "direct",
        "host1": "staged",
        "host2": "direct",
    }
    moments = {row["seconds"] for row in document["traffic"]}
    assert 1 < len(moments) <= 5, "a busy machine leaves out some"
    readings = (recorded / "watch.jsonl").read_text().splitlines()
    assert [json.loads(line)["host"] for line in readings] == ["host0", "host1", "host2"] * (len(moments) + 1)


@pytest.mark.slow
def test_all_ranks_read_nodes_with_many_gpus_at_the_longer_interval(tmp_path: Path) -> None:
    output = tmp_path / "watch.json"
    asked = ("--for", "3s", "-q", "--output", str(output))
    assert watched(2, "hgx-h100-8*2", *asked).returncode == 0
    document = json.loads(output.read_text())
    assert document["metadata"]["options"]["interval_s"] == 2.0
    assert len({row["seconds"] for row in document["traffic"]}) == 2


def test_waiting_for_traffic_ends_on_all_ranks_together() -> None:
    asked = ("--for", "600ms", "--interval", "300ms", "--until-traffic", "-q")
    result = watched(2, "hgx-h200-4*2", *asked)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("PASS: ")


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there are GPUs")
def test_nodes_without_gpus_are_told_once() -> None:
    result = mpirun(2, "watch", "--for", "1s")
    assert result.returncode == 3
    assert result.stderr.count("no usable GPU") == 1


@pytest.mark.slow
def test_what_is_simulated_needs_no_launcher() -> None:
    result = mpirun(2, "watch", "--simulate", "hgx-h200-4", "--for", "1s")
    assert result.returncode == 2
    assert "--simulate" in result.stderr
