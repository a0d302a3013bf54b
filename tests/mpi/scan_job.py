"""A scan of real ranks with access to its supervisors and workers."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubench.ranks.launch import find_launcher
from tests.cli.running import MPI_ENVIRONMENT, PROGRAM, ROOT, environment

DEADLINE = 2.0
SECONDS = 300.0
_WORKER = "gpubench.backends.scan_worker"


@dataclass(frozen=True)
class Processes:
    """The process of a rank (its supervisor) and its worker."""

    supervisor: int
    worker: int


@dataclass
class ScanJob:
    """A scan with the paths of its rounds and its report."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    def wait_for_rounds(self, count: int) -> None:
        """Wait until this many rounds are on disk."""
        kept = self.folder / "rounds" / "scan.jsonl"
        self.wait_until(lambda: kept.exists() and kept.read_text().count("\n") >= 2 + count)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not happened():
            assert time.monotonic() < deadline
            assert self.process.poll() is None, (self.folder / "printed").read_text()
            time.sleep(0.005)

    def processes(self, *ranks: int, rounds: int = 0) -> list[Processes]:
        """Wait for phase 0 and this many rounds, and return the processes immediately, because a round takes
        milliseconds.
        """
        found: dict[int, Processes] = {}

        def look() -> bool:
            found.update(of_job(self.folder))
            return found.keys() >= {*ranks}

        self.wait_until(look)
        self.wait_for_rounds(rounds)
        return [found[each] for each in ranks]

    def finish(self) -> tuple[int, Mapping[str, Any]]:
        """Return mpirun's exit code and the report, which is empty if there is none."""
        self.process.wait(SECONDS)
        report = self.folder / "report.json"
        return self.process.returncode, json.loads(report.read_text()) if report.exists() else {}


@contextmanager
def scan_of_ranks(
    ranks: int, folder: Path, *arguments: str, options: tuple[str, ...] = (), rounds: str = "--rounds"
) -> Iterator[ScanJob]:
    """Start or resume a scan with every rank as a node, and check that it leaves no process."""
    words = ["scan", "--backend", "host", "--ranks-as-nodes", "--timeout", str(DEADLINE), *arguments]
    outputs = [rounds, str(folder / "rounds"), "--output", str(folder / "report.json")]
    command = [find_launcher().path, *options, "-n", str(ranks), *PROGRAM, *words, *outputs]
    variables = environment(GPUBENCH_TEST_FOLDER=str(folder))
    variables |= MPI_ENVIRONMENT
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=printed, env=variables, cwd=ROOT)
    job = ScanJob(process, folder)
    try:
        yield job
        assert_nothing_left(folder)
    finally:
        process.kill()
        process.wait()
        for each in of_job(folder).values():
            for pid in (each.supervisor, each.worker):
                kill(pid, signal.SIGKILL)


def assert_nothing_left(folder: Path) -> None:
    """Assert that no worker or supervisor of the job is left."""
    deadline = time.monotonic() + 300
    while (left := of_job(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == {}


def of_job(folder: Path) -> dict[int, Processes]:
    """Return the processes of the job in a folder, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if _WORKER not in (entry / "cmdline").read_text():
                continue
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            variables = dict(
                each.split("=", 1) for each in Path(f"/proc/{parent}/environ").read_text().split("\0") if "=" in each
            )
        except (OSError, ValueError):
            continue
        if variables.get("GPUBENCH_TEST_FOLDER") == str(folder):
            found[int(variables["OMPI_COMM_WORLD_RANK"])] = Processes(parent, int(entry.name))
    return found


def kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def silent(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the nodes that were gone or hung, with the reason. Others may be slow, because tests share cores."""
    found = ((node.rpartition(":")[2], part["part_kind"]) for part in report["parts"] for node in part["nodes"])
    return {node: kind for node, kind in found if kind in ("node gone", "node hangs")}


def seen_of(report: Mapping[str, Any], kind: str) -> str:
    """Return the `seen` text of the only part of a kind."""
    (seen,) = [part["seen"] for part in report["parts"] if part["part_kind"] == kind]
    return str(seen)
