"""Make Python functions from commands. Their parameters and docstrings come from the command-line options."""

import inspect
import keyword
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

from gpubench.cli.app import typer_command
from gpubench.cli.process import COMMANDS
from gpubench.jobs.library import RunResult, Value, run

FOR_PEOPLE = frozenset(
    (
        *("format", "json", "section", "wide", "color", "width", "summary", "verbose", "quiet", "no_progress"),
        *("exit_style", "plot"),
    )
)
"""Options that only change the printed output, so the Python functions do not have them."""

FileName = str | os.PathLike[str]
One = str | int | float | os.PathLike[str]
Several = One | Sequence[One] | None
TYPE_NAMES: dict[Any, str] = {
    FileName: "str | os.PathLike[str]",
    One | None: "One | None",
    Several: "Several",
    Literal[True] | None: "Literal[True] | None",
    bool | None: "bool | None",
    int | None: "int | None",
    float | None: "float | None",
}
"""Names of all parameter types, as written in gpubench/__init__.pyi."""

_NUMBERS: dict[Any, Any] = dict.fromkeys((int, int | None), int | None) | dict.fromkeys(
    (float, float | None), float | None
)
_RUNS = """\
Runs `gpubench {}` in a separate process and returns its RunResult. Raises GpubenchError for a wrong option, if nothing
could be measured, and if the command does not end within `deadline_s` seconds.\
"""


def make_function(command: str) -> Callable[..., RunResult]:
    """Return a Python function that runs a command."""

    def call(*arguments: FileName, deadline_s: float | None = None, **options: Value) -> RunResult:
        return run(command, *map(str, arguments), deadline_s=deadline_s, **options)

    call.__name__ = call.__qualname__ = command
    call.__module__ = "gpubench"
    call.__doc__ = _docstring(command)
    call.__signature__ = make_signature(command)  # type: ignore[attr-defined]
    return call


def make_signature(command: str) -> inspect.Signature:
    """Return the signature of a command's function: files, `deadline_s`, and options as keyword arguments."""
    named = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("deadline_s", named, default=None, annotation=float | None)]
    types = inspect.signature(_typed(command).callback).parameters
    for name, option in _parameters(command):
        if option.param_type_name == "argument":
            kind = inspect.Parameter.VAR_POSITIONAL
            parameters = [inspect.Parameter("files", kind, annotation=FileName), *parameters]
        else:
            default = None if option.multiple or option.default is False else option.default
            parameters.append(
                inspect.Parameter(
                    name,
                    named,
                    default=default,
                    annotation=_parameter_type(option, get_args(types[option.name].annotation)[0]),
                )
            )
    return inspect.Signature(parameters, return_annotation=RunResult)


def _parameters(command: str) -> Iterator[tuple[str, Any]]:
    """Yield the Python name and the typer parameter of each option that functions have, and of the first argument."""
    arguments = 0
    for option in _typed(command).params:
        if option.param_type_name == "argument":
            arguments += 1
            if arguments == 1:
                yield "files", option
        elif option.opts[0].startswith("--") and option.name not in FOR_PEOPLE and not option.hidden:
            name = option.opts[0].removeprefix("--").replace("-", "_")
            yield f"{name}_" if keyword.iskeyword(name) else name, option


def _typed(command: str) -> Any:
    return typer_command(next(known for known in COMMANDS if known.name == command))


def _parameter_type(option: Any, annotation: Any) -> Any:
    if option.multiple:
        return Several
    if annotation in (bool, bool | None):
        return bool | None if option.secondary_opts else Literal[True] | None
    return _NUMBERS.get(annotation, One | None)


def _docstring(command: str) -> str:
    summary = next(known.summary for known in COMMANDS if known.name == command)
    texts = [f"{name}: {option.help or ''}" for name, option in _parameters(command)]
    wrapped = [textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="        ") for text in texts]
    return "\n".join((summary, "", _RUNS.format(command), "", "Parameters:", *wrapped))
