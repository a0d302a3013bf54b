"""`watch --hang` beside a real job of NCCL's: a rank that is stopped, killed, late, or calls something else is named.

Each rank is a host of its own for NCCL, so that any version runs four of them on one GPU. With GPUBENCH_TEST_ANSWERS
the raw answers are kept in that folder.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpubench.hardware.ras import AS_TEXT, ask_ras
from tests.cli.running import ROOT, environment, gpubench
from tests.gpu.machine import has_gpu, preloaded

pytestmark = [pytest.mark.gpu, has_gpu, pytest.mark.timeout(180)]

RANKS, BLAMED = 4, 2
SECONDS_TO_START = 90
WATCH = ("watch", "--hang", "--strict", "--interval", "2s")


@dataclass
class Job:
    """Ranks that reduce without end."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    variables: dict[str, str]

    @property
    def version(self) -> int:
        found: int = json.loads((self.folder / "id").read_text())[0]
        return found

    def done(self, rank: int) -> int:
        path = self.folder / f"done-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while not is_over():
            assert time.monotonic() < deadline, [(self.folder / f"log-{rank}").read_text() for rank in range(RANKS)]
            time.sleep(0.1)

    def wait_until_nothing_moves(self) -> None:
        before: list[int] = []
        while (now := [self.done(rank) for rank in range(RANKS)]) != before:
            before = now
            time.sleep(1)


@contextmanager
def running(folder: Path, fault: str) -> Iterator[Job]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    variables = environment(**preloaded(), NCCL_RAS_ADDR=address)
    script = str(Path(__file__).with_name("ras_rank.py"))
    processes = []
    for rank in range(RANKS):
        with (folder / f"log-{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, script, str(rank), str(RANKS), str(folder), fault if rank == BLAMED else ""],
                    cwd=ROOT,
                    env=variables | {"NCCL_HOSTID": f"h{rank}"},
                    stderr=log,
                )
            )
    job = Job(processes, folder, variables)
    try:
        job.wait(lambda: all(job.done(rank) > 2 for rank in range(RANKS)))
        yield job
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                os.kill(process.pid, signal.SIGCONT)
            process.wait(20)


def answers_of(job: Job, tmp_path: Path, fault: str) -> Path:
    """The folder for raw answers."""
    kept = os.environ.get("GPUBENCH_TEST_ANSWERS")
    folder = tmp_path if kept is None else Path(kept)
    return folder / f"nccl-{job.version}-{fault or 'healthy'}"


def texts(job: Job, folder: Path) -> None:
    """Two answers as text, which versions before 2.28.7 give only."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        answer = ask_ras(9, job.variables, question=AS_TEXT, leg_seconds=3, most_bytes=2**20)
        assert answer
        (folder / f"ras-{number}.txt").write_bytes(answer)
        time.sleep(1)


def test_a_healthy_job_passes(tmp_path: Path) -> None:
    with running(tmp_path, "") as job:
        kept = answers_of(job, tmp_path, "")
        done = gpubench(*WATCH, "--for", "6s", "--record", str(kept), env=job.variables)
        texts(job, kept.with_name(f"{kept.name}-text"))
    assert done.returncode == (0 if job.version >= 22807 else 3), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("no rank keeps others waiting")


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("stopped", r"does not answer|is dead"),
        ("killed", r"does not answer|is dead"),
        ("late", r"did not join: launched \d+ AllReduce"),
        ("other", r"called something else: another operation: Broadcast instead"),
    ],
)
def test_the_rank_with_a_fault_is_named(fault: str, seen: str, tmp_path: Path) -> None:
    signals = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
    with running(tmp_path, "" if fault in signals else fault) as job:
        kept = answers_of(job, tmp_path, fault)
        blamed = job.processes[BLAMED].pid
        if fault in signals:
            os.kill(blamed, signals[fault])
        else:
            (tmp_path / "sign").touch()
        job.wait_until_nothing_moves()
        done = gpubench(*WATCH, "--for", "12s", "--record", str(kept), env=job.variables)
        texts(job, kept.with_name(f"{kept.name}-text"))
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.match(rf"FAIL: rank {BLAMED} \(\S+:{blamed}\)", last), done.stdout
    assert re.search(seen, " ".join(done.stdout.split())), done.stdout
    for folder in (kept, kept.with_name(f"{kept.name}-text")):
        again = gpubench("explain", str(folder))
        assert again.returncode == 1, again.stdout
        assert again.stdout.splitlines()[-1].startswith(f"FAIL: rank {BLAMED} ("), again.stdout
