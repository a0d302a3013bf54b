"""Options for presenting a report, which every command shares, and the options of any plan."""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gpubench.errors import UsageError, exclusive, exit_style_under_launcher
from gpubench.formats.presentation import OPTION, Color, ExitStyle, Output, Presentation
from gpubench.formats.registry import BASELINE, CSV, DATED, FORMATS, JSON, QUIET, SUMMARY, TABLE, TUNER, Format
from gpubench.jobs.options import OUTPUT, Option, flag, group_of, option, option_of, parse_choices, unknown_choice
from gpubench.model.facts.environment import detect_launcher

if TYPE_CHECKING:
    from dataclasses import Field

    from gpubench.cli.defaults import Defaults

SUMMARY_OPTION = "--summary"
WINNERS = "winners"
"""The section that `--output nccl_tuner.conf` is made of."""

FOLDER_MARK = "/"
"""The ending of `--output results/`, which names a folder; it is made where there is none."""

SUFFIXES = tuple(each.suffix for each in FORMATS if each.suffix is not None)


@dataclass(frozen=True, kw_only=True)
class PresentationOptions:
    """Output files and the look of the table."""

    help_group: ClassVar = OUTPUT

    plot: bool = flag("Draw bandwidth by size below the table, with limit and expected value.")
    format_name: str = option(
        "NAME",
        f"Format of stdout: {', '.join(each.name for each in FORMATS)}.",
        default=TABLE.name,
        name="--format",
        completed_as="format",
        common=True,
    )
    json: bool = flag("Same as --format json.", common=True)
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
    wide: bool = flag("Add to each line of CSV the run it belongs to: id, time, hosts, GPUs, driver, NCCL.")
    color: str = option("|".join(Color), "When to color the table.", default="auto", completed_as="color")
    width: int | None = option("N", "Width of the table in columns (default: the terminal's, otherwise 100).", min=40)
    summary: bool = flag("Print only the last line: verdict, and cause or best figures.", name=SUMMARY_OPTION)
    verbose: bool = flag("Print every GPU, library and setting in the header.", name="--verbose -v")
    quiet: bool = flag("Print only findings and the last line, without progress.", name="--quiet -q")
    no_progress: bool = flag("Do not show progress.")
    exit_style: str | None = option(
        "|".join(ExitStyle),
        "Print one line and exit with the codes of a Nagios or node-problem-detector plugin, or for a Slurm script.",
        name=OPTION,
        completed_as="exit-style",
    )
    exit_zero: bool = flag("Exit 0 after any report. Without a report the codes stay 2, 3 and 130.")
    defaults: "Defaults | None" = None

    def parse(self, sections: Sequence[str]) -> Presentation:
        """The presentation. `sections` are those of the command. Raises UsageError for a wrong combination."""
        if self.section is not None and self.section not in sections:
            raise unknown_choice("--section", self.section, sections)
        format_, outputs = self._format(), (*parse_outputs(self.output or ()), *self._baseline())
        formats = (format_, *(output.format for output in outputs))
        names = {each.name for each in formats}
        if self.section is not None and CSV not in formats and not (self.section == "pairs" and "prometheus" in names):
            raise UsageError(
                f"--section {self.section} without csv",
                expected="--format csv, or an --output file ending in .csv: --section selects one section of the CSV",
                next_step=f"--format csv --section {self.section}",
            )
        if TUNER in formats and WINNERS not in sections:
            raise UsageError(
                f"--output {outputs[formats[1:].index(TUNER)].path}",
                expected="a collective that is swept over settings: the file has their winners",
                next_step="gpubench allreduce --algo ring,tree --proto ll,ll128,simple --output nccl_tuner.conf",
            )
        if self.wide and CSV not in formats:
            raise UsageError("--wide without csv", expected="--format csv, or an --output file ending in .csv")
        if self.plot and self.quiet and TABLE not in formats[1:]:
            raise exclusive(
                ("--plot", "--quiet"),
                "one of them, or an --output file ending in .txt: the curves are part of the table",
            )
        if self.plot and TABLE not in formats:
            raise UsageError(
                f"--plot with --format {format_.name}",
                expected="--format table: the curves are part of the table",
                next_step="--output result.html",
            )
        style = None
        if self.exit_style is not None:
            style = parse_choices(OPTION, [self.exit_style], ExitStyle)[0]
            _refuse_under_launcher()
        line = SUMMARY if self.summary else None if style is None else style.line_format
        shown = QUIET if self.quiet and format_ is TABLE else format_
        return Presentation(
            format=line or shown,
            outputs=outputs,
            section=self.section,
            color=parse_choices("--color", [self.color], Color)[0],
            width=self.width,
            verbose=self.verbose,
            show_progress=not (self.no_progress or self.quiet),
            exit_style=style,
            exit_zero=self.exit_zero,
            plot=self.plot,
            wide=self.wide,
            defaults={} if self.defaults is None else self.defaults.sources,
            defaults_file=None if self.defaults is None else self.defaults.file,
            job_defaults=self._job_defaults(),
        )

    def _format(self) -> Format:
        """The format of stdout."""
        by_name = {each.name: each for each in FORMATS}
        if self.format_name not in by_name:
            raise unknown_choice("--format", self.format_name, list(by_name))
        return JSON if self.json else by_name[self.format_name]

    def _baseline(self) -> tuple[Output, ...]:
        if self.save_baseline is None:
            return ()
        from gpubench.readers.results.history import baseline_path

        return (Output(baseline_path(self.save_baseline, os.environ), BASELINE),)

    @property
    def by_default(self) -> dict[str, str]:
        """The options whose value comes from the environment or a file, with its source."""
        return {} if self.defaults is None else self.defaults.sources

    def _job_defaults(self) -> dict[str, str]:
        """The defaults that must be equal on all ranks of a job: all except those of outputs and looks."""
        if self.defaults is None:
            return {}
        own = {each.name for each, _, _ in grouped_options(type(self))}
        return {each.option: each.source for name, each in self.defaults.by_name.items() if name not in own}


