"""Read the defaults of options from the environment and from files, and complete option values in a shell."""

import difflib
import os
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import typer

from gpubench.cli.process import COMMANDS, DEFAULTS_FILES, PREFIX, PROJECT_FILE
from gpubench.errors import GpubenchError, UsageError, add_advice
from gpubench.formats.registry import FORMATS, Color, ExitStyle, Presentation
from gpubench.model.facts.environment import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ
from gpubench.model.terms.options import RequiredPath, options_of
from gpubench.profiles import MOST_FILES, profile_names, user_folder
from gpubench.readers.documents import open_file

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SHORTEST_VALUE_TO_FIND = 3

Value = str | bool | tuple[str, ...]


class Default(NamedTuple):
    """The default of an option, such as `--timeout`. `source` names the variable or file that sets it, and the
    value.
    """

    option: str
    value: Value
    source: str


class Defaults(NamedTuple):
    """The defaults by parameter name, and the file that was read, or None."""

    by_name: Mapping[str, Default]
    file: str | None = None

    def keep(self, names: Iterable[str]) -> "Defaults":
        return self._replace(by_name={name: self.by_name[name] for name in names})

    def unreplaced(self, context: Any) -> "Defaults":
        """Return only the defaults that the command line does not override. `context` is the click context."""
        sources = {name: context.get_parameter_source(name) for name in self.by_name}
        return self.keep(name for name, source in sources.items() if getattr(source, "name", "") == "DEFAULT_MAP")

    def note_in(self, presentation: Presentation) -> Presentation:
        """Return a presentation that also records these defaults, for the report.

        `job_defaults` omits the output options, because these may differ between the ranks of a job.
        """
        looks = {option.field for option in options_of(Presentation)}
        return replace(
            presentation,
            defaults={default.option: default.source for default in self.by_name.values()},
            defaults_file=self.file,
            job_defaults={
                default.option: default.source for name, default in self.by_name.items() if name not in looks
            },
        )

    def explain(self, error: GpubenchError) -> None:
        """If an error is about an option with a default, add the source of the default to the message."""
        message = "\n".join(error.lines())
        for option, value, source in self.by_name.values():
            names_option = re.search(rf"(?<![\w-]){option}(?![\w-])", message)
            if names_option or (isinstance(error, UsageError) and _names_value(error.seen, value)):
                error.details = (*error.details, f"  set by:   {source}")


