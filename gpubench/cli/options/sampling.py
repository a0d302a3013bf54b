"""The options that say how often and how the operations of a collective are timed."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gpubench.cli.options.presentation import parse_choices
from gpubench.errors import UsageError
from gpubench.model.terms.sampling import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode, Sampling

MODE = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="|".join(Mode),
        help="Operations back to back, as nccl-tests has them, or each alone, with percentiles.",
    ),
]
ITERS = Annotated[
    str | None,
    typer.Option(
        "--iters",
        metavar="N|auto",
        help=f"Timed operations a row; auto: until the mean is known within {INTERVAL:.0%}. "
        f"Default {DEFAULT_ITERATIONS[Mode.THROUGHPUT]}, alone {DEFAULT_ITERATIONS[Mode.LATENCY]}.",
        show_default=False,
    ),
]
BUDGET = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="S",
        min=0,
        help=f"Seconds a row that --iters auto may take. Default {Sampling().budget_seconds:g}.",
        show_default=False,
    ),
]
PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("mode", MODE, "throughput"),
    ("iters", ITERS, None),
    ("budget", BUDGET, None),
)
"""Name, declaration and default of each, for a command's signature."""


def parse_sampling(given: Mapping[str, Any]) -> Sampling:
    """How rows are timed.

    Raises:
        UsageError: an unknown mode, a number of operations that is none, or a budget for a given number of them.
    """
    chosen = parse_choices("--mode", [given["mode"]], Mode)[0]
    iterations, budget_s, graph_replays = given["iters"], given["budget"], given["graph"]
    if iterations == AUTO:
        if graph_replays:
            raise UsageError(
                "--iters auto with --graph",
                expected="a number: so many operations are captured, and replays of them are timed",
                next_step=f"--iters {DEFAULT_ITERATIONS[Mode.THROUGHPUT]} --graph {graph_replays}",
            )
        return Sampling(chosen, None, Sampling().budget_seconds if budget_s is None else budget_s)
    if budget_s is not None:
        raise UsageError(
            f"--budget {budget_s:g} without --iters {AUTO}",
            expected=f"a budget for as many operations as it takes: --iters {AUTO}",
            next_step=f"--iters {AUTO} --budget {budget_s:g}",
        )
    if iterations is None:
        return Sampling(chosen, DEFAULT_ITERATIONS[chosen])
    if not iterations.isdecimal() or int(iterations) < 1:
        raise UsageError(f"--iters {iterations}", expected=f"a number from 1 on, or {AUTO}", next_step="--iters 20")
    return Sampling(chosen, int(iterations))
