"""Communicators with fake nccl4py functions: configurations, registered buffers, deadlines, and refusals."""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.nccl.communicator import (
    UNIQUE_ID_BYTES,
    BoundedCommunicator,
    CommunicatorError,
    GroupCommunicator,
    config_of,
    new_unique_id,
    open_requested,
    takes_caps,
)
from gpubench.backends.nccl.library import NcclError, NcclLibrary
from gpubench.model.terms.settings import Registration
from tests.fakes import cupy_on_numpy
from tests.fakes.cupy_on_numpy import NCCLError, UniqueId

SUCCESS, UNHANDLED_CUDA_ERROR, REMOTE_ERROR, IN_PROGRESS = 0, 1, 6, 7
HANDLE = 0xC0
ID = bytes(range(UNIQUE_ID_BYTES))
BUFFERS = [(0x1000, 4096), (0x9000, 8192)]

_RECORDED = (
    *("comm_abort", "comm_destroy", "comm_finalize", "comm_deregister", "comm_window_deregister"),
    *("group_start", "group_end", "send", "recv", "all_reduce"),
)


class Bindings(cupy_on_numpy.Nccl):
    """Bindings that record calls. `answers` holds the status of functions that refuse. `states` are the
    communicator's consecutive asynchronous states. `registered` is the handle of registered memory.
    """

    def __init__(self, **answers: int) -> None:
        super().__init__(2)
        self.answers, self.states, self.registered = answers, [SUCCESS], 0xAA
        self.made_with: list[tuple[Any, ...]] = []
        self.recorded: list[tuple[Any, ...]] = []
        for name in _RECORDED:
            setattr(self, name, partial(self._call, name))

    def _call(self, name: str, *arguments: Any) -> None:
        plain = [each.handle if hasattr(each, "handle") else each for each in arguments]
        self.recorded.append((name, *plain))
        if self.answers.get(name):
            raise NCCLError(self.answers[name])

    def get_unique_id(self) -> UniqueId:
        return UniqueId(ID)

    def comm_init_rank(self, size: int, unique_id: UniqueId, rank: int) -> Any:
        return self.comm_init_rank_config(size, unique_id, rank, cupy_on_numpy.Config())

    def comm_init_rank_config(self, size: int, unique_id: UniqueId, rank: int, config: cupy_on_numpy.Config) -> Any:
        self.made_with.append((size, unique_id.content, rank, vars(config)))
        self._call("comm_init_rank_config")
        return SimpleNamespace(handle=HANDLE)

    def comm_get_async_error(self, communicator: Any) -> int:
        assert communicator.handle == HANDLE, "what was given up is not asked any more"
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def comm_register(self, communicator: Any, address: int, size_bytes: int) -> int:
        self._call("comm_register", communicator, address, size_bytes)
        return self.registered

    def comm_window_register(self, communicator: Any, address: int, size_bytes: int, flags: int) -> Any:
        self._call("comm_window_register", communicator, address, size_bytes, flags)
        return SimpleNamespace(handle=self.registered)

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.recorded]


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: int) -> None:
        self.nccl = Bindings(**answers)
        cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), self.nccl)
        self.library = NcclLibrary()
        self.allocations = BUFFERS

    def connected(self, rank: int = 1, seconds: float = 60.0) -> BoundedCommunicator:
        return BoundedCommunicator(self.library, ID, rank, 2, time.monotonic() + seconds)

    def opened(self, **requests: str) -> tuple[GroupCommunicator, Registration]:
        named = {name.replace("_", "-"): value for name, value in requests.items()}
        calls, how = open_requested(cast("Any", self), self.library, AloneGroup(), named)
        return cast("GroupCommunicator", calls), how

    def drop(self, communicator: GroupCommunicator) -> None:
        communicator.abort()

    def adopt(self, communicator: object) -> object:
        return communicator


def test_a_cap_is_asked_for_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    made = GroupCommunicator(bench.library, AloneGroup(), {"max_ctas": 8})
    assert bench.nccl.made_with == [(1, ID, 0, {"max_ctas": 8})]
    assert (made.handle, made.rank, made.ranks) == (HANDLE, 0, 1)
    made.check_async_error()
    made.destroy()
    made.abort()
    assert bench.nccl.names[1:] == ["comm_destroy"], "it was ended before"
    made.check_async_error()
    assert takes_caps(cast("Any", SimpleNamespace(has=lambda name: name == "ncclCommInitRankConfig")))
    assert not takes_caps(bench.library)


def test_a_refusal_and_an_error_meanwhile_are_raised_in_nccls_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NcclError, match="NCCL error 4"):
        GroupCommunicator(Bench(monkeypatch, comm_init_rank_config=4).library, AloneGroup(), {"max_ctas": 8})
    bench = Bench(monkeypatch)
    made = GroupCommunicator(bench.library, AloneGroup())
    assert bench.nccl.made_with[0][3] == {}, "as NCCL makes it"
    bench.nccl.states = [IN_PROGRESS, IN_PROGRESS, REMOTE_ERROR]
    made.check_async_error()
    assert made.trouble() == ""
    with pytest.raises(NcclError, match="NCCL error 6"):
        made.check_async_error()
    assert made.trouble() == "NCCL's asynchronous error: NCCL error 6"


