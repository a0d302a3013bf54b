"""`gpubench topo --software` as a user types it: this environment, recordings, one with two NCCLs, several ranks."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.running import gpubench, mpirun
from tests.formats.schema import validate


def test_this_environment_and_a_recording_of_it(tmp_path: Path) -> None:
    """In the recording there are two NCCLs: tests/backends/libraries finds those of two wheels."""
    output, folder = tmp_path / "libraries.json", tmp_path / "recording"
    result = gpubench("topo", "--software", "--output", str(output), "--record", str(folder))
    assert result.returncode == 0, result.stderr
    assert "mpi4py" in result.stdout
    assert "not here: " in result.stdout
    document = json.loads(output.read_text())
    validate(document)
    found = {row["library"]: row for row in document["libraries"]}
    assert found["mpi4py"]["found"] is True
    assert found["MPI"]["version"]
    assert found["MPI"]["used_by"][0].startswith("mpi4py ")
    assert {
        "NCCL",
        "UCX",
        "NVSHMEM",
        "MSCCL++",
        "torch",
        "nccl4py",
        "CuPy",
        "dma-buf",
        "nvidia_peermem",
        "gdrdrv",
    } <= set(found)
    two_nccls_are_a_finding_and_strict_fails(folder)


def two_nccls_are_a_finding_and_strict_fails(folder: Path) -> None:
    path = folder / "libraries.jsonl"
    facts = json.loads(path.read_text())
    for version in ("2.27.3", "2.28.9"):
        facts["files"].append({"library": "NCCL", "path": f"/{version}/libnccl.so.2", "version": version})
    path.write_text(json.dumps(facts) + "\n")
    result = gpubench("topo", "--software", "-q", "--replay", str(folder))
    assert result.returncode == 0, result.stderr
    assert re.search(r"WARN nccl-versions-differ: NCCL 2\.27\.3 and .*2\.28\.9", result.stdout)  # and its own
    assert gpubench("topo", "--software", "-q", "--strict", "--replay", str(folder)).returncode == 1


def test_a_recording_of_topo_holds_them(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    assert gpubench("topo", "--record", str(folder), "-q").returncode == 0
    replayed = gpubench("topo", "--software", "--replay", str(folder))
    assert replayed.returncode == 0, replayed.stderr
    assert "(RECORDED)" in replayed.stdout
    assert "mpi4py" in replayed.stdout
    lines = (folder / "libraries.jsonl").read_text()
    (folder / "libraries.jsonl").write_text(json.dumps({**json.loads(lines), "schema_version": 2}) + "\n")
    newer = gpubench("topo", "--software", "--replay", str(folder))
    assert (newer.returncode, "line 1: schema_version 2" in newer.stderr) == (2, True)
    assert "pip install --upgrade gpubench-cluster" in newer.stderr


def test_a_recording_without_them_says_what_to_type() -> None:
    result = gpubench("topo", "--software", "--replay", "tests/machines/h200x4-vm")
    assert result.returncode == 2
    assert "has no samples for topo" in result.stderr
    assert "gpubench topo --record" in result.stderr


def test_the_old_name_prints_the_same_and_says_on_stderr_that_it_will_go() -> None:
    old, new = gpubench("libraries", "-q"), gpubench("topo", "--software", "-q")
    assert (old.returncode, old.stdout) == (new.returncode, new.stdout)
    assert "`libraries` is now `gpubench topo --software`" in old.stderr
    assert "libraries" not in new.stderr


def test_a_simulated_machine_has_no_libraries() -> None:
    result = gpubench("topo", "--software", "--simulate", "hgx-h200-4")
    assert (result.returncode, "--software and --simulate exclude each other" in result.stderr) == (2, True)


@pytest.mark.mpi
def test_every_node_is_read_once_under_mpirun() -> None:
    result = mpirun(2, "topo", "--software", "--format", "csv")
    assert result.returncode == 0, result.stderr
    assert sum(line.split(",")[1] == "mpi4py" for line in result.stdout.splitlines()) == 1
