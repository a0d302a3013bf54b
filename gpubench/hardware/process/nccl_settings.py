"""NCCL's variables as NCCL will see them: those of the environment, then those of its configuration files."""

import errno
import os
import pwd
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpubench.hardware.system_files import UnknownFields, below, printable, text_of

DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS = "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"

NODE_VARIABLE = "NCCL_HOSTID"
"""What NCCL takes for the host of a process, instead of asking the system."""

_CONF_FILE = "NCCL_CONF_FILE"
_SYSTEM_CONF = Path("/etc/nccl.conf")
_OF_HOME = "~/.nccl.conf"

REFUSALS = {"NCCL_SHM_DISABLE": "1", "NCCL_NET_DISABLE_INTRA": "1"}
"""With these, NCCL has no way left inside a node but the direct one, and fails instead of going through host memory
(src/transport.cc tries P2P, SHM and NET in turn, and each asks its variable)."""


def nccl_settings(environment: Mapping[str, str], files: Sequence[Path] | None = None) -> dict[str, str]:
    """Variables by name. `files` are the configuration files in NCCL's order, by default those that NCCL reads.

    What is set first counts: NCCL never overwrites a variable that is there.
    """
    found = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    for path in configuration_files(environment) if files is None else files:
        for line in (text_of(path) or "").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name, value)
    return found


def configuration_files(environment: Mapping[str, str], user: int | None = None) -> tuple[Path, ...]:
    """The file that NCCL_CONF_FILE names, else ~/.nccl.conf of the user as the system knows him; then the system's.

    `user` is a process's, by default this one's.
    """
    named = environment.get(_CONF_FILE)
    if named:
        return Path(named), _SYSTEM_CONF
    try:
        home = pwd.getpwuid(os.getuid() if user is None else user).pw_dir
    except KeyError:
        return (_SYSTEM_CONF,)
    return Path(home) / ".nccl.conf", _SYSTEM_CONF


def read_nccl_files(
    environment: Mapping[str, str], root: Path, user: int | None = None
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The NCCL_ variables of each file that is there, in NCCL's order, and why one that is there cannot be read.

    What the environment sets counts before any file, and an earlier file before a later one.
    """
    found, unknown = {}, {}
    for path in configuration_files(environment, user):
        name = _OF_HOME if path.name == ".nccl.conf" and str(path) != environment.get("NCCL_CONF_FILE") else str(path)
        place = below(root, path)
        try:
            place.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                unknown[f"nccl_files.{printable(name)}"] = str(error.strerror)
            continue
        reader = UnknownFields()
        if reader.text("file", place) is None and not reader.reasons["file"].endswith("is empty"):
            unknown[f"nccl_files.{printable(name)}"] = reader.reasons["file"]
            continue
        settings = nccl_settings({}, [place])
        found[printable(name)] = {
            printable(key): printable(value) for key, value in settings.items() if key.startswith("NCCL_")
        }
    return found, unknown


def effective(environment: Mapping[str, str], files: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """NCCL's variables as it will see them."""
    merged: dict[str, str] = {}
    for settings in (environment, *files.values()):
        merged = {name: value for name, value in settings.items() if name.startswith("NCCL_")} | merged
    return merged


@contextmanager
def environment_set(variables: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Have these variables in the environment while a communicator is made, which reads some of them anew each time.

    NCCL_ALGO and NCCL_PROTO are of that kind: three communicators of one process took three algorithms (NCCL 2.28.9 on
    H200s). NCCL_P2P_DISABLE and most others are read once a process.
    """
    before = {name: environment.get(name) for name in variables}
    environment.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value


def refusals(settings: Mapping[str, str]) -> dict[str, str]:
    """The variables that make NCCL refuse to fall back, without those that the user has set."""
    return {name: value for name, value in REFUSALS.items() if name not in settings}