def test_policies_and_caps_are_fields_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of({"max-ctas": "4"}) == {"max_ctas": 4}
    assert config_of({"max-ctas": "4", "cta-policy": "zero"}) == {"max_ctas": 4, "cta_policy": 2}
    assert [config_of({"cta-policy": each})["cta_policy"] for each in ("default", "efficiency")] == [0, 1]
    assert config_of({"register": "user"}) == {}
    bench = Bench(monkeypatch)
    assert bench.opened(cta_policy="zero")[1] is Registration.NONE
    assert bench.nccl.made_with[0][3] == {"cta_policy": 2}
    assert not any("register" in name for name in bench.nccl.names)


@pytest.mark.parametrize(("how", "register"), [("user", "comm_register"), ("symmetric", "comm_window_register")])
def test_every_buffer_is_registered_and_given_back_before_the_communicator_ends(
    monkeypatch: pytest.MonkeyPatch, how: str, register: str
) -> None:
    bench = Bench(monkeypatch)
    communicator, registered = bench.opened(register=how)
    assert registered == how
    made = [call for call in bench.nccl.recorded if call[0] == register]
    assert [call[1:4] for call in made] == [(HANDLE, *buffer) for buffer in BUFFERS]
    assert [call[4:] for call in made] == [(1,) if how == "symmetric" else ()] * 2, "NCCL_WIN_COLL_SYMMETRIC"
    communicator.destroy()
    undo = register.replace("register", "deregister")
    assert bench.nccl.recorded[-3:] == [*[(undo, HANDLE, 0xAA)] * 2, ("comm_destroy", HANDLE)]


def test_a_null_handle_is_no_registration_and_nothing_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.nccl.registered = 0
    communicator, registered = bench.opened(register="symmetric")
    assert registered is Registration.NONE
    communicator.destroy()
    assert not any("deregister" in name for name in bench.nccl.names)


def test_a_communicator_that_refuses_to_register_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, comm_register=5)
    with pytest.raises(NcclError, match="5"):
        bench.opened(register="user")
    assert bench.nccl.recorded[-1] == ("comm_abort", HANDLE)


def test_an_aborted_communicator_is_not_asked_to_deregister(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    communicator, _ = bench.opened(register="user")
    communicator.abort()
    communicator.destroy()
    assert bench.nccl.names[-1] == "comm_abort"


def test_with_a_deadline_it_is_made_without_blocking_from_the_id_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.nccl.states = [IN_PROGRESS, IN_PROGRESS, SUCCESS]
    bench.connected()
    assert bench.nccl.made_with == [(2, ID, 1, {"blocking": 0})]
    assert bench.nccl.states == [SUCCESS]
    assert new_unique_id(bench.library) == ID


def test_an_exchange_is_one_group_and_waits_until_it_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    communicator = bench.connected()
    bench.nccl.states = [IN_PROGRESS, SUCCESS]
    communicator.exchange((0x1000, 0x2000), (0, 0), 4096, 0x33, time.monotonic() + 60)
    assert bench.nccl.names[1:] == ["group_start", "send", "recv", "group_end"]
    assert bench.nccl.recorded[2] == ("send", 0x1000, 4096, 0, 0, HANDLE, 0x33)
    assert bench.nccl.recorded[3] == ("recv", 0x2000, 4096, 0, 0, HANDLE, 0x33)
    assert bench.nccl.states == [SUCCESS]
    communicator.close(time.monotonic() + 60)
    assert bench.nccl.names[-2:] == ["comm_finalize", "comm_destroy"]
    communicator.abort()
    assert bench.nccl.names[-1] == "comm_destroy", "what is closed is not aborted"


def test_what_is_not_done_by_the_deadline_is_aborted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.nccl.states = [IN_PROGRESS]
    with pytest.raises(TimeoutError):
        bench.connected(0, seconds=0.01)
    assert bench.nccl.names == ["comm_init_rank_config", "comm_abort"]


@pytest.mark.parametrize("name", ["group_start", "send", "recv", "group_end"])
def test_a_refusal_is_an_error_and_aborts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bench = Bench(monkeypatch)
    communicator = bench.connected()
    bench.nccl.answers[name] = UNHANDLED_CUDA_ERROR
    with pytest.raises(CommunicatorError, match="NCCL: NCCL error 1"):
        communicator.exchange((0, 0), (0, 0), 1, 0, time.monotonic() + 60)
    ended = ["group_end"] if name != "group_start" else ["group_start"]
    assert bench.nccl.names[-2:] == [*ended, "comm_abort"], "an open group takes up what comes next"


def test_an_error_that_comes_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    communicator = bench.connected()
    communicator.check()
    bench.nccl.states = [UNHANDLED_CUDA_ERROR]
    with pytest.raises(CommunicatorError, match="NCCL error 1"):
        communicator.check()
    communicator.abort()
    assert bench.nccl.names.count("comm_abort") == 1


def test_an_all_reduce_is_of_64_bit_integers_that_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.connected().all_reduce((1, 2), 1000, 7, time.monotonic() + 60)
    name, send, receive, count, kind, operation, handle, stream = bench.nccl.recorded[-1]
    assert (name, send, receive, count, stream, handle) == ("all_reduce", 1, 2, 1000, 7, HANDLE)
    assert (kind.name, operation.name) == ("Int64", "Sum")
