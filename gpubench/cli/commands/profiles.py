"""`gpubench profiles`: list, show, match, check and learn the profiles of healthy machines."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.signature import HelpfulCommand, HelpfulGroup, make_completer
from gpubench.errors import invalid_choice, no_gpu, unwritable_output
from gpubench.formats.delivery import say
from gpubench.model.terms.commands import Command
from gpubench.model.terms.units import format_size, group_by, plural

if TYPE_CHECKING:
    from gpubench.model.profiles.profile import Expected, Profile

HELP = """
Your own profiles come before those of gpubench. They are files in GPUBENCH_PROFILES, otherwise in
$XDG_CONFIG_HOME/gpubench/profiles. For any other file, use check --profile FILE.

Examples:

\b
  gpubench profiles list
  gpubench profiles show hgx-h100-8
  gpubench check -o node1.json
  gpubench profiles learn node1.json --name rack-7 -o rack-7.toml
"""

_app = typer.Typer(
    cls=HelpfulGroup,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


_NAMED = Annotated[
    str,
    typer.Argument(metavar="NAME|FILE", help="Name of a profile, or a file.", autocompletion=make_completer("profile")),
]
_FILES = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE", help="Files to check (default: all profiles of gpubench, and your own)."),
]
_VERBOSE = Annotated[bool, typer.Option("--verbose", "-v", help="Show how each value was found.")]
_TIMEOUT = Annotated[
    float,
    typer.Option("--timeout", metavar="S", min=0.1, help="Give up if the driver does not answer within S seconds."),
]
_SIMULATE = Annotated[
    str | None,
    typer.Option(
        "--simulate", metavar="MACHINE", help="Match a simulated machine, e.g. hgx-h200-4.", show_default=False
    ),
]


@_app.callback()
def _list_if_no_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(*context.get_help().splitlines())


@_app.command("list", cls=HelpfulCommand)
def list_profiles() -> None:
    """List all profiles with their GPUs and their number of values."""
    from gpubench.formats.layout import Column, described_lines
    from gpubench.formats.presenter import adapt_to_stream
    from gpubench.formats.registry import Presentation
    from gpubench.profiles import all_profiles, user_folder, user_profiles

    own = user_profiles(os.environ)
    rows = [*(("yours: ", profile) for profile in own), *(("", profile) for profile in all_profiles())]
    columns = [
        Column("name", lambda row: row[1].name),
        Column("GPUs", lambda row: _gpus(row[1])),
        Column("values", lambda row: _kinds(row[1])),
        Column("machine", lambda row: f"{row[0]}{row[1].title}"),
    ]
    say(*described_lines(columns, rows, adapt_to_stream(Presentation(), sys.stdout).columns))
    if not own:
        say(f"you have no profiles in {user_folder(os.environ)}", to=sys.stderr)


@_app.command("show", cls=HelpfulCommand)
def show(name: _NAMED, verbose: _VERBOSE = False) -> None:  # noqa: FBT002
    """Show the machine, the expected values and the sources of a profile."""
    from gpubench.formats.layout import wrapped
    from gpubench.formats.presenter import adapt_to_stream
    from gpubench.formats.registry import Presentation
    from gpubench.profiles import find

    width = adapt_to_stream(Presentation(), sys.stdout).columns
    for line in _described(find(name, os.environ), verbose=verbose):
        say(*wrapped(line, width, " " * (len(line) - len(line.lstrip()) + 4)))


@_app.command("match", cls=HelpfulCommand)
def match_machine(simulate: _SIMULATE = None, timeout: _TIMEOUT = 20.0) -> None:
    """Find the profile that matches this machine (exit 3 without a GPU)."""
    from gpubench.jobs.sources import choose_source, parse_simulation
    from gpubench.profiles import match_node

    simulation = None if simulate is None else parse_simulation(simulate, (), 0)
    node = choose_source(timeout, simulation=simulation).machines().nodes[0]
    snapshot, found = node.snapshot, match_node(node, os.environ)
    if found is None:
        raise no_gpu(snapshot.driver.absent or "the driver lists none on this host", for_what="profiles")
    say(f"{found}  {found.profile.title}")
    if found.profile.match.generic is not None:
        say(
            f"no profile has {', '.join(sorted({str(gpu.name) for gpu in snapshot.gpus}))}, so this machine is "
            "judged by its siblings and limits. Try: gpubench profiles learn --help",
            to=sys.stderr,
        )


@_app.command("lint", cls=HelpfulCommand)
def lint(files: _FILES = None) -> None:
    """Check the values in profiles (exit 2 at the first error)."""
    from gpubench.collectives.registry import SUMMARIES
    from gpubench.profiles import all_profiles, read_file, user_profiles

    checked = [read_file(path) for path in files] if files else [*all_profiles(), *user_profiles(os.environ)]
    for profile in checked:
        for value in profile.all_expected:
            name, _, quantity = value.quantity.partition(".")
            if quantity in ("time_us", "busbw_gb_s") and name not in SUMMARIES:
                raise invalid_choice("collective", name, tuple(SUMMARIES))
        say(f"{profile.name}: {len(profile.all_expected)} values, no errors")


@_app.command("learn", cls=HelpfulCommand)
def learn(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT", help="JSON results of gpubench from healthy machines.")
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the new profile (required).")],
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="NAME|FILE", help="Profile to copy the machine from (default: the one that matches)."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write (default: stdout).", show_default=False),
    ] = None,
) -> None:
    """Write a profile from the results of healthy machines.

    Each value is a median, with the spread over runs and equal devices. Outliers are printed and ignored.
    """
    from gpubench.jobs.compare import learned

    text, notes = learned(results, name=name, like=like, environment=os.environ)
    for note in notes:
        say(f"gpubench: {note}", to=sys.stderr)
    if output is None:
        say(*text.rstrip("\n").split("\n"))
        return
    _write_whole(output, text)


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically. Raises UsageError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise unwritable_output(path, error) from error


def _gpus(profile: "Profile") -> str:
    return "any" if profile.match.generic is not None else plural(profile.match.visible, "GPU")


def _kinds(profile: "Profile") -> str:
    values = profile.all_expected
    measured = sum(value.kind.value == "measured" for value in values)
    return f"{len(values)} ({measured} measured)" if measured else str(len(values) or "none")


def _described(profile: "Profile", *, verbose: bool) -> Iterator[str]:
    yield f"{profile.name}  {profile.title}  (sha256 {profile.sha256})"
    if profile.note:
        yield f"  {profile.note}"
    if profile.match.visible:
        yield f"  GPUs: {profile.match.visible} x {' or '.join(profile.match.gpus)}"
        link = f"PCIe {profile.gpu.pcie_generation} x{profile.gpu.pcie_width}"
        yield f"  to the host: {link if not profile.gpu.c2c_gb_s else 'NVLink-C2C'}, {profile.gpu.host_gb_s:g} GB/s"
    if profile.nvlink is not None:
        links = f"{profile.nvlink.links} per GPU to {profile.nvlink.to}"
        yield f"  {profile.nvlink.label}: {links}, {profile.link_gb_s:g} GB/s"
    yield f"  machine: {profile.facts.kind}: {profile.facts.source}"
    for (kind, source), values in group_by(profile.all_expected, lambda value: (value.kind, value.source)).items():
        yield ""
        yield f"{kind}, {source}: {profile.sources[source]}"
        for value in values:
            yield f"  {value.quantity:<26} {value.value:>7g}  {_where(value)}".rstrip()
            if verbose and value.note:
                yield f"      {value.note}"


def _where(expected: "Expected") -> str:
    """Return the conditions of an expected value, for example 'size 4G, algorithm RING'."""
    keys = {
        "GPUs": expected.gpus,
        "nodes": expected.nodes if expected.nodes > 1 else None,
        "path": expected.path,
        "size": None if expected.size_bytes is None else format_size(expected.size_bytes),
        "NCCL": expected.nccl,
        "algorithm": expected.algorithm,
    }
    return ", ".join(f"{key} {value}" for key, value in keys.items() if value is not None)


def app(command: Command) -> typer.Typer:
    _app.info.name, _app.info.help = command.name, f"{command.summary}\n{HELP}"
    return _app
