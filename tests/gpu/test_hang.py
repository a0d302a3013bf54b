"""Ranks that die, stop or stay away while GPUs work: the right one is named, and no process is left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from gpubench.model.terms.ranks import Phase
from gpubench.ranks.watchdog.progress import ProgressBlock, ProgressReading
from tests.gpu.machine import DRIVER, RANKS, launch, launched, several_ranks_that_die, under_mpirun
from tests.mpi.test_faults import ALONE, MPIRUN, Run, start

pytestmark = [pytest.mark.gpu, *several_ranks_that_die, pytest.mark.timeout(300)]

TIMEOUT = 4
ITERATIONS = {"256M": 20_000, "1G": 8_000, "4G": 2_000}
"""Iterations that take half a minute on four H200s, or with two ranks on one H100"""

SECONDS_OF_QUEUE = {"256M": 2, "1G": 6}
"""Time that GPUs continue after a rank has stopped: a stream holds about a thousand launches"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def started(how: str, output: Path, *arguments: str, fault: str = "") -> Run:
    variables = launched() if how == ALONE else under_mpirun()
    own = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return start(how, output, *arguments, fault=fault, ranks=RANKS, launch=launch(), start_seconds=120, variables=own)


def inside_the_operation(how: str, output: Path, size: str = "4G") -> Run:
    """Return a job that has completed some timed operations of a size, according to every watchdog."""
    sweep = ("--backend", "nccl", "--sizes", f"1M,{size}", "--iters", str(ITERATIONS[size]), "--out-of-place")
    run = started(how, output, *sweep, "--timeout", str(TIMEOUT))
    run.wait_for_rows(1)
    deadline = time.monotonic() + 60
    while not all(is_among_operations(progress_of(run.pid(rank)), size) for rank in range(RANKS)):
        assert time.monotonic() < deadline
        assert run.process.poll() is None, run.process.communicate()
        time.sleep(0.05)
    return run


def progress_of(pid: int) -> ProgressReading:
    """Return the progress of a rank, read where its watchdog reads it."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        if str(path.readlink()).startswith("/memfd:gpubench-progress"):
            descriptor = os.open(path, os.O_RDWR)
            try:
                return ProgressBlock(descriptor).read()
            finally:
                os.close(descriptor)
    raise AssertionError(f"process {pid} has no page of progress")


def is_among_operations(seen: ProgressReading, size: str) -> bool:
    return seen.phase is Phase.OPERATION and seen.label.startswith(size) and 0 < seen.done < seen.total


@pytest.mark.parametrize(("how", "rank", "size"), [(ALONE, 0, "256M"), (ALONE, 1, "1G"), (MPIRUN, 1, "256M")])
def test_a_rank_stopped_inside_an_allreduce(how: str, rank: int, size: str, output: Path) -> None:
    run = inside_the_operation(how, output, size)
    os.kill(run.pid(rank), signal.SIGSTOP)
    said = run.end(TIMEOUT + SECONDS_OF_QUEUE[size])
    assert run.process.returncode == 3
    assert f"the others wait for rank {rank}" in said
    assert "(GPU " in said.partition("missing:")[2].splitlines()[0]
    assert f" of {ITERATIONS[size]} done" in said
    assert run.is_cut_short(1)
    assert gpus_are_idle()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_inside_an_allreduce_of_4_gib(rank: int, output: Path) -> None:
    run = inside_the_operation(ALONE, output)
    os.kill(run.pid(rank), signal.SIGKILL)
    said = run.end(0)
    assert run.process.returncode == 3
    assert f"rank {rank} " in said
    assert run.is_cut_short(1)
    assert gpus_are_idle()


def test_a_rank_that_never_enters_an_operation(output: Path) -> None:
    """It sleeps before the fourth row, so it is late but not stopped, and NCCL's kernels on other GPUs spin."""
    arguments = ("--backend", "nccl", "--sizes", "1M:4G:4", "--iters", "20", "--timeout", str(TIMEOUT))
    run = started(ALONE, output, *arguments, fault="1:stall")
    said = run.end(60)
    assert run.process.returncode == 3
    assert "the others wait for rank 1" in said
    assert run.is_cut_short(1)
    assert gpus_are_idle()


def test_a_slow_run_that_moves_is_left_alone(output: Path) -> None:
    """Its timed loop takes longer than the time-out, and only the events inside it show progress."""
    arguments = ("--backend", "nccl", "--sizes", "4G", "--iters", "400", "--out-of-place", "--timeout", "3")
    run = started(ALONE, output, *arguments)
    run.process.communicate(timeout=120)
    assert run.process.returncode == 0
    document = json.loads(output.read_text())
    assert document["complete"]
    (row,) = document["rows"]
    assert row["time_us"] * row["iterations"] > 3e6


def gpus_are_idle() -> bool:
    """True if the memory of all GPUs is free again."""
    import cupy

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        free = [cupy.cuda.Device(index).mem_info for index in range(DRIVER.visible)]
        if all(left > 0.95 * total for left, total in free):
            return True
        time.sleep(0.5)
    return False
