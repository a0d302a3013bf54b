"""Ranks that die, stop or never start: the right rank is named, rows are kept, and no process is left.

One case per kind of fault runs by default. Other phases, ranks and launches have the marker `slow`. Tests in
test_jobs.py are not repeated. Nothing is timed, but everything has to end.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpubench.model.terms.ranks import Phase
from tests.cli.running import MPI_ENVIRONMENT, PROGRAM, ROOT, broken, document_so_far, environment, mpirun_command

pytestmark = pytest.mark.mpi

TIMEOUT = 3
"""Ranks report progress after each second of work, which takes several seconds on a busy machine"""

STARTS = 5
"""The time limit of launch and initialisation in tests in which they hang"""

UNHURRIED = 60
SECONDS_TO_END = 120
"""Time after the time-out until all processes have to be gone. A tenth of it is usual"""

MPIRUN_SECONDS = 60
"""Time for mpirun to end after its ranks. Open MPI's sometimes never does, which is not tested"""

ALONE, MPIRUN = "alone", "mpirun"
HOWS = (ALONE, MPIRUN)


def slow(*values: Any) -> Any:
    """Mark parameters as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


EVERY_WAY = [(how, rank) for how in HOWS for rank in (1, 0)]
"""Launch mode, and rank with the fault"""


def all_but_slow(usual: tuple[str, int]) -> list[Any]:
    """Return all combinations, with all but the usual one marked slow."""
    return [way if way == usual else slow(*way) for way in EVERY_WAY]


SMALL = ("--sizes", "1K:64K:4", "--iters", "3")
LONG = ("--sizes", "1K,4M", "--iters", "600")


@dataclass
class Run:
    process: subprocess.Popen[str]
    output: Path
    how: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found

    @property
    def rows(self) -> int:
        return len(document_so_far(self.output).get("rows", ()))

    def wait_for_rows(self, rows: int) -> None:
        deadline = time.monotonic() + 300
        while self.rows < rows:
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        return int(self.document["metadata"]["ranks"][rank]["pid"])

    def end(self, seconds: float = TIMEOUT) -> str:
        """Wait until all processes are gone, and return stderr."""
        left = left_after(self.output, seconds)
        try:
            _, stderr = self.process.communicate(timeout=MPIRUN_SECONDS)
        finally:
            self.process.kill()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert not left
        assert "Traceback" not in stderr
        return stderr

    def is_cut_short(self, rows: int) -> bool:
        """True if these rows are kept and the output is marked as incomplete."""
        document = self.document
        return len(document["rows"]) >= rows and (document["complete"], document["verdict"]) == (False, "ERROR")


def watchdogs_of(output: Path) -> list[int]:
    found = []
    for pid in processes_of(output):
        with suppress(OSError):  # it has just ended
            found += [pid] * (Path(f"/proc/{pid}/comm").read_text() == "gpubench-watch\n")
    return found


def processes_of(output: Path) -> list[int]:
    """Return the processes of a job and its watchdogs, but not mpirun's own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"--output={output}" in words and words[0].endswith(Path(sys.executable).name):
            found.append(int(path.parent.name))
    return found


