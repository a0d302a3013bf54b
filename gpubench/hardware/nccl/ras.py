"""NCCL's status of a job, from the RAS threads of its ranks, which listen on each host (NCCL 2.24)."""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Mapping

_DEFAULT_ADDRESS = "localhost:28028"
_QUESTION = b"TIMEOUT 1\nVERBOSE STATUS\n"
_CONNECTIONS = 4
"""Every process of a host listens on the same port, and the kernel picks one: perhaps the one that hangs."""

MOST_BYTES = 1 << 16
"""Of an answer. What sends more is cut there: any program may listen on that port, and send without end."""


def ask_ras(seconds: float, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The lines of the first answer on NCCL_RAS_ADDR, or NCCL's own port; empty where nobody listens or answers.

    It takes `seconds` at most, whatever listens there, and 64 KiB of an answer.
    """
    host, _, port = environment.get("NCCL_RAS_ADDR", _DEFAULT_ADDRESS).rpartition(":")
    if not port.isdecimal():
        return []
    deadline = time.monotonic() + seconds
    answers: dict[socket.socket, bytes] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(_CONNECTIONS):
            try:
                connection = stack.enter_context(socket.create_connection((host.strip("[]"), int(port)), 0.5))
                connection.sendall(_QUESTION)
            except (OSError, OverflowError, ValueError):  # names and ports that cannot be
                break
            answers[connection] = b""
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connection = key.fileobj  # type: ignore[assignment]
                data = _read(connection, MOST_BYTES - len(answers[connection]))
                answers[connection] += data
                if data and len(answers[connection]) < MOST_BYTES:
                    continue
                selector.unregister(connection)
                if lines := _lines(answers[connection]):
                    return lines
    return max(map(_lines, answers.values()), key=len, default=[])


def _read(connection: socket.socket, most_bytes: int) -> bytes:
    try:
        return connection.recv(most_bytes)
    except OSError:
        return b""


def _lines(answer: bytes) -> list[str]:
    """An answer without empty lines, and without the OK to the time-out that was asked for."""
    lines = [line.rstrip() for line in answer.decode(errors="replace").splitlines()]
    return [line for line in lines if line and line != "OK"]
