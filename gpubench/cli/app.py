"""The typer application: it dispatches to subcommands, and converts errors to exit codes."""

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.completion
from typer.core import TyperCommand

from gpubench import __version__, errors
from gpubench.cli.process import COMMANDS, run_and_exit
from gpubench.cli.signature import HELP_ALL, HelpfulGroup
from gpubench.collectives.registry import SUMMARIES
from gpubench.model.facts.environment import LaunchedRank
from gpubench.model.terms.commands import BARE, Command

if TYPE_CHECKING:
    from gpubench.formats.registry import ExitStyle

HELP = """Find out why your GPUs talk slowly. gpubench shows the path that data take between GPUs, the speed they reach,
and the speed they should reach. Without a command, it checks this machine in half a minute. Without a GPU, try:

\b
  gpubench --simulate hgx-h100-8 --fault gpu5:nvlink=12
"""

EPILOG = """gpubench COMMAND --help shows the common options, gpubench COMMAND --help-all shows all options.

Variables (GPUBENCH_TIMEOUT=60) and gpubench.toml in the current folder (timeout = 60) change defaults.

Exit codes: 0 nothing failed, 1 any FAIL, 2 wrong usage, 3 could not measure, 130 interrupted.
"""

_NOT_A_COMMAND = {
    "version": "gpubench --version",
    "doctor": "gpubench check",
    "list": "gpubench profiles list",
    "links": "gpubench p2p",
    "nccl": "gpubench allreduce",
}
"""Words that users may try, and the command that does what they mean."""


_COMPLETION: Mapping[str, Any] = {
    "--show-completion": typer.completion.show_callback,
    "--install-completion": typer.completion.install_callback,
}
_SHELLS = ("bash", "zsh", "fish")
_NAME_COLUMNS = 9


