"""C calls, one after another, without Python in between.

A small collective takes an H200 about 5 µs, and the host about as long to launch it. There, a loop in Python measures
itself: up to 16 KiB it read 0.4 to 1.2 µs more than nccl-tests (medians of five collectives on 4 H200s). So the calls
of a timed loop, with all their arguments, stand in a table, and a few dozen bytes of machine code walk it. They are
what a compiler makes of this function, for the two processors that GPU servers have; on any other, or where the
system forbids such code, Python makes the calls.

    long run(const long *call, long count) {
        for (long i = 1; i <= count; ++i, call += 9) {
            int status = ((int (*)(long, long, long, long, long, long, long, long))call[0])(
                call[1], call[2], call[3], call[4], call[5], call[6], call[7], call[8]);
            if (status) return i << 32 | (unsigned)status;
        }
        return 0;
    }
"""

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache

MOST_ARGUMENTS = 8

Entry = tuple[int, ...]
"""The address of a C function that returns an int, 0 for success, and up to eight integer or pointer arguments."""

_X86_64 = """
4154 4989f4 55 bd01000000 53 4889fb 4c39e5 7f3a 488b4b20 488b5318 488b7310 488b7b08 ff7340 ff7338 4c8b4b30 4c8b4328 ff13
5a 59 85c0 740b 48c1e520 89c0 4809e8 eb0b 48ffc5 4883c348 ebc1 31c0 5b 5d 415c c3
"""
_AARCH64 = """
a9bd7bfd 910003fd a90153f3 aa0003f3 d2800034 f90013f5 aa0103f5 eb15029f 5400006d d2800000 1400000a a9400268 a9410a61
a9421263 a9431a65 f9402267 d63f0100 340000e0 2a0003e0 aa148000 a94153f3 f94013f5 a8c37bfd d65f03c0 91000694 91012273
17ffffed
"""

_Loop = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
_Call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * MOST_ARGUMENTS)


class CallFailedError(Exception):
    """A call of a table returned something else than 0; the calls behind it were not made."""

    def __init__(self, position: int, status: int) -> None:
        super().__init__(f"call {position} returned {status}")
        self.position = position
        self.status = status


class CallTable:
    """Calls to make in order. Calling the table makes them, with the interpreter's lock released."""

    def __init__(self, entries: Sequence[Entry], *, native: bool = True) -> None:
        self._entries = entries
        words = [word for entry in entries for word in (*entry, *[0] * (1 + MOST_ARGUMENTS - len(entry)))]
        self._table = (ctypes.c_int64 * len(words))(*words)
        self._address = ctypes.addressof(self._table)
        self._count = len(entries)
        self._loop = native_loop() if native else None

    def after(self, entries: Sequence[Entry]) -> "CallTable":
        """The same calls behind others."""
        return CallTable([*entries, *self._entries], native=self._loop is not None)

    def __call__(self) -> None:
        """Make the calls; CallFailedError where one failed."""
        result = self._loop(self._address, self._count) if self._loop else self._run_in_python()
        if result:
            raise CallFailedError((result >> 32) - 1, result & 0xFFFFFFFF)

    def _run_in_python(self) -> int:
        for position in range(self._count):
            address, *arguments = self._table[position * 9 : position * 9 + 9]
            status: int = _Call(address)(*arguments)
            if status:
                return (position + 1) << 32 | status
        return 0


@cache
def native_loop() -> "Callable[[int, int], int] | None":
    """The machine code as a function of table and count; None where processor or system have no place for it."""
    code = machine_code(platform.machine())
    address = _map_executable(code) if code else None
    return _Loop(address) if address else None


def machine_code(machine: str) -> bytes | None:
    """`run` for a processor by its `uname -m` name."""
    if machine == "x86_64":
        return bytes.fromhex(_X86_64)
    if machine == "aarch64":
        return b"".join(int(word, 16).to_bytes(4, "little") for word in _AARCH64.split())
    return None


def _map_executable(code: bytes) -> int | None:
    """The address of the code, mapped for the life of this process; None where the system refuses.

    It is written to a file in memory and mapped from there: so no page is ever writable and executable at once, and the
    kernel brings the instruction cache up to date, which aarch64 needs.
    """
    try:
        descriptor = os.memfd_create("gpubench-loop")
    except OSError:
        return None
    try:
        os.write(descriptor, code)
        function = ctypes.CDLL(None).mmap
        function.restype = ctypes.c_ssize_t
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)
        address: int = function(None, len(code), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, descriptor, 0)
    finally:
        os.close(descriptor)
    return None if address == -1 else address
