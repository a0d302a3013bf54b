"""Defaults of options: GPUBENCH_TIMEOUT=60 in the environment, `timeout = 60` in gpubench.toml or pyproject.toml."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpubench.cli.option_names import options_of, variable_of
from gpubench.cli.process import DEFAULTS_FILES
from gpubench.errors import GpubenchError, UsageError
from gpubench.model.facts.launched_by import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SHORTEST_VALUE_TO_FIND = 3

Value = str | bool | tuple[str, ...]


class Default(NamedTuple):
    """The value of an option, `--timeout`, that nobody gave on the command line; `source` says where it stands."""

    option: str
    value: Value
    source: str


class Defaults(NamedTuple):
    """Defaults by the names of parameters, and the file that was read, None where there is none."""

    by_name: Mapping[str, Default]
    file: str | None = None

    @property
    def sources(self) -> dict[str, str]:
        """Where each option has its value from: {'--timeout': 'GPUBENCH_TIMEOUT=60'}."""
        return {each.option: each.source for each in self.by_name.values()}

    def explain(self, error: GpubenchError) -> None:
        """Have an error about an option that has its value from here say so."""
        said = "\n".join(error.lines())
        for each in self.by_name.values():
            named = re.search(rf"(?<![\w-]){each.option}(?![\w-])", said)
            if named or (isinstance(error, UsageError) and _names_value(error.seen, each.value)):
                error.details = (*error.details, set_by(each.source))


NO_DEFAULTS = Defaults({})


def set_by(source: str) -> str:
    """The line of an error that says where a value stands."""
    return f"  set by:   {source}"


def defaults_of(
    command: str, parameters: Iterable[Any], environment: Mapping[str, str] = os.environ, folder: Path | None = None
) -> Defaults:
    """The defaults of a command's options; the environment comes before the file.

    Raises UsageError for a file that cannot be read, an option that no command has, or a value that is none.
    """
    if not _are_read(environment):
        return NO_DEFAULTS
    options = options_of(parameters)
    file, values = _of_file(command, folder or Path(), options)
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
    """The text of one option, for whoever tells that the others cannot be read; None also where this one cannot."""
    try:
        if not _are_read(environment):
            return None
        values = _of_file(command, Path(), {key: None})[1] if not environment.get(variable_of(key)) else {}
        return environment.get(variable_of(key)) or str(values[key][0])
    except (UsageError, KeyError):
        return None


def _are_read(environment: Mapping[str, str]) -> bool:
    switch = environment.get(DEFAULTS_VARIABLE) or ""
    if switch not in ("", NO_DEFAULTS_TO_READ):
        raise UsageError(f"{DEFAULTS_VARIABLE}={switch}", expected=f"{NO_DEFAULTS_TO_READ}, or no such variable")
    return not switch


def _of_file(
    command: str, folder: Path, options: Mapping[str, Any]
) -> tuple[str | None, Mapping[str, tuple[Any, str]]]:
    """The file that was read, and its values for these options, each with where it stands."""
    if not any((folder / name).exists() for name in DEFAULTS_FILES):
        return None, {}
    from gpubench.cli.defaults_file import values_of_file

    return values_of_file(command, folder, options)


def _value_of_text(option: Any, text: str, source: str) -> Value:
    if not option.is_flag:
        return (text,) if option.multiple else text
    if text.lower() not in _WORDS:
        raise UsageError(f"{source} is neither yes nor no", expected="1, true, yes or on; or 0, false, no or off")
    return _WORDS[text.lower()]


def _value_of_toml(option: Any, value: Any, source: str) -> Value:
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{source} is neither true nor false", expected="true or false, without quotes")
        return value
    several = value if isinstance(value, list) and option.multiple else [value]
    if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in several):
        also = ", or several: [..., ...]" if option.multiple else ""
        raise UsageError(f"{source} is no value of an option", expected=f"a text in quotes, or a number{also}")
    texts = tuple(map(str, several))
    return texts if option.multiple else texts[0]


def _names_value(seen: str, value: Value) -> bool:
    texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
    return any(repr(each) in seen or (len(each) >= _SHORTEST_VALUE_TO_FIND and _has_word(seen, each)) for each in texts)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