def _refuse_under_launcher() -> None:
    launch = detect_launcher(os.environ)
    if launch is not None and launch.size > 1:
        raise exit_style_under_launcher(launch.launcher)


def parse_outputs(paths: Sequence[str]) -> tuple[Output, ...]:
    """Return the files to write, with formats by suffix, and the folder for dated results.

    Raises UsageError for an unknown suffix, one file twice, or two folders.
    """
    outputs: dict[Path, Output] = {}
    for text in paths:
        path = Path(text)
        keeps = text.endswith(FOLDER_MARK) or (path.suffix not in SUFFIXES and _is_folder(path))
        output = Output(path, DATED if keeps else _format_of(path, text))
        if path.resolve() in outputs:
            raise UsageError(
                f"--output {text} is given twice",
                expected="a different file for each output",
                reason="the second would overwrite the first: both paths are the same file",
                next_step="--output result.json --output result.csv",
            )
        folder = next((each.path for each in outputs.values() if each.format is DATED), None)
        if output.format is DATED and folder is not None:
            raise UsageError(
                f"--output {folder}/ and --output {text}",
                expected="one folder for dated results",
                next_step=f"--output {folder}/",
            )
        outputs[path.resolve()] = output
    return tuple(outputs.values())


def _is_folder(path: Path) -> bool:
    """True for a folder. A path that cannot be read, or is too long, is refused when it is written."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _format_of(path: Path, text: str) -> Format:
    by_suffix = {each.suffix: each for each in (*FORMATS, TUNER) if each.suffix}
    if path.suffix in by_suffix:
        return by_suffix[path.suffix]
    known = ", ".join(f"{suffix} ({each.name})" for suffix, each in by_suffix.items())
    folder = f"{text}/"
    raise UsageError(
        f"--output {text}: no format has this suffix",
        expected=f"a file ending in {known}, or a folder ending in /",
        next_step=f"--output {path.with_suffix('.json') if path.suffix else folder}",
    )


def check_profile(name: str | None) -> None:
    """Raise UsageError, before anything is measured, if the profile is missing or broken."""
    if name is not None:
        from gpubench.profiles import find

        find(name, os.environ)


def check_evidence(shown: bool | None, *, strict: bool) -> None:  # noqa: FBT001 - what --evidence is
    """Raise UsageError for a strict verdict on paths for which no evidence is collected."""
    if shown is False and strict:
        raise UsageError(
            "--strict with --no-evidence",
            expected="one of them: --strict judges the paths that evidence shows",
            next_step="leave --no-evidence out",
        )


class Declared(NamedTuple):
    """A dataclass field that is an option; `group` is the --help heading of its dataclass."""

    field: "Field[Any]"
    own: Option
    group: str | None

    @property
    def name(self) -> str:
        """'--iters' of '--iters -n', '--check' of '--check/--no-check', 'BASE' of an argument."""
        return str(self.own.metavar) if self.own.is_argument else _names_of(self.field, self.own)[0]

    @property
    def heading(self) -> str | None:
        """The --help heading above the option."""
        return self.own.group or self.group

    def name_with(self, values: Mapping[str, Any]) -> str:
        """'--no-check' if --check is off, otherwise its name."""
        return self.name if values.get(self.field.name) is not False else _names_of(self.field, self.own)[-1]

    def is_asked(self, values: Mapping[str, Any]) -> bool:
        """True if the value differs from the option's default."""
        return values.get(self.field.name) not in (self.own.default, None, [], ())


