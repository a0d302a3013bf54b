"""Feed the outputs and the progress display during a run."""

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from msgspec.structs import replace

from gpubench.errors import COULD_NOT_MEASURE, DONE, JUDGED_AND_FAILED, OutputError, name_output
from gpubench.formats.delivery import is_reader_gone, say
from gpubench.formats.registry import BASELINE, Color, Presentation, Target, Writer, make_target
from gpubench.formats.table import line_text
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import (
    COLLECTIVE_COLUMNS,
    OVERLAP_SECTION,
    CollectiveRow,
    Metadata,
    PairRow,
    Report,
    Row,
)
from gpubench.model.terms.units import printable_line
from gpubench.model.terms.verdict import Verdict

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.text import Text

SECONDS_TO_FIRST_LINE = 10.0
SECONDS_BETWEEN_LINES = 30.0
_SECONDS_TO_ESTIMATE = 1.0
_BAR_COLUMNS = 16


class ProgressDisplay:
    """Shows the progress of a run. This base class shows nothing."""

    def update(self, done: int, total: int, label: str) -> None:
        """Show that `done` of `total` steps are complete and that the step `label` is next."""

    def waiting(self, label: str, seconds: float) -> None:
        """Show that work without countable steps has begun and takes about `seconds`."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the display while other output goes to the terminal."""
        yield

    def stop(self) -> None: ...


class ProgressLines(ProgressDisplay):
    """Prints progress, elapsed time and remaining time: after 10 s, then every 30 s."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._began = clock()
        self._next = self._began + SECONDS_TO_FIRST_LINE

    def update(self, done: int, total: int, label: str) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + SECONDS_BETWEEN_LINES
        elapsed = now - self._began
        progress = f"{done} of {total}, {duration(elapsed)}{time_left(done, total, elapsed)}"
        self._say(f"gpubench: {progress}: {printable_line(label)}")

    def waiting(self, label: str, seconds: float) -> None:
        if seconds >= SECONDS_TO_FIRST_LINE:
            self._say(f"gpubench: {printable_line(label)}: about {duration(seconds)}")


class ProgressBar(ProgressDisplay):
    """A progress bar that disappears when the run ends."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = _bar(stream)
        self._is_waiting = False

    def update(self, done: int, total: int, label: str) -> None:
        self._begin(waiting=False, total=total)
        shown = printable_line(label)
        self._progress.update(self._progress.tasks[0].id, completed=done, total=total, description=shown)
        self._progress.start()

    def waiting(self, label: str, seconds: float) -> None:
        """Show a bar that fills with elapsed time instead of steps."""
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
        if not self._progress.live.is_started:
            yield
            return
        self._progress.stop()
        yield
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()


def make_progress_display(stream: TextIO, *, is_rank: bool, say: Callable[[str], None]) -> ProgressDisplay:
    """Return a progress bar if `stream` is a terminal, otherwise a display that prints lines.

    Ranks always print lines, because mpirun may connect them to a pseudo-terminal.
    """
    if not is_rank and stream.isatty() and os.environ.get("TERM") != "dumb":
        return ProgressBar(stream)
    return ProgressLines(say)