class LazyCommands(HelpfulGroup):
    """The group of all subcommands. Help lists them from the table, and only the chosen command is imported."""

    flags = (
        ("-h, --help", "Show this page."),
        ("--help-all", "Show the options of gpubench without a command."),
        ("-V, --version", "Show the version."),
        ("--install-completion [SHELL]", "Install completion for your shell."),
        ("--show-completion [SHELL]", "Print the completion script."),
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {command.name: TyperCommand(command.name, short_help=command.summary) for command in COMMANDS}
        self.commands[BARE.name] = TyperCommand(BARE.name, hidden=True)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """List the commands in groups. One row has all collectives."""
        first, *others = SUMMARIES
        groups: dict[str, list[tuple[str, str]]] = {}
        for command in COMMANDS:
            if command.module != "collective":
                groups.setdefault(command.group, []).append((command.name, command.summary))
            elif command.name == first:
                groups[command.group].append((first, f"Measure all-reduce. Also: {', '.join(others)}."))
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl([(names.ljust(_NAME_COLUMNS), summary) for names, summary in records])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the flags before the subcommand. Without a subcommand, parse all arguments as options of bare
        `gpubench`.
        """
        if args[:1] == ["help"] and not ctx.resilient_parsing:
            args = [*args[1:], "--help"]
        if args[:1] and args[0] in _COMPLETION and args[1:] in [[shell] for shell in _SHELLS]:
            _COMPLETION[args[0]](ctx, None, args[1])
        own = {name for param in self.get_params(ctx) for name in param.opts} - {HELP_ALL}
        named = bool(args) and (not args[0].startswith("-") or args[0] in own)
        return super().parse_args(ctx, args if named or ctx.resilient_parsing else [BARE.name, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the subcommand that the first argument names. Return its name, the command and the remaining
        arguments.
        """
        if args[0] in _NOT_A_COMMAND and not ctx.resilient_parsing:
            raise errors.UsageError(f"No such command '{args[0]}'.", next_step=_NOT_A_COMMAND[args[0]])
        name, _, rest = super().resolve_command(ctx, args)
        chosen = next((command for command in (BARE, *COMMANDS) if command.name == name), None)
        if chosen is None:
            return name, None, rest
        return name, typer_command(chosen), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand. Raises InterruptedRunError if the user types Ctrl-C before the first output."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from gpubench.formats.delivery import interruption

            raise errors.InterruptedRunError(interruption()) from None


@cache
def typer_command(chosen: Command) -> Any:
    """Return the typer command, with its options in `params`."""
    return typer.main.get_command(import_module(f"gpubench.cli.commands.{chosen.module}").app(chosen))


app = typer.Typer(
    name="gpubench",
    help=HELP,
    epilog=EPILOG,
    cls=LazyCommands,
    add_completion=True,
    rich_markup_mode=None,  # Help with rich boxes takes twice as long
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help", HELP_ALL]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(f"gpubench {__version__}")
        raise typer.Exit


@app.callback()
def _before_command(
    version: Annotated[  # noqa: FBT002
        bool, typer.Option("--version", "-V", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Declare --version. The function does nothing, because a subcommand runs after it."""


def main() -> None:
    """Run gpubench with the arguments of this process, and exit."""
    run_and_exit(run_command_line)


def run_command_line(launch: LaunchedRank | None) -> int:
    """Run the command in `sys.argv`, and return its exit code."""
    style = _exit_style()
    try:
        if style is not None and launch is not None and launch.size > 1:
            raise errors.exit_style_under_launcher(launch.launcher)
        return app(standalone_mode=False) or 0
    except SystemExit as ended:
        # typer exits with 1 if the reader of the help page exited.
        return errors.DONE if ended.code == errors.JUDGED_AND_FAILED else int(ended.code or errors.DONE)
    except typer.TyperException as error:
        # Refer to the help page of the command that raised the error.
        path = getattr(getattr(error, "ctx", None), "command_path", None)
        named = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
        page = (path or f"{app.info.name} {named}").strip()
        option = getattr(error, "option_name", "")
        step = f"{page} --help" if named or not _needs_check(option) else f"{app.info.name} check {option}"
        step = "gpubench check --simulate hgx-h100-8" if option == "--simulate" else step
        return _tell(errors.UsageError(error.format_message(), next_step=step), style)
    except errors.GpubenchError as error:
        return _tell(error, style)
    except BrokenPipeError:
        return _output_ended(None, style)
    except errors.OutputError as error:
        return _output_ended(error, style)


def _needs_check(option: str) -> bool:
    from gpubench.cli.commands.diagnose import NOT_BARE

    return option.removeprefix("--").replace("-", "_") in NOT_BARE


def _output_ended(error: errors.OutputError | None, style: "ExitStyle | None") -> int:
    """Return the exit code if help or a list cannot be written. `error` is None if the reader of stdout exited."""
    from gpubench.formats.delivery import forget, full_output

    if error is not None:
        return _tell(full_output(error), style)
    forget(sys.stdout)
    return errors.DONE


def _exit_style() -> "ExitStyle | None":
    """Return the --exit-style in `sys.argv`, even if other arguments cannot be parsed.

    The arguments of the job of `gpubench run` do not count. Only `--` shows where they begin.
    """
    end = sys.argv.index("--") if "--" in sys.argv else 1 if sys.argv[1:2] == ["run"] else None
    own = sys.argv[1:end]
    if not any("exit-style" in argument for argument in own):
        return None
    from gpubench.formats.registry import EXIT_STYLE, ExitStyle

    for argument, following in pairwise([*own, ""]):
        name, _, value = argument.partition("=")
        if name == EXIT_STYLE and (value or following) in tuple(ExitStyle):
            return ExitStyle(value or following)
    return None


def _default_exit_style() -> "ExitStyle | None":
    from gpubench.cli.defaults import asked_by_default
    from gpubench.formats.registry import ExitStyle

    named = any(command.name in sys.argv[1:2] and command.writes_reports for command in COMMANDS)
    text = asked_by_default("exit-style", sys.argv[1]) if named else None
    return ExitStyle(text) if text in tuple(ExitStyle) else None


def _tell(error: errors.GpubenchError, style: "ExitStyle | None") -> int:
    from gpubench.formats.delivery import tell

    tell(error, sys.stderr)
    style = style or _default_exit_style()
    if style is None:
        return error.exit_code
    from gpubench.formats.status_line import line_without_report
    from gpubench.model.terms.verdict import Verdict

    verdict = Verdict.FAIL if error.exit_code == errors.JUDGED_AND_FAILED else Verdict.ERROR
    print(line_without_report(style, verdict, error.seen, drains=error.blames_node), end="")  # noqa: T201
    return style.code(verdict, drains=error.blames_node)
