"""One subcommand a collective, made from its record."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from gpubench.cli.options import collective as declared
from gpubench.cli.options import presentation, recording, sampling, simulation
from gpubench.cli.options import variants as setting_options
from gpubench.cli.options.recording import check_replay
from gpubench.cli.signature import subcommand
from gpubench.collectives.record import Collective
from gpubench.hardware.launch.started_by import launched_by

if TYPE_CHECKING:
    from gpubench.hardware.mpi.group import MpiGroup
    from gpubench.hardware.watchdog.rank import RankProgress


def command(collective: Collective) -> Callable[..., None]:
    """The function that typer makes a subcommand of: its signature holds the options that mean something here."""

    def run(given: dict[str, Any]) -> None:
        check_replay(given, parameters(collective))
        options = declared.parse_collective_options(collective, given)
        arguments = sys.argv[1:]
        launch = launched_by(os.environ)
        if options.recording.replay is not None:
            from gpubench.jobs.collective import replayed as collective_replay

            raise typer.Exit(collective_replay.run(options, options.recording.replay, arguments, launch))
        if options.simulation is not None:
            from gpubench.jobs.collective import simulated

            raise typer.Exit(simulated.run(options, options.simulation, arguments, launch))
        if launch is None:
            from gpubench.jobs.collective import launch as alone

            raise typer.Exit(alone.run(options, arguments))
        from gpubench.jobs import rank
        from gpubench.jobs.collective.rank_job import CollectiveRankJob

        def make_job(group: "MpiGroup", progress: "RankProgress") -> CollectiveRankJob:
            return CollectiveRankJob(group, progress, options, arguments)

        raise typer.Exit(rank.run(make_job, launch, options.timeout_s))

    return subcommand(collective.name, help_text(collective), parameters(collective), run)


def help_text(collective: Collective) -> str:
    """What the subcommand's --help says: the record's words and two commands to start from."""
    examples = [f"gpubench {collective.name} --sizes 1K:4G"]
    if collective.reduces:
        examples.append(f"gpubench {collective.name} --dtype bfloat16 --op sum,max --output result.json")
    elif collective.rooted:
        examples.append(f"gpubench {collective.name} --root 1 --output result.json")
    else:
        examples.append(f"gpubench {collective.name} --graph 10 --output result.json")
    examples.append(f"mpirun -n 8 gpubench {collective.name} --format csv > result.csv")
    shown = "\n\n".join(f"  {example}" for example in examples)
    return f"{collective.summary}\n\n{collective.description}\n\n{shown}"


def parameters(collective: Collective) -> list[tuple[str, Any, Any]]:
    """Name, declaration and default of every option that means something for a collective."""
    return [
        ("sizes", declared.SIZES, None),
        ("dtype", declared.DTYPE, None),
        *([("op", declared.OP, None)] if collective.reduces else []),
        *([("root", declared.ROOT, 0)] if collective.rooted else []),
        *setting_options.parameters(collective),
        ("in_place", declared.IN_PLACE, False),
        ("out_of_place", declared.OUT_OF_PLACE, False),
        ("both", declared.BOTH, False),
        *sampling.PARAMETERS,
        ("warmup", declared.WARMUP, 5),
        ("graph", declared.GRAPH, 0),
        ("check", declared.CHECK, True),
        ("backend", declared.BACKEND, None),
        ("nccl_library", declared.NCCL_LIBRARY, None),
        ("allocator", declared.ALLOCATOR, "cuda"),
        ("np", declared.NP, None),
        ("timeout", declared.TIMEOUT, 60.0),
        ("evidence", declared.EVIDENCE, None),
        ("strict", declared.STRICT, False),
        ("split", declared.SPLIT, None),
        ("plot", presentation.PLOT, False),
        *simulation.PARAMETERS,
        *recording.PARAMETERS,
        *presentation.PARAMETERS,
    ]
