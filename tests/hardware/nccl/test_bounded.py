"""Communicators of two ranks on a stand-in for NCCL, whose calls say that they are under way before they are done."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpubench.hardware.nccl.backend import UNIQUE_ID_BYTES, BoundedCommunicator, CommunicatorError, new_unique_id

SUCCESS, UNHANDLED_CUDA_ERROR, IN_PROGRESS = 0, 1, 7
HANDLE = 0xBEEF
ID = bytes(range(UNIQUE_ID_BYTES))


class Nccl:
    """Functions by name: what each returns, and the states that are asked for after it, of which the last stays."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers
        self.states = [SUCCESS]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def function(self, name: str, *_types: Any) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "ncclCommGetAsyncError":
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                ctypes.c_int.from_address(arguments[1]).value = state
                return SUCCESS
            self.calls.append((name, arguments))
            if name == "ncclCommInitRankConfig":
                ctypes.c_void_p.from_address(arguments[0]).value = HANDLE
            if name == "ncclGetUniqueId":
                ctypes.memmove(arguments[0], ID, UNIQUE_ID_BYTES)
            return self.answers.get(name, SUCCESS)

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def connected(nccl: Nccl) -> BoundedCommunicator:
    return BoundedCommunicator(nccl, ID, 1, 2, time.monotonic() + 60)


def test_it_is_made_without_blocking_from_the_id_of_both() -> None:
    nccl = Nccl(ncclCommInitRankConfig=IN_PROGRESS)
    nccl.states = [IN_PROGRESS, IN_PROGRESS, SUCCESS]
    connected(nccl)
    ((_, (_, ranks, unique_id, rank, config)),) = nccl.calls
    assert (ranks, bytes(unique_id), rank) == (2, ID, 1)
    assert nccl.states == [SUCCESS]
    assert new_unique_id(nccl) == ID
    assert config


def test_the_settings_are_those_of_nccl_2_14() -> None:
    seen: list[tuple[int, ...]] = []

    class Reading(Nccl):
        def function(self, name: str, *types: Any) -> Callable[..., int]:
            call = super().function(name, *types)

            def read(*arguments: Any) -> int:
                if name == "ncclCommInitRankConfig":
                    size = ctypes.c_size_t.from_address(arguments[4]).value
                    words = (ctypes.c_uint * 3).from_address(arguments[4] + ctypes.sizeof(ctypes.c_size_t))
                    seen.append((size, *words))
                return call(*arguments)

            return read

    connected(Reading())
    assert seen == [(24, 0xCAFEBEEF, 21400, 0)]


def test_an_exchange_is_one_group_and_waits_until_it_is_issued() -> None:
    nccl = Nccl(ncclGroupEnd=IN_PROGRESS)
    communicator = connected(nccl)
    nccl.states = [IN_PROGRESS, SUCCESS]
    communicator.exchange((0x1000, 0x2000), (0, 0), 4096, 0x33, time.monotonic() + 60)
    assert nccl.names[1:] == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    send, receive = nccl.calls[2][1], nccl.calls[3][1]
    assert (send[0], send[1], send[3], send[5]) == (0x1000, 4096, 0, 0x33)
    assert (receive[0], receive[1], receive[3], receive[5]) == (0x2000, 4096, 0, 0x33)
    assert nccl.states == [SUCCESS]
    communicator.close(time.monotonic() + 60)
    assert nccl.names[-2:] == ["ncclCommFinalize", "ncclCommDestroy"]
    communicator.abort()
    assert nccl.names[-1] == "ncclCommDestroy", "what is closed is not aborted"


def test_what_is_not_done_by_the_deadline_is_aborted_once() -> None:
    nccl = Nccl(ncclCommInitRankConfig=IN_PROGRESS)
    nccl.states = [IN_PROGRESS]
    with pytest.raises(TimeoutError):
        BoundedCommunicator(nccl, ID, 0, 2, time.monotonic() + 0.01)
    assert nccl.names == ["ncclCommInitRankConfig", "ncclCommAbort"]


@pytest.mark.parametrize("name", ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"])
def test_a_refusal_is_an_error_and_aborts(name: str) -> None:
    nccl = Nccl()
    communicator = connected(nccl)
    nccl.answers[name] = UNHANDLED_CUDA_ERROR
    with pytest.raises(CommunicatorError, match="ncclResult_t 1"):
        communicator.exchange((0, 0), (0, 0), 1, 0, time.monotonic() + 60)
    assert nccl.names[-2:] == ["ncclGroupEnd", "ncclCommAbort"], "an open group takes up what comes next"


def test_an_error_that_comes_later_is_noticed() -> None:
    nccl = Nccl()
    communicator = connected(nccl)
    communicator.check()
    nccl.states = [UNHANDLED_CUDA_ERROR]
    with pytest.raises(CommunicatorError):
        communicator.check()
    communicator.abort()
    assert nccl.names.count("ncclCommAbort") == 1


def test_an_all_reduce_is_of_64_bit_integers_that_are_added() -> None:
    nccl = Nccl()
    communicator = connected(nccl)
    communicator.all_reduce((1, 2), 1000, 7, time.monotonic() + 60)
    name, (send, receive, count, kind, operation, handle, stream) = nccl.calls[-1]
    assert (name, send, receive, count, kind, operation, stream) == ("ncclAllReduce", 1, 2, 1000, 4, 0, 7)
    assert handle.value == HANDLE
