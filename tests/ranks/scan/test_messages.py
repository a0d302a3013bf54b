"""Messages between rank 0 and supervisors, and who is believed."""

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.results.scan import LocalFigure, LocalQuantity
from gpubench.ranks.scan.messages import (
    Frames,
    RingOrder,
    RoundOrder,
    RoundReply,
    Seat,
    framed,
    greet,
    local_figures,
    packed_local,
    receive_one,
    welcome,
)

SECRET = b"s" * 32


@given(st.integers(0, 11), st.integers(0, 2**31), st.booleans(), st.floats(0, 1e6), st.integers(0, 2**64 - 1))
def test_orders_are_read_back(number: int, partner: int, listens: bool, deadline_s: float, retired: int) -> None:
    order = RoundOrder(number, partner, listens, deadline_s, retired)
    assert RoundOrder.of(order.packed()[1:]) == order


RANKS, RAILS = st.integers(0, 2**32 - 1), st.integers(0, 63)
SEATS = st.builds(Seat, RAILS, RANKS, RAILS, RANKS, RAILS, RANKS, RANKS)


@given(RANKS, st.floats(0, 1e6), st.lists(SEATS, max_size=64), st.booleans(), st.booleans())
def test_orders_of_rings_are_read_back(
    number: int, deadline_s: float, seats: list[Seat], all_reduce: bool, told_later: bool
) -> None:
    order = RingOrder(number, deadline_s, tuple(seats), all_reduce, told_later)
    assert RingOrder.of(order.packed()[1:]) == order


@given(st.lists(st.tuples(st.integers(0, 63), st.floats(0, 1e6), st.integers(0, 6)), max_size=16), st.text(max_size=80))
def test_replies_are_read_back(figures: list[tuple[int, float, int]], remark: str) -> None:
    reply = RoundReply(3, tuple(figures), remark)
    read = RoundReply.of(reply.packed()[1:])
    assert (read.number, read.figures) == (3, reply.figures)
    assert read.remark == remark


def test_local_figures_are_read_back() -> None:
    figures = [LocalFigure(0, gpu, quantity, 1.5 * gpu + 1) for gpu in range(8) for quantity in LocalQuantity]
    assert [each._replace(node=0) for each in local_figures(7, packed_local(figures)[1:])] == figures


def test_what_could_not_be_copied_is_said() -> None:
    failed = LocalFigure(0, 1, LocalQuantity.FROM_HOST, 0.0, failure="its worker failed: cudaErrorMemoryAllocation")
    figures = [LocalFigure(0, 0, LocalQuantity.FROM_HOST, 50.0), failed]
    assert list(local_figures(0, packed_local(figures)[1:])) == figures


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.integers(1, 64))
def test_messages_come_out_however_they_arrive(messages: list[bytes], step: int) -> None:
    data, frames = b"".join(map(framed, messages)), Frames()
    found = [message for start in range(0, len(data), step) for message in frames.feed(data[start : start + step])]
    assert found == messages


def test_an_empty_message_is_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        Frames().feed(b"\0\0")


@given(st.binary(max_size=60))
def test_no_bytes_break_the_readers(body: bytes) -> None:
    for read in (RoundOrder.of, RoundReply.of, lambda body: list(local_figures(0, body))):
        try:
            read(body)
        except (struct.error, IndexError):
            continue


def exchange(own: bytes, other: bytes) -> list[object]:
    """What both ends make of a greeting."""
    found: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(5)
                try:
                    found.append(welcome(connection, own))
                except OSError as error:
                    found.append(type(error))

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(server.getsockname()) as connection:
            connection.settimeout(5)
            try:
                greet(connection, other, b"12")
                found.append("greeted")
            except OSError as error:
                found.append(type(error))
        thread.join()
    return sorted(found, key=str)


def test_only_who_knows_the_secret_is_believed() -> None:
    assert exchange(SECRET, SECRET) == [b"12", "greeted"]
    assert exchange(SECRET, b"t" * 32) == [ConnectionError, ConnectionError]


def test_the_end_of_a_connection_is_no_message() -> None:
    one, other = socket.socketpair()
    with one:
        other.sendall(framed(b"abc") + b"\0")
        other.close()
        assert receive_one(one) == b"abc"
        assert receive_one(one) is None