def _names_value(message: str, value: Value) -> bool:
    texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
    return any(
        repr(text) in message
        or (len(text) >= _SHORTEST_VALUE_TO_FIND and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", message))
        for text in texts
    )


def _options_by_key(parameters: Iterable[Any]) -> dict[str, Any]:
    """Return the typer options by name without dashes, for example `expect-gpus`. --help is not included."""
    found = {}
    for parameter in parameters:
        name = next((name for name in parameter.opts if name.startswith("--")), "")
        if name and parameter.expose_value:
            found[name.removeprefix("--")] = parameter
    return found


def variable_name(key: str) -> str:
    """Return the environment variable for an option, for example GPUBENCH_EXPECT_GPUS for `expect-gpus`."""
    return PREFIX + key.upper().replace("-", "_")


def read_defaults(command: str, parameters: Iterable[Any], environment: Mapping[str, str] = os.environ) -> Defaults:
    """Return the defaults for the options of a command. The environment overrides the file.

    Raises: UsageError for a file that cannot be read, an unknown option, or an invalid value.
    """
    if _are_off(environment):
        return Defaults({})
    options = _options_by_key(parameters)
    file, values = _read_file(command, Path(), options)
    found = {}
    for key, option in options.items():
        if text := environment.get(variable_name(key)):
            source = f"{variable_name(key)}={text}"
            found[option.name] = Default(f"--{key}", _parse_text(option, text, source), source)
        elif key in values:
            value, source = values[key]
            found[option.name] = Default(f"--{key}", _parse_toml(option, value, source), source)
    return Defaults(found, file)


def asked_by_default(key: str, command: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the default of one option as text, or None if there is none or the file cannot be read.

    It decides how errors about other options are reported.
    """
    try:
        if _are_off(environment):
            return None
        return environment.get(variable_name(key)) or str(_read_file(command, Path(), {key: None})[1][key][0])
    except (UsageError, KeyError):
        return None


def _are_off(environment: Mapping[str, str]) -> bool:
    switch = environment.get(DEFAULTS_VARIABLE) or ""
    if switch not in ("", NO_DEFAULTS_TO_READ):
        raise UsageError(f"{DEFAULTS_VARIABLE}={switch}", expected=f"{NO_DEFAULTS_TO_READ}, or the variable unset")
    return bool(switch)


def _parse_text(option: Any, text: str, source: str) -> Value:
    if not option.is_flag:
        return (text,) if option.multiple else text
    if text.lower() not in _WORDS:
        raise UsageError(f"{source} is not yes or no", expected="1, true, yes, on, 0, false, no or off")
    return _WORDS[text.lower()]


def _parse_toml(option: Any, value: Any, source: str) -> Value:
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{source} is not true or false", expected="true or false, without quotes")
        return value
    several = value if isinstance(value, list) and option.multiple else [value]
    if not all(isinstance(member, (str, int, float)) and not isinstance(member, bool) for member in several):
        also = ", or several: [..., ...]" if option.multiple else ""
        raise UsageError(f"{source} is not a value of an option", expected=f"a quoted text or a number{also}")
    texts = tuple(map(str, several))
    return texts if option.multiple else texts[0]


MOST_BYTES = 2**20
_TABLE = "tool.gpubench"
_EXPECTED = "TOML with options such as timeout = 60, and tables such as [check] for the options of one command"


def _read_file(command: str, folder: Path, options: Container[str]) -> tuple[str | None, dict[str, tuple[Any, str]]]:
    """Return the name of the defaults file in a folder, or None, and the option values in it.

    Each value comes with a description of its place in the file.
    """
    with add_advice(next_step=f"{DEFAULTS_VARIABLE}={NO_DEFAULTS_TO_READ}, to ignore the file"):
        file, document = _read_toml(folder)
    if file is None:
        return None, {}
    commands = [known.name for known in COMMANDS if known.writes_reports]
    shared, tables = {}, {}
    for key, value in document.items():
        if isinstance(value, dict):
            tables[key] = value
            _check(key, commands, f"{file}: no command with options is called {key}", f"one of {', '.join(commands)}")
        else:
            shared[key.replace("_", "-")] = value
    for key in shared:
        if key not in options:
            known = options_of_all_commands()
            _check(key, known, f"{file}: no command has an option {key}", "an option that --help lists")
    found = {key: (value, f"{_shown(key, value)} in {file}") for key, value in shared.items() if key in options}
    for name, value in tables.get(command, {}).items():
        key = name.replace("_", "-")
        if key not in options:
            known = [option for option in options_of_all_commands() if option in options]
            _check(key, known, f"{file}, [{command}]: no option {key}", f"an option of gpubench {command}")
        found[key] = value, f"{_shown(key, value)} in {file}, [{command}]"
    return file, found


def _check(key: str, known: Sequence[str], seen: str, expected: str) -> None:
    if key not in known:
        nearest = difflib.get_close_matches(key, known, n=1)
        raise UsageError(seen, expected=expected, next_step=nearest[0] if nearest else "gpubench COMMAND --help")


def _shown(key: str, value: object) -> str:
    return f"{key} = {str(value).lower() if isinstance(value, bool) else value}"


def _read_toml(folder: Path) -> tuple[str | None, Mapping[str, Any]]:
    for name in DEFAULTS_FILES:
        content = _read_text(folder / name, name) if (folder / name).exists() else None
        if content is None:
            continue
        try:
            document: Any = tomllib.loads(content)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{name}: not TOML: {error}", expected=_EXPECTED) from None
        for part in _TABLE.split(".") if name == PROJECT_FILE else ():
            document = document.get(part) if isinstance(document, dict) else None
        if isinstance(document, dict):
            return name, document
    return None, {}


def _read_text(path: Path, name: str) -> str | None:
    """Read a defaults file, and check its owner and permissions.

    Return None for a pyproject.toml without a gpubench table, whose owner and permissions are not checked.
    """
    try:
        with open_file(path, _EXPECTED, pipes=False) as file:
            # Check the owner of the file and, if the path is a symbolic link, of the link too.
            states, content = (os.fstat(file.fileno()), path.lstat()), file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name} of this folder cannot be read: {os.strerror(error.errno or 0)}") from None
    if name == PROJECT_FILE and _TABLE.encode() not in content:
        return None
    if len(content) > MOST_BYTES:
        raise UsageError(f"{name} has more than {MOST_BYTES // 2**20} MiB", expected=_EXPECTED)
    is_world_writable = states[0].st_mode & 0o002
    if is_world_writable or any(state.st_uid not in (0, os.geteuid()) for state in states):
        whose = "can be written by anyone" if is_world_writable else "another user owns or links to"
        raise UsageError(
            f"{name} of this folder is a file that {whose}",
            expected="a file that only you or root can change, because options name files to write and a library to "
            "load",
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text", expected=_EXPECTED) from None


@cache
def options_of_all_commands() -> Sequence[str]:
    """Return the option names of all commands. This imports every command."""
    apps = (import_module(f"gpubench.cli.commands.{command.module}").app(command) for command in COMMANDS)
    commands = (typer.main.get_command(app) for app in apps)
    return sorted({key for command in commands for key in _options_by_key(command.params)})


_SEVERAL = ("dtype", "op", "algo", "proto", "backend", "partner", "require-path")
"""Options that accept several values separated by commas."""


def complete_words(option: str, incomplete: str) -> list[str]:
    """Return the completions of a partial option value. After a comma, complete only the last word."""
    before, comma, last = incomplete.rpartition(",") if option in _SEVERAL else ("", "", incomplete)
    already = before.split(",")
    words = (word for word in _words(option, incomplete) if word.startswith(last) and word not in already)
    return [f"{before}{comma}{word}" for word in words]


def _words(option: str, incomplete: str) -> Iterable[str]:
    match option:
        case "format":
            return [known.name for known in FORMATS]
        case "color":
            return list(Color)
        case "exit-style":
            return list(ExitStyle)
        case "require-path":
            return list(RequiredPath)
        case "fault":
            from gpubench.model.profiles.fault import complete_fault

            return complete_fault(incomplete)
        case "simulate":
            return profile_names()
        case "profile":
            files = (path.stem for path in user_folder(os.environ).glob("*.toml"))
            return (*islice(files, MOST_FILES), *profile_names())
        case "against":
            from gpubench.readers.results.history import baseline_names

            return baseline_names(os.environ)
        case _:
            return _words_of_collectives(option)


def _words_of_collectives(option: str) -> Iterable[str]:
    from gpubench.jobs.collective.plan import BACKENDS
    from gpubench.model.terms.operation import Allocator, DataType, ReduceOp
    from gpubench.model.terms.overlap import Partner
    from gpubench.model.terms.settings import Algorithm, CtaPolicy, Protocol, Registration
    from gpubench.model.terms.statistics import Mode

    words: dict[str, Iterable[str]] = {
        "dtype": DataType,
        "op": ReduceOp,
        "algo": Algorithm,
        "proto": Protocol,
        "register": Registration,
        "cta-policy": CtaPolicy,
        "backend": BACKENDS,
        "mode": Mode,
        "allocator": Allocator,
        "partner": Partner,
    }
    return words[option]
