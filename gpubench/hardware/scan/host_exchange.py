"""The exchange of the host backend: both ends of a TCP connection send and receive at once, from CPU buffers."""

import socket
import struct
import threading
import time

_COUNT = struct.Struct("!Q")
_PROBE_BYTES = 256 * 2**10
_MOST_BYTES = 2**32
_SECONDS_OF_COPYING = 0.3
_CHUNK_BYTES = 2**20
_BYTES_PER_GB = 1e9
BOTH_WAYS = 2


class WrongDataError(OSError):
    """What arrived is not what was sent."""


def exchange(connection: socket.socket, *, leads: bool) -> float:
    """GB/s of both directions together, over some 0.3 s; whoever `leads` says how many bytes that are.

    A first exchange of 256 KiB shows how fast it is, so that a slow link is measured and not given up. Raises OSError,
    TimeoutError among them.
    """
    buffer, target = bytearray(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)
    _both_ways(connection, buffer, target, _PROBE_BYTES)
    seconds = _both_ways(connection, buffer, target, _PROBE_BYTES)
    if leads:
        count = min(_MOST_BYTES, max(_PROBE_BYTES, int(_PROBE_BYTES * _SECONDS_OF_COPYING / max(seconds, 1e-6))))
        connection.sendall(_COUNT.pack(count))
    else:
        count = min(_COUNT.unpack(whole(connection, _COUNT.size))[0], _MOST_BYTES)
    seconds = _both_ways(connection, buffer, target, count)
    return BOTH_WAYS * count / seconds / _BYTES_PER_GB


def _both_ways(connection: socket.socket, buffer: bytearray, target: bytearray, count: int) -> float:
    """Seconds to send and to receive so many bytes, from a first byte that both have exchanged to a last one."""
    meet(connection)
    start = time.monotonic()
    failed: list[OSError] = []
    sender = threading.Thread(target=_send, args=(connection, buffer, count, failed), daemon=True)
    sender.start()
    left, view = count, memoryview(target)
    while left:
        received = connection.recv_into(view, min(left, len(target)))
        if not received:
            raise ConnectionError("the other end is gone")
        left -= received
    sender.join()
    if failed:
        raise failed[0]
    meet(connection)
    return time.monotonic() - start


def _send(connection: socket.socket, buffer: bytearray, count: int, failed: list[OSError]) -> None:
    view = memoryview(buffer)
    try:
        while count:
            sent = connection.send(view[: min(count, len(buffer))])
            count -= sent
    except OSError as error:
        failed.append(error)


def meet(connection: socket.socket) -> None:
    """Return once the other end has called it too. Raises OSError where it is gone."""
    connection.sendall(b"\0")
    whole(connection, 1)


def whole(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises OSError where the other end is gone before."""
    parts = b""
    while len(parts) < count:
        data = connection.recv(count - len(parts))
        if not data:
            raise ConnectionError("the other end is gone")
        parts += data
    return parts
