"""Child processes of gpubench: how to start a module of this package, and how a child ends with its parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_PARENT = Path(__file__).resolve().parents[2]  # The folder that the package `gpubench` is in


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this package; -P keeps a json.py in the current directory out."""
    return [sys.executable, "-P", "-m", module, *arguments]


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a child finds the package, also from a checkout that is not installed."""
    found_in = Path(sys.path[0]).resolve() if sys.path and sys.path[0] else Path.cwd()
    if found_in != _PARENT:
        return dict(environment)
    others = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (str(_PARENT), others)))}


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found here: after a fork, another thread may have had the lock of the loader


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone (`prctl(2)`, PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
