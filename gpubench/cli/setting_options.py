"""The options that have the same sweep run in several ways, beside the library's own choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpubench.cli.presentation import parse_choices, unknown_word
from gpubench.collectives.record import Collective
from gpubench.errors import UsageError
from gpubench.hardware.registry import BACKENDS
from gpubench.model.terms.hierarchy import OPTION as HIERARCHICAL_OPTION
from gpubench.model.terms.nccl_choice import (
    ALGORITHM_VARIABLE,
    HIERARCHICAL,
    PROTOCOL_VARIABLE,
    Algorithm,
    NcclChoice,
    Protocol,
    settings_of,
)

NCCL, HOST = "nccl", "host"

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


@dataclass(frozen=True, slots=True)
class Ways:
    """What is to be measured beside the own choice of the first backend."""

    settings: tuple[NcclChoice, ...] = ()
    hierarchical: bool = False
    host_too: bool = False

    def __bool__(self) -> bool:
        return bool(self.settings) or self.hierarchical or self.host_too

    @property
    def options(self) -> tuple[str, ...]:
        """The options that ask for it, for messages."""
        asked = {
            "--algo": any(each.algorithm for each in self.settings),
            "--proto": any(each.protocol for each in self.settings),
            HIERARCHICAL_OPTION: self.hierarchical,
            f"--backend {NCCL},{HOST}": self.host_too,
        }
        return tuple(option for option, is_asked in asked.items() if is_asked)

    def names(self, backend: str) -> list[str]:
        """The names in rows, for the metadata: of nothing where there is only one way."""
        names = [*(each.name for each in self.settings), *([HIERARCHICAL] if self.hierarchical else [])]
        return [*names, *([HOST] if self.host_too and backend != HOST else [])]


def parse_ways(given: Mapping[str, Any]) -> Ways:
    """From what typer read.

    Raises:
        UsageError: a word that is not known.
    """
    return Ways(
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


def check_ways(ways: Ways, excluded: Mapping[str, bool]) -> None:
    """Raise UsageError where several ways are asked for together with an option that knows one."""
    for option in (name for name, is_given in excluded.items() if ways and is_given):
        raise UsageError(
            f"{ways.options[0]} with {option}",
            expected="one of them: a sweep over settings is measured, and by all ranks together",
            next_step=f"leave {option} out",
        )


def check_unset(ways: Ways, settings: Mapping[str, str]) -> None:
    """Raise UsageError where NCCL's own choice could not be measured, since somebody has made it.

    `settings` are NCCL's variables as NCCL will see them.
    """
    variables = (ALGORITHM_VARIABLE, PROTOCOL_VARIABLE) if ways.settings else ()
    for name in (each for each in variables if each in settings):
        raise UsageError(
            f"{' and '.join(ways.options)} with {name}={settings[name]} set already",
            expected="NCCL's own choice to compare with",
            reason="it stands in the environment, or in a file as /etc/nccl.conf",
            next_step=f"unset {name}",
        )
