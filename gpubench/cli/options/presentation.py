"""The options of every command that decide where results go and how they look."""

import difflib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gpubench.errors import UsageError, invalid_choice
from gpubench.formats.exit_style import OPTION, ExitStyle
from gpubench.formats.presentation import Color, Output, Presentation
from gpubench.formats.registry import CSV, DATED, FORMATS, TABLE
from gpubench.formats.writer import Format
from gpubench.model.results.history import FOLDER_MARK

Choice = TypeVar("Choice", bound=StrEnum)


SUFFIXES = tuple(each.suffix for each in FORMATS if each.suffix is not None)

FORMAT = Annotated[
    str,
    typer.Option("--format", metavar="NAME", help=f"Of stdout: {', '.join(each.name for each in FORMATS)}."),
]
OUTPUT = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help=f"Also write this file; {', '.join(SUFFIXES)} picks the format. A folder, as in results/, keeps a dated "
        "json of every run. Repeatable.",
        show_default=False,
    ),
]
SECTION = Annotated[
    str | None,
    typer.Option(
        "--section",
        metavar="NAME",
        help="What csv shows, which shows one. Default: the command's main one.",
        show_default=False,
    ),
]
COLOR = Annotated[str, typer.Option("--color", metavar="|".join(Color), help="Colours in the table.")]
WIDTH = Annotated[
    int | None,
    typer.Option(
        "--width",
        metavar="N",
        min=40,
        help="Columns of the table. Default: the terminal's, or 100.",
        show_default=False,
    ),
]
NO_PROGRESS = Annotated[bool, typer.Option("--no-progress", help="No progress bar.", show_default=False)]
EXIT_STYLE = Annotated[
    str | None,
    typer.Option(
        OPTION,
        metavar="|".join(ExitStyle),
        help="One line and the exit codes of a Nagios or node-problem-detector plugin.",
        show_default=False,
    ),
]

PLOT = Annotated[
    bool,
    typer.Option(
        "--plot", help="Draw bandwidth over size in the table, with limit and expectation.", show_default=False
    ),
]
"""Of the commands that visit sizes."""

PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("format_name", FORMAT, "table"),
    ("output", OUTPUT, None),
    ("section", SECTION, None),
    ("color", COLOR, "auto"),
    ("width", WIDTH, None),
    ("no_progress", NO_PROGRESS, False),
    ("exit_style", EXIT_STYLE, None),
)
"""Name, declaration and default of each, for a command's signature."""


def parse_presentation(given: dict[str, Any], sections: Sequence[str]) -> Presentation:
    """These options from what typer read; `sections` are those that the command has.

    Raises:
        UsageError: a word that is not known, an output of no format, one file twice, a section that nothing shows.
    """
    if given["section"] is not None and given["section"] not in sections:
        raise unknown_word("--section", given["section"], sections)
    format_, outputs = parse_format(given["format_name"]), parse_outputs(given["output"] or ())
    if given["section"] is not None and CSV not in (format_, *(output.format for output in outputs)):
        raise UsageError(
            f"--section {given['section']} without csv",
            expected="--format csv, or an --output that ends in .csv: only csv shows one section",
            next_step=f"--format csv --section {given['section']}",
        )
    plot = given.get("plot", False)
    if plot and TABLE not in (format_, *(output.format for output in outputs)):
        raise UsageError(
            f"--plot with --format {format_.name}",
            expected="the table, which curves are drawn in",
            next_step="--output result.html has curves too",
        )
    style = _parse_exit_style(given.get("exit_style"), format_)
    return Presentation(
        format=format_ if style is None else style.line_format,
        outputs=outputs,
        section=given["section"],
        color=parse_choices("--color", [given["color"]], Color)[0],
        width=given["width"],
        show_progress=not given["no_progress"],
        exit_style=style,
        plot=plot,
    )


def _parse_exit_style(name: str | None, format_: Format) -> ExitStyle | None:
    """The style of that name, which has stdout to itself.

    Raises:
        UsageError: no such style, or a format beside it.
    """
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


def parse_choices(option: str, texts: Iterable[str], choices: type[Choice]) -> tuple[Choice, ...]:
    """The members that comma-separated texts name, each once, in their order.

    Raises:
        UsageError: a word that names none, with the nearest one that does.
    """
    chosen: dict[Choice, None] = {}
    for word in (word.strip() for text in texts for word in text.split(",")):
        if word not in tuple(choices):
            raise unknown_word(option, word, tuple(choices))
        chosen[choices(word)] = None
    return tuple(chosen)


def parse_format(name: str) -> Format:
    """The format of that name."""
    for each in FORMATS:
        if each.name == name:
            return each
    raise unknown_word("--format", name, [each.name for each in FORMATS])


def parse_outputs(paths: Sequence[str]) -> tuple[Output, ...]:
    """The files to write, each with the format that its suffix picks, and the folder that keeps dated results.

    Raises:
        UsageError: an unknown suffix, one file twice, or two folders.
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
    """Whether it is one; what may not be looked at, or has too long a name, is refused where it is tried."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _format_of(path: Path, text: str) -> Format:
    """The format that a file's suffix picks."""
    for each in FORMATS:
        if each.suffix is not None and each.suffix == path.suffix:
            return each
    known = ", ".join(f"{each.suffix} ({each.name})" for each in FORMATS if each.suffix)
    raise UsageError(
        f"--output {text}: the suffix names no format",
        expected=f"a file that ends in {known}",
        next_step=f"--output {path.with_suffix('.json')}"
        if path.suffix
        else f"--output {text}/ keeps a dated result of every run in a folder",
    )


def unknown_word(option: str, word: str, choices: Sequence[str]) -> UsageError:
    """A word that an option does not know, with the nearest one that it does."""
    error = invalid_choice(option, word, choices)
    nearest = difflib.get_close_matches(word, choices, n=1)
    if nearest:
        error.next_step = f"{option} {nearest[0]}"
    return error
