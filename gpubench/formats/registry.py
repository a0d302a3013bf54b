"""The output formats and the parts of each: a new format is one file and one line here."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from msgspec import Struct

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report, Row


class Writer(Protocol):
    """An output: `begin`, then rows, then `end`, also if the run was cut short. A row is on disk when `row` returns.

    `columns` are those of the rows that follow, empty if everything comes with the report.
    """

    def begin(self, metadata: "Metadata", columns: Sequence[str]) -> None: ...

    def row(self, row: "Row") -> None: ...

    def end(self, report: "Report") -> None: ...


class Style(Struct, frozen=True):
    """The look of an output: columns of the terminal or page, and whether colours may be used.

    `section` is for formats that show a single one. None is the report's main section. `plot` adds curves to a table.
    `history` is a folder of dated results whose trend a page shows. `verbose` has headers in full. `wide` repeats the
    run in every line of CSV. `terminal` breaks the last line at the width with its command on a line of its own.
    Elsewhere it is one line, for `tail -1`.
    """

    width: int = 100
    color: bool = False
    section: str | None = None
    plot: bool = False
    history: Path | None = None
    verbose: bool = False
    wide: bool = False
    terminal: bool = False


class Target(Struct, frozen=True):
    """The place of an output: an open stream, or a file that is opened when the run begins."""

    stream: TextIO | None = None
    path: Path | None = None

    def open(self) -> TextIO:
        if self.stream is not None:
            return self.stream
        if self.path is None:
            raise ValueError("a target has a stream or a path")
        return self.path.open("w", encoding="utf-8", newline="")


_SECONDS_FOR_A_READER = 10.0
_SECONDS_BETWEEN_TRIES = 0.05


def target_of(path: Path) -> Target:
    """Return the target of an output file. A named pipe is opened once: closing it tells its reader that it ends.

    Raises: UsageError if nobody reads the pipe.
    """
    if not path.is_fifo():
        return Target(path=path)
    until = time.monotonic() + _SECONDS_FOR_A_READER
    while True:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > until:
                from gpubench.errors import unwritable_output  # --help reads this list of formats

                raise unwritable_output(path, error) from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
            continue
        os.set_blocking(opened, True)
        return Target(stream=open(opened, "w", encoding="utf-8", newline=""))  # noqa: PTH123


class Format(Struct, frozen=True):
    """An output format: its name, the file suffix that picks it, and what makes its writers.

    A format without a suffix is for stdout only. `maker` is 'module:name', imported for the first writer.
    """

    name: str
    suffix: str | None
    summary: str
    maker: str

    @property
    def writer(self) -> Callable[[Target, Style], Writer]:
        module, _, name = self.maker.partition(":")
        make: Callable[[Target, Style], Writer] = getattr(import_module(f"gpubench.formats.{module}"), name)
        return make


TABLE = Format("table", ".txt", "for people", "table:TableWriter")
CSV = Format("csv", ".csv", "one line a row, unknown values empty", "csv:CsvWriter")
JSON = Format("json", ".json", "one document: metadata, sections, findings, verdict", "json:JsonWriter")

FORMATS = (
    TABLE,
    CSV,
    JSON,
    Format("jsonl", ".jsonl", "one JSON object a line: metadata, rows, report", "jsonl:JsonLinesWriter"),
    Format("junit", ".xml", "a test case for everything that was judged, for CI", "junit:writer"),
    Format("prometheus", ".prom", "gauges for node_exporter's textfile collector", "prometheus:writer"),
    Format("markdown", ".md", "verdict, findings and figures for $GITHUB_STEP_SUMMARY", "markdown:writer"),
    Format("github", None, "annotations of GitHub Actions", "github:writer"),
    Format("html", ".html", "one page with curves and heat maps, light and dark, no network", "html:writer"),
)

DATED = Format("dated json", None, "a json of every run, in a folder", "json:DatedWriter")
"""The format of an output that is a folder; it is none of FORMATS, since nobody asks for it by name."""

BASELINE = Format("baseline", None, "a json of this run under a name, once it is whole", "json:BaselineWriter")
"""The format of `--save-baseline`."""

TUNER = Format("tuner", ".conf", "the winners of a sweep, for NCCL's example tuner plugin", "tuner:writer")
"""The format of `--output nccl_tuner.conf`, of collectives that are swept over settings."""

NAGIOS = Format("nagios", None, "a Nagios plugin's line", "status_line:nagios_writer")
NPD = Format("npd", None, "a node-problem-detector plugin's message", "status_line:npd_writer")
SLURM = Format("slurm", None, "a line for scripts that drain nodes", "status_line:slurm_writer")
"""The formats of `--exit-style`, for stdout."""

QUIET = Format("quiet", None, "findings and the last sentence", "table:QuietWriter")
"""The format of `--quiet` in the place of the table, for stdout."""

VETO = Format(
    "veto", None, "one line of shell that keeps programs off peer access that does not work", "status_line:VetoWriter"
)
"""The format of `p2p --veto`, for stdout."""

SUMMARY = Format("summary", None, "the last sentence alone", "status_line:summary_writer")
"""The format of `--summary`, for stdout."""
