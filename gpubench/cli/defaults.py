"""Option defaults from the environment and from files, and words for shell completion."""

import difflib
import os
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import typer

from gpubench.cli.process import COMMANDS, DEFAULTS_FILES, PREFIX, PROJECT_FILE
from gpubench.errors import GpubenchError, UsageError, add_advice
from gpubench.formats.presentation import Color, ExitStyle
from gpubench.formats.registry import FORMATS
from gpubench.model.facts.environment import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ
from gpubench.profiles import MOST_FILES, profile_names, user_folder
from gpubench.readers.documents import opened


def _options_of(parameters: Iterable[Any]) -> dict[str, Any]:
    """Return typer's option parameters by name (`expect-gpus`), without --help."""
    named = (
        (next((name for name in parameter.opts if name.startswith("--")), ""), parameter) for parameter in parameters
    )
    return {name.removeprefix("--"): each for name, each in named if name and each.expose_value}


def variable_of(key: str) -> str:
    """Return the environment variable of an option: GPUBENCH_EXPECT_GPUS for `expect-gpus`."""
    return PREFIX + key.upper().replace("-", "_")


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SHORTEST_VALUE_TO_FIND = 3

Value = str | bool | tuple[str, ...]


class Default(NamedTuple):
    """The default of an option, `--timeout`, from a variable or a file; `source` names it with the value."""

    option: str
    value: Value
    source: str


class Defaults(NamedTuple):
    """Defaults by parameter name, and the file that was read (None without a file)."""

    by_name: Mapping[str, Default]
    file: str | None = None

    @property
    def sources(self) -> dict[str, str]:
        """The source of each value: {'--timeout': 'GPUBENCH_TIMEOUT=60'}."""
        return {each.option: each.source for each in self.by_name.values()}

    def used_by(self, context: Any) -> "Defaults":
        """Drop the defaults that the command line replaces, as click's context knows them."""
        by_name = {
            name: each
            for name, each in self.by_name.items()
            if getattr(context.get_parameter_source(name), "name", "") == "DEFAULT_MAP"
        }
        return self._replace(by_name=by_name)

    def explain(self, error: GpubenchError) -> None:
        """Add the source of a default to an error about its option."""
        said = "\n".join(error.lines())
        for each in self.by_name.values():
            named = re.search(rf"(?<![\w-]){each.option}(?![\w-])", said)
            if named or (isinstance(error, UsageError) and _names_value(error.seen, each.value)):
                error.details = (*error.details, set_by(each.source))


NO_DEFAULTS = Defaults({})


def set_by(source: str) -> str:
    """Return the error line that names the source of a value."""
    return f"  set by:   {source}"


def defaults_of(command: str, parameters: Iterable[Any], environment: Mapping[str, str] = os.environ) -> Defaults:
    """Return the defaults of a command's options; the environment outranks the file.

    Raises UsageError for a file that cannot be read, an option that no command has, or a value that is none.
    """
    if not _are_read(environment):
        return NO_DEFAULTS
    options = _options_of(parameters)
    file, values = _read_file_defaults(command, Path(), options)
    found = {}
    for key, option in options.items():
        variable = variable_of(key)
        if environment.get(variable):
            source = f"{variable}={environment[variable]}"
            found[option.name] = Default(f"--{key}", _value_of_text(option, environment[variable], source), source)
        elif key in values:
            value, source = values[key]
            found[option.name] = Default(f"--{key}", _value_of_toml(option, value, source), source)
    return Defaults(found, file)