def left_after(output: Path, seconds: float) -> list[int]:
    """Wait for the job to end, and return the processes that are left."""
    deadline = time.monotonic() + seconds + SECONDS_TO_END
    while (left := processes_of(output)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def start(
    how: str,
    output: Path,
    *arguments: str,
    fault: str = "",
    ranks: int = 2,
    launch: Sequence[str] = (),
    start_seconds: float = UNHURRIED,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Start a job. `launch` replaces `--np`."""
    usual = ("--backend", "host", "--timeout", str(TIMEOUT))
    words = ("allreduce", *usual, f"--output={output}", *arguments)
    settings = {
        "GPUBENCH_TEST_START_SECONDS": str(start_seconds),
        "GPUBENCH_TEST_FILE": str(output.with_suffix(".struck")),
    }
    env = broken(fault) | settings | MPI_ENVIRONMENT | dict(variables or {})
    if how == ALONE:
        command = [*PROGRAM, *words, *(launch or ("--np", str(ranks)))]
    else:
        command = [*mpirun_command(ranks, *words)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT, start_new_session=True
    )
    return Run(process, output, how)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


@pytest.mark.parametrize(("how", "rank"), all_but_slow((MPIRUN, 0)))
def test_a_stopped_rank_is_named_and_the_job_ended(how: str, rank: int, output: Path) -> None:
    run = start(how, output, *LONG, ranks=3)
    run.wait_for_rows(1)
    pid = run.pid(rank)
    os.kill(pid, signal.SIGSTOP)
    said = run.end()
    assert run.process.returncode == 3
    assert f"the others wait for rank {rank}" in said
    assert f"rank {rank} on " in said.partition("missing:")[2].splitlines()[0]
    assert f"(pid {pid}), in " in said
    assert "its process is stopped" in said
    assert "".join(line for line in said.splitlines() if "arrived:" in line).count("rank ") == 2
    assert run.is_cut_short(1)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_a_rank_that_is_late_for_no_visible_reason_is_named(how: str, output: Path) -> None:
    run = start(how, output, *SMALL, fault="2:stall", ranks=3)
    run.wait_for_rows(4)
    said = run.end()
    assert run.process.returncode == 3
    assert "the others wait for rank 2" in said
    assert "stopped" not in said
    assert run.is_cut_short(4)


@pytest.mark.parametrize(("how", "rank"), all_but_slow((ALONE, 1)))
def test_a_rank_killed_inside_an_operation_is_named(how: str, rank: int, output: Path) -> None:
    run = start(how, output, *LONG)
    run.wait_for_rows(1)
    pid = run.pid(rank)
    os.kill(pid, signal.SIGKILL)
    said = run.end()
    assert run.process.returncode == (3 if how == ALONE else 137)
    assert is_named(said, how, rank, pid)
    assert run.is_cut_short(1)


def is_named(said: str, how: str, rank: int, pid: int) -> bool:
    """True if gpubench names the rank, or an mpirun that ended the job faster."""
    return f"(pid {pid}) was killed" in said or (how == MPIRUN and f"rank {rank} with PID" in said)


@pytest.mark.parametrize("how", [MPIRUN, ALONE])
def test_a_stopped_watchdog_delays_no_end(how: str, output: Path) -> None:
    """It is killed and named during the job or at its end, and the job ends normally."""
    run = start(how, output, "--sizes", "1K:1M:4", "--iters", "100")
    run.wait_for_rows(1)
    pid = watchdogs_of(output)[-1]
    os.kill(pid, signal.SIGSTOP)
    said = run.end()
    assert run.process.returncode == 0
    assert re.search(
        r"the watchdog of rank \d on .* was stopped by a signal, and killed because it did not "
        "continue",
        said,
    )
    assert run.document["verdict"] in ("PASS", "SKIP")


PHASES = [phase for phase in Phase if phase not in (Phase.LAUNCH, Phase.OPENING, Phase.TRY_OUT)]
IN_EVERY_ROW = (Phase.WARM_UP, Phase.OPERATION, Phase.VERIFICATION, Phase.OUTPUT)
IN_EVERY_RUN = [(Phase.SET_UP, 1, ALONE), (Phase.VERIFICATION, 0, ALONE), (Phase.MPI_FINALIZE, 1, ALONE)]
EVERY_PHASE = [(phase, rank, how) for phase in PHASES for rank in (0, 1) for how in HOWS]


@pytest.mark.parametrize(
    ("phase", "rank", "how"), [each if each in IN_EVERY_RUN else slow(*each) for each in EVERY_PHASE]
)
def test_a_rank_killed_in_any_phase_is_named(phase: Phase, rank: int, how: str, output: Path) -> None:
    """gpubench names the rank that Open MPI reports as the first lost one, in any phase.

    Under a user's own mpirun it names no rank before all ranks have left MPI_Init, and never another rank than mpirun.
    """
    run = start(how, output, *SMALL, fault=f"{rank}:SIGKILL@{phase}")
    said = run.end()
    if phase is Phase.MPI_FINALIZE and how == ALONE:
        assert run.process.returncode == 0
        assert run.document["complete"]
        assert f"rank {rank} on " in said
        assert " was killed" in said
        assert " in MPI_Finalize, after everything had been measured" in said
        return
    assert run.process.returncode == (3 if how == ALONE else 137)
    if how == ALONE:
        assert f"rank {rank} on " in said
        assert f" in {phase}" in said
    else:
        assert f"rank {rank} " in said
        assert "signal 9" in said or "was killed" in said
        assert f"error: rank {1 - rank} " not in said
    if phase in IN_EVERY_ROW:
        assert run.is_cut_short(1)
        if how == ALONE:
            assert "measured before are kept" in said


@pytest.mark.parametrize(
    ("how", "rank", "fault"),
    [
        (ALONE, 1, "SIGSTOP@inside MPI_Init"),
        slow(MPIRUN, 0, "never"),
        slow(MPIRUN, 0, "SIGSTOP@inside MPI_Init"),
        slow(ALONE, 0, "SIGSTOP@MPI_Init"),
        slow(ALONE, 1, "never"),
    ],
)
def test_a_rank_that_never_comes_out_of_mpi_init_is_named(how: str, rank: int, fault: str, output: Path) -> None:
    run = start(how, output, *SMALL, fault=f"{rank}:{fault}", start_seconds=STARTS, ranks=3)
    said = run.end(STARTS)
    assert run.process.returncode == 3
    assert "MPI_Init, or a step before it, did not finish within" in said
    missing = next(line for line in said.splitlines() if "missing:" in line)
    assert f"rank {rank}" in missing
    assert ("never started" if fault == "never" else "its process is stopped") in missing
    assert "".join(line for line in said.splitlines() if "arrived:" in line).count("rank ") == 2
    assert not output.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_an_interrupted_mpirun_keeps_the_rows(number: signal.Signals, output: Path) -> None:
    run = start(MPIRUN, output, *LONG)
    run.wait_for_rows(1)
    run.process.send_signal(number)
    run.end()
    assert run.process.returncode in (1, 128 + number, -number)
    assert run.is_cut_short(1)


@pytest.mark.parametrize("how", [ALONE, slow(MPIRUN)])
def test_a_job_whose_launcher_was_killed_is_gone(how: str, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(output.parent))
    run = start(how, output, *LONG)
    run.wait_for_rows(1)
    run.process.kill()
    run.end()
    assert run.is_cut_short(1)
    assert not list(output.parent.glob("gpubench-*"))


@pytest.mark.slow
def test_a_job_that_was_suspended_as_a_whole_goes_on(output: Path) -> None:
    """Ctrl-Z under mpirun stops all ranks. After `fg` the measurement continues."""
    run = start(ALONE, output, "--sizes", "4K:64K", "--iters", "1000")
    run.wait_for_rows(1)
    pids = [run.pid(0), run.pid(1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(TIMEOUT + 2)
    assert run.process.poll() is None
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run.process.communicate(timeout=300)
    assert run.process.returncode == 0
    assert run.document["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_a_clock_that_jumps_ends_nothing(how: str, output: Path) -> None:
    run = start(how, output, *SMALL, fault="all:clock")
    _, stderr = run.process.communicate(timeout=300)
    assert run.process.returncode == 0, stderr
    assert run.document["complete"]


@pytest.mark.parametrize("how", [MPIRUN, slow(ALONE)])
def test_a_full_disk_is_named_and_other_outputs_stay(how: str, output: Path) -> None:
    full = output.with_suffix(".csv")
    full.symlink_to("/dev/full")
    run = start(how, output, *SMALL, "--output", str(full))
    said = run.end()
    assert run.process.returncode == 3
    assert f"{full} can no longer be written: No space left on device. The run has ended" in said
    assert run.is_cut_short(0)


def test_a_closed_pipe_ends_the_run_of_a_users_own_mpirun(output: Path) -> None:
    words = ["allreduce", "--backend", "host", "--sizes", "8:4M", "--format", "csv", f"--output={output}"]
    command = mpirun_command(2, *words, program=PROGRAM)
    result = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -n 1', "bash", *command],
        capture_output=True, text=True, timeout=300, check=False, env=environment(**MPI_ENVIRONMENT), cwd=ROOT,
    )  # fmt: skip
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert not left_after(output, 0)
