"""Where intervals of a watch are shown as they come: a terminal that is drawn anew, plain lines, or nothing."""

import errno
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import TextIO

from gpubench.formats.delivery import say
from gpubench.formats.text.watch import broken, frame_lines, plain_lines
from gpubench.model.results.watch.frame import WatchFrame
from gpubench.model.terms.foreign_text import printable_line

_QUIT = ("q", "Q", "\x03", "\x04")
_KEYS = "q or Ctrl-C ends it"
_MOST_TYPED = 64

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_THE_END, _BELOW = "\x1b[H", "\x1b[K", "\x1b[K\x1b[J"
"""The alternate screen without a cursor, and back; its first cell; erase what is left of a line, and all below it."""

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "magenta": "35"}
_WITHOUT_COLOR = ("bold", "dim")


class NoScreen:
    """Shows nothing: stdout is for programs, or the watch is quiet."""

    def show(self, frame: WatchFrame) -> None:
        """Nothing."""


class PlainScreen:
    """Prints a line a job at every interval, broken where somebody chose a `width`: else it stays one, for grep."""

    def __init__(self, width: int | None) -> None:
        self._width = width

    def show(self, frame: WatchFrame) -> None:
        """The lines; InterruptedRunError where nobody reads them any more."""
        lines = plain_lines(frame)
        say(*(lines if self._width is None else chain.from_iterable(broken(each, self._width) for each in lines)))


class LiveScreen:
    """Draws every interval over the one before, on the alternate screen of a terminal, whatever size it has now.

    It writes the codes itself: rich takes five times as long, at every interval, and breaks lines where it believes
    that the terminal ends.
    """

    def __init__(self, stream: TextIO, header: Callable[[float], str], *, color: bool) -> None:
        self._stream, self._header = stream, header
        self._codes = _CODES if color else {word: _CODES[word] for word in _WITHOUT_COLOR}
        self._shown: WatchFrame | None = None

    def show(self, frame: WatchFrame) -> None:
        """The interval."""
        self._shown = frame
        self.draw()

    def draw(self) -> None:
        """The last interval once more, as where the terminal has another size now."""
        if self._shown is None:
            return
        width, height = self._size()
        lines = frame_lines(self._shown, width - 1, height - 1, self._header(self._shown.seconds))
        drawn = f"{_TO_THE_END}\n".join(self._styled(*line) for line in lines)
        self._stream.write(f"{_HOME}{drawn}{_BELOW}")
        self._stream.flush()

    def _size(self) -> tuple[int, int]:
        """Columns and lines of the terminal as it is now: COLUMNS and LINES are of when the watch began."""
        with suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(self._stream.fileno())
            if columns and lines:
                return columns, lines
        return shutil.get_terminal_size()

    def _styled(self, line: str, style: str) -> str:
        codes = ";".join(self._codes[word] for word in style.split() if word in self._codes)
        return f"\x1b[{codes}m{printable_line(line)}\x1b[0m" if codes else printable_line(line)


@contextmanager
def live_screen(
    stream: TextIO, header: Callable[[float], str], *, color: bool
) -> Iterator[tuple[LiveScreen, Callable[[float], bool]]]:
    """A screen on a terminal, and a wait that ends with true where somebody types q; both are given back at the end."""
    screen = LiveScreen(stream, lambda seconds: f"{header(seconds)}   {_KEYS}", color=color)
    with ExitStack() as stack:
        stack.callback(_write, stream, _LEAVE)
        _write(stream, _ENTER)
        keys = stack.enter_context(keyboard())
        resized = stack.enter_context(resizes())
        yield screen, lambda seconds: _wait(seconds, keys, resized, screen.draw)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


@contextmanager
def keyboard() -> Iterator[int | None]:
    """The descriptor at which single keys are to be read; None without a keyboard."""
    import termios
    import tty

    try:
        descriptor = sys.stdin.fileno()
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            raise OSError(errno.ENOTTY, "it runs in the background, where a terminal stops who sets it")
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):  # stdin is a file, closed, or none at all
        yield None
        return
    try:
        yield descriptor
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def resizes() -> Iterator[int]:
    """A descriptor at which there is something to read once the terminal has another size."""
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGWINCH, handler)
        os.close(read)
        os.close(write)


def _wait(seconds: float, keys: int | None, resized: int, draw: Callable[[], None]) -> bool:
    """True where the watch is to end; what else is typed is passed over."""
    deadline = time.monotonic() + seconds
    listened = [resized] if keys is None else [resized, keys]
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(listened, [], [], left)
        if resized in ready:
            os.read(resized, _MOST_TYPED)
            draw()
        if keys is not None and keys in ready:
            typed = os.read(keys, _MOST_TYPED).decode(errors="replace")
            if any(key in typed for key in _QUIT):
                return True
            if not typed:
                listened.remove(keys)  # the end of a file
    return False
