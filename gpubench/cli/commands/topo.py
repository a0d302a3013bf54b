"""`gpubench topo`: its options, where its machines come from, and the report."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.options.presentation import PresentationOptions
from gpubench.cli.options.profile import PROFILE, check_profile
from gpubench.cli.options.recording import RecordingOptions
from gpubench.cli.options.simulation import SimulationOptions
from gpubench.cli.signature import app_of
from gpubench.cli.table import Command
from gpubench.errors import exclusive

if TYPE_CHECKING:
    from gpubench.jobs.topo import TopoPlan

HELP = """
One look at what the links should be able to do: GPUs, NVLinks, NICs, how they are wired, who can reach whose memory,
and what each pair can carry at most. Under mpirun every node is read once, and nodes that differ from their kind are
named.

  gpubench topo

  gpubench topo --causes

  gpubench topo --from topo.xml

  gpubench topo --simulate 'hgx-h100-8*16' --fault node3.gpu5:nvlink=12

  mpirun -n 16 gpubench topo --output cluster.json
"""


@dataclass(frozen=True, kw_only=True)
class TopoOptions:
    """Which machines to show, and how."""

    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Show an NCCL topology XML, the text of `nvidia-smi topo -m` or -p2p, or a recorded snapshot.",
        ),
    ] = None
    simulation: SimulationOptions
    recording: RecordingOptions
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when there is a warning: for CI and node gates.")] = (
        False
    )
    causes: Annotated[
        bool,
        typer.Option(
            "--causes",
            help="Show what would make bytes go through host memory, or slowly, each with its cure, and what could not "
            "be read; in place of the devices.",
        ),
    ] = False
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="S", min=0.1, max=86400, help="Seconds in which a node's driver has to answer."
        ),
    ] = 20.0
    profile: PROFILE = None
    presentation: PresentationOptions

    def plan(self) -> "TopoPlan":
        """What these options ask for.

        Raises:
            UsageError: two sources of machines, a fault without a simulated machine, anything that cannot be read.
        """
        from gpubench.jobs.sources import source_of
        from gpubench.jobs.topo import SECTIONS, TopoPlan

        named = {"--from": self.from_file, "--replay": self.recording.replay, "--simulate": self.simulation.simulate}
        sources = [option for option, value in named.items() if value is not None]
        if len(sources) > 1:
            raise exclusive(sources, "one machine, or the one at hand")
        check_profile(self.profile)
        recording, simulation = self.recording.parse({}), self.simulation.parse()
        file = None if self.from_file is None else Path(self.from_file)
        return TopoPlan(
            source=source_of(self.timeout, simulation=simulation, replay=recording.replay, file=file),
            recording=recording,
            strict=self.strict,
            causes=self.causes,
            timeout_s=self.timeout,
            profile=self.profile,
            presentation=self.presentation.parse(SECTIONS),
        )


def run(options: TopoOptions) -> None:
    """Be the command: alone, or as one rank of a job."""
    from gpubench.jobs import topo

    raise typer.Exit(topo.run(options.plan(), sys.argv[1:]))


def app(command: Command) -> typer.Typer:
    """The command for typer."""
    return app_of(command, HELP, TopoOptions, run)
