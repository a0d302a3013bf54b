"""`python -m gpubench`: the command line, or what mpirun launches, one process a rank."""

import os

from gpubench.cli.process import exit_with
from gpubench.model.facts.environment import CHANNEL_VARIABLE, LaunchedBy


def run(launch: LaunchedBy | None) -> int:
    """Be a rank that gpubench launched, which has its plan and needs no typer, or read the command line."""
    channel = os.environ.get(CHANNEL_VARIABLE)
    if channel and launch is not None:
        from gpubench.jobs.collective.job import run_launched

        return run_launched(channel, launch)
    from gpubench.cli.app import run_command_line

    return run_command_line(launch)


if __name__ == "__main__":
    exit_with(run)
