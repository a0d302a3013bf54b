"""How far a run is, on stderr: a bar on a terminal, plain lines now and then in the log of a batch job."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from gpubench.formats.text.line import line_text
from gpubench.model.terms.foreign_text import printable_line

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.text import Text

SECONDS_TO_FIRST_LINE = 10.0
SECONDS_BETWEEN_LINES = 30.0
_SECONDS_TO_ESTIMATE = 1.0
_BAR_COLUMNS = 16


class ProgressDisplay(Protocol):
    """What shows how far a run is."""

    def update(self, done: int, total: int, label: str) -> None:
        """`done` of `total` steps are over, and `label` is next."""

    def waiting(self, label: str, seconds: float) -> None:
        """Something has begun that has no steps, and takes about so long."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Out of the way, for something else is written to the same terminal."""
        yield

    def stop(self) -> None:
        """The run is over."""


class NoProgress:
    """Shows nothing."""

    def update(self, done: int, total: int, label: str) -> None:
        """Nothing."""

    def waiting(self, label: str, seconds: float) -> None:
        """Nothing."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Nothing to hide."""
        yield

    def stop(self) -> None:
        """Nothing."""


class ProgressLines:
    """A line after ten seconds, and then every half minute: how far it is, for how long, what is left."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._began = clock()
        self._next = self._began + SECONDS_TO_FIRST_LINE

    def update(self, done: int, total: int, label: str) -> None:
        """Say it where the last line is old enough."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + SECONDS_BETWEEN_LINES
        elapsed = now - self._began
        told = f"{done} of {total}, {duration(elapsed)}{time_left(done, total, elapsed)}"
        self._say(f"gpubench: {told}: {printable_line(label)}")

    def waiting(self, label: str, seconds: float) -> None:
        """Say it where it takes long enough for somebody to wonder."""
        if seconds >= SECONDS_TO_FIRST_LINE:
            self._say(f"gpubench: {printable_line(label)}: about {duration(seconds)}")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Lines are in nobody's way."""
        yield

    def stop(self) -> None:
        """Nothing is left on the screen."""


class ProgressBar:
    """A bar of rich's, which is gone when the run is over."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = _bar(stream)
        self._is_waiting = False

    def update(self, done: int, total: int, label: str) -> None:
        """Move the bar."""
        self._begin(waiting=False, total=total)
        shown = printable_line(label)
        self._progress.update(self._progress.tasks[0].id, completed=done, total=total, description=shown)
        self._progress.start()

    def waiting(self, label: str, seconds: float) -> None:
        """Another bar, which fills by the clock."""
        self.stop()
        self._begin(waiting=True, total=seconds)
        self._progress.update(self._progress.tasks[0].id, description=printable_line(label))
        self._progress.start()

    def _begin(self, *, waiting: bool, total: float) -> None:
        if self._progress.tasks and self._is_waiting is waiting and not waiting:
            return
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._is_waiting = waiting
        self._progress.add_task("", total=total, by_the_clock=waiting)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """The bar and the rows share a terminal: take the bar away while something else is written."""
        if not self._progress.live.is_started:
            yield
            return
        self._progress.stop()
        yield
        self._progress.start()

    def stop(self) -> None:
        """Take it away."""
        self._progress.stop()


def progress_on(stream: TextIO, *, is_rank: bool, say: Callable[[str], None]) -> ProgressDisplay:
    """A bar where `stream` is a terminal; a rank's may be a pty of mpirun's, and is taken for none."""
    if not is_rank and stream.isatty() and os.environ.get("TERM") != "dumb":
        return ProgressBar(stream)
    return ProgressLines(say)


def duration(seconds: float) -> str:
    """'8 s', '2 min', '3 h': as exact as an estimate is."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"


def time_left(done: float, total: float, elapsed: float) -> str:
    """', about 12 s left', once there is something to tell it by."""
    if done <= 0 or done >= total or elapsed < _SECONDS_TO_ESTIMATE:
        return ""
    return f", about {duration(elapsed * (total - done) / done)} left"


def _bar(stream: TextIO) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.table import Column

    class ShareColumn(BarColumn):
        """The bar; of what has no steps, the share of the time that it takes."""

        def render(self, task: "Task"):  # type: ignore[no-untyped-def]
            if task.fields["by_the_clock"]:
                task.completed = min(task.elapsed or 0.0, 0.99 * (task.total or 0.0))
            return super().render(task)

    class TimeColumn(ProgressColumn):
        """Steps, seconds, and what is left."""

        def render(self, task: "Task") -> "Text":
            elapsed, total = task.elapsed or 0.0, task.total or 0.0
            if task.fields["by_the_clock"]:
                return line_text(f"{elapsed:.0f} of about {duration(total)}")
            steps = f"{task.completed:.0f}/{total:.0f}, {duration(elapsed)}"
            return line_text(steps + time_left(task.completed, total, elapsed))

    label = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (ShareColumn(bar_width=_BAR_COLUMNS), TimeColumn(), label)
    return Progress(
        *columns, console=Console(file=stream), transient=True, redirect_stdout=False, redirect_stderr=False
    )
