"""Programs of one command for typer: it reads options from a signature, ours are fields of dataclasses."""

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar

import typer

from gpubench.cli.plain_values import PlainValuesCommand, defaults_in
from gpubench.cli.streams import showable
from gpubench.cli.table import Command
from gpubench.errors import GpubenchError

Options = TypeVar("Options")

_NO_OPTION = "no option"
_SECONDS_A_DAY = 86400
_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def app_of(help_text: str, kind: type[Options], run: Callable[[Options], int]) -> Callable[[Command], typer.Typer]:
    """The `app` of a command's module, which makes the command for typer; the process ends with what `run` returns."""
    return lambda command: typer_app(command, help_text, kind, run)


def typer_app(
    command: Command,
    help_text: str,
    kind: type[Options],
    run: Callable[[Options], int],
    *,
    without: Container[str] = (),
) -> typer.Typer:
    """A command for typer, which hands its options to `run`; `without` are those that mean nothing for it."""

    def call(context: typer.Context, **given: Any) -> None:
        defaults = defaults_in(context)
        try:
            raise typer.Exit(run(options_from(kind, {**given, "defaults": defaults})))
        except GpubenchError as error:
            if defaults is not None:
                defaults.explain(error)
            raise

    call.__doc__ = showable(f"{command.summary}\n\n{help_text.strip()}")
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_CONTEXT, *(_parameter(each, group) for each, group in _grouped_fields(kind) if each.name not in without)]
    )
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(command.name, cls=PlainValuesCommand)(call)
    return app


def completed(option: str) -> Callable[[str], list[str]]:
    """What completes the value of an option, for its `autocompletion`; `option` is its name without dashes."""

    def complete(incomplete: str) -> list[str]:
        from gpubench.cli.completion import words_for

        return words_for(option, incomplete)

    return complete


def option(metavar: str | None, help_text: str, *, default: Any = None, name: str = "", **settings: Any) -> Any:
    """A field of a dataclass that is an option for typer; its name is the field's where no other is given.

    `name` may hold several, with a blank between them: '--verbose -v'.
    """
    return field(default=default, metadata={"name": name, "metavar": metavar, "help": help_text, **settings})


def flag(help_text: str, *, default: bool | None = False, name: str = "") -> Any:
    """A field that is an option without a value."""
    return option(None, help_text, default=default, name=name)


def step_timeout(steps: str, *, default: float, least: float = 0.1) -> Any:
    """A field that is `--timeout`, which means the same everywhere; `steps` are what it waits for so long."""
    told = f"Seconds after which a step is given up: {steps}."
    return option("S", told, default=default, min=least, max=_SECONDS_A_DAY)


def sharing_ranks(how: str = "Needs NCCL 2.30 or newer") -> Any:
    """A field that is `--ranks-per-gpu`, which means the same everywhere; `how` is what makes NCCL take them."""
    told = (
        f"Ranks to launch on each GPU, which share it: N ranks on a machine of one GPU. {how}; "
        "they run at the same time where an MPS server runs, else in turns."
    )
    return option("N", told, default=1, min=1, show_default=False)


def no_option() -> Any:
    """A field that no option is for; it is None but where the values of options say otherwise."""
    return field(default=None, metadata={_NO_OPTION: True})


def option_fields(kind: Any) -> Iterator["Field[Any]"]:
    """The fields that are options; those of a nested dataclass, which is a group of options, stand in its place."""
    return (each for each, _ in _grouped_fields(kind))


def _grouped_fields(kind: Any) -> Iterator[tuple["Field[Any]", str | None]]:
    """The same, each with the heading of --help that its dataclass stands under: its `help_group`, if it has one."""
    for each in fields(kind):
        if is_dataclass(each.type):
            yield from _grouped_fields(each.type)
        elif not each.metadata.get(_NO_OPTION):
            yield each, getattr(kind, "help_group", None)


def options_from(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The options with the values given by field name, in whatever group the field is; others have their defaults."""
    values = {}
    for each in fields(kind):  # type: ignore[arg-type]
        if isinstance(each.type, type) and is_dataclass(each.type):
            values[each.name] = options_from(each.type, given)
        elif each.name in given:
            values[each.name] = given[each.name]
    return kind(**values)


def given_options(options: Any) -> Iterator[str]:
    """The options that do not have their default."""
    for each in fields(options):
        value: Any = getattr(options, each.name)
        if is_dataclass(value):
            yield from given_options(value)
        elif not each.metadata.get(_NO_OPTION) and value != each.default:
            yield _name_of(each, value)


def given_words(options: Any, *left_out: type) -> Iterator[str]:
    """The words of a command line for the options that do not have their default; groups `left_out` are passed over."""
    for each in fields(options):
        value: Any = getattr(options, each.name)
        if is_dataclass(value):
            yield from given_words(value, *left_out) if not isinstance(value, left_out) else ()
        elif not each.metadata.get(_NO_OPTION) and value != each.default:
            yield _name_of(each, value)
            yield from () if isinstance(value, bool) else [str(value)]


def _name_of(each: "Field[Any]", value: Any) -> str:
    """'--iters' of '--iters -n', '--no-check' of '--check/--no-check' where it is off."""
    names = (each.metadata["name"] or f"--{each.name.replace('_', '-')}").split(" ")[0].split("/")
    return names[-1] if value is False else names[0]


def _parameter(each: "Field[Any]", group: str | None) -> inspect.Parameter:
    annotation: Any = each.type
    if each.metadata:
        settings: dict[str, Any] = {"rich_help_panel": group, **each.metadata}
        names = (settings.pop("name") or f"--{each.name.replace('_', '-')}").split(" ")
        annotation = Annotated[annotation, typer.Option(*names, **settings)]
    default = inspect.Parameter.empty if each.default is MISSING else each.default
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
