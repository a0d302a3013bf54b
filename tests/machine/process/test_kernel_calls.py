"""What the kernel answers this process, and what is not asked."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubench.machine.host import UnknownFields
from gpubench.machine.process import may_call, memory_policy, pidfd_getfd

PIDFD_OPEN = 434
NOT_TRIED = "not tried: a seccomp filter is in force, and whose is not known"


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


def test_here_descriptors_can_be_handed_on_or_it_says_why_not() -> None:
    before, unknown = descriptors(), UnknownFields()
    assert pidfd_getfd(unknown, allowed=True) is ("pidfd_getfd" not in unknown.reasons)
    assert descriptors() == before


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


def test_a_machine_whose_calls_have_other_numbers_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    unknown = UnknownFields()
    assert memory_policy(unknown, allowed=True) is None
    assert unknown.reasons == {"memory_policy": "not asked on riscv64"}


BOUND = """
import ctypes, platform
number = {"x86_64": 238, "aarch64": 237}[platform.machine()]
mask = ctypes.c_ulong(1)
assert ctypes.CDLL(None).syscall(number, 2, ctypes.byref(mask), 64) == 0
from gpubench.machine.process import memory_policy
from gpubench.machine.host import UnknownFields
print(memory_policy(UnknownFields(), allowed=True))
"""
"""A process that binds itself to node 0 (set_mempolicy, MPOL_BIND)."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the call has another number here")
def test_a_process_that_is_bound_to_a_memory_node() -> None:
    unknown = UnknownFields()
    if memory_policy(unknown, allowed=True) is None:
        pytest.skip(f"this kernel does not answer: {unknown.reasons}")
    result = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=False)
    assert result.stdout == "bind 0\n", result.stderr
