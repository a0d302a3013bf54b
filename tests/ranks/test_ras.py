"""NCCL's RAS: queries to listeners that answer, hang, or are missing."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gpubench.ranks.ras import ask_ras

MOST = 1 << 16


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@contextmanager
def served(listener: socket.socket, answer: bytes, *, silent: int = 0, hangs_up: bool = True) -> Iterator[list[bytes]]:
    """Accept all connections, ignore the first ones, and answer one query. Yield the received data."""
    asked: list[bytes] = []
    kept: list[socket.socket] = []

    def serve() -> None:
        for number in range(8):
            connection, _ = listener.accept()
            kept.append(connection)
            asked.append(connection.recv(100))
            if number >= silent:
                connection.sendall(b"OK\n")
        with suppress(OSError):
            question = kept[silent].recv(100)
            asked.append(question)
            if question:
                kept[silent].sendall(answer)
        if hangs_up and silent < 8:
            kept[silent].close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield asked
    thread.join(20)
    for connection in kept:
        connection.close()


def environment(listener: socket.socket) -> dict[str, str]:
    return {"NCCL_RAS_ADDR": f"localhost:{listener.getsockname()[1]}"}


def test_the_first_that_is_ready_is_asked_though_others_hang(listener: socket.socket) -> None:
    with served(listener, b"NCCL version 2.28.9\n\nJob summary\n", silent=7) as asked:
        answer = ask_ras(20, environment(listener), most_bytes=MOST)
    assert answer == b"NCCL version 2.28.9\n\nJob summary\n"
    assert asked == [b"TIMEOUT 1\n"] * 8 + [b"VERBOSE STATUS\n"]


def test_what_was_said_before_the_time_is_over_counts(listener: socket.socket) -> None:
    with served(listener, b"NCCL version 2.28.9\n", hangs_up=False):
        assert ask_ras(0.5, environment(listener), most_bytes=MOST) == b"NCCL version 2.28.9\n"


def test_processes_that_listen_and_do_not_answer_are_told_from_none(listener: socket.socket) -> None:
    assert ask_ras(0.2, environment(listener), most_bytes=MOST) == b""
    port = listener.getsockname()[1]
    listener.close()
    assert ask_ras(5, {"NCCL_RAS_ADDR": f"localhost:{port}"}, most_bytes=MOST) is None


@pytest.mark.parametrize(
    "address", ["somewhere", "localhost:99999", f"localhost:{'9' * 5000}", f"{'x' * 100}:1", "\0:1", "\ud800:1"]
)
def test_an_address_that_cannot_be_is_nobody(address: str) -> None:
    assert ask_ras(5, {"NCCL_RAS_ADDR": address}, most_bytes=MOST) is None


@contextmanager
def endless(listener: socket.socket, piece: bytes, seconds: float) -> Iterator[None]:
    """Send pieces forever to every client."""
    over = threading.Event()

    def send() -> None:
        connections = [listener.accept()[0] for _ in range(8)]
        while not over.is_set():
            for connection in connections:
                with suppress(OSError):
                    connection.settimeout(0.05)
                    connection.sendall(piece)
            time.sleep(seconds)
        for connection in connections:
            connection.close()

    thread = threading.Thread(target=send)
    thread.start()
    yield
    over.set()
    thread.join(20)


def test_an_answer_without_end_is_cut(listener: socket.socket) -> None:
    with endless(listener, b"x" * 1000 + b"\n", 0.0):
        answer = ask_ras(3600, environment(listener), most_bytes=MOST)  # it does not wait for an end
    assert answer is not None
    assert len(answer) == MOST


def test_an_answer_that_drips_is_over_with_the_time(listener: socket.socket) -> None:
    with endless(listener, b"x", 0.02):
        answer = ask_ras(0.5, environment(listener), most_bytes=MOST)
    assert set(answer or b"") == {ord("x")}
    assert len(answer or b"") < MOST
