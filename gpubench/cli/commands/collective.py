"""One subcommand a collective, made from its record."""

import sys
from collections.abc import Callable
from typing import Any

import typer

from gpubench.cli.options import collective as declared
from gpubench.cli.options import presentation, recording, sampling, simulation
from gpubench.cli.options import variants as setting_options
from gpubench.cli.options.recording import check_replay
from gpubench.cli.signature import subcommand
from gpubench.collectives.record import Collective


def command(collective: Collective) -> Callable[..., None]:
    """The function that typer makes a subcommand of: its signature holds the options that mean something here."""

    def run(given: dict[str, Any]) -> None:
        check_replay(given, parameters(collective))
        from gpubench.jobs.collective import job

        raise typer.Exit(job.run(declared.parse_collective_options(collective, given), sys.argv[1:]))

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
