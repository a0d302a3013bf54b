"""Define the output formats and the options that select them. A new format needs one module and one line here."""

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TextIO

from msgspec import Struct

from gpubench.errors import DONE, UsageError, exclusive, exit_style_under_launcher, unwritable_output
from gpubench.model.facts.environment import detect_launcher
from gpubench.model.terms.options import OUTPUT, flag, one_of, option, unknown_choice
from gpubench.model.terms.verdict import Verdict

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report, Row


class Writer(Protocol):
    """Writes one output. The run calls `begin`, then `row` for each row, then `end`, even if it is cut short.

    `columns` are the columns of the rows that will follow. They are empty if all rows are in the report.
    """

    def begin(self, metadata: "Metadata", columns: Sequence[str]) -> None: ...

    def row(self, row: "Row") -> None: ...

    def end(self, report: "Report") -> None: ...


class Target(Struct, frozen=True):
    """The destination of an output: an open stream, or a file that the writer opens when the run begins."""

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


def make_target(path: Path) -> Target:
    """Return the target for an output file. Open a named pipe only once, because closing it would end its reader.

    Raises: UsageError if no process opens the pipe for reading within 10 s.
    """
    if not path.is_fifo():
        return Target(path=path)
    until = time.monotonic() + _SECONDS_FOR_A_READER
    while True:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > until:
                raise unwritable_output(path, error) from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
            continue
        os.set_blocking(opened, True)
        return Target(stream=open(opened, "w", encoding="utf-8", newline=""))  # noqa: PTH123


class Format(Struct, frozen=True):
    """An output format: its name, its file suffix, a summary, and the function that creates its writer.

    A format without a suffix is not chosen by file name. `maker` is 'module:name', and is imported only when the format
    is used.
    """

    name: str
    suffix: str | None
    summary: str
    maker: str

    @property
    def writer(self) -> "Callable[[Target, Presentation], Writer]":
        module, _, name = self.maker.partition(":")
        make: Callable[[Target, Presentation], Writer] = getattr(import_module(f"gpubench.formats.{module}"), name)
        return make


TABLE = Format("table", ".txt", "for people", "table:TableWriter")
CSV = Format("csv", ".csv", "one line per row, unknown values empty", "csv:CsvWriter")
JSON = Format("json", ".json", "one document: metadata, sections, findings, verdict", "json:JsonWriter")

FORMATS = (
    TABLE,
    CSV,
    JSON,
    Format("jsonl", ".jsonl", "one JSON object per line: metadata, rows, report", "jsonl:JsonLinesWriter"),
    Format("junit", ".xml", "for CI, one test case per judged item", "junit:writer"),
    Format("prometheus", ".prom", "gauges for node_exporter's textfile collector", "prometheus:writer"),
    Format("markdown", ".md", "verdict, findings and values for $GITHUB_STEP_SUMMARY", "markdown:writer"),
    Format("github", None, "annotations for GitHub Actions", "github:writer"),
    Format("html", ".html", "one page with curves and heat maps, light and dark, no network", "html:writer"),
)

DATED = Format("dated json", None, "one JSON file per run, in a folder", "json:DatedWriter")
"""The format of `--output FOLDER/`. It is not in FORMATS, because `--format` cannot select it."""

BASELINE = Format(
    "baseline", None, "a JSON file of this run under a name, once the run is complete", "json:BaselineWriter"
)
"""The format of `--save-baseline`."""

NAGIOS = Format("nagios", None, "a Nagios plugin's line", "status_line:nagios_writer")
NPD = Format("npd", None, "a node-problem-detector plugin's message", "status_line:npd_writer")
SLURM = Format("slurm", None, "a line for scripts that drain nodes", "status_line:slurm_writer")
"""The formats that `--exit-style` selects for stdout."""

QUIET = Format("quiet", None, "findings and the last sentence", "table:QuietWriter")
"""The format that replaces the table on stdout with `--quiet`."""

VETO = Format("veto", None, "one shell line that avoids broken peer access", "status_line:VetoWriter")
"""The format that `p2p --veto` selects for stdout."""

SUMMARY = Format("summary", None, "only the last sentence", "status_line:summary_writer")
"""The format that `--summary` selects for stdout."""


