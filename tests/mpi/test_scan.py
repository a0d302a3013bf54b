"""Scans of real ranks on this host, each as a node, and faults during the scan."""

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpubench.ranks.launch import Flavour, find_launcher
from tests.cli.running import gpubench, mpirun, without_gpus
from tests.mpi.scan_job import of_job, scan_of_ranks, seen_of, silent

pytestmark = pytest.mark.mpi

RECOVERY = ("--enable-recovery",)
"""Open MPI 4 and 5 keep other ranks alive if a rank dies"""


def needs_open_mpi_5() -> None:
    if find_launcher().flavour is not Flavour.OPEN_MPI:
        pytest.skip("the options are those of Open MPI")


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Mapping[str, Any]]:
    """Return the folder, exit code and report of an undisturbed scan."""
    folder = tmp_path_factory.mktemp("scanned")
    with scan_of_ranks(4, folder) as job:
        return folder, *job.finish()


@without_gpus
def test_every_rank_is_measured_and_all_together_are_a_ring_after_the_rounds(
    scanned: tuple[Path, int, Mapping[str, Any]],
) -> None:
    _, code, report = scanned
    assert code == {"INCONCLUSIVE": 3, "FAIL": 1}.get(report["verdict"], 0), "cores that others use as well are noisy"
    assert report["complete"]
    assert report["metadata"]["origin"] == "measured"
    assert report["metadata"]["backend"] == "host"
    assert [row["node"].rpartition(":")[2] for row in report["cells"]] == [f"rank{n}" for n in range(4)]
    assert all(row["both_ways_gb_s"] > 0 and row["failures"] == 0 for row in report["cells"])
    assert {row["pairs"] for row in report["rounds"]} == {2}
    assert silent(report) == {}
    whole = report["scan_collectives"][0]
    assert (whole["subject"], len(whole["nodes"]), whole["note"]) == ("all", 4, None)
    assert whole["measured_gb_s"] > 0
    assert whole["predicted_gb_s"] > 0


def test_workers_that_are_stopped_or_killed_and_a_dead_node_are_findings_and_the_others_go_on(tmp_path: Path) -> None:
    needs_open_mpi_5()
    with scan_of_ranks(5, tmp_path, options=RECOVERY) as job:
        killed, stopped, gone = job.processes(1, 2, 4)
        os.kill(stopped.worker, signal.SIGSTOP)  # the round lasts until its deadline
        os.kill(killed.worker, signal.SIGKILL)
        os.kill(gone.supervisor, signal.SIGKILL)
        _, report = job.finish()
        assert not Path(f"/proc/{stopped.worker}").exists()
    assert silent(report) == {"rank1": "node hangs", "rank2": "node hangs", "rank4": "node gone"}
    seen = {node.rpartition(":")[2]: part["seen"] for part in report["parts"] for node in part["nodes"]}
    assert "its worker died (signal 9)" in seen["rank1"]
    assert "its worker was stopped" in seen["rank2"]
    assert (report["verdict"], report["complete"]) == ("FAIL", True)
    failed = {row["node"].rpartition(":")[2] for row in report["cells"] if row["verdict"] == "FAIL"}
    assert failed >= {"rank1", "rank2", "rank4"}


@pytest.mark.slow
def test_with_ulfm_a_dead_node_is_a_finding_and_mpirun_ends(tmp_path: Path) -> None:
    needs_open_mpi_5()
    with scan_of_ranks(5, tmp_path, options=("--with-ft", "ulfm")) as job:
        gone, stopped = job.processes(2, 4)
        os.kill(stopped.worker, signal.SIGSTOP)
        os.kill(gone.supervisor, signal.SIGKILL)
        _, report = job.finish()
    assert silent(report) == {"rank2": "node gone", "rank4": "node hangs"}


@pytest.mark.slow
def test_a_node_that_is_stopped_as_a_whole_is_gone(tmp_path: Path) -> None:
    with scan_of_ranks(4, tmp_path) as job:
        (both,) = job.processes(3)
        os.kill(both.supervisor, signal.SIGSTOP)
        os.kill(both.worker, signal.SIGSTOP)
        job.wait_for_rounds(3)
        os.kill(both.supervisor, signal.SIGCONT)
        _, report = job.finish()
    assert silent(report) == {"rank3": "node gone"}
    assert "does not answer" in seen_of(report, "node gone")


def test_without_recovery_a_death_ends_the_job_and_its_rounds_are_judged_and_gone_on_with(tmp_path: Path) -> None:
    needs_open_mpi_5()
    with scan_of_ranks(4, tmp_path) as job:
        first, both = job.processes(0, 3, rounds=1)
        os.kill(first.supervisor, signal.SIGSTOP)  # before it judges, and mpirun ends the job
        os.kill(both.worker, signal.SIGSTOP)
        os.kill(both.supervisor, signal.SIGKILL)
        code, report = job.finish()
    assert code not in (0, 1)
    assert not report or not report.get("complete")
    rounds = tmp_path / "rounds"
    before = (rounds / "scan.jsonl").read_text()
    replayed = gpubench("scan", "--replay", str(rounds), "--format", "json")
    assert len(json.loads(replayed.stdout)["rounds"]) == before.count("\n") - 2
    words = ("scan", "--backend", "host", "--ranks-as-nodes", "--resume", str(rounds), "--format", "json")
    resumed = mpirun(3, *words)
    document = json.loads(resumed.stdout[resumed.stdout.index("{") :])
    assert silent(document) == {"rank3": "node gone"}
    seen = seen_of(document, "node gone")
    assert "not in the resumed job" in seen or "its supervisor is gone" in seen
    assert (rounds / "scan.jsonl").read_text().startswith(before)


@pytest.mark.slow
def test_who_dies_in_phase_0_of_a_job_that_only_judges_kept_rounds_is_named(
    scanned: tuple[Path, int, Mapping[str, Any]], tmp_path: Path
) -> None:
    needs_open_mpi_5()
    folder, _, before = scanned
    shutil.copytree(folder / "rounds", tmp_path / "rounds")
    kept = (tmp_path / "rounds" / "scan.jsonl").read_text()
    with scan_of_ranks(4, tmp_path, "--quick", options=RECOVERY, rounds="--resume") as job:
        job.wait_until(lambda: {1, 3} <= of_job(tmp_path).keys())
        found = of_job(tmp_path)
        os.kill(found[1].worker, signal.SIGKILL)
        os.kill(found[3].supervisor, signal.SIGKILL)
        _, report = job.finish()
    assert silent(report) == {"rank1": "node hangs", "rank3": "node gone"}
    assert len(report["rounds"]) == len(before["rounds"]), "nothing was measured but phase 0"
    assert (tmp_path / "rounds" / "scan.jsonl").read_text().startswith(kept)
    replayed = gpubench("scan", "--replay", str(tmp_path / "rounds"), "--format", "json")
    assert silent(json.loads(replayed.stdout)) == {"rank1": "node hangs", "rank3": "node gone"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "arguments", "said"),
    [
        (2, (), "scan of one node"),
        (2, ("--ranks-as-nodes",), "do not show which of them is slow"),
        (3, ("--simulate", "hgx-h100-8*8"), "nothing is measured here"),
    ],
)
def test_jobs_that_cannot_be_scanned_are_told_once(ranks: int, arguments: tuple[str, ...], said: str) -> None:
    result = mpirun(ranks, "scan", *arguments)
    assert result.returncode == 2
    assert (result.stdout + result.stderr).count(said) == 1
    assert "Traceback" not in result.stderr
