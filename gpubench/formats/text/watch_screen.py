"""Where intervals of a watch are shown as they come: a terminal that is drawn anew, plain lines, or nothing."""

import errno
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from gpubench.formats.delivery import say
from gpubench.formats.text.page import pipe_console
from gpubench.formats.text.watch import frame_lines, plain_lines
from gpubench.model.results.watch.frame import WatchFrame

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_QUIT = ("q", "Q", "\x03", "\x04")
_KEYS = "q or Ctrl-C ends it"


class NoScreen:
    """Shows nothing: stdout is for programs, or the watch is quiet."""

    def show(self, frame: WatchFrame) -> None:
        """Nothing."""


class PlainScreen:
    """Prints a line a job at every interval."""

    def show(self, frame: WatchFrame) -> None:
        """The lines; InterruptedRunError where nobody reads them any more."""
        say(*plain_lines(frame))


class LiveScreen:
    """Draws every interval over the one before, on the alternate screen of a terminal, whatever size it has now."""

    def __init__(self, console: "Console", header: Callable[[float], str]) -> None:
        self._console, self._header = console, header

    def show(self, frame: WatchFrame) -> None:
        """The interval."""
        width, height = self._size()
        lines = frame_lines(frame, width - 1, height - 1, self._header(frame.seconds))
        self._console.print(self._drawn(lines), end="")
        self._console.file.flush()

    def _size(self) -> tuple[int, int]:
        """Columns and lines of the terminal as it is now: COLUMNS and LINES are of when the watch began."""
        with suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(self._console.file.fileno())
            if columns and lines:
                return columns, lines
        return self._console.size

    def _drawn(self, lines: list[tuple[str, str]]) -> "RenderableType":
        from rich.console import Group
        from rich.control import Control

        from gpubench.formats.text.line import line_text

        return Group(Control.home(), Control.clear(), *(line_text(line, style) for line, style in lines))


@contextmanager
def live_screen(
    stream: TextIO, header: Callable[[float], str], *, color: bool
) -> Iterator[tuple[LiveScreen, Callable[[float], bool]]]:
    """A screen on a terminal, and a wait that ends with true where somebody types q; both are given back at the end."""
    console = pipe_console(stream, force_terminal=True, no_color=not color)
    with ExitStack() as stack:
        stack.enter_context(console.screen(hide_cursor=True))
        wait = stack.enter_context(keyboard())
        yield LiveScreen(console, lambda seconds: f"{header(seconds)}   {_KEYS}"), wait


@contextmanager
def keyboard() -> Iterator[Callable[[float], bool]]:
    """A wait that ends early, with true, where q is typed; without a keyboard it only waits."""
    import termios
    import tty

    try:
        descriptor = sys.stdin.fileno()
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            raise OSError(errno.ENOTTY, "it runs in the background, where a terminal stops who sets it")
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):  # stdin is a file, closed, or none at all
        yield _only_wait
        return
    try:
        yield lambda seconds: _typed(descriptor, seconds)
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _typed(descriptor: int, seconds: float) -> bool:
    """True where the watch is to end; what else is typed is passed over."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor], [], [], left)
        if ready:
            typed = os.read(descriptor, 64).decode(errors="replace")
            if not typed:
                time.sleep(left)
                return False
            if any(key in typed for key in _QUIT):
                return True
    return False