def grouped_options(kind: Any) -> Iterator[Declared]:
    """Yield the options of a plan, including those of nested groups."""
    for field in fields(kind):
        own, group = option_of(field), group_of(field)
        if own is not None:
            yield Declared(field, own, getattr(kind, "help_group", None))
        elif group is not None:
            yield from grouped_options(group)


def given_options(options: Any) -> Iterator[str]:
    """Yield the names of options whose value differs from the default."""
    for field in fields(options):
        value: Any = getattr(options, field.name)
        own = option_of(field)
        if own is not None and not own.is_argument and value != field.default:
            yield _name_of(field, own, value)
        elif own is None and hasattr(value, "help_group"):
            yield from given_options(value)


def given_arguments(plan: Any) -> Iterator[str]:
    """Yield command-line words for the options whose value differs from the default."""
    for field in fields(plan):
        value: Any = getattr(plan, field.name)
        if (own := option_of(field)) is not None and value != field.default:
            yield _name_of(field, own, value)
            yield from () if isinstance(value, bool) else [str(value)]
        elif own is None and hasattr(value, "help_group"):
            yield from given_arguments(value)


def _name_of(declared: "Field[Any]", own: Option, value: Any) -> str:
    """'--iters' of '--iters -n', '--no-check' of '--check/--no-check' where it is off."""
    names = _names_of(declared, own)
    is_off = own.metavar is None and value == (False if own.read is None else own.read(False))  # noqa: FBT003
    return names[-1] if is_off else names[0]


def _names_of(declared: "Field[Any]", own: Option) -> list[str]:
    return (own.names or f"--{declared.name.replace('_', '-')}").split(" ")[0].split("/")


def check_outputs(paths: list[str] | None, reductions: Container[str]) -> None:
    """Raise UsageError for `-o sum`: in nccl-tests -o is the reduction, here a file."""
    for path in paths or ():
        if path in reductions or path == "all":
            raise UsageError(
                f"-o {path}",
                expected="-o FILE",
                reason="in nccl-tests -o is the reduction, in gpubench a file",
                next_step=f"--op {path if path != 'all' else ','.join(('sum', 'prod', 'max', 'min', 'avg'))}",
            )
