"""Start modules of this package as child processes that end together with their parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_IMPORT_FOLDER = Path(__file__).resolve().parents[2]  # The directory that contains the package `gpubench`


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this package."""
    # Without -P, Python would import a json.py from the current directory.
    return [sys.executable, "-P", "-m", module, *arguments]


def package_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a child process can import this package, even from a checkout that is not
    installed.
    """
    first_folder = Path(sys.path[0]).resolve() if sys.path and sys.path[0] else Path.cwd()
    if first_folder != _IMPORT_FOLDER:
        return dict(environment)
    folders = (str(_IMPORT_FOLDER), environment.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Resolve the symbol before any fork, because another thread may hold the dynamic loader's lock during a fork.
_prctl = ctypes.CDLL(None).prctl


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (`prctl(2)`, PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def set_subreaper() -> None:
    """Have the kernel make orphaned descendants children of this process (`prctl(2)`, PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
