"""Find, read, validate and match profiles. A user's own profiles (GPUBENCH_PROFILES or XDG folder) take precedence
over those of gpubench.
"""

import contextlib
import difflib
import hashlib
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import UsageError, add_advice
from gpubench.model.facts.snapshot import NvlinkPeer, find_display_cards, is_amd
from gpubench.model.paths.topology import Topology, is_gpu_link, leads_to_switches
from gpubench.model.profiles.profile import Generic, Profile, check_profile
from gpubench.model.terms.plain import from_plain, is_nested_deeper

MOST_BYTES = 2**18
"""Size of a profile in bytes. The largest profile of gpubench has 14 KB, and parsing nested arrays takes quadratic
time.
"""

MOST_DEPTH = 16
"""Nesting depth of tables and arrays, and components of a dotted key. Profiles have three levels."""

MOST_FILES = 1000
"""Number of profiles in a user's folder, which many commands read."""

KeyPath = tuple[str | int, ...]  # Keys and list positions that lead to a value, such as ('expected', 4, 'value')
_TABLE = re.compile(r"\s*(?P<open>\[\[?)\s*(?P<name>[\w.-]+)\s*\]\]?\s*(#.*)?", re.ASCII)
_KEY = re.compile(r"\s*(?P<name>[\w.-]+)\s*=", re.ASCII)
_STEP = re.compile(r"\.(?P<key>[\w-]+)|\[(?P<position>\d+)\](?: \([^)]*\))?", re.ASCII)


def parse_key_path(words: str) -> KeyPath:
    """Parse the key in an error message.

    '.expected[4] (p2p.write_gb_s).value is 0' becomes ('expected', 4, 'value').
    """
    steps: list[str | int] = []
    end = 0
    while found := _STEP.match(words, end):
        steps.append(int(found["position"]) if found["key"] is None else found["key"])
        end = found.end()
    return tuple(steps)


def find_line(text: str, path: Sequence[str | int]) -> int | None:
    """Return the line number of a key, counted from 1. If the key is absent, return the line of its innermost table."""
    lines = _lines(text)
    return next((lines[key] for end in range(len(path), 0, -1) if (key := tuple(path[:end])) in lines), None)


@lru_cache(maxsize=1)
def _lines(text: str) -> Mapping[KeyPath, int]:
    return dict(_stated(text))


def _stated(text: str) -> Iterator[tuple[KeyPath, int]]:
    table: KeyPath = ()
    counts = Counter[KeyPath]()
    within = ""
    for number, line in enumerate(text.splitlines(), 1):
        quotes = within or next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")
        was_within, within = within, "" if within and within in line else quotes
        if was_within:
            continue
        if header := _TABLE.fullmatch(line):
            table = tuple(header["name"].split("."))
            if header["open"] == "[[":
                name, table = table, (*table, counts[table])
                counts[name] += 1
            yield table, number
        elif key := _KEY.match(line):
            yield (*table, *key["name"].split(".")), number


FOLDER_VARIABLE = "GPUBENCH_PROFILES"

_LONG_KEY = re.compile(rf"(?m)^\s*\[*[\w-]+(?:\.[\w-]+){{{MOST_DEPTH},}}")


def folder(package: Path = Path(__file__).parent) -> Path:
    """Return the folder with gpubench's profiles. It is next to the package in a checkout, and inside it after
    installation.
    """
    installed = package / "_profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def read_profile(data: bytes, where: str) -> Profile:
    """Parse and validate a profile. `where` is its file name for error messages.

    Raises UsageError for invalid TOML, an unknown key, or an impossible value.
    """
    next_step = "docs/reference/profiles.md lists every key. Check with: gpubench profiles lint FILE"
    with add_advice(reason="the profile was written or edited by hand", next_step=next_step):
        try:
            text = data.decode()
            plain = _loaded(text)
        except ValueError as error:
            raise UsageError(f"{where} is not TOML: {error}", expected="a profile, in TOML") from None
        if "sha256" in plain:
            raise UsageError(f"{where} has an unknown field 'sha256'", reason="this value is computed from the file")
        with _naming_the_line(text, where):
            _check_finite(plain, where)
            profile = from_plain(Profile, plain, where)
            check_profile(profile, where)
    return replace(profile, sha256=hashlib.sha256(data).hexdigest()[:12])


def _loaded(text: str) -> dict[str, Any]:
    too_deep = f"tables or arrays nested more than {MOST_DEPTH} deep"
    if _LONG_KEY.search(text):
        raise ValueError(f"a key of more than {MOST_DEPTH} parts")
    try:
        plain = tomllib.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if is_nested_deeper(plain, MOST_DEPTH):
        raise ValueError(too_deep)
    return plain


