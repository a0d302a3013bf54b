"""The file that has defaults of options: gpubench.toml of the current folder, or a table of its pyproject.toml."""

import difflib
import os
import tomllib
from collections.abc import Container, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from gpubench.cli.option_names import options_of
from gpubench.cli.process import DEFAULTS_FILES, PROJECT_FILE
from gpubench.cli.table import COMMANDS
from gpubench.errors import UsageError, advising
from gpubench.model.facts.launched_by import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ
from gpubench.readers.documents.opened import opened

MOST_BYTES = 2**20
_TABLE = "tool.gpubench"
_EXPECTED = "TOML with options, as timeout = 60, and a table for those of one command, as [check]"
_WITHOUT_COMMANDS = ("profiles",)
"""Its subcommands write no reports, and their --output is a profile."""


def values_of_file(
    command: str, folder: Path, options: Container[str]
) -> tuple[str | None, dict[str, tuple[Any, str]]]:
    """The file of a folder that has defaults, None where none has; and by option, `expect-gpus`, its value and where.

    Raises UsageError where it cannot be read, may be anybody's, or names an option that there is not.
    """
    with advising(next_step=f"{DEFAULTS_VARIABLE}={NO_DEFAULTS_TO_READ} runs without it"):
        file, document = _document(folder)
    if file is None:
        return None, {}
    shared = {_key(key): value for key, value in document.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    names = [each.name for each in COMMANDS if each.name not in _WITHOUT_COMMANDS]
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
    """The name of the first file of the folder that says something of gpubench, and what it says."""
    for name in DEFAULTS_FILES:
        content = _content(folder / name, name) if (folder / name).exists() else None
        if content is None or (name == PROJECT_FILE and _TABLE not in content):
            continue
        try:
            document: Any = tomllib.loads(content)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{name}: no TOML: {error}", expected=_EXPECTED) from None
        for part in _TABLE.split(".") if name == PROJECT_FILE else ():
            document = document.get(part) if isinstance(document, dict) else None
        if isinstance(document, dict):
            return name, document
    return None, {}


def _content(path: Path, name: str) -> str | None:
    """The text of a file; None of a project's that says nothing of gpubench, whosever it is."""
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
        whose = "anybody may write" if is_anybodys else "another user owns, or links to"
        raise UsageError(
            f"{name} of this folder is a file that {whose}",
            expected="one of your own, or root's: options name files to write, and a library to load",
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name} is no text in UTF-8", expected=_EXPECTED) from None


def options_of_all_commands() -> list[str]:
    """The names of all options, which takes an import of every command."""
    apps = (import_module(f"gpubench.cli.commands.{each.module}").app(each) for each in COMMANDS)
    commands = (typer.main.get_command(app) for app in apps)
    return sorted({key for each in commands for key in options_of(each.params)})


def _check(word: str, known: Iterable[str], seen: str, expected: str) -> None:
    if word not in (words := list(known)):
        nearest = difflib.get_close_matches(word, words, n=1)
        raise UsageError(seen, expected=expected, next_step=nearest[0] if nearest else "gpubench COMMAND --help")


def _key(key: str) -> str:
    return key.replace("_", "-")


def _shown(key: str, value: object) -> str:
    return f"{key} = {str(value).lower() if isinstance(value, bool) else value}"
