"""Ask NCCL's RAS service, which every process of a job offers on the same port."""

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
AS_JSON = b"SET FORMAT json\nVERBOSE STATUS\n"  # NCCL before 2.28.7 prints an error and answers with text

_CONNECTIONS = 8  # All processes of a host listen on one port. The kernel picks one, which may be stopped

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
    """Return the answer of the first process that is ready, without its OK. None if nobody listens.

    That process queries all others of its job and skips those that are silent for `leg_seconds`. Any program may listen
    on this port, so the answer is cut after `seconds` and at `most_bytes`.
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
    except (OSError, OverflowError, ValueError):  # impossible names and ports
        return None


def _first(selector: selectors.BaseSelector, deadline: float) -> tuple[socket.socket | None, bytes]:
    """Return the first connection that receives data, and the data."""
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
    """Receive some bytes. Empty at the end, at the deadline, or if the connection is lost."""
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        return connection.recv(min(most_bytes, _PIECE))
    except OSError:
        return b""
