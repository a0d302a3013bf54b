"""How rank 0 merges replies, and whom it blames for missing ones."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from gpubench.model.results.scan import (
    LocalFigure,
    LocalQuantity,
    NodePair,
    NodeRail,
    PairSample,
    PlannedRound,
    RingFailure,
    ScanPhase,
)
from gpubench.ranks.scan import coordinator as module
from gpubench.ranks.scan.coordinator import Coordinator, NodeRanks
from gpubench.ranks.scan.messages import (
    ClockOrder,
    ClockReply,
    EndOrder,
    FailedOrder,
    LocalOrder,
    LocalReply,
    Message,
    Outcome,
    RingOrder,
    RoundOrder,
    RoundReply,
    clock_offset,
    greet,
    receive,
    send,
    wrap_socket,
)

SECRET = b"the secret of a job of the tests"
Answer = Callable[[RoundOrder | RingOrder], RoundReply | None]
"""The reply of a supervisor. None closes the connection."""


def done(gb_s: float) -> Answer:
    return lambda order: RoundReply(order.number, ((0, gb_s, Outcome.DONE), (1, 2 * gb_s, Outcome.DONE)))


def failing(outcome: Outcome, remark: str = "") -> Answer:
    return lambda order: RoundReply(order.number, ((0, 0.0, outcome), (1, 0.0, outcome)), remark)


@contextmanager
def coordinated(
    *answers: Answer, secret: bytes = SECRET, clock: float = 0.0, late: Callable[[int], float] = lambda rank: 0.0
) -> Iterator[Coordinator]:
    """Connect nodes with two rails, whose only rank answers like this, and connects this late."""
    nodes = NodeRanks(tuple((rank,) for rank in range(len(answers))), ((0, 1),) * len(answers))
    found = Coordinator(nodes, SECRET, 0.1)
    threads = [
        threading.Thread(target=supervise, args=(found.port, rank, answer, secret, clock, late(rank)), daemon=True)
        for rank, answer in enumerate(answers)
    ]
    for thread in threads:
        thread.start()
    found.accept(2.0 if secret == SECRET else 0.5)
    try:
        yield found
    finally:
        found.close()
        for thread in threads:
            thread.join(10)


def supervise(port: int, rank: int, answer: Answer, secret: bytes, clock: float, late: float) -> None:
    threading.Event().wait(late)
    line = socket.create_connection(("127.0.0.1", port))
    with suppress(OSError), line:
        greet(line, secret, str(rank).encode())
        with wrap_socket(line, 60.0) as connection:
            while not isinstance(order := receive(connection), EndOrder):
                reply: Message | None
                if isinstance(order, ClockOrder):
                    reply = ClockReply(time.time() + clock)
                elif isinstance(order, LocalOrder):
                    reply = LocalReply(((0, LocalQuantity.MEMORY.value, 10.0 + rank),))
                elif isinstance(order, FailedOrder):
                    reply = answer(RoundOrder(0, 0, listens=True, deadline_s=0.0))
                else:
                    assert isinstance(order, RoundOrder | RingOrder)
                    reply = answer(order)
                if reply is None:
                    return
                send(connection, reply)


def planned(*retired: NodeRail) -> PlannedRound:
    return PlannedRound(1, ScanPhase.SCREENING, (NodePair(0, 1),), frozenset(retired))


def test_a_figure_is_the_mean_of_what_both_ends_say() -> None:
    with coordinated(done(10.0), done(12.0)) as found:
        outcome = found.measure(planned())
    assert outcome.samples == (PairSample(0, 1, 0, 11.0), PairSample(0, 1, 1, 22.0))
    assert outcome.gone == {}


def test_retired_rails_take_no_part() -> None:
    with coordinated(done(10.0), done(12.0)) as found:
        assert [each.rail for each in found.measure(planned(NodeRail(1, 0))).samples] == [1]


def test_who_says_that_its_own_worker_failed_is_to_blame() -> None:
    answers = failing(Outcome.BROKEN), failing(Outcome.OWN_WORKER_DIED, "signal 9")
    with coordinated(*answers) as found:
        outcome = found.measure(planned())
    assert outcome.samples[0] == PairSample(0, 1, 0, 0.0, "its worker died (signal 9)", 1)


def test_where_both_only_waited_nobody_is_to_blame() -> None:
    with coordinated(failing(Outcome.DEADLINE, "killed after the deadline"), failing(Outcome.DEADLINE)) as found:
        outcome = found.measure(planned())
    assert outcome.samples[0] == PairSample(0, 1, 0, 0.0, "not done within the deadline")


def test_a_supervisor_that_hangs_up_is_a_node_that_is_gone() -> None:
    with coordinated(failing(Outcome.BROKEN), lambda _order: None, done(1.0)) as found:
        outcome = found.measure(planned())
        assert outcome.gone == {1: "its supervisor is gone"}
        assert outcome.samples[0].culprit == 1
        assert found.gone == {1: "its supervisor is gone"}


def test_a_supervisor_that_is_silent_is_gone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_OF_SUPERVISOR", 0.2)
    monkeypatch.setattr(module, "SECONDS_OF_GRACE", 0.2)
    is_over = threading.Event()

    def silent(_order: object) -> None:
        is_over.wait(60)

    with coordinated(failing(Outcome.DEADLINE), silent) as found:
        outcome = found.measure(planned())
        is_over.set()
    assert outcome.samples[0] == PairSample(0, 1, 0, 0.0, "the node is gone", 1)
    assert outcome.gone[1].startswith("its supervisor does not answer")


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    with coordinated(done(1.0), done(1.0), secret=b"another secret than that of this") as found:
        assert found.gone == dict.fromkeys((0, 1), "its supervisor did not connect")


def test_phase_0_and_clocks_of_all_nodes() -> None:
    with coordinated(done(1.0), done(1.0), clock=-3600.0) as found:
        local = found.local()
        offsets = found.clock_offsets()
    assert sorted(local) == [LocalFigure(node, 0, LocalQuantity.MEMORY, 10.0 + node) for node in (0, 1)]
    assert offsets == {node: pytest.approx(-3600, abs=5) for node in (0, 1)}


def test_a_rank_that_comes_late_makes_no_clock_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOCK_SECONDS", 0.1)
    with coordinated(done(1.0), done(1.0), done(1.0), late=lambda rank: 0.3 * (rank == 2)) as found:
        found.local()
        assert (found.clock_offsets(), found.gone) == ({}, {})


@pytest.mark.parametrize(("clock", "offset"), [(100.0, 0.0), (130.0, 0.0), (160.0, 0.0), (99.0, -1.0), (163.0, 3.0)])
def test_a_clock_differs_by_what_the_time_of_its_answer_cannot_explain(clock: float, offset: float) -> None:
    """A supervisor that was stopped for 60 s may have read its clock at any time in between."""
    assert clock_offset(clock, asked=100.0, answered=160.0) == offset


def test_what_phase_0_left_that_does_not_work_is_asked_for() -> None:
    def one_died(order: RoundOrder | RingOrder) -> RoundReply:
        return RoundReply(order.number, ((1, 0.0, Outcome.OWN_WORKER_DIED),), "signal 9, in phase 0")

    with coordinated(lambda order: RoundReply(order.number, ()), one_died, lambda _order: None) as found:
        before = found.failed()
        assert before.failed == {NodeRail(1, 1): "its worker died (signal 9, in phase 0)"}
        assert before.gone == {2: "its supervisor is gone"}
        assert found.measure(planned()).gone == {}, "it has been told"


def test_a_ring_is_as_fast_as_its_slowest_node_on_every_rail() -> None:
    seen: list[RingOrder] = []

    def answer(gb_s: float) -> Answer:
        def reply(order: RoundOrder | RingOrder) -> RoundReply:
            assert isinstance(order, RingOrder)
            seen.append(order)
            return RoundReply(order.number, ((0, gb_s, Outcome.DONE), (1, 2 * gb_s, Outcome.DONE)))

        return reply

    with coordinated(answer(10.0), answer(1.0), answer(12.0), answer(11.0)) as found:
        assert found.collective([0, 2, 3]) == 10.0 + 20.0
    orders = sorted(seen, key=lambda order: order.seats[0].place)
    assert [[(seat.rail, seat.previous, seat.next, seat.size) for seat in order.seats] for order in orders] == [
        [(rail, 3, 2, 3) for rail in (0, 1)],
        [(rail, 0, 3, 3) for rail in (0, 1)],
        [(rail, 2, 0, 3) for rail in (0, 1)],
    ]


def test_a_ring_that_breaks_is_of_the_node_whose_own_worker_failed() -> None:
    with coordinated(failing(Outcome.BROKEN), done(1.0), failing(Outcome.OWN_WORKER_DIED, "signal 9")) as found:
        assert found.collective([0, 1, 2]) == RingFailure(2, "its worker died (signal 9)", is_own=True)


def test_a_ring_with_a_node_that_hangs_up_is_of_that_node() -> None:
    with coordinated(failing(Outcome.BROKEN), lambda _order: None, done(1.0)) as found:
        assert found.collective([0, 1, 2]) == RingFailure(1, "its supervisor is gone", is_own=True)
        assert found.gone == {1: "its supervisor is gone"}


@pytest.mark.parametrize(
    "answer",
    [
        lambda order: RoundReply(order.number, ()),
        lambda order: RoundReply(order.number, ((0, 10.0, Outcome.DONE),)),
        lambda order: RoundReply(order.number - 1, ((0, 10.0, Outcome.DONE), (1, 10.0, Outcome.DONE))),
    ],
)
def test_a_ring_of_which_a_rail_is_not_told_has_no_figure(answer: Answer) -> None:
    with coordinated(done(10.0), answer, done(10.0)) as found:
        assert found.collective([0, 1, 2]) == RingFailure(
            1, "its supervisor returned no value for this ring", is_own=True
        )


def test_rings_inside_nodes_have_seats_by_rail_and_failures_by_cell() -> None:
    seen: list[RingOrder] = []

    def answer(order: RoundOrder | RingOrder) -> RoundReply:
        assert isinstance(order, RingOrder)
        seen.append(order)
        return RoundReply(order.number, tuple((seat.rail, 5.0 + seat.rail, Outcome.DONE) for seat in order.seats))

    rings = [[NodeRail(node, rail) for rail in (0, 1)] for node in (0, 1)]
    with coordinated(answer, failing(Outcome.OWN_WORKER_DIED, "signal 9")) as found:
        whole, broken = found.rings(rings, all_reduce=True, repeats_failures=True)
    assert (whole.gb_s, whole.failures) == (5.0, {})
    assert broken.failures[NodeRail(1, 0)] == RingFailure(1, "its worker died (signal 9)", is_own=True)
    (order,) = seen
    assert (order.all_reduce, order.repeats_failures) == (True, True)
    assert [(seat.rail, seat.previous_rail, seat.next_rail, seat.place) for seat in order.seats] == [
        (0, 1, 1, 0),
        (1, 0, 0, 1),
    ]