def _check_finite(value: object, where: str) -> None:
    """Raise UsageError for `nan` and `inf`, because comparisons with them give misleading results."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}", expected="a finite number")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_finite(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            _check_finite(inner, f"{where}[{position}]")


@contextlib.contextmanager
def _naming_the_line(text: str, where: str) -> Iterator[None]:
    """Add the line number to errors about a key, as in 'mine.toml line 123: expected[4] (...).value is 0'."""
    try:
        yield
    except UsageError as error:
        words = error.seen.removeprefix(where)
        unknown = re.search(r"has an unknown field '(.*)'", words)
        line = find_line(text, (*parse_key_path(words), *(unknown.groups() if unknown else ())))
        if line is not None and words != error.seen:
            error.seen = f"{where} line {line}: {words.removeprefix('.').lstrip()}"
            error.args = (error.seen,)
        raise


def read_file(path: Path) -> Profile:
    """Read a profile from a file. Raises UsageError if the file cannot be read or is not a profile."""
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
    """Read a regular file. Raises OSError if reading fails, and ValueError for other kinds of files and for large
    files.
    """
    # Opening a pipe would block until something writes to it, and reading a device may never end.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is a folder, pipe, socket or device, not a file")
        if about.st_size > MOST_BYTES:
            size, most = about.st_size >> 10, MOST_BYTES >> 10
            raise ValueError(f"it has {size} KiB, but gpubench reads at most {most} KiB")
        return os.read(file, MOST_BYTES)
    finally:
        os.close(file)


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder().glob("*.toml")))


@cache
def load(name: str) -> Profile:
    """Return one of gpubench's profiles. Raises UsageError, with similar names, if there is none with this name."""
    known = profile_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        raise UsageError(
            f"no profile is called {name!r}",
            expected=f"one of {', '.join(known)}",
            next_step=f"did you mean {' or '.join(near)}?" if near else "gpubench profiles list describes each",
        )
    return read_file(folder() / f"{name}.toml")


def user_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for the user's own profiles, which may not exist."""
    named = environment.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    home = environment.get("HOME") or "/nonexistent"  # Never fall back to the working directory
    return Path(environment.get("XDG_CONFIG_HOME") or Path(home) / ".config") / "gpubench" / "profiles"


def user_profiles(environment: Mapping[str, str]) -> tuple[Profile, ...]:
    """Return the user's own profiles in the order of their file names.

    Raises UsageError if one of them is invalid, or if there are too many.
    """
    own_folder = user_folder(environment)
    paths = list(islice(own_folder.glob("*.toml"), MOST_FILES + 1))
    if len(paths) > MOST_FILES:
        raise UsageError(
            f"{own_folder} has more than {MOST_FILES} profiles",
            expected="a folder of your own profiles, with one file per kind of machine",
            reason=f"{FOLDER_VARIABLE} names another folder",
            next_step=f"ls {own_folder}",
        )
    return tuple(map(read_file, sorted(paths)))


def find(text: str, environment: Mapping[str, str]) -> Profile:
    """Find a profile by path, among the user's own profiles, or among gpubench's. Raises UsageError if there is
    none.
    """
    if text.endswith(".toml") or "/" in text:
        return read_file(Path(text))
    own = user_folder(environment) / f"{text}.toml"
    return read_file(own) if own.is_file() else load(text)


def all_profiles() -> tuple[Profile, ...]:
    """Return all of gpubench's profiles, sorted by name."""
    return tuple(load(name) for name in profile_names())


def _profiles_containing(words: Iterable[str]) -> Iterator[Profile]:
    """Yield gpubench's profiles whose files contain all these words.

    This avoids parsing every file, which would take a third of the run time of `topo`.
    """
    return (load(name) for name, text in _texts().items() if all(word in text for word in words))


@cache
def _texts() -> Mapping[str, str]:
    return {name: (folder() / f"{name}.toml").read_text(encoding="utf-8") for name in profile_names()}


class ProfileMatch(Struct, frozen=True):
    """The profile that matches a machine. `note` explains the match if the machine has only a part of the board."""

    profile: Profile
    note: str = ""

    def __str__(self) -> str:
        return f"{self.profile.name} ({self.note})" if self.note else self.profile.name


def match_machine(
    gpu_names: Sequence[str], count: int, *, switched: bool | None, joined: bool, own: Sequence[Profile] = ()
) -> ProfileMatch | None:
    """Match a machine as `match_whole_machine` does: first with the user's own profiles, then with gpubench's.

    If nothing matches, return a generic profile. `joined` is True if NVLinks connect the GPUs. Return None without
    GPUs, and for AMD GPUs that match nothing, because the generic profiles describe NVIDIA's.
    """
    found = match_whole_machine(gpu_names, count, switched=switched, among=own) or match_whole_machine(
        gpu_names, count, switched=switched
    )
    bare = found is not None and count > 1 and not joined and found.profile.nvlink is not None and _has_bridges(found)
    if not count or any(map(is_amd, gpu_names)) or (found is not None and not bare):
        return found
    generic = Generic.NVLINK if joined else Generic.PCIE
    note = "" if found is None else f"without the NVLink bridges of {found.profile.name}"
    return next(
        (
            ProfileMatch(profile, note)
            for profile in _profiles_containing(["generic", generic])
            if profile.match.generic is generic
        ),
        None,
    )


