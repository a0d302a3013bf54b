"""What is asked of a communicator by calls: its configuration, and the buffers that are registered with it."""

import ctypes
from collections.abc import Callable
from typing import Any, cast

import pytest

from gpubench.errors import UsageError
from gpubench.hardware.mpi.group import AloneGroup
from gpubench.hardware.nccl.backend import CommunicatorConfig
from gpubench.hardware.nccl.communicator import ConfiguredCommunicator, check_requests, config_of, open_requested
from gpubench.model.terms.settings import NcclSetting, Registration, every_combination

UNDEFINED = -(2**31)
BUFFERS = [(0x1000, 4096), (0x9000, 8192)]


class RefusedError(RuntimeError):
    pass


class Library:
    """Records calls with their plain arguments; `handle` is what registering returns, null for none."""

    def __init__(self, handle: int = 0xAA, status: int = 0) -> None:
        self.handle, self.status = handle, status
        self.calls: list[tuple[Any, ...]] = []
        self.config = CommunicatorConfig()
        self.nccl = self

    def check_status(self, status: int) -> None:
        raise RefusedError(str(status))

    def has(self, _name: str) -> bool:
        return True

    def function(self, name: str, *types: Any) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            assert len(types) == len(arguments)
            self.calls.append((name, *arguments))
            if name == "ncclCommInitRankConfig":
                size = ctypes.c_size_t.from_address(arguments[4]).value
                ctypes.memmove(ctypes.addressof(self.config), arguments[4], size)
                ctypes.c_void_p.from_address(arguments[0]).value = 0xC0
            if name in ("ncclCommRegister", "ncclCommWindowRegister"):
                ctypes.c_void_p.from_address(arguments[3]).value = self.handle
                return self.status
            return 0

        return call


class Backend:
    """Adopts what it is given, and aborts what is dropped."""

    allocations = BUFFERS

    def drop(self, communicator: ConfiguredCommunicator) -> None:
        communicator.abort()

    def adopt(self, communicator: object) -> object:
        return communicator


def opened(library: Library, **requests: str) -> tuple[ConfiguredCommunicator, Registration]:
    named = {name.replace("_", "-"): value for name, value in requests.items()}
    calls, how = open_requested(cast("Any", Backend()), library, AloneGroup(), named)
    return cast("ConfiguredCommunicator", calls), how


@pytest.mark.parametrize(("policy", "number"), [("default", 0), ("efficiency", 1), ("zero", 2)])
def test_a_policy_is_asked_for_and_nothing_else(policy: str, number: int) -> None:
    library = Library()
    assert opened(library, cta_policy=policy)[1] is Registration.NONE
    found = library.config
    assert (found.size, found.version, found.policy) == (ctypes.sizeof(CommunicatorConfig), 22700, number)
    others = (found.blocking, found.most_ctas, found.split_share, found.traffic_class, found.collnet, found.nvls_ctas)
    assert others == (UNDEFINED,) * 6
    assert not any("Register" in call[0] for call in library.calls)


def test_without_a_policy_older_releases_understand_it() -> None:
    found = config_of({"max-ctas": "4"})
    assert (found.size, found.version, found.most_ctas) == (40, 21700, 4)
    both = config_of({"max-ctas": "4", "cta-policy": "zero"})
    assert (both.version, both.most_ctas, both.policy) == (22700, 4, 2)
    assert config_of({"register": "user"}).most_ctas == UNDEFINED


@pytest.mark.parametrize(
    ("how", "register", "undo"),
    [
        ("user", "ncclCommRegister", "ncclCommDeregister"),
        ("symmetric", "ncclCommWindowRegister", "ncclCommWindowDeregister"),
    ],
)
def test_every_buffer_is_registered_and_given_back_before_the_communicator_ends(
    how: str, register: str, undo: str
) -> None:
    library = Library()
    communicator, registered = opened(library, register=how)
    assert registered == how
    made = [call for call in library.calls if call[0] == register]
    assert [call[1:4] for call in made] == [(0xC0, *buffer) for buffer in BUFFERS]
    assert [call[5:] for call in made] == [(1,) if how == "symmetric" else ()] * 2, "NCCL_WIN_COLL_SYMMETRIC"
    communicator.destroy()
    assert [call[0] for call in library.calls][-3:] == [undo, undo, "ncclCommDestroy"]
    assert library.calls[-2] == (undo, 0xC0, 0xAA)


def test_a_null_handle_is_no_registration_and_nothing_to_give_back() -> None:
    library = Library(handle=0)
    communicator, registered = opened(library, register="symmetric")
    assert registered is Registration.NONE
    communicator.destroy()
    assert not any("Deregister" in call[0] for call in library.calls)


def test_a_refusal_is_raised_as_cupy_raises_it() -> None:
    library = Library(status=5)
    with pytest.raises(RefusedError, match="5"):
        opened(library, register="user")
    assert library.calls[-1] == ("ncclCommAbort", 0xC0)


def test_an_aborted_communicator_is_not_asked_to_deregister() -> None:
    library = Library()
    communicator, _ = opened(library, register="user")
    communicator.abort()
    communicator.destroy()
    assert [call[0] for call in library.calls][-1] == "ncclCommAbort"


def settings(**asked: str) -> tuple[NcclSetting, ...]:
    return tuple(every_combination({name.replace("_", "-"): values.split(",") for name, values in asked.items()}))


@pytest.mark.parametrize(
    ("asked", "code", "said", "expected"),
    [
        ({"register": "user"}, 21800, "--register user, but NCCL 2.18.0 has no ncclCommRegister", "NCCL 2.19 or newer"),
        (
            {"register": "user,symmetric"},
            22609,
            "--register symmetric, but NCCL 2.26.9 has no ncclCommWindowRegister",
            "NCCL 2.27 or newer",
        ),
        ({"cta_policy": "zero"}, 22707, "--cta-policy zero, but NCCL 2.27.7 has no NCCL_CTA_POLICY_ZERO", "NCCL 2.28"),
        ({"cta_policy": "efficiency"}, 22605, "has no NCCL_CTA_POLICY_EFFICIENCY", "NCCL 2.27 or newer"),
        ({"max_ctas": "8"}, 21600, "--max-ctas 8, but NCCL 2.16.0 has no cap on CTAs", "NCCL 2.17 or newer"),
    ],
)
def test_an_nccl_that_lacks_a_call_is_told_with_the_one_that_has_it(
    asked: dict[str, str], code: int, said: str, expected: str
) -> None:
    with pytest.raises(UsageError) as refused:
        check_requests(settings(**asked), code)
    assert said in str(refused.value)
    assert str(refused.value.expected).startswith(expected)
    assert "--nccl-library" in str(refused.value.next_step)


def test_an_nccl_that_has_all_passes() -> None:
    check_requests(settings(register="none,user,symmetric", cta_policy="default,efficiency,zero", max_ctas="4"), 22800)
    check_requests(settings(NCCL_ALGO="ring"), 20000)
