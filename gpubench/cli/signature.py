"""Functions for typer to make subcommands of: it reads options from a signature, and ours are lists."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from gpubench.cli.encoding import showable


def subcommand(
    name: str, help_text: str, parameters: Iterable[tuple[str, Any, Any]], run: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """A function with these options (name, declaration, default) that hands what was given to `run`."""

    def call(**given: Any) -> None:
        run(given)

    call.__name__ = name
    call.__doc__ = showable(help_text)
    kind = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(each, kind, default=default, annotation=declared) for each, declared, default in parameters]
    )
    return call
