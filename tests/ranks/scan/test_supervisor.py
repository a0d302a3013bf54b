"""A supervisor and its workers: real processes that measure each other, and are stopped and killed."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from gpubench.ranks.scan.messages import FailedOrder, Outcome, RingOrder, RoundReply, Seat, WorkerTask
from gpubench.ranks.scan.supervisor import RankCard, Supervisor

SECRET = b"the secret of a job of the tests"
DEADLINE = 3.0
SHORT = 0.5
"""A deadline that no round can meet"""


@contextmanager
def two() -> Iterator[tuple[Supervisor, Supervisor]]:
    found = tuple(Supervisor("host", rank, {0: 0}, SECRET) for rank in (0, 1))
    for each in found:
        each.workers[0]._start()  # in the main thread, because the kernel ends a child with the thread that started it
    try:
        yield found[0], found[1]
    finally:
        for each in found:
            each.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Supervisor, Supervisor]]:
    """Two supervisors whose workers are shared by all tests."""
    with two() as found:
        yield found


def a_round(
    one: Supervisor, other: Supervisor, number: int = 1, deadline: float = DEADLINE
) -> tuple[RoundReply, RoundReply]:
    """Measure a round of two supervisors. The first one listens."""
    replies: dict[int, RoundReply] = {}
    places = (("127.0.0.1", one.workers[0].port),)
    tasks = ((one, WorkerTask(number, 0, 1, 0, deadline)), (other, WorkerTask(number, 0, 0, 1, deadline, places)))

    def measure(rank: int) -> None:
        supervisor, task = tasks[rank]
        replies[rank] = supervisor.round(number, {0: task}, deadline)

    threads = [threading.Thread(target=measure, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return replies[0], replies[1]


def worker_of(supervisor: Supervisor) -> int:
    process = supervisor.workers[0]._process
    assert process is not None
    return process.pid


def test_two_workers_measure_the_same_thing_and_are_used_again(pair: tuple[Supervisor, Supervisor]) -> None:
    one, other = pair
    first, second = a_round(one, other)
    ((_, gb_s, outcome),), ((_, told, _),) = first.figures, second.figures
    assert outcome == Outcome.DONE
    assert 0 < gb_s < 10 * told < 100 * gb_s
    pids = worker_of(one), worker_of(other)
    again, _ = a_round(one, other, 2)
    assert again.figures[0][2] == Outcome.DONE
    assert (worker_of(one), worker_of(other)) == pids


def test_nobody_there_is_the_deadline(pair: tuple[Supervisor, Supervisor]) -> None:
    reply = pair[0].round(3, {0: WorkerTask(3, 0, 1, 0, SHORT)}, SHORT)
    assert reply.figures == ((0, 0.0, Outcome.DEADLINE),)


def test_a_worker_that_cannot_copy_in_phase_0_says_so_and_goes_on(
    pair: tuple[Supervisor, Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    read = one.workers[0].answer

    def failed(number: int) -> dict[str, object] | None:
        return read(number) and {"number": 0, "failure": "failed", "remark": "no memory"}

    monkeypatch.setattr(one.workers[0], "answer", failed)
    (figure,) = one._local()
    assert (figure.gb_s, figure.failure) == (0.0, "its worker failed: no memory")
    monkeypatch.undo()
    assert a_round(one, other, 4)[0].figures[0][2] == Outcome.DONE


def test_a_stopped_worker_is_known_by_its_own_supervisor_killed_and_replaced() -> None:
    with two() as (one, other):
        stopped = worker_of(other)
        os.kill(stopped, signal.SIGSTOP)
        first, second = a_round(one, other, 1, SHORT)
        assert first.figures[0][2] in (Outcome.DEADLINE, Outcome.BROKEN)
        assert second.figures[0][2] == Outcome.OWN_WORKER_STOPPED
        again, _ = a_round(one, other, 2)
        assert again.figures[0][2] == Outcome.DONE
        assert worker_of(other) != stopped


def test_a_worker_that_died_between_rounds_is_told_in_the_next() -> None:
    with two() as (one, _):
        process = one.workers[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        reply = one.round(1, {0: WorkerTask(1, 0, 1, 0, DEADLINE)}, DEADLINE)
    assert (reply.figures[0][2], reply.remark) == (Outcome.OWN_WORKER_DIED, "signal 9")


def test_a_worker_that_dies_as_it_starts_does_not_end_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(subprocess.Popen[bytes]):
        def __init__(self, command: Sequence[str], **options: Any) -> None:
            super().__init__(command, **options)
            self.kill()
            self.wait()

    supervisor = Supervisor("host", 0, {0: 0}, SECRET)
    try:
        monkeypatch.setattr("gpubench.ranks.scan.supervisor.subprocess.Popen", Short)
        reply = supervisor.round(1, {0: WorkerTask(1, 0, 1, 0, DEADLINE)}, DEADLINE)
    finally:
        supervisor.close()
    assert (reply.figures, reply.remark) == (((0, 0.0, Outcome.OWN_WORKER_DIED),), "signal 9")


def test_under_mps_a_worker_that_failed_or_was_refused_is_replaced() -> None:
    """If a client dies, the MPS server breaks the others, and accepts no new client until they have ended."""
    with two() as (one, other):
        for each in (one, other):
            each.workers[0]._under_mps = True
        first = worker_of(one)
        one.round(1, {0: WorkerTask(1, 0, 1, 0, SHORT)}, SHORT)
        assert one.workers[0]._process is None
        done, _ = a_round(one, other, 2)
        assert (done.figures[0][2], worker_of(one) == first) == (Outcome.DONE, False)
        before = worker_of(one)
        assert not one.workers[0].retry_refused({"number": 2, "failure": "broken"})
        assert one.workers[0].retry_refused({"number": 2, "failure": "refused"})
        assert worker_of(one) != before


def test_three_workers_are_a_ring_and_all_take_the_time_of_the_slowest() -> None:
    supervisors = [Supervisor("host", rank, {0: 0}, SECRET) for rank in range(3)]
    for each in supervisors:
        each.workers[0]._start()
    places = [(("127.0.0.1", each.workers[0].port),) for each in supervisors]

    def measure(rank: int) -> RoundReply:
        behind = places[(rank + 1) % 3]
        task = WorkerTask(1000, 0, (rank - 1) % 3, rank, DEADLINE, behind, ring=3, place=rank)
        return supervisors[rank].round(1000, {0: task}, DEADLINE)

    try:
        with ThreadPoolExecutor(3) as threads:
            replies = list(threads.map(measure, range(3)))
    finally:
        for each in supervisors:
            each.close()
    figures = [gb_s for reply in replies for _, gb_s, outcome in reply.figures if outcome == Outcome.DONE]
    assert len(figures) == 3
    assert 0 < max(figures) < 2 * min(figures)


def inside(
    supervisor: Supervisor,
    number: int,
    deadline: float = DEADLINE,
    *,
    all_reduce: bool = False,
    repeats_failures: bool = False,
) -> RoundReply:
    """Measure a ring of both rails of one rank."""
    ports = {rail: worker.port for rail, worker in supervisor.workers.items()}
    cards = [RankCard(0, "here", ("127.0.0.1",), ports)]
    seats = tuple(Seat(rail, 0, 1 - rail, 0, 1 - rail, rail, 2) for rail in ports)
    order = RingOrder(number, deadline, seats, all_reduce, repeats_failures)
    reply = supervisor._reply(order, cards, "here")
    assert isinstance(reply, RoundReply)
    return reply


@contextmanager
def with_two_rails() -> Iterator[Supervisor]:
    found = Supervisor("host", 0, {0: 0, 1: 1}, SECRET)
    for worker in found.workers.values():
        worker._start()
    try:
        yield found
    finally:
        found.close()


def test_the_rails_of_one_rank_measure_each_other() -> None:
    with with_two_rails() as supervisor:
        for number, all_reduce in enumerate((False, True), 1000):
            reply = inside(supervisor, number, all_reduce=all_reduce)
            assert [(rail, outcome, gb_s > 0) for rail, gb_s, outcome in sorted(reply.figures)] == [
                (0, Outcome.DONE, True),
                (1, Outcome.DONE, True),
            ]


def test_a_worker_that_stops_in_phase_0_costs_its_deadline_and_is_told_in_the_first_round() -> None:
    with with_two_rails() as supervisor:
        process = supervisor.workers[1]._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        reply = inside(supervisor, 1000, SHORT, repeats_failures=True)
        outcomes = {rail: outcome for rail, _, outcome in reply.figures}
        assert outcomes[1] == Outcome.OWN_WORKER_STOPPED
        assert outcomes[0] in (Outcome.DEADLINE, Outcome.BROKEN)
        for _ in range(2):
            asked = supervisor._reply(FailedOrder(), [], "here")
            assert isinstance(asked, RoundReply)
            assert asked.figures == ((1, 0.0, Outcome.OWN_WORKER_STOPPED),)
        told = supervisor.round(1, {1: WorkerTask(1, 1, 1, 0, DEADLINE)}, DEADLINE)
        assert told.figures == ((1, 0.0, Outcome.OWN_WORKER_STOPPED),)
        assert told.remark.endswith(", in phase 0")
        assert {outcome for _, _, outcome in inside(supervisor, 1001).figures} == {Outcome.DONE}


def test_a_worker_that_died_behind_its_last_figure_of_phase_0_is_told() -> None:
    with with_two_rails() as supervisor:
        process = supervisor.workers[0]._process
        assert process is not None
        process.kill()
        process.wait()
        reply = supervisor._failed()
    assert reply.figures == ((0, 0.0, Outcome.OWN_WORKER_DIED),)
    assert reply.remark == "signal 9, in phase 0"