def asked_by_default(key: str, command: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the default of one option, to report an error about the others; None if it cannot be read either."""
    try:
        if not _are_read(environment):
            return None
        values = _read_file_defaults(command, Path(), {key: None})[1] if not environment.get(variable_of(key)) else {}
        return environment.get(variable_of(key)) or str(values[key][0])
    except (UsageError, KeyError):
        return None


def _are_read(environment: Mapping[str, str]) -> bool:
    switch = environment.get(DEFAULTS_VARIABLE) or ""
    if switch not in ("", NO_DEFAULTS_TO_READ):
        raise UsageError(f"{DEFAULTS_VARIABLE}={switch}", expected=f"{NO_DEFAULTS_TO_READ}, or no such variable")
    return not switch


def _read_file_defaults(
    command: str, folder: Path, options: Mapping[str, Any]
) -> tuple[str | None, Mapping[str, tuple[Any, str]]]:
    if not any((folder / name).exists() for name in DEFAULTS_FILES):
        return None, {}

    return _values_of_file(command, folder, options)


def _value_of_text(option: Any, text: str, source: str) -> Value:
    if not option.is_flag:
        return (text,) if option.multiple else text
    if text.lower() not in _WORDS:
        raise UsageError(f"{source} is not yes or no", expected="1, true, yes or on; or 0, false, no or off")
    return _WORDS[text.lower()]


def _value_of_toml(option: Any, value: Any, source: str) -> Value:
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{source} is not true or false", expected="true or false, without quotes")
        return value
    several = value if isinstance(value, list) and option.multiple else [value]
    if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in several):
        also = ", or several: [..., ...]" if option.multiple else ""
        raise UsageError(f"{source} is not a value of an option", expected=f"a text in quotes, or a number{also}")
    texts = tuple(map(str, several))
    return texts if option.multiple else texts[0]


def _names_value(seen: str, value: Value) -> bool:
    texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
    return any(repr(text) in seen or (len(text) >= _SHORTEST_VALUE_TO_FIND and _has_word(seen, text)) for text in texts)


def _has_word(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


MOST_BYTES = 2**20
_TABLE = "tool.gpubench"
_EXPECTED = "TOML with options, as timeout = 60, and a table for those of one command, as [check]"


def _values_of_file(
    command: str, folder: Path, options: Container[str]
) -> tuple[str | None, dict[str, tuple[Any, str]]]:
    """Return the defaults file of a folder (None without one), and each option's value and place in it."""
    with add_advice(next_step=f"{DEFAULTS_VARIABLE}={NO_DEFAULTS_TO_READ}, to ignore the file"):
        file, document = _document(folder)
    if file is None:
        return None, {}
    shared = {_key(key): value for key, value in document.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    names = [each.name for each in COMMANDS if each.writes_reports]
    for table in tables:
        _check(table, names, f"{file}: no command with options is called {table}", f"one of {', '.join(names)}")
    unknown = [key for key in shared if key not in options]
    everywhere = options_of_all_commands() if unknown else []
    for key in unknown:
        _check(key, everywhere, f"{file}: no command has an option {key}", "an option, as --help lists them")
    own = {_key(key): value for key, value in tables.get(command, {}).items()}
    for key in own:
        known = [each for each in options_of_all_commands() if each in options] if key not in options else [key]
        _check(key, known, f"{file}, [{command}]: no option {key}", f"an option of gpubench {command}")
    values = {key: (value, f"{_shown(key, value)} in {file}") for key, value in shared.items() if key in options}
    return file, values | {key: (value, f"{_shown(key, value)} in {file}, [{command}]") for key, value in own.items()}


def _document(folder: Path) -> tuple[str | None, Mapping[str, Any]]:
    for name in DEFAULTS_FILES:
        content = _content(folder / name, name) if (folder / name).exists() else None
        if content is None or (name == PROJECT_FILE and _TABLE not in content):
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


def _content(path: Path, name: str) -> str | None:
    """Read a defaults file; None for a pyproject.toml without a gpubench table, whoever owns it."""
    try:
        with opened(path, _EXPECTED, pipes=False) as file:
            own, content = (os.fstat(file.fileno()), path.lstat()), file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name} of this folder cannot be read: {os.strerror(error.errno or 0)}") from None
    if name == PROJECT_FILE and _TABLE.encode() not in content:
        return None
    if len(content) > MOST_BYTES:
        raise UsageError(f"{name} has more than {MOST_BYTES // 2**20} MiB", expected=_EXPECTED)
    is_anybodys = own[0].st_mode & 0o002
    if is_anybodys or any(each.st_uid not in (0, os.geteuid()) for each in own):  # the file, and what leads to it
        whose = "anyone may write" if is_anybodys else "another user owns, or links to"
        raise UsageError(
            f"{name} of this folder is a file that {whose}",
            expected="a file of yours, or root's: options name files to write, and a library to load",
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text", expected=_EXPECTED) from None


@cache
def options_of_all_commands() -> Sequence[str]:
    """Return the names of all options. This imports every command."""
    apps = (import_module(f"gpubench.cli.commands.{command.module}").app(command) for command in COMMANDS)
    commands = (typer.main.get_command(app) for app in apps)
    return sorted({key for command in commands for key in _options_of(command.params)})


def _check(key: str, known: Iterable[str], seen: str, expected: str) -> None:
    if key not in (words := list(known)):
        nearest = difflib.get_close_matches(key, words, n=1)
        raise UsageError(seen, expected=expected, next_step=nearest[0] if nearest else "gpubench COMMAND --help")


def _key(key: str) -> str:
    return key.replace("_", "-")


def _shown(key: str, value: object) -> str:
    return f"{key} = {str(value).lower() if isinstance(value, bool) else value}"


_SEVERAL = ("dtype", "op", "algo", "proto", "backend", "partner")
"""Options that take several words with commas between."""


def words_for(option: str, incomplete: str) -> list[str]:
    """Return the values of an option that complete the text, or its part after the last comma."""
    before, comma, last = incomplete.rpartition(",") if option in _SEVERAL else ("", "", incomplete)
    already = before.split(",")
    words = (each for each in _words(option, incomplete) if each.startswith(last) and each not in already)
    return [f"{before}{comma}{word}" for word in words]


def _words(option: str, incomplete: str) -> Iterable[str]:
    if option == "fault":
        from gpubench.model.profiles.fault import complete_fault

        return complete_fault(incomplete)
    if option == "simulate":
        return profile_names()
    if option == "profile":
        own = (path.stem for path in user_folder(os.environ).glob("*.toml"))
        return (*islice(own, MOST_FILES), *profile_names())
    if option == "against":
        from gpubench.readers.results.history import baseline_names

        return baseline_names(os.environ)
    of_every_command: dict[str, Iterable[str]] = {
        "format": [each.name for each in FORMATS],
        "color": Color,
        "exit-style": ExitStyle,
    }
    return of_every_command.get(option) or _collectives_with_option(option)


def _collectives_with_option(option: str) -> Sequence[str]:
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
    return tuple(words[option])
