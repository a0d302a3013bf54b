"""`gpubench check`: its options, and the run."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.options.presentation import PresentationOptions
from gpubench.cli.options.profile import check_profile
from gpubench.cli.options.recording import RecordingOptions
from gpubench.cli.options.simulation import SimulationOptions
from gpubench.cli.signature import app_of
from gpubench.cli.table import Command
from gpubench.errors import exclusive

if TYPE_CHECKING:
    from gpubench.jobs.check.plan import CheckPlan

HELP = """
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


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How much to measure, and what to judge it by."""

    quick: Annotated[bool, typer.Option("--quick", help="Facts alone, no measurement.")] = False
    full: Annotated[bool, typer.Option("--full", help="All collectives, all ways of copying.")] = False
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|FILE",
            help="Judge by this one, and by its number of GPUs and NICs too; host: a machine without GPUs.",
        ),
    ] = None
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 also where there is a warning.")] = False
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="S", min=0.1, max=86400, help="Seconds for the driver, and for each measurement."
        ),
    ] = 120.0
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def plan(self) -> "CheckPlan":
        """What these options ask for.

        Raises:
            UsageError: anything that cannot be, a broken or unknown profile included.
        """
        from gpubench.jobs.check.job import SECTIONS
        from gpubench.jobs.check.plan import FACTS_TIMEOUT_S, CheckPlan, Depth
        from gpubench.jobs.sources import source_of

        if self.quick and self.full:
            raise exclusive(("--quick", "--full"), "one of them, or neither")
        check_profile(self.profile)
        recording = self.recording.parse({"--simulate": self.simulation.simulate, "--record": self.recording.record})
        simulation, timeout_s = self.simulation.parse(), min(self.timeout, FACTS_TIMEOUT_S)
        return CheckPlan(
            depth=Depth.QUICK if self.quick else Depth.FULL if self.full else Depth.DEFAULT,
            source=source_of(timeout_s, simulation=simulation, replay=recording.replay),
            recording=recording,
            profile=self.profile,
            strict=self.strict,
            timeout_s=self.timeout,
            presentation=self.presentation.parse(SECTIONS),
        )


def run(options: CheckOptions) -> None:
    """Be the command: alone, or as one rank of a job."""
    from gpubench.jobs.check import job

    raise typer.Exit(job.run(options.plan(), sys.argv[1:]))


def app(command: Command) -> typer.Typer:
    """The command for typer."""
    return app_of(command, HELP, CheckOptions, run)
