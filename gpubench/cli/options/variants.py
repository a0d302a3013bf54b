"""The options that have the same sweep run in several ways, beside the library's own choice."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gpubench.cli.options.presentation import parse_choices, unknown_word
from gpubench.collectives.record import Collective
from gpubench.errors import UsageError
from gpubench.hardware.registry import BACKENDS
from gpubench.jobs.collective.plan import AskedVariants
from gpubench.model.terms.hierarchy import OPTION as HIERARCHICAL_OPTION
from gpubench.model.terms.nccl_choice import (
    Algorithm,
    Protocol,
    settings_of,
)

ALGO = Annotated[
    list[str] | None,
    typer.Option(
        "--algo",
        metavar="ALGO",
        help=f"Have NCCL use {', '.join(Algorithm)}; several with commas, beside its own choice.",
        show_default=False,
    ),
]
PROTO = Annotated[
    list[str] | None,
    typer.Option(
        "--proto",
        metavar="PROTO",
        help=f"Have NCCL use {', '.join(Protocol)}; with --algo, every combination.",
        show_default=False,
    ),
]
HIERARCHICAL_FLAG = Annotated[
    bool,
    typer.Option(
        HIERARCHICAL_OPTION,
        help="Also as reduce-scatter in the node, all-reduce across nodes, all-gather in the node.",
        show_default=False,
    ),
]


def parameters(collective: Collective) -> list[tuple[str, Any, Any]]:
    """Name, declaration and default of those that mean something for a collective.

    What NCCL makes of sends and receives has no algorithm.
    """
    named = [] if collective.point_to_point else [("algo", ALGO, None), ("proto", PROTO, None)]
    return [*named, *([("hierarchical", HIERARCHICAL_FLAG, False)] if collective.decomposes else [])]


def parse_ways(given: Mapping[str, Any]) -> AskedVariants:
    """From what typer read.

    Raises:
        UsageError: a word that is not known.
    """
    return AskedVariants(
        settings=tuple(
            settings_of(
                parse_choices("--algo", given.get("algo") or (), Algorithm),
                parse_choices("--proto", given.get("proto") or (), Protocol),
            )
        ),
        hierarchical=given.get("hierarchical", False),
        host_too=len(parse_backends(given["backend"])) > 1,
    )


def parse_backends(text: str | None) -> tuple[str, ...]:
    """The backends that a comma-separated text names, nccl first; none where nobody chose.

    Raises:
        UsageError: a word that is none.
    """
    words = [] if text is None else [word.strip() for word in text.split(",")]
    names = [each.name for each in BACKENDS]
    for word in words:
        if word not in names:
            raise unknown_word("--backend", word, names)
    return tuple(name for name in names if name in words)


def check_ways(ways: AskedVariants, excluded: Mapping[str, bool]) -> None:
    """Raise UsageError where several ways are asked for together with an option that knows one."""
    for option in (name for name, is_given in excluded.items() if ways and is_given):
        raise UsageError(
            f"{ways.options[0]} with {option}",
            expected="one of them: a sweep over settings is measured, and by all ranks together",
            next_step=f"leave {option} out",
        )
