"""Everything a person or a file gets to see of a run, as it happens."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TextIO

from gpubench.errors import COULD_NOT_MEASURE, OutputError, naming_output
from gpubench.formats.delivery import say
from gpubench.formats.presentation import Color, Presentation
from gpubench.formats.progress import NoProgress, ProgressDisplay, progress_on
from gpubench.formats.registry import BASELINE
from gpubench.formats.writer import Style, Target, Writer
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import (
    COLLECTIVE_COLUMNS,
    OVERLAP_SECTION,
    PAIRS_SECTION,
    ROWS_SECTION,
    CollectiveRow,
    Metadata,
    PairRow,
    Report,
    Row,
)
from gpubench.model.terms.verdict import Verdict

PLAIN_WIDTH = 100
"""Columns of a table that goes to no terminal."""

_LEAST_WIDTH = 40
_NOT_FORCED = ("", "0", "false")


class Presenter:
    """A listener that feeds stdout, the output files and, on stderr, progress: a bar, or lines where no terminal is."""

    def __init__(self, options: Presentation, style: Style, *, progress: bool, is_rank: bool = False) -> None:
        self.rows = 0
        self._began = time.monotonic()
        self.report: Report | None = None
        self._wrong = False
        self._metadata: Metadata | None = None
        self._figures = SpeedFigures()
        self._options = options
        self._is_table = options.format.name in ("table", "quiet", "veto")
        style = replace(style, history=options.history)
        plain = replace(style, width=style.width if options.width else PLAIN_WIDTH, color=False)
        self._writers: dict[str, Writer] = {"stdout": options.format.writer(Target(stream=sys.stdout), style)}
        for output in options.outputs:
            self._writers[str(output.path)] = output.format.writer(Target(path=output.path), plain)
        shown = progress_on(sys.stderr, is_rank=is_rank, say=self._say) if progress else NoProgress()
        self._progress: ProgressDisplay = shown
        self._begun = False

    def begin(self, metadata: Metadata, columns: Sequence[str] | None = None) -> None:
        """The run is set up: headers, and on stderr what stdout has no room for.

        `columns` are those of rows that come one by one, empty for none; left out, those of the subject.
        """
        columns = columns_of(metadata) if columns is None else columns
        options = self._options
        if options.defaults or options.defaults_file is not None:
            metadata = replace(metadata, defaults=options.defaults, defaults_file=options.defaults_file)
        self._begun, self._metadata = True, metadata
        with self._progress.hidden():
            self._write(lambda writer: writer.begin(metadata, columns))
            if not self._is_table:
                from gpubench.model.terms.sweep import describe_dropped

                for line in describe_dropped(metadata.dropped_sizes):
                    self.note(f"not measured: {line}")

    def progress(self, done: int, total: int, label: str) -> None:
        """Show how far it is."""
        self._progress.update(done, total, label)

    def waiting(self, label: str, seconds: float) -> None:
        """Show that something has begun that takes about so long, and tells nothing until it ends."""
        self._progress.waiting(label, seconds)

    def row(self, row: Row) -> None:
        """Hand a row to every output."""
        self.rows += 1
        self._wrong = self._wrong or (isinstance(row, CollectiveRow) and bool(row.wrong))
        self._figures.add(row)
        with self._progress.hidden():
            self._write(lambda writer: writer.row(row))

    def end(self, report: Report) -> None:
        """Footers and verdict; what must be seen of fallback also where stdout is for programs."""
        report = self.report = self._with_sentence(report)
        self._progress.stop()
        self._write(lambda writer: writer.end(report))
        for output in self._options.outputs:
            if output.format is BASELINE:
                from gpubench.formats.baseline import fate

                self.note(f"baseline {output.path.stem} {fate(report)}")
        if not self._is_table:
            from gpubench.formats.text.machine.fallback import fallback_lines

            for line in fallback_lines(report):
                self.note(line)

    def cut_short(self, *, failed: bool = False) -> None:
        """The run ended early: what was measured stays, marked incomplete, in every output that still works.

        `failed` is whether it ended because it was judged, as wrong data are.
        """
        self._progress.stop()
        if not self._begun or self.report is not None:
            return
        report = Report(verdict=Verdict.FAIL if failed or self._wrong else Verdict.ERROR, complete=False)
        self.report = self._with_sentence(report)
        for writer in self._writers.values():
            with suppress(OSError):
                writer.end(self.report)

    @property
    def exit_code(self) -> int:
        """The exit code of the process once the run has ended."""
        if self._metadata is None or self.report is None:
            return COULD_NOT_MEASURE
        return self._options.exit_code(self._metadata, self.report)

    def _with_sentence(self, report: Report) -> Report:
        """The report with its last line, told from the rows that were presented and those in its sections.

        A stored report has it, and was judged.
        """
        has_style = self._options.exit_style is not None
        if self._metadata is None or (report.sentence and not has_style):
            return report
        from gpubench.model.results.ending import gated
        from gpubench.model.results.sentence import sentence

        if self._metadata.subject != "topo":
            for name in (PAIRS_SECTION, ROWS_SECTION):
                for row in (*report.rows(name, PairRow), *report.rows(name, CollectiveRow)):
                    self._figures.add(row)
        report = gated(self._metadata, report, self._figures, exit_style=has_style)
        said = sentence(self._metadata, report, self._figures, remark=not has_style)
        took = round(time.monotonic() - self._began, 3) if report.duration_s is None else report.duration_s
        return replace(report, sentence=said, duration_s=took)

    def note(self, text: str) -> None:
        """Narration on stderr."""
        with self._progress.hidden():
            self._say(f"gpubench: {text}")

    def _say(self, text: str) -> None:
        say(text, to=sys.stderr)

    def _write(self, write: Callable[[Writer], None]) -> None:
        """Have every output write.

        Raises:
            OutputError: one cannot any more, a full disk.
            BrokenPipeError: nobody reads stdout any more.
        """
        for name, writer in self._writers.items():
            try:
                with naming_output(name):
                    write(writer)
            except OutputError as failed:
                failed.rows = self.rows
                raise


def columns_of(metadata: Metadata) -> Sequence[str]:
    """The columns of the rows that a job of ranks hands over as they are measured."""
    if metadata.subject != OVERLAP_SECTION:
        return COLLECTIVE_COLUMNS
    from gpubench.model.results.rows.overlap import OverlapRow

    return OverlapRow.columns()


def terminal_style(options: Presentation, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Style:
    """The look of a table on `stream`: the terminal's width and colours, unless options or `environment` say otherwise.

    COLUMNS is a width, NO_COLOR comes before FORCE_COLOR, and these also hold of what is no terminal.
    """
    terminal = stream.isatty()
    width = shutil.get_terminal_size().columns if terminal else _plain_width(environment)
    colors = _is_forced(environment) or (terminal and environment.get("TERM") != "dumb")
    return _style(options, width, environment, colors=colors)


def rank_style(options: Presentation) -> Style:
    """The look of a table of a rank, by options and environment: a rank's stdout may be a pty of mpirun's."""
    return _style(options, _plain_width(os.environ), os.environ, colors=_is_forced(os.environ))


def _style(options: Presentation, width: int, environment: Mapping[str, str], *, colors: bool) -> Style:
    wanted = options.color is Color.AUTO and colors and not environment.get("NO_COLOR")
    colored = options.color is Color.ALWAYS or wanted
    return Style(
        options.width or width, colored, options.section, options.plot, verbose=options.verbose, wide=options.wide
    )


def _is_forced(environment: Mapping[str, str]) -> bool:
    return environment.get("FORCE_COLOR", "").lower() not in _NOT_FORCED


def chosen_width(options: Presentation, environment: Mapping[str, str] = os.environ) -> int | None:
    """The columns that an option or COLUMNS asks for; None where nobody chose."""
    return options.width or _columns(environment)


def _plain_width(environment: Mapping[str, str]) -> int:
    """The columns that COLUMNS says, where it is a number of some; a page's where it is not."""
    return _columns(environment) or PLAIN_WIDTH


def _columns(environment: Mapping[str, str]) -> int | None:
    columns = environment.get("COLUMNS", "")
    return max(_LEAST_WIDTH, int(columns)) if columns.isdecimal() and int(columns) else None
