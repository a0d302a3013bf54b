"""The table of commands, and the process that runs one: its streams, launcher and exit code."""

import codecs
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable

from gpubench.collectives.registry import SUMMARIES
from gpubench.errors import CouldNotMeasureError, UsageError, name_output, no_working_folder
from gpubench.model.facts.environment import (
    PLAN_VARIABLE,
    SECONDS_FOR_THE_FIRST_RANK,
    TORCHRUN,
    TORCHRUN_VARIABLES,
    LaunchedRank,
    detect_launcher,
)
from gpubench.model.terms.commands import AFTER_COLLECTIVES, BEFORE_COLLECTIVES, COLLECTIVE

_HANDLER = "gpubench"
_SPELLED = str.maketrans(
    {"×": "x", "±": "+-", "µ": "u", "→": "->", "…": "...", "✓": "+", "✗": "!", "│": "|", "├": "|", "└": "`"}
    | dict.fromkeys("─━╸╺–", "-")
    | dict.fromkeys("✅❌⚠🟣⏭\ufe0f", "")
)


class _Stdout(io.TextIOWrapper):
    """stdout whose write errors carry its name, to tell them from errors of other files."""

    def write(self, text: str, /) -> int:
        """Write; OutputError where the disk is full, BrokenPipeError where the reader is gone."""
        with name_output("stdout"):
            return super().write(text)

    def flush(self) -> None:
        with name_output("stdout"):
            super().flush()


def _prepare_streams() -> None:
    """Open closed streams on /dev/null, name the errors of stdout, and spell out characters that stdout cannot encode.

    A shell's `>&-` closes a stream. Its number would be given to the next file that is opened, which then gets what
    this process, or one that it starts, prints; Python itself has None in its place, and prints elsewhere.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)  # noqa: FBT003
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    codecs.register_error(_HANDLER, _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
    if isinstance(sys.stdout, io.TextIOWrapper):
        line_buffering, encoding = sys.stdout.line_buffering, sys.stdout.encoding
        sys.stdout = _Stdout(open(1, "wb", closefd=False), encoding, _HANDLER, line_buffering=line_buffering)  # noqa: SIM115


def showable(text: str) -> str:
    """Spell out characters that stdout cannot encode. typer prints help past the stream's error handler."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_SPELLED)
    return text


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    spelled = error.object[error.start : error.end].translate(_SPELLED)
    return spelled.encode("ascii", "replace").decode("ascii"), error.end


PREFIX = "GPUBENCH_"
OWN_FILE = "gpubench.toml"
PROJECT_FILE = "pyproject.toml"
DEFAULTS_FILES = (OWN_FILE, PROJECT_FILE)
"""The first of them that says something of gpubench is read for defaults of options, and no other."""

_OWN_FAULT = "gpubench itself failed, as shown above; this says nothing about the machine"


def run_and_exit(run: Callable[[LaunchedRank | None], int]) -> None:
    """Run, and exit with the code; under a launcher only the first rank reports wrong usage."""
    _prepare_streams()
    launch = _own_launch()
    speaks = launch is None or launch.rank == 0 or launch.rank >= launch.size
    with contextlib.ExitStack() as stack:
        if not speaks:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        code = _ended(run, launch)
    if code and not speaks:
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
    sys.exit(code)


def _ended(run: Callable[[LaunchedRank | None], int], launch: LaunchedRank | None) -> int:
    """Return the exit code of a run; an unexpected exception counts as CouldNotMeasureError."""
    try:
        return run(launch)
    except Exception as error:  # noqa: BLE001 - Python's own exit code for it, 1, would read as a judgement
        import traceback

        from gpubench.formats.delivery import tell

        if isinstance(error, FileNotFoundError) and _is_folder_gone():
            gone = no_working_folder()
            tell(gone, sys.stderr)
            return gone.exit_code
        with contextlib.suppress(OSError):
            traceback.print_exc()
        fault = CouldNotMeasureError(_OWN_FAULT)
        tell(fault, sys.stderr)
        return fault.exit_code


def _is_folder_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return True
    return False


def _own_launch() -> LaunchedRank | None:
    """The launcher of this rank; None for a command whose ranks do not use the variables of torchrun.

    Where that command starts none either, this process is one alone: in it, and in what it starts, those variables are
    taken away.
    """
    try:
        launch = detect_launcher(os.environ)
    except UsageError:  # one of torchrun's variables is no number: a command that starts ranks says so
        launch = LaunchedRank(TORCHRUN, 0, 1)
    if launch is None or launch.launcher != TORCHRUN:
        return launch
    from gpubench.model.terms.commands import UnderTorchrun

    under = next(
        (command.under_torchrun for command in COMMANDS if command.name in sys.argv[1:2]), UnderTorchrun.REFUSED
    )
    if under is UnderTorchrun.ALONE:
        for name in TORCHRUN_VARIABLES:
            del os.environ[name]
    return launch if under is UnderTorchrun.RANKS else None


def run_launched(launch: LaunchedRank) -> int:
    """Be a rank that gpubench launched: its parent has read the command line and hands on the values."""
    import json
    from importlib import import_module

    typed = json.loads(os.environ[PLAN_VARIABLE])
    module = next(command.ranks for command in COMMANDS if command.name == typed["command"])
    code: int = import_module(module).run_launched(typed, launch)
    return code


def may_have_defaults() -> bool:
    """True if a variable or a file may have defaults of options."""
    return any(name.startswith(PREFIX) for name in os.environ) or any(map(os.path.exists, DEFAULTS_FILES))


COMMANDS = (
    *BEFORE_COLLECTIVES,
    *(COLLECTIVE._replace(name=name, summary=summary) for name, summary in SUMMARIES.items()),
    *AFTER_COLLECTIVES,
)
