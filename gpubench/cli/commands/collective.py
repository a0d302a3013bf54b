"""The command of a collective, made from its record."""

import os
import sys
from typing import TYPE_CHECKING

import typer

from gpubench.cli.options.collective import CollectiveOptions
from gpubench.cli.signature import app_of
from gpubench.cli.table import Command
from gpubench.collectives.registry import collective_named
from gpubench.hardware.launch.started_by import launched_by

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

    def run_collective(options: CollectiveOptions) -> None:
        run(collective, options)

    return app_of(command, help_of(collective), CollectiveOptions, run_collective, without=without)


def run(collective: "Collective", options: CollectiveOptions) -> None:
    """Be the command: replay, simulate, launch ranks, or be one of them."""
    plan, arguments = options.plan(collective), sys.argv[1:]
    launch = launched_by(os.environ)
    if plan.recording.replay is not None:
        from gpubench.jobs.collective import replayed as collective_replay

        raise typer.Exit(collective_replay.run(plan, plan.recording.replay, arguments, launch))
    if plan.simulation is not None:
        from gpubench.jobs.collective import simulated

        raise typer.Exit(simulated.run(plan, plan.simulation, arguments, launch))
    if launch is None:
        from gpubench.jobs.collective import launch as alone

        raise typer.Exit(alone.run(plan, arguments))
    from gpubench.jobs.collective.rank_plan import run_as_rank

    raise typer.Exit(run_as_rank(plan, arguments, launch))


def help_of(collective: "Collective") -> str:
    """How a collective counts its size, and three commands to start from."""
    own = "--dtype bfloat16 --op sum,max" if collective.reduces else "--root 1" if collective.rooted else "--graph 10"
    return f"""{collective.description}

  gpubench {collective.name} --sizes 1K:4G

  gpubench {collective.name} {own} --output result.json

  mpirun -n 8 gpubench {collective.name} --format csv > result.csv
"""
