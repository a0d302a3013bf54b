"""The options of every command that decide where results go and how they look."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options.choices import parse_choices, unknown_word
from gpubench.cli.plain_values import OUTPUT
from gpubench.cli.signature import completed, flag, no_option, option, option_fields
from gpubench.errors import UsageError, exclusive, exit_style_under_launcher
from gpubench.formats.exit_style import OPTION, ExitStyle
from gpubench.formats.presentation import Color, Output, Presentation
from gpubench.formats.registry import BASELINE, CSV, DATED, FORMATS, QUIET, SUMMARY, TABLE
from gpubench.formats.writer import Format
from gpubench.model.facts.launched_by import launched_by

if TYPE_CHECKING:
    from gpubench.cli.defaults import Defaults

SUMMARY_OPTION = "--summary"

FOLDER_MARK = "/"
"""The ending of `--output results/`, which names a folder; it is made where there is none."""

SUFFIXES = tuple(each.suffix for each in FORMATS if each.suffix is not None)

PLOT = "Draw bandwidth over size in the table, with limit and expectation."
"""The help of --plot, which commands have that visit sizes."""


@dataclass(frozen=True, kw_only=True)
class PresentationOptions:
    """The outputs, and the look of the table."""

    help_group: ClassVar = OUTPUT

    format_name: str = option(
        "NAME",
        f"Of stdout: {', '.join(each.name for each in FORMATS)}.",
        name="--format",
        default="table",
        autocompletion=completed("format"),
    )
    output: list[str] | None = option(
        "FILE",
        f"Also write this file; {', '.join(SUFFIXES)} picks the format. A folder, as in results/, keeps a "
        "dated json of every run. Repeatable.",
        name="--output -o",
    )
    save_baseline: str | None = option(
        "NAME",
        "Keep this result under a name, for gpubench compare --against NAME.",
        autocompletion=completed("against"),
    )
    section: str | None = option(
        "NAME",
        "What csv shows, which shows one. Default: the command's main one. prometheus has every pair with pairs.",
    )
    wide: bool = flag("Every line of csv says of which run it is: id, time, hosts, GPUs, driver, NCCL.")
    color: str = option("|".join(Color), "Colours in the table.", default="auto", autocompletion=completed("color"))
    width: int | None = option("N", "Columns of the table. Default: the terminal's, or 100.", min=40)
    summary: bool = flag("The last sentence alone: verdict, worst root cause or best figures.", name=SUMMARY_OPTION)
    verbose: bool = flag(
        "Headers in full: every GPU, library and setting, not only those that bear on performance.", name="--verbose -v"
    )
    quiet: bool = flag("No progress, and of the table only findings and the last sentence.", name="--quiet -q")
    no_progress: bool = flag("No progress bar.")
    exit_style: str | None = option(
        "|".join(ExitStyle),
        "One line and the exit codes of a Nagios or node-problem-detector plugin.",
        name=OPTION,
        autocompletion=completed("exit-style"),
    )
    defaults: "Defaults | None" = no_option()

    def parse(self, sections: Sequence[str], *, plot: bool = False) -> Presentation:
        """The presentation; `sections` are those that the command has. UsageError for what cannot be shown."""
        if self.section is not None and self.section not in sections:
            raise unknown_word("--section", self.section, sections)
        format_, outputs = parse_format(self.format_name), (*parse_outputs(self.output or ()), *self._baseline())
        formats = (format_, *(output.format for output in outputs))
        names = {each.name for each in formats}
        if self.section is not None and CSV not in formats and not (self.section == "pairs" and "prometheus" in names):
            raise UsageError(
                f"--section {self.section} without csv",
                expected="--format csv, or an --output that ends in .csv: only csv shows one section",
                next_step=f"--format csv --section {self.section}",
            )
        if self.wide and CSV not in formats:
            raise UsageError("--wide without csv", expected="--format csv, or an --output that ends in .csv")
        quiet, verbose = self._loudness()
        if plot and quiet and TABLE not in formats[1:]:
            raise exclusive(
                ("--plot", "--quiet"), "one of them, or an --output that ends in .txt: curves are in the table"
            )
        if plot and TABLE not in formats:
            raise UsageError(
                f"--plot with --format {format_.name}",
                expected="the table, which curves are drawn in",
                next_step="--output result.html has curves too",
            )
        style = _parse_exit_style(self.exit_style, format_)
        if style is not None:
            _refuse_under_launcher()
        if self.summary and (style is not None or format_ is not TABLE):
            beside = f"{OPTION} {self.exit_style}" if style is not None else f"--format {format_.name}"
            raise exclusive((SUMMARY_OPTION, beside), "one of them: each has stdout to itself")
        line = SUMMARY if self.summary else None if style is None else style.line_format
        shown = QUIET if quiet and format_ is TABLE else format_
        return Presentation(
            format=line or shown,
            outputs=outputs,
            section=self.section,
            color=parse_choices("--color", [self.color], Color)[0],
            width=self.width,
            verbose=verbose,
            show_progress=not (self.no_progress or quiet),
            exit_style=style,
            plot=plot,
            wide=self.wide,
            defaults=self.by_default,
            defaults_file=None if self.defaults is None else self.defaults.file,
            job_defaults=self._job_defaults(),
        )

    def _baseline(self) -> tuple[Output, ...]:
        if self.save_baseline is None:
            return ()
        from gpubench.readers.results.baselines import baseline_path

        return (Output(baseline_path(self.save_baseline, os.environ), BASELINE),)

    @property
    def by_default(self) -> dict[str, str]:
        """The options that have their values from the environment or a file, each with where."""
        return {} if self.defaults is None else self.defaults.sources

    def _loudness(self) -> tuple[bool, bool]:
        """Whether to be quiet, and verbose; what the command line asks for comes before a default of the other one."""
        if not (self.quiet and self.verbose):
            return self.quiet, self.verbose
        by_default = {"--quiet", "--verbose"} & self.by_default.keys()
        if len(by_default) != 1:
            raise exclusive(("--quiet", "--verbose"), "one of them, or neither")
        return "--quiet" not in by_default, "--verbose" not in by_default

    def _job_defaults(self) -> dict[str, str]:
        """The defaults that every rank of a job has to have alike: all but those of outputs and looks."""
        if self.defaults is None:
            return {}
        own = {each.name for each in option_fields(type(self))}
        return {each.option: each.source for name, each in self.defaults.by_name.items() if name not in own}


def _refuse_under_launcher() -> None:
    """Raise UsageError where several ranks would each end with a plugin's exit code."""
    launch = launched_by(os.environ)
    if launch is not None and launch.size > 1:
        raise exit_style_under_launcher(launch.launcher)


