"""Run gpubench as a user does: a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpubench.hardware.launch import DAEMON_FAILED, find_launcher
from tests.cli import forking

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
SECONDS = 90

MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "^ofi",
}
"""What a test's own mpirun needs as root on a small machine; btl ^ofi spares each start a second."""


def environment(**changes: str) -> dict[str, str]:
    own = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if name not in own} | changes


def broken(fault: str) -> dict[str, str]:
    """An environment in which ranks have the fault that inject/sitecustomize.py describes."""
    return environment(PYTHONPATH=f"{INJECT}{os.pathsep}{ROOT}", GPUBENCH_TEST_FAULT=fault)


def gpubench(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, "-m", "gpubench", *arguments], env or environment()
    if not forking.can_fork(variables):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False, env=variables, cwd=cwd
        )
    finished = forking.run(arguments, variables, cwd, SECONDS)
    if finished.returncode is None:
        raise subprocess.TimeoutExpired(command, SECONDS, finished.stdout, finished.stderr)
    return subprocess.CompletedProcess(command, finished.returncode, finished.stdout, finished.stderr)


def document_so_far(path: Path) -> dict[str, Any]:
    """What a job under way has written, empty before that: at first it only tries whether it can write there."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        text = ""
    document: dict[str, Any] = json.loads(text) if text else {}
    return document


def mpirun_command(ranks: int, *arguments: str) -> Sequence[str]:
    return [find_launcher().path, "-n", str(ranks), sys.executable, "-m", "gpubench", *arguments]


def mpirun(ranks: int, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A job under an mpirun of the test's, which is tried again where it could not start anything."""
    command, variables = mpirun_command(ranks, *arguments), dict(env or environment()) | MPI_ENVIRONMENT

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=variables)

    first = run()
    return run() if first.returncode == DAEMON_FAILED else first
