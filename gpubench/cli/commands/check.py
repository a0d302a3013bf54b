"""`gpubench check`: its options, and the run."""

import os
import sys
from typing import Annotated, Any

import typer

from gpubench.cli.options import presentation, recording, simulation
from gpubench.cli.options.presentation import parse_presentation
from gpubench.cli.options.recording import parse_recording
from gpubench.cli.options.simulation import parse_simulation
from gpubench.errors import exclusive
from gpubench.jobs.check.plan import DEFAULT_TIMEOUT_S, FACTS_TIMEOUT_S, CheckPlan, Depth
from gpubench.jobs.sources import source_of

SUMMARY = "Is this machine healthy? Facts and measurements against its profile and its siblings."
HELP = f"""{SUMMARY}

Finds the profile of the machine, reads its facts, measures copies between all GPUs and with host memory and all-reduce
at three sizes, and says what is wrong, on what, and what to do. Every GPU and link is judged against the profile and
against its siblings. What could not be measured is ERROR: neither healthy nor faulty. Exit 0 healthy (warnings
included), 1 something fails, 3 not measured.

Under mpirun, with one rank a GPU: a verdict for every node, GPU and link, and for the whole.

  gpubench check

  gpubench check --quick                     # facts alone: for a prolog or a HealthCheckProgram

  mpirun -n 16 gpubench check --strict --output node-gate.json

  gpubench check --simulate 'hgx-h100-8*4' --fault node3.gpu5:nvlink=12
"""

QUICK = Annotated[bool, typer.Option("--quick", help="Facts alone, no measurement.", show_default=False)]
FULL = Annotated[bool, typer.Option("--full", help="All collectives, all ways of copying.", show_default=False)]
PROFILE = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="Judge by this one, and by its number of GPUs and NICs too; host: a machine without GPUs.",
        show_default=False,
    ),
]
STRICT = Annotated[bool, typer.Option("--strict", help="Exit 1 also where there is a warning.", show_default=False)]
TIMEOUT = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="S", min=0.1, max=86400, help="Seconds for the driver, and for each measurement."
    ),
]


def parse_check_options(given: dict[str, Any]) -> CheckPlan:
    """The options of `check` from what typer read.

    Raises:
        UsageError: anything that cannot be, a broken or unknown profile included.
    """
    from gpubench.measure.check.health import SECTIONS
    from gpubench.profiles.files import find

    if given["quick"] and given["full"]:
        raise exclusive(("--quick", "--full"), "one of them, or neither")
    if given["profile"] is not None:
        find(given["profile"], os.environ)
    recording = parse_recording(given, {"--simulate": given["simulate"], "--record": given["record"]})
    return CheckPlan(
        depth=Depth.QUICK if given["quick"] else Depth.FULL if given["full"] else Depth.DEFAULT,
        source=source_of(
            min(given["timeout"], FACTS_TIMEOUT_S), simulation=parse_simulation(given), replay=recording.replay
        ),
        recording=recording,
        profile=given["profile"],
        strict=given["strict"],
        timeout_s=given["timeout"],
        presentation=parse_presentation(given, SECTIONS),
    )


def run(given: dict[str, Any]) -> None:
    """Be the command: alone, or as one rank of a job."""
    from gpubench.jobs.check import job

    raise typer.Exit(job.run(parse_check_options(given), sys.argv[1:]))


PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("quick", QUICK, False),
    ("full", FULL, False),
    ("profile", PROFILE, None),
    ("strict", STRICT, False),
    ("timeout", TIMEOUT, DEFAULT_TIMEOUT_S),
    *simulation.PARAMETERS,
    *recording.PARAMETERS,
    *presentation.PARAMETERS,
)