def _parse_exit_style(name: str | None, format_: Format) -> ExitStyle | None:
    """The style of that name, which has stdout to itself: UsageError where a format stands beside it."""
    if name is None:
        return None
    style = parse_choices(OPTION, [name], ExitStyle)[0]
    if format_ is not TABLE:
        raise UsageError(
            f"{OPTION} {name} with --format {format_.name}",
            expected=f"one of them: {OPTION} prints a line of its own",
            next_step=f"{OPTION} {name} --output result{format_.suffix or '.json'}",
        )
    return style


def parse_format(name: str) -> Format:
    """The format of that name."""
    by_name = {each.name: each for each in FORMATS}
    if name not in by_name:
        raise unknown_word("--format", name, list(by_name))
    return by_name[name]


def parse_outputs(paths: Sequence[str]) -> tuple[Output, ...]:
    """The files to write, each with the format that its suffix picks, and the folder that keeps dated results.

    UsageError for an unknown suffix, one file twice, or two folders.
    """
    outputs: dict[Path, Output] = {}
    for text in paths:
        path = Path(text)
        keeps = text.endswith(FOLDER_MARK) or (path.suffix not in SUFFIXES and _is_folder(path))
        output = Output(path, DATED if keeps else _format_of(path, text))
        if path.resolve() in outputs:
            raise UsageError(
                f"--output {text} is given twice",
                expected="a file of its own for each output",
                reason="the second would overwrite the first; two spellings of a path are one file",
                next_step="--output result.json --output result.csv",
            )
        folder = next((each.path for each in outputs.values() if each.format is DATED), None)
        if output.format is DATED and folder is not None:
            raise UsageError(
                f"--output {folder}/ and --output {text}",
                expected="one folder to keep dated results in",
                next_step=f"--output {folder}/ alone; cp keeps a second one",
            )
        outputs[path.resolve()] = output
    return tuple(outputs.values())


def _is_folder(path: Path) -> bool:
    """True for a folder; what may not be looked at, or has too long a name, is refused where it is written."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _format_of(path: Path, text: str) -> Format:
    by_suffix = {each.suffix: each for each in FORMATS if each.suffix}
    if path.suffix in by_suffix:
        return by_suffix[path.suffix]
    known = ", ".join(f"{suffix} ({each.name})" for suffix, each in by_suffix.items())
    folder = f"{text}/ keeps a dated result of every run in a folder"
    raise UsageError(
        f"--output {text}: the suffix names no format",
        expected=f"a file that ends in {known}",
        next_step=f"--output {path.with_suffix('.json') if path.suffix else folder}",
    )
