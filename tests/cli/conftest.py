"""The program as a process makes it: once."""

from functools import cache
from typing import Any

import typer.main
import typer.testing

from gpubench.cli.app import app

_command_of = typer.main.get_command
_program = cache(_command_of)


def _known_command_of(given: typer.Typer) -> Any:
    """Each run of the program in this process would make its group of commands anew: a quarter of a short run."""
    return _program(given) if given is app else _command_of(given)


vars(typer.main).update(get_command=_known_command_of)
vars(typer.testing).update(_get_command=_known_command_of)
