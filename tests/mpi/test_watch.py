"""`gpubench watch` on ranks that mpirun started: the first rank of a node reads it, the first of all shows them."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.running import ROOT, environment
from tests.mpi.kept import mpirun

pytestmark = pytest.mark.mpi

INJECT = Path(__file__).parent / "inject"


def believing(*words: str) -> dict[str, str]:
    path = os.pathsep.join((str(INJECT), str(ROOT)))
    return environment(PYTHONPATH=path, GPUBENCH_TEST_TRAFFIC=" ".join(words))


def test_every_node_is_seen_and_the_odd_one_named(tmp_path: Path) -> None:
    output, recorded = tmp_path / "watch.json", tmp_path / "recorded"
    result = mpirun(
        3,
        *("watch", "--for", "1500ms", "--interval", "300ms", "--strict", "--width", "160"),
        *("--output", str(output), "--record", str(recorded)),
        env=believing("hgx-h100-8*3", "node1:traffic=staged"),
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


def test_all_ranks_read_nodes_with_many_gpus_at_the_longer_interval(tmp_path: Path) -> None:
    output = tmp_path / "watch.json"
    asked = ("watch", "--for", "3s", "-q", "--output", str(output))
    assert mpirun(2, *asked, env=believing("hgx-h100-8*2")).returncode == 0
    document = json.loads(output.read_text())
    assert document["metadata"]["options"]["interval_s"] == 2.0
    assert len({row["seconds"] for row in document["traffic"]}) == 2


def test_waiting_for_traffic_ends_on_all_ranks_together() -> None:
    result = mpirun(
        2, "watch", "--for", "600ms", "--interval", "300ms", "--until-traffic", "-q", env=believing("hgx-h200-4*2")
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("PASS: ")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there are GPUs")
def test_nodes_without_gpus_are_told_once() -> None:
    result = mpirun(2, "watch", "--for", "1s")
    assert result.returncode == 3
    assert result.stderr.count("no usable GPU") == 1


def test_what_is_simulated_needs_no_launcher() -> None:
    result = mpirun(2, "watch", "--simulate", "hgx-h200-4", "--for", "1s")
    assert result.returncode == 2
    assert "--simulate" in result.stderr