def duration(seconds: float) -> str:
    """Format a duration, for example as '8 s', '2 min' or '3 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"


def time_left(done: float, total: float, elapsed: float) -> str:
    """Return the remaining time, for example ', about 12 s left', or '' if it is too early to estimate."""
    if done <= 0 or done >= total or elapsed < _SECONDS_TO_ESTIMATE:
        return ""
    return f", about {duration(elapsed * (total - done) / done)} left"


def _bar(stream: TextIO) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.table import Column

    class ShareColumn(BarColumn):
        """A bar that fills with elapsed time if the work has no countable steps."""

        def render(self, task: "Task"):  # type: ignore[no-untyped-def]
            if task.fields["by_the_clock"]:
                task.completed = min(task.elapsed or 0.0, 0.99 * (task.total or 0.0))
            return super().render(task)

    class TimeColumn(ProgressColumn):
        """Shows the steps or seconds so far, and the remaining time."""

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


_LEAST_WIDTH = 40


class Presenter:
    """Listens to a run, and feeds stdout, the output files and the progress display on stderr."""

    def __init__(self, options: Presentation, *, progress: bool, is_rank: bool = False) -> None:
        """Open the outputs. A rank's stdout is never a terminal, even if mpirun connects it to a pseudo-terminal."""
        self.rows = 0
        self._began = time.monotonic()
        self.report: Report | None = None
        self._wrong, self._failed = False, False
        self._metadata: Metadata | None = None
        self._figures = SpeedFigures()
        self._options = options
        self._is_table = options.format.name in ("table", "quiet", "veto")
        shown = adapt_to_plain_stream(options) if is_rank else adapt_to_stream(options, sys.stdout)
        self._writers: dict[str, Writer] = {"stdout": options.format.writer(Target(stream=sys.stdout), shown)}
        plain = dataclasses.replace(options, color=Color.NEVER)
        for output in options.outputs:
            self._writers[str(output.path)] = output.format.writer(make_target(output.path), plain)
        self._progress = (
            make_progress_display(sys.stderr, is_rank=is_rank, say=self._say) if progress else ProgressDisplay()
        )
        self._begun = False

    def begin(self, metadata: Metadata, columns: Sequence[str] | None = None) -> None:
        """Write the headers. Unless stdout shows a table, also print on stderr which sizes will not be measured.

        `columns` are the columns of the rows that will follow, or empty if no rows will follow. None means the default
        columns for the subject of the run.
        """
        if columns is None:
            columns = COLLECTIVE_COLUMNS
            if metadata.subject == OVERLAP_SECTION:
                from gpubench.model.results.overlap import OverlapRow

                columns = OverlapRow.columns()
        options = self._options
        if options.defaults or options.defaults_file is not None:
            metadata = replace(metadata, defaults=options.defaults, defaults_file=options.defaults_file)
        self._begun, self._metadata = True, metadata
        self._figures.least_ranks = len(metadata.ranks) if "np" in metadata.options else 0
        with self._progress.hidden():
            self._write(lambda writer: writer.begin(metadata, columns))
            if not self._is_table:
                from gpubench.model.terms.units import describe_dropped

                for line in describe_dropped(metadata.dropped_sizes):
                    self.note(f"not measured: {line}")

    def progress(self, done: int, total: int, label: str) -> None:
        """Show the progress of the run.

        Raise BrokenPipeError if the reader of stdout exited, because the next row may be minutes away.
        """
        if is_reader_gone(sys.stdout):
            raise BrokenPipeError
        self._progress.update(done, total, label)

    def waiting(self, label: str, seconds: float) -> None:
        """Show that work has begun that takes about `seconds`."""
        self._progress.waiting(label, seconds)

    def row(self, row: Row) -> None:
        self.rows += 1
        self._wrong = self._wrong or (isinstance(row, CollectiveRow) and bool(row.wrong))
        self._failed = self._failed or getattr(row, "verdict", None) == Verdict.FAIL
        self._figures.add(row)
        with self._progress.hidden():
            self._write(lambda writer: writer.row(row))

    def end(self, report: Report) -> None:
        """Write the footers and the verdict. If stdout is machine-readable, also print the fallback lines on stderr."""
        report = self.report = self._add_sentence(report)
        self._progress.stop()
        self._write(lambda writer: writer.end(report))
        for output in self._options.outputs:
            if output.format is BASELINE:
                from gpubench.formats.json import fate

                self.note(f"baseline {output.path.stem} {fate(report)}")
        if not self._is_table:
            from gpubench.formats.table import fallback_notes

            for line in fallback_notes(report):
                self.note(line)

    def cut_short(self) -> None:
        """End the run early. Every output that still works keeps the rows so far, and is marked incomplete."""
        self._progress.stop()
        if not self._begun or self.report is not None:
            return
        report = Report(verdict=Verdict.FAIL if self._wrong else Verdict.ERROR, complete=False)
        self.report = self._add_sentence(report)
        for name, writer in self._writers.items():
            if name == "stdout" and self._is_table and os.path.sameopenfile(1, 2):
                continue  # The error on stderr is the last line of the terminal or file that has both
            with suppress(OSError):
                writer.end(self.report)

    @property
    def stored_result(self) -> str:
        """Return the output file of this run that `gpubench report` can read, or ''."""
        return next(
            (str(output.path) for output in self._options.outputs if output.format.suffix in (".json", ".jsonl")), ""
        )

    @property
    def code_so_far(self) -> int:
        """Return exit code 1 if a row or the report failed, otherwise 0. With --exit-zero, always return 0."""
        failed = self._failed or self._wrong or (self.report is not None and self.report.verdict is Verdict.FAIL)
        return JUDGED_AND_FAILED if failed and not self._options.exit_zero else DONE

    @property
    def exit_code(self) -> int:
        if self._metadata is None or self.report is None:
            return COULD_NOT_MEASURE
        return self._options.exit_code(self._metadata, self.report)

    def _add_sentence(self, report: Report) -> Report:
        """Add the last line of the report and the duration of the run, unless the report already has a last line."""
        has_style = self._options.exit_style is not None
        if self._metadata is None or (report.sentence and not has_style):
            return report
        from gpubench.model.results.ending import apply_gate
        from gpubench.model.results.sentence import sentence

        if self._metadata.subject != "topo":
            for row in (*report.rows(PairRow), *report.rows(CollectiveRow)):
                self._figures.add(row)
        report = apply_gate(self._metadata, report, self._figures, exit_style=has_style)
        said = sentence(self._metadata, report, self._figures)
        took = round(time.monotonic() - self._began, 3) if report.duration_s is None else report.duration_s
        return replace(report, sentence=said, duration_s=took)

    def note(self, text: str) -> None:
        with self._progress.hidden():
            self._say(f"gpubench: {text}")

    @staticmethod
    def _say(text: str) -> None:
        say(text, to=sys.stderr)

    def _write(self, write: Callable[[Writer], None]) -> None:
        """Call `write` for every output.

        Raises: OutputError, for example if the disk is full. BrokenPipeError if the reader of stdout exited.
        """
        for name, writer in self._writers.items():
            try:
                with name_output(name):
                    write(writer)
            except OutputError as failed:
                failed.rows = self.rows
                raise