class ExitStyle(StrEnum):
    """The monitoring system whose exit codes the run uses.

    Nagios plugins exit with 0 (OK), 1 (WARNING), 2 (CRITICAL) or 3 (UNKNOWN). Plugins for node-problem-detector exit
    with 0 (no problem), 1 (problem) or anything else (unknown). The `slurm` style uses the same codes as npd, for
    scripts that drain nodes.
    """

    NAGIOS = "nagios"
    NPD = "npd"
    SLURM = "slurm"

    def code(self, verdict: Verdict, *, strict: bool = False, drains: bool | None = None) -> int:
        """Return the exit code for a verdict. Except for Nagios, a warning is a node problem only if `strict` is
        set.

        `drains` is true if a finding blames the node itself. Without such a finding, FAIL is not a node problem.
        """
        if self is ExitStyle.NAGIOS:
            return NAGIOS_CODES[NAGIOS_STATES[verdict]]
        if drains or (strict and verdict in (Verdict.WARN, Verdict.INCONCLUSIVE)):
            return 1
        return 0 if verdict in (Verdict.PASS, Verdict.WARN) else 2


NAGIOS_STATES = {
    Verdict.PASS: "OK",
    Verdict.SKIP: "UNKNOWN",
    Verdict.WARN: "WARNING",
    Verdict.INCONCLUSIVE: "WARNING",
    Verdict.FAIL: "CRITICAL",
    Verdict.ERROR: "UNKNOWN",
}
"""Nagios state for each verdict. A run that judged nothing is UNKNOWN, never OK."""

NAGIOS_CODES = {"OK": 0, "WARNING": 1, "CRITICAL": 2, "UNKNOWN": 3}


