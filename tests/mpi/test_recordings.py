"""Collectives of real ranks that are recorded, and replayed on another machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.running import ROOT, broken, environment, gpubench, mpirun
from tests.cli.test_collective_replay import comparable
from tests.formats.schema import VALIDATOR
from tests.mpi.jobs import on_fake_gpus
from tests.mpi.test_evidence import SWEEP
from tests.mpi.test_settings import emulated_nodes

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.mpi

HOST = ("allreduce", "--backend", "host", "--sizes", "1K:64K:8", "--iters", "3", "--no-progress")


def shown(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    VALIDATOR.validate(document)
    return document


def check_replay(folder: Path, measured: "subprocess.CompletedProcess[str]", collective: str = "allreduce") -> None:
    """The replaying machine knows nothing of the recorded machine, its NCCL or its settings."""
    again = gpubench(collective, "--replay", str(folder), "--format", "json")
    assert (again.returncode, again.stderr) == (measured.returncode, measured.stderr)
    was, now = shown(measured.stdout), shown(again.stdout)
    assert comparable(now) == comparable(was)
    assert list(now) == list(was)
    assert now["metadata"]["source"] == f"--replay {folder}"
    for section in ("rows", "rank_times", "evidence", "fallback", "winners"):
        assert {row["origin"] for row in now.get(section, ())} <= {"recorded"}
    assert now["metadata"]["origin"] == "recorded"


@pytest.mark.slow
def test_a_relative_folder_is_the_users(tmp_path: Path) -> None:
    shared = environment(PYTHONPATH=str(ROOT))
    measured = gpubench(*HOST, "--record", "seen", "--format", "json", env=shared, cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    folder = tmp_path / "seen"
    assert sorted(path.name for path in folder.iterdir()) == ["allreduce.jsonl", "nodes", "ranks.jsonl"]
    assert len((folder / "ranks.jsonl").read_text().splitlines()) == 2
    check_replay(folder, measured)
    topology = gpubench("topo", "--replay", str(folder))
    assert topology.returncode == 0, topology.stderr


@pytest.mark.parametrize(
    ("collective", "arguments"),
    [
        pytest.param("alltoall", ("--mode", "latency", "--iters", "30"), marks=pytest.mark.slow),
        pytest.param("broadcast", ("--iters", "auto", "--budget", "0.02", "--root", "1"), marks=pytest.mark.slow),
        ("reducescatter", ("--split", "pairs", "--iters", "3")),
    ],
)
def test_a_users_own_mpirun_and_every_way_of_timing(
    tmp_path: Path, collective: str, arguments: tuple[str, ...]
) -> None:
    folder, output = tmp_path / "seen", tmp_path / "result.json"
    outputs = ("--record", str(folder), "--output", str(output), "--no-progress")
    given = ("--backend", "host", "--sizes", "1K,64K", *arguments, *outputs)
    measured = mpirun(4, collective, *given)
    assert measured.returncode in (0, 1), measured.stderr  # slow CPUs may fail
    measured.stdout, measured.stderr = output.read_text(), ""  # mpirun reports ranks with exit code 1 on stderr
    check_replay(folder, measured, collective)


@pytest.mark.slow
def test_settings_beside_the_own_choice_and_what_nccl_refused(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    asked = ("--algo", "nvls,pat,tree", "--backend", "nccl,host", "--record", str(folder), "--format", "json")
    measured = on_fake_gpus("allreduce", "--sizes", "1K,64K", "--iters", "3", "--no-progress", *asked)
    assert measured.returncode in (0, 1), measured.stderr
    check_replay(folder, measured)
    document = shown(measured.stdout)
    assert document["winners"]
    assert [row["setting"] for row in document["refused"]] == ["nvls"]


def test_a_staged_path_fails_at_home_too_with_its_cause(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    asked = (*SWEEP, "--strict", "--record", str(folder), "--format", "json")
    measured = on_fake_gpus(*asked, logs="p2p-disabled", NCCL_P2P_DISABLE="1")
    assert measured.returncode == 1, measured.stderr
    check_replay(folder, measured)
    document = shown(measured.stdout)
    assert [row["cause"] for row in document["fallback"]] == ["nccl-p2p-disabled"]
    assert document["evidence"]
    logs = sorted((folder / "nccl").iterdir())
    assert [path.name for path in logs] == [f"rank{rank}.log" for rank in range(4)]
    explained = gpubench("explain", str(folder / "nccl"))
    assert explained.returncode == 1
    assert "SHM/direct" in explained.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--no-evidence",), ("--split", "2"), ("--evidence",)])
def test_what_nobody_watched_is_not_known_at_home_either(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = tmp_path / "seen"
    measured = on_fake_gpus(*SWEEP, *arguments, "--record", str(folder), "--format", "json")
    assert measured.returncode in (0, 1), measured.stderr
    check_replay(folder, measured)


@pytest.mark.slow
def test_a_hierarchy_on_two_nodes(tmp_path: Path) -> None:
    folder, output = tmp_path / "seen", tmp_path / "result.json"
    arguments = ("--hierarchical", "--record", str(folder), "--output", str(output))
    measured = emulated_nodes(*HOST, *arguments)
    assert measured.returncode in (0, 1), measured.stderr
    measured.stdout, measured.stderr = output.read_text(), ""
    check_replay(folder, measured)
    assert {row["setting"] for row in shown(measured.stdout)["rows"]} == {None, "hierarchical", "again"}


def test_rows_before_a_rank_died_are_there_and_the_replay_says_that_it_is_not_all(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    asked = ("--np", "2", "--record", str(folder), "--format", "json")
    measured = gpubench(*HOST, *asked, env=broken("1:kill"))
    assert measured.returncode == 3
    rows = shown(measured.stdout)["rows"]
    assert rows
    again = gpubench("allreduce", "--replay", str(folder), "--format", "json")
    assert again.returncode == 3
    document = shown(again.stdout)
    assert (document["verdict"], document["complete"]) == ("ERROR", False)
    without = [{name: held for name, held in row.items() if name != "origin"} for row in rows]
    assert [{name: held for name, held in row.items() if name != "origin"} for row in document["rows"]] == without
    assert [finding["id"] for finding in document["findings"]] == ["recording-cut-short"]


@pytest.mark.slow
def test_a_folder_with_a_recording_is_refused_before_ranks_start_under_mpirun_too(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "n0.json").write_text("{}")
    for result in (gpubench(*HOST, "--record", str(tmp_path)), mpirun(2, *HOST, "--record", str(tmp_path))):
        assert result.returncode == 2, result.stderr
        assert (result.stdout + result.stderr).count("already has a recording") == 1
