"""Communicators with a cap on their CTAs: what is asked of NCCL's functions."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpubench.hardware.mpi.group import AloneGroup
from gpubench.hardware.nccl.backend import UNIQUE_ID_BYTES, CommunicatorConfig
from gpubench.hardware.nccl.communicator import takes_caps
from gpubench.hardware.overlap import CappedCommunicator


class RefusedError(RuntimeError):
    pass


class Library:
    """Records calls; `status` is what making a communicator returns, `state` its asynchronous error."""

    def __init__(self, status: int = 0, state: int = 0, functions: Sequence[str] = ("ncclCommInitRankConfig",)) -> None:
        self.status, self.state, self.functions = status, state, functions
        self.calls: list[str] = []
        self.config: tuple[int, ...] = ()
        self.nccl = self

    def check_status(self, status: int) -> None:
        raise RefusedError(str(status))

    def has(self, name: str) -> bool:
        return name in self.functions

    def function(self, name: str, *_types: Any) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "ncclGetUniqueId":
                ctypes.memmove(arguments[0], bytes(range(UNIQUE_ID_BYTES)), UNIQUE_ID_BYTES)
            if name == "ncclCommInitRankConfig":
                handle, size, unique_id, rank, settings = arguments
                assert (size, rank, bytes(unique_id)) == (1, 0, bytes(range(UNIQUE_ID_BYTES)))
                found = CommunicatorConfig.from_address(settings)
                self.config = found.size, found.magic, found.version, found.blocking, found.least_ctas, found.most_ctas
                ctypes.c_void_p.from_address(handle).value = 0xC0
                return self.status
            if name == "ncclCommGetAsyncError":
                ctypes.c_int.from_address(arguments[1]).value = self.state
            return 0

        return call


def test_a_cap_is_asked_for_and_nothing_else() -> None:
    library = Library()
    made = CappedCommunicator(library, AloneGroup(), 8)
    undefined = -(2**31)
    assert library.config == (40, 0xCAFEBEEF, 21700, undefined, undefined, 8)
    assert (made.comm, made.rank_id(), made.size()) == (0xC0, 0, 1)
    made.check_async_error()
    made.destroy()
    made.abort()
    assert library.calls.count("ncclCommDestroy") == 1
    assert "ncclCommAbort" not in library.calls, "it was ended before"


def test_a_refusal_and_an_error_meanwhile_are_raised() -> None:
    with pytest.raises(RefusedError, match="4"):
        CappedCommunicator(Library(status=4), AloneGroup(), 8)
    with pytest.raises(RefusedError, match="6"):
        CappedCommunicator(Library(state=6), AloneGroup(), 8).check_async_error()


def test_an_old_nccl_takes_none() -> None:
    assert takes_caps(Library())
    assert not takes_caps(Library(functions=()))
