"""The table of C calls, run by machine code and by Python with the same result."""

import ctypes
import mmap
import os
import platform

import pytest

from gpubench.backends import timing
from gpubench.backends.timing import CallFailedError, CallTable, machine_code

EIGHT = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 8)


class Recorder:
    """A C function that records its arguments, and fails if the first is negative."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self._function = EIGHT(self._call)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _call(self, *arguments: int) -> int:
        self.seen.append(arguments)
        return -arguments[0] if arguments[0] < 0 else 0


@pytest.fixture(params=[True, False], ids=["machine code", "Python"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param and machine_code(platform.machine()) is None:
        pytest.skip("no machine code for this processor")
    return bool(request.param)


def test_a_failing_call_ends_the_walk_and_is_named(native: bool) -> None:
    recorder = Recorder()
    calls = [(recorder.address, 1), (recorder.address, -7), (recorder.address, 3)]
    with pytest.raises(CallFailedError) as caught:
        CallTable(calls, native=native)()
    assert (caught.value.position, caught.value.status) == (1, 7)
    assert len(recorder.seen) == 2


def test_many_calls(native: bool) -> None:
    recorder = Recorder()
    CallTable([(recorder.address, number) for number in range(500)], native=native)()
    assert [arguments[0] for arguments in recorder.seen] == list(range(500))


def test_no_calls_are_no_calls(native: bool) -> None:
    CallTable([], native=native)()


def test_other_processors_have_no_machine_code() -> None:
    assert machine_code("riscv64") is None
    assert len(machine_code("x86_64") or b"") == 85
    assert len(machine_code("aarch64") or b"") == 108


@pytest.mark.parametrize("refusal", ["memfd", "mmap"])
def test_a_system_that_refuses_executable_memory_gets_python(monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    if refusal == "memfd":

        def refuse(_name: str) -> int:
            raise PermissionError

        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.setattr(mmap, "MAP_PRIVATE", 0)  # neither private nor shared: EINVAL
    assert timing._map_executable(b"x") is None
