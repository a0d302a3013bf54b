"""`gpubench topo`: its options, where its machines come from, and the report."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gpubench.cli.options import presentation, recording, simulation
from gpubench.cli.options.presentation import parse_presentation
from gpubench.cli.options.recording import parse_recording
from gpubench.cli.options.simulation import parse_simulation
from gpubench.errors import exclusive
from gpubench.jobs.topo import TopoPlan

SUMMARY = "Devices, links, NICs, path and peer-access matrices, limits."
HELP = f"""{SUMMARY}

One look at what the links should be able to do: GPUs, NVLinks, NICs, how they are wired, who can reach whose memory,
and what each pair can carry at most. Under mpirun every node is read once, and nodes that differ from their kind are
named.

  gpubench topo

  gpubench topo --causes

  gpubench topo --from topo.xml

  gpubench topo --simulate 'hgx-h100-8*16' --fault node3.gpu5:nvlink=12

  mpirun -n 16 gpubench topo --output cluster.json
"""

FROM = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Show an NCCL topology XML, the text of `nvidia-smi topo -m` or -p2p, or a recorded snapshot.",
        show_default=False,
    ),
]
STRICT = Annotated[
    bool, typer.Option("--strict", help="Exit 1 when there is a warning: for CI and node gates.", show_default=False)
]
CAUSES = Annotated[
    bool,
    typer.Option(
        "--causes",
        help="Show what would make bytes go through host memory, or slowly, each with its cure, and what could not be "
        "read; in place of the devices.",
        show_default=False,
    ),
]
TIMEOUT = Annotated[
    float,
    typer.Option("--timeout", metavar="S", min=0.1, max=86400, help="Seconds in which a node's driver has to answer."),
]


def parse_topo_options(given: dict[str, Any]) -> TopoPlan:
    """The options of `topo` from what typer read.

    Raises:
        UsageError: two sources of machines, a fault without a simulated machine, anything that cannot be read.
    """
    from gpubench.jobs.sources import source_of
    from gpubench.measure.topo.report import SECTIONS

    named = {"--from": given["from_file"], "--replay": given["replay"], "--simulate": given["simulate"]}
    sources = [option for option, value in named.items() if value is not None]
    if len(sources) > 1:
        raise exclusive(sources, "one machine, or the one at hand")
    recording = parse_recording(given, {})
    file = None if given["from_file"] is None else Path(given["from_file"])
    return TopoPlan(
        source=source_of(given["timeout"], simulation=parse_simulation(given), replay=recording.replay, file=file),
        recording=recording,
        strict=given["strict"],
        causes=given["causes"],
        timeout_s=given["timeout"],
        presentation=parse_presentation(given, SECTIONS),
    )


def run(given: dict[str, Any]) -> None:
    """Be the command: alone, or as one rank of a job."""
    from gpubench.jobs import topo

    raise typer.Exit(topo.run(parse_topo_options(given), sys.argv[1:]))


PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("from_file", FROM, None),
    *simulation.PARAMETERS,
    *recording.PARAMETERS,
    ("strict", STRICT, False),
    ("causes", CAUSES, False),
    ("timeout", TIMEOUT, 20.0),
    *presentation.PARAMETERS,
)
