"""A client for NCCL's RAS service, which every NCCL process offers on the same port."""

import contextlib
import os
import re
import selectors
import socket
import time
from collections.abc import Mapping

ADDRESS = "NCCL_RAS_ADDR"
_DEFAULT_ADDRESS = "localhost:28028"

AS_TEXT = b"VERBOSE STATUS\n"
AS_JSON = b"SET FORMAT json\nVERBOSE STATUS\n"  # NCCL before 2.28.7 prints an error and answers in text

_CONNECTIONS = 8  # All NCCL processes on a host share one port. The kernel may connect us to a process that is stopped

_SECONDS_TO_CONNECT = 0.5
_PIECE = 1 << 16
_READY = re.compile(rb"^(?:\s*OK\b)*\s*")


def ras_address(environment: Mapping[str, str] = os.environ) -> str:
    return environment.get(ADDRESS, _DEFAULT_ADDRESS)


def ask_ras(
    seconds: float,
    environment: Mapping[str, str] = os.environ,
    *,
    question: bytes = AS_TEXT,
    leg_seconds: int = 1,
    most_bytes: int,
) -> bytes | None:
    """Return the reply of the first process that responds, without RAS's OK lines. None if no process listens.

    That process queries all other processes of its job, and skips any that does not reply within `leg_seconds`. Any
    program may listen on this port, so the reply is truncated after `seconds` and at `most_bytes`.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        while len(selector.get_map()) < _CONNECTIONS and (connection := _connected(environment)) is not None:
            stack.enter_context(connection)
            _send(connection, b"TIMEOUT %d\n" % leg_seconds)
            selector.register(connection, selectors.EVENT_READ)
        if not selector.get_map():
            return None
        chosen, answer = _first(selector, deadline)
        if chosen is not None:
            _send(chosen, question)
            while len(answer) < most_bytes and (data := _received(chosen, most_bytes - len(answer), deadline)):
                answer += data
        return _READY.sub(b"", answer)


def _connected(environment: Mapping[str, str]) -> socket.socket | None:
    host, _, port = ras_address(environment).rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT)
    except (OSError, OverflowError, ValueError):  # the address is malformed or unreachable
        return None


def _first(selector: selectors.BaseSelector, deadline: float) -> tuple[socket.socket | None, bytes]:
    """Return the first connection with data to read, and the data."""
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if said := _received(connection, _PIECE, deadline):
                return connection, said
            selector.unregister(connection)
    return None, b""


def _send(connection: socket.socket, text: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(text)


def _received(connection: socket.socket, most_bytes: int, deadline: float) -> bytes:
    """Return the next bytes, or b"" at end of stream, at the deadline, or if the connection is lost."""
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        return connection.recv(min(most_bytes, _PIECE))
    except OSError:
        return b""
