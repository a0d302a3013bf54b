"""Messages between rank 0 and supervisors, and their authentication."""

import socket
import threading
import time
from multiprocessing.connection import Pipe

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.ranks.scan import messages
from gpubench.ranks.scan.messages import greet, welcome

SECRET = b"s" * 32


@pytest.mark.parametrize(
    "message",
    [
        messages.ClockOrder(),
        messages.ClockReply(1.5),
        messages.LocalReply(((0, "copies in its memory", 9.5),), "no memory"),
        messages.RoundOrder(3, 2**31, listens=True, deadline_s=0.5, retired=(0, 63)),
        messages.RingOrder(1000, 10.0, (messages.Seat(0, 1, 2, 3, 4, 5, 6),), all_reduce=True),
        messages.RoundReply(3, ((0, 92.5, messages.Outcome.DONE),), "ä"),
        messages.EndOrder(is_whole=False),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: messages.Message) -> None:
    one, other = Pipe()
    with one, other:
        messages.send(one, message)
        received = messages.receive(other)
    assert (type(received), received) == (type(message), message)


@given(st.one_of(st.binary(max_size=60), st.sampled_from([b"[]", b'["RoundReply"]', b'["EndOrder",1,2]', b'[["a"]]'])))
def test_whatever_else_arrives_is_a_broken_connection(data: bytes) -> None:
    one, other = Pipe()
    with one, other:
        one.send_bytes(data)
        with pytest.raises(ConnectionError):
            messages.receive(other)


def test_a_message_that_is_too_long_or_stops_in_the_middle_ends_the_connection() -> None:
    for data in (b"\x7f\xff\xff\xff", b"\0\0\0\x09half"):
        one, other = socket.socketpair()
        with one, messages.wrap_socket(other, 0.2) as connection:
            one.sendall(data)
            start = time.monotonic()
            with pytest.raises(OSError):  # noqa: PT011 - of the kernel or of multiprocessing
                messages.receive(connection)
            assert time.monotonic() - start < 60


def exchange(own: bytes, other: bytes) -> list[object]:
    """Return the outcome of a greeting at both ends."""
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
    one, other = Pipe()
    one.close()
    with other, pytest.raises(ConnectionError):
        messages.receive(other)
