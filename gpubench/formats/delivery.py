"""Handle events that end a command early: Ctrl-C, a closed pipe, a full disk."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from gpubench.errors import DONE, GpubenchError, InterruptedRunError, OutputError, output_failed
from gpubench.model.terms.units import format_error, plural, printable_line


class Delivered(Protocol):
    """The output of a run, as `delivering` needs it. `cut_short` writes what was measured so far, marked incomplete."""

    @property
    def rows(self) -> int: ...

    @property
    def code_so_far(self) -> int: ...

    @property
    def stored_result(self) -> str: ...

    def cut_short(self) -> None: ...


class ReaderGoneError(InterruptedRunError):
    """The process that reads stdout exited, for example `head`. The run ends without a message.

    The exit code is 1 if a row had already failed, otherwise 0.
    """

    exit_code = DONE


@contextmanager
def delivering(presenter: Delivered) -> Iterator[None]:
    """Convert interrupts and output errors to one-line errors. Keep the rows so far, marked incomplete.

    Raises:
        InterruptedRunError: after Ctrl-C or SIGTERM, or if the process that reads stdout exited.
        CouldNotMeasureError: if an output cannot be written.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(interruption(presenter.rows, presenter.stored_result)) from None
    except BrokenPipeError:
        forget(sys.stdout)
        gone = ReaderGoneError("the reader of stdout has closed the pipe")
        gone.exit_code = presenter.code_so_far
        raise gone from None
    except OutputError as error:
        raise full_output(error, presenter.rows) from error
    finally:
        presenter.cut_short()


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines on stdout or on `to`, with control characters escaped. Ignore a closed stderr.

    Raises: InterruptedRunError if the process that reads the stream exited.
    """
    try:
        print(*map(printable_line, lines), sep="\n", file=to, flush=True)
    except OSError as error:
        forget(to or sys.stdout)
        if to is sys.stderr:
            return
        if isinstance(error, BrokenPipeError):
            raise ReaderGoneError("the reader of stdout has closed the pipe") from None
        raise


@contextmanager
def announced(text: str, to: TextIO | None) -> Iterator[Callable[[], None]]:
    """Show a line on a terminal, and erase it when the yielded function is called or the context exits."""
    shown = to is not None

    def take_back() -> None:
        nonlocal shown
        if shown and to is not None:
            print("\r\x1b[K", end="", file=to, flush=True)
        shown = False

    if to is not None:
        print(printable_line(text), end="", file=to, flush=True)
    try:
        yield take_back
    finally:
        take_back()


def tell(error: GpubenchError, to: TextIO) -> None:
    """Print an error on stderr. Ignore a closed stderr."""
    if isinstance(error, ReaderGoneError):
        return
    text = f"gpubench: {printable_line(error.seen)}" if isinstance(error, InterruptedRunError) else format_error(error)
    try:
        print(text, file=to, flush=True)
    except OSError:
        forget(to)


def full_output(error: OutputError, rows: int = 0) -> GpubenchError:
    """Return the error to raise if an output cannot be written, for example because the disk is full."""
    if error.filename == "stdout":
        forget(sys.stdout)
    return output_failed(str(error.filename), os.strerror(error.errno or 0), rows or error.rows)


_SIZES = ("--sizes", "-b", "-e", "-f", "-i")  # Options that choose the measured sizes


def interruption(rows: int = 0, stored_result: str = "") -> str:
    """Return the last line after Ctrl-C or SIGTERM, with the file that keeps the results and the command to try
    next.
    """
    words = ["gpubench", *sys.argv[1:]]
    if not rows or words[1:2] == ["report"]:
        return f"interrupted before the first result. Try: {shlex.join(words)}"
    seen = f"interrupted after {plural(rows, 'row')}"
    if stored_result:
        return f"{seen}, kept in {stored_result}. Try: gpubench report {shlex.quote(stored_result)}"
    sized = [word.partition("=")[0] in _SIZES for word in words]
    others = [word for word, *is_size in zip(words, sized, [False, *sized], strict=False) if not any(is_size)]
    return f"{seen}. Try: {shlex.join([*others, '--sizes', '1M'])}"


def is_reader_gone(stream: TextIO) -> bool:
    """True if a stream is a pipe whose reading end is closed. This check writes nothing to the stream."""
    import select

    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def forget(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that Python does not flush into the closed pipe at exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