def _has_bridges(found: ProfileMatch) -> bool:
    """True if the profile's NVLink bridges join cards in pairs. Healthy machines may have the same cards without
    bridges.
    """
    nvlink = found.profile.nvlink
    joined = [gpu for pair in nvlink.pairs for gpu in pair[:2]] if nvlink is not None else []
    return len(joined) == len(set(joined)) > 0


def match_whole_machine(
    gpu_names: Sequence[str], count: int, *, switched: bool | None = None, among: Sequence[Profile] | None = None
) -> ProfileMatch | None:
    """Return the profile for a machine with `count` visible GPUs and these NVML names, or None.

    Search only `among`, or all of gpubench's profiles if it is None. Prefer a profile with exactly this number of GPUs.
    Otherwise, match a part of the next larger machine. Machines with several GPU models match nothing, and profiles for
    NVLink domains match no single node.

    `switched` is True if the GPUs' NVLinks lead to NVSwitches, and None if unknown. It prevents four GPUs with direct
    NVLinks from matching a part of a board with NVSwitches.
    """
    models = set(gpu_names)
    fitting = [
        profile
        for profile in (_profiles_containing(models) if among is None and models else among or ())
        if profile.match.generic is None
        and profile.domain is None
        and profile.match.covers(models)
        and 1 <= count <= profile.match.visible
        and (switched is None or _is_switched(profile) in (None, switched))
    ]
    if not models or not fitting:
        return None
    whole = min(fitting, key=lambda profile: profile.match.visible)
    return ProfileMatch(whole.first_gpus(count), _part_of_board(whole, count))


def _part_of_board(profile: Profile, count: int) -> str:
    """Return a note such as '3 of 8 GPUs: a slice of the board'.

    It is empty for a whole board, and for cards in slots, which have no common board.
    """
    board, has_switches = profile.match.board, _is_switched(profile) is True
    if count == 1 and profile.nvlink is not None and not has_switches and profile.match.board_gpus is None:
        return "one GPU of it"
    has_board = profile.match.board_gpus is not None or has_switches
    return f"{count} of {board} GPUs: a slice of the board" if has_board and count < board else ""


def find_domain(gpu_names: Sequence[str], among: Sequence[Profile] = ()) -> Profile | None:
    """Return a profile for a multi-node NVLink domain with these GPUs. Search `among` before gpubench's profiles."""
    models = set(gpu_names)
    ours = _profiles_containing([*models, "domain"])
    found = (profile for profile in chain(among, ours) if profile.domain and profile.match.covers(models))
    return next(found, None) if models else None


def _is_switched(profile: Profile) -> bool | None:
    """True if the profile's NVLinks lead to NVSwitches. None if it has no NVLinks."""
    return None if profile.nvlink is None else profile.nvlink.to is NvlinkPeer.SWITCH


def match_node(node: Topology, environment: Mapping[str, str], asked: str | None = None) -> ProfileMatch | None:
    """Return the profile that a node is compared with. Without GPUs and without `asked`, return None.

    `asked` is the profile that the user requested. Raises UsageError if it does not exist, or if it or one of the
    user's own profiles is invalid.
    """
    return match_nodes([node], environment, asked)[0]


def match_nodes(
    nodes: Sequence[Topology], environment: Mapping[str, str], asked: str | None = None
) -> list[ProfileMatch | None]:
    """Match every node as `match_node` does. Nodes with equal GPUs are matched only once."""
    if asked is not None:
        profile = find(asked, environment)
        return [ProfileMatch(profile)] * len(nodes)
    own = user_profiles(environment)
    traits = [_traits(node) for node in nodes]
    known = {
        trait: match_machine(trait.models, trait.gpus, switched=trait.switched, joined=trait.joined, own=own)
        for trait in dict.fromkeys(traits)
    }
    return [known[trait] for trait in traits]


def find_node_profiles(nodes: Sequence[Topology], environment: Mapping[str, str]) -> list[Profile | None]:
    """Return the matching profile for every node, or None. Raises UsageError in the same cases as `match_node`."""
    return [None if found is None else found.profile for found in match_nodes(nodes, environment)]


def find_gpu_profile(
    models: Sequence[str], count: int, node: Topology | None, environment: Mapping[str, str], asked: str | None
) -> Profile | None:
    """Return the profile for `count` GPUs, which may be fewer than the node has.

    Raises UsageError in the same cases as `match_node`.
    """
    if asked is not None:
        return find(asked, environment)
    switched = None if node is None else leads_to_switches(node.gpus)
    joined = node is None or _traits(node).joined
    found = match_machine(models, count, switched=switched, joined=joined, own=user_profiles(environment))
    return None if found is None else found.profile


class _Traits(NamedTuple):
    models: tuple[str, ...]
    gpus: int
    switched: bool | None
    joined: bool


def _traits(node: Topology) -> _Traits:
    computing = [gpu for gpu in node.gpus if gpu not in find_display_cards(node.gpus)]
    return _Traits(
        models=tuple(sorted({gpu.name for gpu in computing if gpu.name})),
        gpus=len(computing),
        switched=leads_to_switches(node.gpus),
        joined=any(link.active for gpu in node.gpus for link in gpu.nvlinks or ())
        or any(map(is_gpu_link, node.gpu_paths)),
    )
