"""The options that write down what was found, and show it again."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gpubench.cli.options import presentation
from gpubench.errors import exclusive
from gpubench.jobs.recording import Recording

REPLAY = Annotated[
    str | None,
    typer.Option("--replay", metavar="DIR", help="Show what --record wrote.", show_default=False),
]
RECORD = Annotated[
    str | None,
    typer.Option(
        "--record",
        metavar="DIR",
        help="Also write there the facts of every node and rank, and raw samples.",
        show_default=False,
    ),
]

PARAMETERS: tuple[tuple[str, Any, Any], ...] = (("replay", REPLAY, None), ("record", RECORD, None))
"""Name, declaration and default of each, for a command's signature."""


BESIDE_REPLAY = ("replay", "evidence", "strict", "plot", *(name for name, _, _ in presentation.PARAMETERS))
"""Options that say how to show what was recorded, and not what to measure."""


def parse_recording(given: Mapping[str, Any], excluded: Mapping[str, Any]) -> Recording:
    """The folders that were named. `excluded` are other options that say what to show, with their values.

    Raises:
        UsageError: --replay beside one of these.
    """
    sources = [option for option, value in {"--replay": given["replay"], **excluded}.items() if value is not None]
    if given["replay"] is not None and len(sources) > 1:
        raise exclusive(sources, "--replay alone: it shows what was recorded")
    return Recording(
        record=None if given["record"] is None else Path(given["record"]),
        replay=None if given["replay"] is None else Path(given["replay"]),
    )


def check_replay(given: Mapping[str, Any], parameters: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise UsageError where --replay stands beside one of the `parameters` that says what to measure."""
    if given["replay"] is None:
        return
    for name, _, default in parameters:
        kept = name in BESIDE_REPLAY and given[name] is not False
        if not kept and given[name] != default:
            option = f"--{'no-' if given[name] is False else ''}{name.replace('_', '-')}"
            expected = "--replay alone, or with --evidence, --strict and what says how to show it"
            raise exclusive(("--replay", option), expected)
