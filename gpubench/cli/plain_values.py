"""The values of options that need no validation by pydantic, which typer 0.29 loads to read the first of them.

That takes 50 ms, half of the time until a command begins.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from gpubench.cli.process import may_have_defaults
from gpubench.errors import UsageError

if TYPE_CHECKING:
    from gpubench.cli.defaults import Default, Defaults

TYPERS_OWN = object()
"""Stands for a value that typer has to read, or to refuse in its own words."""

_DEFAULTS = "gpubench.defaults"
_INTEGER = re.compile(r"[0-9]{1,18}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?", re.ASCII)


class PlainValuesCommand(TyperCommand):
    """A command that reads the plain values of its options itself, and leaves all others to typer."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for each in self.params:
            setattr(each, "process_value", partial(_process, each, each.process_value))  # noqa: B010 - a method

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; those that are not given have the defaults of the environment or of a file."""
        if ctx.resilient_parsing or not {*ctx.help_option_names}.isdisjoint(args):
            return super().parse_args(ctx, args)
        if not may_have_defaults():
            return super().parse_args(ctx, args)
        from gpubench.cli.defaults import defaults_of, set_by

        defaults = defaults_of(self.name or "", self.params)
        ctx.default_map = {name: each.value for name, each in defaults.by_name.items()}
        try:
            rest = super().parse_args(ctx, args)
        except typer.TyperException as error:
            default = _default_in(error, defaults, ctx)
            if default is None:
                raise
            unfit = UsageError(error.format_message(), next_step=f"{ctx.command_path.strip()} --help")
            unfit.details = (set_by(default.source),)
            raise unfit from None
        used = {name: each for name, each in defaults.by_name.items() if _is_used(name, ctx)}
        ctx.meta[_DEFAULTS] = defaults._replace(by_name=used)
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """The options, with --help, which typer adds."""
        return switched_off(super().get_params(ctx))


def defaults_in(context: Any) -> "Defaults | None":
    """The defaults that the command of this context has used, None where there is neither a variable nor a file."""
    found: Defaults | None = context.meta.get(_DEFAULTS)
    return found


def _default_in(error: typer.TyperException, defaults: "Defaults", context: Any) -> "Default | None":
    """The default that an error is about."""
    name = getattr(getattr(error, "param", None), "name", None)
    return defaults.by_name.get(name) if name is not None and _is_used(name, context) else None


def _is_used(name: str, context: Any) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def switched_off(parameters: list[Any]) -> list[Any]:
    """The same parameters; typer's own flags, which have no default, are off: to read None pydantic is loaded too."""
    for each in parameters:
        if each.default is None and not each.expose_value:
            each.default = False
    return parameters


def _process(parameter: Any, by_typer: Any, context: Any, given: Any) -> Any:
    """The value of a parameter for what stands on the command line, or is its default."""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    is_bare = parameter.callback is None and not (parameter.required and not given)
    bounds = getattr(parameter, "min", None), getattr(parameter, "max", None)
    value = plain_value(kind, given, *bounds) if is_bare else TYPERS_OWN
    return by_typer(context, given) if value is TYPERS_OWN else value


def plain_value(kind: Any, given: Any, least: float | None = None, most: float | None = None) -> Any:
    """The value that typer would make of `given`, a text, several of them, or a default; else TYPERS_OWN.

    `kind` is the option's type. Numbers are plain in digits alone, within `least` and `most`.
    """
    if given is None:
        return () if kind == list[str] else None
    if kind == list[str] and isinstance(given, Sequence) and not isinstance(given, str):
        return list(given) if all(isinstance(each, str) for each in given) else TYPERS_OWN
    if kind in (str, bool) and isinstance(given, kind):
        return given
    if kind in (int, float):
        return _number(kind, given, least, most)
    return TYPERS_OWN


def _number(kind: type[int | float], given: Any, least: float | None, most: float | None) -> Any:
    form = _INTEGER if kind is int else _NUMBER
    if isinstance(given, bool) or not (isinstance(given, kind) or (isinstance(given, str) and form.fullmatch(given))):
        return TYPERS_OWN
    value = kind(given)
    is_inside = (least is None or value >= least) and (most is None or value <= most)
    return value if is_inside else TYPERS_OWN
