"""The ends of a command between its first and its last line: Ctrl-C, a closed pipe, a full disk."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from gpubench.errors import GpubenchError, InterruptedRunError, output_failed, rows_kept
from gpubench.model.terms.foreign_text import error_text, printable_line

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter


class OutputError(OSError):
    """An output cannot be written any more; `filename` is its name, also where the system did not say."""

    rows = 0


class ReaderGoneError(InterruptedRunError):
    """Nobody reads stdout any more, as behind `| head`: the run ends with exit code 3, and nothing is said of it."""


@contextmanager
def delivering(presenter: "Presenter") -> Iterator[None]:
    """Turn these ends into errors of one line; what was measured stays, marked incomplete.

    Raises:
        InterruptedRunError: Ctrl-C, SIGTERM, or nobody reads stdout any more.
        CouldNotMeasureError: an output cannot be written any more.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(_interrupted("interrupted", presenter)) from None
    except BrokenPipeError:
        _forget_stdout()
        raise ReaderGoneError(_interrupted("the reader of stdout went away", presenter)) from None
    except OSError as error:
        _forget_stdout()
        path = str(error.filename or "stdout")
        raise output_failed(path, os.strerror(error.errno or 0), presenter.rows) from error
    finally:
        presenter.cut_short()


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print some lines at once, on stdout or another stream; InterruptedRunError where nobody reads stdout any more.

    Each is one line that nothing obeys, whatever others wrote into it.
    """
    try:
        print(*map(printable_line, lines), sep="\n", file=to, flush=True)
    except BrokenPipeError:
        _forget_stdout()
        raise ReaderGoneError("the reader of stdout went away") from None


@contextmanager
def announced(text: str, to: TextIO | None) -> Iterator[Callable[[], None]]:
    """Show a line on a terminal until what is yielded is called, or the context ends; None shows nothing."""
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
    """Print an error on stderr; nothing of one that nobody is there to hear."""
    if isinstance(error, ReaderGoneError):
        return
    print(error_text(error), file=to, flush=True)


def _interrupted(what: str, presenter: "Presenter") -> str:
    return f"{what}; the run was ended{rows_kept(presenter.rows)}"


def _forget_stdout() -> None:
    """Point stdout elsewhere, so that neither a footer nor Python's exit writes into the closed pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
