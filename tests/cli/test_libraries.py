"""`gpubench libraries` as a user types it: this environment, one with two NCCLs, a recording, several ranks."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.running import environment, gpubench
from tests.fakes.shared_objects import wheel
from tests.formats.schema import validate
from tests.mpi import kept


def test_this_environment(tmp_path: Path) -> None:
    output = tmp_path / "libraries.json"
    result = gpubench("libraries", "--output", str(output))
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


def two_nccls(tmp_path: Path) -> dict[str, str]:
    """An environment with two wheels of NCCL."""
    folders = [tmp_path / "one", tmp_path / "other"]
    wheel(folders[0], "nvidia-nccl-cu12", "2.27.3", "nvidia/nccl/lib/libnccl.so.2")
    wheel(folders[1], "nvidia-nccl-cu13", "2.28.9", "nvidia/nccl/lib/libnccl.so.2")
    return environment(PYTHONPATH=os.pathsep.join(map(str, folders)))


def test_two_nccls_are_a_finding_and_strict_fails(tmp_path: Path) -> None:
    folder = str(tmp_path / "recording")
    result = gpubench("libraries", "-q", "--record", folder, env=two_nccls(tmp_path))
    assert result.returncode == 0, result.stderr
    assert re.search(r"WARN nccl-versions-differ: NCCL 2\.27\.3 and .*2\.28\.9", result.stdout)  # and its own
    assert gpubench("libraries", "-q", "--strict", "--replay", folder).returncode == 1


def test_a_recording_of_topo_holds_them(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    assert gpubench("topo", "--record", str(folder), "-q").returncode == 0
    replayed = gpubench("libraries", "--replay", str(folder))
    assert replayed.returncode == 0, replayed.stderr
    assert "(RECORDED)" in replayed.stdout
    assert "mpi4py" in replayed.stdout
    lines = (folder / "libraries.jsonl").read_text()
    (folder / "libraries.jsonl").write_text(json.dumps({**json.loads(lines), "schema_version": 2}) + "\n")
    newer = gpubench("libraries", "--replay", str(folder))
    assert (newer.returncode, "line 1: schema_version 2" in newer.stderr) == (2, True)
    assert "pip install --upgrade gpubench" in newer.stderr


def test_a_recording_without_them_says_what_to_type() -> None:
    result = gpubench("libraries", "--replay", "tests/machines/h200x4-vm")
    assert result.returncode == 2
    assert "holds no samples of libraries" in result.stderr
    assert "gpubench libraries --record" in result.stderr


def test_replay_and_record_exclude_each_other(tmp_path: Path) -> None:
    result = gpubench("libraries", "--replay", str(tmp_path), "--record", str(tmp_path / "x"))
    assert result.returncode == 2


@pytest.mark.mpi
def test_every_node_is_read_once_under_mpirun() -> None:
    result = kept.mpirun(2, "libraries", "--format", "csv")
    assert result.returncode == 0, result.stderr
    assert sum(line.split(",")[1] == "mpi4py" for line in result.stdout.splitlines()) == 1
