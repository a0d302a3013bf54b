"""NCCL's configuration files one by one, so that a setting can be traced to the file that holds it."""

import errno
from collections.abc import Mapping
from pathlib import Path

from gpubench.hardware.process.nccl_settings import configuration_files, nccl_settings
from gpubench.hardware.system_files import UnknownFields, below, printable

_PREFIX = "NCCL_"
_OF_HOME = "~/.nccl.conf"


def read_nccl_files(environment: Mapping[str, str], root: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The NCCL_ variables of each file that is there, in NCCL's order, and why one that is there cannot be read.

    What the environment sets counts before any file, and an earlier file before a later one.
    """
    found, unknown = {}, {}
    for path in configuration_files(environment):
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
            printable(key): printable(value) for key, value in settings.items() if key.startswith(_PREFIX)
        }
    return found, unknown


def effective(environment: Mapping[str, str], files: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """NCCL's variables as it will see them."""
    merged: dict[str, str] = {}
    for settings in (environment, *files.values()):
        merged = {name: value for name, value in settings.items() if name.startswith(_PREFIX)} | merged
    return merged
