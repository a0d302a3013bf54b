"""Benchmarks begin, and those without a GPU run, as small as they can be: nobody looks at them for months."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.running import ROOT, environment

SMALL = {
    "against_mpi": ["--help"],
    "against_nccl_tests": ["--help"],
    "against_nvbandwidth": ["--help"],
    "automatic_iterations": ["--help"],
    "causes": ["--variations", "12"],
    "check_verdicts": ["--seeds", "1", "--fault-seeds", "1", "--only", "hgx-h200-4"],
    "compare_alarms": ["--seeds", "1", "--only", "nothing"],
    "compare_speed": ["--nodes", "17", "--runs", "1"],
    "evidence_cost": ["--help"],
    "healthy_speed": ["--help"],
    "hostile_files": ["--only", "profiles", "--name", "dotted"],
    "provoked_causes": ["--help"],
    "published_collectives": [],
    "nvml_costs": ["--help"],
    "plan_faults": [],
    "plan_published": ["--only", "titan H100 8b selective"],
    "plan_steps": ["--help"],
    "plan_validation": [],
    "explain_speed": ["--ranks", "16", "--megabytes", "0.1"],
    "read_large_machine": ["--help"],
    "run_cost": ["--runs", "1", "true"],
    "scan_control": ["--supervisors", "20", "--rounds", "2"],
    "scan_confusion": ["--nodes", "16", "--rails", "2", "--leaf", "8", "--seeds", "1", "--losses", "0.5"],
    "result_path": ["--ranks", "8,16", "--rows", "4"],
    "traffic_jobs": ["--help"],
    "watch_cost": ["--help"],
    "watch_parts": ["--gpus", "2", "--interval", "0.05", "--readings", "24"],
    "watch_verdicts": ["--help"],
    "what_fires": ["--help"],
    "start_up": ["--runs", "1", "--steps", "--", "--version"],
}


class Ended(NamedTuple):
    """How a benchmark ended."""

    code: object
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a benchmark in this process: to import what they use takes longer than most of them."""

    def run(name: str, *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # what other tests import of it
        code: object = 0
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
        return Ended(code, *capsys.readouterr())

    return run


def test_every_benchmark_is_tried() -> None:
    assert sorted(SMALL) == sorted(path.stem for path in Path(ROOT, "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", [name for name in SMALL if SMALL[name] != ["--help"]])
def test_a_small_run_ends_well(name: str, run: Run) -> None:
    ended = run(name, *SMALL[name])
    assert ended.code == 0
    assert ended.out


def test_those_that_need_gpus_begin(run: Run) -> None:
    for name in SMALL:
        if SMALL[name] == ["--help"]:
            ended = run(name, "--help")
            assert (ended.code, ended.out[:6]) == (0, "usage:"), name


def test_a_watch_that_does_not_run_makes_the_cost_of_one_unknown() -> None:
    command = [sys.executable, "-c", "from benchmarks.watch_cost import BesideWatch; BesideWatch()"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment(GPUBENCH_TIMEOUT="never")
    )
    assert done.returncode == 1
    assert "nothing was measured: the watch did not run whole: it showed no interval" in done.stderr
    assert "never" in done.stderr


def test_real_runs_are_compared_by_kind_of_machine(run: Run, tmp_path: Path) -> None:
    text = Path(ROOT, "tests/results/h200x4/all_reduce.txt").read_text()
    for name, content in (
        ("one/a.txt", text),
        ("one/b.txt", text),
        ("one/notes.txt", "no results"),
        ("two/a.txt", text),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    done = run("compare_alarms", "--real", str(tmp_path))
    assert done.code == 0
    one, two = done.out.splitlines()[2:]
    assert one.split() == ["one", "2", "24", "2", "0", "+", "0", "2", "+", "0", "2", "+", "0", "2", "+", "0"]
    assert two.split() == ["two", "1", "nothing", "to", "compare"]
    assert "notes.txt" in done.err


MPIRUN = """#!/bin/sh
test "$OMPI_ALLOW_RUN_AS_ROOT" = 1 || exit
case "$*" in *--iters*) small=10.0 large=20.0 ;; *) small=10.1 large=30.0 ;; esac
case "$*" in
    *gpubench*) printf '%s\\n' verdict,size_bytes,time_us "\"a, b\",8,$small" "\"a, b\",1024,$large" ;;
    *) echo "# nccl-tests
#   size  count  type  redop  root  time  algbw  busbw  #wrong
       8     2  float    sum    -1  10.0   0.0   0.0   N/A   10.1   0.0   0.0   N/A
    1024   256  float    sum    -1  20.0   0.1   0.1   N/A   20.1   0.1   0.1   N/A" ;;
esac
"""


def test_three_ways_in_turns_beside_nccl_tests(run: Run, tmp_path: Path) -> None:
    """What the ways print is read, and a size is slower that is over its bound: the default's 1 KiB, and no other."""
    mpirun, table = tmp_path / "mpirun", tmp_path / "table.md"
    mpirun.write_text(MPIRUN)
    mpirun.chmod(0o755)
    words = ["--peer", str(tmp_path), "--mpirun", str(mpirun), "--runs", "2", "--markdown", str(table)]
    command = ["against_nccl_tests", *words, "--collectives", "allreduce", "--ranks", "2"]
    done = run(*command)
    assert (done.code, done.err) == (1, "")
    assert "6 sizes, 1 slower than the bounds" in done.out
    plain, graph = table.read_text().splitlines()[2:]
    assert plain.startswith("| allreduce | 2 | plain | 2 | 1.000, 1.00 | 1.255, 1.50 | 1 | 1.00, 1.00, 1.00 | ")
    assert graph.startswith("| allreduce | 2 | graph | 2 | 1.000, 1.00 | - | 0 | 1.00, 1.00, - | ")
    late = run(*command, "--seconds", "0")
    assert (late.code, "Left out for want of time: allreduce of 2 ranks" in late.out) == (1, True)


def test_ranks_that_share_a_gpu_are_measured_under_mps_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    done = run("against_nccl_tests", "--peer", str(tmp_path), "--ranks-per-gpu", "2")
    assert (done.code, "no MPS server runs" in done.err) == (2, True)
