"""Commands as a process makes them: once."""

from functools import cache

import typer.main
import typer.testing

# Each run of the program in this process would make its group of commands anew, which takes a quarter of a short one.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)
