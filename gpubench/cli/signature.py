"""Build typer commands from plans. Options are fields of the plan's dataclass."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from gpubench.cli.process import may_have_defaults, showable
from gpubench.errors import GpubenchError, UsageError
from gpubench.model.terms.commands import Command

if TYPE_CHECKING:
    from gpubench.cli.defaults import Defaults
    from gpubench.jobs.plans import Targets
    from gpubench.model.terms.options import Option

_DEFAULTS = "gpubench.defaults"
HELP_ALL = "--help-all"
FAULT_HEADING = "Keys of --fault"
"""The section of --help-all that lists every key of --fault."""

_EXAMPLES_OF_SHORT_HELP = 2
_NAME_COLUMNS = 26
_WORD_TO_PASTE = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")


class HelpPage(NamedTuple):
    """The examples (purpose and command) and the description on a help page.

    A short page (--help) shows two examples and the options in `common`, or all options if `common` is empty. The full
    page (--help-all) shows everything.
    """

    examples: Sequence[tuple[str, str]] = ()
    about: str = ""
    exit_codes: str = ""
    common: frozenset[str] = frozenset()


_EXIT_CODES = (
    "Exit codes: 0 nothing failed; 1 any FAIL, or with --strict any doubt; 2 wrong usage; 3 could not measure{}; 130 "
    "interrupted. With --exit-zero, 0 after any report."
)


class HelpfulCommand(TyperCommand):
    """A command with a short help page (--help) and a full one (--help-all)."""

    page: ClassVar[HelpPage] = HelpPage()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and remember whether they contain --help-all, which click handles like --help."""
        ctx.meta[HELP_ALL] = HELP_ALL in args
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return '[OPTIONS]' and the names of the arguments. Optional arguments are in brackets."""
        pieces = ["[OPTIONS]"]
        for param in self.params:
            if param.param_type_name == "argument":
                name = f"{param.metavar or param.name.upper()}{'...' if param.nargs == -1 else ''}"
                pieces.append(name if param.required else f"[{name}]")
        return pieces

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line: 'Usage: gpubench topo [OPTIONS]', or 'Usage: gpubench [OPTIONS]' without a command."""
        formatter.write_usage(ctx.command_path.strip(), " ".join(self.collect_usage_pieces(ctx)))

    def get_help(self, ctx: Any) -> str:
        """Return the help page, without characters that stdout cannot encode."""
        return showable(super().get_help(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the purpose and the examples. --help-all adds the description and the exit codes."""
        is_whole = bool(ctx.meta.get(HELP_ALL))
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self.help or "")
        for text in filter(None, (self.page.about.strip(), self.page.exit_codes)) if is_whole else ():
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(text)
        if self.page.examples:
            with formatter.section("Examples"):
                for purpose, command in self.page.examples[: None if is_whole else _EXAMPLES_OF_SHORT_HELP]:
                    formatter.write_text(f"{purpose}:")
                    formatter.write("".join(f"    {line}\n" for line in _lines_to_paste(command, formatter.width - 4)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options below their headings. Without --help-all, write only the common options."""
        from gpubench.model.terms.options import ARGUMENTS, GROUPS, OUTPUT

        is_whole = bool(ctx.meta.get(HELP_ALL))
        visible = [param for param in self.params if not getattr(param, "hidden", False)]
        has_faults = any("--fault" in param.opts for param in visible)
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for param in visible:
            is_argument = param.param_type_name == "argument"
            if is_whole or is_argument or not self.page.common or param.name in self.page.common:
                heading = ARGUMENTS if is_argument else getattr(param, "rich_help_panel", None) or OUTPUT
                groups[heading].append((option_names(param), option_help(param)))
        groups["Help"] = [("-h, --help", "Show this page.")]
        if self.page.common:
            keys = " and the keys of --fault" if has_faults else ""
            count = sum(param.param_type_name == "option" for param in visible)
            groups["Help"] = [
                ("-h, --help", "Show the common options." if is_whole else "Show this page."),
                (HELP_ALL, "Show this page." if is_whole else f"Show all {count} options, more examples{keys}."),
            ]
        width = min(_NAME_COLUMNS, max(len(name) for records in groups.values() for name, _ in records))
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl([(names.ljust(width), help_text) for names, help_text in records], col_max=width)
        if is_whole and has_faults:
            from gpubench.model.profiles.fault import list_fault_keys

            with formatter.section(FAULT_HEADING):
                formatter.write_dl(list(list_fault_keys(self.name or "")), col_max=width)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of this command and typer's --help."""
        return switched_off(super().get_params(ctx))


class HelpfulGroup(TyperGroup):
    """A command with subcommands, whose help page lists its flags and the subcommands."""

    flags: ClassVar[Sequence[tuple[str, str]]] = (("-h, --help", "Show this page."),)

    def get_params(self, ctx: Any) -> list[Any]:
        return switched_off(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        with formatter.section("Options"):
            formatter.write_dl(self.flags)


def option_names(parameter: Any) -> str:
    """Return the names of an option, for example '-d, --dtype TYPE' or '--check / --no-check'."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        names += f" / {', '.join(parameter.secondary_opts)}"
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'TEXT'}"


def option_help(parameter: Any) -> str:
    """Return the help text of an option with its default, for example 'Random seed (default: 0).'"""
    help_text = str(parameter.help or "")
    default = parameter.default
    if parameter.param_type_name == "argument" or not parameter.show_default or default is None:
        return help_text
    if parameter.is_flag:
        return _append_default(help_text, parameter.opts[-1]) if default is True else help_text
    return _append_default(help_text, f"{default:g}" if isinstance(default, float) else str(default))


def _append_default(help_text: str, default: str) -> str:
    return f"{help_text.removesuffix('.')} (default: {default})."


def _lines_to_paste(command: str, width: int) -> Iterator[str]:
    """Wrap a command at backslashes, so that a user can paste it into a shell."""
    line = ""
    words = _WORD_TO_PASTE.findall(command)
    values = [index for index in range(1, len(words)) if words[index - 1][0] == "-" != words[index][0]]
    for index in reversed(values):
        words[index - 1 : index + 1] = [f"{words[index - 1]} {words[index]}"]
    for word in words:
        if line.strip() and len(f"{line} {word} \\") > width:
            yield f"{line} \\"
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    yield line


class PlanCommand(HelpfulCommand):
    """A command whose options are fields of a plan.

    It converts option values itself, and reads their defaults from the environment or a file.
    """

    options: ClassVar[Mapping[str, "Option"]] = {}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for param in self.params:
            if param.name in self.options:
                # The original method imports pydantic, which takes 50 ms.
                setattr(param, "process_value", partial(_read, param, self.options[param.name], param.process_value))  # noqa: B010 - replaces a method

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Options that they omit get defaults from the environment or a file."""
        asks_for_help = not {*ctx.help_option_names}.isdisjoint(args)
        if ctx.resilient_parsing or asks_for_help or not may_have_defaults():
            return super().parse_args(ctx, args)
        from gpubench.cli.defaults import read_defaults

        defaults = read_defaults(self.name or "", self.params)
        ctx.default_map = {name: default.value for name, default in defaults.by_name.items()}
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            defaults.unreplaced(ctx).explain(error)
            raise
        finally:
            ctx.meta[_DEFAULTS] = defaults.unreplaced(ctx)


def switched_off(parameters: list[Any]) -> list[Any]:
    """Set the default of typer's own flags to False, because typer imports pydantic to convert None."""
    for parameter in parameters:
        if parameter.default is None and not parameter.expose_value:
            parameter.default = False
    return parameters


_NUMBERS: Mapping[Any, type[int] | type[float]] = {
    **dict.fromkeys((int, int | None, list[int] | None), int),
    **dict.fromkeys((float, float | None), float),
}


def _read(parameter: Any, option: "Option", typer_read: Callable[[Any, Any], Any], context: Any, typed: Any) -> Any:
    """Convert the value of an option. Raises UsageError if a number is malformed or out of range."""
    if parameter.required and not typed:
        return typer_read(context, typed)  # Raises the error for a missing option
    number = _NUMBERS.get(option.typed)
    if number is None or typed is None:
        return typed
    if isinstance(typed, (list, tuple)):
        return [_number(number, text, parameter, option.settings) for text in typed]
    return _number(number, typed, parameter, option.settings)


def _number(kind: type[int] | type[float], typed: Any, parameter: Any, bounds: Mapping[str, Any]) -> int | float:
    least, most = bounds.get("min", -math.inf), bounds.get("max", math.inf)
    try:
        value = kind(typed)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and least <= value <= most:
        return value
    names, text = "/".join(parameter.opts), str(typed).strip()
    expected = "a whole number" if kind is int else "a number"
    if math.isfinite(most):
        expected = f"{expected} from {least:g} to {most:g}"
    elif math.isfinite(least):
        expected = f"{expected} of {least:g} or more"
    reasons = (
        (r"--?[a-z].*", "the number is missing, so the next option was read as its value"),
        (r"[-+]?[0-9]+(\.[0-9]+)?\s*[A-Za-zµ%]+", "it has a unit, but the option needs a plain number"),
        (r"[-+]?[0-9]*\.[0-9]+", "it has a fraction" if kind is int else ""),
        (r".*[^0-9.eE+-].*", "it contains characters that are not part of a number"),
    )
    reason = next((said for form, said in reasons if re.fullmatch(form, text)), "")
    example = parameter.default or max(least, 1)
    raise UsageError(
        f"{names} {text}", expected=expected, reason=reason, next_step=f"{names.split('/')[0]} {example:g}"
    )


Plan = TypeVar("Plan")


def make_app(
    page: HelpPage,
    kind: type[Plan],
    run: Callable[[Plan], int],
    *,
    without: Sequence[str] = (),
    plots: bool = False,
) -> Callable[[Command], typer.Typer]:
    """Return a function that creates the typer command. The process exits with the code that `run` returns."""
    return lambda command: typer_app(command, page, kind, run, without=without if plots else ("plot", *without))


def job_runner(job: str, checked: Callable[[Plan], Plan] | None = None) -> Callable[[Plan], int]:
    """Return a function that runs a plan in the module `job`, or on other hosts.

    `checked` checks and completes the plan, or raises UsageError. Without it, only the presentation is checked.
    """

    def run(plan: Plan) -> int:
        module = import_module(job)
        plan = checked(plan) if checked else check_presentation(plan, module.SECTIONS)
        targets: Targets | None = getattr(plan, "targets", None)
        if targets is not None and targets.are_elsewhere:
            from gpubench.jobs.several_hosts import run_there

            return run_there(plan, targets, sys.argv[1:])
        if targets is not None and targets.gpus is not None:
            from gpubench.jobs.sources import choose_gpus

            any_plan: Any = plan
            plan = replace(any_plan, simulation=choose_gpus(targets.gpus, any_plan.simulation))
        code: int = module.run(plan, sys.argv[1:])
        return code

    return run


def check_presentation(plan: Plan, sections: Sequence[str]) -> Plan:
    """Return the plan with its presentation checked for these sections. Raises UsageError if an option does not fit."""
    any_plan: Any = plan
    changed: Plan = replace(any_plan, presentation=any_plan.presentation.checked(sections))
    return changed


def typer_app(
    command: Command,
    help_page: HelpPage,
    kind: type[Plan],
    run: Callable[[Plan], int],
    *,
    without: Container[str] = (),
    settle: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> typer.Typer:
    """Return a typer command that calls `run` with a plan. Its options are the fields of the plan except `without`.

    `settle` converts option values before the plan is created, for example those in the notation of nccl-tests.
    """
    from gpubench.cli.exclusions import resolve_exclusions
    from gpubench.model.terms.options import options_of, plan_from

    declared = {option.field: option for option in options_of(kind) if option.field not in without}

    class OwnCommand(PlanCommand):
        options = declared
        allow_interspersed_args = not command.starts_job
        page = help_page._replace(
            exit_codes=_EXIT_CODES.format(", or nothing was judged" if command.is_gate else ""),
            common=frozenset(name for name, option in declared.items() if option.is_common),
        )

    def call(context: typer.Context, **values: Any) -> None:
        defaults: Defaults | None = context.meta.get(_DEFAULTS)
        try:
            chosen: Mapping[str, Any] = resolve_exclusions(command, declared.values(), values, context)
            if defaults is not None:
                defaults = defaults.keep(name for name in defaults.by_name if chosen[name] is values[name])
            chosen = chosen if settle is None else settle(chosen)
            plan: Any = plan_from(kind, {**chosen, "command": command.name}, command.name)
            if defaults is not None:
                plan = replace(plan, presentation=defaults.note_in(plan.presentation))
            raise typer.Exit(run(plan))
        except GpubenchError as error:
            if defaults is not None:
                defaults.explain(error)
            raise

    call.__doc__ = command.summary
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    call.__signature__ = inspect.Signature([context, *map(_parameter, declared.values())])  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(command.name, cls=OwnCommand)(call)
    return app


def _parameter(option: "Option") -> inspect.Parameter:
    """Convert an option to a parameter for the signature that typer reads."""
    settings = {"metavar": option.metavar, "help": option.help, **option.settings}
    if option.is_argument:
        info: Any = typer.Argument(**settings)
    else:
        if option.completed_as:
            settings["autocompletion"] = make_completer(option.completed_as)
        info = typer.Option(*option.names.split(" "), rich_help_panel=option.group, **settings)
    default = inspect.Parameter.empty if option.default is ... else option.default
    annotation: Any = Annotated[option.typed, info]
    return inspect.Parameter(option.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def make_completer(option: str) -> Callable[[str], list[str]]:
    """Return the shell completion function for an option. `option` is its name without dashes."""

    def complete(incomplete: str) -> list[str]:
        from gpubench.cli.defaults import complete_words

        return complete_words(option, incomplete)

    return complete
