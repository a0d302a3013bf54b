"""The command line and the environment that start this program again: the same Python, the same package."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_PARENT = Path(__file__).resolve().parents[3]
"""The folder that the package `gpubench` is in."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this package.

    -P keeps Python from importing out of the current directory, as -m does without it: a json.py that lies there would
    be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which such a child finds the package.

    Where `python -m gpubench` found it in the current directory, in a checkout that is not installed, that folder comes
    first on PYTHONPATH.
    """
    found_in = Path(sys.path[0]).resolve() if sys.path and sys.path[0] else Path.cwd()
    if found_in != _PARENT:
        return dict(environment)
    others = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (str(_PARENT), others)))}
