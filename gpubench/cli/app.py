"""The program: its subcommands, and the one place where errors become exit codes."""

import contextlib
import os
import sys
import time
from typing import Annotated

import typer

from gpubench import __version__
from gpubench.cli import check, explain, p2p, profiles, topo
from gpubench.cli.collective import command
from gpubench.cli.encoding import spell_out_what_cannot_be_shown
from gpubench.cli.signature import subcommand
from gpubench.collectives import COLLECTIVES
from gpubench.errors import GpubenchError
from gpubench.hardware.launch import SECONDS_FOR_THE_FIRST_RANK, launched_by

app = typer.Typer(
    name="gpubench",
    help="What the links between your GPUs should deliver, and what they deliver.\n\n"
    "Start with:  gpubench topo, then  gpubench allreduce\n\n"
    "topo shows GPUs, links, NICs and what each pair can carry. allreduce launches one rank a GPU (two CPU ranks on a "
    "machine without GPUs), measures, verifies the data and reports. "
    "Exit codes: 0 done, 1 judged and failed, 2 wrong usage, 3 could not measure.",
    add_completion=True,
    rich_markup_mode=None,  # plain help takes half the time of boxes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command_module in (topo, p2p, check, explain):
    app.command(command_module.NAME, short_help=command_module.SUMMARY)(
        subcommand(command_module.NAME, command_module.HELP, command_module.PARAMETERS, command_module.run)
    )
for each in COLLECTIVES:
    app.command(each.name, short_help=each.summary)(command(each))

app.add_typer(profiles.app, name=profiles.NAME, short_help=profiles.SUMMARY)


def _show_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(f"gpubench {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001, FBT002
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line and exit with its code; under a launcher only the first rank speaks of wrong usage."""
    spell_out_what_cannot_be_shown()
    launch = launched_by(os.environ)
    speaks = launch is None or launch.rank == 0
    with contextlib.ExitStack() as stack:
        if not speaks:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        code = _run()
    if code and not speaks:
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
    sys.exit(code)


def _run() -> int:
    try:
        app()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except GpubenchError as error:
        print(f"gpubench: error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
