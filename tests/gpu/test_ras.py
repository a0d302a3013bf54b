"""`watch --hang` on a real NCCL job names a rank that is stopped, killed, late, or calls something else.

Each rank is a host of its own for NCCL, so any version runs four of them on one GPU. GPUBENCH_TEST_ANSWERS is a folder
for the raw answers. GPUBENCH_TEST_BLAMED is another rank with the fault.
"""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpubench.ranks.ras import AS_TEXT, ask_ras
from tests.cli.running import ROOT, environment, gpubench
from tests.gpu.machine import has_gpu, preloaded

pytestmark = [pytest.mark.gpu, has_gpu, pytest.mark.timeout(150)]

RANKS = 4
BLAMED = int(os.environ.get("GPUBENCH_TEST_BLAMED", "2"))
SECONDS_TO_START = 45
SECONDS_TO_STAND_STILL = 20
SECONDS_TO_END = 10
SECONDS_OF_WATCH = 30
"""Time limit per part. A test that takes longer prints the part and each rank's state"""

WATCH = ("watch", "--hang", "--strict", "--interval", "2s")


@dataclass
class Job:
    """Ranks that reduce without end."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    variables: dict[str, str]

    @property
    def version(self) -> int:
        found: int = pickle.loads((self.folder / "id").read_bytes())[0]
        return found

    def done(self, rank: int) -> int:
        path = self.folder / f"done-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def phases(self) -> list[str]:
        """Return each rank's step, count and last output."""
        said = []
        for rank, process in enumerate(self.processes):
            phase = self.folder / f"phase-{rank}"
            doing = phase.read_text() if phase.exists() else "starts Python"
            log = (self.folder / f"log-{rank}").read_text()[-300:]
            said.append(f"rank {rank}: {doing}, {self.done(rank)} done, exit code {process.poll()}, printed {log!r}")
        return said

    def wait_for_the_start(self) -> None:
        """Wait until every rank has reduced three times, or one fails."""
        deadline = time.monotonic() + SECONDS_TO_START
        while not all(self.done(rank) > 2 for rank in range(RANKS)):
            phases = self.phases()
            assert time.monotonic() < deadline, [f"no start within {SECONDS_TO_START} s", *phases]
            assert all(process.poll() is None for process in self.processes), phases
            assert not any(": failed: " in each for each in phases), phases
            time.sleep(0.1)

    def wait_until_nothing_moves(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_STAND_STILL
        before: list[int] = []
        while (now := [self.done(rank) for rank in range(RANKS)]) != before:
            assert time.monotonic() < deadline, ["the others go on without the rank with the fault", *self.phases()]
            before = now
            time.sleep(1)

    def watched(self, seconds: str, kept: Path) -> subprocess.CompletedProcess[str]:
        """Run `watch --hang` for this time."""
        command = [sys.executable, "-m", "gpubench", *WATCH, "--for", seconds, "--record", str(kept)]
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=self.variables,
                cwd=ROOT,
                timeout=SECONDS_OF_WATCH,
            )
        except subprocess.TimeoutExpired as late:
            pytest.fail(f"watch --hang took more than {SECONDS_OF_WATCH} s: {late.stderr!r}; {self.phases()}")

    def end(self) -> None:
        """Kill all ranks first, so that none waits for another."""
        for process in self.processes:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        deadline = time.monotonic() + SECONDS_TO_END
        for process in self.processes:
            process.wait(max(deadline - time.monotonic(), 0.1))


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
                    env=variables | {"NCCL_HOSTID": f"h{rank}", "NCCL_DEBUG": "WARN"},
                    stdout=log,
                    stderr=log,
                )
            )
    job = Job(processes, folder, variables)
    try:
        job.wait_for_the_start()
        yield job
    finally:
        job.end()


def answers_of(job: Job, tmp_path: Path, fault: str) -> Path:
    """Return the folder for raw answers."""
    kept = os.environ.get("GPUBENCH_TEST_ANSWERS")
    folder = tmp_path if kept is None else Path(kept)
    return folder / f"nccl-{job.version}-{fault or 'healthy'}"


def texts(job: Job, folder: Path) -> None:
    """Store two text answers, the only format before 2.28.7."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        answer = ask_ras(9, job.variables, question=AS_TEXT, leg_seconds=3, most_bytes=2**20)
        assert answer, [f"answer {number} of RAS as text: {answer!r}", *job.phases()]
        (folder / f"ras-{number}.txt").write_bytes(answer)
        time.sleep(1)


def test_a_healthy_job_passes(tmp_path: Path) -> None:
    with running(tmp_path, "") as job:
        kept = answers_of(job, tmp_path, "")
        done = job.watched("5s", kept)
        texts(job, kept.with_name(f"{kept.name}-text"))
    assert done.returncode == (0 if job.version >= 22807 else 3), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("no rank keeps others waiting")


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("stopped", r"does not answer|is dead"),
        ("killed", r"does not answer|is dead"),
        ("late", r"did not join: launched \d+ AllReduce"),
        ("other", r"called another operation: Broadcast instead"),
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
        done = job.watched("12s", kept)
        texts(job, kept.with_name(f"{kept.name}-text"))
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.match(rf"FAIL: rank {BLAMED} \(\S+:{blamed}\)", last), done.stdout
    assert re.search(seen, " ".join(done.stdout.split())), done.stdout
    for folder in (kept, kept.with_name(f"{kept.name}-text")):
        again = gpubench("explain", str(folder))
        assert again.returncode == 1, again.stdout
        assert again.stdout.splitlines()[-1].startswith(f"FAIL: rank {BLAMED} ("), again.stdout
