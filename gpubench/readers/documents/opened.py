"""Files that a stranger may have made, opened so that none holds its reader up for ever."""

import io
import os
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gpubench.errors import UsageError
from gpubench.readers.documents import limits

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a pipe"),
)
_MS = 1000


class SilentPipeError(UsageError):
    """The writer of a pipe says nothing for too long."""


@contextmanager
def opened(path: Path, expected: str, *, pipes: bool = True) -> Iterator[io.BufferedReader]:
    """A file, or a pipe where those may be, open for reading; `expected` says what is wanted, for errors.

    Raises OSError, and UsageError for a device, a socket, and a pipe that nobody writes. While it is read: OSError, and
    SilentPipeError where the writer of a pipe says nothing.
    """
    name = str(path)
    _check_kind(path.stat().st_mode, name, expected, pipes=pipes)
    # Without O_NONBLOCK opening a pipe waits for its writer; files do not know it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        _check_kind(mode, name, expected, pipes=pipes)
        is_pipe = stat.S_ISFIFO(mode)
        raw = _Pipe(descriptor, name, expected) if is_pipe else io.FileIO(descriptor, closefd=False)
        with cast("io.BufferedReader", io.BufferedReader(raw)) as stream:
            yield stream
    finally:
        os.close(descriptor)


def _check_kind(mode: int, name: str, expected: str, *, pipes: bool) -> None:
    for is_kind, kind in _KINDS:
        if is_kind(mode) and not (pipes and stat.S_ISFIFO(mode)):
            raise UsageError(
                f"{name} is {kind}, and no file",
                expected=expected,
                reason="the wrong name, or a file that was made to hold up who reads it",
                next_step=f"ls -lL {name}",
            )


class _Pipe(io.RawIOBase):
    """A pipe that is read with patience, which has an end."""

    def __init__(self, descriptor: int, name: str, expected: str) -> None:
        self._descriptor, self._name, self._expected = descriptor, name, expected
        self._has_given = False
        self._given_up: SilentPipeError | None = None
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        # A shell's has no name, so that nobody can open it for writing any more: without a writer it is at its end.
        self._had_writer = str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("pipe:")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """The bytes that are there, 0 at the end."""
        if self._given_up:
            raise self._given_up
        begun = time.monotonic()
        while True:
            try:
                text = os.read(self._descriptor, memoryview(buffer).nbytes)
            except BlockingIOError:
                self._had_writer, text = True, None
            if text or (text is not None and self._had_writer):
                self._had_writer = self._has_given = True
                memoryview(buffer)[: len(text)] = text
                return len(text)
            most = limits.SECONDS_SILENT if self._had_writer else limits.SECONDS_WITHOUT_WRITER
            left = begun + most - time.monotonic()
            if left <= 0:
                return self._give_up(self._silent(most))
            for _, event in self._poll.poll(left * _MS):
                # Of a named pipe the kernel says so once a writer was there and went.
                self._had_writer = self._had_writer or bool(event & select.POLLHUP)

    def _give_up(self, error: SilentPipeError) -> int:
        """An end, so that nothing is lost of what a buffer holds; every later reading is the error."""
        if not self._has_given:
            raise error
        self._given_up = error
        return 0

    def _silent(self, seconds: float) -> SilentPipeError:
        what = "whose writer says nothing" if self._had_writer else "that nobody writes"
        return SilentPipeError(
            f"{self._name} is a pipe {what}: waited for {seconds:g} s",
            expected=self._expected,
            reason="its writer hangs" if self._had_writer else "its writer ended, or was never started",
            next_step=f"fuser {self._name} shows who has it open",
        )
