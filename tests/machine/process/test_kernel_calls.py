"""What the kernel answers this process, and what is not asked."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from gpubench.machine.host import UnknownFields
from gpubench.machine.process import may_call, memory_policy, pidfd_getfd

PIDFD_OPEN = 434
NOT_TRIED = "not tried, because an unknown seccomp filter is active"


@pytest.mark.parametrize(
    ("seccomp", "hints", "expected"),
    [
        (0, (), True),
        (1, (), True),
        (None, (), True),
        (2, (), False),
        (2, ("slurm", "layered root"), False),
        (2, ("docker",), True),
        (2, ("slurm", "kubernetes"), True),
    ],
)
def test_under_a_strangers_filter_nothing_is_tried(seccomp: int | None, hints: tuple[str, ...], expected: bool) -> None:
    assert may_call(seccomp, hints) is expected


def test_what_is_not_tried_says_so() -> None:
    unknown = UnknownFields()
    assert (pidfd_getfd(unknown, allowed=False), memory_policy(unknown, allowed=False)) == (None, None)
    assert unknown.reasons == {"pidfd_getfd": NOT_TRIED, "memory_policy": NOT_TRIED}


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Refusing:
    """A libc whose calls fail, but for those that answer a descriptor."""

    def __init__(self, error: int, *answered: int) -> None:
        self.error = error
        self.answered = answered

    def __call__(self, name: None, use_errno: bool) -> "Refusing":
        return self

    def syscall(self, number: int, *arguments: Any) -> int:
        if number in self.answered:
            return os.open("/dev/null", os.O_RDONLY)
        ctypes.set_errno(self.error)
        return -1


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Refusing(38), "pidfd_open: Function not implemented"),
        (Refusing(1, PIDFD_OPEN), "pidfd_getfd: Operation not permitted"),
    ],
)
def test_calls_that_are_refused_say_why(monkeypatch: pytest.MonkeyPatch, library: Refusing, reason: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", library)
    before, unknown = descriptors(), UnknownFields()
    assert pidfd_getfd(unknown, allowed=True) is False
    assert memory_policy(unknown, allowed=True) is None
    assert unknown.reasons == {"pidfd_getfd": reason, "memory_policy": f"get_mempolicy: {os.strerror(library.error)}"}
    assert descriptors() == before
