"""NCCL's RAS: the question, and listeners that answer, hang, or are not there."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from gpubench.hardware.watchdog import main as nccl_ras
from gpubench.hardware.watchdog.main import ask_ras


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@contextmanager
def served(listener: socket.socket, answers: list[tuple[bytes, bool]]) -> Iterator[list[bytes]]:
    """Answer one connection after another, and hang up or not; what was asked."""
    asked: list[bytes] = []
    kept: list[socket.socket] = []

    def answer() -> None:
        for text, hangs_up in answers:
            connection, _ = listener.accept()
            asked.append(connection.recv(100))
            connection.sendall(text)
            if hangs_up:
                connection.close()
            else:
                kept.append(connection)

    thread = threading.Thread(target=answer)
    thread.start()
    yield asked
    thread.join(20)
    for connection in kept:
        connection.close()


def environment(listener: socket.socket) -> dict[str, str]:
    return {"NCCL_RAS_ADDR": f"localhost:{listener.getsockname()[1]}"}


def test_the_first_answer_counts_though_others_hang(listener: socket.socket) -> None:
    answer = b"OK\nNCCL version 2.28.9\n\nJob summary\n"
    with served(listener, [(b"", False), (b"", False), (answer, True), (b"", False)]) as asked:
        assert ask_ras(20, environment(listener)) == ["NCCL version 2.28.9", "Job summary"]
    assert asked[0] == b"TIMEOUT 1\nVERBOSE STATUS\n"


def test_what_was_said_before_the_time_is_over_counts(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over when all have been heard, and none has hung up."""
    heard: list[bytes] = []
    read = nccl_ras._read

    def hear(connection: socket.socket, most_bytes: int) -> bytes:
        heard.append(read(connection, most_bytes))
        return heard[-1]

    monkeypatch.setattr(nccl_ras, "_read", hear)
    monkeypatch.setattr(nccl_ras, "time", SimpleNamespace(monotonic=lambda: 0.1 if len(heard) == 4 else 0.0))
    with served(listener, [(b"OK\nNCCL version 2.28.9\n", False)] * 4):
        assert ask_ras(0.1, environment(listener)) == ["NCCL version 2.28.9"]


def test_where_nobody_listens_or_the_address_is_none_nothing_is_said(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert ask_ras(5, {"NCCL_RAS_ADDR": f"localhost:{port}"}) == []
    assert ask_ras(5, {"NCCL_RAS_ADDR": "somewhere"}) == []
    for address in ("localhost:99999", f"localhost:{'9' * 5000}", f"{'x' * 100}:1", "\0:1", "\ud800:1"):
        assert ask_ras(5, {"NCCL_RAS_ADDR": address}) == []


@contextmanager
def endless(listener: socket.socket, piece: bytes, seconds: float) -> Iterator[None]:
    """Send without end, a piece every so often, to whoever connects."""
    over = threading.Event()

    def send() -> None:
        connections = [listener.accept()[0] for _ in range(4)]
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


def test_an_answer_without_end_is_cut_at_64_kib(listener: socket.socket) -> None:
    with endless(listener, b"x" * 1000 + b"\n", 0.0):
        began = time.monotonic()
        lines = ask_ras(20, environment(listener))
        assert time.monotonic() - began < 10, "it does not wait for an end"
    assert sum(len(line) + 1 for line in lines) in range(2**16 - 1000, 2**16 + 2)


def test_an_answer_that_drips_is_over_with_the_time(listener: socket.socket) -> None:
    with endless(listener, b"x", 0.02):
        began = time.monotonic()
        (line,) = ask_ras(0.5, environment(listener))
        assert time.monotonic() - began < 5
    assert set(line) == {"x"}
