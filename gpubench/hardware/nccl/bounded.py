"""Communicators that do not block: made, used and given up within a deadline.

A blocking call of NCCL's waits for a rank that died for ever. With `blocking = 0` (NCCL 2.14 and later) calls return at
once, and `ncclCommGetAsyncError` says when what they began is done (NCCL user guide, "Fault Tolerance").
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpubench.hardware.nccl.configuration import INITIALISE, UniqueId, not_blocking

_SUCCESS, _IN_PROGRESS = 0, 7
"""ncclSuccess and ncclInProgress in nccl.h."""

_INT64, _SUM = 4, 0
"""ncclInt64 and ncclSum in nccl.h."""

_SECONDS_BETWEEN_LOOKS = 20e-6


class CFunctions(Protocol):
    """The functions of a C library by name, all of which return `ncclResult_t`."""

    def function(self, name: str, *types: Any) -> Callable[..., int]:
        """One that takes arguments of these types of ctypes'."""


class CommunicatorError(OSError):
    """NCCL could not connect ranks, or carry data between them."""


def new_unique_id(library: CFunctions) -> bytes:
    """What all ranks of a communicator have to know. Raises CommunicatorError."""
    made = UniqueId()
    status = library.function("ncclGetUniqueId", ctypes.c_void_p)(ctypes.addressof(made))
    if status:
        raise CommunicatorError(f"ncclGetUniqueId returned {status}")
    return bytes(made)


class BoundedCommunicator:
    """A communicator of this rank and others.

    Raises TimeoutError where anything is not done by its deadline, of the monotonic clock, and CommunicatorError where
    NCCL fails. After either it is aborted.
    """

    def __init__(self, library: CFunctions, unique_id: bytes, rank: int, ranks: int, deadline: float) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        config = not_blocking()
        begin = library.function(INITIALISE, ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int, ctypes.c_void_p)
        handle, settings = ctypes.addressof(self._handle), ctypes.addressof(config)
        self._settle(begin(handle, ranks, UniqueId.from_buffer_copy(unique_id), rank, settings), deadline)

    def exchange(
        self, addresses: tuple[int, int], peers: tuple[int, int], size_bytes: int, stream: int, deadline: float
    ) -> None:
        """Put an exchange on a stream: so many bytes of the first address to the first peer, and from the second."""
        (send, receive), (to, source) = addresses, peers
        types = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
        calls: Sequence[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = (
            ("ncclGroupStart", (), ()),
            ("ncclSend", types, (send, size_bytes, 0, to, self._handle, stream)),
            ("ncclRecv", types, (receive, size_bytes, 0, source, self._handle, stream)),
        )
        answers = (self._library.function(name, *kinds)(*arguments) for name, kinds, arguments in calls)
        refused = next((status for status in answers if status not in (_SUCCESS, _IN_PROGRESS)), _SUCCESS)
        # A group that is left open takes up whatever this process begins next.
        ended = self._library.function("ncclGroupEnd")()
        self._settle(refused or ended, deadline)

    def all_reduce(self, addresses: tuple[int, int], count: int, stream: int, deadline: float) -> None:
        """Put the sum of so many 64-bit integers of all ranks on a stream, from the first address to the second."""
        types = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p
        reduce = self._library.function("ncclAllReduce", *types, ctypes.c_void_p)
        self._settle(reduce(*addresses, count, _INT64, _SUM, self._handle, stream), deadline)

    def check(self) -> None:
        """Raise CommunicatorError where NCCL has noticed an error meanwhile."""
        self._settle(_SUCCESS, float("inf"))

    def close(self, deadline: float) -> None:
        """End it together with the other ranks."""
        self._settle(self._library.function("ncclCommFinalize", ctypes.c_void_p)(self._handle), deadline)
        self._library.function("ncclCommDestroy", ctypes.c_void_p)(self._handle)
        self._handle = ctypes.c_void_p()

    def abort(self) -> None:
        """Give it up, whatever is under way."""
        if self._handle.value:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._library.function("ncclCommAbort", ctypes.c_void_p)(handle)

    def _settle(self, status: int, deadline: float) -> None:
        """Wait until what a call began is done, as far as the host is concerned."""
        state = ctypes.c_int(status)
        ask = self._library.function("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.c_void_p)
        while status in (_SUCCESS, _IN_PROGRESS):
            if self._handle.value:
                status = ask(self._handle, ctypes.addressof(state)) or state.value
            if status != _IN_PROGRESS:
                break
            if time.monotonic() > deadline:
                self.abort()
                raise TimeoutError
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if status not in (_SUCCESS, _IN_PROGRESS):
            self.abort()
            raise CommunicatorError(f"NCCL: ncclResult_t {status}")
