"""Workers of a scan on GPUs: two of them in new communicators per round, while one dies or stops."""

import os
import secrets
import signal
import time
from collections.abc import Iterator

import pytest

from gpubench.ranks.scan.messages import Outcome, WorkerTask
from gpubench.ranks.scan.supervisor import WorkerProcess
from tests.gpu.machine import LAST_GPU, several_ranks_that_die, under_mpirun

pytestmark = [pytest.mark.gpu, *several_ranks_that_die, pytest.mark.timeout(180)]

DEADLINE_S = 15.0
STARTED_S = 60.0
LEAST_GB_S = 20.0
"""The slowest connection between two GPUs of a host, both directions together"""

Answer = tuple[float, Outcome, str]


@pytest.fixture
def pair(own_mps: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """Start two workers, each with its own GPU if possible."""
    for name, value in under_mpirun(2).items():
        monkeypatch.setenv(name, value)
    secret = secrets.token_bytes(32)
    first, second = (WorkerProcess("nccl", device, secret) for device in (0, LAST_GPU))
    for worker in (first, second):
        local = started(worker)
        assert all(gb_s > 1 for _, gb_s in local), local
    yield first, second
    first.close()
    second.close()


def started(worker: WorkerProcess) -> list[tuple[str, float]]:
    """Return phase 0 of a worker. An MPS server may refuse it for some seconds after another client was killed."""
    deadline = time.monotonic() + STARTED_S
    while True:
        worker.begin(WorkerTask(0, 0, 0, 0, STARTED_S))
        answer = answer_of(worker, 0, STARTED_S)
        found: list[tuple[str, float]] = answer.get("local", [])  # type: ignore[assignment]
        if found:
            return found
        assert time.monotonic() < deadline, answer
        worker.kill()
        time.sleep(0.5)


def answer_of(worker: WorkerProcess, number: int, seconds: float) -> dict[str, object]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = worker.answer(number)
        if answer is not None:
            return answer
        time.sleep(0.005)
    raise AssertionError(f"no answer within {seconds} s")


def begin(pair: tuple[WorkerProcess, WorkerProcess], number: int, deadline_s: float = DEADLINE_S) -> None:
    first, second = pair
    first.begin(WorkerTask(number, 0, 1, 0, deadline_s))
    second.begin(WorkerTask(number, 0, 0, 1, deadline_s, (("127.0.0.1", first.port),)))


def outcomes(pair: tuple[WorkerProcess, WorkerProcess], number: int) -> list[Answer]:
    return [worker.outcome(answer_of(worker, number, DEADLINE_S + 10)) for worker in pair]


def test_rounds_have_figures_that_are_alike(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    for number in (1, 2, 3):
        start = time.monotonic()
        begin(pair, number)
        found = outcomes(pair, number)
        assert [outcome for _, outcome, _ in found] == [Outcome.DONE] * 2, found
        one, other = (gb_s for gb_s, _, _ in found)
        assert one > LEAST_GB_S
        assert abs(one - other) < 0.1 * one
        print(f"round {number}: {one:.1f} and {other:.1f} GB/s both ways, {time.monotonic() - start:.2f} s")  # noqa: T201


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stops_costs_one_round(
    pair: tuple[WorkerProcess, WorkerProcess], how: signal.Signals
) -> None:
    begin(pair, 1)
    outcomes(pair, 1)
    first, second = pair
    begin(pair, 2, 4.0)
    time.sleep(0.3)  # in the middle: a communicator alone takes 0.4 s
    assert second._process is not None
    os.kill(second._process.pid, how)
    gb_s, outcome, remark = first.outcome(answer_of(first, 2, 12))
    assert (gb_s, outcome in (Outcome.DEADLINE, Outcome.BROKEN)) == (0.0, True), (outcome, remark)
    assert second.state() is (Outcome.OWN_WORKER_DIED if how is signal.SIGKILL else Outcome.OWN_WORKER_STOPPED)
    second.kill()
    started(second)
    begin(pair, 3)
    assert [outcome for _, outcome, _ in outcomes(pair, 3)] == [Outcome.DONE] * 2


@pytest.mark.parametrize("reduces", [False, True], ids=["pair", "all-reduce"])
def test_phase_0_inside_the_node(pair: tuple[WorkerProcess, WorkerProcess], reduces: bool) -> None:
    """Both are rails of one rank: a ring of two, in which each has connections to the other."""
    for number in (1001, 1002):
        start = time.monotonic()
        for rail, worker in enumerate(pair):
            places = (("127.0.0.1", pair[1 - rail].port),)
            worker.begin(WorkerTask(number, rail, 0, 0, DEADLINE_S, places, 2, rail, 1 - rail, reduces))
        found = outcomes(pair, number)
        assert [outcome for _, outcome, _ in found] == [Outcome.DONE] * 2, found
        one, other = (gb_s for gb_s, _, _ in found)
        assert one > LEAST_GB_S
        assert abs(one - other) < 0.1 * one
        what = "busbw of an all-reduce" if reduces else "both ways"
        print(f"{one:.1f} and {other:.1f} GB/s {what}, {time.monotonic() - start:.2f} s")  # noqa: T201
