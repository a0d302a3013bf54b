"""Results that a user keeps under a name: `--save-baseline good`, then `gpubench compare --against good now.json`."""

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from gpubench.errors import UsageError

FOLDER_VARIABLE = "GPUBENCH_BASELINES"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_SUFFIX = ".json"
_MOST_NAMES = 1000
_MOST_SHOWN = 8


def baseline_folder(environment: Mapping[str, str]) -> Path:
    """The folder of a user's baselines; it need not exist. UsageError where nobody says where it would be."""
    named = environment.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    data, home = environment.get("XDG_DATA_HOME"), environment.get("HOME")
    if not data and not home:
        raise UsageError(
            "there is no HOME, in which baselines would be kept",
            expected=f"HOME, XDG_DATA_HOME or {FOLDER_VARIABLE}",
            next_step=f"{FOLDER_VARIABLE}=/var/lib/gpubench; a file elsewhere is --output FILE.json",
        )
    return (Path(data) if data else Path(home or "") / ".local" / "share") / "gpubench" / "baselines"


def baseline_path(name: str, environment: Mapping[str, str]) -> Path:
    """The file of a baseline, whether or not it exists; UsageError for what is no name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name of a baseline",
            expected="letters, digits, '.', '-' and '_', beginning with a letter or a digit",
            next_step="--save-baseline good; a file elsewhere is --output FILE.json",
        )
    return baseline_folder(environment) / f"{name}{_SUFFIX}"


def baseline_names(environment: Mapping[str, str]) -> list[str]:
    """The names of the baselines that there are."""
    try:
        folder = baseline_folder(environment)
    except UsageError:
        return []
    return sorted(path.stem for path in islice(folder.glob(f"*{_SUFFIX}"), _MOST_NAMES))


def find_baseline(name: str, environment: Mapping[str, str]) -> Path:
    """The file of a baseline that exists; UsageError with those that there are."""
    path = baseline_path(name, environment)
    if not path.is_file():
        known = baseline_names(environment)
        more = f" and {len(known) - _MOST_SHOWN} more" if len(known) > _MOST_SHOWN else ""
        raise UsageError(
            f"--against {name}: there is no such baseline",
            expected=f"one of {', '.join(known[:_MOST_SHOWN])}{more}"
            if known
            else "a baseline, of which there is none",
            reason=f"they are kept in {path.parent}",
            next_step=f"gpubench allreduce --save-baseline {name}, while all is well",
        )
    return path
