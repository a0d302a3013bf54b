"""Benchmarks begin, and those without a GPU run, as small as they can be: nobody looks at them for months."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import ROOT

SMALL = {
    "against_nccl_tests": ["--help"],
    "against_nvbandwidth": ["--help"],
    "automatic_iterations": ["--help"],
    "causes": ["--variations", "12"],
    "check_verdicts": ["--seeds", "1", "--fault-seeds", "1"],
    "compare_alarms": ["--seeds", "1", "--only", "nothing"],
    "evidence_cost": ["--help"],
    "healthy_speed": ["--help"],
    "provoked_causes": ["--help"],
    "explain_speed": ["--ranks", "16", "--megabytes", "1"],
    "read_large_machine": ["--help"],
    "result_path": ["--ranks", "8,16"],
}


def test_every_benchmark_is_tried() -> None:
    assert sorted(SMALL) == sorted(path.stem for path in Path(ROOT, "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_ends_well(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALL[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