class Color(StrEnum):
    """When to colour the table."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Output(Struct, frozen=True):
    """An output file with its format, or a folder that gets one dated file per run."""

    path: Path
    format: Format


def _parse_format(name: str) -> Format:
    for known in FORMATS:
        if known.name == name:
            return known
    raise unknown_choice("--format", name, [known.name for known in FORMATS])


SUFFIXES = tuple(known.suffix for known in FORMATS if known.suffix is not None)
PLAIN_WIDTH = 100
"""Width in columns of a table that is not printed on a terminal."""

EXIT_STYLE = "--exit-style"


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """The output options that every command has: files, formats, width and colours. Writers read it too.

    - `outputs`: the files to write. `checked` sets this field and `format` from the options.
    - `terminal`: stdout is a terminal, so a long last line is wrapped. Elsewhere it stays whole, for `tail -1`.
    - `defaults`: the options that a variable or `defaults_file` has set, with the place where it is set.
    - `job_defaults`: the defaults that must be equal on all ranks.
    """

    help_group: ClassVar = OUTPUT

    plot: bool = flag("Draw bandwidth by size below the table, with limit and expected value.")
    format: Format = option(
        "NAME",
        f"Format of stdout: {', '.join(known.name for known in FORMATS)}.",
        default=TABLE.name,
        read=_parse_format,
        completed_as="format",
        common=True,
    )
    json: bool = flag("Same as --format json.", hidden=True)
    output: list[str] | None = option(
        "FILE",
        f"Also write the result to this file, in the format of its suffix ({', '.join(SUFFIXES)}). A folder (results/) "
        "gets one dated JSON file per run. Repeatable.",
        name="--output -o",
        common=True,
    )
    save_baseline: str | None = option(
        "NAME",
        "Keep this result as the baseline NAME, for gpubench compare --against NAME.",
        completed_as="against",
    )
    section: str | None = option(
        "NAME",
        "Which section to write as CSV (default: the main one). With prometheus, pairs adds every GPU pair.",
    )
    wide: bool = flag("Add the run to each CSV line: id, time, hosts, GPUs, driver, NCCL.", hidden=True)
    color: Color = option(
        "|".join(Color),
        "When to color the table.",
        default=Color.AUTO.value,
        read=one_of("--color", Color),
        completed_as="color",
    )
    width: int | None = option("N", "Width of the table in columns (default: the terminal's, otherwise 100).", min=40)
    summary: bool = flag("Print only the last line, with the verdict and the cause or the best values.", hidden=True)
    verbose: bool = flag("Print every GPU, library and setting in the header.", name="--verbose -v")
    quiet: bool = flag("Print only findings and the last line, without progress.", name="--quiet -q")
    no_progress: bool = flag("Do not show progress.")
    exit_style: ExitStyle | None = option(
        "|".join(ExitStyle),
        "Print one line and exit with the codes of a Nagios or node-problem-detector plugin, or for a Slurm script.",
        read=one_of(EXIT_STYLE, ExitStyle),
        completed_as="exit-style",
    )
    exit_zero: bool = flag("Exit 0 whatever the report says. Without a report the codes stay 2, 3 and 130.")
    outputs: tuple[Output, ...] = ()
    terminal: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)
    defaults_file: str | None = None
    job_defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        return self.width or PLAIN_WIDTH

    @property
    def is_colored(self) -> bool:
        return self.color is Color.ALWAYS

    @property
    def show_progress(self) -> bool:
        return not (self.no_progress or self.quiet)

    @property
    def history(self) -> Path | None:
        """The folder for dated results, or None."""
        return next((output.path for output in self.outputs if output.format is DATED), None)

    def exit_code(self, metadata: "Metadata", report: "Report") -> int:
        from gpubench.conditions.policy import drains
        from gpubench.model.results.ending import compute_exit_code, is_strict

        if self.exit_zero:
            return DONE
        if self.exit_style is None:
            return compute_exit_code(metadata, report)
        return self.exit_style.code(
            report.verdict, strict=is_strict(metadata.options), drains=any(map(drains, report.findings))
        )

    def checked(self, sections: Sequence[str]) -> "Presentation":
        """Return a copy with `format` and `outputs` set, for a command with these sections.

        Raises: UsageError if options exclude each other.
        """
        format_, outputs = JSON if self.json else self.format, parse_outputs(self.output or ())
        if self.save_baseline is not None:
            from gpubench.readers.results.history import baseline_path

            outputs += (Output(baseline_path(self.save_baseline, os.environ), BASELINE),)
        self._check_section(sections, format_, outputs)
        self._check_plot(format_, outputs)
        if self.exit_style is not None:
            launch = detect_launcher(os.environ)
            if launch is not None and launch.size > 1:
                raise exit_style_under_launcher(launch.launcher)
            format_ = {ExitStyle.NAGIOS: NAGIOS, ExitStyle.NPD: NPD, ExitStyle.SLURM: SLURM}[self.exit_style]
        elif self.summary:
            format_ = SUMMARY
        elif self.quiet and format_ is TABLE:
            format_ = QUIET
        return replace(self, format=format_, outputs=outputs)

    def _check_section(self, sections: Sequence[str], stdout: Format, outputs: Sequence[Output]) -> None:
        if self.section is not None and self.section not in sections:
            raise unknown_choice("--section", self.section, sections)
        names = {stdout.name, *(output.format.name for output in outputs)}
        if self.section is not None and "csv" not in names and not (self.section == "pairs" and "prometheus" in names):
            raise UsageError(
                f"--section {self.section} without csv",
                expected="--format csv, or an --output file ending in .csv, because --section selects one section "
                "of the CSV",
                next_step=f"--format csv --section {self.section}",
            )
        if self.wide and "csv" not in names:
            raise UsageError("--wide without csv", expected="--format csv, or an --output file ending in .csv")

    def _check_plot(self, stdout: Format, outputs: Sequence[Output]) -> None:
        if not self.plot or any(output.format is TABLE for output in outputs):
            return
        if self.quiet:
            raise exclusive(
                ("--plot", "--quiet"),
                "only one of them, or an --output file ending in .txt, because the curves are part of the table",
            )
        if stdout is not TABLE:
            raise UsageError(
                f"--plot with --format {stdout.name}",
                expected="--format table, because the curves are part of the table",
                next_step="--output result.html",
            )


def parse_outputs(paths: Sequence[str]) -> tuple[Output, ...]:
    """Return the output files with their formats, including the folder for dated results.

    Raises: UsageError for an unknown suffix, the same file twice, or two folders.
    """
    outputs: dict[Path, Output] = {}
    for text in paths:
        path = Path(text)
        keeps = text.endswith("/") or (path.suffix not in SUFFIXES and _is_folder(path))
        output = Output(path, DATED if keeps else _format_of_file(path, text))
        if path.resolve() in outputs:
            raise UsageError(
                f"--output {text} is set twice",
                expected="a different file for each output",
                reason="both paths are the same file, so the second would overwrite the first",
                next_step="--output result.json --output result.csv",
            )
        folder = next((known.path for known in outputs.values() if known.format is DATED), None)
        if output.format is DATED and folder is not None:
            raise UsageError(
                f"--output {folder}/ and --output {text}",
                expected="one folder for dated results",
                next_step=f"--output {folder}/",
            )
        outputs[path.resolve()] = output
    return tuple(outputs.values())


def _is_folder(path: Path) -> bool:
    """True if the path is a folder. If it cannot be read, return False, because writing it reports the error later."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _format_of_file(path: Path, text: str) -> Format:
    formats = {known.suffix: known for known in FORMATS if known.suffix}
    if path.suffix in formats:
        return formats[path.suffix]
    endings = ", ".join(f"{suffix} ({known.name})" for suffix, known in formats.items())
    raise UsageError(
        f"--output {text}: no format has this suffix",
        expected=f"a file ending in {endings}, or a folder ending in /",
        next_step=f"--output {path.with_suffix('.json') if path.suffix else f'{text}/'}",
    )
