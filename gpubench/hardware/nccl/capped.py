"""A communicator whose kernels have no more than so many CTAs, made and ended by calls into the library itself.

CuPy's `NcclCommunicator` takes no `ncclConfig_t`; this has the part of its methods that a backend uses.
"""

import ctypes
from typing import Any, Protocol

from gpubench.hardware.nccl.bounded import CFunctions, new_unique_id
from gpubench.hardware.nccl.configuration import INITIALISE, UniqueId, capped
from gpubench.ports.group import Group


class CheckedLibrary(CFunctions, Protocol):
    """A library of C functions by name, whose refusals are raised as CuPy raises them."""

    nccl: Any

    def has(self, name: str) -> bool:
        """True where this version has a function of that C name."""


def takes_caps(library: CheckedLibrary) -> bool:
    """True where a cap can be asked for when a communicator is made."""
    return library.has(INITIALISE)


class CappedCommunicator:
    """A communicator of a group; every rank of it makes one. Raises CuPy's NcclError where NCCL refuses."""

    def __init__(self, library: CheckedLibrary, group: Group, most_ctas: int) -> None:
        self._library, self._rank, self._size = library, group.rank, group.size
        unique_id = group.broadcast(new_unique_id(library) if group.rank == 0 else None)
        handle, settings = ctypes.c_void_p(), capped(most_ctas)
        begin = library.function(INITIALISE, ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int, ctypes.c_void_p)
        own = UniqueId.from_buffer_copy(unique_id)
        self._check(begin(ctypes.addressof(handle), self._size, own, self._rank, ctypes.addressof(settings)))
        self.comm: int = handle.value or 0
        self._state = ctypes.c_int()
        self._ask = library.function("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.c_void_p)

    def rank_id(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def check_async_error(self) -> None:
        """Raise where NCCL has noticed an error meanwhile."""
        self._check(self._ask(self.comm, ctypes.addressof(self._state)) or self._state.value)

    def abort(self) -> None:
        """Give it up, whatever is under way."""
        self._end("ncclCommAbort")

    def destroy(self) -> None:
        """End it together with the other ranks."""
        self._end("ncclCommDestroy")

    def _end(self, function: str) -> None:
        if self.comm:
            handle, self.comm = self.comm, 0
            self._library.function(function, ctypes.c_void_p)(handle)

    def _check(self, status: int) -> None:
        if status:
            self._library.nccl.check_status(status)
