"""The command of a collective, made from its record."""

import sys
from typing import TYPE_CHECKING

import typer

from gpubench.cli.options.collective import CollectiveOptions
from gpubench.cli.signature import typer_app
from gpubench.cli.table import Command
from gpubench.collectives.registry import collective_named

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective


def app(command: Command) -> typer.Typer:
    """The command for typer, with the options that mean something for this collective."""
    collective = collective_named(command.name)
    means_something = {
        "op": collective.reduces,
        "root": collective.rooted,
        "algo": not collective.point_to_point,
        "proto": not collective.point_to_point,
        "hierarchical": collective.decomposes,
    }
    without = {option for option, has_meaning in means_something.items() if not has_meaning}

    def run(options: CollectiveOptions) -> int:
        from gpubench.jobs.collective import job

        return job.run(options.plan(collective), sys.argv[1:])

    return typer_app(command, help_of(collective), CollectiveOptions, run, without=without)


def help_of(collective: "Collective") -> str:
    """The help of a collective: its size, and three commands to start from."""
    own = "--dtype bfloat16 --op sum,max" if collective.reduces else "--root 1" if collective.rooted else "--graph 10"
    return f"""{collective.description}

  gpubench {collective.name} --sizes 1K:4G

  gpubench {collective.name} {own} --output result.json

  mpirun -n 8 gpubench {collective.name} --format csv > result.csv
"""
