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

_READ_BYTES = 1 << 16


def ask_ras(seconds: float, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The lines of the first answer on NCCL_RAS_ADDR, or NCCL's own port; empty where nobody listens or answers."""
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
            except OSError:
                break
            answers[connection] = b""
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connection = key.fileobj  # type: ignore[assignment]
                data = _read(connection)
                answers[connection] += data
                if data:
                    continue
                selector.unregister(connection)
                if lines := _lines(answers[connection]):
                    return lines
    return max(map(_lines, answers.values()), key=len, default=[])


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_READ_BYTES)
    except OSError:
        return b""


def _lines(answer: bytes) -> list[str]:
    """An answer without empty lines, and without the OK to the time-out that was asked for."""
    lines = [line.rstrip() for line in answer.decode(errors="replace").splitlines()]
    return [line for line in lines if line and line != "OK"]
