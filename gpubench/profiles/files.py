"""Find, read and match the files of `profiles/`: what a healthy machine of each kind looks like and reaches.

A user's own lie in the folder that GPUBENCH_PROFILES names, else in $XDG_CONFIG_HOME/gpubench/profiles, and come first.
"""

import contextlib
import difflib
import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from gpubench.errors import UsageError, advising
from gpubench.model.profiles.profile import Profile
from gpubench.model.profiles.rules import check_profile
from gpubench.model.terms.plain import from_plain
from gpubench.profiles import limits
from gpubench.profiles.lines import line_of, path_in

FOLDER_VARIABLE = "GPUBENCH_PROFILES"

_REASON, _ADVICE = (
    "the profile was written or edited by hand",
    "profiles/README.md has every key; gpubench profiles lint FILE",
)
"""Of errors in a profile that say no more than what is wrong."""

_LONG_KEY = re.compile(rf"(?m)^\s*\[*[\w-]+(?:\.[\w-]+){{{limits.MOST_DEPTH},}}")

_UNKNOWN_FIELD = re.compile(r"has an unknown field '(.*)'")

_PACKAGE = Path(__file__).parents[1]
_HASH_DIGITS = 12


def folder(package: Path = _PACKAGE) -> Path:
    """The folder of the profiles: beside the package in a checkout, inside it when installed from a wheel."""
    installed = package / "_profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def read_profile(data: bytes, where: str) -> Profile:
    """A profile from the bytes of its file; `where` names the file in messages.

    Raises UsageError for no TOML, an unknown key, a value of the wrong type, or one that cannot be right.
    """
    with advising(reason=_REASON, next_step=_ADVICE):
        try:
            text = data.decode()
            plain = _loaded(text)
        except ValueError as error:
            raise UsageError(f"{where} is no TOML: {error}", expected="a profile, in TOML") from None
        if "sha256" in plain:
            raise UsageError(f"{where} has an unknown field 'sha256'", reason="it is computed from the file")
        with _naming_the_line(text, where):
            profile = from_plain(Profile, plain, where)
            check_profile(profile, where)
    return replace(profile, sha256=hashlib.sha256(data).hexdigest()[:_HASH_DIGITS])


def _loaded(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError where it is none, or nests too deeply for who reads or walks through it."""
    too_deep = f"tables or arrays nested more than {limits.MOST_DEPTH} deep"
    if _LONG_KEY.search(text):
        raise ValueError(f"a key of more than {limits.MOST_DEPTH} parts")
    try:
        plain = tomllib.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level: list[dict[str, Any] | list[Any]] = [plain]
    depth = 0
    while level:
        depth += 1
        if depth > limits.MOST_DEPTH:
            raise ValueError(too_deep)
        level = [
            held
            for each in level
            for held in (each.values() if isinstance(each, dict) else each)
            if isinstance(held, (dict, list))
        ]
    return plain


@contextlib.contextmanager
def _naming_the_line(text: str, where: str) -> Iterator[None]:
    """Have errors that name a key of a file name its line too: 'mine.toml line 123: expected[4] (...).value is 0'."""
    try:
        yield
    except UsageError as error:
        words = error.seen.removeprefix(where)
        unknown = _UNKNOWN_FIELD.search(words)
        line = line_of(text, (*path_in(words), *(unknown.groups() if unknown else ())))
        if line is not None and words != error.seen:
            error.seen = f"{where} line {line}: {words.removeprefix('.').lstrip()}"
            error.args = (error.seen,)
        raise


def read_file(path: Path) -> Profile:
    """A profile of the user's own; UsageError where the file cannot be read, or is no profile."""
    try:
        data = _regular_bytes(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the profile {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            expected="the name of a profile, or the path of a file in TOML",
            reason="the path is mistyped, or its mode forbids it",
            next_step="gpubench profiles list shows the names",
        ) from error
    return read_profile(data, path.name)


def _regular_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises OSError, ValueError for what is no regular file, as a pipe that nobody writes, and for one that is too large.
    """
    # A pipe would wait for its writer, and a device may never end.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is a folder, pipe, socket or device, and no file")
        if about.st_size > limits.MOST_BYTES:
            size, most = about.st_size >> 10, limits.MOST_BYTES >> 10
            raise ValueError(f"it has {size} KiB, and {most} KiB are the most that is read")
        return os.read(file, limits.MOST_BYTES)
    finally:
        os.close(file)


def names() -> tuple[str, ...]:
    """The names of the profiles that come with gpubench."""
    return tuple(sorted(path.stem for path in folder().glob("*.toml")))


@cache
def load(name: str) -> Profile:
    """The profile of that name; UsageError where there is none; names that are near are suggested."""
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        raise UsageError(
            f"no profile is called {name!r}",
            expected=f"one of {', '.join(known)}",
            next_step=f"did you mean {' or '.join(near)}?" if near else "gpubench profiles list says what each is for",
        )
    return read_file(folder() / f"{name}.toml")


_NO_HOME = "/nonexistent"
"""Debian's home of those who have none: never the working directory, in which anybody may leave a profile."""


def own_folder(environment: Mapping[str, str]) -> Path:
    """The folder of a user's own profiles; it need not exist."""
    named = environment.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    home = environment.get("HOME") or _NO_HOME
    return Path(environment.get("XDG_CONFIG_HOME") or Path(home) / ".config") / "gpubench" / "profiles"


def own_profiles(environment: Mapping[str, str]) -> tuple[Profile, ...]:
    """A user's own profiles, by file name; UsageError where one of them is no profile, or there are too many."""
    folder_ = own_folder(environment)
    paths = list(islice(folder_.glob("*.toml"), limits.MOST_FILES + 1))
    if len(paths) > limits.MOST_FILES:
        raise UsageError(
            f"{folder_} has more than {limits.MOST_FILES} profiles",
            expected="a folder of your own profiles, a file a kind of machine",
            reason=f"{FOLDER_VARIABLE} names another folder",
            next_step=f"ls {folder_}",
        )
    return tuple(map(read_file, sorted(paths)))


def find(text: str, environment: Mapping[str, str]) -> Profile:
    """The profile that a user names: the path of a file, one of their own, or one that comes with gpubench.

    Raises UsageError where there is none, or it is broken.
    """
    if text.endswith(".toml") or "/" in text:
        return read_file(Path(text))
    own = own_folder(environment) / f"{text}.toml"
    return read_file(own) if own.is_file() else load(text)


def all_profiles() -> tuple[Profile, ...]:
    """Every profile that comes with gpubench, by name."""
    return tuple(load(name) for name in names())