def adapt_to_stream(
    presentation: Presentation, stream: TextIO, environment: Mapping[str, str] = os.environ
) -> Presentation:
    """Choose the width and colours for `stream`. Options come first, then `environment`, then the terminal.

    COLUMNS sets the width. NO_COLOR overrides FORCE_COLOR. Both also apply if the stream is not a terminal.
    """
    if not stream.isatty():
        return adapt_to_plain_stream(presentation, environment)
    has_colors = _is_forced(environment) or environment.get("TERM") != "dumb"
    return dataclasses.replace(
        presentation,
        width=presentation.width or shutil.get_terminal_size().columns,
        color=_chosen_color(presentation.color, environment, has_colors=has_colors),
        terminal=True,
    )


def adapt_to_plain_stream(presentation: Presentation, environment: Mapping[str, str] = os.environ) -> Presentation:
    """Choose the width and colours for a stream that is not a terminal."""
    return dataclasses.replace(
        presentation,
        width=chosen_width(presentation, environment),
        color=_chosen_color(presentation.color, environment, has_colors=_is_forced(environment)),
    )


def _chosen_color(color: Color, environment: Mapping[str, str], *, has_colors: bool) -> Color:
    if color is not Color.AUTO:
        return color
    return Color.ALWAYS if has_colors and not environment.get("NO_COLOR") else Color.NEVER


def _is_forced(environment: Mapping[str, str]) -> bool:
    return environment.get("FORCE_COLOR", "").lower() not in ("", "0", "false")


def chosen_width(presentation: Presentation, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the width in columns from the option or COLUMNS, or None if neither is set."""
    columns = environment.get("COLUMNS", "")
    asked = max(_LEAST_WIDTH, int(columns)) if columns.isdecimal() and int(columns) else None
    return presentation.width or asked
